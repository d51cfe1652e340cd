"""Taps on torch itself: who reads a tensor's value in Python, and when backward begins and ends.

They are in while someone listens, and taken out exactly when nobody does. A dispatch mode would see more (a mask as an
index, nonzero inside of torch), and make each operation take 5 to 50 us longer: too much for something always on.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_compiling

VALUES = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")
"""Methods that read values; of a tensor on a device they wait for it. `print` and f-strings ask by `item`."""
COPIES = ("cpu", "to", "nonzero")
"""Methods that may wait for a device too, and of a tensor of the host mean nothing."""

_NOT_THE_USERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/")
_DEPTH = 12


class Listener(ABC):
    """Is told of reads and of backward, on whatever thread they happen."""

    @abstractmethod
    def read(self, name: str, on_device: bool, ns: int) -> None:
        """Python has read a tensor's value by this method, in so many ns; on_device: it had to wait for a device."""

    @abstractmethod
    def backward_began(self) -> None:
        """torch.autograd.backward was called."""

    @abstractmethod
    def backward_ended(self) -> None:
        """It returned, or failed."""


_LISTENERS: list[Listener] = []
_TAKE_OUT: list[Callable[[], object]] = []


def listen(listener: Listener) -> None:
    """From now on the listener is told."""
    if not _LISTENERS:
        _put_in()
    _LISTENERS.append(listener)


def unlisten(listener: Listener) -> None:
    """From now on it is not; a listener that is not told anyway stays so."""
    if listener in _LISTENERS:
        _LISTENERS.remove(listener)
        if not _LISTENERS:
            while _TAKE_OUT:
                _TAKE_OUT.pop()()


def place() -> tuple[str, int]:
    """(file, line) of the nearest caller outside of torch and of this room; empty and 0: there is none in 12 frames."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USERS):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _put_in() -> None:
    for name in (*VALUES, *COPIES):
        original = getattr(torch.Tensor, name)
        own = name in vars(torch.Tensor)  # most are inherited from the class in C, and have to be so again
        tap = _value_tap(name, original) if name in VALUES else _copy_tap(name, original)
        setattr(torch.Tensor, name, tap)
        back = functools.partial(setattr, torch.Tensor, name, original)
        _TAKE_OUT.append(back if own else functools.partial(delattr, torch.Tensor, name))
    backward = torch.autograd.backward
    torch.autograd.backward = _backward_tap(backward)
    _TAKE_OUT.append(functools.partial(setattr, torch.autograd, "backward", backward))


def _value_tap(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # what is traced must not see the clock
            return original(self, *args, **kwargs)
        began = perf_counter_ns()
        found = original(self, *args, **kwargs)
        ns = perf_counter_ns() - began
        waits = _waits(self)
        for listener in _LISTENERS:
            listener.read(name, waits, ns)
        return found

    return read


def _copy_tap(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not _waits(self):
            return original(self, *args, **kwargs)
        began = perf_counter_ns()
        found = original(self, *args, **kwargs)
        ns = perf_counter_ns() - began
        # A copy to the host that was asked not to wait does not; `to` mostly goes from one device or type to another.
        if name == "nonzero" or (not _waits(found) and not kwargs.get("non_blocking")):
            for listener in _LISTENERS:
                listener.read(name, True, ns)
        return found

    return copy


def _backward_tap(original: Any) -> Any:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        for listener in _LISTENERS:
            listener.backward_began()
        try:
            return original(*args, **kwargs)
        finally:
            for listener in _LISTENERS:
                listener.backward_ended()

    return backward


def _waits(value: Any) -> bool:
    """Whether a tensor is on a device that works on its own."""
    return not (value.is_cpu or value.is_meta)
