"""Resolves `micro_batch: auto`: the largest part of a batch that fits into memory at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headway.core.errors import TrainingError
from headway.core.free_memory import read_free_memory_bytes
from headway.core.text_format import format_bytes

USED_MEMORY_SHARE = 0.5
"""Share of the free memory for tensors that forward saves for backward. The rest is for gradients of activations, the
optimizer, data and other programs."""


def find_largest_micro_batch(batch: int, device: torch.device, run_trial: Callable[[int], None]) -> tuple[int, str]:
    """Returns the largest of batch, batch / 2, batch / 3, ... (rounded up) that fits, and the reason.

    Args:
        batch: samples of one step on this rank.
        device: the device that trains.
        run_trial: runs forward and backward over a number of samples, and restores the training state.

    Raises:
        TrainingError: not even one sample fits.
    """
    # On a GPU sizes are tried until one does not run out of memory. On a CPU the kernel would kill the process, so the
    # size is computed from the bytes that a sample keeps for backward.
    if device.type == "cuda":
        return _find_by_trial(batch, run_trial)
    # The difference excludes memory that does not depend on the batch. Batch norm needs at least two samples.
    saved_bytes = (measure_saved_bytes(run_trial, 4) - measure_saved_bytes(run_trial, 2)) // 2
    return estimate_micro_batch(batch, saved_bytes, device)


def estimate_micro_batch(batch: int, saved_bytes: int, device: torch.device) -> tuple[int, str]:
    """Returns the micro-batch that fits into the free memory, and the reason.

    Args:
        batch: samples of one step on this rank.
        saved_bytes: bytes that one sample keeps for backward.
        device: the device that trains.
    """
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_free_memory_bytes()
    available_bytes = int(free_bytes * USED_MEMORY_SHARE)
    max_samples = max(1, available_bytes // max(1, saved_bytes))
    parts = -(-batch // max_samples)
    reason = f"{format_bytes(saved_bytes)} a sample kept for backward, {format_bytes(available_bytes)} for it"
    return -(-batch // parts), reason


def measure_saved_bytes(run_trial: Callable[[int], None], samples: int) -> int:
    """Returns the bytes that forward over a number of samples keeps for backward, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # Several saved tensors may be views of one storage.
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run_trial(samples)
    return sum(storages.values())


def _find_by_trial(batch: int, run_trial: Callable[[int], None]) -> tuple[int, str]:
    parts = 1
    while True:
        size = -(-batch // parts)
        try:
            run_trial(size)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            if size == 1:
                what, fix = "not even one sample fits into the device's memory", "Take smaller images."
                raise TrainingError(what, where="micro_batch", fix=fix) from None
            # Doubling keeps the number of failed trials small.
            parts = min(2 * parts, batch)
        else:
            torch.cuda.empty_cache()
            return size, f"the largest of batch / 1, 2, 4, ... that ran in {torch.cuda.get_device_name()}"
