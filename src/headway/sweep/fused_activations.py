"""Activations of several networks, and the pass in which the code of one network computes all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FACTS = frozenset(
    (
        *("shape", "ndim", "dtype", "device", "requires_grad", "layout", "is_cuda", "is_sparse", "is_quantized"),
        *("is_nested", "dim", "size", "numel", "stride", "is_floating_point", "is_contiguous", "__len__"),
    )
)
"""Facts about tensors, which are the same for all members."""

NOT_SHARED = frozenset(("dropout", "dropout2d", "add_", "relu_"))
"""Operations that must not run once for all members on the input that they share."""

Layout = Literal["channels", "flat", "members"]
"""Memory of activations of k members: `channels` [n, k * C, ...]; `flat` the same, with C * H * W features for the
network; `members` [k, n, features]."""


@final
class CannotFuseError(Exception):
    """Networks cannot be computed together; the text says why, and follows "because"."""


@final
@dataclass(frozen=True)
class Stack:
    """A tensor of each network, and all of them one after another; counters, which have no dimension, lie apart."""

    own: tuple[Tensor, ...]
    places: Sequence[int]
    together: Tensor | None

    @property
    def is_linked(self) -> bool:
        if self.together is None:
            return True
        start, step = self.together.data_ptr(), self.own[0].numel() * self.own[0].element_size()
        is_trained = self.together.requires_grad
        return all(
            one.data_ptr() == start + place * step and one.requires_grad == is_trained
            for place, one in zip(self.places, self.own, strict=True)
        )


@final
class Activations:
    """Activations of all members, which look to the network's code like those of one: [n, C, ...].

    Args:
        data: those of all members.
        members: number of members.
        number: number of the operation that made them; -1 for none.
        is_fresh: no gradient needs their values, so they may be overwritten.
    """

    def __init__(
        self, data: Tensor, layout: Layout, members: int, run: Run, number: int = -1, *, is_fresh: bool = False
    ) -> None:
        self.data, self.layout, self.members = data, layout, members
        self.number, self.is_fresh, self.is_overwritten = number, is_fresh, False
        self._run = run

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The mode of the pass has the priority; it exists only so that torch's functions take such an object.
        raise CannotFuseError("their networks keep activations from step to step")

    @property
    def shape(self) -> torch.Size:
        """Shape of one member's activations."""
        if self.layout == "members":
            return self.data.shape[1:]
        n, channels, *sides = self.data.shape
        features = channels // self.members
        return torch.Size((n, features * math.prod(sides)) if self.layout == "flat" else (n, features, *sides))

    @property
    def ndim(self) -> int:
        """Number of dimensions of one member's activations."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Device of the numbers."""
        return self.data.device

    def dim(self) -> int:
        """Returns the number of dimensions of one member's activations."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Returns the shape of one member's activations, or one number of it."""
        return self.shape if dim is None else self.shape[dim]

    def to_members(self) -> Tensor:
        """Returns [k, n, features]."""
        if self.layout == "members":
            return self.data
        return self.data.reshape(self.data.shape[0], self.members, -1).transpose(0, 1)

    def to_channels(self) -> Tensor:
        """Returns [n, k * C, ...]."""
        if self.layout == "channels":
            return self.data
        members = self.to_members()
        return members.transpose(0, 1).reshape(members.shape[1], -1)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._run.dispatch(name, getattr(torch, name, None), (self, *args), kwargs)

    def _operate(self, name: str, *others: Any) -> Any:
        return self._run.dispatch(name, None, (self, *others), {})

    def __getitem__(self, index: Any) -> Any:
        return self._operate("__getitem__", index)

    def __add__(self, other: Any) -> Any:
        return self._operate("add", other)

    __radd__ = __iadd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._operate("sub", other)

    def __mul__(self, other: Any) -> Any:
        return self._operate("mul", other)

    __rmul__ = __imul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._operate("div", other)

    def __bool__(self) -> bool:
        raise CannotFuseError("their networks decide by their activations")


@final
class Plan:
    """The operations of the first pass: activations that a single ReLU reads are overwritten by it in later passes."""

    def __init__(self) -> None:
        self._names: list[str] | None = None
        self._read_once: frozenset[int] = frozenset()

    def may_overwrite(self, number: int, run: Run) -> bool:
        """Returns True if the result of an operation is read only once, as far as earlier passes tell."""
        return number in self._read_once and self._names is not None and run.names == self._names[: len(run.names)]

    def finish(self, run: Run) -> None:
        """Notes the operations of the first pass."""
        if self._names is None:
            self._names = run.names
            self._read_once = frozenset(number for number in set(run.reads) if run.reads.count(number) == 1)


@final
class Run(TorchFunctionMode):
    """One pass: takes each function of torch that the network's code calls, and computes it for all members."""

    def __init__(
        self, stacks: dict[int, Stack], members: int, plan: Plan, operations: Mapping[str, Callable[..., Any]]
    ) -> None:
        super().__init__()
        self._operations = operations
        self.stacks, self.members, self._plan = stacks, members, plan
        self.names: list[str] = []
        self.reads: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        return self.dispatch(name, func, args, kwargs or {})

    def dispatch(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes one operation.

        Raises:
            CannotFuseError: it is not known here.
        """
        if name in FACTS:
            return func(*args, **kwargs)
        compute = self._operations.get(name)
        if compute is None:
            raise CannotFuseError(f"their networks use `{name}`, which is not known to fuse")
        every = [*args, *kwargs.values()]
        for one in every:
            if isinstance(one, Activations):
                self.reads.append(one.number)
                if one.is_overwritten:
                    raise CannotFuseError("the operations of their networks change from step to step")
        self.names.append(name)
        if not any(isinstance(one, Activations) or id(one) in self.stacks for one in every):
            # Of the input, which all members share.
            if name in NOT_SHARED:
                raise CannotFuseError(f"their networks use `{name}` on their input, which is not known to fuse")
            return func(*args, **kwargs)
        # Inside, torch's functions are themselves again.
        with torch._C.DisableTorchFunction():
            return compute(self, func, *args, **kwargs)

    def find(self, tensor: Any) -> Any:
        """Returns the stacked tensor of a parameter or buffer; None of None."""
        if tensor is None:
            return None
        stack = self.stacks.get(id(tensor))
        if stack is None or stack.together is None:
            raise CannotFuseError("their networks compute weights from others")
        return stack.together

    def spread(self, value: Any) -> Tensor:
        """Returns [n, k * C, ...] of activations, or of input that all members share."""
        if isinstance(value, Activations):
            return value.to_channels()
        if not isinstance(value, Tensor) or id(value) in self.stacks or value.ndim < 2:
            raise CannotFuseError("their networks use a weight or a constant in an unusual place")
        return value.repeat(1, self.members, *[1] * (value.ndim - 2))

    def build(self, data: Tensor, layout: Layout = "channels", *, is_fresh: bool = False) -> Activations:
        """Returns the result of the newest operation."""
        return Activations(data, layout, self.members, self, len(self.names) - 1, is_fresh=is_fresh)

    def may_overwrite(self, value: Activations) -> bool:
        """Returns True if nothing else reads these activations."""
        return value.is_fresh and self._plan.may_overwrite(value.number, self)
