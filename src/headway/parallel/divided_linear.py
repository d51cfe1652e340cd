"""Fully connected layers of which each rank has some of the outputs; all else is data parallel.

Each rank gathers the inputs of all samples, computes its outputs of them, and gets back all outputs of its own samples.
So gradients of such a layer never cross the network: for large layers and moderate batches the inputs are far fewer
bytes (Krizhevsky 2014, arXiv 1404.5997, schemes (a) and (c)). A rank sends in a step, for B samples, I inputs and O
outputs of v bytes, 2 (N - 1)/N v B (I + O/N) bytes with the scheme `all`, and the inputs a third time with `turns`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from headway.comm.reducer import StepReduction
from headway.core.errors import UsageError
from headway.core.group import Group
from headway.core.rows import Range, divide
from headway.core.world import World
from headway.optim.split_parameters import SplitParameters
from headway.parallel.fetch import exchange, exchange_pieces, sum_in_order
from headway.parallel.parts import OwnPart, OwnParts

Scheme = Literal["all", "turns"]


@final
class DividedLayers:
    """The divided layers of a network, on this rank. `divide_linear_layers` makes them.

    Attributes:
        layers: by name.
        rank, ranks: this rank, and the number of ranks that share the outputs.
        parts: the parts of their parameters.
        split: the same for what needs norms of whole parameters.
    """

    is_whole_in_evaluation = True

    def __init__(self, layers: dict[str, DividedLinear], rank: int, ranks: int) -> None:
        self.layers, self.rank, self.ranks = layers, rank, ranks
        self._group: Group | None = None
        self._samples: tuple[Range, ...] = ()
        parts = {}
        for name, layer in layers.items():
            layer.all_layers = self
            for key, parameter in layer.named_parameters():
                parts[f"{name}.{key}"] = OwnPart((layer.out_features, *parameter.shape[1:]), layer.columns[rank])
        self.parts = OwnParts(parts)
        own = frozenset(parameter for layer in layers.values() for parameter in layer.parameters())
        self.split: SplitParameters | None = SplitParameters(own, self.sum_over_ranks)

    @property
    def group(self) -> Group:
        """The ranks that share the outputs, in their order."""
        if self._group is None:
            raise UsageError("a divided layer is used before the ranks have met")
        return self._group

    @property
    def unsummed(self) -> frozenset[str]:
        """Names of the parameters whose gradients no other rank has a share of."""
        return frozenset(self.parts.by_name)

    def connect(self, world: World) -> World:
        """Connects the layers to the ranks of a world. Every rank calls it. Returns the ranks that sum gradients.

        Raises:
            UsageError: the world has another number of ranks.
        """
        world.check_rank(self.rank, self.ranks, "its part of the layers")
        self._group = world.create_group(range(world.size), name="divided layers", exchange="divided layers")
        return world

    def describe(self) -> str:
        """Returns a sentence for the user."""
        return f"Each of {self.ranks} processes has its part of the outputs of {', '.join(self.layers)}."

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Adds a tensor of all ranks, in their order: the sums have the same bits on each. Every rank calls it."""
        return sum_in_order(values, self.group)

    def set_batch(self, samples: int) -> None:
        """Sets the samples of the step over all ranks, which divide them as data parallel ranks do."""
        self._samples = divide(samples, self.ranks)

    def get_samples(self, own: int, layer: str) -> tuple[Range, ...]:
        """Returns the samples of each rank. Raises UsageError if this rank's layer has another number of inputs."""
        expected = self._samples[self.rank].length if self._samples else 0
        if own != expected:
            what = f"a divided layer has inputs of {own} rows for {expected} samples"
            raise UsageError(what, where=layer, fix="Leave the layer out of parallel.layers.")
        return self._samples

    def complete_step(self, reduction: StepReduction) -> StepReduction:
        """Returns the reduction as it is: no other rank has a share of the gradients of a part."""
        return reduction

    @contextmanager
    def join(self) -> Iterator[None]:
        """Gives the layers their whole weights for the duration of the block, in which they exchange nothing.

        Every rank calls it.
        """
        try:
            with torch.no_grad():
                for layer in self.layers.values():
                    layer.whole = {name: self._gather(layer, value) for name, value in layer.named_parameters()}
            yield
        finally:
            for layer in self.layers.values():
                layer.whole = None

    def list_whole(self) -> dict[str, Tensor]:
        """Lists the whole parameters by name, inside of `join`."""
        return {
            f"{name}.{key}": value for name, layer in self.layers.items() for key, value in (layer.whole or {}).items()
        }

    def _gather(self, layer: DividedLinear, own: Tensor) -> Tensor:
        shapes = [(rows.length, *own.shape[1:]) for rows in layer.columns]
        own = own.detach()
        return torch.cat(exchange_pieces([own] * self.ranks, shapes, own, self.group))


@final
class DividedLinear(nn.Module):
    """A linear layer of which this rank has some of the outputs.

    Input: values of this rank's samples, [own samples, ..., inputs]; output: [own samples, ..., all outputs].

    Args:
        linear: the whole layer. Its parameters stay the same objects, and keep this rank's rows only.
        rank, ranks: this rank among those that share the outputs.
        scheme: `all`: the inputs of all samples are gathered at once. `turns`: in as many turns as there are ranks, and
            again in the backward pass, so that 1/N of them is in memory.

    Attributes:
        columns: outputs of each rank.
        whole: weight and bias of all outputs by name, if they are there at present.
    """

    def __init__(self, name: str, linear: nn.Linear, rank: int, ranks: int, scheme: Scheme) -> None:
        super().__init__()
        self.name, self.scheme = name, scheme
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.columns = divide(linear.out_features, ranks)
        self.weight, self.bias = linear.weight, linear.bias
        for parameter in self.parameters():
            parameter.data = parameter.data[slice(*self.columns[rank])].clone()
        self.all_layers: DividedLayers | None = None
        self.whole: dict[str, Tensor] | None = None

    # It talks to other processes, which no graph can hold.
    # torch.compiler.disable does the same, and imports the compiler at once: 0.9 s in every process.
    @_disable_dynamo
    def forward(self, x: Tensor) -> Tensor:
        if self.whole is not None:
            return F.linear(x, self.whole["weight"], self.whole.get("bias"))
        layers = self.all_layers
        assert layers is not None
        if not self.training:
            what = "this layer is divided over the processes of the run, and they do not evaluate now"
            raise UsageError(what, where=self.name, fix="Use the network in evaluations, or load its saved weights.")
        samples = layers.get_samples(len(x), self.name)
        # What autocast would do next: fewer bytes are sent, and the layer keeps no second copy.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.scheme == "all":
            return self._compute(x, samples)
        outputs = []
        for turn in range(layers.ranks):
            parts = [_take_turn(own, turn, layers.ranks) for own in samples]
            own = parts[layers.rank]
            start = samples[layers.rank].start
            # In this turn the samples of all ranks are counted anew.
            ends = [0, *accumulate(part.length for part in parts)]
            numbered = tuple(Range(first, last) for first, last in pairwise(ends))
            outputs.append(self._compute(x[own.start - start : own.stop - start], numbered))
        return torch.cat(outputs)

    def _compute(self, x: Tensor, samples: Sequence[Range]) -> Tensor:
        """Computes the outputs of this rank's samples together with the other ranks."""
        layers = self.all_layers
        assert layers is not None
        group, middle = layers.group, (slice(None),) * (x.dim() - 2)
        everything = (slice(None),)

        def gather(own: Tensor) -> Tensor:
            shape = (samples[-1].stop, *x.shape[1:])
            return exchange(own, [everything] * group.size, shape, [(slice(*rows),) for rows in samples], group)

        inputs = gather(x)
        with _gather_again(inputs, x, gather, keeps=self.scheme == "all"):
            outputs = F.linear(inputs, self.weight, self.bias)
        shape = (*x.shape[:-1], self.out_features)
        got = [(*everything, *middle, slice(*columns)) for columns in self.columns]
        return exchange(outputs, [(slice(*rows),) for rows in samples], shape, got, group)


def _take_turn(samples: Range, turn: int, turns: int) -> Range:
    """Returns the samples of a rank that have their turn."""
    part = divide(samples.length, turns)[turn]
    return Range(samples.start + part.start, samples.start + part.stop)


@contextmanager
def _gather_again(inputs: Tensor, own: Tensor, gather: Callable[[Tensor], Tensor], *, keeps: bool) -> Iterator[None]:
    """Drops what the block saves of `inputs` for its backward pass, and gathers it again there."""
    if keeps:
        yield
        return
    kept, place = own.detach(), inputs.data_ptr()

    def pack(saved: Tensor) -> Any:
        is_inputs = saved.data_ptr() == place and saved.numel() == inputs_size
        return tuple(saved.shape) if is_inputs else saved

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        with torch.no_grad():
            return gather(kept).view(saved)

    # The number alone: a reference to the tensor would keep it.
    inputs_size = inputs.numel()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def divide_linear_layers(
    network: nn.Module, patterns: Sequence[str], rank: int, ranks: int, scheme: Scheme
) -> DividedLayers:
    """Divides the outputs of a network's linear layers over ranks, in place. All ranks hold the same network before.

    Args:
        patterns: regular expressions for the names of layers.

    Raises:
        UsageError: see `find_divisible_layers`.
    """
    layers = {}
    for name, linear in find_divisible_layers(network, patterns, ranks).items():
        layers[name] = DividedLinear(name, linear, rank, ranks, scheme)
        parent, _, key = name.rpartition(".")
        setattr(network.get_submodule(parent), key, layers[name])
    return DividedLayers(layers, rank, ranks)


def find_divisible_layers(network: nn.Module, patterns: Sequence[str], ranks: int) -> dict[str, nn.Linear]:
    """Finds the linear layers whose names match one of the patterns, by name, in the order of the network.

    Raises:
        UsageError: a pattern matches no linear layer, a layer has fewer outputs than there are ranks, or shares its
            weight with another one.
    """
    counts, found = _count_owners(network), {}
    for name in find_linear_layers(network, patterns):
        linear = network.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        if linear.out_features < ranks:
            what = f"{linear.out_features} outputs cannot be divided over {ranks} processes"
            raise UsageError(what, where=name, fix="Leave the layer out of parallel.layers.")
        if any(counts[id(parameter)] > 1 for parameter in linear.parameters()):
            what = "another layer uses the same weights, so its outputs cannot be divided"
            raise UsageError(what, where=name, fix="Leave the layer out of parallel.layers.")
        found[name] = linear
    return found


def list_divisible_layers(network: nn.Module, ranks: int) -> list[str]:
    """Lists the names of all layers that `find_divisible_layers` does not refuse, in the order of the network."""
    counts = _count_owners(network)
    return [
        name
        for name, module in _list_linear(network)
        if module.out_features >= ranks and all(counts[id(parameter)] == 1 for parameter in module.parameters())
    ]


def _count_owners(network: nn.Module) -> dict[int, int]:
    """Counts the modules that have a parameter, by its id."""
    counts: dict[int, int] = {}
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def _list_linear(network: nn.Module) -> list[tuple[str, nn.Linear]]:
    # A subclass may compute something else.
    return [(name, module) for name, module in network.named_modules() if type(module) is nn.Linear and name]


def find_linear_layers(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Finds the linear layers whose names match one of the patterns, in the order of the network.

    Raises:
        UsageError: a pattern is not a regular expression, or matches none.
    """
    linear = [name for name, _ in _list_linear(network)]
    found = set[str]()
    for pattern in patterns:
        try:
            matches = {name for name in linear if re.search(pattern, name)}
        except re.error as error:
            what = f"{pattern!r} is not a regular expression: {error}"
            raise UsageError(what, where="parallel.layers", fix="Write for example '^fc6$'.") from None
        if not matches:
            what = f"{pattern!r} matches no fully connected layer of this network"
            fix = (
                f"Its fully connected layers are {', '.join(linear)}." if linear else "It has none: use parallel: data."
            )
            raise UsageError(what, where="parallel.layers", fix=fix)
        found |= matches
    return [name for name in linear if name in found]
