"""Gradient buckets: gradients that travel in one message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import final

import torch

# Many small all-reduces cost their latency each; one that is too large starts, and ends, late.

# A bucket's length is a multiple of this and of a host's ranks: slices are even and begin on cache lines.
ALIGNED_ELEMENTS = 64

# The last bucket has no backward pass left to hide behind: it is at most a quarter as large as the others.
LAST_BUCKET_DIVISOR = 4


def plan_buckets(sizes_bytes: Sequence[int], kinds: Sequence[object], bucket_bytes: int) -> list[list[int]]:
    """Groups parameters into buckets, in the order in which the buckets become full.

    Args:
        sizes_bytes: bytes of each parameter, in the order in which gradients become ready.
        kinds: a bucket holds parameters of one kind only (the data type and device).
        bucket_bytes: most bytes of a bucket; a larger parameter gets its own bucket.

    Returns:
        indices of the parameters of each bucket.
    """
    # One open bucket per kind. A parameter that does not fit closes it; at the end the open ones close in the order of
    # their last gradients.
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
        done[-1:] = _split_tail(done[-1], sizes_bytes, bucket_bytes // LAST_BUCKET_DIVISOR)
    return done


def _split_tail(numbers: list[int], sizes_bytes: Sequence[int], most: int) -> list[list[int]]:
    """Splits a bucket in two, the second at most `most` bytes; keeps it if it is small or has one parameter."""
    if sum(sizes_bytes[number] for number in numbers) <= most:
        return [numbers]
    tail = sizes_bytes[numbers[-1]]
    start = len(numbers) - 1
    while start > 0 and tail + sizes_bytes[numbers[start - 1]] <= most:
        start -= 1
        tail += sizes_bytes[numbers[start]]
    return [numbers[:start], numbers[start:]] if start else [numbers]


@final
class GradientBucket:
    """The gradients of some parameters in one flat tensor.

    Args:
        parameters: (name, parameter), of one type and device; empty for a bucket that has a tail only.
        tail: extra elements behind the gradients, for numbers that travel along.
        ranks: the padded length is a multiple of it.
        like: gives type and device if there are no parameters.

    Attributes:
        flat: all elements, padded with zeros. tail: a view of the extra elements.
        views: a view of each gradient, in its parameter's memory format.
        missing: gradients that are not ready yet in this step.
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
        step = math.lcm(ALIGNED_ELEMENTS, ranks)
        self.flat = torch.zeros(-(-(numbers + tail) // step) * step, dtype=like.dtype, device=like.device)
        self.views, at = [], 0
        for parameter in self.parameters:
            self.views.append(_view_like(self.flat[at : at + parameter.numel()], parameter))
            at += parameter.numel()
        self.tail = self.flat[at : at + tail]
        self.missing = len(self.parameters)

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def describe(self) -> str:
        """Names its parameters, for error messages."""
        if not self.names:
            return "votes"
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} ... {self.names[-1]}"

    def fill(self) -> None:
        """Copies the gradients in; parameters without a gradient become zeros."""
        views, grads = [], []
        for view, parameter in zip(self.views, self.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            # A gradient that was accumulated in its view (the last step's sum) is in place already.
            elif parameter.grad.data_ptr() != view.data_ptr():
                views.append(view)
                grads.append(parameter.grad)
        if views:
            torch._foreach_copy_(views, grads)

    def clear(self) -> None:
        """Sets everything to zero, for a rank that has nothing to add."""
        self.flat.zero_()


def _view_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    # In the parameter's strides, too, if these leave no gaps (channels-last filters), as autograd
    # lays gradients out.
    dense = sorted(zip(parameter.stride(), parameter.shape, strict=True))
    expected = 1
    for stride, side in dense:
        if side != 1 and stride != expected:
            return part.view(parameter.shape)
        expected *= side
    return part.as_strided(parameter.shape, parameter.stride())
