"""Values inside towers: modules of a network of which each rank of a place computes one.

A network runs on every rank as it is written. What a tower computes is a `TowerValue`: numbers on the rank of that
tower, and a tensor without numbers (on PyTorch's `meta` device) on all others. So each rank knows, without a message,
where towers begin, where `torch.cat` joins their channels, and which gradients go where. Everything outside of towers
is plain tensors, and computed alike on all ranks of the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.core.group import Group
from headway.parallel.tower_exchange import JoinedTowers, enter_towers, make_meta, tie
from headway.parallel.tower_rules import (
    CONCATENATIONS,
    DEVICE,
    FIX,
    QUESTIONS,
    is_random,
    refuse,
    works_on_channels,
    writes,
)


@final
@dataclass(frozen=True)
class Origin:
    """Origin of a value: one tower, or (`joined`) all of them."""

    forward_pass: TowerPass
    tower: int | None
    joined: JoinedTowers | None


@final
class TowerValue(Tensor):
    """A value of one tower, or the joined channels of all towers, as a tensor that networks can compute with."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        first = next(_list_values((*args, *given.values())))
        return _get_origin(first).forward_pass.call(func, args, given)


def _get_origin(value: TowerValue) -> Origin:
    # Python attributes of a subclass pass no `__torch_function__`.
    origin: Origin = value.__dict__["origin"]
    return origin


@final
class TowerPass:
    """One forward pass of a network whose towers run on the ranks of a place.

    Args:
        own: tower of this rank.
        group: the ranks of the place; rank k has tower k.
        device: device of this rank.
    """

    def __init__(self, own: int, group: Group, device: torch.device) -> None:
        self._own, self._group, self._device = own, group, device
        # By the id of a plain tensor, which is kept too so that no other one gets the id: what enters towers, and what
        # stands for it on other ranks.
        self._entered: dict[int, tuple[Tensor, Tensor]] = {}
        self._metas: dict[int, tuple[Tensor, Tensor]] = {}
        # The backward pass exchanges gradients of these; all ranks have to come there.
        self._tied: list[Tensor] = []

    def wrap(self, tensor: Tensor, tower: int) -> TowerValue:
        """Returns a value of a tower, or a parameter of it. Gradients flow through."""
        return _close(tensor, Origin(self, tower, None))

    def finish(self, outputs: object) -> Tensor:
        """Returns the network's outputs as a plain tensor, alike on all ranks.

        Raises:
            UsageError: the outputs are those of one tower, or no tensor.
        """
        if not isinstance(outputs, Tensor):
            raise UsageError(f"a network with towers gives one tensor, not {type(outputs).__name__}")
        if isinstance(outputs, TowerValue):
            origin = _get_origin(outputs)
            if origin.joined is None:
                raise UsageError(f"the network's outputs are those of tower {origin.tower} alone", fix=FIX)
            return tie(origin.joined.gather(self._group), self._tied)
        return tie(outputs, self._tied)

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function of a network with values of towers among its arguments.

        Raises:
            UsageError: the function cannot be divided; the message names it.
        """
        if func is DEVICE:
            return self._device
        if func in QUESTIONS:
            return func(*map(_describe, args), **kwargs)
        values = list(_list_values((*args, *kwargs.values())))
        towers = sorted({tower for one in values if (tower := _get_origin(one).tower) is not None})
        if func in CONCATENATIONS and len(towers) > 1:
            return self._join(func, *args, **kwargs)
        if len(towers) > 1:
            raise refuse(func, f"values of the towers {', '.join(map(str, towers))}")
        if towers:
            return self._call_in_tower(towers[0], func, args, kwargs)
        return self._call_outside(func, values, args, kwargs)

    def _call_in_tower(self, tower: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function of one tower; its rank alone has the numbers."""
        if is_random(func, kwargs):
            raise refuse(func, "values of a tower, whose random numbers would differ from those of one process,")
        if args and writes(func, kwargs) and _is_shared(args[0]):
            raise refuse(func, "values of a tower, written into one that all ranks share,")

        def take(value: Any) -> Any:
            return self._enter(value, tower) if isinstance(value, Tensor) else value

        given, options = _map(take, args), _map(take, kwargs)
        if tower == self._own:
            return self._close_all(func, func(*given, **options), tower)
        try:
            out = func(*given, **options)
        except (RuntimeError, NotImplementedError) as error:
            raise refuse(func, f"values of a tower, which needs the numbers of rank {tower},") from error
        return self._close_all(func, out, tower)

    def _call_outside(
        self, func: Any, values: Sequence[TowerValue], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls a function of the joined channels of towers, on each rank's part alone where that gives the same."""
        joined = _get_origin(values[0]).joined
        assert joined is not None
        is_alone = len(values) == 1 and args[:1] and args[0] is values[0]
        changes = writes(func, kwargs)
        if is_alone and joined.dim == 1 and not joined.is_gathered and works_on_channels(func, args) and not changes:
            parts = [func(part, *args[1:], **kwargs) for part in joined.parts]
            if all(isinstance(part, Tensor) for part in parts):
                return self._close_joined(JoinedTowers(tuple(parts), 1, self._own))
        if changes:
            raise refuse(func, "the joined channels of towers, which it changes,")

        def gather(value: Any) -> Any:
            if not isinstance(value, TowerValue):
                return value
            whole = _get_origin(value).joined
            return value if whole is None else whole.gather(self._group)

        return func(*_map(gather, args), **_map(gather, kwargs))

    def _join(self, func: Any, tensors: Sequence[Any], dim: int = 0, **options: Any) -> TowerValue:
        """Joins a value of each tower. They are sent later, when a function needs more than a part of them."""
        towers = [_get_origin(one).tower if isinstance(one, TowerValue) else None for one in tensors]
        if towers != list(range(self._group.size)) or options:
            shown = ", ".join("another" if one is None else f"tower {one}" for one in towers)
            raise refuse(func, f"values of {shown}, instead of one of each tower in their order,")
        parts = tuple(one.as_subclass(Tensor) for one in tensors)
        return self._close_joined(JoinedTowers(parts, dim % parts[0].dim(), self._own))

    def _enter(self, value: Tensor, tower: int) -> Tensor:
        """Returns an argument of a tower's function: with numbers on the tower's rank alone."""
        if isinstance(value, TowerValue):
            joined = _get_origin(value).joined
            if joined is None:
                return value.as_subclass(Tensor)
            is_new = not joined.is_used_by_towers
            value = joined.gather_for_towers(self._group)
            if is_new and value.requires_grad:
                self._tied.append(value)
        elif value.requires_grad and torch.is_grad_enabled():
            if id(value) not in self._entered:
                self._entered[id(value)] = (value, enter_towers(value, self._group))
                self._tied.append(self._entered[id(value)][1])
            value = self._entered[id(value)][1]
        if tower == self._own or value.is_meta:
            return value
        if id(value) not in self._metas:
            meta = make_meta(value)
            # Autocast does not see tensors without numbers: they keep the type of the parameters.
            is_mixed = value.is_floating_point() and torch.is_autocast_enabled(value.device.type)
            self._metas[id(value)] = (value, meta.float() if is_mixed else meta)
        return self._metas[id(value)][1]

    def _close_all(self, func: Any, out: Any, tower: int) -> Any:
        if isinstance(out, Tensor):
            return self.wrap(out, tower)
        if isinstance(out, tuple | list):
            closed = [self._close_all(func, one, tower) for one in out]
            return closed if type(out) is list else tuple(closed)
        if out is None:
            return None
        # A number of one tower would lead its rank through other code than the others.
        raise refuse(func, "values of a tower, whose numbers other ranks do not have,")

    def _close_joined(self, joined: JoinedTowers) -> TowerValue:
        return _close(joined.parts[self._own], Origin(self, None, joined))


def _close(tensor: Tensor, origin: Origin) -> TowerValue:
    value = tensor.as_subclass(TowerValue)
    value.__dict__["origin"] = origin
    return value


def _is_shared(value: Any) -> bool:
    """Returns True for a tensor that is not one tower's alone."""
    return isinstance(value, Tensor) and not (isinstance(value, TowerValue) and _get_origin(value).joined is None)


def _list_values(given: Any) -> Iterator[TowerValue]:
    for one in given:
        if isinstance(one, TowerValue):
            yield one
        elif isinstance(one, tuple | list):
            yield from _list_values(one)


def _map(function: Callable[[Any], Any], given: Any) -> Any:
    """Applies a function to all arguments, also to those in tuples, lists and dictionaries."""
    if isinstance(given, Mapping):
        return {name: _map(function, one) for name, one in given.items()}
    return type(given)(_map(function, one) for one in given) if type(given) in (tuple, list) else function(given)


def _describe(value: Any) -> Any:
    """Returns a tensor of the shape that a network sees."""
    if not isinstance(value, TowerValue):
        return value
    joined = _get_origin(value).joined
    return value.as_subclass(Tensor) if joined is None else joined.whole_meta
