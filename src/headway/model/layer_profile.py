"""Profiles the layers of a network: multiply-adds, memory and order of gradients, measured with a few samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headway.core.modules import preserve_training_state
from headway.core.workload import WorkloadLayer
from headway.model.flops import MultiplyAddCounter

SAMPLES = (2, 3)
"""Batch sizes of the two passes. Their difference gives the memory of one sample; batch norm needs two samples."""

Context = Callable[[], AbstractContextManager[Any]]


def profile_layers(model: nn.Module, images: Tensor, autocast: Context) -> tuple[WorkloadLayer, ...]:
    """Profiles the layers of a network, in the order of their first call; layers that are never called come last.

    The network does two forward passes and one backward pass in its present mode. Afterwards parameters, buffers and
    random state are as before. Fake tensors are enough (`use_fake_tensors`).

    Args:
        images: float [3, C, H, W] or more.
        autocast: makes the context of a forward pass.
    """
    fewer, more = SAMPLES
    with preserve_training_state(model):
        two = _profile_passes(model, images[:fewer], autocast, backward=True)
        three = _profile_passes(model, images[:more], autocast, backward=False)
    out = []
    for (name, module), order in zip(two.named.items(), two.order_gradients(), strict=True):
        tally, other = two.tallies[name], three.tallies[name]
        own = two.owned[name]
        if not (own or tally.called):
            continue
        # Two batch sizes tell the memory of one sample from the memory that any batch needs.
        saved = max(0, other.saved_bytes - tally.saved_bytes) // (more - fewer)
        trained = [value for value in own if value.requires_grad]
        out.append(
            WorkloadLayer(
                name=name,
                kind=type(module).__name__,
                parameters=sum(value.numel() for value in own),
                weight_bytes=sum(value.numel() * value.element_size() for value in own),
                gradient_bytes=sum(value.numel() * value.element_size() for value in trained),
                ready=order,
                input_shape=tally.input_shape,
                output_shape=tally.output_shape,
                forward_multiply_adds=tally.forward // fewer,
                backward_multiply_adds=tally.backward // fewer,
                activation_bytes=max(0, other.output_bytes - tally.output_bytes) // (more - fewer),
                saved_bytes=saved,
                saved_bytes_fixed=max(0, tally.saved_bytes - fewer * saved),
            )
        )
    first = {name: index for index, name in enumerate(two.order)}
    return tuple(sorted(out, key=lambda layer: first.get(layer.name, len(first))))


@dataclass
class _LayerTally:
    """Measurements of one module. `called`: it computed something outside its children, or has no children."""

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
    """Attributes operations and memory to the module that is running."""

    # Nodes of autograd belong to the module that was running when they were made. Whenever a module begins or ends, the
    # nodes behind its tensors that have no owner yet are claimed.

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
                # Tied weights belong to the first module that has them.
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    self.owned[name].append(value)

    def ignore(self, *tensors: Tensor) -> None:
        """Leaves out tensors whose memory is kept anyway."""
        self._storages.update(_storage_id(tensor) for tensor in tensors)

    def enter(self, name: str, tensors: list[Tensor]) -> None:
        # Activation checkpointing calls modules in the backward pass, where the operations belong.
        if self._in_backward:
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
        # A module that is called several times shows its first call.
        if tally.output_shape is None:
            tally.output_shape = _sample_shape(tensors)
        # Views share a storage, which counts once.
        sizes = {_storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        tally.output_bytes += sum(sizes.values())
        self._stack.pop()

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that autograd saves for the backward pass, once for each storage."""
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
            # Each node tells whose turn it is in the backward pass.
            hooks.append(node.register_prehook(lambda grads, name=name: self._start_node(name)))
        loss.backward()
        self._attribute_operations()
        for hook in hooks:
            hook.remove()

    def order_gradients(self) -> Iterator[int | None]:
        """Yields for each module how many other modules have complete gradients before it; None: it trains nothing.

        A gradient that never comes is last, as the ranks then exchange zeros for it.
        """
        at = {id(value): index for index, value in enumerate(self.ready)}
        # A module is complete with its last gradient.
        last = {
            name: max(at.get(id(value), len(at)) for value in own if value.requires_grad)
            for name, own in self.owned.items()
            if any(value.requires_grad for value in own)
        }
        order = {name: index for index, name in enumerate(sorted(last, key=last.__getitem__))}
        return (order.get(name) for name in self.named)

    def _start_node(self, name: str) -> None:
        self._attribute_operations()
        self._at = name

    def _attribute_operations(self) -> None:
        """Attributes the operations since the last call to the module that was running."""
        done, self._counted = self.counter.total - self._counted, self.counter.total
        if not done:
            return
        if self._in_backward:
            self.tallies[self._at].backward += done
        elif self._stack:
            self.tallies[self._stack[-1]].forward += done
            self.tallies[self._stack[-1]].called = True

    def _claim_nodes(self, name: str, tensors: list[Tensor]) -> None:
        """Claims the autograd nodes behind these tensors that have no owner yet."""
        # The dictionary holds the nodes: torch makes a new Python object of a node that nobody holds.
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
        # Parameters and inputs are in memory with or without a backward pass.
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
                # The order in which gradients become complete.
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
    """Identifies the storage of a tensor; works on `meta`, too, where no memory has an address."""
    return int(tensor.untyped_storage()._cdata)
