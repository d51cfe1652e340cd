"""The part of torch under torch.distributed: stores and raw groups. Nothing here imports torch before it is needed."""

from __future__ import annotations

from typing import Any


def c10d() -> Any:
    """torch's module of stores and groups; its types lack half of its names."""
    from torch._C import _distributed_c10d

    return _distributed_c10d
