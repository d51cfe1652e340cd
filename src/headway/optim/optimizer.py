"""The optimizer's part of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from headway.core.epochs import Epochs
from headway.core.recipe import RecipePart
from headway.optim import pace
from headway.optim.groups import GroupRecipe
from headway.optim.options import refuse_unused, without_unused
from headway.optim.pace import Pace, Warmup
from headway.optim.rate import Scalable

USERS = {
    "momentum": ("sgd", "nag", "lars", "lbsgd", "muon", "rmsprop_sgd", "signum"),
    "betas": ("adam", "adamw", "ftml", "lamb", "novograd"),
    "eps": ("adam", "adamw", "ftml", "lamb", "lars", "novograd", "rmsprop_sgd"),
    "decoupled_decay": ("signum",),
    "eta": ("lars",),
    "lr_place": ("lars",),
    "clip": ("lars",),
    "nesterov": ("lars", "muon"),
    "averaging": ("novograd",),
    "lr_rmsprop": ("rmsprop_sgd",),
    "smoothing": ("rmsprop_sgd",),
    "center_epochs": ("rmsprop_sgd",),
    "period_epochs": ("rmsprop_sgd",),
    "batch_scale": ("lbsgd",),
    "warmup": ("lbsgd",),
    "warmup_epochs": ("lbsgd",),
    "lr_rest": ("muon",),
    "momentum_rest": ("muon",),
    "rounds": ("muon",),
    "normalise": ("muon",),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "ftml": {"betas": (0.6, 0.999)},
    "lamb": {"eps": 1e-6, "no_decay": True},
    "lars": {"eps": 0.0, "no_decay": True},
    "lbsgd": {"no_decay": True},
    "muon": {"momentum": 0.95, "nesterov": True},
    "novograd": {"betas": (0.95, 0.98), "no_decay": True},
}
"""Where an optimizer's differ from the fields' own."""

LAYER_WISE = ("lars", "lamb", "novograd", "muon")
"""Optimizers whose steps are scaled for each layer apart; `lbsgd` does so with `warmup: lars` alone."""
EPOCHS = ("center_epochs", "period_epochs", "warmup_epochs")
"""Fields that are moments of the run or stretches of it."""

Share = Annotated[float, Field(ge=0, lt=1)]


class LookaheadRecipe(RecipePart):
    """Every few steps, slow weights go a share of the way to the newest, and training goes on from there; evaluated and
    saved are the slow ones (Zhang et al. 2019, "Lookahead Optimizer", arXiv 1907.08610)."""

    every_steps: int = Field(default=5, ge=1)
    """The paper's k."""
    alpha: float = Field(default=0.5, gt=0, le=1)
    """Share of the way."""
    power: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """0: the share is always alpha. Above: 1 - (1 - alpha) * (share of the run that is done) ** power, so that nothing
    is held back at first (airbench94: every_steps 5, alpha 0.226, power 3)."""


class OptimizerRecipe(RecipePart):
    """How gradients become steps."""

    name: Literal[
        "sgd", "nag", "adam", "adamw", "lars", "lamb", "novograd", "signum", "ftml", "lbsgd", "rmsprop_sgd", "muon"
    ]
    """`sgd`, `nag` (SGD with Nesterov's momentum), `adam`, `adamw` (weight decay apart from the gradient), or one for
    large batches; see [Optimizers](library/optimizers.md)."""
    lr: Scalable
    """Learning rate; the schedule gives its factor. Or {base, per, scale}, which follows the batch; see below."""
    momentum: Share = 0.9
    """Share of the last step that the next one keeps (`muon`: 0.95)."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Shares of the running first and second moments that a step keeps (`novograd`: 0.95, 0.98; `ftml`: 0.6, 0.999)."""
    eps: float = Field(default=1e-8, ge=0, allow_inf_nan=False)
    """Added to the root of the second moment (`lamb`: 1e-6); of `lars`, to what the trust ratio is divided by (0)."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Added to the gradient as weight_decay * weight, or (`adamw`, `lamb`, `novograd`, `muon`) to the update."""
    decoupled_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Of `signum`: taken off the weight, times lr."""
    no_decay: bool = False
    """No weight decay on parameters of one dimension: bias, beta, gamma (`lars`, `lamb`, `lbsgd`, `novograd`: true)."""
    eta: float = Field(default=0.001, gt=0, allow_inf_nan=False)
    """Of `lars`: the trust coefficient."""
    lr_place: Literal["inside", "outside"] = "inside"
    """Of `lars`: the learning rate acts on what goes into the momentum buffer, as in MLPerf, or on what comes out."""
    clip: bool = False
    """Of `lars`: no layer's rate is above lr (LARC; eta is then usually 0.02)."""
    nesterov: bool = False
    """Of `lars` and `muon` (true): the step looks ahead by one more step of the momentum."""
    averaging: bool = False
    """Of `novograd`: what is added to the first moment is taken times 1 - beta1."""
    lr_rmsprop: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    """Of `rmsprop_sgd`: learning rate at the beginning, of RMSprop, where the schedule's factor is 1."""
    smoothing: Share = 0.99
    """Of `rmsprop_sgd`: share of the running second moment that one step keeps."""
    center_epochs: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """Of `rmsprop_sgd`: when SGD has come to one half. Epochs of steps of the first batch."""
    period_epochs: Epochs = 5.0
    """Of `rmsprop_sgd`: how long the transition takes; it ends half a period after its centre."""
    batch_scale: int = Field(default=1, ge=1)
    """Of `lbsgd`: so many steps make a macro-batch, after which weights move once, at up to batch_scale * lr. Steps at
    the end of the run that fill no macro-batch move nothing."""
    warmup: Warmup = "linear"
    """Of `lbsgd`: how the rate rises from lr to batch_scale * lr; `lars`: a rate for each layer instead."""
    warmup_epochs: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    """Of `lbsgd`: for how long. Epochs of steps of the first batch."""
    lr_rest: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of `muon`: learning rate of all that is no convolution filter, which SGD takes; unset: `lr`."""
    momentum_rest: Share = 0.9
    """Of `muon`: momentum of that SGD."""
    rounds: int = Field(default=5, ge=1)
    """Of `muon`: of the Newton-Schulz iteration."""
    normalise: bool = False
    """Of `muon`: bring filters to a fixed norm before each step; for networks with batch norm after each of them."""
    groups: tuple[GroupRecipe, ...] = ()
    """Parameter groups; unset: one group of all. Where there are groups, every trained parameter must be in one."""
    clip_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Gradients are scaled down to this norm, over all parameters together, where theirs is greater."""
    lookahead: LookaheadRecipe | None = None
    """Slow weights beside any of the optimizers; see below."""
    gradient_noise: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Each sample's gradient is multiplied by z ~ N(1, sigma^2) with sigma = gradient_noise * sqrt(batch), so that a
    large batch fluctuates as a small one (Hoffer et al. 2017, arXiv 1705.08741). 1 / sqrt(small batch) suits."""

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and isinstance(name := values.get("name"), str):
            return {**DEFAULTS.get(name, {}), **values}
        return values

    @model_validator(mode="after")
    def _fits(self) -> OptimizerRecipe:
        refuse_unused(self, self.name, USERS)
        if self.name == "nag" and self.momentum == 0:
            raise ValueError("'nag' needs a momentum above 0. Set momentum: 0.9, or name: sgd")
        if self.nesterov and self.momentum == 0:
            fix = f"Set momentum: {DEFAULTS[self.name].get('momentum', 0.9):g}, or nesterov: false"
            raise ValueError(f"{self.name!r} with nesterov needs a momentum above 0. {fix}")
        if self.eps == 0 and self.name in USERS["eps"] and self.name not in ("lars", "novograd"):
            raise ValueError(f"{self.name!r} divides by zero with eps: 0. Set eps: 1e-8")
        return self

    @property
    def layer_wise(self) -> bool:
        """Whether each layer has a rate of its own."""
        return self.name in LAYER_WISE or (self.name == "lbsgd" and self.warmup == "lars")

    @property
    def moves(self) -> bool:
        """Whether the optimizer moves the learning rate by itself, whatever the schedule does."""
        return self.name == "rmsprop_sgd" or (self.name == "lbsgd" and self.batch_scale > 1 and self.warmup != "lars")

    @property
    def epochs(self) -> dict[str, float]:
        """Moments of the run, and stretches of it, that the optimizer counts by itself, by their fields."""
        return {field: getattr(self, field) for field in EPOCHS if self.name in USERS[field]}

    @property
    def settled_epochs(self) -> tuple[float, str]:
        """(when the learning rate no longer moves by itself, the fields that say so); 0: it never does."""
        if not self.moves:
            return 0.0, ""
        if self.name == "lbsgd":
            return self.warmup_epochs, "optimizer.warmup_epochs"
        return self.center_epochs + self.period_epochs / 2, "optimizer.center_epochs + optimizer.period_epochs / 2"

    def pace(self, steps_per_epoch: float) -> Pace:
        """What the optimizer makes of learning rate and batch by itself.

        Args:
            steps_per_epoch: samples / batch.
        """
        if self.name == "lbsgd":
            return pace.lbsgd(self.batch_scale, self.warmup, self.warmup_epochs * steps_per_epoch)
        if self.name == "rmsprop_sgd":
            center, period = self.center_epochs * steps_per_epoch, self.period_epochs * steps_per_epoch
            return pace.rmsprop_sgd(self.lr_rmsprop, center, period)
        return Pace()

    @model_serializer(mode="wrap")
    def _used(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_unused(handler(self), self.name, USERS)
