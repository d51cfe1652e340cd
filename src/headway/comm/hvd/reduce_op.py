"""The reductions of values over ranks."""

from __future__ import annotations

import sys
import warnings
from enum import IntEnum
from typing import final


@final
class ReduceOp(IntEnum):
    """The reductions, under Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOp


def resolve_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Returns the reduction that `op` or the older `average` names; Average if neither is given.

    Raises ValueError if both are given, or `op` is not a ReduceOp.
    """
    if average is not None:
        if op is not None:
            raise ValueError("give `op` or `average`, not both; `op` is the newer one")
        text = "`average` is deprecated; use op=hvd.Average or op=hvd.Sum"
        warnings.warn(text, DeprecationWarning, stacklevel=find_stacklevel())
        return Average if average else Sum
    return Average if op is None else ReduceOp(op)


def find_stacklevel() -> int:
    """Returns the stacklevel at which a warning of the calling function points to the user's code."""
    # The first frame outside of this package, whichever of its functions call each other.
    package, level = __name__.rpartition(".")[0], 1
    while sys._getframe(level).f_globals.get("__name__", "").startswith(package):
        level += 1
    return level
