"""A mixture of experts: each token passes a few of many small networks, which a gate chooses for it.

Tokens are sorted by expert, so that each expert computes one matrix product for all of its tokens. By default none is
dropped. `headway.parallel.experts` spreads the experts over processes: it replaces the layer's `exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from headway.core.errors import UsageError
from headway.model.gates import Gate, compute_squared_cv


class Exchange(Protocol):
    """Brings rows to the process that holds their expert, and sums over processes."""

    def run(self, experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the experts' outputs for rows, in the order of the rows.

        Args:
            experts: computes outputs [n, width] of the experts of this process, from rows sorted by expert and the
                number of rows of each.
            rows: [n, width], sorted by expert.
            counts: rows of each expert of the layer, int64 [experts].
        """

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sums over all processes that train together. The gradient of each is that of its own part."""


@final
class LocalExchange:
    """The exchange of a process that holds all experts and trains alone."""

    def run(self, experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the experts' outputs."""
        return experts(rows, counts)

    def sum(self, values: Tensor) -> Tensor:
        """Returns the values themselves."""
        return values


@final
@dataclass(frozen=True)
class ExpertLoad:
    """How even a batch was spread over the experts of a layer: of all processes, in the newest forward pass.

    Attributes:
        importance: sum of the weights of each expert, [experts].
        rows: number of tokens that chose each expert, [experts], before any was dropped.
        dropped: number of those that found their expert full, a scalar.
    """

    importance: Tensor
    rows: Tensor
    dropped: Tensor

    def summarise(self) -> dict[str, float]:
        """Returns the coefficients of variation of both, and the share of the dropped. This waits for the device."""
        cv = [float(compute_squared_cv(values).sqrt()) for values in (self.importance, self.rows)]
        share = float(self.dropped / self.rows.sum().clamp(min=1))
        return {"importance_cv": cv[0], "load_cv": cv[1], "dropped": share}


@final
class Experts(nn.Module):
    """Experts of one size: width -> hidden -> width with ReLU and without biases. Their weights are stacked.

    Args:
        experts: number of experts.
        width: values of a row.
        hidden: values between the two matrices of an expert.
    """

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        # As nn.Linear initialises its weights.
        self.up = nn.Parameter(torch.empty(experts, width, hidden).uniform_(-1, 1) / width**0.5)
        self.down = nn.Parameter(torch.empty(experts, hidden, width).uniform_(-1, 1) / hidden**0.5)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Computes the experts' outputs [n, width]. Args: rows: sorted by expert. counts: rows of each, int64."""
        if rows.device.type == "cuda":
            return self.run_grouped(rows, counts)
        # On a CPU a loop is faster than a grouped product. An expert without rows stays in it: all processes have the
        # same graph, and gradients of zeros.
        parts = zip(rows.split(counts.tolist()), self.up.unbind(), self.down.unbind(), strict=True)
        return torch.cat([F.relu(part @ up) @ down for part, up, down in parts])

    def run_grouped(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Does the same with one product of all experts for each matrix, without waiting for the device."""
        # Autocast does not know the grouped product.
        kind = rows.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
        ends = counts.cumsum(0).to(torch.int32)
        hidden = F.relu(F.grouped_mm(rows.to(dtype), self.up.to(dtype), offs=ends))
        return F.grouped_mm(hidden, self.down.to(dtype), offs=ends)


@final
class MixtureOfExperts(nn.Module):
    """A layer in which a gate sends each token to some of many experts, and sums their weighted outputs.

    Input and output: [..., width], float. In training `pop_auxiliary_loss` gives the gate's loss for an even load,
    which Headway's training adds to the task's; in a loop of your own, add it to yours.

    Args:
        width: values of a token.
        hidden: values inside an expert.
        experts: number of experts.
        gate: chooses the experts of a token: `NoisyTopKGate` or `SwitchGate`.
        capacity_factor: each process sends at most this factor * tokens * k / experts of its tokens to one expert, the
            first ones; the output of others is 0 (add the layer's input to it, and they pass). None: nothing is
            dropped.

    Attributes:
        exchange: brings rows to the processes that hold their experts.
        load: how even the newest forward pass in training was; None before.

    Raises:
        UsageError: capacity_factor is not above 0.
    """

    def __init__(
        self, width: int, hidden: int, *, experts: int, gate: Gate, capacity_factor: float | None = None
    ) -> None:
        super().__init__()
        if capacity_factor is not None and not capacity_factor > 0:
            what = f"a mixture of experts has capacity_factor={capacity_factor!r}"
            raise UsageError(what, fix="Give it a number above 0, such as 1.25, or None to drop nothing.")
        self.num_experts, self.capacity_factor, self.gate = experts, capacity_factor, gate
        self.experts = Experts(experts, width, hidden)
        self.exchange: Exchange = LocalExchange()
        self.load: ExpertLoad | None = None
        self._auxiliary_loss: Tensor | None = None

    # Its sizes depend on values, and its exchange talks to other processes: no graph can hold them.
    # torch.compiler.disable does the same, and imports the compiler at once: 0.9 s in every process.
    @_disable_dynamo
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.gate(tokens)
        k = routing.experts.shape[1]
        chosen = routing.experts.flatten()
        asked = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        asked = asked.scatter_add(0, chosen, torch.ones_like(chosen))
        # Stable: the rows of an expert keep the order of the tokens.
        order = chosen.argsort(stable=True)
        kept, counts = (order, asked) if self.capacity_factor is None else self._limit(order, chosen, asked)
        rows = tokens.unsqueeze(1).expand(-1, k, -1).reshape(-1, tokens.shape[1]).index_select(0, kept)
        computed = self.exchange.run(self.experts, rows, counts)
        # Back to the order of the tokens. A dropped one has zeros.
        outputs = computed.new_zeros(len(chosen), tokens.shape[1]).index_copy(0, kept, computed)
        weights = routing.weights.to(outputs.dtype).unsqueeze(-1)
        if self.training:
            self._balance(routing.sums, routing.experts, routing.weights, asked, counts)
        return (outputs.view(len(tokens), k, -1) * weights).sum(1).view(*x.shape[:-1], -1)

    def pop_auxiliary_loss(self) -> Tensor | None:
        """Returns the loss of the newest forward pass for an even load, and forgets it; None after evaluation."""
        loss, self._auxiliary_loss = self._auxiliary_loss, None
        return loss

    def _limit(self, order: Tensor, chosen: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sorted tokens that their experts have room for, and their number for each expert."""
        assert self.capacity_factor is not None
        room = max(1, math.ceil(self.capacity_factor * len(chosen) / self.num_experts))
        starts = asked.cumsum(0) - asked
        place = torch.arange(len(order), device=order.device) - starts[chosen[order]]
        return order[place < room], asked.clamp(max=room)

    def _balance(self, sums: Tensor, experts: Tensor, weights: Tensor, asked: Tensor, counts: Tensor) -> None:
        """Computes the load over all processes, and the gate's loss of it."""
        importance = sums.new_zeros(self.num_experts).scatter_add(0, experts.flatten(), weights.detach().flatten())
        dropped = (asked.sum() - counts.sum()).to(sums.dtype).view(1)
        # One exchange for all: the balance of the whole batch is not the mean of that of its parts.
        total = self.exchange.sum(torch.cat([sums.flatten(), importance, asked.to(sums.dtype), dropped]))
        gate_sums, importance, rows, dropped = total.split([sums.numel(), self.num_experts, self.num_experts, 1])
        self.load = ExpertLoad(importance.detach(), rows.detach(), dropped.detach()[0])
        self._auxiliary_loss = self.gate.compute_balance(gate_sums.view_as(sums))


def list_mixtures(network: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """Lists the mixtures of experts of a network with their names."""
    for name, module in network.named_modules():
        if isinstance(module, MixtureOfExperts):
            yield name, module
