"""Rules of functions that are called with values of towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.core.errors import UsageError
from headway.parallel.rules import get_property
from headway.parallel.values import describe_function

FIX = "Train with parallel: data, or change the network there."

CONCATENATIONS = frozenset({torch.cat, torch.concat, torch.concatenate})

DEVICE: Any = get_property("device")

# Their answers are the same on all ranks.
QUESTIONS = frozenset({
    *map(get_property, ("shape", "dtype", "ndim", "requires_grad", "layout", "is_leaf")),
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride,
    Tensor.is_floating_point, Tensor.is_contiguous, torch.is_floating_point, torch.numel,
})  # fmt: skip

# They treat each channel alone, so each rank can apply them to its own channels before it sends them. After a pool
# that is a fraction of the bytes.
OF_CHANNELS = frozenset({
    torch.relu, Tensor.relu, F.relu, torch.max_pool2d, F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d,
    F.adaptive_max_pool2d,
})  # fmt: skip

# A tower that draws numbers would move the generator of its rank alone.
RANDOM = frozenset({
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout",
    "rrelu", "gumbel_softmax", "fractional_max_pool2d", "bernoulli", "bernoulli_", "multinomial", "rand_like",
    "randn_like", "randint_like", "normal_", "uniform_", "exponential_", "random_",
})  # fmt: skip


def refuse(func: Any, what: str) -> UsageError:
    """Returns the error for a function of `what` that cannot be divided."""
    return UsageError(f"{describe_function(func)} of {what} has no rule for towers on several ranks", fix=FIX)


def works_on_channels(func: Any, args: Sequence[Any]) -> bool:
    """Returns True if a function treats each channel of its first argument alone, and keeps their order."""
    if func in (torch.flatten, Tensor.flatten):
        # Channels come first among the values of a sample.
        return tuple(args[1:]) in ((1,), (1, -1))
    return func in OF_CHANNELS


def is_random(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns True if a function draws random numbers; dropout does not in evaluations, or with p = 0."""
    name = describe_function(func).rpartition(".")[2]
    return name in RANDOM and bool(kwargs.get("training", True)) and bool(kwargs.get("p", 1.0))


def writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns True if a function changes its first argument."""
    name = str(getattr(func, "__name__", ""))
    is_in_place = name.endswith("_") and not name.endswith("__")
    # As `x += y` does, which is `__iadd__`.
    is_assignment = name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return is_in_place or is_assignment or bool(kwargs.get("inplace"))
