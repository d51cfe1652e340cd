"""The `model` part of a recipe: the factory of the network, and changes that work on any network."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headway.core.epochs import Epochs
from headway.core.recipe import Pattern, RecipePart, check_patterns


class BatchNormRecipe(RecipePart):
    """Options of every batch norm in the network."""

    ghost: int | None = Field(default=None, ge=2)
    """Largest number of samples that share statistics in training. Unset: one micro-batch on this device. With a large
    batch, small groups keep the accuracy (Hoffer et al. 2017, "Train longer, generalize better", arXiv 1705.08741). A
    batch is divided into the fewest groups, whose sizes differ by at most one."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Share of the running statistics that a step keeps: 1 - PyTorch's momentum. Unset: the network's own momentum."""
    recompute_batches: int | None = Field(default=None, ge=1)
    """Evaluate with statistics that are recomputed with the current weights over this many of the newest training
    batches of all ranks, instead of moving averages. One batch is "BN without moving averages" (Akiba et al. 2017,
    arXiv 1711.04325), several are PreciseBN (Wu and Johnson 2021, arXiv 2105.07576)."""

    @model_validator(mode="after")
    def _check_combination(self) -> BatchNormRecipe:
        # Recomputed statistics are means over batches, without momentum.
        if self.momentum is not None and self.recompute_batches is not None:
            raise ValueError("momentum is for moving averages, which recompute_batches replaces: remove one of them")
        # An empty part is a mistake: everything in it is off.
        if self.ghost is None and self.momentum is None and self.recompute_batches is None:
            raise ValueError("it changes nothing: set ghost, momentum or recompute_batches, or remove it")
        return self


class EmaRecipe(RecipePart):
    """Evaluate and save the exponential moving average of the weights, which is more accurate than the newest weights
    while the learning rate is high (Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging";
    Composer's ImageNet recipes: half-life 100 steps, updated every 20)."""

    half_life_steps: float = Field(gt=0, allow_inf_nan=False)
    """Half-life in steps: the weights of that many steps ago count half as much as the newest."""
    every_steps: int = Field(default=1, ge=1)
    """Steps between two updates. Each update is one pass over the weights."""


class FreezeAfterRecipe(RecipePart):
    """Parameters that are trained for the first epochs only. Then no gradient is computed for them, and the backward
    pass stops below the lowest trained parameter (Brock et al. 2017, "FreezeOut", arXiv 1706.04983; airbench94 freezes
    the bias of its whitening layer after 3 epochs, Jordan 2024, arXiv 2404.00498)."""

    match: Pattern
    """Regular expression (re.search) on the parameter's full name."""
    after_epochs: Epochs
    """Number of epochs for which they are trained."""


class UnfreezeRecipe(RecipePart):
    """Parameters of `freeze` that are trained from an epoch on. Until then no gradient is computed for them; from then
    on the optimizer begins with an empty state for them (gradual unfreezing: Howard and Ruder 2018, "ULMFiT", arXiv
    1801.06146)."""

    match: Pattern
    """Regular expression (re.search) on the parameter's full name, among those that `freeze` matches."""
    at_epoch: Epochs
    """Epoch from which they are trained."""


def _expand_unfreeze(value: Any) -> Any:
    # `unfreeze_at: 3` is short for all parameters of `freeze`.
    # A bool is an int in Python, and `unfreeze_at: true` names no epoch.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [{"match": "", "at_epoch": value}] if is_number else value


class ModelRecipe(RecipePart):
    """The network and its initial state, which `headway.model.builder` builds."""

    network_keys: ClassVar[tuple[str, ...]] = (
        *("args", "weights", "freeze", "unfreeze_at", "freeze_after", "init", "init_args", "zero_init", "blur_pool"),
    )
    """Keys that are about the network that `factory` builds: its arguments, weights, parameters and blocks."""

    factory: str
    """Import path of a function or class that builds the network: `headway.model:cifar_net`,
    `torchvision.models:resnet18`, `timm:create_model`, or `my_file.py:build` beside the recipe. It receives
    `num_classes` and `in_channels` if it has such arguments and `args` does not set them."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory. Pretrained weights of timm (`pretrained: true`) and torchvision
    (`weights: DEFAULT`) set the normalisation, `data.size` and the centre crop too, unless the recipe does."""
    weights: str | None = None
    """A file with initial weights: safetensors, or `.pth`, `.pt` or `.bin` of torch.save, of which only tensors are
    loaded. Names must match, without the prefixes of wrappers. Only the last layer may differ in size or be absent; it
    is then initialised at random. Weights of a run bring their normalisation, `data.size` and centre crop, unless the
    recipe sets these."""
    freeze: tuple[str, ...] = ()
    """Regular expressions (re.search on a parameter's full name) of parameters that are not trained. Running statistics
    of batch norm are buffers, not parameters, and are still updated."""
    unfreeze_at: Annotated[tuple[UnfreezeRecipe, ...], BeforeValidator(_expand_unfreeze)] = ()
    """Epoch from which the parameters of `freeze` are trained, or a list of {match, at_epoch} to unfreeze them part by
    part."""
    freeze_after: tuple[FreezeAfterRecipe, ...] = ()
    """Parameters that are trained for the first epochs only: a list of {match, after_epochs}."""
    init: str | None = None
    """Import path of a function `init(model, images)`, called once with the first batch, without gradients. Unset: the
    network's own method `initialise(images)`, if it has one and no `weights` are loaded."""
    init_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `init`, for example `init: headway.model:init_xavier` with `init_args: {magnitude: 2.3}`."""
    zero_init: bool = False
    """Set the scale of the last batch norm of each residual block to zero, so that the block begins as the identity
    (Goyal et al. 2017, arXiv 1706.02677, section 5.1)."""
    blur_pool: bool = False
    """Blur the input of max pools, and of convolutions with a stride and at least 16 input channels (Zhang 2019, arXiv
    1904.11486)."""
    batch_norm: BatchNormRecipe | None = None
    """Options of every batch norm: ghost batches, momentum, recomputed statistics."""
    ema: EmaRecipe | None = None
    """Evaluate and save an exponential moving average of the weights."""

    @model_validator(mode="after")
    def _check_combination(self) -> ModelRecipe:
        if self.unfreeze_at and not self.freeze:
            raise ValueError("unfreeze_at is about parameters that freeze matches: set freeze, or remove unfreeze_at")
        if self.init_args and self.init is None:
            raise ValueError("init_args are those of init: set init, or remove init_args")
        # Weights bring scales of their own.
        if self.zero_init and self.weights is not None:
            raise ValueError("zero_init would undo what the weights have learnt: remove zero_init, or weights")
        return self

    @field_validator("freeze")
    @classmethod
    def _check_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        check_patterns(*patterns)
        return patterns
