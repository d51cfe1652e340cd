"""Muon: momentum with its singular values made equal (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import inf
from typing import Any, final

from torch import Tensor

from headway.core.errors import UsageError
from headway.optim import foreach_ops as ops
from headway.optim.fused_optimizer import FusedOptimizer, check_ranges, check_whole_numbers
from headway.optim.groups import Group
from headway.optim.lars import build_lars_rule
from headway.optim.orthogonalise import ProductPrecision, check_precision, count_multiply_adds, orthogonalise
from headway.optim.update_rule import StepInputs, UpdateRule


@final
class Muon(FusedOptimizer):
    """Momentum whose singular values are made equal, for filters; SGD with momentum for all other parameters.

    Filters: m = momentum * m + g; w = (1 - lr * weight_decay) * w - lr * sqrt(max(1, rows / columns)) * O. O is m (with
    `nesterov`, g + momentum * m), flattened to [out, in * height * width], with singular values near 1
    (`headway.optim.orthogonalise`). The other parameters have the same `lr` and `momentum` unless their group has its
    own.

    Args:
        params: a group can set `filters`. True: Muon steps its parameters, of two dimensions or more. False: SGD does.
        lr: a number, or a scalar tensor. Filters need a rate far below SGD's, or far above it.
        filters: default of the groups; None: a parameter of three dimensions or more is a filter. The last layers of
            networks are matrices, and train worse with Muon.
        momentum: share of m that is kept, in [0, 1).
        nesterov: make the singular values of g + momentum * m equal, in place of those of m. The SGD of the other
            parameters has Nesterov's momentum then too.
        weight_decay: of filters it is decoupled, as above; of all other parameters it is added to the gradient, as by
            SGD.
        ns_steps: rounds of the Newton-Schulz iteration. Four do what five of Jordan's do.
        ns_precision: precision of its matrix products. `auto`: bf16 on devices that multiply it natively, GPUs from
            compute capability 8.0 on and CPUs with AMX; float32 elsewhere.
        normalise: bring the weights of filters to the norm sqrt(out) before each step, as in Jordan's CIFAR-10 record.
            For networks with batch norm after each filter. Filters of zeros have no direction, and stay.
        fused: step the other parameters by the native core if possible.

    Raises:
        UsageError: an option is out of range, or a filter has one dimension.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        filters: bool | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 4,
        ns_precision: ProductPrecision = "auto",
        normalise: bool = False,
        fused: bool = True,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        shape = {"filters": filters, "ns_steps": ns_steps, "ns_precision": ns_precision, "normalise": normalise}
        super().__init__(params, options | shape | {"fused": fused})

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, as every torch optimizer does. A group without `filters` becomes two: filters, and the rest."""
        filters_option = param_group.get("filters", self.defaults["filters"])
        params = param_group["params"]
        # A set is torch's to refuse: its order changes between runs.
        if filters_option is not None or isinstance(params, set):
            super().add_param_group(param_group)
            return
        params = [params] if isinstance(params, Tensor) else list(params)
        count = len(self.param_groups)
        try:
            for filters in (True, False):
                selected = [
                    param for param in params if ((param[1] if isinstance(param, tuple) else param).ndim > 2) == filters
                ]
                if selected:
                    super().add_param_group({**param_group, "params": selected, "filters": filters})
        except (UsageError, TypeError, ValueError):
            del self.param_groups[count:]
            raise

    def _check_options(self, group: Group) -> None:
        check_ranges("Muon", group, lr=(0, inf), momentum=(0, 1), weight_decay=(0, inf))
        check_whole_numbers("Muon", group, ns_steps=1)
        check_precision("Muon", group["ns_precision"])
        if group["filters"] and (vectors := [param for param in group["params"] if param.ndim < 2]):
            what = f"Muon has a parameter of shape {tuple(vectors[0].shape)} among its filters"
            raise UsageError(what, fix="Put parameters of one dimension into a group with filters=False.")

    def _build_update_rule(self, group: Group) -> UpdateRule:
        if not group["filters"]:
            return build_lars_rule(group, trust=None, lr_in_momentum=False)
        momentum, decay = group["momentum"], group["weight_decay"]

        def apply(inputs: StepInputs) -> None:
            lr = inputs.gate_lr()
            direction = inputs.grads
            if momentum > 0:
                buffers = inputs.get_states("momentum_buffer")
                ops.scale_(buffers, inputs.gate_decay(momentum))
                ops.add_(buffers, inputs.grads)
                direction = ops.add(inputs.grads, buffers, momentum) if group["nesterov"] else list(buffers)
            # Without batch norm behind the filter this would change the function that the network computes.
            if group["normalise"]:
                inputs.normalise_filters_(inputs.weights)
            # The decay is decoupled: it acts on the weights, not on the gradient.
            if decay:
                ops.scale_(inputs.weights, 1 - lr * decay)
            directions = orthogonalise(direction, group["ns_steps"], precision=group["ns_precision"])
            ops.descend_(inputs.weights, directions, lr)

        return UpdateRule(
            apply=apply,
            first_state="momentum_buffer" if momentum > 0 else None,
            count_multiply_adds=partial(
                count_multiply_adds, ns_steps=group["ns_steps"], precision=group["ns_precision"]
            ),
        )
