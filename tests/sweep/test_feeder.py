"""Processes that read from a feeder get the batches of a loader, whatever happens to the feeder or to one of them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests._support import damage, packed_digits, write_recipe

from headway.core.recipe import LoadedRecipe, read_recipe
from headway.data.batch import BadSample, Batch
from headway.data.batch_plan import BatchPlan
from headway.setup.recipe import TrainRecipe
from headway.setup.shared_inputs import SharedInputs, describe_shared_values
from headway.sweep import sweep as sweeps
from headway.sweep.batch_memory import BatchMemory, PackedBatch
from headway.sweep.cohort import Assignment
from headway.sweep.feed import Ticket, listen
from headway.sweep.feed_ring import SLOTS
from headway.sweep.feeder import Feeder, open_feed_inputs
from headway.sweep.feeders import Feeders
from headway.sweep.prediction import predict_sweep
from headway.sweep.worker import encode_assignment

# Two epochs and some steps; the second one has twice the batch.
STEPS = 12


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedRecipe[TrainRecipe]:
    folder = tmp_path_factory.mktemp("feeder")
    damage(packed_digits(folder) / "train", 3, 50)
    changes: dict[str, Any] = {
        "data": {"crop": "random", "size": 6},
        "augment": {"flip": True, "translate": 1},
        "batch_growth": {"milestones_epochs": [1], "factor": 2},
    }
    write_recipe(folder / "recipe.yaml", device="cpu", **changes)
    return read_recipe(folder / "recipe.yaml", (), TrainRecipe)


def read_alone(loaded: LoadedRecipe[TrainRecipe], position: int, steps: int = STEPS) -> list[Batch]:
    """The batches of a loader."""
    resolved, inputs = open_feed_inputs(loaded)
    with closing(inputs):
        stream: Any = iter(inputs.build_batches(resolved.recipe, make_plan(resolved), position))
        with closing(stream):
            return [keep(batch) for batch in islice(stream, steps)]


def make_plan(loaded: LoadedRecipe[TrainRecipe], samples: int = 180) -> BatchPlan:
    return BatchPlan(loaded.recipe.global_batch, loaded.recipe.batch_growth, epoch=samples)


def keep(batch: Batch) -> Batch:
    return replace(batch, images=batch.images.clone())


def expect_same(batch: Batch, expected: Batch) -> None:
    for one in fields(Batch):
        value, other = getattr(batch, one.name), getattr(expected, one.name)
        if isinstance(other, torch.Tensor):
            assert value.dtype == other.dtype
            assert torch.equal(value, other), one.name
        elif isinstance(other, np.ndarray):
            assert value.dtype == other.dtype
            assert np.array_equal(value, other), one.name
        else:
            assert value == other, one.name


@dataclass
class Readers:
    """Two processes' inputs that read from one feeder, which is a child of this process."""

    streams: list[Iterator[Batch]]
    shared: list[SharedInputs]
    feeder: int
    answers: int

    def kill(self) -> None:
        os.kill(self.feeder, signal.SIGKILL)
        os.waitpid(self.feeder, 0)
        self.feeder = 0


@contextmanager
def feeding(
    loaded: LoadedRecipe[TrainRecipe], position: int = 0, patience: float = 1e9, **other: Any
) -> Iterator[Readers]:
    """Starts a feeder, and two readers at a position; `other` changes the recipe of the second one."""
    address = f"headway-test-{os.getpid()}"
    (commands, to_feeder), (answers, out) = os.pipe(), os.pipe()
    listener = listen(address)
    if not (child := os.fork()):
        for end in (to_feeder, answers):
            os.close(end)
        Feeder(listener, commands, out, patience).run()
        os._exit(0)
    with ExitStack() as stack:
        for end in (commands, out):
            os.close(end)
        listener.close()
        readers = Readers([], [], child, answers)
        stack.callback(os.close, answers)
        stack.callback(lambda: readers.feeder and os.waitpid(child, 0))
        stack.callback(os.close, to_feeder)
        assignment = encode_assignment(Assignment(trial=0, folder=Path("none"), loaded=loaded, until=1))
        command = {"feed": 5, "assignment": assignment, "slots": [0, 1]}
        os.write(to_feeder, json.dumps(command).encode() + b"\n")
        for slot in (0, 1):
            shared = stack.enter_context(closing(SharedInputs()))
            own = loaded.resolve_all({key: (value, "a test") for key, value in other.items()}) if slot else loaded
            resolved, inputs = shared.open(own, torch.device("cpu"))
            shared.follow(Ticket(address=address, feed=5, slot=slot).read)
            readers.shared.append(shared)
            readers.streams.append(iter(inputs.build_batches(resolved.recipe, make_plan(resolved), position)))
        # The feed begins once both have asked for a batch.
        with ThreadPoolExecutor(2) as pool:
            firsts = list(pool.map(next, readers.streams))
        readers.streams = [chain([first], stream) for first, stream in zip(firsts, readers.streams, strict=True)]
        yield readers


@pytest.mark.parametrize("position", [0, 150])
def test_readers_get_the_batches_of_a_loader(loaded: LoadedRecipe[TrainRecipe], position: int) -> None:
    """From any position, over the ends of epochs, with steps that grow and samples that are damaged."""
    expected = read_alone(loaded, position)
    assert any(batch.bad for batch in expected)
    assert all(batch.boxes is not None and batch.flips is not None for batch in expected)
    assert len({len(batch.labels) for batch in expected}) == 2
    with feeding(loaded, position) as readers:
        for batch in expected:
            first, second = map(next, readers.streams)
            expect_same(first, batch)
            expect_same(second, batch)
            # One memory for both of them.
            first.images[0] = 77
            assert (second.images[0] == 77).all()
        assert [shared.reads for shared in readers.shared] == [0, 0]


def test_a_reader_can_be_ahead_by_the_ring(loaded: LoadedRecipe[TrainRecipe]) -> None:
    """By all of it but the batch that the other one is at."""
    expected = read_alone(loaded, 0)
    with feeding(loaded) as readers:
        for first in range(0, STEPS, SLOTS - 1):
            for stream in readers.streams:
                for batch in expected[first : first + SLOTS - 1]:
                    expect_same(next(stream), batch)
            # The next turn begins with the other one.
            readers.streams.reverse()
        assert [shared.reads for shared in readers.shared] == [0, 0]


def test_who_falls_behind_is_detached_and_goes_on_alone(
    loaded: LoadedRecipe[TrainRecipe], caplog: pytest.LogCaptureFixture
) -> None:
    expected = read_alone(loaded, 0)
    with feeding(loaded, patience=20) as readers:
        fast, slow = readers.streams
        held = next(slow)
        for batch in expected:
            expect_same(next(fast), batch)
        # The others have used the ring three times, and what it still reads is as it was.
        expect_same(held, expected[0])
        for batch in expected[1:]:
            expect_same(next(slow), batch)
        assert readers.shared[0].reads == 0
        assert readers.shared[1].reads == len(expected) - SLOTS
        assert b'"detached": 1, "position": 0' in os.read(readers.answers, 4096)
    assert caplog.text.count("The shared batches end here (it fell behind the others)") == 1


def test_a_killed_feeder_leaves_nothing_and_everyone_goes_on(
    loaded: LoadedRecipe[TrainRecipe], caplog: pytest.LogCaptureFixture
) -> None:
    expected, before = read_alone(loaded, 0), set(os.listdir("/dev/shm"))
    with feeding(loaded) as readers:
        for number, batch in enumerate(expected):
            if number == 3:
                readers.kill()
            for stream in readers.streams:
                expect_same(next(stream), batch)
        assert all(shared.reads >= len(expected) - 3 - SLOTS for shared in readers.shared)
        assert f"headway-test-{os.getpid()}" not in Path("/proc/net/unix").read_text()
    assert set(os.listdir("/dev/shm")) == before
    assert caplog.text.count("The shared batches end here") == 2


def test_a_reader_of_other_batches_is_refused(loaded: LoadedRecipe[TrainRecipe]) -> None:
    other = loaded.resolve("seed", 8, "a test")
    expected, others = read_alone(loaded, 0, 3), read_alone(other, 0, 3)
    with feeding(loaded, seed=8) as readers:
        for batch, another in zip(expected, others, strict=True):
            expect_same(next(readers.streams[1]), another)
            expect_same(next(readers.streams[0]), batch)
        # The one that came first is served.
        assert sorted(shared.reads for shared in readers.shared) == [0, 3]


def test_steps_that_grow_otherwise_are_other_batches(loaded: LoadedRecipe[TrainRecipe]) -> None:
    other = loaded.resolve("batch_growth.factor", 3, "a test")
    assert describe_shared_values(other) != describe_shared_values(loaded)


@settings(max_examples=20)
@given(st.integers(0, 9), st.integers(1, 5), st.booleans(), st.text(max_size=20))
def test_a_batch_in_memory_is_the_batch(samples: int, size: int, is_whole: bool, reason: str) -> None:
    random = np.random.default_rng(samples)
    numbers = random.integers(-(1 << 60), 1 << 60, (4, samples))
    batch = Batch(
        images=torch.from_numpy(random.integers(0, 256, (samples, size, size + 1, 3), np.uint8)),
        labels=torch.from_numpy(random.random((samples, size), np.float32)),
        positions=numbers[0],
        epochs=numbers[1],
        samples=numbers[2],
        served=numbers[3],
        seed=samples << 40,
        boxes=None if is_whole else random.random((samples, 4), np.float32),
        flips=None if is_whole else random.random(samples) < 0.5,
        shifts=random.integers(-9, 9, (samples, 2)) if is_whole else None,
        bad=(BadSample(1, 2, -1, reason),) * samples,
    )
    packed = PackedBatch(batch)
    memory = BatchMemory(packed.size)
    memory.write(packed)
    with closing(memory):
        expect_same(BatchMemory(memory.size, os.dup(memory.descriptor)).read(*packed.text), batch)


@pytest.mark.check
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_sweep_with_a_feeder_trains_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_killed: bool
) -> None:
    packed_digits(tmp_path)
    write_recipe(tmp_path / "recipe.yaml", device="cpu", epochs=6)
    begin = Feeders.begin

    def begin_and_kill(self: Feeders, *args: Any) -> Any:
        tickets = begin(self, *args)
        os.kill(self._processes[0]._process.pid, signal.SIGKILL)
        return tickets

    if is_killed:
        monkeypatch.setattr(Feeders, "begin", begin_and_kill)
    (tmp_path / "space.yaml").write_text("parameters:\n  optimizer.lr: {log: [0.001, 0.5]}\n")
    options = sweeps.SweepOptions(budget=2, smallest="1/3", slots=2, seeds=0)  # type: ignore[arg-type]
    for name in ("alone", "fed"):
        monkeypatch.setattr(
            sweeps, "choose_feeding", lambda *args, name=name, **more: predict_sweep(*args, **more, feeds=name == "fed")
        )
        sweeps.run_sweep(tmp_path / "recipe.yaml", (), tmp_path / "space.yaml", options, tmp_path / name)
    alone, fed = (
        {
            str(path.relative_to(tmp_path / name)): load_file(path)
            for path in (tmp_path / name / "trials").rglob("step-*/tensors-0.safetensors")
        }
        for name in ("alone", "fed")
    )
    assert alone.keys() == fed.keys()
    for name, tensors in alone.items():
        assert all(torch.equal(value, fed[name][key]) for key, value in tensors.items())
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "fed/trials").glob("*/summary.json")]
    assert summaries
    if not is_killed:
        assert any(one["input"].get("fed_batches") for one in summaries)
    logs = "".join(path.read_text() for path in (tmp_path / "fed/logs").glob("slot-*.log"))
    assert (tmp_path / "fed/logs/feeder-0.log").exists()
    assert bool(re.search("reads on by itself|cannot be read", logs)) == is_killed
    assert ("A feeder of the sweep ended with status -9" in caplog.text) == is_killed
