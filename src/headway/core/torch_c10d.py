"""c10d, the C++ layer of torch.distributed: stores and raw process groups. torch is imported on first use."""

from __future__ import annotations

import re
from typing import Any

# torch prefixes its messages with source locations: "[/pytorch/third_party/gloo/...:123] ".
_LOCATIONS = re.compile(r"^(\[[^\]]*\] )+")

# Gloo guesses a cause and sends the reader to logs of other workers, which the launcher shows itself.
_GUESSES = re.compile(r"[.:;\s]*\b(This is typically caused by|Check the logs of) .*")


def load_c10d() -> Any:
    """Returns torch's extension module of stores and groups; its type stubs lack half of the names."""
    from torch._C import _distributed_c10d

    return _distributed_c10d


def summarise_error(error: BaseException) -> str:
    """Returns the first line of a torch error without its source locations and Gloo's guesses at a cause."""
    lines = str(error).strip().splitlines()
    return _GUESSES.sub("", _LOCATIONS.sub("", lines[0])).rstrip(".") if lines else type(error).__name__
