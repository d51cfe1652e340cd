"""Memory of one device in training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from headway.core.workload import Workload

# Share of a device's memory that a step may use; allocator and libraries take the rest.
USABLE_MEMORY = 0.9


@final
@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that training needs on one device."""

    # Weights, gradients, all-reduce buckets, optimizer state, and anything else of constant size.
    weights: int
    # Activations saved for backward, and their gradients.
    activations: int
    capacity: float
    # Largest micro-batch that fits.
    most_samples: int

    @property
    def used(self) -> int:
        """Bytes of weights and activations together."""
        return self.weights + self.activations

    @property
    def fits(self) -> bool:
        """True if a step fits in the memory of the device."""
        return self.used <= USABLE_MEMORY * self.capacity


def estimate_memory(workload: Workload, samples: float, capacity: float, devices: int) -> DeviceMemory:
    """Estimates the memory of one device as the dry run does, without prefetched batches.

    Args:
        samples: micro-batch of the device; below 1: a strip of an image. capacity: bytes of the device.
        devices: number that exchange gradients.
    """
    # With several devices each gradient exists twice: in the parameter and in the all-reduce bucket.
    gradients = sum(layer.gradient_bytes for layer in workload.layers) * (2 if devices > 1 else 1)
    weights = gradients + sum(layer.weight_bytes for layer in workload.layers)
    weights += workload.step.update.state_bytes + workload.step.update.beside_bytes
    # Backward holds the gradients of two activations at a time: of a layer's output and of its input.
    fixed, back = workload.count_saved_bytes(0), 2 * max(layer.activation_bytes for layer in workload.layers)
    each = workload.count_saved_bytes(1) - fixed + back
    most = max(0, math.floor((USABLE_MEMORY * capacity - weights - fixed) / max(1, each)))
    whole = samples if samples < 1 else math.ceil(samples)
    return DeviceMemory(weights, round(fixed + whole * each), capacity, most)
