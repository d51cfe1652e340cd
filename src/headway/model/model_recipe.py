"""Parts of a recipe that change a network whoever wrote it: batch norm, the average of its weights, late freezing."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from headway.core.epochs import Epochs
from headway.core.recipe import RecipePart, check_patterns


class BatchNormRecipe(RecipePart):
    """Of every batch norm of the network."""

    ghost: int | None = Field(default=None, ge=2)
    """Most samples whose statistics are taken together while training; unset: all that are on this device at once.
    Hoffer et al. 2017, "Train longer, generalize better" (arXiv 1705.08741): with a large batch, small groups keep the
    accuracy. A batch that is no multiple is divided into the fewest groups, whose sizes differ by at most one."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Share of the running statistics that one step keeps (PyTorch's momentum is 1 - this); unset: what the network
    has."""
    recompute_batches: int | None = Field(default=None, ge=1)
    """Evaluate with statistics that are computed anew over so many of the newest training batches, with the weights as
    they are then, in place of moving averages; over all ranks. Akiba et al. 2017 (arXiv 1711.04325), "BN without moving
    averages", take one batch; several are the PreciseBN of Wu and Johnson 2021 (arXiv 2105.07576)."""

    @model_validator(mode="after")
    def _fits(self) -> BatchNormRecipe:
        if self.momentum is not None and self.recompute_batches is not None:
            raise ValueError("momentum is of moving averages, which recompute_batches replaces: remove one of them")
        if self.ghost is None and self.momentum is None and self.recompute_batches is None:
            raise ValueError("it changes nothing: set ghost, momentum or recompute_batches, or remove it")
        return self


class EmaRecipe(RecipePart):
    """Evaluate and save the exponential moving average of the weights, which is more accurate than the newest weights
    while the learning rate is high (Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging";
    Composer's ImageNet recipes: half-life 100 steps, updated every 20)."""

    half_life_steps: float = Field(gt=0, allow_inf_nan=False)
    """Steps after which a step's weights count half as much as the newest."""
    every_steps: int = Field(default=1, ge=1)
    """Steps between two updates: each is one pass over the weights."""


class FreezeAfterRecipe(RecipePart):
    """Parameters that are trained for the first epochs only: from then on no gradient is computed for them, nor below
    them where nothing else is trained there (Brock et al. 2017, "FreezeOut", arXiv 1706.04983; airbench94 freezes the
    bias of its whitening layer after 3 epochs, Jordan 2024, arXiv 2404.00498)."""

    match: str
    """Regular expression (re.search) on the parameter's full name."""
    after_epochs: Epochs
    """For how long they are trained."""

    @field_validator("match")
    @classmethod
    def _compile(cls, pattern: str) -> str:
        check_patterns(pattern)
        return pattern


class ModelRecipe(RecipePart):
    """Which network, and the state it begins with."""

    factory: str
    """Import path of a function or class that makes the network: `headway.model:cifar_net`,
    `torchvision.models:resnet18`, `timm:create_model`, or `my_file.py:build` beside the recipe. It is given
    `num_classes` and `in_channels` where it takes them and `args` does not say them."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    weights: str | None = None
    """A safetensors file to begin with. Names must match; only the last layer may differ in size, and begins anew."""
    freeze: tuple[str, ...] = ()
    """Regular expressions (re.search on a parameter's full name): what they match is not trained.
    Running statistics of batch norm are no parameters and go on moving."""
    freeze_after: tuple[FreezeAfterRecipe, ...] = ()
    """What is trained for the first epochs only; see below."""
    init: str | None = None
    """Import path of a function `init(model, images)`, called once with a first batch, without gradients. Unset: the
    network's own method `initialise(images)` where it has one and no `weights` were loaded."""
    zero_init: bool = False
    """The last batch norm of each residual block begins with a scale of zero, so that the block begins as the identity
    (Goyal et al. 2017, arXiv 1706.02677, section 5.1)."""
    blur_pool: bool = False
    """Convolutions with a stride and 16 input channels or more, and max pools, blur before they leave pixels out (Zhang
    2019, arXiv 1904.11486)."""
    batch_norm: BatchNormRecipe | None = None
    """Ghost batches, momentum, statistics without moving averages; see below."""
    ema: EmaRecipe | None = None
    """Evaluate and save the average of the weights; see below."""

    @model_validator(mode="after")
    def _fits(self) -> ModelRecipe:
        if self.zero_init and self.weights is not None:
            raise ValueError("zero_init would undo what the weights have learnt: remove zero_init, or weights")
        return self

    @field_validator("freeze")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        check_patterns(*patterns)
        return patterns
