"""Trial passes during setup: forward and backward, after which the network is as before."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch

from headway.core.errors import TrainingError
from headway.core.modules import preserve_training_state

LOG = logging.getLogger("headway.train")

N = TypeVar("N", bound=str)

FIRST_TRIAL_SAMPLES = 2
"""Samples of the first, smallest trial. Each next one has four times as many."""
MIN_TURN_S = 0.2
"""Trials grow until all contexts together take so long. A shorter trial measures mostly the start of kernels."""
ROUNDS, BUDGET_S = 9, 2.0
"""Number of trials that count, and the seconds they may take together. One is made in any case."""
HOPELESS_RATIO = 3.0
"""A context so many times as slow as the fastest is dropped: a type without hardware units may be 100 times as slow."""
LONG_PASS_S = 1.0
"""A first pass on a CPU that takes longer is not repeated, as warming up is a small part of it."""


def build_attempt(
    model: torch.nn.Module, images: torch.Tensor, context: Callable[[], AbstractContextManager[Any]]
) -> Callable[[int], None]:
    """Builds a function that runs forward and backward over so many samples, and leaves no trace."""

    def run(samples: int) -> None:
        with preserve_training_state(model):
            _run_pass(model, images[torch.arange(samples, device=images.device) % len(images)], context)

    return run


def measure_seconds_per_sample(
    model: torch.nn.Module,
    images: torch.Tensor,
    arms: Mapping[N, Callable[[], AbstractContextManager[Any]]],
) -> dict[N, float]:
    """Measures the seconds of forward and backward per sample in each context. It takes some three seconds in all.

    Args:
        images: one micro-batch. arms: the contexts by name.

    Returns:
        the median over several rounds, in which the contexts take turns. A context that fails has inf; one that is more
        than three times as slow as the fastest has the time of its first passes.
    """
    seconds: dict[N, float] = {}
    samples = min(FIRST_TRIAL_SAMPLES, len(images))
    with preserve_training_state(model):
        left = dict(arms)
        try:
            while True:
                left = _drop_slow_arms(model, images[:samples], left, seconds)
                # Grow until a turn is long enough to measure, or there is nothing more to compare or to grow with.
                if samples == len(images) or len(left) < 2 or sum(seconds[n] for n in left) * samples >= MIN_TURN_S:
                    break
                samples = min(4 * samples, len(images))
        # The size before this one fitted.
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            if samples == FIRST_TRIAL_SAMPLES:
                what = f"not even {samples} samples fit into the device's memory"
                raise TrainingError(what, where="precision") from None
            samples = max(FIRST_TRIAL_SAMPLES, samples // 4)
        if len(left) < 2 or sum(seconds[name] for name in left) * samples > BUDGET_S:
            return seconds
        rounds: dict[N, list[float]] = {name: [] for name in left}
        # The order alternates, so that a device that warms up or slows down treats all alike.
        started, names = perf_counter(), list(left)
        for number in range(ROUNDS):
            for name in names if number % 2 else reversed(names):
                rounds[name].append(_time_pass(model, images[:samples], left[name], warm=number > 0) / samples)
            if perf_counter() - started > BUDGET_S:
                break
    return seconds | {name: median(times) for name, times in rounds.items()}


def _drop_slow_arms(
    model: torch.nn.Module,
    images: torch.Tensor,
    arms: dict[N, Callable[[], AbstractContextManager[Any]]],
    seconds: dict[N, float],
) -> dict[N, Callable[[], AbstractContextManager[Any]]]:
    """Times one pass in each context, and returns the contexts that are still in the race.

    Args:
        seconds: by name, for a sample; updated.
    """
    for name, context in arms.items():
        try:
            seconds[name] = _time_pass(model, images, context) / len(images)
        except torch.cuda.OutOfMemoryError:
            raise
        # An operation of the user's network may not exist for this type.
        except Exception as error:
            LOG.debug("a pass in %s failed: %s", name, error)
            model.zero_grad(set_to_none=True)
            seconds[name] = math.inf
    best = min(seconds.values())
    for name, context in arms.items():
        # Timed once more before it is dropped: another program may have had the cores.
        if HOPELESS_RATIO * best <= seconds[name] < math.inf:
            seconds[name] = min(seconds[name], _time_pass(model, images, context, warm=True) / len(images))
    return {name: context for name, context in arms.items() if seconds[name] < HOPELESS_RATIO * best}


def _time_pass(
    model: torch.nn.Module, images: torch.Tensor, context: Callable[[], AbstractContextManager[Any]], warm: bool = False
) -> float:
    """Times one pass. Unless `warm`, a pass before it warms up libraries and caches."""
    wait: Callable[[], object] = torch.cuda.synchronize if images.device.type == "cuda" else lambda: None
    seconds = 0.0
    for _ in range(1 if warm else 2):
        wait()
        started = perf_counter()
        _run_pass(model, images, context)
        wait()
        seconds = perf_counter() - started
        model.zero_grad(set_to_none=True)
        if seconds > LONG_PASS_S and images.device.type == "cpu":
            break
    return seconds


def _run_pass(model: torch.nn.Module, images: torch.Tensor, context: Callable[[], AbstractContextManager[Any]]) -> None:
    with context():
        outputs = model(images)
    outputs.float().sum().backward()
