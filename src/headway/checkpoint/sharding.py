"""Divides the tensors of a checkpoint over the ranks, and copies them to host memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

import torch

from headway.checkpoint.tensors_file import TensorsFile

# Random states differ between the ranks; rank 0 writes its own.
OF_RANK_0 = "random/"


def assign_owners(tensors: Mapping[str, torch.Tensor], size: int) -> dict[str, int]:
    """Assigns each tensor to the rank that writes it, with bytes as even as whole tensors allow.

    Every rank computes the same assignment. The largest tensor goes first, always to the rank with the fewest bytes:
    longest processing time first, at most 4/3 of the optimum (Graham 1969, doi:10.1137/0117039).
    """
    sizes = {name: 0 if name.startswith(OF_RANK_0) else t.numel() * t.element_size() for name, t in tensors.items()}
    out, load = {}, [0] * size
    for name in sorted(tensors, key=lambda name: (-sizes[name], name)):
        out[name] = 0 if name.startswith(OF_RANK_0) else min(range(size), key=load.__getitem__)
        load[out[name]] += sizes[name]
    return out


def compute_layout_digest(tensors: Mapping[str, torch.Tensor], owner: Mapping[str, int]) -> str:
    """Computes a digest of names, dtypes, shapes and owners, on which all ranks have to agree."""
    # Random states are rank 0's alone, so they are left out.
    entries = TensorsFile({name: t for name, t in tensors.items() if not name.startswith(OF_RANK_0)}).entries
    return hashlib.sha256(json.dumps([(*entry, owner[entry[0]]) for entry in entries]).encode()).hexdigest()


def copy_to_host(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Copies tensors to host memory, and returns the copies with a function that waits until they are complete.

    On CUDA the host does not wait: the copies to pinned memory are queued on the training stream, so later changes of
    the tensors come after them.
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

    def wait() -> None:
        for event in events:
            event.synchronize()

    return copies, wait
