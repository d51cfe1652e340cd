"""A mixture of experts as a graph of fixed shape: every expert computes every token, and the gate's weights choose."""

from __future__ import annotations

import logging
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headway.model.mixture import MixtureOfExperts

LOG = logging.getLogger("headway.export")


@final
class DenseMixture(nn.Module):
    """Computes what a `MixtureOfExperts` computes in evaluation, with shapes that do not depend on values.

    The original sorts tokens by expert, so that the sizes of its products depend on the gate. No graph holds such
    sizes. Here the products of all experts are computed, experts / k times as many, and those that the gate did not
    choose get the weight 0.

    No token is dropped, also if the original has a `capacity_factor`: which tokens find room depends on the other
    images of the batch, and an export answers for whatever images are asked together.

    Args:
        mixture: the layer, whose parameters are shared.
    """

    def __init__(self, mixture: MixtureOfExperts) -> None:
        super().__init__()
        self.gate, self.experts = mixture.gate, mixture.experts
        self.num_experts = mixture.num_experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.gate(tokens)
        # [tokens, k, experts], with a one where the gate chose the expert.
        chosen = F.one_hot(routing.experts, self.num_experts).to(torch.float32)
        weights = (chosen * routing.weights.float().unsqueeze(-1)).sum(1)
        hidden = F.relu(torch.einsum("tw,ewh->teh", tokens, self.experts.up))
        outputs = torch.einsum("teh,ehw->tew", hidden, self.experts.down)
        mixed = (outputs * weights.unsqueeze(-1)).sum(1)
        return mixed.reshape(*x.shape[:-1], mixed.shape[-1])


def densify_mixture(module: nn.Module, name: str) -> nn.Module:
    """Returns a DenseMixture in place of a mixture of experts, and any other module as it is."""
    if not isinstance(module, MixtureOfExperts):
        return module
    if module.capacity_factor is not None:
        what = "which tokens it drops depends on the other images of a batch, so the export drops none"
        LOG.warning(f"{name or 'the network'} has capacity_factor={module.capacity_factor:g}: {what}.")
    return DenseMixture(module)
