"""Buffers of a network, above all the running statistics of batch norm, when several workers change them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase


def list_momenta(model: torch.nn.Module) -> dict[str, float]:
    """Returns the momentum of each running mean and variance, by the name of the buffer."""
    return {
        f"{prefix}.{name}" if prefix else name: module.momentum
        for prefix, module in model.named_modules()
        if isinstance(module, _NormBase) and module.momentum is not None
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    }


@final
class SharedBuffers:
    """The buffers at the server.

    A worker moved the statistics r that it had read to r' = (1 - m) r + m b, where b are the mean and variance of its
    batch. The server's s becomes (1 - m) s + m b: the moving mean over all batches in the order in which they are
    applied. Counts, and other buffers, change by as much as the worker changed them.

    Args:
        buffers: name and tensor of each buffer; changed in place.
        momenta: m, for running statistics; see `list_momenta`.
    """

    def __init__(self, buffers: Mapping[str, Tensor], momenta: Mapping[str, float]) -> None:
        self.names, self.tensors = tuple(buffers), list(buffers.values())
        self._momenta = [momenta.get(name) for name in self.names]
        self._read: dict[int, list[Tensor]] = {}

    def note_read(self, worker: int) -> None:
        """Remembers the buffers that a worker has just read."""
        self._read[worker] = [tensor.clone() for tensor in self.tensors]

    def forget(self, worker: int) -> None:
        """Forgets a worker that is gone."""
        self._read.pop(worker, None)

    @torch.no_grad()
    def add(self, worker: int, pushed: Sequence[Tensor], *, is_stale: bool) -> None:
        """Takes over what a worker's batch changed.

        Args:
            pushed: the worker's buffers after its batch.
            is_stale: the buffers have changed since the worker read them.
        """
        for own, new, read, momentum in zip(self.tensors, pushed, self._read[worker], self._momenta, strict=True):
            # Alone a worker's buffers are taken as they are, to the last bit.
            if not is_stale or own.dtype == torch.bool:
                own.copy_(new)
            elif momentum is not None:
                own.mul_(1 - momentum).add_(new - (1 - momentum) * read)
            else:
                own.add_(new - read)
