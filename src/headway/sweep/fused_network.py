"""FusedNetwork: several networks of one structure, computed together as one network.

The code of the first network runs once, and each operation in it computes all members: convolutions become one grouped
convolution, linear layers one batched product, batch norm sees the channels of all members (HFTA, Wang et al. 2021,
arXiv 2102.02344). No operation mixes members, so a member's numbers depend on its own weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Layout = Literal["channels", "flat", "members"]
"""Memory of activations of k members: `channels` [n, k * C, ...]; `flat` the same, with C * H * W features for the
network; `members` [k, n, features]."""


@final
class CannotFuseError(Exception):
    """Networks cannot be computed together; the text says why, and follows "because"."""


@final
class FusedNetwork:
    """Computes networks of one structure together, each with its own weights.

    Parameters and buffers of the networks become views of stacked tensors, so that optimizers, checkpoints and
    evaluations of each network work as before. They stay so when this object is gone.

    Args:
        networks: on a CPU, in training mode. A single one is computed beside a copy of itself: its numbers are then
            those that it has among others.

    Raises:
        CannotFuseError: the networks differ, or something in them is not known here.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        first = _describe(networks[0])
        if any(_describe(other) != first for other in networks[1:]):
            raise CannotFuseError("their networks differ")
        if any(_has_hooks(module) for network in networks for module in network.modules()):
            raise CannotFuseError("their networks have hooks")
        self._networks, self._count = tuple(networks), max(2, len(networks))
        parameters = [list(network.parameters()) for network in networks]
        self._parameters = [self._stack(own) for own in zip(*parameters, strict=True)]
        buffers = [list(network.buffers()) for network in networks]
        self._buffers = [self._stack(own) for own in zip(*buffers, strict=True)]
        # The code of the first network names its own tensors.
        self._stacks = {id(stack.own[0]): stack for stack in (*self._parameters, *self._buffers)}
        self._plan = _Plan()

    def _stack(self, own: tuple[Tensor, ...]) -> _Stack:
        first = own[0]
        if not first.ndim:
            return _Stack(own, None)
        rows, strides = first.shape[0], first.stride()
        if not first.is_floating_point() or strides[0] * rows != first.numel():
            raise CannotFuseError("their networks have weights of an unusual layout")
        shape = (self._count * rows, *first.shape[1:])
        # The strides of each part are those that it had: the states of the optimizer have them too.
        together = torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)
        for number in range(self._count):
            tensor, view = own[min(number, len(own) - 1)], together.narrow(0, number * rows, rows)
            view.copy_(tensor.detach())
            if number < len(own):
                tensor.data = view
        return _Stack(own, together.requires_grad_(first.requires_grad))

    @property
    def is_linked(self) -> bool:
        """True while the networks' tensors are still views of the stacked ones, with the same layers frozen."""
        return all(stack.is_linked for stack in (*self._parameters, *self._buffers))

    def __call__(self, images: Tensor) -> Tensor:
        """Returns the outputs of all networks for one batch, [networks, n, outputs].

        Raises:
            CannotFuseError: the networks use something that is not known here.
        """
        run = _Run(self._stacks, self._count, self._plan)
        with run:
            found = self._networks[0](images)
        if not isinstance(found, Activations) or found.ndim != 2:
            raise CannotFuseError("their networks give something else than rows of outputs")
        self._plan.finish(run)
        return found.to_members()[: len(self._networks)]

    def take_gradients(self) -> list[list[Tensor | None]]:
        """Returns the gradients of each network, in the order of its parameters, and forgets them."""
        taken: list[list[Tensor | None]] = [[] for _ in self._networks]
        for stack in self._parameters:
            grad = None if stack.together is None else stack.together.grad
            for number, gradients in enumerate(taken):
                rows = stack.own[0].shape[0]
                gradients.append(None if grad is None else grad.narrow(0, number * rows, rows))
            if stack.together is not None:
                stack.together.grad = None
        return taken


@final
@dataclass(frozen=True)
class _Stack:
    """A tensor of each network, and all of them one after another; counters, which have no dimension, lie apart."""

    own: tuple[Tensor, ...]
    together: Tensor | None

    @property
    def is_linked(self) -> bool:
        if self.together is None:
            return True
        start, step = self.together.data_ptr(), self.own[0].numel() * self.own[0].element_size()
        is_trained = self.together.requires_grad
        return all(
            one.data_ptr() == start + number * step and one.requires_grad == is_trained
            for number, one in enumerate(self.own)
        )


def _describe(network: nn.Module) -> list[object]:
    """Returns the structure of a network: equal for networks that compute the same with other weights."""
    found: list[object] = [(name, type(module), module.extra_repr()) for name, module in network.named_modules()]
    found += [(name, one.shape, one.stride(), one.dtype, one.requires_grad) for name, one in network.named_parameters()]
    found += [(name, one.shape, one.stride(), one.dtype) for name, one in network.named_buffers()]
    return found


def _has_hooks(module: nn.Module) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)


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
        self, data: Tensor, layout: Layout, members: int, run: _Run, number: int = -1, *, is_fresh: bool = False
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
class _Plan:
    """The operations of the first pass: activations that a single ReLU reads are overwritten by it in later passes."""

    def __init__(self) -> None:
        self._names: list[str] | None = None
        self._read_once: frozenset[int] = frozenset()

    def may_overwrite(self, number: int, run: _Run) -> bool:
        """Returns True if the result of an operation is read only once, as far as earlier passes tell."""
        return number in self._read_once and self._names is not None and run.names == self._names[: len(run.names)]

    def finish(self, run: _Run) -> None:
        """Notes the operations of the first pass."""
        if self._names is None:
            self._names = run.names
            self._read_once = frozenset(number for number in set(run.reads) if run.reads.count(number) == 1)


@final
class _Run(TorchFunctionMode):
    """One pass: takes each function of torch that the network's code calls, and computes it for all members."""

    def __init__(self, stacks: dict[int, _Stack], members: int, plan: _Plan) -> None:
        super().__init__()
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
        compute = OPERATIONS.get(name)
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
            if name not in SHARED:
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


# One function for each kind of operation. Each takes the pass, torch's function, and its arguments.


def _convolve(
    run: _Run,
    func: Any,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Activations:
    weights, biases = run.find(weight), run.find(bias)
    if isinstance(input, Activations) or groups != 1:
        input, groups = run.spread(input), groups * run.members
    if input.ndim != weight.ndim:
        raise CannotFuseError("their networks convolve single images")
    # Of shared input it is an ordinary convolution, whose outputs are those of all members.
    return run.build(func(input, weights, biases, stride, padding, dilation, groups), is_fresh=True)


def _multiply_weights(run: _Run, func: Any, input: Any, weight: Tensor, bias: Tensor | None = None) -> Activations:
    weights, biases, members, outputs = run.find(weight), run.find(bias), run.members, weight.shape[0]
    if isinstance(input, Tensor):
        if input.ndim != 2:
            raise CannotFuseError("their networks have linear layers on more than rows of features")
        return run.build(F.linear(input, weights, biases), is_fresh=True)
    if input.ndim != 2:
        raise CannotFuseError("their networks have linear layers on more than rows of features")
    data = input.data
    weights = weights.unflatten(0, (members, outputs))
    if input.layout == "flat" and data.ndim == 4 and data.is_contiguous(memory_format=torch.channels_last):
        # Weights in the order of the activations' memory: they are smaller, so they are what is copied.
        n, channels, height, width = data.shape
        pixels = data.permute(0, 2, 3, 1).reshape(n, height * width, members, channels // members)
        rows = pixels.permute(2, 0, 1, 3).flatten(2)
        places = weights.unflatten(2, (channels // members, height * width))
        columns = places.permute(0, 3, 2, 1).flatten(1, 2)
    else:
        rows, columns = input.to_members(), weights.transpose(1, 2)
    if biases is None:
        found = torch.bmm(rows, columns)
    else:
        found = torch.baddbmm(biases.view(members, 1, outputs), rows, columns)
    return run.build(found, "members", is_fresh=True)


def _normalise(
    run: _Run,
    func: Any,
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Activations:
    found = [run.find(one) for one in (running_mean, running_var, weight, bias)]
    return run.build(F.batch_norm(run.spread(input), *found, training, momentum, eps), is_fresh=True)


def _count(run: _Run, func: Any, counter: Any, amount: Any) -> Tensor:
    """Counts the batches of batch norm, which each member has by itself."""
    stack = run.stacks.get(id(counter))
    if stack is None or stack.together is not None or not isinstance(amount, int):
        raise CannotFuseError("their networks change tensors in place")
    torch._foreach_add_(list(stack.own), amount)
    return stack.own[0]


def _rectify(run: _Run, func: Any, input: Activations, inplace: bool = False) -> Activations:
    if inplace or run.may_overwrite(input):
        input.is_overwritten = not inplace
        return run.build(torch.relu_(input.data), input.layout)
    return run.build(torch.relu(input.data), input.layout)


def _apply(run: _Run, func: Any, input: Activations, *args: Any, **kwargs: Any) -> Activations:
    """Applies a function to each number."""
    return run.build(func(input.data, *args, **kwargs), input.layout)


def _pool(run: _Run, func: Any, input: Activations, *args: Any, **kwargs: Any) -> Activations:
    if input.layout != "channels" or input.ndim < 3 or kwargs.get("return_indices"):
        raise CannotFuseError("their networks pool in an unusual way")
    return run.build(func(input.data, *args, **kwargs))


def _average(run: _Run, func: Any, input: Activations, dim: Any, keepdim: bool = False) -> Activations:
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if input.layout != "channels" or any(one % input.ndim < 2 for one in dims):
        raise CannotFuseError("their networks average over channels")
    return run.build(input.data.mean(dims, keepdim))


def _flatten(run: _Run, func: Any, input: Activations, start_dim: int = 0, end_dim: int = -1) -> Activations:
    if start_dim != 1 or end_dim % input.ndim != input.ndim - 1:
        raise CannotFuseError("their networks flatten the samples of a batch together")
    if input.layout != "channels" or input.ndim == 2:
        return run.build(input.data, input.layout, is_fresh=input.is_fresh)
    return run.build(input.data, "flat", is_fresh=input.is_fresh)


def _reshape(run: _Run, func: Any, input: Activations, *shape: Any) -> Activations:
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    n, features = input.shape[0], math.prod(input.shape[1:])
    if sizes not in ((n, -1), (n, features), (-1, features)):
        raise CannotFuseError("their networks reshape activations")
    return _flatten(run, func, input, 1)


def _slice(run: _Run, func: Any, input: Activations, index: Any) -> Activations:
    whole = slice(None)
    is_of_sides = isinstance(index, tuple) and index[:2] == (whole, whole) and input.layout == "channels"
    if not is_of_sides or not all(isinstance(one, slice) for one in index):
        raise CannotFuseError("their networks select samples or channels")
    return run.build(input.data[index])


def _pad(run: _Run, func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Activations:
    data, pad = run.spread(input), tuple(pad)
    sides = 2 * (data.ndim - 2)
    if len(pad) <= sides or not any(pad[sides:]):
        return run.build(F.pad(data, pad[:sides], mode, value))
    if len(pad) > sides + 2 or mode != "constant":
        raise CannotFuseError("their networks pad the samples of a batch")
    if any(pad[:sides]):
        data = F.pad(data, pad[:sides], mode, value)
    # Each member's channels get their own.
    last = data.movedim(1, -1).unflatten(-1, (run.members, -1))
    return run.build(F.pad(last, pad[sides:], mode, value).flatten(-2).movedim(-1, 1))


def _combine(run: _Run, func: Any, input: Any, other: Any, **kwargs: Any) -> Activations:
    operate, numbers = COMBINE[run.names[-1]], (int, float)
    if kwargs:
        raise CannotFuseError("their networks add in an unusual way")
    if isinstance(input, Activations) and isinstance(other, numbers):
        return run.build(operate(input.data, other), input.layout)
    if isinstance(other, Activations) and isinstance(input, numbers):
        return run.build(operate(input, other.data), other.layout)
    if tuple(input.shape) != tuple(other.shape):
        raise CannotFuseError("their networks combine activations of different shapes")
    if isinstance(input, Activations) and isinstance(other, Activations) and input.layout == other.layout:
        return run.build(operate(input.data, other.data), input.layout, is_fresh=operate is torch.add)
    return run.build(operate(run.spread(input), run.spread(other)), is_fresh=operate is torch.add)


def _drop(run: _Run, func: Any, input: Activations, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if p and training:
        raise CannotFuseError("their networks use dropout, whose random numbers each trial draws by itself")
    return input


FACTS = frozenset(
    "shape ndim dtype device requires_grad layout is_cuda is_sparse is_quantized is_nested dim size numel stride"
    " is_floating_point is_contiguous __len__".split()
)
"""Facts about tensors, which are the same for all members."""

COMBINE: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}

_BY_NUMBER = "gelu silu tanh sigmoid leaky_relu elu hardtanh hardswish hardsigmoid softplus selu mish relu6 clamp"
_POOLS = "max_pool1d max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d _adaptive_max_pool2d"

OPERATIONS: dict[str, Callable[..., Any]] = {
    "conv1d": _convolve,
    "conv2d": _convolve,
    "linear": _multiply_weights,
    "batch_norm": _normalise,
    "add_": _count,
    "relu": _rectify,
    "relu_": lambda run, func, input: _rectify(run, func, input, inplace=True),
    **dict.fromkeys(_BY_NUMBER.split(), _apply),
    **dict.fromkeys(_POOLS.split(), _pool),
    "mean": _average,
    "flatten": _flatten,
    "view": _reshape,
    "reshape": _reshape,
    "contiguous": lambda run, func, input, **kwargs: input,
    "__getitem__": _slice,
    "pad": _pad,
    **dict.fromkeys(COMBINE, _combine),
    **dict.fromkeys(("dropout", "dropout2d"), _drop),
}
"""What computes each function of torch that a network may call, by its name."""

SHARED = frozenset((*OPERATIONS, "float", "to")) - {"dropout", "dropout2d", "add_", "relu_"}
"""Functions that a network may call on its input too, before the first weight."""
