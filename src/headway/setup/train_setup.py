"""The parts of one run, as the trainer, the doctor and the evaluation use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.recipe import LoadedRecipe
from headway.core.weight_copies import HasWeights
from headway.data import dataset as data
from headway.data.augment import Augment
from headway.data.batch import Batch
from headway.data.batch_plan import BatchPlan
from headway.model.freezing import FreezeSchedule
from headway.model.model_size import ModelSize
from headway.optim import MasterWeights, Schedule
from headway.parallel.full_shards import FullShards
from headway.parallel.local import OuterOptimizer
from headway.parallel.owned_state import OwnedState
from headway.parallel.owners import Owners
from headway.parallel.parts import DividedNetwork, OwnParts
from headway.parallel.rounds import Rounds
from headway.setup.inputs import Inputs
from headway.setup.precision import Precision
from headway.setup.recipe import TrainRecipe
from headway.setup.task import TargetSpec, Task


@dataclass(frozen=True, kw_only=True)
class TrainSetup:
    """The parts of one run.

    Attributes:
        loaded: the recipe with every `auto` resolved.
        device: the device that trains.
        inputs: the data sets and their loaders.
        target: kind and number of the labels.
        task: computes loss and metrics.
        augment: the augmentation on the device.
        transform: the user's function on each training batch.
        model: the network, on the device.
        forward: `model`, or its compiled form.
        counts: parameters and multiply-adds; None for the resolved recipe of a run.
        optimizer: steps the parameters, or their fp32 masters.
        masters: fp32 weights that the optimizer steps in place of 16-bit ones; None: it steps those of the network.
        freezing: freezes layers at their epochs.
        schedule: the factor on `lr` as a function of the position.
        precision: autocast and loss scaling.
        epoch: number of samples in an epoch.
        plan: the number of samples in each step.
        steps: number of steps of the run.
        lr: the learning rate that the schedule multiplies.
        rounds: the steps that each rank makes alone.
        outer: steps all ranks together after a round of such steps; None if no step is made alone.
        divided: the parts that this rank holds of a network that is divided over the ranks; None: it holds all.
        owners: the owners of the parameters, if each rank steps its own only.
        members: the networks whose predictions are averaged, if this is an ensemble; all else is that of the first one.
    """

    loaded: LoadedRecipe[TrainRecipe]
    device: torch.device
    inputs: Inputs
    target: TargetSpec
    task: Task
    augment: Augment
    transform: Callable[..., Any] | None
    model: torch.nn.Module
    forward: Callable[[torch.Tensor], torch.Tensor]
    counts: ModelSize | None
    optimizer: torch.optim.Optimizer
    masters: MasterWeights | None
    freezing: FreezeSchedule
    schedule: Schedule
    precision: Precision
    epoch: int
    plan: BatchPlan
    steps: int
    lr: float
    rounds: Rounds
    outer: OuterOptimizer | None = None
    divided: DividedNetwork | None = None
    owners: Owners | None = None
    members: tuple[TrainSetup, ...] = ()

    @property
    def parts(self) -> OwnParts | OwnedState | None:
        """Tensors of the training state that this rank alone saves; None: all ranks have all of it."""
        if self.owners is not None:
            return self.owners.saved
        return None if self.divided is None else self.divided.parts

    @property
    def recipe(self) -> TrainRecipe:
        """The validated recipe."""
        return self.loaded.recipe

    @property
    def agreed_recipe(self) -> LoadedRecipe[TrainRecipe]:
        """The resolved recipe, with the precision on which all ranks agreed."""
        precision = self.precision
        is_unchanged = precision.name == self.recipe.precision
        return self.loaded if is_unchanged else self.loaded.resolve("precision", precision.name, precision.reason)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the network's state as `weights.safetensors` has it: fp32 masters in place of 16-bit weights.

        Where ranks own the masters, or there are none, it has the 16-bit weights, widened.
        """
        if self.owners is not None:
            state = self.owners.saved.widen(self.model.state_dict())
        else:
            state = self.stepped.state_dict()
        if self.recipe.half_weights and self.recipe.optimizer.precision == "bf16":
            # Whoever reads the file needs to know nothing of the optimizer.
            state = {
                name: value.to("cpu", torch.float32) if value.dtype == torch.bfloat16 else value
                for name, value in state.items()
            }
        return state

    @property
    def held(self) -> HasWeights:
        """The network as this rank holds it: if all weights are divided, its rows of them."""
        return self.divided if isinstance(self.divided, FullShards) else self.model

    @property
    def stepped(self) -> HasWeights:
        """The weights that the optimizer steps and checkpoints hold: `held`, or fp32 masters of 16-bit ones."""
        return self.held if self.masters is None else self.masters

    @property
    def train(self) -> data.Dataset | None:
        """Training set; None if the data are synthetic."""
        return self.inputs.train

    @property
    def eval(self) -> data.Dataset | None:
        """Evaluation set; None if there is none."""
        return self.inputs.eval

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self.inputs.size

    @property
    def channels(self) -> int:
        """Number of channels of the images."""
        return self.inputs.channels

    def batches(self, position: int, rank: int = 0, world: int = 1) -> Iterable[Batch]:
        """Returns the endless stream of a rank's training batches from a position (samples served before) on."""
        return self.inputs.build_batches(self.recipe, self.plan, position, rank, world)

    def step_optimizer(self, parameters: list[torch.nn.Parameter]) -> None:
        """Clips the gradients of `parameters`, steps, and removes the gradients."""
        split = None if self.divided is None else self.divided.split
        clip_norm = self.recipe.optimizer.clip_norm
        self.precision.step(self.optimizer, clip_norm, parameters, owners=self.owners, split=split)
        self.optimizer.zero_grad(set_to_none=True)

    def lr_at(self, position: int) -> float:
        """Returns the learning rate of the step that begins at a position."""
        return self.lr * self.schedule(position)
