"""The batcher: everything that waits, nothing that is late, each request once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.export.serve.batching import BRIEF_BYTES, BRIEF_PIXELS, BRIEF_S, Batcher
from headway.export.serve.inputs import Payload
from headway.export.serve.jobs import Answer, Job
from headway.export.serve.metrics import ServeMetrics
from headway.export.serve.served_model import BatchRecord, ServedModel
from headway.http.problems import ProblemError

WAIT_S = 60.0


class Model:
    """In place of a `ServedModel`: says its own name for each image. Each call waits for `go`."""

    def __init__(self, name: str = "first", *, is_open: bool = True) -> None:
        self.name, self.calls, self.is_closed = name, list[list[str]](), False
        # Too long to be computed without the thread.
        self.seconds = 1.0
        self.threads = set[str]()
        self.go, self.entered = threading.Semaphore(0), threading.Semaphore(0)
        self.is_open = is_open
        self.before_answer: Callable[[], None] = lambda: None

    def answer(self, payloads: Sequence[Payload]) -> tuple[list[Answer | ProblemError], BatchRecord]:
        names = [name for payload in payloads for name in payload.names]
        self.calls.append(names)
        self.threads.add(threading.current_thread().name)
        self.entered.release()
        if not self.is_open:
            assert self.go.acquire(timeout=WAIT_S)
        if "poison" in names:
            raise RuntimeError("poison")
        self.before_answer()
        rows = [Answer([{"path": name, "label": self.name} for name in payload.names], ()) for payload in payloads]
        return list(rows), BatchRecord(images=len(names))

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True

    def release(self, calls: int = 99) -> None:
        self.go.release(calls)

    async def wait_until_called(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=WAIT_S)


def build(
    model: Model, *, batch: int = 4, capacity: int = 100, pixels: int = 1000, metrics: ServeMetrics | None = None
) -> Batcher:
    served = cast(ServedModel, model)
    return Batcher(served, batch=batch, capacity=capacity, pixels=pixels, metrics=metrics or ServeMetrics())


def put(batcher: Batcher, *names: str, **options: Any) -> Job:
    job = Job(Payload(names), asyncio.get_running_loop().create_future(), **options)
    batcher.submit(job)
    return job


async def labels(job: Job) -> list[tuple[str, str]]:
    outcome = await asyncio.wait_for(job.future, WAIT_S)
    assert isinstance(outcome, Answer), outcome
    return [(row["path"], row["label"]) for row in outcome.rows]


async def problem(job: Job) -> ProblemError:
    outcome = await asyncio.wait_for(job.future, WAIT_S)
    assert isinstance(outcome, ProblemError), outcome
    return outcome


def test_what_waits_is_one_batch_and_nothing_waits_for_more() -> None:
    async def scenario() -> None:
        model, metrics = Model(is_open=False), ServeMetrics()
        batcher = build(model, metrics=metrics)
        jobs = [put(batcher, "0")]
        # Computed at once, alone: no timer waits for company.
        await model.wait_until_called()
        assert model.calls == [["0"]]
        jobs += [put(batcher, str(number)) for number in range(1, 10)]
        assert batcher.waiting == 9
        model.release()
        assert [await labels(job) for job in jobs] == [[(str(n), "first")] for n in range(10)]
        assert [len(call) for call in model.calls] == [1, 4, 4, 1]
        assert batcher.waiting == 0
        await batcher.close()
        assert model.is_closed
        assert "headway_serve_batch_images_count 4" in metrics.format_page().decode()

    asyncio.run(scenario())


def test_a_batch_ends_before_it_has_too_many_pixels() -> None:
    async def scenario() -> None:
        model = Model(is_open=False)
        batcher = build(model, batch=10, pixels=1000)
        jobs = [put(batcher, "0")]
        await model.wait_until_called()
        for name, side in (("1", 20), ("2", 20), ("3", 20), ("4", 40), ("5", 1)):
            jobs.append(Job(Payload((name,), (b"",), ((side, side),)), asyncio.get_running_loop().create_future()))
            batcher.submit(jobs[-1])
        model.release()
        for job in jobs:
            await labels(job)
        # One that has more than a batch on its own is computed alone.
        assert model.calls == [["0"], ["1", "2"], ["3"], ["4"], ["5"]]
        await batcher.close()

    asyncio.run(scenario())


@given(st.lists(st.integers(1, 7), min_size=1, max_size=20), st.integers(1, 6))
def test_each_image_is_answered_once_whatever_the_sizes(sizes: list[int], batch: int) -> None:
    async def scenario() -> None:
        model = Model(is_open=False)
        batcher = build(model, batch=batch, capacity=sum(sizes))
        wanted = [[f"{place}-{number}" for number in range(size)] for place, size in enumerate(sizes)]
        jobs = [put(batcher, *names) for names in wanted]
        model.release()
        assert [await labels(job) for job in jobs] == [[(name, "first") for name in names] for names in wanted]
        assert [name for call in model.calls for name in call] == [name for names in wanted for name in names]
        # Only a request that is larger than a batch goes beyond it, and alone.
        assert all(len(call) <= batch or len({name.split("-")[0] for name in call}) == 1 for call in model.calls)
        await batcher.close()

    asyncio.run(scenario())


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def scenario() -> None:
        model = Model(is_open=False)
        batcher = build(model, capacity=3)
        first = put(batcher, "0")
        await model.wait_until_called()
        second = put(batcher, "1", "2")
        with pytest.raises(ProblemError) as refused:
            put(batcher, "3", "4")
        assert refused.value.status == 503
        assert int(dict(refused.value.headers)[b"retry-after"]) >= 1
        # One image still fits, and after an answer there is room again.
        third = put(batcher, "3")
        model.release()
        for job in (first, second, third):
            await labels(job)
        await labels(put(batcher, "3", "4", "5"))
        await batcher.close()

    asyncio.run(scenario())


def test_what_is_late_is_never_computed() -> None:
    async def scenario() -> None:
        model = Model(is_open=False)
        # No request is refused because it will be late.
        model.seconds = BRIEF_S / 100
        batcher = build(model, batch=200, capacity=1000)
        first = put(batcher, *map(str, range(200)))
        await model.wait_until_called()
        late = put(batcher, "late", arrival_s=time.monotonic(), deadline_ms=300)
        early = put(batcher, "early", arrival_s=time.monotonic(), deadline_ms=WAIT_S * 1000)
        while not late.is_late():
            await asyncio.sleep(0)
        model.release()
        await labels(first)
        assert (await problem(late)).status == 504
        assert await labels(early) == [("early", "first")]
        assert model.calls[1:] == [["early"]]
        with pytest.raises(ProblemError) as refused:
            put(batcher, "later", arrival_s=time.monotonic() - 1, deadline_ms=300)
        assert refused.value.status == 504
        await batcher.close()

    asyncio.run(scenario())


def test_an_answer_that_comes_after_the_deadline_is_not_given() -> None:
    async def scenario() -> None:
        model = Model(is_open=False)
        batcher = build(model)
        job = put(batcher, "0", arrival_s=time.monotonic(), deadline_ms=300)

        def wait_for_deadline() -> None:
            # The event that the test is about: the clock passes the deadline while the network computes.
            while not job.is_late():
                pass

        model.before_answer = wait_for_deadline
        model.release()
        assert (await problem(job)).status == 504
        await batcher.close()

    asyncio.run(scenario())


def test_a_client_that_has_left_costs_nothing() -> None:
    async def scenario() -> None:
        model = Model(is_open=False)
        batcher = build(model)
        first = put(batcher, "0")
        await model.wait_until_called()
        put(batcher, "gone", is_lost=lambda: True)
        answered = put(batcher, "answered")
        # As the timer of a deadline does.
        answered.settle(answered.refuse_late())
        assert answered.payload is None
        last = put(batcher, "1")
        model.release()
        await labels(first)
        await labels(last)
        assert model.calls == [["0"], ["1"]]
        await batcher.close()

    asyncio.run(scenario())


def test_a_request_that_breaks_the_network_breaks_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        model = Model(is_open=False)
        batcher = build(model)
        first = put(batcher, "0")
        await model.wait_until_called()
        jobs = [put(batcher, "1"), put(batcher, "poison"), put(batcher, "2")]
        model.release()
        await labels(first)
        assert await labels(jobs[0]) == [("1", "first")]
        assert (await problem(jobs[1])).status == 500
        assert await labels(jobs[2]) == [("2", "first")]
        await batcher.close()

    asyncio.run(scenario())


def test_a_swap_comes_between_two_batches() -> None:
    async def scenario() -> None:
        old, new = Model("old", is_open=False), Model("new")
        batcher = build(old)
        before = [put(batcher, str(number)) for number in range(7)]
        await old.wait_until_called()
        swap = asyncio.create_task(batcher.swap(cast(ServedModel, new)))
        # Until the swap has been queued.
        await asyncio.sleep(0)
        after = put(batcher, "7")
        assert not swap.done()
        old.release()
        assert [(await labels(job))[0][1] for job in before] == ["old"] * 7
        assert await labels(after) == [("7", "new")]
        await swap
        assert old.is_closed
        assert not new.is_closed
        assert batcher.model is cast(ServedModel, new)
        await batcher.close()
        assert new.is_closed

    asyncio.run(scenario())


def test_closing_answers_what_waits() -> None:
    async def scenario() -> None:
        model = Model(is_open=False)
        batcher = build(model)
        jobs = [put(batcher, str(number)) for number in range(10)]
        closing = asyncio.create_task(batcher.close())
        model.release()
        await closing
        # The outcomes are on their way through the event loop.
        assert [await labels(job) for job in jobs] == [[(str(n), "first")] for n in range(10)]

    asyncio.run(scenario())


def test_brief_work_needs_no_thread_and_only_an_idle_one() -> None:
    async def scenario() -> None:
        model = Model()
        model.seconds = BRIEF_S / 2
        batcher = build(model)

        async def ask(payload: Payload) -> set[str]:
            model.threads.clear()
            job = Job(payload, asyncio.get_running_loop().create_future())
            batcher.submit(job)
            await labels(job)
            # Taken here, so that the wait below is for the call that comes then.
            await model.wait_until_called()
            return set(model.threads)

        here, there = {threading.current_thread().name}, {"headway-inference"}
        assert await ask(Payload(("0",))) == here
        assert await ask(Payload(("0", "1"))) == here
        assert await ask(Payload(("0", "1", "2"))) == there
        # A large image takes long, however small its file and the network are.
        side = round(BRIEF_PIXELS**0.5)
        assert await ask(Payload(("0",), (b"",), ((side, side),))) == here
        assert await ask(Payload(("0",), (b"",), ((side + 1, side),))) == there
        # And a long file, however few pixels it has.
        assert await ask(Payload(("0",), (bytes(BRIEF_BYTES),), ((1, 1),))) == here
        assert await ask(Payload(("0",), (bytes(BRIEF_BYTES + 1),), ((1, 1),))) == there
        # While the thread computes, everything goes to it: one model, one batch at a time.
        model.is_open = False
        long = put(batcher, "0", "1", "2")
        await model.wait_until_called()
        waiting = put(batcher, "3")
        await asyncio.sleep(0)
        assert batcher.waiting == 1
        model.release()
        await labels(long)
        await labels(waiting)
        assert model.threads == there
        assert batcher.waiting == 0
        await batcher.close()

    asyncio.run(scenario())


def test_a_deadline_that_the_queue_cannot_meet_is_refused_at_once() -> None:
    async def scenario() -> None:
        model = Model(is_open=False)
        batcher = build(model)
        # An idle server tries, whatever it expects.
        first = put(batcher, "0", arrival_s=time.monotonic(), deadline_ms=900)
        await model.wait_until_called()
        with pytest.raises(ProblemError) as refused:
            put(batcher, "1", arrival_s=time.monotonic(), deadline_ms=1900)
        assert refused.value.status == 503
        assert "deadline" in refused.value.what
        second = put(batcher, "2", arrival_s=time.monotonic(), deadline_ms=WAIT_S * 1000)
        model.release()
        await first.future
        assert await labels(second) == [("2", "first")]
        await batcher.close()

    asyncio.run(scenario())
