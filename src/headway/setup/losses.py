"""The built-in losses, each a convex function of the outputs that gives one number for each sample, [b].

Sources: Crammer and Singer 2001 (JMLR 2) for the hinge loss of several classes, Huber 1964 for his loss.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def compute_cross_entropy(outputs: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Computes the softmax cross-entropy.

    Args:
        outputs: [b, classes].
        labels: numbers of the classes, [b], or shares of them, [b, classes].
        label_smoothing: fraction of the target spread over all classes (Szegedy et al. 2016, arXiv 1512.00567).
    """
    return F.cross_entropy(outputs, labels, reduction="none", label_smoothing=label_smoothing)


def compute_binary_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Computes the binary cross-entropy after a sigmoid, mean over the labels: [b, labels] of 0 and 1."""
    return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none").mean(dim=1)


def compute_hinge(outputs: Tensor, labels: Tensor, *, margin: float = 1.0) -> Tensor:
    """Computes how much the output of the class lacks to lead the largest other output by the margin.

    Args:
        outputs: [b, classes], two classes or more.
        labels: numbers of the classes, [b], or shares of them, [b, classes], which weigh the classes' losses.
        margin: lead above which the loss is 0.
    """
    best = outputs.topk(2, dim=1)
    # For each class the largest output of the others: the first of all, or the second for the first itself.
    others = best.values[:, :1].expand_as(outputs).scatter(1, best.indices[:, :1], best.values[:, 1:])
    losses = F.relu(margin + others - outputs)
    if labels.ndim == 2:
        return (losses * labels).sum(dim=1)
    return losses.gather(1, labels[:, None]).squeeze(1)


def compute_binary_hinge(outputs: Tensor, labels: Tensor, *, margin: float = 1.0) -> Tensor:
    """Computes the hinge loss of each label, a sign times an output, and their mean: labels [b, labels] of 0 and 1."""
    return F.relu(margin - (2 * labels - 1) * outputs).mean(dim=1)


def compute_l1(outputs: Tensor, labels: Tensor) -> Tensor:
    """Computes the absolute error, mean over the numbers of a sample: labels [b, numbers], or [b] of one number."""
    return _subtract(outputs, labels).abs().mean(dim=1)


def compute_l2(outputs: Tensor, labels: Tensor) -> Tensor:
    """Computes the squared error, mean over the numbers of a sample: labels [b, numbers], or [b] of one number."""
    return _subtract(outputs, labels).square().mean(dim=1)


def compute_huber(outputs: Tensor, labels: Tensor, *, delta: float = 1.0) -> Tensor:
    """Computes half the squared error up to `delta`, a straight line beyond; mean over the numbers of a sample.

    Args:
        outputs: [b, numbers].
        labels: [b, numbers], or [b] of one number.
        delta: the error at which the line begins; its slope.
    """
    return F.huber_loss(outputs, labels.reshape(outputs.shape), reduction="none", delta=delta).mean(dim=1)


def compute_rmse(outputs: Tensor, labels: Tensor) -> Tensor:
    """Computes the root of the mean squared error over the numbers of a sample: labels [b, numbers], or [b].

    With one number it is the absolute error. The root of the mean over a whole set is no mean of samples: it is the
    metric `rmse`.
    """
    # The gradient of this norm is 0 for an error of 0; that of a square root would be infinite.
    norms: Tensor = torch.linalg.vector_norm(_subtract(outputs, labels), dim=1)
    return norms / math.sqrt(outputs.shape[1])


def _subtract(outputs: Tensor, labels: Tensor) -> Tensor:
    # Labels of one number are [b], and outputs [b, 1]: a difference would be broadcast to [b, b].
    return outputs - labels.reshape(outputs.shape)
