"""Hooks on networks and optimizers that mark the begin and end of forward and of the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import is_grad_enabled, nn
from torch.compiler import is_compiling

from headway.observe.step_marks import StepMarks


@final
class Hooks:
    """Registers hooks on networks and optimizers that mark the stages; `remove` removes them.

    Only passes that keep a graph for backward count as forward: an evaluation inside of the loop is other code.

    Args:
        models: outermost networks, as the loop calls them.
        optimizers: optimizers of the loop.
        marks: gets the begin and end of each stage.

    Attributes:
        autocast: lower precision was on in the first forward pass; None: there was none.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], marks: StepMarks
    ) -> None:
        self.autocast: bool | None = None
        # Each function removes one hook.
        self._removers: list[Callable[[], object]] = []
        pre_hook = _Hook(self._read_autocast, marks.begin_forward)
        post_hook = _Hook(lambda: None, marks.end_forward)

        def mark_begin(*_: object) -> None:
            if not is_compiling():
                marks.begin_step()

        def mark_end(*_: object) -> None:
            if not is_compiling():
                marks.end_step()

        for model in models:
            compiled = vars(model).get("_compiled_call_impl")
            if compiled is not None:
                # model.compile() traces hooks too, and they do nothing then: the compiled call is wrapped instead.
                vars(model)["_compiled_call_impl"] = _wrap_call(compiled, pre_hook, post_hook)
                self._removers.append(partial(vars(model).__setitem__, "_compiled_call_impl", compiled))
                continue
            # First of all hooks, so that the time of the user's own hooks counts as forward.
            self._removers.append(model.register_forward_pre_hook(pre_hook, prepend=True).remove)
            self._removers.append(model.register_forward_hook(post_hook).remove)
        for optimizer in optimizers:
            # Hooks of each optimizer, not global ones: other optimizers of the process are not part of this loop.
            self._removers.append(optimizer.register_step_pre_hook(mark_begin).remove)
            self._removers.append(optimizer.register_step_post_hook(mark_end).remove)

    def remove(self) -> None:
        """Removes all hooks."""
        while self._removers:
            self._removers.pop()()

    def _read_autocast(self) -> None:
        """Sets `autocast` at the first forward pass."""
        self.autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@final
class _Hook:
    """A hook that does nothing in copies of its network.

    copy.deepcopy (averaged weights) and torch.save of a whole network would otherwise copy the watch too.

    Args:
        first: called at the first forward pass only, before `mark`.
        mark: called at every forward pass that keeps a graph for backward.
    """

    def __init__(self, first: Callable[[], None], mark: Callable[[], None]) -> None:
        self._first: Callable[[], None] | None = first
        self._mark = mark

    def __call__(self, *_: object) -> None:
        # A function that is compiled as a whole must not read a clock.
        if not is_compiling() and is_grad_enabled():
            if self._first is not None:
                self._first()
                self._first = None
            self._mark()

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _build_empty_hook, ()


def _build_empty_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: object) -> None:
    """Replaces the hook in a copy."""


def _wrap_call(compiled: Callable[..., Any], pre_hook: _Hook, post_hook: _Hook) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        pre_hook()
        try:
            return compiled(*args, **kwargs)
        finally:
            # Also after an exception, or the stage would stay open.
            post_hook()

    return call
