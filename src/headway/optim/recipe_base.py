"""The keys that every optimizer has in a recipe, and the questions that a run asks any of them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from headway.core.recipe import RecipePart
from headway.optim.batch_scaling import Scalable
from headway.optim.groups import Group, GroupRecipe
from headway.optim.internal_schedule import InternalSchedule

# Importing torch takes seconds, and a recipe is validated without it.
if TYPE_CHECKING:
    import torch

Fraction = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LookaheadRecipe(RecipePart):
    """Slow weights follow the optimizer's every few steps, and training goes on from them. Evaluation and checkpoints
    use the slow weights (Zhang et al. 2019, "Lookahead Optimizer", arXiv 1907.08610)."""

    every_steps: int = Field(default=5, ge=1)
    """Steps between two updates of the slow weights: k in the paper."""
    alpha: float = Field(default=0.5, gt=0, le=1)
    """Share of the distance to the newest weights that the slow weights move in an update."""
    power: NotNegative = 0.0
    """Growth of alpha over the run. 0: none. Above 0: alpha becomes 1 - (1 - alpha) * progress ** power, with progress
    from 0 to 1, so that nothing is held back at first (airbench94: every_steps 5, alpha 0.226, power 3)."""


class OptimizerRecipe(RecipePart):
    """Base of the optimizers' recipes: the keys that every optimizer has.

    Importing torch takes seconds, and a recipe is validated without it.
    """

    # A text, because naming the class itself would import torch.
    CLASS: ClassVar[str]
    """Class of the optimizer, or a function that makes it; `make` imports it."""
    OPTIONS: ClassVar[dict[str, Any]] = {}
    """Arguments of the class that are not keys."""
    BF16_CLASS: ClassVar[str] = ""
    """Class with the same steps that can keep its state in bf16; empty: `CLASS` can."""
    BF16_OPTIONS: ClassVar[dict[str, Any]] = {}
    """Its arguments that are not keys."""
    EPOCH_FIELDS: ClassVar[tuple[str, ...]] = ()
    """Fields in epochs. They are scaled with the length of the run if that follows the batch."""

    name: str
    """Name of the optimizer; see [Optimizers](library/optimizers.md)."""
    lr: Scalable
    """Learning rate, which the schedule multiplies by its factor. Or {base, per, scale}, to scale it with the batch."""
    weight_decay: NotNegative = 0.0
    """Weight decay: weight_decay * weight is added to the gradient, or (`adamw`, `lamb`, `novograd`, `soap`, and
    the filters of `muon`) to the update."""
    no_decay: bool = False
    """No weight decay for parameters of one dimension: biases, and beta and gamma of norms. True by default for `lars`,
    `lamb`, `lbsgd` and `novograd`."""
    groups: tuple[GroupRecipe, ...] = ()
    """Parameter groups with a learning rate or weight decay of their own. Unset: one group. Otherwise every trained
    parameter must be in a group."""
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    """Factor on the learning rate from each layer to the one before it; the last layer has the full rate. 1: all layers
    learn at the same rate. 0.65 to 0.85 suits a pretrained network, whose first layers should change least. Factors of
    `groups` apply too (BEiT, Bao et al. 2021, arXiv 2106.08254)."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the optimizer keeps its state and its copies of `half_weights`. `bf16`: the state is 16 bit
    wide, and 16-bit weights have no fp32 copies. Both are rounded stochastically, so that small updates add up."""
    clip_norm: Positive | None = None
    """Largest norm of the gradients of all parameters together. Larger gradients are scaled down to it."""
    lookahead: LookaheadRecipe | None = None
    """Lookahead: slow weights that follow the optimizer's weights. Works with every optimizer."""
    gradient_noise: Positive | None = None
    """Multiply each sample's gradient by z ~ N(1, sigma^2) with sigma = gradient_noise * sqrt(batch), so that the
    gradient of a large batch is as noisy as that of a small one (Hoffer et al. 2017, arXiv 1705.08741). Start with 1 /
    sqrt(small batch)."""

    def make(self, groups: list[Group], lr: float, steps_per_epoch: float | None) -> torch.optim.Optimizer:
        """Builds the optimizer.

        Args:
            groups: parameter groups, each with its own `lr` and `weight_decay`.
            lr: learning rate of the recipe.
            steps_per_epoch: samples / batch; None if unknown.

        Raises:
            UsageError: the optimizer counts in epochs, and `steps_per_epoch` is None.
        """
        path, fixed = self.CLASS, self.OPTIONS
        if self.precision == "bf16" and self.BF16_CLASS:
            path, fixed = self.BF16_CLASS, self.BF16_OPTIONS
        module, _, name = path.partition(":")
        # Other optimizers do not have this argument.
        times = {"steps_per_epoch": steps_per_epoch} if self.EPOCH_FIELDS else {}
        optimizer: torch.optim.Optimizer = getattr(import_module(module), name)(
            groups, lr, **self.build_options(lr), **fixed, **times
        )
        return optimizer

    def build_options(self, lr: float) -> dict[str, Any]:
        """Returns the arguments of the optimizer's class: the keys that this optimizer has beside those of all."""
        # lr and weight_decay are left out too: every group carries its own. The other common keys work outside the
        # optimizer.
        own = type(self).model_fields.keys() - OptimizerRecipe.model_fields.keys()
        return {name: getattr(self, name) for name in own}

    def resolve_paths(self, base: Path) -> Self:
        """Returns the recipe with paths to files of the user's that do not depend on the current folder.

        Args:
            base: folder that its relative paths start from.
        """
        return self

    def measure_state_share(self, optimizer: torch.optim.Optimizer) -> float | None:
        """Returns the bytes of state for each byte of a parameter; None if they are known without a measurement."""
        return None

    def split_group(self, group: Group, lr: float) -> list[Group]:
        """Returns a parameter group in parts if the optimizer treats its parameters differently."""
        return [group]

    def check_groups(self, groups: list[Group]) -> None:
        """Raises RecipeError if the parameter groups of a network are not what the optimizer is for."""

    @property
    def is_layer_wise(self) -> bool:
        """True if the optimizer scales the step of each layer separately. Very large batches need that."""
        return False

    @property
    def changes_lr(self) -> bool:
        """True if the optimizer changes the learning rate by itself, whatever the schedule does."""
        return False

    @property
    def steps_per_update(self) -> int:
        """Steps whose gradients are summed for one update of the weights."""
        return 1

    @property
    def displayed_momentum(self) -> float | None:
        """The momentum, or the decay of the first moment (beta1); None: the optimizer has neither."""
        # Shown by `headway schedule` beside the learning rate.
        betas = getattr(self, "betas", (None,))
        # Adam and its kin have no key momentum; beta1 has its part.
        return getattr(self, "momentum", betas[0])

    @property
    def epoch_fields(self) -> dict[str, float]:
        """The values that count in epochs, by their keys. They are scaled with the length of the run."""
        return {field: getattr(self, field) for field in self.EPOCH_FIELDS}

    @property
    def settled_epochs(self) -> tuple[float, str]:
        """(epochs until the optimizer stops changing the learning rate, the keys that set them); 0 if it never does."""
        return 0.0, ""

    def build_internal_schedule(self, steps_per_epoch: float) -> InternalSchedule:
        """Returns the changes that the optimizer makes to learning rate and batch by itself."""
        return InternalSchedule()
