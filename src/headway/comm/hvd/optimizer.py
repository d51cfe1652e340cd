"""DistributedOptimizer: a torch optimizer whose steps use the gradients, or updates, of all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from headway.comm.hvd import context, ops
from headway.comm.hvd.compression import Compression, Compressor
from headway.comm.hvd.gradients import GradientReduction, bundle_parameters
from headway.comm.hvd.process_sets import ProcessSet, global_process_set
from headway.comm.hvd.reduce_op import Adasum, Average, ReduceOp


# The function has Horovod's name.
def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes an optimizer, in place, reduce its gradients over the ranks before each step, while `backward` runs.

    It gets the methods `synchronize()`, which waits for the gradients, for example to clip them;
    `skip_synchronize()`, a context in which `step` then uses them as they are; and
    `set_backward_passes_per_step(passes)`.

    Args:
        named_parameters: `model.named_parameters()`; names have to be unique, and cover all parameters.
        compression: compression of the gradients that are sent.
        backward_passes_per_step: backward passes whose gradients are accumulated before they are reduced.
        op: Average, Sum, Min, Max, Product; with Adasum each rank takes its own step, and the updates are combined.
        gradient_predivide_factor: the average is divided by it before the sum, and by ranks / factor after it.
        num_groups: deprecated; use `groups`.
        groups: number of bundles, or lists of parameters, that are reduced together; default: each when it is ready.
        sparse_as_dense: reduce sparse gradients as dense ones, and make them sparse again.
        process_set: the ranks; on other ranks the optimizer works alone.

    Returns:
        the optimizer itself.

    Raises:
        ValueError: names are not unique or do not cover the parameters, a predivide factor comes with another op than
            Average, the passes are below 1, the groups are wrong, or the optimizer is distributed already.
        NotImplementedError: Adasum is used with a process set, or the number of ranks is not a power of two.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor works with op=Average only")
    if num_groups:
        warnings.warn("`num_groups` is deprecated; use `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: set at least 1")
    # A second set of hooks would reduce each gradient twice.
    if hasattr(optimizer, "skip_synchronize"):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    names = _name_parameters(optimizer, named_parameters)
    # One process of an elastic job may get company later.
    is_alone = context.size() == 1 and not context.is_elastic()
    if op == Adasum and context.size() > 1:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum works over all ranks, not over a process set")
        _AdasumUpdates(optimizer, names, compression).attach()
        return optimizer
    takes_part = bool(process_set.includes_self()) and not is_alone
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    gradients = GradientReduction(
        names,
        bundle_parameters(parameters, names, groups, process_set) if takes_part else [],
        compression=compression,
        backward_passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    # A state that is loaded replaces the step under way: its reductions are forgotten.
    gradients.register_hooks()
    optimizer.register_step_pre_hook(gradients.prepare_step)
    optimizer.register_load_state_dict_pre_hook(lambda *_: gradients.reset())
    _add_methods(
        optimizer, gradients.synchronize, gradients.skip_synchronize, gradients.set_passes, gradients.check_idle
    )
    return optimizer


def _name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    groups = optimizer.param_groups
    if named_parameters is None:
        # By position, which is the same on all ranks that build the same optimizer.
        return {p: f"noname.{i}.{j}" for i, group in enumerate(groups) for j, p in enumerate(group["params"])}
    named = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError("named_parameters has to give pairs of name and parameter, as model.named_parameters() does")
    duplicates = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if duplicates:
        raise ValueError(f"names of parameters have to be unique; these are not: {', '.join(sorted(duplicates))}")
    names = {parameter: name for name, parameter in named}
    missing = sum(p not in names for group in groups for p in group["params"])
    if missing:
        raise ValueError(f"{missing} parameters of the optimizer have no name in named_parameters")
    return names


def _add_methods(optimizer: Any, synchronize: Any, skip_synchronize: Any, set_passes: Any, check_idle: Any) -> None:
    """Adds the methods that a Horovod script calls on its optimizer to the instance; its class stays what it was."""
    # Clearing gradients while they are being reduced would lose them without a word.
    original_zero_grad = optimizer.zero_grad

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        check_idle()
        original_zero_grad(*args, **kwargs)

    optimizer.synchronize, optimizer.skip_synchronize = synchronize, skip_synchronize
    optimizer.set_backward_passes_per_step, optimizer.zero_grad = set_passes, zero_grad


@final
class _AdasumUpdates:
    """Combines the updates of the ranks: each rank steps with its own gradients, and Adasum combines the changes."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict[Tensor, str], compression: Compressor) -> None:
        self._optimizer, self._names, self._compression = optimizer, names, compression
        self._start_values: dict[Tensor, Tensor] = {}

    def attach(self) -> None:
        optimizer = self._optimizer
        optimizer.register_step_pre_hook(self._save_start_values)
        optimizer.register_step_post_hook(self._combine_updates)
        _add_methods(optimizer, lambda: None, self._refuse_skip, lambda passes: None, lambda: None)

    def _save_start_values(self, *_: Any) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    # A copy, since the step changes the parameter in place.
                    self._start_values[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def _combine_updates(self, *_: Any) -> None:
        # All at once, so that the small ones share a buffer.
        pending = []
        for parameter, start in self._start_values.items():
            update, ctx = self._compression.compress((parameter - start).contiguous())
            handle = ops.allreduce_async_(update, name=self._names[parameter], op=Adasum)
            pending.append((parameter, start, handle, ctx))
        for parameter, start, handle, ctx in pending:
            parameter.copy_(start.add_(self._compression.decompress(ops.synchronize(handle), ctx)))
        self._start_values.clear()

    def _refuse_skip(self) -> AbstractContextManager[NoReturn]:
        raise AssertionError("with Adasum there is nothing to skip: updates are combined, not gradients")
