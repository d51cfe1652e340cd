"""Forward and backward of several trials in one pass."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headway.data.batch import Batch
from headway.setup.prepare import prepare_batch
from headway.sweep.fused_network import FusedNetwork
from headway.training.sample_weights import SampleWeights
from headway.training.trainer import Trainer


@final
class Member:
    """A trial of a group."""

    def __init__(self, trainer: Trainer, until: int) -> None:
        self.trainer, self.until = trainer, until
        self.weights = SampleWeights(trainer.setup)
        self.parameters = list(trainer.setup.model.parameters())

    @property
    def will_step(self) -> bool:
        """True if its next turn makes a step, and does not end the run."""
        trainer = self.trainer
        is_ending = trainer.finished or trainer.stopping or trainer.end.reason is not None or trainer.recovery.actions
        return trainer.step < min(self.until, trainer.setup.steps) and not is_ending


@final
@dataclass(frozen=True)
class Pass:
    """A trial's part of a pass that is done: it waits for the trial's turn."""

    step: int
    parts: tuple[Tensor, ...]
    is_masked: bool
    losses: Tensor
    outputs: Tensor
    gradients: Sequence[Tensor | None]
    forward_s: float
    backward_s: float


@final
class Group:
    """Trials that take forward and backward together.

    Each has its place in the stacked tensors, which stays empty when it has left, or was never here. So the sizes of
    all operations, and with them the bits of each trial, depend on the places alone.

    Args:
        members: the trials that are here.
        places: their numbers, and those of others of the same choice.
        name: of the networks.
    """

    def __init__(self, members: Mapping[int, Member], places: Sequence[int], name: str = "") -> None:
        self.members, self.name, self._places = dict(members), name, tuple(places)
        self._network: tuple[list[int], FusedNetwork] | None = None
        self._done: dict[int, Pass] = {}

    def list_ready(self, trial: int) -> dict[int, Member]:
        """Returns the members that make the same step as this one in this round."""
        step = self.members[trial].trainer.step
        return {
            one: member
            for one, member in self.members.items()
            if one == trial or (member.trainer.step == step and member.will_step)
        }

    def leave(self, trial: int) -> Member | None:
        """Takes a member out."""
        self._done.pop(trial, None)
        return self.members.pop(trial, None)

    def compute(self, trial: int, batch: Batch) -> None:
        """Gives a trial the gradient of its step.

        Raises:
            CannotFuseError: the networks use something that is not known.
        """
        trainer = self.members[trial].trainer
        found = self._done.pop(trial, None)
        if found is None or found.step != trainer.step:
            ready = self.list_ready(trial)
            self._done = run_together(ready, self._link(ready), batch)
            found = self._done.pop(trial)
        _deliver(self.members[trial], found)

    def _link(self, members: Mapping[int, Member]) -> FusedNetwork:
        """Returns the network of these members; it is built again when one of them has left."""
        trials = list(members)
        if self._network is None or self._network[0] != trials or not self._network[1].is_linked:
            models = {trial: member.trainer.setup.model for trial, member in members.items()}
            self._network = trials, FusedNetwork([models.get(trial) for trial in self._places])
        return self._network[1]


def run_together(members: Mapping[int, Member], network: FusedNetwork, batch: Batch) -> dict[int, Pass]:
    """Computes forward and backward of one step for all members; no member's state changes but that of batch norm.

    Raises:
        CannotFuseError: the networks use something that is not known.
    """
    began = time.perf_counter()
    trainers = [member.trainer for member in members.values()]
    setup, step = trainers[0].setup, trainers[0].step
    images, labels = prepare_batch(setup, batch, step + 1)
    outputs = network(images)
    losses, weights = list[Tensor](), list[tuple[Tensor, Tensor, bool]]()
    for member, own in zip(members.values(), outputs, strict=True):
        member.weights.set_divisor(setup.plan.get_batch_size(member.trainer.position))
        weights.append(member.weights.weigh(batch, images.shape[0]))
        losses.append(member.trainer.setup.task.loss(own.float(), labels))
    passed = time.perf_counter()
    # One pass for all: the gradient of each loss reaches its own network only, whatever the others are.
    torch.autograd.backward([(one * noisy).sum() for one, (_, noisy, _) in zip(losses, weights, strict=True)])
    gradients = network.take_gradients()
    forward_s, backward_s = (seconds / len(members) for seconds in (passed - began, time.perf_counter() - passed))
    return {
        trial: Pass(
            step=step,
            parts=(images, labels, own_weights[0], own_weights[1]),
            is_masked=own_weights[2],
            losses=own_losses.detach(),
            outputs=own_outputs.detach(),
            gradients=own_gradients,
            forward_s=forward_s,
            backward_s=backward_s,
        )
        for trial, own_weights, own_losses, own_outputs, own_gradients in zip(
            members, weights, losses, outputs, gradients, strict=True
        )
    }


def _deliver(member: Member, found: Pass) -> None:
    """Gives a trainer its part of a pass, as its own `forward_backward` would have left it."""
    trainer = member.trainer
    # The mark of its clock: the pass was in the time of whoever came first, so each adds its share.
    trainer.clock.start()
    accumulator = trainer.accumulator
    accumulator.observer.begin_step(trainer.step + 1, [found.parts])
    for parameter, gradient in zip(member.parameters, found.gradients, strict=True):
        parameter.grad = gradient
    _, labels, weights, _ = found.parts
    trainer.last_losses = found.losses
    divisor = trainer.setup.plan.get_batch_size(trainer.position)
    accumulator.add_losses(found.losses * weights * divisor if found.is_masked else found.losses)
    trainer.last_outputs = found.outputs, labels
    trainer.clock.add("forward", found.forward_s)
    trainer.clock.add("backward", found.backward_s)
