"""Gradient buckets: gradients that travel in one message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol, final

import torch

from headway.comm.comm_recipe import Algorithm, Wire
from headway.comm.communicator import Communicator, PendingOperation

# Many small all-reduces cost their latency each; one that is too large starts, and ends, late.

# A bucket's length is a multiple of this and of a host's ranks: slices are even and begin on cache lines.
ALIGNED_ELEMENTS = 64

# The last bucket has no backward pass left to hide behind: it is at most a quarter as large as the others.
LAST_BUCKET_DIVISOR = 4


def plan_buckets(sizes_bytes: Sequence[int], kinds: Sequence[object], bucket_bytes: int) -> list[list[int]]:
    """Groups parameters into buckets, in the order in which the buckets become full.

    Args:
        sizes_bytes: bytes of each parameter, in the order in which gradients become ready.
        kinds: kind (dtype and device) of each parameter; a bucket holds parameters of one kind only.
        bucket_bytes: largest size of a bucket; a larger parameter gets its own bucket.

    Returns:
        indices of the parameters of each bucket.
    """
    # One open bucket per kind. A parameter that does not fit closes it; at the end the open ones close in the order of
    # their last gradients.
    closed_buckets: list[list[int]] = []
    open_buckets: dict[object, list[int]] = {}
    open_bytes: dict[object, int] = {}
    for index, (size, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
        if kind in open_buckets and open_bytes[kind] + size > bucket_bytes:
            closed_buckets.append(open_buckets.pop(kind))
        open_buckets.setdefault(kind, []).append(index)
        open_bytes[kind] = open_bytes[kind] + size if len(open_buckets[kind]) > 1 else size
    closed_buckets += sorted(open_buckets.values(), key=lambda indices: indices[-1])
    if closed_buckets:
        closed_buckets[-1:] = _split_bucket(closed_buckets[-1], sizes_bytes, bucket_bytes // LAST_BUCKET_DIVISOR)
    return closed_buckets


def _split_bucket(indices: list[int], sizes_bytes: Sequence[int], max_tail_bytes: int) -> list[list[int]]:
    """Splits a bucket in two, the second at most `max_tail_bytes`; keeps it if it is small or has one parameter."""
    if sum(sizes_bytes[index] for index in indices) <= max_tail_bytes:
        return [indices]
    tail_bytes = sizes_bytes[indices[-1]]
    start = len(indices) - 1
    while start > 0 and tail_bytes + sizes_bytes[indices[start - 1]] <= max_tail_bytes:
        start -= 1
        tail_bytes += sizes_bytes[indices[start]]
    return [indices[:start], indices[start:]] if start else [indices]


NamedParameter = tuple[str, torch.nn.Parameter]


class Bucket(Protocol):
    """The gradients of some parameters, which the ranks add up together.

    Attributes:
        names, parameters: the parameters in the order of the bucket.
        num_missing: number of gradients that are not ready yet in this step.
    """

    names: list[str]
    parameters: list[torch.nn.Parameter]
    num_missing: int

    @property
    def nbytes(self) -> int:
        """Bytes of its gradients."""

    @property
    def numel(self) -> int:
        """Number of elements that travel."""

    def describe(self) -> str:
        """Returns a name for error messages."""

    def fill(self) -> list[torch.Tensor]:
        """Takes the gradients, zeros where there are none; returns what it took."""

    def clear(self) -> None:
        """Takes zeros for all, for a rank that has nothing to add."""

    def start_sum(self, communicator: Communicator, *, algorithm: Algorithm, wire: Wire, tag: str) -> PendingOperation:
        """Begins to add up what the ranks have taken."""

    def take_sums(self) -> list[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        """Returns the sums that this rank gets, once they are complete."""


@final
class GradientBucket:
    """The gradients of some parameters in one flat tensor.

    Args:
        parameters: (name, parameter), of one dtype and device; empty for a bucket that has a tail only.
        ranks: number of ranks; the padded length is a multiple of it.
        tail: number of extra elements behind the gradients, for numbers that travel along.
        like: tensor that gives dtype and device if there are no parameters.

    Attributes:
        flat: all elements, padded with zeros.
        tail: a view of the extra elements.
        views: a view of each gradient, in its parameter's memory format.
        num_missing: number of gradients that are not ready yet in this step.
    """

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
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
        numel = tail + sum(parameter.numel() for parameter in self.parameters)
        multiple = math.lcm(ALIGNED_ELEMENTS, ranks)
        self.flat = torch.zeros(-(-numel // multiple) * multiple, dtype=like.dtype, device=like.device)
        self.views, offset = [], 0
        for parameter in self.parameters:
            self.views.append(view_like(self.flat[offset : offset + parameter.numel()], parameter))
            offset += parameter.numel()
        self.tail = self.flat[offset : offset + tail]
        self.num_missing = len(self.parameters)

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    @property
    def numel(self) -> int:
        return self.flat.numel()

    def describe(self) -> str:
        return describe_names(self.names) or "votes"

    def fill(self) -> list[torch.Tensor]:
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
        return self.views

    def clear(self) -> None:
        """Sets everything to zero, for a rank that has nothing to add."""
        self.flat.zero_()

    def start_sum(self, communicator: Communicator, *, algorithm: Algorithm, wire: Wire, tag: str) -> PendingOperation:
        return communicator.all_reduce(self.flat, algorithm=algorithm, wire=wire, tag=tag)

    def take_sums(self) -> list[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        return list(zip(self.names, self.parameters, self.views, strict=True))


def describe_names(names: Sequence[str]) -> str:
    """Returns the first and the last of some names; empty if there is none."""
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}" if names else ""


def view_like(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Views a flat tensor in the parameter's shape, and in its strides if these leave no gaps."""
    # Autograd lays gradients out in the same way: those of channels-last filters are channels-last.
    if not is_gapless(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride())


def is_gapless(tensor: torch.Tensor) -> bool:
    """Returns True if the elements of a tensor, in some order of its dimensions, lie in memory without gaps."""
    expected_stride = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected_stride:
            return False
        expected_stride *= size
    return True
