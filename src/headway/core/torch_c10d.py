"""The part of torch under torch.distributed: stores and raw groups. Nothing here imports torch before it is needed."""

from __future__ import annotations

import re
from typing import Any

_PLACES = re.compile(r"^(\[[^\]]*\] )+")


def load_c10d() -> Any:
    """torch's module of stores and groups; its types lack half of its names."""
    from torch._C import _distributed_c10d

    return _distributed_c10d


def summarise_error(error: BaseException) -> str:
    """The first line of an error of torch's, without the place in its sources that stands before it."""
    lines = str(error).strip().splitlines()
    return _PLACES.sub("", lines[0]).rstrip(".") if lines else type(error).__name__
