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
from headway.model.model_size import ModelSize, measure_model_size

LOG = logging.getLogger("headway.setup")

N = TypeVar("N", bound=str)

FIRST_TRIAL_SAMPLES = 2
"""Samples of the first, smallest trial. Each next one has four times as many."""
MIN_TURN_S = 0.2
"""Trials grow until all contexts together take so long. A shorter trial measures mostly kernel launches."""
NUM_ROUNDS = 9
"""Number of rounds that count."""
MAX_ROUNDS_S = 2.0
"""Seconds after which no further round begins."""
HOPELESS_RATIO = 3.0
"""A context so many times as slow as the fastest is dropped: a type without hardware units may be 100 times as slow."""
LONG_PASS_S = 1.0
"""A first pass on a CPU that takes longer is not repeated, as warming up is a small part of it."""


def build_trial_pass(
    model: torch.nn.Module, images: torch.Tensor, context: Callable[[], AbstractContextManager[Any]]
) -> Callable[[int], None]:
    """Builds a function that runs forward and backward over a number of samples, and restores the training state.

    Args:
        images: repeated if more samples are asked for.
        context: returns the context of the forward pass.
    """

    def run_pass(samples: int) -> None:
        with preserve_training_state(model):
            _run_pass(model, images[torch.arange(samples, device=images.device) % len(images)], context)

    return run_pass


def count_network(
    model: torch.nn.Module, images: torch.Tensor, context: Callable[[], AbstractContextManager[Any]]
) -> ModelSize:
    """Returns the parameters of a network, and its multiply-adds if torch can count them; the network must work.

    Args:
        images: one image, [1, C, H, W].
        context: returns the context of the forward pass.
    """
    try:
        # Dropout draws numbers here, which the run must not miss.
        with torch.random.fork_rng(devices=[]), context():
            return measure_model_size(model, images)
    # The error is one of torch's counter, as the network was tried before.
    except Exception as error:
        LOG.debug("multiply-adds were not counted: %s", error)
        return ModelSize(sum(parameter.numel() for parameter in model.parameters()), None)


def measure_seconds_per_sample(
    model: torch.nn.Module,
    images: torch.Tensor,
    contexts: Mapping[N, Callable[[], AbstractContextManager[Any]]],
) -> dict[N, float]:
    """Measures the seconds of forward and backward per sample in each context. It takes some three seconds in all.

    Args:
        images: one micro-batch.
        contexts: the contexts of the forward pass by name.

    Returns:
        The median over several rounds by name; the contexts take turns. A context that fails has inf; one that is more
        than three times as slow as the fastest has the time of its first passes.

    Raises:
        TrainingError: two samples do not fit into the device's memory.
    """
    seconds_by_name: dict[N, float] = {}
    samples = min(FIRST_TRIAL_SAMPLES, len(images))
    with preserve_training_state(model):
        remaining = dict(contexts)
        try:
            while True:
                remaining = _drop_slow_contexts(model, images[:samples], remaining, seconds_by_name)
                # Grow until a turn is long enough to measure, or there is nothing more to compare or to grow with.
                if (
                    samples == len(images)
                    or len(remaining) < 2
                    or sum(seconds_by_name[name] for name in remaining) * samples >= MIN_TURN_S
                ):
                    break
                samples = min(4 * samples, len(images))
        # The previous size fitted.
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            if samples == FIRST_TRIAL_SAMPLES:
                what = f"not even {samples} samples fit into the device's memory"
                raise TrainingError(what, where="precision") from None
            samples = max(FIRST_TRIAL_SAMPLES, samples // 4)
        if len(remaining) < 2 or sum(seconds_by_name[name] for name in remaining) * samples > MAX_ROUNDS_S:
            return seconds_by_name
        times_by_name: dict[N, list[float]] = {name: [] for name in remaining}
        # The order alternates, so that a device that warms up or slows down treats all alike.
        names = list(remaining)
        start_s = perf_counter()
        for round_index in range(NUM_ROUNDS):
            for name in names if round_index % 2 else reversed(names):
                times_by_name[name].append(
                    time_pass(model, images[:samples], remaining[name], warm=round_index > 0) / samples
                )
            if perf_counter() - start_s > MAX_ROUNDS_S:
                break
    return seconds_by_name | {name: median(times) for name, times in times_by_name.items()}


def _drop_slow_contexts(
    model: torch.nn.Module,
    images: torch.Tensor,
    contexts: dict[N, Callable[[], AbstractContextManager[Any]]],
    seconds_by_name: dict[N, float],
) -> dict[N, Callable[[], AbstractContextManager[Any]]]:
    """Times one pass in each context, and returns the contexts that are less than three times as slow as the fastest.

    Args:
        seconds_by_name: seconds of a sample by name; updated in place.
    """
    for name, context in contexts.items():
        try:
            seconds_by_name[name] = time_pass(model, images, context) / len(images)
        except torch.cuda.OutOfMemoryError:
            raise
        # An operation of the user's network may not exist for this type.
        except Exception as error:
            LOG.debug("a pass in %s failed: %s", name, error)
            model.zero_grad(set_to_none=True)
            seconds_by_name[name] = math.inf
    fastest_s = min(seconds_by_name.values())
    for name, context in contexts.items():
        # Timed once more before it is dropped: another program may have used the cores.
        if HOPELESS_RATIO * fastest_s <= seconds_by_name[name] < math.inf:
            seconds_by_name[name] = min(
                seconds_by_name[name], time_pass(model, images, context, warm=True) / len(images)
            )
    return {name: context for name, context in contexts.items() if seconds_by_name[name] < HOPELESS_RATIO * fastest_s}


def time_pass(
    model: torch.nn.Module, images: torch.Tensor, context: Callable[[], AbstractContextManager[Any]], warm: bool = False
) -> float:
    """Returns the seconds of one pass. Unless `warm`, a pass before it warms up libraries and caches."""
    # Kernels on a GPU run asynchronously, so the clock is read after a synchronize.
    synchronize: Callable[[], object] = torch.cuda.synchronize if images.device.type == "cuda" else lambda: None
    seconds = 0.0
    for _ in range(1 if warm else 2):
        synchronize()
        start_s = perf_counter()
        _run_pass(model, images, context)
        synchronize()
        seconds = perf_counter() - start_s
        model.zero_grad(set_to_none=True)
        if seconds > LONG_PASS_S and images.device.type == "cpu":
            break
    return seconds


def _run_pass(model: torch.nn.Module, images: torch.Tensor, context: Callable[[], AbstractContextManager[Any]]) -> None:
    with context():
        outputs = model(images)
    # Any loss will do: the time of backward does not depend on it.
    outputs.float().sum().backward()
