"""The `optimizer` part of a recipe: one class for each optimizer, with its own keys.

To add an optimizer, write its class in a file of its own, add a recipe class here with the same names and defaults, and
list it in `AnyOptimizerRecipe`. Nothing here imports torch before `make`: a recipe is validated without it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from headway.core.epochs import Epochs
from headway.core.errors import RecipeError
from headway.core.recipe import RecipePart, validate_part
from headway.optim.groups import Group
from headway.optim.internal_schedule import (
    InternalSchedule,
    LbsgdWarmup,
    build_lbsgd_schedule,
    build_rmsprop_sgd_schedule,
)
from headway.optim.own_optimizer import OwnOptimizerRecipe
from headway.optim.recipe_base import Fraction, NotNegative, OptimizerRecipe, Positive

# Optimizers of torch itself. Their step is fused: one kernel for all parameters, and no host-device sync. With a state
# in bf16 they are LARS and LAMB without trust ratios, which make the same steps.
_PLAIN: dict[str, Any] = {"trust": None, "lr_in_momentum": False}


class SGDRecipe(OptimizerRecipe):
    """SGD with momentum."""

    CLASS: ClassVar[str] = "headway.optim.sgd:build_sgd"
    BF16_CLASS: ClassVar[str] = "headway.optim.lars:LARS"
    BF16_OPTIONS: ClassVar[dict[str, Any]] = _PLAIN

    name: Literal["sgd"] = "sgd"
    momentum: Fraction = 0.9
    """Momentum factor: the fraction of the momentum buffer that each step keeps."""


class NAGRecipe(OptimizerRecipe):
    """SGD with Nesterov's momentum."""

    CLASS: ClassVar[str] = "headway.optim.sgd:build_sgd"
    OPTIONS: ClassVar[dict[str, Any]] = {"nesterov": True}
    BF16_CLASS: ClassVar[str] = "headway.optim.lars:LARS"
    BF16_OPTIONS: ClassVar[dict[str, Any]] = {**_PLAIN, **OPTIONS}

    name: Literal["nag"] = "nag"
    momentum: Fraction = 0.9
    """Momentum factor: the fraction of the momentum buffer that each step keeps."""

    @model_validator(mode="after")
    def _check_momentum(self) -> NAGRecipe:
        # Nesterov's momentum without momentum would be SGD.
        if self.momentum == 0:
            raise ValueError("'nag' needs a momentum above 0. Set momentum: 0.9, or name: sgd")
        return self


class AdamRecipe(OptimizerRecipe):
    """Adam."""

    CLASS: ClassVar[str] = "headway.optim.eager_optimizer:Adam"
    OPTIONS: ClassVar[dict[str, Any]] = {"fused": True}

    name: Literal["adam"] = "adam"
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decays of the running first and second moments: the fractions that each step keeps."""
    eps: Positive = 1e-8
    """Added to the denominator, the root of the second moment."""

    @model_validator(mode="after")
    def _check_precision(self) -> AdamRecipe:
        # Its decay goes through both moments, which none of Headway's own optimizers does.
        if self.precision == "bf16":
            raise ValueError("'adam' has no state in bf16. Set name: adamw, or precision: fp32")
        return self


class AdamWRecipe(OptimizerRecipe):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017)."""

    CLASS: ClassVar[str] = "headway.optim.eager_optimizer:AdamW"
    OPTIONS: ClassVar[dict[str, Any]] = {"fused": True}
    BF16_CLASS: ClassVar[str] = "headway.optim.lamb:LAMB"
    BF16_OPTIONS: ClassVar[dict[str, Any]] = {"layerwise": False}

    name: Literal["adamw"] = "adamw"
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decays of the running first and second moments: the fractions that each step keeps."""
    eps: Positive = 1e-8
    """Added to the denominator, the root of the second moment."""


# Optimizers of Headway, most of them for large batches. `no_decay` is on for those that scale layers separately: the
# norm of a bias says nothing about a good size of its step.


class LARSRecipe(OptimizerRecipe):
    """Layer-wise learning rates for large batches (You et al. 2017)."""

    CLASS: ClassVar[str] = "headway.optim.lars:LARS"

    name: Literal["lars"] = "lars"
    momentum: Fraction = 0.9
    """Momentum factor: the fraction of the momentum buffer that each step keeps."""
    trust: Positive = 0.001
    """Trust coefficient: factor on norm(weights) / norm(gradient) in each layer's learning rate; eta in the papers."""
    eps: NotNegative = 0.0
    """Added to the divisor of the trust ratio."""
    lr_in_momentum: bool = True
    """Apply the learning rate to the input of the momentum buffer, as in MLPerf. False: to its output."""
    clip: bool = False
    """Limit each layer's learning rate to `lr` (LARC; trust is then usually 0.02)."""
    nesterov: bool = False
    """Use Nesterov's momentum."""
    no_decay: bool = True

    @model_validator(mode="after")
    def _check_momentum(self) -> LARSRecipe:
        _refuse_nesterov_without_momentum(self.name, self.nesterov, self.momentum, default=0.9)
        return self

    @property
    def is_layer_wise(self) -> bool:
        return True


class LAMBRecipe(OptimizerRecipe):
    """Adam's update with layer-wise learning rates (You et al. 2019)."""

    CLASS: ClassVar[str] = "headway.optim.lamb:LAMB"

    name: Literal["lamb"] = "lamb"
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decays of the running first and second moments: the fractions that each step keeps."""
    eps: Positive = 1e-6
    """Added to the denominator, the root of the second moment."""
    no_decay: bool = True

    @property
    def is_layer_wise(self) -> bool:
        return True


class NovoGradRecipe(OptimizerRecipe):
    """Gradients normalised layer by layer (Ginsburg et al. 2019)."""

    CLASS: ClassVar[str] = "headway.optim.novograd:NovoGrad"

    name: Literal["novograd"] = "novograd"
    betas: tuple[Fraction, Fraction] = (0.95, 0.98)
    """Decays of the running first and second moments: the fractions that each step keeps."""
    # With eps 0, a second moment of 0 gives a learning rate of 0.
    eps: NotNegative = 1e-8
    """Added to the denominator, the root of the second moment."""
    averaging: bool = False
    """Multiply the new term of the first moment by 1 - beta1."""
    no_decay: bool = True

    @property
    def is_layer_wise(self) -> bool:
        return True


class SignumRecipe(OptimizerRecipe):
    """Steps along the sign of the momentum (Bernstein et al. 2018).

    `weight_decay` is added to the gradient, of which only the sign counts; `decoupled_decay` acts on the weight itself.
    """

    CLASS: ClassVar[str] = "headway.optim.signum:Signum"

    name: Literal["signum"] = "signum"
    momentum: Fraction = 0.9
    """Momentum factor: the fraction of the momentum buffer that each step keeps."""
    decoupled_decay: NotNegative = 0.0
    """Decoupled weight decay: the weight is reduced by lr * decoupled_decay of itself."""


class FTMLRecipe(OptimizerRecipe):
    """Follow the moving leader (Zheng and Kwok 2017)."""

    CLASS: ClassVar[str] = "headway.optim.ftml:FTML"

    name: Literal["ftml"] = "ftml"
    betas: tuple[Fraction, Fraction] = (0.6, 0.999)
    """Decays of the running first and second moments: the fractions that each step keeps."""
    eps: Positive = 1e-8
    """Added to the denominator, the root of the second moment."""


# The next two count in epochs, so they need the number of steps in one.


class LBSGDRecipe(OptimizerRecipe):
    """SGD for large batches, as MXNet's optimizer of that name: macro-batches and a warm-up."""

    CLASS: ClassVar[str] = "headway.optim.lbsgd:LBSGD"
    EPOCH_FIELDS: ClassVar[tuple[str, ...]] = ("warmup_epochs",)

    name: Literal["lbsgd"] = "lbsgd"
    momentum: Fraction = 0.9
    """Momentum factor: the fraction of the momentum buffer that each step keeps."""
    batch_scale: int = Field(default=1, ge=1)
    """Number of steps in a macro-batch. The weights are updated once per macro-batch, at up to batch_scale * lr. Steps
    at the end of the run that fill no macro-batch have no effect."""
    warmup: LbsgdWarmup = "linear"
    """Shape of the warm-up from lr to batch_scale * lr. `lars`: a learning rate for each layer instead."""
    warmup_epochs: NotNegative = 5.0
    """Length of the warm-up in epochs. An epoch counts as its number of steps at the initial batch."""
    no_decay: bool = True

    @property
    def is_layer_wise(self) -> bool:
        # Only this warm-up has a rate for each layer.
        return self.warmup == "lars"

    @property
    def changes_lr(self) -> bool:
        # A macro-batch of one step has nothing to rise to.
        return self.batch_scale > 1 and self.warmup != "lars"

    @property
    def steps_per_update(self) -> int:
        return self.batch_scale

    @property
    def settled_epochs(self) -> tuple[float, str]:
        return (self.warmup_epochs, "optimizer.warmup_epochs") if self.changes_lr else (0.0, "")

    def build_internal_schedule(self, steps_per_epoch: float) -> InternalSchedule:
        return build_lbsgd_schedule(self.batch_scale, self.warmup, self.warmup_epochs * steps_per_epoch)


class RMSpropSGDRecipe(OptimizerRecipe):
    """A smooth transition from RMSprop to SGD (Akiba et al. 2017)."""

    CLASS: ClassVar[str] = "headway.optim.rmsprop_sgd:RMSpropSGD"
    EPOCH_FIELDS: ClassVar[tuple[str, ...]] = ("center_epochs", "period_epochs")

    name: Literal["rmsprop_sgd"] = "rmsprop_sgd"
    momentum: Fraction = 0.9
    """Momentum factor: the fraction of the momentum buffer that each step keeps."""
    eps: Positive = 1e-8
    """Added to the denominator, the root of the second moment."""
    lr_rmsprop: Positive = 3e-4
    """Learning rate of RMSprop at the beginning. The schedule's factor applies to it too."""
    smoothing: Fraction = 0.99
    """Coefficient of the running average of the squared gradient."""
    center_epochs: NotNegative = 10.0
    """Epoch at which SGD has half of the weight. An epoch counts as its number of steps at the initial batch."""
    period_epochs: Epochs = 5.0
    """Length of the transition in epochs. It ends half a period after `center_epochs`."""

    def build_options(self, lr: float) -> dict[str, Any]:
        """Returns the ratio of both rates instead of RMSprop's, so that the schedule scales them together."""
        options = super().build_options(lr)
        options["rmsprop"] = options.pop("lr_rmsprop") / lr
        return options

    @property
    def changes_lr(self) -> bool:
        return True

    @property
    def settled_epochs(self) -> tuple[float, str]:
        # The ELU curve reaches 1, SGD alone, half a period after its centre.
        return self.center_epochs + self.period_epochs / 2, "optimizer.center_epochs + optimizer.period_epochs / 2"

    def build_internal_schedule(self, steps_per_epoch: float) -> InternalSchedule:
        return build_rmsprop_sgd_schedule(
            self.lr_rmsprop, self.center_epochs * steps_per_epoch, self.period_epochs * steps_per_epoch
        )


class MuonRecipe(OptimizerRecipe):
    """Muon for convolution filters (momentum with equal singular values), SGD for the rest (Jordan et al. 2024)."""

    CLASS: ClassVar[str] = "headway.optim.muon:Muon"

    name: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    """Momentum factor: the fraction of the momentum buffer that each step keeps."""
    nesterov: bool = True
    """Use Nesterov's momentum, also in the SGD of the other parameters."""
    lr_rest: Positive | None = None
    """Learning rate of SGD for all parameters that are not convolution filters. Unset: `lr`."""
    momentum_rest: Fraction = 0.9
    """Momentum of SGD for these other parameters."""
    ns_steps: int = Field(default=4, ge=1)
    """Number of Newton-Schulz iterations in a step."""
    ns_precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the iteration. `auto`: bf16 on GPUs from compute capability 8.0 on and on CPUs with AMX."""
    normalise: bool = False
    """Scale filters to a fixed norm before each step. For networks with a batch norm after each convolution."""

    @model_validator(mode="after")
    def _check_momentum(self) -> MuonRecipe:
        _refuse_nesterov_without_momentum(self.name, self.nesterov, self.momentum, default=0.95)
        return self

    def build_options(self, lr: float) -> dict[str, Any]:
        """Leaves out the keys of the SGD, which are in its parameter groups."""
        options = super().build_options(lr)
        return {name: value for name, value in options.items() if name not in ("lr_rest", "momentum_rest")}

    def split_group(self, group: Group, lr: float) -> list[Group]:
        """Splits a group into convolution filters, which Muon steps, and the rest, which SGD steps; none is empty."""
        # A matrix such as the last layer trains worse with Muon, so only three dimensions or more count as a filter.
        filters = [p for p in group["params"] if p.ndim > 2]
        others = [p for p in group["params"] if p.ndim <= 2]
        # Relative to the filters' rate, so that `set_lr` moves both with the schedule.
        scale = group["lr_scale"] * (1.0 if self.lr_rest is None else self.lr_rest / lr)
        sgd = {"filters": False, "lr_scale": scale, "momentum": self.momentum_rest}
        parts = [{**group, "params": filters, "filters": True}, {**group, "params": others, **sgd}]
        return [part for part in parts if part["params"]]

    def check_groups(self, groups: list[Group]) -> None:
        """Raises RecipeError if no group has a filter: all would be stepped by SGD, at a rate meant for Muon."""
        if not any(group["filters"] for group in groups):
            what = "muon is for convolution filters, and the network has none to train"
            raise RecipeError(what, where="optimizer.name", fix="Set it to sgd or soap.")

    @property
    def is_layer_wise(self) -> bool:
        return True


class SOAPRecipe(OptimizerRecipe):
    """Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024)."""

    CLASS: ClassVar[str] = "headway.optim.soap:SOAP"

    name: Literal["soap"] = "soap"
    betas: tuple[Fraction, Fraction] = (0.95, 0.95)
    """Decays of the running first and second moments: the fractions that each step keeps."""
    eps: Positive = 1e-8
    """Added to the denominator, the root of the second moment."""
    precondition_every: int = Field(default=10, ge=1)
    """Steps between two updates of the eigenvectors."""
    max_dim: int = Field(default=2048, ge=0)
    """Most rows or columns of a matrix whose side gets eigenvectors. Matrices that are larger on one side are
    preconditioned on the other one; if both are larger, or with 0, by Adam alone."""
    normalise: bool = False
    """Scale filters to a fixed norm before each step. For networks with a batch norm after each convolution."""


def _name_own_optimizer(value: Any) -> Any:
    # `optimizer: {factory: my_module:Mine, lr: 0.1}` needs no name.
    if not isinstance(value, dict):
        return value
    name = value.get("name")
    if isinstance(name, str) and ":" in name:
        raise ValueError(f"an import path is not a name. Write factory: {name!r} in place of name")
    return {"name": "own", **value} if "factory" in value else value


# A tagged union: pydantic looks at `name`, then validates against one class alone, so that errors are about its keys.
AnyOptimizerRecipe = Annotated[
    SGDRecipe
    | NAGRecipe
    | AdamRecipe
    | AdamWRecipe
    | LARSRecipe
    | LAMBRecipe
    | NovoGradRecipe
    | SignumRecipe
    | FTMLRecipe
    | LBSGDRecipe
    | RMSpropSGDRecipe
    | MuonRecipe
    | SOAPRecipe
    | OwnOptimizerRecipe,
    Field(discriminator="name"),
    BeforeValidator(_name_own_optimizer),
]
"""The recipe of one optimizer; `name` says which one."""


class _OptimizerValues(RecipePart):
    """The `optimizer` part alone, so that messages name its keys as they do for a recipe."""

    optimizer: AnyOptimizerRecipe


def read_optimizer(**values: Any) -> AnyOptimizerRecipe:
    """Validates the `optimizer` part of a recipe, and returns it: `read_optimizer(name="lars", lr=4.0)`.

    Raises:
        RecipeError: an unknown name or key, or a value out of range.
    """
    return validate_part({"optimizer": values}, _OptimizerValues, "read_optimizer").optimizer


def _refuse_nesterov_without_momentum(name: str, nesterov: bool, momentum: float, *, default: float) -> None:
    if nesterov and momentum == 0:
        fix = f"Set momentum: {default:g}, or nesterov: false"
        raise ValueError(f"{name!r} with nesterov needs a momentum above 0. {fix}")
