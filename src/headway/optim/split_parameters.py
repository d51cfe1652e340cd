"""Parameters of which each rank trains some rows: norms of the whole ones, for clipping and for layer-wise rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm


@final
@dataclass(frozen=True)
class SplitParameters:
    """The parameters that are split over ranks, and how numbers of their parts become numbers of the whole.

    Attributes:
        parameters: this rank's parts.
        sum_over_ranks: adds a tensor of all ranks, to the same bits on each. Every rank calls it alike.
    """

    parameters: frozenset[Tensor]
    sum_over_ranks: Callable[[Tensor], Tensor]


def clip_gradients_(parameters: Sequence[Tensor], clip_norm: float, split: SplitParameters | None = None) -> None:
    """Scales the gradients, in place, to a norm of at most `clip_norm`: that of all of them, as of one vector.

    Args:
        parameters: those with a gradient count.
        split: the ones of which each rank has a part; the norm is that of the whole parameters.
    """
    parts, whole = list[Tensor](), list[Tensor]()
    for parameter in parameters:
        if parameter.grad is not None:
            is_part = split is not None and parameter in split.parameters
            (parts if is_part else whole).append(parameter.grad)
    if split is None or not parts:
        clip_grad_norm_(parameters, clip_norm)
        return
    square = split.sum_over_ranks(get_total_norm(parts).double().square())
    norm = (square + get_total_norm(whole).double().square()).sqrt()
    clip_grads_with_norm_(parameters, clip_norm, norm.to(parts[0].dtype))
