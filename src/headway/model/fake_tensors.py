"""A network without values: what runs through it has shapes, types and memory formats, and takes no time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def use_fake_tensors(model: nn.Module, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Within it the network's parameters and buffers have no values, nor has what is computed; afterwards they are as
    before. Gives the tensors without theirs.

    A network that asks for a value, to decide by it or to hand it to numpy, fails within it.
    """
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            for module in model.modules():
                for held in (module._parameters, module._buffers):
                    kept.append((held, dict(held)))
                    for name, value in held.items():
                        if value is not None:
                            held[name] = mode.from_tensor(value)  # type: ignore[assignment]
            yield [mode.from_tensor(tensor) for tensor in tensors]
        finally:
            for held, values in kept:
                held.update(values)
