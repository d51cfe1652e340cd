"""What each layer of a network does and keeps, seen while a few samples go through it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headway.core.modules import preserve_training_state
from headway.core.profile import WorkloadLayer
from headway.model.flops import MultiplyAddCounter

SAMPLES = (2, 3)
"""Batches from whose difference follows what one sample takes; batch norm may want two samples at least."""

Context = Callable[[], AbstractContextManager[Any]]


def profile_layers(model: nn.Module, images: Tensor, autocast: Context) -> tuple[WorkloadLayer, ...]:
    """The layers of a network, in the order in which they are first called; those that never are come last.

    The network does two forward passes and one backward pass in the mode in which it is. Parameters, buffers and random
    state are then as before. Tensors may be without values (`valueless`).

    Args:
        images: float [3, C, H, W] or more.
        autocast: makes the context of a forward pass.
    """
    fewer, more = SAMPLES
    with preserve_training_state(model):
        two = _profile_passes(model, images[:fewer], autocast, backward=True)
        three = _profile_passes(model, images[:more], autocast, backward=False)
    out = []
    for (name, module), place in zip(two.named.items(), two.order_gradients(), strict=True):
        tally, other = two.tallies[name], three.tallies[name]
        own = two.owned[name]
        if not (own or tally.called):
            continue
        saved = max(0, other.saved_bytes - tally.saved_bytes) // (more - fewer)
        trained = [value for value in own if value.requires_grad]
        out.append(
            WorkloadLayer(
                name=name,
                kind=type(module).__name__,
                parameters=sum(value.numel() for value in own),
                weight_bytes=sum(value.numel() * value.element_size() for value in own),
                gradient_bytes=sum(value.numel() * value.element_size() for value in trained),
                ready=place,
                input_shape=tally.input_shape,
                output_shape=tally.output_shape,
                forward_multiply_adds=tally.forward // fewer,
                backward_multiply_adds=tally.backward // fewer,
                activation_bytes=max(0, other.output_bytes - tally.output_bytes) // (more - fewer),
                saved_bytes=saved,
                saved_bytes_fixed=max(0, tally.saved_bytes - fewer * saved),
            )
        )
    first = {name: place for place, name in enumerate(two.order)}
    return tuple(sorted(out, key=lambda layer: first.get(layer.name, len(first))))


@dataclass
class _LayerTally:
    """Of one module. `called`: something was done in it that is no child's, or it has no children."""

    called: bool = False
    forward: int = 0
    backward: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    input_shape: tuple[int, ...] | None = None
    output_shape: tuple[int, ...] | None = None


@final
@dataclass
class _LayerProfiler:
    """Who does what. Nodes of autograd belong to the module that was running when they were made: at each change of
    modules, those that are new behind the tensors at hand."""

    named: dict[str, nn.Module]
    counter: MultiplyAddCounter
    tallies: dict[str, _LayerTally] = field(default_factory=dict)
    owned: dict[str, list[nn.Parameter]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    ready: list[nn.Parameter] = field(default_factory=list)
    _stack: list[str] = field(default_factory=list)
    _nodes: dict[Any, str] = field(default_factory=dict)
    _storages: set[int] = field(default_factory=set)
    _counted: int = 0
    _in_backward: bool = False
    _at: str = ""

    def __post_init__(self) -> None:
        seen: set[int] = set()
        for name, module in self.named.items():
            self.tallies[name] = _LayerTally()
            self.owned[name] = []
            for value in module._parameters.values():
                if value is not None and id(value) not in seen:  # tied weights belong to the first
                    seen.add(id(value))
                    self.owned[name].append(value)

    def ignore(self, *tensors: Tensor) -> None:
        """Their memory is kept anyway."""
        self._storages.update(_storage_id(tensor) for tensor in tensors)

    def enter(self, name: str, tensors: list[Tensor]) -> None:
        if self._in_backward:  # what is computed again belongs to the backward pass
            return
        self._attribute_operations()
        if self._stack:
            self._claim_nodes(self._stack[-1], tensors)
        if name not in self.order:
            self.order.append(name)
            self.tallies[name].input_shape = _sample_shape(tensors)
        if not self.named[name]._modules:
            self.tallies[name].called = True
        self._stack.append(name)

    def leave(self, name: str, tensors: list[Tensor]) -> None:
        if self._in_backward:
            return
        self._attribute_operations()
        self._claim_nodes(name, tensors)
        tally = self.tallies[name]
        if tally.output_shape is None:
            tally.output_shape = _sample_shape(tensors)
        sizes = {_storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        tally.output_bytes += sum(sizes.values())
        self._stack.pop()

    def pack(self, tensor: Tensor) -> Tensor:
        """A tensor is kept for the backward pass."""
        if (identity := _storage_id(tensor)) not in self._storages and self._stack:
            self._storages.add(identity)
            tally = self.tallies[self._stack[-1]]
            tally.saved_bytes += tensor.untyped_storage().nbytes()
            tally.called = True
        return tensor

    def backward(self, loss: Tensor) -> None:
        self._attribute_operations()
        self._in_backward, hooks = True, []
        for node, name in self._nodes.items():
            hooks.append(node.register_prehook(lambda grads, name=name: self._start_node(name)))
        loss.backward()
        self._attribute_operations()
        for hook in hooks:
            hook.remove()

    def order_gradients(self) -> Iterator[int | None]:
        """Of each module: how many others' gradients are complete before; those that never come are last, as the ranks
        exchange zeros for them then."""
        at = {id(value): place for place, value in enumerate(self.ready)}
        last = {
            name: max(at.get(id(value), len(at)) for value in own if value.requires_grad)
            for name, own in self.owned.items()
            if any(value.requires_grad for value in own)
        }
        places = {name: place for place, name in enumerate(sorted(last, key=last.__getitem__))}
        return (places.get(name) for name in self.named)

    def _start_node(self, name: str) -> None:
        self._attribute_operations()
        self._at = name

    def _attribute_operations(self) -> None:
        """What was counted since the last change belongs to who was at work."""
        done, self._counted = self.counter.total - self._counted, self.counter.total
        if not done:
            return
        if self._in_backward:
            self.tallies[self._at].backward += done
        elif self._stack:
            self.tallies[self._stack[-1]].forward += done
            self.tallies[self._stack[-1]].called = True

    def _claim_nodes(self, name: str, tensors: list[Tensor]) -> None:
        """The nodes behind these tensors that belong to nobody yet. It keeps them: torch makes a new object of a node
        that nobody holds."""
        new = [tensor.grad_fn for tensor in tensors]
        while new:
            node = new.pop()
            if node is not None and node not in self._nodes:
                self._nodes[node] = name
                new += [before for before, _ in node.next_functions]
                self.tallies[name].called = True


def _profile_passes(model: nn.Module, images: Tensor, autocast: Context, *, backward: bool) -> _LayerProfiler:
    with ExitStack() as stack:
        watch = _LayerProfiler(dict(model.named_modules()), MultiplyAddCounter())
        watch.ignore(images, *model.parameters(), *model.buffers())
        for name, module in watch.named.items():
            before = module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: watch.enter(name, _list_tensors((args, kwargs))), with_kwargs=True
            )
            after = module.register_forward_hook(lambda _, args, out, name=name: watch.leave(name, _list_tensors(out)))
            stack.callback(before.remove)
            stack.callback(after.remove)
        for value in model.parameters():
            if value.requires_grad:
                stack.callback(value.register_post_accumulate_grad_hook(watch.ready.append).remove)
        with watch.counter:
            with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda tensor: tensor), autocast():
                outputs = model(images)
            if backward:
                watch.backward(outputs.float().sum())
    return watch


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _sample_shape(tensors: list[Tensor]) -> tuple[int, ...] | None:
    return tuple(tensors[0].shape[1:]) if tensors else None


def _storage_id(tensor: Tensor) -> int:
    """Of the memory that a tensor lies in: also where there is none, on `meta`."""
    return int(tensor.untyped_storage()._cdata)
