"""How values of several ranks become one."""

from __future__ import annotations

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
    """What `op`, or the older `average`, means; the average where neither is given.

    Raises:
        ValueError: both are given, or `op` is none.
    """
    if average is not None:
        if op is not None:
            raise ValueError("give `op` or `average`, not both; `op` is the newer one")
        warnings.warn("`average` is deprecated; say op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    return Average if op is None else ReduceOp(op)
