"""Counts what makes Python wait for a device."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    getattr(torch.Tensor, name): name
    for name in ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
}


class Waits(TorchFunctionMode):
    """Counts what waits for a device: tensors read by Python, and the copy of one number to the host, which torch's
    own functions make too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.found[READS[func]] += 1
        return func(*args, **(kwargs or {}))


class Scalars(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._found["_local_scalar_dense"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    with Waits() as waits, Scalars(waits.found):
        yield waits.found


@contextmanager
def waits_refused() -> Iterator[None]:
    """An operation that waits for the GPU raises an error here."""
    try:
        with warnings.catch_warnings():
            # torch says once that this mode is a prototype; as an error it would leave the mode on.
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
