"""Forward and backward tried at set-up, after which the network is as it was."""

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
from headway.core.modules import leaving_no_trace

LOG = logging.getLogger("headway.train")

N = TypeVar("N", bound=str)

FIRST_TRIAL_SAMPLES = 2
"""Of the first, smallest trial; four times as many in each next one."""
MIN_TURN_S = 0.2
"""Trials grow until all arms together take so long: what is smaller measures the start of kernels."""
ROUNDS, BUDGET_S = 9, 2.0
"""Of the trials that count: so many, or as many as come into the budget, and one at least."""
HOPELESS_RATIO = 3.0
"""An arm that takes so many times as long as another leaves: a type without units may take a hundred times."""
LONG_PASS_S = 1.0
"""A first pass on a CPU that takes longer needs no second one: warming up is a small part of it."""


def build_attempt(
    model: torch.nn.Module, images: torch.Tensor, context: Callable[[], AbstractContextManager[Any]]
) -> Callable[[int], None]:
    """Forward and backward over so many samples, that leaves no trace."""

    def run(samples: int) -> None:
        with leaving_no_trace(model):
            _run_pass(model, images[torch.arange(samples, device=images.device) % len(images)], context)

    return run


def measure_seconds_per_sample(
    model: torch.nn.Module,
    images: torch.Tensor,
    arms: Mapping[N, Callable[[], AbstractContextManager[Any]]],
) -> dict[N, float]:
    """How long forward and backward of a sample take within each context; the arms take turns.

    First over a few samples, then over more, until a turn of all takes 0.2 s, the images are used up, or the device's
    memory is; the median over the rounds at that size counts. In all it takes some three seconds. An arm that takes
    more than three times as long as the fastest leaves with what was seen of it; one that fails takes inf.

    Args:
        images: of one micro-batch.
    """
    seconds: dict[N, float] = {}
    samples = min(FIRST_TRIAL_SAMPLES, len(images))
    with leaving_no_trace(model):
        left = dict(arms)
        try:
            while True:
                for name in list(left):
                    try:
                        seconds[name] = _time_pass(model, images[:samples], left[name]) / samples
                    except torch.cuda.OutOfMemoryError:
                        raise
                    except Exception as error:  # an operation that the user's network has, and this type has not
                        LOG.debug("a pass in %s failed: %s", name, error)
                        model.zero_grad(set_to_none=True)
                        seconds[name] = math.inf
                best = min(seconds.values())
                for name in left:
                    if (
                        HOPELESS_RATIO * best <= seconds[name] < math.inf
                    ):  # once more: another program may have had the cores
                        again = _time_pass(model, images[:samples], left[name], warm=True) / samples
                        seconds[name] = min(seconds[name], again)
                left = {name: one for name, one in left.items() if seconds[name] < HOPELESS_RATIO * best}
                if samples == len(images) or len(left) < 2 or sum(seconds[n] for n in left) * samples >= MIN_TURN_S:
                    break
                samples = min(4 * samples, len(images))
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            if samples == FIRST_TRIAL_SAMPLES:
                what = f"not even {samples} samples fit into the device's memory"
                raise TrainingError(what, where="precision") from None
            samples = max(FIRST_TRIAL_SAMPLES, samples // 4)
        if len(left) < 2 or sum(seconds[name] for name in left) * samples > BUDGET_S:
            return seconds
        found: dict[N, list[float]] = {name: [] for name in left}
        started, names = perf_counter(), list(left)
        for number in range(ROUNDS):
            for name in names if number % 2 else reversed(names):
                found[name].append(_time_pass(model, images[:samples], left[name], warm=number > 0) / samples)
            if perf_counter() - started > BUDGET_S:
                break
    return seconds | {name: median(times) for name, times in found.items()}


def _time_pass(
    model: torch.nn.Module, images: torch.Tensor, context: Callable[[], AbstractContextManager[Any]], warm: bool = False
) -> float:
    """Seconds of one pass; of the second where the first one has to warm up what it runs on."""
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
