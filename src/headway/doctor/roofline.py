"""Places the network under the roofline of its device: peak arithmetic, memory bandwidth, and its arithmetic intensity
(Williams, Waterman and Patterson 2009, Roofline)."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch

from headway.core.modules import preserve_training_state
from headway.doctor.loop_measurement import build_wait
from headway.doctor.measurement_job import MeasurementJob
from headway.setup.prepare import prepare_batch

# Side of the matrices whose product is timed: 2 GFLOP.
SIDE = 1024
# More than the caches of most processors hold.
COPIED_BYTES = 64 * 2**20
TIMES = 5
# A fact of the profile: 1 if all images of the set have the size of a batch, otherwise 0.
SAME_SIZE = "images of the batch's size"
# Memory moves of an activation: written and read in the forward pass, and its gradient in the backward pass.
MOVED = 4


def measure_roofline(job: MeasurementJob) -> dict[str, float]:
    """Measures `peak_flops` (matrix product in the run's precision, FLOP/s), `peak_bytes_s` (of a copy) and
    `intensity`.

    `intensity` is FLOP per byte of a training step: activations and weights, if nothing stays in caches. All three are
    missing if multiply-adds are unknown. SAME_SIZE is there for all data that are not synthetic.
    """
    setup = job.setup
    sizes = _compare_sizes(job)
    if setup.counts is None or not setup.counts.multiply_adds:
        return sizes
    device, wait = setup.device, build_wait(setup.device)
    left = torch.randn(SIDE, SIDE, device=device)
    with setup.precision.autocast():
        kind = torch.mm(left, left).dtype
    left = left.to(kind)
    flops = 2 * SIDE**3 / _measure_best(lambda: torch.mm(left, left), wait)
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    bytes_s = 2 * COPIED_BYTES / _measure_best(lambda: target.copy_(source), wait)
    # Backward takes twice the forward arithmetic: gradients of weights and of activations.
    arithmetic = 3 * 2 * setup.counts.multiply_adds * job.batch
    return {**sizes, "peak_flops": flops, "peak_bytes_s": bytes_s, "intensity": arithmetic / _count_moved_bytes(job)}


def _compare_sizes(job: MeasurementJob) -> dict[str, float]:
    dataset = job.setup.train
    if dataset is None:
        return {}
    height, width = job.load_batches()[0].images.shape[1:3]
    same = np.all(dataset.height == height) and np.all(dataset.width == width)
    return {SAME_SIZE: float(same)}


def _measure_best(work: Callable[[], object], wait: Callable[[], object]) -> float:
    rates = []
    for _ in range(TIMES):
        wait()
        begun = perf_counter()
        work()
        wait()
        rates.append(perf_counter() - begun)
    return min(rates)


def _count_moved_bytes(job: MeasurementJob) -> float:
    setup, batch = job.setup, job.load_batches()[0]
    images, _ = prepare_batch(setup, batch, 1)
    # Activations grow with the batch, so 8 images are enough to count them.
    some = images[: min(len(images), 8)]
    seen = [0]

    def add_bytes(module: torch.nn.Module, given: object, made: object) -> None:
        if isinstance(made, torch.Tensor) and not list(module.children()):
            seen[0] += made.numel() * made.element_size()

    handles = [module.register_forward_hook(add_bytes) for module in setup.model.modules()]
    try:
        with preserve_training_state(setup.model), torch.no_grad(), setup.precision.autocast():
            setup.model(some)
    finally:
        for handle in handles:
            handle.remove()
    weights = sum(value.numel() * value.element_size() for value in setup.model.parameters())
    return MOVED * seen[0] / len(some) * job.batch + MOVED * weights
