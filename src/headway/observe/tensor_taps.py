"""Taps on torch: report reads of tensor values in Python, and begin and end of backward.

They are installed while there is a listener, and removed exactly. A dispatch mode would see more (a mask as an index,
nonzero inside torch), but slow each operation by 5 to 50 us: too much for something that is always on.
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

# Methods that read values; on a device tensor that is a host-device sync. `print` and f-strings call `item`.
VALUE_METHODS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")
# Methods that may cause a host-device sync too; on host tensors they are not reads.
COPY_METHODS = ("cpu", "to", "nonzero")

# Frames of these folders, and frames further away than these, are not the user's code.
_INTERNAL_FOLDERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/")
_MAX_FRAMES = 12


class TensorListener(ABC):
    """Receives reads of tensors and calls of backward, from any thread."""

    @abstractmethod
    def record_read(self, name: str, on_device: bool, ns: int) -> None:
        """Called after Python read a tensor.

        Args:
            name: Method that read it.
            on_device: The read was a host-device sync.
            ns: Duration in nanoseconds.
        """

    @abstractmethod
    def begin_backward(self) -> None:
        """Called before torch.autograd.backward."""

    @abstractmethod
    def end_backward(self) -> None:
        """Called after torch.autograd.backward returned or failed."""


_LISTENERS: list[TensorListener] = []
_REMOVE_TAPS: list[Callable[[], object]] = []


def add_listener(listener: TensorListener) -> None:
    """Adds a listener; the first one installs the taps."""
    if not _LISTENERS:
        _install_taps()
    _LISTENERS.append(listener)


def remove_listener(listener: TensorListener) -> None:
    """Removes a listener, if it is there; the last one removes the taps."""
    if listener in _LISTENERS:
        _LISTENERS.remove(listener)
        if not _LISTENERS:
            while _REMOVE_TAPS:
                _REMOVE_TAPS.pop()()


def find_caller() -> tuple[str, int]:
    """Returns (file, line) of the nearest caller outside torch and this room; ("", 0) if none is within 12 frames."""
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
    """Replaces methods of torch.Tensor and torch.autograd.backward, and fills _REMOVE_TAPS."""
    for name in (*VALUE_METHODS, *COPY_METHODS):
        original = getattr(torch.Tensor, name)
        # Most methods are inherited from the class in C; they are deleted afterwards, not set.
        is_own = name in vars(torch.Tensor)
        tap = _build_value_tap(name, original) if name in VALUE_METHODS else _build_copy_tap(name, original)
        setattr(torch.Tensor, name, tap)
        restore = functools.partial(setattr, torch.Tensor, name, original)
        _REMOVE_TAPS.append(restore if is_own else functools.partial(delattr, torch.Tensor, name))
    backward = torch.autograd.backward
    torch.autograd.backward = _build_backward_tap(backward)
    _REMOVE_TAPS.append(functools.partial(setattr, torch.autograd, "backward", backward))


def _build_value_tap(name: str, original: Any) -> Any:
    """Returns a wrapper of a method that reads values."""

    @functools.wraps(original)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Code that is being traced must not look at the clock.
        if is_compiling():
            return original(self, *args, **kwargs)
        start_ns = perf_counter_ns()
        value = original(self, *args, **kwargs)
        ns = perf_counter_ns() - start_ns
        needs_sync = _needs_sync(self)
        for listener in _LISTENERS:
            listener.record_read(name, needs_sync, ns)
        return value

    return read


def _build_copy_tap(name: str, original: Any) -> Any:
    """Returns a wrapper of a method that reports only calls with a host-device sync."""

    @functools.wraps(original)
    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not _needs_sync(self):
            return original(self, *args, **kwargs)
        start_ns = perf_counter_ns()
        result = original(self, *args, **kwargs)
        ns = perf_counter_ns() - start_ns
        # A non-blocking copy to the host does not wait; most calls of `to` go from one device or type to another.
        if name == "nonzero" or (not _needs_sync(result) and not kwargs.get("non_blocking")):
            for listener in _LISTENERS:
                listener.record_read(name, True, ns)
        return result

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
    """Returns True if the tensor is on a device that works asynchronously."""
    return not (value.is_cpu or value.is_meta)
