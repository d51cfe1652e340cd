"""Reduces the gradients of a network under Horovod's names, by hooks that fire as each gradient is accumulated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor

from headway.comm.hvd import context, ops
from headway.comm.hvd.compression import Compressor
from headway.comm.hvd.objects import broadcast_object
from headway.comm.hvd.process_sets import ProcessSet
from headway.comm.hvd.reduce_op import Average, ReduceOp

# Waits for a reduction and puts the result into the gradients.
Collect = Callable[[], None]

TOO_MANY = (
    "gradients were computed more often than backward_passes_per_step before step() or synchronize(); "
    "set backward_passes_per_step to the number of backward passes of a step"
)
RACE = (
    "zero_grad() between backward() and step() or synchronize() would clear gradients while they are being reduced; "
    "call it after step()"
)
TWICE = (
    "step() after synchronize() reduces the gradients once more; "
    "to avoid it: `with optimizer.skip_synchronize(): optimizer.step()`"
)


@final
class GradientReduction:
    """Reduces the gradients of some parameters.

    Args:
        names: of each parameter; the same on all ranks.
        bundles: parameters that are reduced together, when all of them are ready; each parameter is in one.
        passes: backward passes after which a gradient is ready.
        predivide: see `DistributedOptimizer`, as for the other arguments.
    """

    def __init__(
        self,
        names: dict[Tensor, str],
        bundles: Sequence[Sequence[Tensor]],
        *,
        compression: Compressor,
        passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._names, self._bundle_of = names, {p: tuple(bundle) for bundle in bundles for p in bundle}
        self._compression, self._op, self._predivide = compression, op, predivide
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        self.passes = passes
        self._left = dict.fromkeys(self._bundle_of, passes)
        self._under_way: dict[tuple[Tensor, ...], Collect] = {}
        self._touched = self._synchronized = False
        self._skips = False

    def register_hooks(self) -> None:
        """Registers a hook on each parameter."""
        for parameter in self._bundle_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def set_passes(self, passes: int) -> None:
        """Changes the number of backward passes of a step, from the next step on."""
        self.passes = passes
        self._left = dict.fromkeys(self._left, passes)

    def reset(self) -> None:
        """Forgets the reductions under way."""
        self._under_way.clear()
        self._touched = self._synchronized = self._skips = False
        self.set_passes(self.passes)

    def synchronize(self) -> None:
        """Reduces the remaining gradients, zeros for parameters without one, and waits for all."""
        for bundle in dict.fromkeys(self._bundle_of.values()):
            if bundle not in self._under_way:
                self._begin(bundle)
        for collect in self._under_way.values():
            collect()
        self._under_way.clear()
        self._left = dict.fromkeys(self._left, self.passes)
        self._touched, self._synchronized = False, True

    def prepare_step(self, *_: Any) -> None:
        """Synchronizes before the optimizer's step, unless told to skip it. This is the optimizer's pre-hook."""
        if not self._skips:
            if self._synchronized:
                # 3: the step's caller; torch's wrapper of `step` is in between.
                warnings.warn(TWICE, stacklevel=3)
            self.synchronize()
        self._synchronized = False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Makes `step` use the gradients as they are inside the block, after a call of `synchronize`."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def check_idle(self) -> None:
        """Raises AssertionError while gradients are being reduced."""
        if self._touched:
            raise AssertionError(RACE)

    def _on_gradient(self, parameter: Tensor) -> None:
        self._touched = True
        if self._left[parameter] <= 0:
            raise AssertionError(TOO_MANY)
        self._left[parameter] -= 1
        # The last gradient of a bundle begins its reduction, while the backward pass goes on.
        bundle = self._bundle_of[parameter]
        if not any(self._left[other] for other in bundle):
            self._begin(bundle)

    def _begin(self, bundle: tuple[Tensor, ...]) -> None:
        for parameter in bundle:
            # Another rank may have one.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grad = bundle[0].grad
        if len(bundle) == 1 and grad is not None and grad.is_sparse and not self._sparse_as_dense:
            self._under_way[bundle] = self._begin_sparse(bundle[0], grad)
        else:
            self._under_way[bundle] = self._begin_dense(bundle)

    def _begin_dense(self, bundle: tuple[Tensor, ...]) -> Collect:
        grads = [parameter.grad for parameter in bundle if parameter.grad is not None]
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        packed, forms = zip(*map(self._compression.compress, dense), strict=True)
        # Channels-last gradients are not contiguous.
        buffers = [tensor.contiguous() for tensor in packed]
        # The average is split: divided by the factor before the sum, and by ranks / factor after it.
        before, after = (1 / self._predivide, self._predivide) if self._op == Average else (1.0, 1.0)
        name, process_set = self._names[bundle[0]], self._process_set
        # In place: no second copy of the gradients is needed.
        if len(bundle) > 1:
            handle = ops.grouped_allreduce_async_(buffers, None, name, self._op, before, after, process_set)
        else:
            handle = ops.allreduce_async_(buffers[0], None, name, self._op, before, after, process_set)

        def collect() -> None:
            ops.synchronize(handle)
            for grad, buffer, form in zip(grads, buffers, forms, strict=True):
                gradient = self._compression.decompress(buffer, form)
                if grad.is_sparse:
                    grad.zero_().add_(gradient.to_sparse(grad.sparse_dim()))
                elif gradient is not grad:
                    grad.copy_(gradient)

        return collect

    def _begin_sparse(self, parameter: Tensor, grad: Tensor) -> Collect:
        # Sparse gradients differ in their indices: they are gathered, not summed in place.
        wait = ops.sparse_allreduce_async(grad, self._names[parameter], self._op, self._process_set)

        def collect() -> None:
            grad.zero_().add_(wait())

        return collect


def bundle_parameters(
    parameters: Sequence[Tensor],
    names: dict[Tensor, str],
    groups: int | Sequence[Sequence[Tensor]] | None,
    process_set: ProcessSet,
) -> list[list[Tensor]]:
    """Groups parameters into bundles that are reduced together.

    Args:
        groups: None: each alone. A number: this many bundles of consecutive parameters, in the order of the process
            set's first rank. Lists: these bundles, and parameters in no list alone.

    Raises:
        ValueError: groups is none of these, or a parameter is in two lists.
    """
    if groups is None:
        return [[parameter] for parameter in parameters]
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError(f"groups={groups}: set a positive number, or lists of tensors")
        # One rank's order for all: ranks may build their optimizers in different orders.
        root = (process_set.ranks or [context.rank()])[0]
        order = broadcast_object([names[parameter] for parameter in parameters], root, process_set=process_set)
        ordered = sorted(parameters, key=lambda parameter: order.index(names[parameter]))
        ends = [number * len(ordered) // groups for number in range(groups + 1)]
        return [bundle for low, high in pairwise(ends) if (bundle := ordered[low:high])]
    known = set(parameters)
    seen: set[Tensor] = set()
    bundles = []
    for group in groups:
        for tensor in group:
            if not isinstance(tensor, Tensor):
                raise ValueError("groups have to be lists of tensors")
            if tensor in seen:
                raise ValueError("a parameter is in two groups; put it into one")
            seen.add(tensor)
        bundle = [tensor for tensor in group if tensor in known]
        bundles += [bundle] if bundle else []
    return bundles + [[parameter] for parameter in parameters if parameter not in seen]
