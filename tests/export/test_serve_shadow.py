"""The shadow: what it keeps while it waits, and what it says when it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headway.export.serve import shadow as shadow_module
from headway.export.serve.inputs import Payload
from headway.export.serve.jobs import Answer
from headway.export.serve.served_model import BatchRecord, ServedModel
from headway.export.serve.shadow import Shadow
from headway.http.problems import ProblemError

WAIT_S = 60.0
SIDE = 4


class Model:
    """In place of a `ServedModel`: every output is 1. Each call waits for `go`."""

    def __init__(self, names: tuple[str, ...] = ("cat", "dog"), task: str = "class", **manifest: Any) -> None:
        usual = {"size": (SIDE, SIDE), "channels": 3, "crop_share": 1.0, "scaled": False, "decoder": "native"}
        tree = {**usual, "orientation": "ignored", "names": names, "task": task, "threshold": None, **manifest}
        self.exported = SimpleNamespace(manifest=SimpleNamespace(**tree))
        self.calls = list[list[Payload]]()
        self.go = threading.Semaphore(0)
        self.problem: Exception | None = None

    def answer(self, payloads: Sequence[Payload]) -> tuple[list[Answer | ProblemError], BatchRecord]:
        self.calls.append(list(payloads))
        assert self.go.acquire(timeout=WAIT_S)
        if isinstance(self.problem, ProblemError):
            return [self.problem] * len(payloads), BatchRecord()
        if self.problem is not None:
            raise self.problem
        images = sum(map(len, payloads))
        return [Answer([], ())] * len(payloads), BatchRecord(images=images, outputs=np.ones((images, 2), np.float32))

    def close(self) -> None: ...


@contextmanager
def shadowing(first: Model, second: Model) -> Iterator[tuple[Any, list[tuple[str, int]]]]:
    """A function that offers a batch of one file, and what is reported."""
    reports = list[tuple[str, int]]()
    shadow = Shadow(cast(ServedModel, second), lambda result, images, _: reports.append((result, images)))

    def offer(size: int = 1) -> None:
        payload = Payload(("a.jpg",), (bytes(size),), ((9, 9),))
        pixels, outputs = np.zeros((1, SIDE, SIDE, 3), np.uint8), np.ones((1, 2), np.float32)
        shadow.offer(cast(ServedModel, first), BatchRecord(images=1, good=[payload], pixels=pixels, outputs=outputs))

    try:
        yield offer, reports
    finally:
        second.go.release(99)
        shadow.close()


def test_files_are_kept_only_if_they_are_decoded_again() -> None:
    for second, is_kept in ((Model(), False), (Model(size=(8, 8)), True)):
        with shadowing(Model(), second) as (offer, reports):
            offer()
        ((payload,),) = second.calls
        assert bool(payload.files) is is_kept
        assert (payload.pixels is None) is is_kept
        assert reports == [("same", 1)]


def test_waiting_files_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_module, "WAITING_BYTES", 100)
    with shadowing(Model(), Model(size=(8, 8))) as (offer, reports):
        offer(60)
        offer(60)
        offer(40)
        assert reports == [("dropped", 1)]
    assert reports[1:] == [("same", 1)] * 2


@pytest.mark.parametrize(
    ("first", "problem", "reason"),
    [
        (Model(), ProblemError(422, "the pixels are n,8,8,3"), "the pixels are n,8,8,3"),
        (Model(), RuntimeError("{no} memory"), "RuntimeError: {no} memory"),
        (Model(("dog", "cat")), None, "its classes, or the names of its outputs, are others"),
        (Model(task="multi"), None, "its task is class, and that of the first export multi"),
    ],
)
def test_failures_are_logged_once_with_their_reason(
    first: Model,
    problem: Exception | None,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However slow the machine is, that time does not pass.
    monkeypatch.setattr(shadow_module, "LOG_EVERY_S", 1e9)
    second = Model()
    second.problem = problem
    with caplog.at_level(logging.WARNING, "headway.export"), shadowing(first, second) as (offer, reports):
        for _ in range(3):
            offer()
    assert reports == [("failed", 1)] * 3
    (record,) = caplog.records
    expected = f"The shadow export failed on 1 image ({reason}). Leave --shadow out, or export its run again."
    assert record.getMessage() == expected
