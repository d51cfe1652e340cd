"""The rule by which the outputs of several networks become those of an ensemble."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.core.errors import UsageError
from headway.setup.task import Activation


def average_outputs(activation: Activation | None, outputs: Sequence[Tensor]) -> Tensor:
    """Returns outputs [b, outputs] whose probabilities are the mean of the members' probabilities.

    - `softmax`: the logarithm of the mean probability of each class, so that cross-entropy, argmax and softmax work on
      it as on the outputs of one network.
    - `sigmoid`: the logit of the mean probability of each label.
    - `identity`: the mean of the numbers.

    By Jensen's inequality the cross-entropy of the mean is at most the mean of the members' cross-entropies, in every
    batch; so is the squared error.

    Args:
        outputs: float32 [b, outputs] of each member.

    Raises:
        UsageError: there is no activation, as the task is the user's own and does not state one.
    """
    if activation is None:
        what = "this task of your own does not state how the outputs of several networks are averaged"
        raise UsageError(what, where="task", fix='Set the attribute activation = "softmax", "sigmoid" or "identity".')
    stacked = torch.stack(list(outputs))
    if activation == "identity":
        return stacked.mean(0)
    # Means of logarithms of probabilities: float32 holds exp(-100) only as a logarithm.
    log_count = math.log(len(stacked))
    if activation == "softmax":
        return F.log_softmax(stacked, dim=-1).logsumexp(0) - log_count
    # The count cancels in the difference of log p and log (1 - p).
    return F.logsigmoid(stacked).logsumexp(0) - F.logsigmoid(-stacked).logsumexp(0)
