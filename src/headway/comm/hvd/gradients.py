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

FinishReduction = Callable[[], None]
"""Waits for a reduction and puts the result into the gradients."""

TOO_MANY_PASSES = (
    "gradients were computed more often than backward_passes_per_step before step() or synchronize(); "
    "set backward_passes_per_step to the number of backward passes of a step"
)
ZERO_GRAD_RACE = (
    "zero_grad() between backward() and step() or synchronize() would clear gradients while they are being reduced; "
    "call it after step()"
)
REDUCED_TWICE = (
    "step() after synchronize() reduces the gradients once more; "
    "to avoid it: `with optimizer.skip_synchronize(): optimizer.step()`"
)


@final
class GradientReduction:
    """Reduces the gradients of some parameters.

    Args:
        names: name of each parameter; the same on all ranks.
        bundles: parameters that are reduced together, when all of them are ready; each parameter is in one.
        backward_passes: number of backward passes after which a gradient is ready.
        predivide: `gradient_predivide_factor`; for it and the other arguments see `DistributedOptimizer`.
    """

    def __init__(
        self,
        names: dict[Tensor, str],
        bundles: Sequence[Sequence[Tensor]],
        *,
        compression: Compressor,
        backward_passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._names, self._bundle_of = names, {p: tuple(bundle) for bundle in bundles for p in bundle}
        self._compression, self._op, self._predivide = compression, op, predivide
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        self.backward_passes = backward_passes
        self._remaining_passes = dict.fromkeys(self._bundle_of, backward_passes)
        self._pending_reductions: dict[tuple[Tensor, ...], FinishReduction] = {}
        self._has_new_gradients = self._is_synchronized = False
        self._skips_synchronize = False

    def register_hooks(self) -> None:
        """Registers a hook on each parameter."""
        for parameter in self._bundle_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def set_passes(self, passes: int) -> None:
        """Sets the number of backward passes of a step, from the next step on."""
        self.backward_passes = passes
        self._remaining_passes = dict.fromkeys(self._remaining_passes, passes)

    def reset(self) -> None:
        """Forgets the reductions under way."""
        self._pending_reductions.clear()
        self._has_new_gradients = self._is_synchronized = self._skips_synchronize = False
        self.set_passes(self.backward_passes)

    def synchronize(self) -> None:
        """Reduces the remaining gradients, zeros for parameters without one, and waits for all."""
        # Each bundle once, in the order of the parameters.
        for bundle in dict.fromkeys(self._bundle_of.values()):
            if bundle not in self._pending_reductions:
                self._begin(bundle)
        for finish_reduction in self._pending_reductions.values():
            finish_reduction()
        self._pending_reductions.clear()
        self._remaining_passes = dict.fromkeys(self._remaining_passes, self.backward_passes)
        self._has_new_gradients, self._is_synchronized = False, True

    def prepare_step(self, *_: Any) -> None:
        """Synchronizes before the optimizer's step, unless told to skip it. This is the optimizer's pre-hook."""
        if not self._skips_synchronize:
            if self._is_synchronized:
                # 3: the step's caller; torch's wrapper of `step` is in between.
                warnings.warn(REDUCED_TWICE, stacklevel=3)
            self.synchronize()
        self._is_synchronized = False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Makes `step` use the gradients as they are, inside the block. Call `synchronize` first."""
        self._skips_synchronize = True
        try:
            yield
        finally:
            self._skips_synchronize = False

    def check_idle(self) -> None:
        """Raises AssertionError while gradients are being reduced."""
        if self._has_new_gradients:
            raise AssertionError(ZERO_GRAD_RACE)

    def _on_gradient(self, parameter: Tensor) -> None:
        self._has_new_gradients = True
        if self._remaining_passes[parameter] <= 0:
            raise AssertionError(TOO_MANY_PASSES)
        self._remaining_passes[parameter] -= 1
        # The last gradient of a bundle begins its reduction, while the backward pass goes on.
        bundle = self._bundle_of[parameter]
        if not any(self._remaining_passes[other] for other in bundle):
            self._begin(bundle)

    def _begin(self, bundle: tuple[Tensor, ...]) -> None:
        for parameter in bundle:
            # Another rank may have one.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grad = bundle[0].grad
        if len(bundle) == 1 and grad is not None and grad.is_sparse and not self._sparse_as_dense:
            self._pending_reductions[bundle] = self._begin_sparse(bundle[0], grad)
        else:
            self._pending_reductions[bundle] = self._begin_dense(bundle)

    def _begin_dense(self, bundle: tuple[Tensor, ...]) -> FinishReduction:
        grads = [parameter.grad for parameter in bundle if parameter.grad is not None]
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        compressed, contexts = zip(*map(self._compression.compress, dense), strict=True)
        # Channels-last gradients are not contiguous.
        buffers = [tensor.contiguous() for tensor in compressed]
        # The average is split: divided by the factor before the sum, and by ranks / factor after it.
        prescale, postscale = (1 / self._predivide, self._predivide) if self._op == Average else (1.0, 1.0)
        name, process_set = self._names[bundle[0]], self._process_set
        # In place: no second copy of the gradients is needed.
        if len(bundle) > 1:
            handle = ops.grouped_allreduce_async_(buffers, None, name, self._op, prescale, postscale, process_set)
        else:
            handle = ops.allreduce_async_(buffers[0], None, name, self._op, prescale, postscale, process_set)

        def finish_reduction() -> None:
            ops.synchronize(handle)
            for grad, buffer, ctx in zip(grads, buffers, contexts, strict=True):
                reduced = self._compression.decompress(buffer, ctx)
                if grad.is_sparse:
                    grad.zero_().add_(reduced.to_sparse(grad.sparse_dim()))
                elif reduced is not grad:
                    grad.copy_(reduced)

        return finish_reduction

    def _begin_sparse(self, parameter: Tensor, grad: Tensor) -> FinishReduction:
        # Sparse gradients differ in their indices: they are gathered, not summed in place.
        wait = ops.sparse_allreduce_async(grad, self._names[parameter], self._op, self._process_set)

        def finish_reduction() -> None:
            grad.zero_().add_(wait())

        return finish_reduction


def bundle_parameters(
    parameters: Sequence[Tensor],
    names: dict[Tensor, str],
    groups: int | Sequence[Sequence[Tensor]] | None,
    process_set: ProcessSet,
) -> list[list[Tensor]]:
    """Returns bundles of parameters that are reduced together.

    Args:
        names: name of each parameter.
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
        name_order = broadcast_object([names[parameter] for parameter in parameters], root, process_set=process_set)
        ordered = sorted(parameters, key=lambda parameter: name_order.index(names[parameter]))
        ends = [index * len(ordered) // groups for index in range(groups + 1)]
        return [bundle for start, end in pairwise(ends) if (bundle := ordered[start:end])]
    own_parameters = set(parameters)
    grouped_tensors: set[Tensor] = set()
    bundles = []
    for group in groups:
        for tensor in group:
            if not isinstance(tensor, Tensor):
                raise ValueError("groups have to be lists of tensors")
            if tensor in grouped_tensors:
                raise ValueError("a parameter is in two groups; put it into one")
            grouped_tensors.add(tensor)
        bundle = [tensor for tensor in group if tensor in own_parameters]
        bundles += [bundle] if bundle else []
    return bundles + [[parameter] for parameter in parameters if parameter not in grouped_tensors]
