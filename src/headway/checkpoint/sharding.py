"""Divides the tensors of a checkpoint over the ranks, and copies them to host memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

import torch

from headway.checkpoint.tensors_file import TensorsFile
from headway.core.owner_shares import assign_largest_first

# Random states differ between the ranks; rank 0 writes its own.
LEAD_ONLY_PREFIX = "random/"


def assign_owners(tensors: Mapping[str, torch.Tensor], size: int) -> dict[str, int]:
    """Returns the rank that writes each tensor, with bytes as even as whole tensors allow.

    Every rank computes the same assignment.

    Args:
        tensors: tensors by name.
        size: number of ranks.
    """
    shared = sorted(name for name in tensors if not name.startswith(LEAD_ONLY_PREFIX))
    owners = assign_largest_first([tensors[name].numel() * tensors[name].element_size() for name in shared], size)
    return dict.fromkeys(tensors, 0) | dict(zip(shared, owners, strict=True))


def compute_layout_digest(tensors: Mapping[str, torch.Tensor], owner_by_name: Mapping[str, int]) -> str:
    """Returns a sha256 of names, dtypes, shapes and owners, on which all ranks have to agree."""
    # Random states are rank 0's alone, so they are left out.
    shared = {name: tensor for name, tensor in tensors.items() if not name.startswith(LEAD_ONLY_PREFIX)}
    layout = [(*entry, owner_by_name[entry[0]]) for entry in TensorsFile(shared).entries]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def copy_to_host(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Copies tensors to host memory, asynchronously on CUDA.

    The copies to pinned memory are queued on the training stream, so later changes of the tensors come after them.

    Returns:
        the copies, and a function that waits until they are complete.
    """
    copies, devices = {}, set()
    for name, tensor in tensors.items():
        source = tensor.detach()
        if source.is_cuda:
            pinned = torch.empty_like(source, device="cpu", pin_memory=True)
            copies[name] = pinned.copy_(source, non_blocking=True)
            devices.add(source.device)
        else:
            # Without `copy`, `to` returns the tensor itself, which training changes.
            copies[name] = source.to("cpu", copy=True)
    # One event per device marks the end of all of its copies.
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def synchronize() -> None:
        for event in events:
            event.synchronize()

    return copies, synchronize
