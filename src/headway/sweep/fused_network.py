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
        networks: on a CPU, in training mode. None is an empty place, which costs as much as a network: the numbers of
            the others are the same whether it is empty or not.

    Raises:
        CannotFuseError: the networks differ, or something in them is not known here.
    """

    def __init__(self, networks: Sequence[nn.Module | None]) -> None:
        self._places = [place for place, network in enumerate(networks) if network is not None]
        self._networks = [network for network in networks if network is not None]
        self._count = len(networks)
        first = _describe(self._networks[0])
        if any(_describe(other) != first for other in self._networks[1:]):
            raise CannotFuseError("their networks differ")
        if any(_has_hooks(module) for network in self._networks for module in network.modules()):
            raise CannotFuseError("their networks have hooks")
        parameters = [list(network.parameters()) for network in self._networks]
        self._parameters = [self._stack(own) for own in zip(*parameters, strict=True)]
        buffers = [list(network.buffers()) for network in self._networks]
        self._buffers = [self._stack(own) for own in zip(*buffers, strict=True)]
        # The code of the first network names its own tensors.
        self._stacks = {id(stack.own[0]): stack for stack in (*self._parameters, *self._buffers)}
        self._plan = Plan()

    def _stack(self, own: tuple[Tensor, ...]) -> Stack:
        first = own[0]
        if not first.ndim:
            return Stack(own, self._places, None)
        rows, strides = first.shape[0], first.stride()
        if not first.is_floating_point() or strides[0] * rows != first.numel():
            raise CannotFuseError("their networks have weights of an unusual layout")
        shape = (self._count * rows, *first.shape[1:])
        # The strides of each part are those that it had: the states of the optimizer have them too.
        together = torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)
        by_place = dict(zip(self._places, own, strict=True))
        for place in range(self._count):
            view = together.narrow(0, place * rows, rows)
            view.copy_(by_place.get(place, first).detach())
            if place in by_place:
                by_place[place].data = view
        return Stack(own, self._places, together.requires_grad_(first.requires_grad))

    @property
    def is_linked(self) -> bool:
        """True while the networks' tensors are still views of the stacked ones, with the same layers frozen."""
        return all(stack.is_linked for stack in (*self._parameters, *self._buffers))

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Returns the outputs of each network for one batch, [n, outputs].

        Raises:
            CannotFuseError: the networks use something that is not known here.
        """
        run = Run(self._stacks, self._count, self._plan, OPERATIONS)
        try:
            with run:
                found = self._networks[0](images)
        except (CannotFuseError, MemoryError):
            raise
        except Exception as error:
            # The network's code meets something that is no tensor. An error of its own comes again when it runs alone.
            what = f"their networks use activations in a way that is not known to fuse ({error})"
            raise CannotFuseError(what) from error
        if not isinstance(found, Activations) or found.ndim != 2:
            raise CannotFuseError("their networks give something else than rows of outputs")
        self._plan.finish(run)
        outputs = found.to_members().unbind()
        return [outputs[place] for place in self._places]

    def take_gradients(self) -> list[list[Tensor | None]]:
        """Returns the gradients of each network, in the order of its parameters, and forgets them."""
        taken: list[list[Tensor | None]] = [[] for _ in self._networks]
        for stack in self._parameters:
            grad = None if stack.together is None else stack.together.grad
            for place, gradients in zip(self._places, taken, strict=True):
                rows = stack.own[0].shape[0]
                gradients.append(None if grad is None else grad.narrow(0, place * rows, rows))
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
