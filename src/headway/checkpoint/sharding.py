"""Which rank writes which tensors of a checkpoint, and the copy that it writes from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

import torch

from headway.checkpoint.tensors_file import TensorsFile

OF_RANK_0 = "random/"
"""Random states differ between the ranks: those of rank 0 are kept, and it writes them."""


def owners(tensors: Mapping[str, torch.Tensor], size: int) -> dict[str, int]:
    """The rank that writes each tensor: the same on every rank, the bytes as even as whole tensors can make them.

    The largest goes first, always to the rank that has the least (longest processing time first: at most 4/3 of the
    best there is; Graham 1969, doi:10.1137/0117039).
    """
    sizes = {name: 0 if name.startswith(OF_RANK_0) else t.numel() * t.element_size() for name, t in tensors.items()}
    out, load = {}, [0] * size
    for name in sorted(tensors, key=lambda name: (-sizes[name], name)):
        out[name] = 0 if name.startswith(OF_RANK_0) else min(range(size), key=load.__getitem__)
        load[out[name]] += sizes[name]
    return out


def layout(tensors: Mapping[str, torch.Tensor], owner: Mapping[str, int]) -> str:
    """A digest of what the ranks have to agree on: names, dtypes, shapes and owners of the tensors they all have."""
    entries = TensorsFile({name: t for name, t in tensors.items() if not name.startswith(OF_RANK_0)}).entries
    return hashlib.sha256(json.dumps([(*entry, owner[entry[0]]) for entry in entries]).encode()).hexdigest()


def copied(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Copies in the host's memory, which stay as they are while training goes on; and what waits until they are made.

    On CUDA the host does not wait: the copies go into pinned memory in the order of the stream that trains, so what
    changes the tensors afterwards comes after them.
    """
    copies, devices = {}, set()
    for name, tensor in tensors.items():
        source = tensor.detach()
        if source.is_cuda:
            pinned = torch.empty_like(source, device="cpu", pin_memory=True)
            copies[name] = pinned.copy_(source, non_blocking=True)
            devices.add(source.device)
        else:
            copies[name] = source.to("cpu", copy=True)
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return copies, wait
