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
from headway.core.workload import WorkloadLayer, WorkloadWindow
from headway.model.flops import MultiplyAddCounter

PROFILE_BATCH_SIZES = (2, 3)
"""Batch sizes of the two passes. Their difference gives the memory of one sample; batch norm needs two samples."""

Context = Callable[[], AbstractContextManager[Any]]


def profile_layers(model: nn.Module, images: Tensor, autocast: Context) -> tuple[WorkloadLayer, ...]:
    """Profiles the layers of a network, in the order of their first call; layers that are never called come last.

    The network does two forward passes and one backward pass in its present mode. Afterwards parameters, buffers and
    random state are as before. Fake tensors are enough (`use_fake_tensors`).

    Args:
        images: float [3, C, H, W] or more.
        autocast: returns the context of a forward pass.

    Returns:
        A layer for each module that has parameters of its own or computes something itself. Numbers are per sample.
    """
    small_batch, large_batch = PROFILE_BATCH_SIZES
    with preserve_training_state(model):
        small_pass = _profile_passes(model, images[:small_batch], autocast, backward=True)
        large_pass = _profile_passes(model, images[:large_batch], autocast, backward=False)
    layers = []
    for (name, module), gradient_rank in zip(small_pass.modules.items(), small_pass.rank_gradients(), strict=True):
        small_tally, large_tally = small_pass.tallies[name], large_pass.tallies[name]
        owned_parameters = small_pass.owned_parameters[name]
        if not (owned_parameters or small_tally.called):
            continue
        # Two batch sizes tell the memory of one sample from the memory that any batch needs.
        saved_per_sample = max(0, large_tally.saved_bytes - small_tally.saved_bytes) // (large_batch - small_batch)
        trainable = [parameter for parameter in owned_parameters if parameter.requires_grad]
        layers.append(
            WorkloadLayer(
                name=name,
                kind=type(module).__name__,
                parameters=sum(parameter.numel() for parameter in owned_parameters),
                weight_bytes=sum(parameter.numel() * parameter.element_size() for parameter in owned_parameters),
                gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trainable),
                ready=gradient_rank,
                input_shape=small_tally.input_shape,
                output_shape=small_tally.output_shape,
                forward_multiply_adds=small_tally.forward // small_batch,
                backward_multiply_adds=small_tally.backward // small_batch,
                activation_bytes=max(0, large_tally.output_bytes - small_tally.output_bytes)
                // (large_batch - small_batch),
                saved_bytes=saved_per_sample,
                windows=tuple(small_tally.windows),
                saved_bytes_fixed=max(0, small_tally.saved_bytes - small_batch * saved_per_sample),
            )
        )
    call_index = {name: index for index, name in enumerate(small_pass.call_order)}
    return tuple(sorted(layers, key=lambda layer: call_index.get(layer.name, len(call_index))))


@dataclass
class _LayerTally:
    """Measurements of one module in one pass, summed over the batch.

    Attributes:
        called: it computed something outside its children, or was called and has none.
        forward: multiply-adds of the forward pass.
        backward: multiply-adds of the backward pass.
        output_bytes: size of its outputs.
        saved_bytes: size of what autograd saves in it for the backward pass.
        windows: its convolutions and poolings of the forward pass.
        input_shape: shape of its first input without the batch dimension.
        output_shape: shape of its first output without the batch dimension.
    """

    called: bool = False
    forward: int = 0
    backward: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    windows: list[WorkloadWindow] = field(default_factory=list)
    input_shape: tuple[int, ...] | None = None
    output_shape: tuple[int, ...] | None = None


@final
@dataclass
class _LayerProfiler:
    """Attributes operations and memory to the module that is running.

    Nodes of autograd belong to the module that was running when they were made. Whenever a module begins or ends, it
    claims the nodes behind its tensors that have no owner yet.

    Attributes:
        modules: the modules by name.
        counter: counts the multiply-adds.
        tallies: measurements by name of the module.
        owned_parameters: parameters by the name of the module that has them.
        call_order: names in the order of their first call.
        completed_parameters: parameters in the order in which their gradients became complete.
    """

    modules: dict[str, nn.Module]
    counter: MultiplyAddCounter
    tallies: dict[str, _LayerTally] = field(default_factory=dict)
    owned_parameters: dict[str, list[nn.Parameter]] = field(default_factory=dict)
    call_order: list[str] = field(default_factory=list)
    completed_parameters: list[nn.Parameter] = field(default_factory=list)
    _stack: list[str] = field(default_factory=list)
    _nodes: dict[Any, str] = field(default_factory=dict)
    _storages: set[int] = field(default_factory=set)
    _counted: int = 0
    _in_backward: bool = False
    _backward_module: str = ""

    def __post_init__(self) -> None:
        assigned_ids: set[int] = set()
        for name, module in self.modules.items():
            self.tallies[name] = _LayerTally()
            self.owned_parameters[name] = []
            for parameter in module._parameters.values():
                # Tied weights belong to the first module that has them.
                if parameter is not None and id(parameter) not in assigned_ids:
                    assigned_ids.add(id(parameter))
                    self.owned_parameters[name].append(parameter)

    def ignore(self, *tensors: Tensor) -> None:
        """Excludes tensors that are in memory anyway from the saved bytes."""
        self._storages.update(_get_storage_id(tensor) for tensor in tensors)

    def enter(self, name: str, tensors: list[Tensor]) -> None:
        """Records the begin of a module's forward pass, with its inputs."""
        # Activation checkpointing calls modules in the backward pass, where the operations belong.
        if self._in_backward:
            return
        self._attribute_operations()
        if self._stack:
            self._claim_nodes(self._stack[-1], tensors)
        if name not in self.call_order:
            self.call_order.append(name)
            self.tallies[name].input_shape = _get_sample_shape(tensors)
        if not self.modules[name]._modules:
            self.tallies[name].called = True
        self._stack.append(name)

    def leave(self, name: str, tensors: list[Tensor]) -> None:
        """Records the end of a module's forward pass, with its outputs."""
        if self._in_backward:
            return
        self._attribute_operations()
        self._claim_nodes(name, tensors)
        tally = self.tallies[name]
        # A module that is called several times shows its first call.
        if tally.output_shape is None:
            tally.output_shape = _get_sample_shape(tensors)
        # Views share a storage, which counts once.
        sizes = {_get_storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        tally.output_bytes += sum(sizes.values())
        self._stack.pop()

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that autograd saves for the backward pass, once for each storage, and returns it."""
        if (identity := _get_storage_id(tensor)) not in self._storages and self._stack:
            self._storages.add(identity)
            tally = self.tallies[self._stack[-1]]
            tally.saved_bytes += tensor.untyped_storage().nbytes()
            tally.called = True
        return tensor

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass, and attributes its operations to the owners of the nodes."""
        self._attribute_operations()
        self._in_backward = True
        hooks = []
        for node, name in self._nodes.items():
            # The hook of a node says which module the next operations of the backward pass belong to.
            hooks.append(node.register_prehook(lambda grads, name=name: self._start_node(name)))
        loss.backward()
        self._attribute_operations()
        for hook in hooks:
            hook.remove()

    def rank_gradients(self) -> Iterator[int | None]:
        """Returns for each module the number of modules whose gradients are complete before its own; None: it has none.

        A gradient that never comes is last, as the ranks then exchange zeros for it.
        """
        completion_index = {id(parameter): index for index, parameter in enumerate(self.completed_parameters)}
        # A module is complete with its last gradient.
        last_completion = {
            name: max(
                completion_index.get(id(parameter), len(completion_index))
                for parameter in parameters
                if parameter.requires_grad
            )
            for name, parameters in self.owned_parameters.items()
            if any(parameter.requires_grad for parameter in parameters)
        }
        ranks = {name: rank for rank, name in enumerate(sorted(last_completion, key=last_completion.__getitem__))}
        return (ranks.get(name) for name in self.modules)

    def _start_node(self, name: str) -> None:
        self._attribute_operations()
        self._backward_module = name

    def _attribute_operations(self) -> None:
        """Attributes the operations since the last call to the module that was running."""
        if self._stack and not self._in_backward:
            self.tallies[self._stack[-1]].windows += self.counter.windows
        self.counter.windows.clear()
        new_operations = self.counter.total - self._counted
        self._counted = self.counter.total
        if not new_operations:
            return
        if self._in_backward:
            self.tallies[self._backward_module].backward += new_operations
        elif self._stack:
            self.tallies[self._stack[-1]].forward += new_operations
            self.tallies[self._stack[-1]].called = True

    def _claim_nodes(self, name: str, tensors: list[Tensor]) -> None:
        """Claims the autograd nodes behind these tensors that have no owner yet."""
        # The dictionary keeps the nodes alive: torch makes a new Python object of a node that nobody references.
        unvisited = [tensor.grad_fn for tensor in tensors]
        while unvisited:
            node = unvisited.pop()
            if node is not None and node not in self._nodes:
                self._nodes[node] = name
                unvisited += [parent for parent, _ in node.next_functions]
                self.tallies[name].called = True


def _profile_passes(model: nn.Module, images: Tensor, autocast: Context, *, backward: bool) -> _LayerProfiler:
    """Runs a forward pass, and a backward pass if `backward` is set, with hooks on every module."""
    # The stack removes the hooks even if the network fails.
    with ExitStack() as stack:
        profiler = _LayerProfiler(dict(model.named_modules()), MultiplyAddCounter())
        # Parameters and inputs are in memory with or without a backward pass.
        profiler.ignore(images, *model.parameters(), *model.buffers())
        for name, module in profiler.modules.items():
            pre_hook = module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: profiler.enter(name, _list_tensors((args, kwargs))), with_kwargs=True
            )
            post_hook = module.register_forward_hook(
                lambda _, args, output, name=name: profiler.leave(name, _list_tensors(output))
            )
            stack.callback(pre_hook.remove)
            stack.callback(post_hook.remove)
        for parameter in model.parameters():
            if parameter.requires_grad:
                # Records the order in which gradients become complete.
                stack.callback(
                    parameter.register_post_accumulate_grad_hook(profiler.completed_parameters.append).remove
                )
        with profiler.counter:
            with torch.autograd.graph.saved_tensors_hooks(profiler.pack, lambda tensor: tensor), autocast():
                outputs = model(images)
            if backward:
                profiler.backward(outputs.float().sum())
    return profiler


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _get_sample_shape(tensors: list[Tensor]) -> tuple[int, ...] | None:
    return tuple(tensors[0].shape[1:]) if tensors else None


def _get_storage_id(tensor: Tensor) -> int:
    """Returns an id of a tensor's storage. It works on `meta` too, where `data_ptr` is always 0."""
    return int(tensor.untyped_storage()._cdata)
