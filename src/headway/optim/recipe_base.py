"""The keys that every optimizer has in a recipe, and the questions that a run asks any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from headway.core.recipe import RecipePart
from headway.optim.batch_scaling import Scalable
from headway.optim.groups import GroupRecipe
from headway.optim.internal_schedule import InternalSchedule

# Importing torch takes seconds, and a recipe is validated without it.
if TYPE_CHECKING:
    import torch

Group = dict[str, Any]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LookaheadRecipe(RecipePart):
    """Slow weights follow the optimizer's every few steps, and training goes on from them. Evaluation and checkpoints
    use the slow weights (Zhang et al. 2019, "Lookahead Optimizer", arXiv 1907.08610)."""

    every_steps: int = Field(default=5, ge=1)
    """Steps between two updates of the slow weights; the paper's k."""
    alpha: float = Field(default=0.5, gt=0, le=1)
    """Share of the way from the slow weights to the newest."""
    power: NotNegative = 0.0
    """0: the share is always alpha. Above: 1 - (1 - alpha) * (share of the run that is done) ** power, so that nothing
    is held back at first (airbench94: every_steps 5, alpha 0.226, power 3)."""


class OptimizerRecipe(RecipePart, ABC):
    """How gradients become steps: the keys that every optimizer has."""

    # A run whose length follows the batch (`epochs: {base, per}`) scales these values with it.
    EPOCH_FIELDS: ClassVar[tuple[str, ...]] = ()
    """Fields that are stretches of the run, in epochs."""

    name: str
    """Name of the optimizer; see [Optimizers](library/optimizers.md)."""
    # A number, or a mapping that becomes a number once the batch is known.
    lr: Scalable
    """Learning rate; the schedule gives its factor. Or {base, per, scale}, which follows the batch; see below."""
    weight_decay: NotNegative = 0.0
    """Added to the gradient as weight_decay * weight, or (`adamw`, `lamb`, `novograd`, `muon`) to the update."""
    no_decay: bool = False
    """No weight decay on parameters of one dimension: bias, beta, gamma (`lars`, `lamb`, `lbsgd`, `novograd`: true)."""
    groups: tuple[GroupRecipe, ...] = ()
    """Parameter groups; unset: one group of all. If there are groups, every trained parameter must be in one."""
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    """Factor on the learning rate from each layer to the one before it; the last layer has the full rate. 1: all layers
    learn at the same rate. 0.65 to 0.85 suits a pretrained network, whose first layers should change least. Factors of
    `groups` apply too (BEiT, Bao et al. 2021, arXiv 2106.08254)."""
    clip_norm: Positive | None = None
    """Largest norm of the gradients of all parameters together; larger gradients are scaled down to it."""
    lookahead: LookaheadRecipe | None = None
    """Slow weights beside any of the optimizers; see below."""
    gradient_noise: Positive | None = None
    """Each sample's gradient is multiplied by z ~ N(1, sigma^2) with sigma = gradient_noise * sqrt(batch), so that a
    large batch fluctuates as a small one (Hoffer et al. 2017, arXiv 1705.08741). 1 / sqrt(small batch) suits."""

    @abstractmethod
    # The one method that every optimizer needs.
    def make(self, groups: list[Group], lr: float, steps_per_epoch: float | None) -> torch.optim.Optimizer:
        """Builds the optimizer over parameter groups that have their `lr` and `weight_decay`.

        Raises:
            RecipeError: the optimizer counts in epochs, and `steps_per_epoch` is None.
        """

    def split_group(self, group: Group, lr: float) -> list[Group]:
        """Splits a parameter group whose parameters the optimizer treats in different ways."""
        return [group]

    @property
    # Read by `headway train` and `headway schedule`: a very large batch wants layers with rates of their own.
    def is_layer_wise(self) -> bool:
        """True if the optimizer scales the step of each layer separately."""
        return False

    @property
    # A large batch at one rate throughout gets a warning, unless the optimizer itself changes the rate.
    def changes_lr(self) -> bool:
        """True if the optimizer changes the learning rate by itself, whatever the schedule does."""
        return False

    @property
    def steps_per_update(self) -> int:
        """Steps whose gradients are summed for one update of the weights."""
        return 1

    @property
    def displayed_momentum(self) -> float | None:
        """The momentum, or the share of the first moment that a step keeps; None: the optimizer has neither."""
        # Shown by `headway schedule` beside the learning rate.
        betas = getattr(self, "betas", (None,))
        return getattr(self, "momentum", betas[0])

    @property
    def epoch_fields(self) -> dict[str, float]:
        """The values that count in epochs, by their keys. They are scaled when the run's length is."""
        return {field: getattr(self, field) for field in self.EPOCH_FIELDS}

    @property
    def settled_epochs(self) -> tuple[float, str]:
        """(epochs until the optimizer stops changing the learning rate, the keys that say so). 0: it never does."""
        return 0.0, ""

    def build_internal_schedule(self, steps_per_epoch: float) -> InternalSchedule:
        """Describes the changes that the optimizer makes to learning rate and batch by itself."""
        return InternalSchedule()
