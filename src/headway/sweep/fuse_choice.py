"""Which trials can be fused, and whether it pays: a measurement on the batch of their next step."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headway.core.modules import preserve_training_state
from headway.data.batch import Batch
from headway.model.auxiliary import HasAuxiliaryLoss
from headway.setup.prepare import prepare_batch
from headway.setup.task import Classification, MultiLabel, Regression
from headway.sweep.fused_activations import CannotFuseError
from headway.sweep.fused_network import FusedNetwork
from headway.sweep.fused_pass import Member, run_together
from headway.sweep.records import Fused
from headway.training.trainer import Trainer

LEAST_GAIN = 1.15
"""Gain in forward and backward from which trials are fused. Below it, noise of the measurement could hide a loss."""
ROUNDS = 4
CLEAR_GAINS = {1: (1.05, math.inf), 2: (1.1, 1.35), 3: (1.12, 1.25)}
"""A measurement ends after so many rounds if their gain lies outside, as each round costs two steps of training: two
rounds too many take 1.3 % of a training of 300 steps. To miss a gain near the least one costs no more."""
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

    def to_record(self) -> Fused:
        """Returns the choice as the journal has it."""
        return Fused(self.trials, self.at_once, self.gain, self.network)

    def describe(self) -> str:
        """Describes a measurement, for the terminal; empty for a choice that follows an earlier one."""
        if not self.alone_s:
            return ""
        times = f"forward and backward take {1e3 * self.alone_s:.1f} ms one by one and {1e3 * self.fused_s:.1f} fused"
        how = f"fused by {self.at_once}" if self.at_once else "not fused"
        return f"{len(self.trials)} trials: {times} ({self.gain:.2f} times as fast), so they are {how}."


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
    """Returns a text that is equal for trials whose networks have the same code, and the same batch."""
    recipe = trainer.setup.recipe
    same = {
        "model": recipe.model.model_dump(mode="json", exclude={"ema"}),
        "channels_last": recipe.channels_last,
        "batch": recipe.batch,
    }
    return hashlib.sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()[:16]


def measure_gain(trainers: Sequence[Trainer], batch: Batch) -> FuseChoice:
    """Measures forward and backward of trials one by one and fused, on the batch of their next step.

    What it computes is thrown away: the trials are as before.

    Raises:
        CannotFuseError: the networks use something that is not known, or give other outputs when they are fused.
    """
    # One thread's own time has no part of the loader's threads.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.process_time
    members = {number: Member(trainer, trainer.setup.steps) for number, trainer in enumerate(trainers)}
    few = trainers[:FEW_AT_ONCE]
    with ExitStack() as stack:
        for trainer in trainers:
            stack.enter_context(preserve_training_state(trainer.setup.model))
        began = clock()
        outputs = _run_alone(few, batch)
        is_short = clock() - began < SHORT_PASS_S * len(few)
        at_once = len(members) if is_short else min(len(members), FEW_AT_ONCE)
        # The first group speaks for the others, whose networks have the same code.
        first = Fused(tuple(members), at_once, 0.0, "").find_places(0)
        part, own = {number: members[number] for number in first}, trainers[: len(first)]
        network = FusedNetwork([one.trainer.setup.model for one in part.values()])
        if len(own) > len(few):
            outputs = _run_alone(own, batch)
        fused = run_together(part, network, batch)
        _expect_alike(outputs[: len(own)], [one.outputs for one in fused.values()])
        alone_s, fused_s = list[float](), list[float]()
        while len(alone_s) < ROUNDS:
            began = clock()
            run_together(part, network, batch)
            middle = clock()
            _run_alone(own, batch)
            fused_s.append(middle - began)
            alone_s.append(clock() - middle)
            low, high = CLEAR_GAINS.get(len(alone_s), (0.0, math.inf))
            if not low < sum(alone_s) / sum(fused_s) < high:
                break
    # Of each round by itself: what else the machine does slows both.
    gain = statistics.median(alone / fused for alone, fused in zip(alone_s, fused_s, strict=True))
    return FuseChoice(
        trials=(),
        at_once=at_once if gain >= LEAST_GAIN else 0,
        gain=gain,
        network="",
        alone_s=statistics.median(alone_s) * len(members) / len(first),
        fused_s=statistics.median(fused_s) * len(members) / len(first),
    )


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
