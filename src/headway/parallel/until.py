"""Chooses the layer from which on each rank of a place has whole maps of its own samples, as in data parallel training.

Strips are worth their exchanges while each rank has some rows. Behind that layer there are no halos, and dropout and
functions without a rule work as they do on one device; batch norm keeps the statistics of the place.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from headway.core.errors import UsageError
from headway.core.group import Group
from headway.parallel.maps import Part, SplitMap, to_parts
from headway.parallel.place import Place
from headway.parallel.strips import UNTIL, Strip, open_strip, run_in_strips

LEAST_ROWS = 4
"""Rows a rank below which strips pay badly: one row more or less is a quarter of the work, and with kernels of 3 x 3
half of the rows wait for those of the neighbours."""


Shape = tuple[int, int, int, int]


class UntilChoice(NamedTuple):
    """A layer, None for the end of the maps, and the reason."""

    layer: str | None
    reason: str


def check_until(network: nn.Module, shape: Shape, grid: tuple[int, int], until: str | None) -> None:
    """Raises UsageError if a network cannot be split up to a layer; None: to the end of its maps.

    The message names an earlier layer up to which it can.

    Args:
        shape, grid: as in `choose_until`.
    """
    _, _, error = _Probe(network, shape, grid).run(until)
    # A network that does not run on shapes alone, such as one that looks at values, may work nevertheless.
    if not isinstance(error, UsageError):
        return
    # `until` itself may be wrong, and `auto` finds what is right for a function without a rule alone.
    if error.where != UNTIL:
        try:
            earlier = choose_until(network, shape, grid).layer
        except UsageError:
            raise error from None
        fix = f"Set {UNTIL} to auto"
        if earlier is not None:
            fix = f"Set {UNTIL} to {earlier}, from which on each process has whole maps of its own samples, or to auto"
        raise UsageError(error.what, where=error.where, fix=fix)
    raise error


def choose_until(network: nn.Module, shape: Shape, grid: tuple[int, int]) -> UntilChoice:
    """Chooses the layer before which strips become samples: the last one up to which a rank has four rows of each map.

    Layers that cannot be it, as others behind them need the strips too, are left out, and networks with functions that
    have no rule must become samples before these. The network runs on shapes alone. The choice depends on the arguments
    only, so that all ranks make the same.

    Args:
        shape: samples of a place in a step, channels, height, width. grid: rows and columns of ranks.

    Raises:
        UsageError: the network can be split up to no layer, with the first function without a rule; or it does not run
            on shapes alone.
    """
    probe = _Probe(network, shape, grid)
    entries, narrowest, error = probe.run(None)
    if error is not None and not isinstance(error, UsageError):
        what = f"the network does not run on shapes alone: {error}"
        raise UsageError(what, where=UNTIL, fix="Name a layer instead of auto.") from error
    if error is None and (narrowest >= LEAST_ROWS or entries[0].narrowest < LEAST_ROWS):
        return UntilChoice(None, f"a process has {narrowest:.3g} rows or more of each map")
    wide = [one for one in entries if one.narrowest >= LEAST_ROWS]
    for one in reversed(wide or entries):
        if probe.run(one.name)[2] is None:
            # `layer4` rather than `layer4.0`, which the same map enters.
            name = next(other.name for other in entries if other.enters(one))
            return UntilChoice(name, f"up to there a process has {one.narrowest:.3g} rows or more of each map")
    if error is not None:
        raise error
    return UntilChoice(None, "all layers need the strips")


@final
@dataclass(frozen=True)
class _Entry:
    """A strip that enters a layer.

    Attributes:
        narrowest: fewest rows a rank, of this and all strips before.
    """

    name: str
    strip: Strip
    narrowest: float

    def enters(self, other: _Entry) -> bool:
        """Returns True for the layer itself, and for one around it that the same strip enters."""
        return self.strip is other.strip and f"{other.name}.".startswith(f"{self.name}.")


@final
class _Probe:
    """A network that runs as on one rank of a place, without data and without the others."""

    def __init__(self, network: nn.Module, shape: Shape, grid: tuple[int, int]) -> None:
        # Copied with parameters and buffers without values: the device may have no room for these twice.
        tensors = (*network.parameters(), *network.buffers())
        self._network = copy.deepcopy(network, {id(one): _strip_values(one) for one in tensors}).train()
        # Their statistics have no values here.
        for module in self._network.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        self._shape, self._grid = shape, grid

    def run(self, until: str | None) -> tuple[list[_Entry], float, Exception | None]:
        """Runs the network. Returns the strips that entered layers, the fewest rows, and the error that ended it."""
        rows, columns = self._grid
        everyone = cast(Group, _AbsentRanks(0, rows * columns))
        place = Place(self._grid, everyone, (cast(Group, _AbsentRanks(0, rows)), cast(Group, _AbsentRanks(0, columns))))
        samples = place.divide_samples(self._shape[0])
        images = torch.empty(samples[0].length, *self._shape[1:], device="meta")
        x = to_parts(images, samples, place)
        entries, narrowest = list[_Entry](), _count_rows(x.part)

        def note(name: str, args: tuple[Any, ...]) -> None:
            nonlocal narrowest
            if args and isinstance(args[0], Strip):
                strip: SplitMap = open_strip(args[0])
                narrowest = min(narrowest, _count_rows(strip.part))
                entries.append(_Entry(name, args[0], narrowest))

        handles = [
            module.register_forward_pre_hook(lambda _, args, name=name: note(name, args))
            for name, module in self._network.named_modules()
            if name
        ]
        try:
            with torch.no_grad():
                run_in_strips(self._network, x, until)
        except (UsageError, RuntimeError) as error:
            return entries, narrowest, error
        finally:
            for handle in handles:
                handle.remove()
        return entries, narrowest, None


def _strip_values(tensor: Tensor) -> Tensor:
    """Returns a parameter or buffer of the same shape and type, without values."""
    meta = torch.empty_like(tensor, device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def _count_rows(part: Part) -> float:
    """Rows or columns a rank, whichever are fewer, of the dimensions that are split."""
    return min(length / ranks for length, ranks in zip(part.lengths, part.place.grid, strict=True) if ranks > 1)


@final
@dataclass(frozen=True)
class _AbsentRanks:
    """A group of ranks of which only this one is here: its collectives do nothing, for tensors without values."""

    rank: int
    size: int

    def all_to_all(self, out: Tensor, into: Tensor, *_: Any) -> _AbsentRanks:
        return self

    def all_reduce(self, tensor: Tensor, *_: Any) -> _AbsentRanks:
        return self

    def wait(self, *_: Any) -> None:
        pass
