"""Clocks of single layers: the time of each module in the forward and in the backward pass of one step.

A module's time is its own: that of the modules inside it is theirs. On a CPU the clocks are the host's; on a GPU they
are CUDA events, whose times are the device's.

Forward, hooks mark the begin and the end of each module. Backward, each node of the autograd graph is timed, and counts
for the module that made it. Backward hooks of modules would not do: they refuse networks that change an output in
place, such as an in-place ReLU after a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

COLUMNS = ("forward_s", "backward_s", "weights")
"""Seconds of a step, all its micro-batches together, and the number of the module's own weights, without biases."""
STEP_COLUMNS = ("step_s",)
NETWORK = "(network)"
"""Name of the network itself: what it computes outside of its modules."""

# A time of the host in seconds, or a CUDA event.
Mark = Any


@final
@dataclass
class _Call:
    """A module that runs. Attributes: inputs: nodes that made its inputs. inner: spans of the modules inside it."""

    place: int
    began: Mark
    inputs: set[Any]
    inner: list[tuple[Mark, Mark]] = field(default_factory=list)


@final
class LayerTimes:
    """Times the modules of a network in single steps.

    `arm` registers hooks for the next step, and `disarm` removes them: all other steps cost nothing. Nothing waits for
    the device before `read`.

    Args:
        model: the network, whose modules run as Python calls them (not compiled).
        optimizer: its `step` is timed too.
        device: device of the network.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._modules = dict(model.named_modules())
        self._optimizer = optimizer
        self._mark: Callable[[], Mark] = _record_event if device.type == "cuda" else perf_counter
        self._handles: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self._calls: list[_Call] = []
        # Place of a module in the order of the first calls.
        self._places: dict[str, int] = {}
        self._nodes: dict[Any, int] = {}
        self._began: dict[Any, Mark] = {}
        # (place, begin, end, spans inside it)
        self._forward: list[tuple[int, Mark, Mark, list[tuple[Mark, Mark]]]] = []
        self._backward: list[tuple[int, Mark, Mark]] = []
        self._step: list[Mark] = []

    def arm(self) -> None:
        """Registers the hooks for one step."""
        self.disarm()
        self._clear()
        for name, module in self._modules.items():
            self._handles += [
                module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                module.register_forward_hook(self._leave),
            ]
        for register in (self._optimizer.register_step_pre_hook, self._optimizer.register_step_post_hook):
            self._handles.append(register(lambda *_: self._step.append(self._mark())))

    def disarm(self) -> None:
        """Removes the hooks; what they have measured stays until it is read."""
        for handle in self._handles:
            handle.remove()
        # The graph of the step must not live on.
        self._handles, self._nodes, self._began = [], {}, {}

    def read(self) -> tuple[tuple[str, ...], NDArray[np.float32], float] | None:
        """Returns what the newest step has taken, and forgets it; None if there is nothing new.

        On a GPU this waits for the step.

        Returns:
            names of the modules in the order of their first calls; [n, 3] as `COLUMNS` says; and seconds of
            `optimizer.step`, NaN if it made none.
        """
        if not self._forward:
            return None
        names = tuple(self._places)
        times = np.zeros((len(names), 3), np.float64)
        for place, began, ended, inner in self._forward:
            times[place, 0] += _measure(began, ended) - sum(_measure(*span) for span in inner)
        for place, began, ended in self._backward:
            times[place, 1] += _measure(began, ended)
        for place, name in enumerate(names):
            times[place, 2] = _count_weights(self._modules[name])
        step_s = _measure(*self._step[-2:]) if len(self._step) > 1 else float("nan")
        self._clear()
        return tuple(name or NETWORK for name in names), times.astype(np.float32), step_s

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        place = self._places.setdefault(name, len(self._places))
        # Before the module runs: one that works in place gives its inputs another node.
        inputs = {one.grad_fn for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        self._calls.append(_Call(place, self._mark(), inputs))

    def _leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        ended, call = self._mark(), self._calls.pop()
        self._forward.append((call.place, call.began, ended, call.inner))
        self._label_nodes(outputs, call)
        if self._calls:
            # With the time that the labels took.
            self._calls[-1].inner.append((call.began, self._mark()))

    def _label_nodes(self, outputs: Any, call: _Call) -> None:
        """Makes the new nodes of the graph between inputs and outputs count for a module; inner modules came first."""
        waiting, seen = [one.grad_fn for one in tree_leaves(outputs) if isinstance(one, Tensor)], set(call.inputs)
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            # Behind the nodes of an inner module there may be others of this one.
            waiting += [before for before, _ in node.next_functions]
            if node not in self._nodes:
                self._nodes[node] = call.place
                self._handles += [
                    node.register_prehook(partial(self._begin_node, node)),
                    node.register_hook(partial(self._end_node, node)),
                ]

    def _begin_node(self, node: Any, gradients: Any) -> None:
        self._began[node] = self._mark()

    def _end_node(self, node: Any, *gradients: Any) -> None:
        # Another step's: nodes of parameters live on.
        if node in self._nodes and (began := self._began.pop(node, None)) is not None:
            self._backward.append((self._nodes[node], began, self._mark()))


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _measure(began: Mark, ended: Mark) -> float:
    """Returns the seconds between two marks."""
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def _count_weights(module: nn.Module) -> int:
    """Returns the number of a module's own weights, without biases and scales of norms."""
    return sum(one.numel() for one in module.parameters(recurse=False) if one.dim() > 1)
