"""Hooks on networks and optimizers that mark where forward and the optimizer's step begin and end."""

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
    """Hangs hooks on networks and optimizers; `remove` takes them off.

    Only passes that keep a graph for backward count as forward: an evaluation inside of the loop is its own code.

    Args:
        models: outermost networks, as the loop calls them.

    Attributes:
        autocast: lower precision was on in the first forward pass; None: there was none.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], marks: StepMarks
    ) -> None:
        self.autocast: bool | None = None
        self._remove: list[Callable[[], object]] = []
        before, after = _Hook(self._look, marks.begin_forward), _Hook(lambda: None, marks.end_forward)

        def began(*_: object) -> None:
            if not is_compiling():
                marks.begin_step()

        def ended(*_: object) -> None:
            if not is_compiling():
                marks.end_step()

        for model in models:
            compiled = vars(model).get("_compiled_call_impl")
            if compiled is not None:  # model.compile() traces hooks too, which see nothing then
                vars(model)["_compiled_call_impl"] = _timed(compiled, before, after)
                self._remove.append(partial(vars(model).__setitem__, "_compiled_call_impl", compiled))
                continue
            self._remove.append(model.register_forward_pre_hook(before, prepend=True).remove)
            self._remove.append(model.register_forward_hook(after).remove)
        for optimizer in optimizers:
            self._remove.append(optimizer.register_step_pre_hook(began).remove)
            self._remove.append(optimizer.register_step_post_hook(ended).remove)

    def remove(self) -> None:
        while self._remove:
            self._remove.pop()()

    def _look(self) -> None:
        """At what the first forward pass alone can tell."""
        self.autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@final
class _Hook:
    """A hook that a copy of the network does not take along: copy.deepcopy (as for averaged weights) and torch.save of
    a whole network would else copy the watch, with all that it holds."""

    def __init__(self, first: Callable[[], None], mark: Callable[[], None]) -> None:
        self._first: Callable[[], None] | None = first
        self._mark = mark

    def __call__(self, *_: object) -> None:
        # Inside of a function that is compiled whole nothing may look at a clock.
        if not is_compiling() and is_grad_enabled():
            if self._first is not None:
                self._first()
                self._first = None
            self._mark()

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*_: object) -> None:
    """The hook of a copy."""


def _timed(compiled: Callable[..., Any], before: _Hook, after: _Hook) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return compiled(*args, **kwargs)
        finally:
            after()

    return call
