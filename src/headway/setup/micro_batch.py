"""Resolves `micro_batch: auto`: the largest part of a batch that fits into memory at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headway.core.errors import TrainingError
from headway.core.free_memory import read_free_memory_bytes

SHARE_OF_MEMORY = 0.5
"""Share of the free memory for tensors that forward saves for backward. The rest is for gradients of activations, the
optimizer, data and other programs."""


def find_largest_micro_batch(batch: int, device: torch.device, attempt: Callable[[int], None]) -> tuple[int, str]:
    """Returns the largest of batch, batch / 2, batch / 3, ... (rounded up) that fits, and the reason.

    Args:
        batch: samples of one step on this rank.
        attempt: runs forward and backward over so many samples, and leaves no trace.
    """
    # On a GPU sizes are tried until one does not run out of memory. On a CPU the kernel would kill the process, so the
    # size is computed from the bytes that a sample keeps for backward.
    if device.type == "cuda":
        return _find_by_trial(batch, attempt)
    # The difference leaves out constant parts. Batch norm needs two samples at least.
    saved = (measure_saved_bytes(attempt, 4) - measure_saved_bytes(attempt, 2)) // 2
    return estimate_micro_batch(batch, saved, device)


def estimate_micro_batch(batch: int, saved: int, device: torch.device) -> tuple[int, str]:
    """Computes the micro-batch that fits, and the reason. Args: saved: bytes that one sample keeps for backward."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_free_memory_bytes()
    available = int(free * SHARE_OF_MEMORY)
    fits = max(1, available // max(1, saved))
    parts = -(-batch // fits)
    reason = f"{saved / 1e6:.2f} MB a sample kept for backward, {available / 1e9:.1f} GB for it"
    return -(-batch // parts), reason


def measure_saved_bytes(attempt: Callable[[int], None], samples: int) -> int:
    """Measures the bytes that forward over so many samples keeps for backward, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attempt(samples)
    return sum(storages.values())


def _find_by_trial(batch: int, attempt: Callable[[int], None]) -> tuple[int, str]:
    parts = 1
    while True:
        size = -(-batch // parts)
        try:
            attempt(size)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            if size == 1:
                what, fix = (
                    "not even one sample fits into the device's memory",
                    "Take smaller images.",
                )
                raise TrainingError(what, where="micro_batch", fix=fix) from None
            parts = min(2 * parts, batch)
        else:
            torch.cuda.empty_cache()
            return size, f"the largest of batch / 1, 2, 4, ... that ran in {torch.cuda.get_device_name()}"
