"""FusedNetwork: several networks of one structure, computed together as one network.

The code of the first network runs once, and each operation in it computes all members: convolutions become one grouped
convolution, linear layers one batched product, batch norm sees the channels of all members (HFTA, Wang et al. 2021,
arXiv 2102.02344). No operation mixes members, so a member's numbers depend on its own weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from headway.sweep.fused_activations import Activations, CannotFuseError, Plan, Run, Stack
from headway.sweep.fused_operations import OPERATIONS


@final
class FusedNetwork:
    """Computes networks of one structure together, each with its own weights.

    Parameters and buffers of the networks become views of stacked tensors, so that optimizers, checkpoints and
    evaluations of each network work as before. They stay so when this object is gone.

    Args:
        networks: on a CPU, in training mode. A single one is computed beside a copy of itself: its numbers are then
            those that it has among others.

    Raises:
        CannotFuseError: the networks differ, or something in them is not known here.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        first = _describe(networks[0])
        if any(_describe(other) != first for other in networks[1:]):
            raise CannotFuseError("their networks differ")
        if any(_has_hooks(module) for network in networks for module in network.modules()):
            raise CannotFuseError("their networks have hooks")
        self._networks, self._count = tuple(networks), max(2, len(networks))
        parameters = [list(network.parameters()) for network in networks]
        self._parameters = [self._stack(own) for own in zip(*parameters, strict=True)]
        buffers = [list(network.buffers()) for network in networks]
        self._buffers = [self._stack(own) for own in zip(*buffers, strict=True)]
        # The code of the first network names its own tensors.
        self._stacks = {id(stack.own[0]): stack for stack in (*self._parameters, *self._buffers)}
        self._plan = Plan()

    def _stack(self, own: tuple[Tensor, ...]) -> Stack:
        first = own[0]
        if not first.ndim:
            return Stack(own, None)
        rows, strides = first.shape[0], first.stride()
        if not first.is_floating_point() or strides[0] * rows != first.numel():
            raise CannotFuseError("their networks have weights of an unusual layout")
        shape = (self._count * rows, *first.shape[1:])
        # The strides of each part are those that it had: the states of the optimizer have them too.
        together = torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)
        for number in range(self._count):
            tensor, view = own[min(number, len(own) - 1)], together.narrow(0, number * rows, rows)
            view.copy_(tensor.detach())
            if number < len(own):
                tensor.data = view
        return Stack(own, together.requires_grad_(first.requires_grad))

    @property
    def is_linked(self) -> bool:
        """True while the networks' tensors are still views of the stacked ones, with the same layers frozen."""
        return all(stack.is_linked for stack in (*self._parameters, *self._buffers))

    def __call__(self, images: Tensor) -> Tensor:
        """Returns the outputs of all networks for one batch, [networks, n, outputs].

        Raises:
            CannotFuseError: the networks use something that is not known here.
        """
        run = Run(self._stacks, self._count, self._plan, OPERATIONS)
        with run:
            found = self._networks[0](images)
        if not isinstance(found, Activations) or found.ndim != 2:
            raise CannotFuseError("their networks give something else than rows of outputs")
        self._plan.finish(run)
        return found.to_members()[: len(self._networks)]

    def take_gradients(self) -> list[list[Tensor | None]]:
        """Returns the gradients of each network, in the order of its parameters, and forgets them."""
        taken: list[list[Tensor | None]] = [[] for _ in self._networks]
        for stack in self._parameters:
            grad = None if stack.together is None else stack.together.grad
            for number, gradients in enumerate(taken):
                rows = stack.own[0].shape[0]
                gradients.append(None if grad is None else grad.narrow(0, number * rows, rows))
            if stack.together is not None:
                stack.together.grad = None
        return taken


def _describe(network: nn.Module) -> list[object]:
    """Returns the structure of a network: equal for networks that compute the same with other weights."""
    found: list[object] = [(name, type(module), module.extra_repr()) for name, module in network.named_modules()]
    found += [(name, one.shape, one.stride(), one.dtype, one.requires_grad) for name, one in network.named_parameters()]
    found += [(name, one.shape, one.stride(), one.dtype) for name, one in network.named_buffers()]
    return found


def _has_hooks(module: nn.Module) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)
