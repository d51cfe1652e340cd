"""Images split by rows and columns over the ranks of a place, for networks that know nothing of it.

A `Strip` stands for maps [samples, channels, rows, columns] of which each rank holds some rows and columns; its `shape`
is that of the whole maps. Each function that a network calls with it has a rule (`rules.py`), which gives exactly this
rank's part of what the function gives for whole maps; a function without a rule is refused by name. Where the maps end,
at global pooling and `flatten`, or before a named layer, parts become samples: each rank goes on with its own, as in
data parallel training.

No gradient needs a factor: with a loss that is a sum over samples, the sum of the parameters' gradients over all ranks
is that of one process (ICLR 2018 workshop, "Spatially Parallel Convolutions"; arXiv 1712.04432).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn
from torch.nn import functional

from headway.comm.batch_norm import SyncBatchNorm
from headway.core.errors import UsageError, suggest_nearest
from headway.parallel.maps import Part, SampleValues, SplitMap, refuse, to_samples
from headway.parallel.norms import normalise_batches
from headway.parallel.rules import load_rules
from headway.parallel.values import describe_function

UNTIL = "parallel.until"


@final
class Strip(Tensor):
    """This rank's values of split maps, as a tensor that networks can compute with. `make_strip` makes one."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        rule = load_rules().get(func)
        if rule is None:
            raise refuse(describe_function(func))
        given = {name: open_strip(value) for name, value in (kwargs or {}).items()}
        return _close(rule(func, *map(open_strip, args), **given))


@final
class Samples(Tensor):
    """Values of this rank's samples, after the strips have ended. All functions but batch norm work as on a plain
    tensor.

    It knows its place, so that a gate for each channel meets the maps of all samples of the place.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, Strip) for one in types):
            # The rule of strips decides.
            return NotImplemented
        if func is functional.batch_norm:
            # The statistics are those of the place, of maps and of samples.
            given = {name: open_strip(value) for name, value in (kwargs or {}).items()}
            return _close(normalise_batches(func, *map(open_strip, args), **given))
        out = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        part = next(one.__dict__["part"] for one in _list_samples((*args, *(kwargs or {}).values())))
        for one in _list_samples(out if isinstance(out, tuple | list) else (out,)):
            one.__dict__["part"] = part
        return out


def _list_samples(values: Any) -> Iterator[Samples]:
    """Lists the tensors that know their place, also inside tuples and lists."""
    for one in values:
        if isinstance(one, Samples):
            yield one
        elif isinstance(one, tuple | list):
            yield from _list_samples(one)


def make_strip(x: SplitMap) -> Strip:
    """Returns a split map as a tensor. Gradients flow through."""
    strip = x.own.as_subclass(Strip)
    # Python attributes of a subclass pass no `__torch_function__`: a network never sees this one.
    strip.__dict__["part"] = x.part
    return strip


def open_strip(value: Any) -> Any:
    """Returns the split map of a strip, or the values of samples, also inside a tuple or list; all else unchanged."""
    if isinstance(value, Strip):
        return SplitMap(value.as_subclass(Tensor), value.__dict__["part"])
    if isinstance(value, Samples):
        return SampleValues(value.as_subclass(Tensor), value.__dict__["part"])
    return type(value)(map(open_strip, value)) if type(value) in (tuple, list) else value


def close_samples(values: Tensor, part: Part) -> Samples:
    """Returns values of this rank's samples as a tensor that knows its place. Gradients flow through."""
    samples = values.as_subclass(Samples)
    samples.__dict__["part"] = part
    return samples


def _close(value: Any) -> Any:
    """Returns the strip of a split map, also inside a tuple, and anything else unchanged."""
    if isinstance(value, SplitMap):
        return make_strip(value)
    if isinstance(value, SampleValues):
        return close_samples(value.own, value.part)
    return tuple(map(_close, value)) if type(value) is tuple else value


def run_in_strips(network: nn.Module, x: SplitMap, until: str | None = None) -> Tensor:
    """Runs a network on this rank's part of its input. Returns its outputs for this rank's samples of the place.

    Args:
        until: name of the layer before which strips become samples; None: they do where the maps end.

    Raises:
        UsageError: the network calls a function without a rule, or does not end with samples, and the message names
            the layer; or no split map enters layer `until`.
    """
    for name, module in network.named_modules():
        if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
            what = f"{name} is a batch norm over ranks, and images that are split have their statistics over the place"
            raise UsageError(what, where=name, fix="Leave sync_batch_norm out.")
    with name_layers(network), end_strips(network, until):
        out = network(make_strip(x))
    if isinstance(out, Strip):
        return to_samples(open_strip(out))
    if not isinstance(out, Tensor):
        raise UsageError(f"a network that is split gives one tensor, not {type(out).__name__}")
    return out.as_subclass(Tensor)


def find_layer(network: nn.Module, until: str) -> nn.Module:
    """Returns the layer of this name. Raises UsageError if there is none."""
    layers = dict(network.named_modules())
    if until not in layers or not until:
        what = f"{until!r} is no layer of the network"
        raise UsageError(what, where=UNTIL, fix=suggest_nearest(until, filter(None, layers)))
    layer: nn.Module = layers[until]
    return layer


@contextmanager
def end_strips(network: nn.Module, until: str | None) -> Iterator[None]:
    """Turns strips into samples where they enter a layer, while the network runs inside the block.

    Args:
        until: name of the layer; None: nowhere, so that they end with the maps.

    Raises:
        UsageError: there is no such layer, or no split map has entered it.
    """
    if until is None:
        yield
        return
    layer = find_layer(network, until)
    entered = []

    def convert(value: Any) -> Any:
        if not isinstance(value, Strip):
            return value
        entered.append(True)
        x = open_strip(value)
        return close_samples(to_samples(x), x.part)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(convert, args)), {name: convert(value) for name, value in kwargs.items()}

    handle = layer.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if not entered:
        what = f"no split map enters layer {until!r}"
        raise UsageError(what, where=UNTIL, fix="Name an earlier layer, or leave until out.")


@contextmanager
def name_layers(network: nn.Module) -> Iterator[None]:
    """Adds the name of the layer to a refusal inside the block, in which the network runs."""
    stack = list[str]()

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: stack.append(name)

    def leave(*_: Any) -> None:
        stack.pop()

    handles = []
    for name, module in network.named_modules():
        handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        yield
    except UsageError as error:
        # Hooks of the layers that an error left did not run: the last name is the layer's own.
        where = stack[-1] if stack else ""
        raise UsageError(error.what, where=error.where or where or type(network).__name__, fix=error.fix) from error
    finally:
        for handle in handles:
            handle.remove()
