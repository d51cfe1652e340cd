"""Buckets: gradients that travel together. Many small sums cost their latency each; one that is too large ends late."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import final

import torch

ALIGNED = 64
"""Elements: buckets end at a multiple of it and of a host's ranks, so that slices are even and begin on cache lines."""

LAST_SHARE = 4
"""The last bucket, for which nothing is left to hide it, is at most 1/4 of the others."""


def plan(sizes_bytes: Sequence[int], kinds: Sequence[object], bucket_bytes: int) -> list[list[int]]:
    """Which parameters travel together, each bucket in the order in which it is full.

    Args:
        sizes_bytes: of each parameter, in the order in which gradients become ready.
        kinds: what must not be mixed in a bucket (the data type).
        bucket_bytes: a bucket is full above it; a larger parameter has one of its own.

    Returns:
        Numbers of the parameters of each bucket.
    """
    done: list[list[int]] = []
    open_: dict[object, list[int]] = {}
    filled: dict[object, int] = {}
    for number, (size, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
        if kind in open_ and filled[kind] + size > bucket_bytes:
            done.append(open_.pop(kind))
        open_.setdefault(kind, []).append(number)
        filled[kind] = filled[kind] + size if len(open_[kind]) > 1 else size
    done += sorted(open_.values(), key=lambda numbers: numbers[-1])
    if done:
        done[-1:] = _split_tail(done[-1], sizes_bytes, bucket_bytes // LAST_SHARE)
    return done


def _split_tail(numbers: list[int], sizes_bytes: Sequence[int], most: int) -> list[list[int]]:
    """A bucket in two, the second as large as it may be; in one where it is small enough or has one parameter only."""
    if sum(sizes_bytes[number] for number in numbers) <= most:
        return [numbers]
    tail = sizes_bytes[numbers[-1]]
    start = len(numbers) - 1
    while start > 0 and tail + sizes_bytes[numbers[start - 1]] <= most:
        start -= 1
        tail += sizes_bytes[numbers[start]]
    return [numbers[:start], numbers[start:]] if start else [numbers]


@final
class Bucket:
    """Some parameters' gradients in one flat tensor.

    Args:
        parameters: by name, of one type and device; empty for one that has a tail only.
        tail: elements behind the gradients, for what rides along.
        ranks: that the length is divided among evenly.

    Attributes:
        flat: all of it, padded with zeros. tail: a view of it. views: each gradient, in its parameter's memory format.
        missing: gradients that have not come yet in this step.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        ranks: int,
        tail: int = 0,
        like: torch.Tensor | None = None,
    ) -> None:
        self.names, self.parameters = [], []
        for name, parameter in parameters:
            self.names.append(name)
            self.parameters.append(parameter)
        like = self.parameters[0] if self.parameters else like
        assert like is not None
        numbers = sum(parameter.numel() for parameter in self.parameters)
        step = math.lcm(ALIGNED, ranks)
        self.flat = torch.zeros(-(-(numbers + tail) // step) * step, dtype=like.dtype, device=like.device)
        self.views, at = [], 0
        for parameter in self.parameters:
            self.views.append(_like(self.flat[at : at + parameter.numel()], parameter))
            at += parameter.numel()
        self.tail = self.flat[at : at + tail]
        self.missing = len(self.parameters)

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def label(self) -> str:
        """Its parameters, as an error names them."""
        if not self.names:
            return "votes"
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} ... {self.names[-1]}"

    def fill(self) -> None:
        """Takes the gradients in; those that did not come are zeros."""
        views, grads = [], []
        for view, parameter in zip(self.views, self.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                views.append(view)
                grads.append(parameter.grad)
        if views:
            torch._foreach_copy_(views, grads)

    def empty(self) -> None:
        """All zeros: of a rank that has nothing to add."""
        self.flat.zero_()


def _like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's shape over flat memory; in its strides where these leave no gaps (channels-last filters)."""
    dense = sorted(zip(parameter.stride(), parameter.shape, strict=True))
    expected = 1
    for stride, side in dense:
        if side != 1 and stride != expected:
            return part.view(parameter.shape)
        expected *= side
    return part.as_strided(parameter.shape, parameter.stride())
