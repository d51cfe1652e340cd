"""Finds the towers of a network, and what they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from headway.core.errors import UsageError

MATCH = "parallel.match"


@final
@dataclass(frozen=True)
class HeldTensor:
    """A parameter or buffer of a tower.

    Attributes:
        entries, key: the dictionary of its module that holds it, and its key there.
        name: its name in the network.
    """

    entries: dict[str, Any]
    key: str
    name: str

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = self.entries[self.key]
        return tensor


def find_towers(network: nn.Module, match: str) -> list[list[str]]:
    """Finds the names of each tower's modules.

    Args:
        match: a regular expression whose group is the number of the tower.

    Raises:
        UsageError: nothing matches, or the towers are not numbered 0, 1, 2...
    """
    found: dict[int, list[str]] = {}
    names = [name for name, _ in network.named_modules() if name]
    for name in names:
        one = re.search(match, name)
        # Modules inside of a tower match too, up to the tower's name.
        if one is not None and one.end() == len(name):
            if not (one.group(1) or "").isdecimal():
                what = f"{match!r} takes {one.group(1)!r} of {name!r} as the number of a tower"
                raise UsageError(what, where=MATCH, fix=r"Put the group around the number: '^towers\.(\d+)'.")
            found.setdefault(int(one.group(1)), []).append(name)
    if not found:
        outer = [name for name in names if name.count(".") < 2]
        fix = f"Its modules are for example: {', '.join(outer[:8])}."
        raise UsageError(f"{match!r} matches no module of this network", where=MATCH, fix=fix)
    numbers = sorted(found)
    if len(numbers) < 2 or numbers != list(range(len(numbers))):
        what = f"{match!r} finds the tower{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        raise UsageError(what, where=MATCH, fix="There must be at least two, numbered from 0 on.")
    return [found[number] for number in numbers]


def expect_alike(network: nn.Module, towers: Sequence[Sequence[str]]) -> None:
    """Raises UsageError if towers differ in their parameters, or share them with other modules."""
    inside = {name for tower in towers for one in tower for name in _list_names(network, one)}
    seen: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        other = seen.setdefault(id(parameter), name)
        if other != name and (name in inside or other in inside):
            what = f"this parameter is {other} too, and processes of other towers do not have it"
            raise UsageError(what, where=name, fix="Give each tower its own, or use parallel: data.")
        if name in inside and not parameter.dim():
            what = "this parameter of a tower is a single number without a dimension"
            raise UsageError(what, where=name, fix="Give it the shape [1].")
    first, *others = ([_describe(network, one) for one in tower] for tower in towers)
    for number, other_tower in enumerate(others, 1):
        if other_tower != first:
            what = f"tower {number} has other parameters or buffers than tower 0"
            raise UsageError(
                what, where=towers[number][0], fix="Give all towers the same layers, or use parallel: data."
            )


def list_parameters(network: nn.Module, tower: Sequence[str]) -> list[HeldTensor]:
    """Lists the parameters of a tower."""
    return [
        HeldTensor(module._parameters, key, f"{path}.{key}")
        for path, module in _list_modules(network, tower)
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


def list_buffers(network: nn.Module, tower: Sequence[str]) -> list[HeldTensor]:
    """Lists the buffers of a tower, but for numbers without dimensions: counts, which every rank keeps."""
    return [
        HeldTensor(module._buffers, key, f"{path}.{key}")
        for path, module in _list_modules(network, tower)
        for key, buffer in module._buffers.items()
        if buffer is not None and buffer.dim()
    ]


def _list_modules(network: nn.Module, tower: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    for name in tower:
        yield from network.get_submodule(name).named_modules(prefix=name)


def _list_names(network: nn.Module, module: str) -> list[str]:
    return [name for name, _ in network.get_submodule(module).named_parameters(module, remove_duplicate=False)]


def _describe(network: nn.Module, module: str) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    state = network.get_submodule(module).state_dict()
    return [(name, tuple(value.shape), value.dtype) for name, value in state.items()]
