"""Gates of a mixture of experts: which experts a token goes to, with which weights, and how even their load is."""

from __future__ import annotations

from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headway.core.errors import UsageError

# Added to the noise's scale, as in the authors' code: the load divides by it.
NOISE_EPSILON = 1e-2
# Added to the squared mean, so that an empty batch has no NaN.
CV_EPSILON = 1e-10


class Routing(NamedTuple):
    """Experts to which the tokens of a batch go, and the weights of their outputs.

    Attributes:
        experts: numbers of the experts of each token, int64 [tokens, k].
        weights: weights of their outputs, [tokens, k], float32 at least.
        sums: the gate's sums over the tokens for each expert, [rows, experts]; `Gate.compute_balance` takes them.
    """

    experts: Tensor
    weights: Tensor
    sums: Tensor


class Gate(Protocol):
    """Chooses the experts of each token. A module with these methods can be the gate of `MixtureOfExperts`."""

    def __call__(self, tokens: Tensor) -> Routing:
        """Routes tokens, [tokens, width]."""

    def compute_balance(self, sums: Tensor) -> Tensor:
        """Computes the loss that keeps the experts' load even, from the sums over the tokens of all processes."""


@final
class NoisyTopKGate(nn.Module):
    """Noisy top-k gating (Shazeer et al. 2017, arXiv 1701.06538, sections 2.1 and 4).

    A token x goes to the k experts with the largest (x Wg)_i + noise * softplus((x Wn)_i); their weights are the
    softmax of these k numbers. Wg and Wn begin at 0, so that at first chance spreads the tokens evenly. There is noise
    in training only. Everything is computed in float32 (float64 for such tokens), also under autocast.

    Args:
        width: values of a token.
        experts: number of experts.
        k: experts of each token.
        importance_weight: factor of the squared coefficient of variation of the importance (an expert's sum of
            weights) in the loss.
        load_weight: the same of the load (the expected number of tokens, which is smooth).

    Raises:
        UsageError: k is below 2, where the weight is always 1 and teaches nothing, or no smaller than `experts`.
    """

    def __init__(
        self, width: int, experts: int, *, k: int = 2, importance_weight: float = 0.1, load_weight: float = 0.1
    ) -> None:
        super().__init__()
        if not 2 <= k < experts:
            what = f"a noisy top-k gate has k={k} of {experts} experts"
            raise UsageError(what, fix="Make k at least 2 and less than the number of experts, or take Switch's gate.")
        self.k, self.importance_weight, self.load_weight = k, importance_weight, load_weight
        self.weight = nn.Parameter(torch.zeros(width, experts))
        self.noise_weight = nn.Parameter(torch.zeros(width, experts))

    def forward(self, tokens: Tensor, noise: Tensor | None = None) -> Routing:
        """Routes tokens. Args: noise: standard normal numbers [tokens, experts]; default: drawn in training, else 0."""
        with torch.autocast(tokens.device.type, enabled=False):
            wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
            clean = wide @ self.weight.to(wide.dtype)
            scale = F.softplus(wide @ self.noise_weight.to(wide.dtype)) + NOISE_EPSILON
            if noise is None:
                noise = torch.randn_like(clean) if self.training else torch.zeros_like(clean)
            noisy = clean + noise * scale
            top, experts = noisy.topk(self.k + 1)
            weights = top[:, : self.k].softmax(-1)
            experts = experts[:, : self.k]
            importance = torch.zeros_like(clean).scatter(1, experts, weights).sum(0)
            # An expert is chosen again, if its noise alone is drawn anew, as long as it stays above the k-th largest of
            # the others: for a chosen one, that is the (k + 1)-th of all.
            is_chosen = torch.zeros_like(clean, dtype=torch.bool).scatter(1, experts, True)
            threshold = torch.where(is_chosen, top[:, self.k :], top[:, self.k - 1 : self.k])
            load = torch.special.ndtr((clean - threshold) / scale).sum(0)
            return Routing(experts, weights, torch.stack([importance, load]))

    def compute_balance(self, sums: Tensor) -> Tensor:
        """Returns importance_weight * CV(importance)^2 + load_weight * CV(load)^2."""
        importance, load = sums
        return self.importance_weight * compute_squared_cv(importance) + self.load_weight * compute_squared_cv(load)


@final
class SwitchGate(nn.Module):
    """The gate of the Switch Transformer (Fedus et al. 2021, arXiv 2101.03961, section 2): one expert for each token.

    A token goes to the expert with the largest probability, softmax(x W), which is the weight of its output. Computed
    in float32 (float64 for such tokens), also under autocast.

    Args:
        width: values of a token.
        experts: number of experts, 2 or more.
        balance_weight: factor of the loss: experts * sum of (share of the tokens) * (mean probability), which is 1 if
            both are even.
    """

    def __init__(self, width: int, experts: int, *, balance_weight: float = 0.01) -> None:
        super().__init__()
        if experts < 2:
            raise UsageError(f"a gate has {experts} expert to choose from", fix="Give it 2 or more.")
        self.balance_weight = balance_weight
        self.weight = nn.Parameter(torch.empty(width, experts))
        # Small, as in the paper: probabilities begin nearly even.
        nn.init.trunc_normal_(self.weight, std=(0.1 / width) ** 0.5)

    def forward(self, tokens: Tensor) -> Routing:
        """Routes tokens."""
        with torch.autocast(tokens.device.type, enabled=False):
            wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
            probabilities = (wide @ self.weight.to(wide.dtype)).softmax(-1)
            weights, experts = probabilities.max(-1, keepdim=True)
            counts = torch.zeros_like(probabilities).scatter(1, experts, 1.0).sum(0)
            return Routing(experts, weights, torch.stack([counts, probabilities.sum(0)]))

    def compute_balance(self, sums: Tensor) -> Tensor:
        """Returns balance_weight * experts * sum of (share of the tokens) * (mean probability)."""
        counts, probabilities = sums
        tokens = counts.sum().clamp(min=1)
        balance: Tensor = ((counts / tokens) * (probabilities / tokens)).sum()
        return self.balance_weight * len(counts) * balance


def compute_squared_cv(values: Tensor) -> Tensor:
    """Returns the squared coefficient of variation: variance over squared mean. It is 0 for even values."""
    squared_cv: Tensor = values.var(correction=0) / (values.mean().square() + CV_EPSILON)
    return squared_cv
