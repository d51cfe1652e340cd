"""Fused trials: trials of a cohort take forward and backward together, where a measurement says that it pays.

All else of a step stays that of each trial: batch, rates, optimizer, averages, logs, evaluations and checkpoints.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from headway.core.modules import preserve_training_state
from headway.data.batch import Batch
from headway.model.auxiliary import HasAuxiliaryLoss
from headway.setup.prepare import prepare_batch
from headway.setup.task import Classification, MultiLabel, Regression
from headway.sweep.fused_network import CannotFuseError, FusedNetwork
from headway.training.sample_weights import SampleWeights
from headway.training.trainer import Trainer

LOG = logging.getLogger("headway.sweep")

LEAST_GAIN = 1.15
"""Gain in forward and backward from which trials are fused. Below it, noise of the measurement could hide a loss."""
ROUNDS = 5
HOPELESS_GAIN = 0.9
"""A measurement ends after two rounds that gain less."""
FEW_AT_ONCE, SHORT_PASS_S = 4, 0.5e-3
"""Passes that take longer are fused in fours: the activations of eight networks leave the cache of a core. 8-pixel
networks at batch 64: 1.34 times as fast by eights, 1.44 by fours. Shorter ones are all overhead, so more gain more."""
TOLERANCE = 1e-3
"""Largest difference of fused outputs, relative to the largest output."""


@final
@dataclass(frozen=True, kw_only=True)
class FuseChoice:
    """The choice for a group of trials, up to the end of the rung that they train to.

    Attributes:
        trials: their numbers.
        at_once: trials that take a pass together; 0: each takes its own.
        gain: CPU seconds of forward and backward one by one over those together.
        network: what the measurement holds for: network, batch and number of trials.
        alone_s, fused_s: the CPU seconds of a step of all; 0 for a choice that follows an earlier measurement.
    """

    trials: tuple[int, ...]
    at_once: int
    gain: float
    network: str
    alone_s: float = 0.0
    fused_s: float = 0.0

    def describe(self) -> str:
        """Describes a measurement, for the terminal."""
        times = f"forward and backward take {1e3 * self.alone_s:.1f} ms one by one and {1e3 * self.fused_s:.1f} fused"
        how = f"fused by {self.at_once}" if self.at_once else "not fused"
        return f"{len(self.trials)} trials: {times} ({self.gain:.2f} times as fast), so they are {how}."


@final
class Fusing:
    """Chooses which trials of a process are fused.

    Args:
        chosen: the number at once of trials whose choice is in the journal already.
        measured: `at_once` and `gain` of earlier measurements, by `network`.
        tell: called with each new choice, before it counts.
    """

    def __init__(
        self,
        chosen: Mapping[int, int],
        measured: Mapping[str, tuple[int, float]],
        tell: Callable[[FuseChoice], None],
    ) -> None:
        self.chosen, self.measured, self._tell = dict(chosen), dict(measured), tell
        self._told: set[str] = set()

    def begin(self, trials: Mapping[int, tuple[Trainer, int]]) -> FusedTrials:
        """Begins with trials that are at one position.

        Args:
            trials: trainer of each trial, and the step that it trains to.
        """
        return FusedTrials(self, trials)

    def note(self, choice: FuseChoice) -> None:
        """Notes a choice, and tells it."""
        self.measured[choice.network] = choice.at_once, choice.gain
        self._tell(choice)

    def explain(self, reason: str) -> None:
        """Says why trials are not fused, once for each reason."""
        if reason not in self._told:
            self._told.add(reason)
            LOG.info(f"Trials are not fused, because {reason}.")


@final
class FusedTrials:
    """Trials of a cohort that may take forward and backward together. Close it, and they are as before."""

    def __init__(self, fusing: Fusing, trials: Mapping[int, tuple[Trainer, int]]) -> None:
        self._fusing = fusing
        self._undecided: list[_Group] = []
        self._groups: dict[int, _Group] = {}
        by_name: dict[tuple[str, int | None], dict[int, _Member]] = defaultdict(dict)
        for trial, (trainer, until) in trials.items():
            at_once = fusing.chosen.get(trial)
            if at_once == 0:
                continue
            if reason := find_obstacle(trainer):
                fusing.explain(reason)
                continue
            by_name[describe_network(trainer), at_once][trial] = _Member(trainer, until)
        for (name, at_once), members in by_name.items():
            if at_once is not None:
                self._split(members, at_once)
            elif len(members) > 1:
                self._undecided.append(_Group(members, name))
        for trial, (trainer, _) in trials.items():
            if trial in self._groups or any(trial in group.members for group in self._undecided):
                trainer.gradient_source = partial(self._compute, trial)

    def _split(self, members: Mapping[int, _Member], at_once: int) -> None:
        numbers = list(members)
        # Groups of nearly equal size.
        count = -(-len(numbers) // at_once)
        for part in range(count):
            own = numbers[part * len(numbers) // count : (part + 1) * len(numbers) // count]
            group = _Group({trial: members[trial] for trial in own})
            self._groups |= dict.fromkeys(own, group)

    def _compute(self, trial: int, batch: Batch) -> None:
        """Computes the gradient of a trial's step, or takes it if another trial's turn has computed it."""
        for group in self._undecided:
            # The first step of a run writes a panel of its images, and each trial takes it by itself.
            if trial in group.members and group.members[trial].trainer.step:
                self._decide(group, trial, batch)
                break
        group = self._groups.get(trial)
        trainer = group.members[trial].trainer if group is not None else None
        if group is None or trainer is None:
            self._get_undecided(trial).forward_backward(batch)
            return
        try:
            is_done = trainer.step > 0 and group.compute(trial, batch)
        except CannotFuseError as error:
            self._give_up(group, str(error))
            is_done = False
        if not is_done:
            trainer.forward_backward(batch)

    def _get_undecided(self, trial: int) -> Trainer:
        (trainer,) = (group.members[trial].trainer for group in self._undecided if trial in group.members)
        return trainer

    def _decide(self, group: _Group, trial: int, batch: Batch) -> None:
        """Chooses for a group, by an earlier measurement or a new one."""
        members = group.list_ready(trial)
        if len(members) < 2:
            return
        # Gains of nearly as many trials are alike.
        network = f"{group.name} x {1 << (len(members).bit_length() - 1)}"
        try:
            if (known := self._fusing.measured.get(network)) is not None:
                choice = FuseChoice(trials=tuple(members), at_once=known[0], gain=known[1], network=network)
            else:
                choice = replace(measure_gain([members[one].trainer for one in members], batch), network=network)
                choice = replace(choice, trials=tuple(members))
        except CannotFuseError as error:
            self._give_up(group, str(error))
            return
        self._fusing.note(choice)
        self._undecided.remove(group)
        if choice.at_once:
            self._split(members, choice.at_once)
        for one, member in group.members.items():
            if one not in self._groups:
                member.trainer.gradient_source = None

    def _give_up(self, group: _Group, reason: str) -> None:
        self._fusing.explain(reason)
        for trial in list(group.members):
            self.leave(trial)

    def leave(self, trial: int) -> None:
        """Takes a trial out that pauses, ends or has failed. The others go on together."""
        for group in (self._groups.pop(trial, None), *self._undecided):
            if group is not None and (member := group.leave(trial)) is not None:
                member.trainer.gradient_source = None

    def close(self) -> None:
        """Takes all trials out."""
        for trial in (*self._groups, *(trial for group in self._undecided for trial in group.members)):
            self.leave(trial)


@final
class _Member:
    """A trial of a group."""

    def __init__(self, trainer: Trainer, until: int) -> None:
        self.trainer, self.until = trainer, until
        self.weights = SampleWeights(trainer.setup)

    @property
    def will_step(self) -> bool:
        """True if its next turn makes a step, and does not end the run."""
        trainer = self.trainer
        is_ending = trainer.finished or trainer.stopping or trainer.end.reason is not None or trainer.recovery.actions
        return trainer.step < min(self.until, trainer.setup.steps) and not is_ending


@final
@dataclass(frozen=True)
class _Pass:
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
class _Group:
    """Trials that take forward and backward together."""

    def __init__(self, members: Mapping[int, _Member], name: str = "") -> None:
        self.members, self.name = dict(members), name
        self._network: tuple[list[int], FusedNetwork] | None = None
        self._done: dict[int, _Pass] = {}

    def list_ready(self, trial: int) -> dict[int, _Member]:
        """Returns the members that make the same step as this one in this round."""
        step = self.members[trial].trainer.step
        return {
            one: member
            for one, member in self.members.items()
            if one == trial or (member.trainer.step == step and member.will_step)
        }

    def leave(self, trial: int) -> _Member | None:
        """Takes a member out."""
        self._done.pop(trial, None)
        return self.members.pop(trial, None)

    def compute(self, trial: int, batch: Batch) -> bool:
        """Gives a trial the gradient of its step. Returns False if it has to compute it by itself.

        Raises:
            CannotFuseError: the networks use something that is not known.
        """
        trainer = self.members[trial].trainer
        found = self._done.pop(trial, None)
        if found is None or found.step != trainer.step:
            ready = self.list_ready(trial)
            self._done = run_together(ready, self._link(ready), batch)
            found = self._done.pop(trial)
        _deliver(trainer, found)
        return True

    def _link(self, members: Mapping[int, _Member]) -> FusedNetwork:
        """Returns the network of these members; it is built again when one of them has left."""
        trials = list(members)
        if self._network is None or self._network[0] != trials or not self._network[1].is_linked:
            self._network = trials, FusedNetwork([member.trainer.setup.model for member in members.values()])
        return self._network[1]


def run_together(members: Mapping[int, _Member], network: FusedNetwork, batch: Batch) -> dict[int, _Pass]:
    """Computes forward and backward of one step for all members; no member's state changes but that of batch norm.

    Raises:
        CannotFuseError: the networks use something that is not known.
    """
    began = time.perf_counter()
    trainers = [member.trainer for member in members.values()]
    setup, step = trainers[0].setup, trainers[0].step
    images, labels = prepare_batch(setup, batch, step + 1)
    outputs = network(images).float().unbind()
    losses, weights = list[Tensor](), list[tuple[Tensor, Tensor, bool]]()
    for member, own in zip(members.values(), outputs, strict=True):
        member.weights.set_divisor(setup.plan.get_batch_size(member.trainer.position))
        weights.append(member.weights.weigh(batch, images.shape[0]))
        losses.append(member.trainer.setup.task.loss(own, labels))
    passed = time.perf_counter()
    # One pass for all: the gradient of each loss reaches its own network only, whatever the others are.
    torch.autograd.backward([(one * noisy).sum() for one, (_, noisy, _) in zip(losses, weights, strict=True)])
    gradients = network.take_gradients()
    forward_s, backward_s = (
        seconds / len(members) for seconds in (passed - began, time.perf_counter() - passed)
    )
    return {
        trial: _Pass(
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


def _deliver(trainer: Trainer, found: _Pass) -> None:
    """Gives a trainer its part of a pass, as its own `forward_backward` would have left it."""
    # The mark of its clock: the pass was in the time of whoever came first, so each adds its share.
    trainer.clock.start()
    accumulator = trainer.accumulator
    accumulator.observer.begin_step(trainer.step + 1, [found.parts])
    for parameter, gradient in zip(trainer.setup.model.parameters(), found.gradients, strict=True):
        parameter.grad = gradient
    _, labels, weights, _ = found.parts
    trainer.last_losses = found.losses
    divisor = trainer.setup.plan.get_batch_size(trainer.position)
    accumulator.add_losses(found.losses * weights * divisor if found.is_masked else found.losses)
    trainer.last_outputs = found.outputs, labels
    trainer.clock.add("forward", found.forward_s)
    trainer.clock.add("backward", found.backward_s)


def find_obstacle(trainer: Trainer) -> str:
    """Returns why a trial cannot be fused; it follows "because". Empty if nothing is known against it."""
    setup, recipe = trainer.setup, trainer.setup.recipe
    observe, micro_batch = recipe.observe, recipe.micro_batch
    obstacles = {
        "they train on a GPU, where fusing is not tested": setup.device.type != "cpu",
        f"their precision is {setup.precision.name}": setup.precision.name != "fp32",
        "they are compiled": bool(recipe.compile),
        "they compute activations again": bool(recipe.activation_checkpointing),
        "they have a transform": setup.transform is not None,
        "they have micro-batches": isinstance(micro_batch, int) and micro_batch < recipe.largest_batch,
        "several ranks train each of them": trainer.ranks is not None or trainer.asynchronous is not None,
        "their layers are frozen on the way": bool(recipe.model.freeze_after or recipe.model.unfreeze_at),
        "observe.activations looks into their layers": bool(observe.activations),
        "observe.noise_scale needs passes of their own": observe.noise_scale,
        "their task is not one of Headway's": type(setup.task) not in (Classification, MultiLabel, Regression),
        "their networks have losses of their own": any(
            isinstance(module, HasAuxiliaryLoss) for module in setup.model.modules()
        ),
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


def describe_network(trainer: Trainer) -> str:
    """Returns a text that is equal for trials whose networks have the same code."""
    recipe = trainer.setup.recipe
    same = {"model": recipe.model.model_dump(mode="json"), "channels_last": recipe.channels_last, "batch": recipe.batch}
    return json.dumps(same, sort_keys=True, default=str)


def measure_gain(trainers: Sequence[Trainer], batch: Batch) -> FuseChoice:
    """Measures forward and backward of trials one by one and fused, on the batch of their next step.

    What it computes is thrown away: the trials are as before.

    Raises:
        CannotFuseError: the networks use something that is not known, or give other outputs when they are fused.
    """
    # One thread's own time has no part of the loader's threads.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.process_time
    members = {number: _Member(trainer, trainer.setup.steps) for number, trainer in enumerate(trainers)}
    with ExitStack() as stack:
        for trainer in trainers:
            stack.enter_context(preserve_training_state(trainer.setup.model))
        outputs = _run_alone(trainers, batch)
        began = clock()
        _run_alone(trainers, batch)
        at_once = len(members)
        if clock() - began > SHORT_PASS_S * len(members):
            at_once = min(at_once, FEW_AT_ONCE)
        parts = [dict(list(members.items())[first : first + at_once]) for first in range(0, len(members), at_once)]
        networks = [FusedNetwork([one.trainer.setup.model for one in part.values()]) for part in parts]
        passes = [run_together(part, network, batch) for part, network in zip(parts, networks, strict=True)]
        _expect_alike(outputs, [one.outputs for found in passes for one in found.values()])
        alone_s, fused_s = list[float](), list[float]()
        while len(alone_s) < ROUNDS:
            began = clock()
            for part, network in zip(parts, networks, strict=True):
                run_together(part, network, batch)
            middle = clock()
            _run_alone(trainers, batch)
            fused_s.append(middle - began)
            alone_s.append(clock() - middle)
            if len(alone_s) == 2 and sum(alone_s) < HOPELESS_GAIN * sum(fused_s):
                break
    alone, fused = statistics.median(alone_s), statistics.median(fused_s)
    gain = alone / fused
    chosen = at_once if gain >= LEAST_GAIN else 0
    return FuseChoice(trials=(), at_once=chosen, gain=gain, network="", alone_s=alone, fused_s=fused)


def _run_alone(trainers: Sequence[Trainer], batch: Batch) -> list[Tensor]:
    """Computes forward and backward of each trial by itself; returns their outputs."""
    found = []
    for trainer in trainers:
        setup = trainer.setup
        images, labels = prepare_batch(setup, batch, trainer.step + 1)
        outputs = setup.forward(images)
        losses = setup.task.loss(outputs.float(), labels)
        setup.precision.backward(losses, torch.full_like(losses, 1 / len(losses)))
        for parameter in setup.model.parameters():
            parameter.grad = None
        found.append(outputs.detach())
    return found


def _expect_alike(outputs: Iterable[Tensor], fused: Iterable[Tensor]) -> None:
    for one, other in zip(outputs, fused, strict=True):
        if bool((one - other).abs().max() > TOLERANCE * one.abs().max()):
            raise CannotFuseError("their networks give other outputs when they are fused")
