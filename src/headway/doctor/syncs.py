"""Counts where a step waits for the device: whatever asks for a tensor's value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.train.trainer import Trainer

ASKING = ("item", "__bool__", "__int__", "__float__", "__index__", "tolist", "numpy", "cpu", "nonzero")
"""Methods of a tensor that need its values on the host. Iterating over a tensor of values asks by `item`."""


@final
@dataclass
class Syncs:
    """Of one step, in the mean: how often values were asked for, and how long that took; by stage of the Clock."""

    of: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def count(self) -> float:
        return sum(self.of.values())


@final
class _Counting(TorchDispatchMode):
    """Counts reads of values; where a stage of the Clock ends, they are that stage's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pending = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default or func is torch.ops.aten.nonzero.default:
            self.pending += 1
        return func(*args, **(kwargs or {}))


@final
class _Lapped:
    """A Clock whose marks tell what was counted since the one before."""

    def __init__(self, clock: Any, mode: _Counting, found: Syncs, spent: list[int]) -> None:
        self._clock, self._mode, self._found, self._spent = clock, mode, found, spent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)

    def lap(self, stage: str) -> None:
        self._clock.lap(stage)
        found = self._found
        if self._mode.pending:
            found.of[stage] = found.of.get(stage, 0) + self._mode.pending
            self._mode.pending = 0
        if self._spent[0]:
            found.seconds[stage] = found.seconds.get(stage, 0.0) + self._spent[0] / 1e9
            self._spent[0] = 0


def counted(trainer: Trainer, steps: int = 3) -> Syncs:
    """Lets a Trainer do some steps, twice, and counts. What is read for a record, which waits by design, is not
    counted."""
    found, mode, spent, clock = Syncs(), _Counting(), [0], trainer.clock
    trainer.clock = _Lapped(clock, mode, found, spent)  # type: ignore[assignment]
    try:
        with mode:
            trainer.run(steps)
        found.seconds.clear()
        with _timing(spent):
            trainer.run(steps)
    finally:
        trainer.clock = clock
    return Syncs(
        {stage: count / steps for stage, count in found.of.items() if stage != "log"},
        {stage: seconds / steps for stage, seconds in found.seconds.items() if stage != "log"},
    )


@contextmanager
def _timing(spent: list[int]) -> Iterator[None]:
    """Within it the nanoseconds of ASKING are added up."""
    own = {name: vars(torch.Tensor)[name] for name in ASKING if name in vars(torch.Tensor)}
    base = {name: getattr(torch.Tensor, name) for name in ASKING}

    def timing(method: Any) -> Any:
        def asked(*args: Any, **kwargs: Any) -> Any:
            begun = perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                spent[0] += perf_counter_ns() - begun

        return asked

    for name, method in base.items():
        setattr(torch.Tensor, name, timing(method))
    try:
        yield
    finally:
        for name in base:
            if name in own:
                setattr(torch.Tensor, name, own[name])
            else:
                delattr(torch.Tensor, name)
