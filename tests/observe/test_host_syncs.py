"""Reads of values in a run's steps: counted once, where nothing else is done, and taken out again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.observe.host_syncs import COUNTED_STEPS, MAX_LISTENED_STEPS, SKIPPED_STEPS, HostSyncCounter

X = torch.ones(3)


def listens() -> bool:
    return "item" in vars(torch.Tensor)


def ran(
    step: Callable[[], object], steps: int = SKIPPED_STEPS + COUNTED_STEPS, chores: Callable[[int], bool] | None = None
) -> Any:
    """What is known after so many steps. chores: of which steps are followed by something else."""
    reads, left = HostSyncCounter(), list[str]()
    for number in range(steps):
        left[:] = ["log"] if chores is not None and chores(number) else []
        reads.run_step(step, left)
        assert not listens()
    return reads.to_json()


def test_reads_are_counted_with_their_places() -> None:
    def step() -> None:
        X[0].item()
        for value in X:
            if value > 0:
                pass

    found = ran(step, steps=100)
    assert (found["steps"], found["a_step"], found["waits_a_step"]) == (COUNTED_STEPS, 4, 0)
    here, line = Path(__file__).name, step.__code__.co_firstlineno
    assert found["places"] == [
        {"method": "__bool__", "place": f"{here}:{line + 3}", "waits": False, "a_step": 3},
        {"method": "item", "place": f"{here}:{line + 1}", "waits": False, "a_step": 1},
    ]
    assert ran(lambda: None) == {"steps": COUNTED_STEPS, "a_step": 0, "waits_a_step": 0, "places": []}


def test_only_three_steps_are_listened_to() -> None:
    heard = list[bool]()
    ran(lambda: heard.append(listens()), steps=100)
    assert [number for number, on in enumerate(heard) if on] == [*range(SKIPPED_STEPS, SKIPPED_STEPS + COUNTED_STEPS)]


def test_steps_that_do_something_else_do_not_count() -> None:
    heard = list[int]()

    def step() -> None:
        heard.append(listens())
        if len(heard) % 2:
            X.sum().item()

    assert ran(step, 60, lambda number: number % 2 == 0)["a_step"] == 0
    assert sum(heard) == 2 * COUNTED_STEPS
    heard.clear()
    assert ran(step, 60, lambda number: True) is None, "there is nothing else than such steps"
    assert sum(heard) == MAX_LISTENED_STEPS


def test_a_run_that_is_too_short_is_not_counted() -> None:
    assert ran(lambda: X.sum().item(), SKIPPED_STEPS + COUNTED_STEPS - 1) is None
    assert ran(lambda: X.sum().item(), SKIPPED_STEPS + COUNTED_STEPS) is not None


def test_a_step_that_fails_is_listened_to_no_more() -> None:
    reads = HostSyncCounter()
    for _ in range(SKIPPED_STEPS):
        reads.run_step(lambda: None, ())
    with pytest.raises(ZeroDivisionError):
        reads.run_step(lambda: X[0].item() / 0, ())
    assert not listens()
    for _ in range(COUNTED_STEPS):
        reads.run_step(lambda: None, ())
    assert reads.to_json() == {"steps": COUNTED_STEPS, "a_step": 0, "waits_a_step": 0, "places": []}


def test_what_other_threads_read_is_not_of_the_step() -> None:
    def step() -> None:
        other = threading.Thread(target=X.sum().item)
        other.start()
        other.join()

    assert ran(step)["a_step"] == 0


@pytest.mark.check
def test_a_compiled_network_is_not_compiled_anew() -> None:
    """Also one that reads a value, at which its graph breaks, which is not counted; what is read outside of it is."""
    compiled = list[Any]()

    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            if y.sum().item() > 0:
                return y + 1
            return y - 1

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for model in (nn.Linear(3, 2), Branching()):
        compiled.clear()
        called = torch.compile(model, backend=backend)
        counts = list[int]()

        def step(called: Any = called, counts: list[int] = counts) -> None:
            called(X).sum().item()
            counts.append(len(compiled))

        found = ran(step, SKIPPED_STEPS + COUNTED_STEPS + 3)
        assert counts[SKIPPED_STEPS - 1] == counts[-1] > 0
        assert found["a_step"] == 1
    torch._dynamo.reset()


@pytest.mark.gpu
def test_reads_of_a_device_wait_for_it() -> None:
    there = torch.ones(3, device="cuda")

    def step() -> None:
        there.sum().item()
        there.cpu()
        X.sum().item()

    found = ran(step)
    assert (found["a_step"], found["waits_a_step"]) == (3, 2)
    assert {(one["method"], one["waits"]) for one in found["places"]} == {
        ("item", True), ("cpu", True), ("item", False),
    }  # fmt: skip
