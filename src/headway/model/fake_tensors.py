"""Runs a network on torch's fake tensors: with shapes, types and memory formats, but without values, in no time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def use_fake_tensors(model: nn.Module, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Replaces a network's parameters and buffers by fake tensors within the block, and yields fakes of `tensors`.

    A network that reads a value, to branch on it or to pass it to numpy, fails within the block.
    """
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    # Real tensors that are neither parameters nor buffers are converted when they are used.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            for module in model.modules():
                # Changing the dictionaries keeps the modules, and so all references to them and their names.
                for tensors_by_name in (module._parameters, module._buffers):
                    saved.append((tensors_by_name, dict(tensors_by_name)))
                    for name, value in tensors_by_name.items():
                        if value is not None:
                            tensors_by_name[name] = mode.from_tensor(value)  # type: ignore[assignment]
            yield [mode.from_tensor(tensor) for tensor in tensors]
        finally:
            for tensors_by_name, values in saved:
                tensors_by_name.update(values)
