"""Loops whose time is moved by hand: what takes time says how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway.doctor.loop_observation import LoopObservation
from headway.observe import step_marks
from headway.watch.loop_watch import LoopWatch

MS = 1_000_000


class Hands:
    """A clock that is moved by hand: what takes time says how much."""

    def __init__(self) -> None:
        self.now = 10**9

    def __call__(self) -> int:
        return self.now

    def take(self, ms: float) -> None:
        self.now += round(ms * MS)


def by_hand(monkeypatch: pytest.MonkeyPatch) -> Hands:
    """The clock of every watch, from now on."""
    found = Hands()
    monkeypatch.setattr(step_marks, "perf_counter_ns", found)
    return found


class Slow(torch.autograd.Function):
    """The identity, whose backward takes 5 ms."""

    hands: Hands

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Slow.hands.take(5)
        return grads[0]


class Net(nn.Module):
    """Forward takes 3 ms, backward 5 ms."""

    def __init__(self, hands: Hands | None = None) -> None:
        super().__init__()
        self.linear, self.hands = nn.Linear(4, 2), hands

    def forward(self, x: Tensor) -> Tensor:
        if self.hands is None:
            out: Tensor = self.linear(x)
            return out
        self.hands.take(3)
        Slow.hands = self.hands
        found: Tensor = Slow.apply(self.linear(x))
        return found


class Stepping(torch.optim.SGD):
    """A step takes 1 ms."""

    hands: Hands

    def step(self, closure: Any = None) -> Any:
        self.hands.take(1)
        return super().step(closure)


class Batches:
    """Batches that take so many ms each; the first of an epoch, and its end, take longer."""

    def __init__(self, hands: Hands, number: int, ms: float, first: float = 0.0, end: float = 0.0) -> None:
        self.hands, self.number, self.ms, self.first, self.end = hands, number, ms, first, end
        self.what = "batches"

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.hands.take(self.first)
        for k in range(self.number):
            self.hands.take(self.ms)
            yield torch.full((8, 4), float(k)), torch.zeros(8, dtype=torch.long)
        self.hands.take(self.end)


def parts(hands: Hands, number: int = 40, ms: float = 10, **more: float) -> tuple[Batches, Net, Stepping]:
    model = Net(hands)
    optimizer = Stepping(model.parameters(), lr=0.1)
    optimizer.hands = hands
    return Batches(hands, number, ms, **more), model, optimizer


def epoch(seen: LoopWatch[Any], model: nn.Module, optimizer: torch.optim.Optimizer, hands: Hands) -> None:
    """The loss takes 0.5 ms, and the loop itself 2 ms."""
    for images, labels in seen.loader:
        optimizer.zero_grad()
        out = model(images)
        hands.take(0.5)
        loss = nn.functional.cross_entropy(out, labels)
        loss.backward()
        hands.take(0.75)
        optimizer.step()
        hands.take(1.25)


def stages(found: LoopObservation) -> dict[str, float]:
    """ms of a step."""
    return {one.stage: pytest.approx(1e3 * one.seconds) for one in found.stages}


STAGES = {"wait": 10, "forward": 3, "loss": 0.5, "backward": 5, "optimizer": 1, "other": 2}
