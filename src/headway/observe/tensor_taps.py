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

VALUE_METHODS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")
"""Methods that read values; of a tensor on a device they wait for it. `print` and f-strings ask by `item`."""
COPY_METHODS = ("cpu", "to", "nonzero")
"""Methods that may wait for a device too, and of a tensor of the host mean nothing."""

_INTERNAL_FOLDERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/")
_MAX_FRAMES = 12


class TensorListener(ABC):
    """Is told of reads and of backward, on whatever thread they happen."""

    @abstractmethod
    def record_read(self, name: str, on_device: bool, ns: int) -> None:
        """Python has read a tensor's value by this method, in so many ns; on_device: it had to wait for a device."""

    @abstractmethod
    def begin_backward(self) -> None:
        """torch.autograd.backward was called."""

    @abstractmethod
    def end_backward(self) -> None:
        """It returned, or failed."""


_LISTENERS: list[TensorListener] = []
_REMOVE_TAPS: list[Callable[[], object]] = []


def add_listener(listener: TensorListener) -> None:
    """From now on the listener is told."""
    if not _LISTENERS:
        _install_taps()
    _LISTENERS.append(listener)


def remove_listener(listener: TensorListener) -> None:
    """From now on it is not; a listener that is not told anyway stays so."""
    if listener in _LISTENERS:
        _LISTENERS.remove(listener)
        if not _LISTENERS:
            while _REMOVE_TAPS:
                _REMOVE_TAPS.pop()()


def find_caller() -> tuple[str, int]:
    """(file, line) of the nearest caller outside of torch and of this room; empty and 0: there is none in 12 frames."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if not file.startswith(_INTERNAL_FOLDERS):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _install_taps() -> None:
    for name in (*VALUE_METHODS, *COPY_METHODS):
        original = getattr(torch.Tensor, name)
        own = name in vars(torch.Tensor)  # most are inherited from the class in C, and have to be so again
        tap = _build_value_tap(name, original) if name in VALUE_METHODS else _build_copy_tap(name, original)
        setattr(torch.Tensor, name, tap)
        back = functools.partial(setattr, torch.Tensor, name, original)
        _REMOVE_TAPS.append(back if own else functools.partial(delattr, torch.Tensor, name))
    backward = torch.autograd.backward
    torch.autograd.backward = _build_backward_tap(backward)
    _REMOVE_TAPS.append(functools.partial(setattr, torch.autograd, "backward", backward))


def _build_value_tap(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # what is traced must not see the clock
            return original(self, *args, **kwargs)
        began = perf_counter_ns()
        found = original(self, *args, **kwargs)
        ns = perf_counter_ns() - began
        waits = _needs_sync(self)
        for listener in _LISTENERS:
            listener.record_read(name, waits, ns)
        return found

    return read


def _build_copy_tap(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not _needs_sync(self):
            return original(self, *args, **kwargs)
        began = perf_counter_ns()
        found = original(self, *args, **kwargs)
        ns = perf_counter_ns() - began
        # A copy to the host that was asked not to wait does not; `to` mostly goes from one device or type to another.
        if name == "nonzero" or (not _needs_sync(found) and not kwargs.get("non_blocking")):
            for listener in _LISTENERS:
                listener.record_read(name, True, ns)
        return found

    return copy


def _build_backward_tap(original: Any) -> Any:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        for listener in _LISTENERS:
            listener.begin_backward()
        try:
            return original(*args, **kwargs)
        finally:
            for listener in _LISTENERS:
                listener.end_backward()

    return backward


def _needs_sync(value: Any) -> bool:
    """Whether a tensor is on a device that works on its own."""
    return not (value.is_cpu or value.is_meta)
