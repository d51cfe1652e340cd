"""The user's own lines: what they do in a step is told apart, and each is named by file and line."""

from __future__ import annotations

import gc
import io
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests._support import packed_digits, write_recipe

from headway.core.user_code import import_user_object
from headway.doctor.budget import Budget
from headway.doctor.examination import examine_job
from headway.doctor.input_transform import find_transform_lines
from headway.doctor.loop_measurement import LoopMeasurement, measure_loop
from headway.doctor.measurement_job import MeasurementJob
from headway.doctor.stack_sampler import StackSampler
from headway.doctor.sync_counter import LineCounts, SyncCounts, classify_wait, count_calls
from headway.doctor.time_attribution import classify
from headway.doctor.user_code import UserCodeLine, find_owner, find_user_line
from headway.training.runs import load_recipe

HOLDERS = """
import gc
import sys
import threading
import time
from pathlib import Path

import numpy as np
from torch import nn

from headway.model import small_net
from headway.setup.task import Classification

LOCK, RELEASED = threading.Lock(), threading.Event()
HEAP = [{"n": n} for n in range(100_000)]
BIG = Path(__file__).with_name("big")


def hold():
    while not RELEASED.wait(0.001):
        with LOCK:
            time.sleep(0.2)


class Net(nn.Module):
    def __init__(self, num_classes, in_channels=3, *, does="nothing"):
        super().__init__()
        self.inner = small_net(num_classes=num_classes, in_channels=in_channels, width=4)
        self.does = getattr(self, does)

    def forward(self, images):
        self.does(images)
        return self.inner(images)

    def nothing(self, images):
        return None

    def sleeps(self, images):
        time.sleep(0.05)  # here: sleeps

    def sorts(self, images):
        np.sort(np.arange(3_000_000) % 65_521)  # here: sorts

    def counts(self, images):
        return sum(n * n for n in range(600_000))  # here: counts

    def reads(self, images):
        for _ in range(8_000):
            images[0, 0, 0, 0].item()  # here: reads

    def locks(self, images):
        with LOCK:  # here: locks
            pass

    def collects(self, images):
        gc.collect()  # here: collects

    def opens(self, images):
        BIG.read_bytes()  # here: opens


def waits(images, labels, keys):
    time.sleep(0.05)  # here: waits
    return images, labels


def hurries(images, labels, keys):
    in_a_run = sys._getframe(1).f_code.co_name == "prepared"
    time.sleep(0.05 if in_a_run else 0.005)
    return images, labels


def make_slow():
    def slowly(image):
        order = np.sort(np.arange(100_000) % 65_521)  # here: image
        return image + np.uint8(order[0])

    return slowly


def make_lazy():
    def wait(image):
        time.sleep(0.006)  # here: lazy
        return image

    return wait


def naps(images, labels, keys):
    time.sleep(0.02)  # here: naps
    return images, labels


class Slow(Classification):
    def loss(self, outputs, labels):
        time.sleep(0.05)  # here: loss
        return super().loss(outputs, labels)


class Judging(Classification):
    def metrics(self, outputs, labels):
        time.sleep(0.05)  # here: metrics
        return super().metrics(outputs, labels)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("code")
    packed_digits(where, per_class=30, mode="seekable")
    (where / "holders.py").write_text(HOLDERS)
    (where / "big").write_bytes(bytes(100 << 20))
    rare = {"every_epochs": 1e6}
    write_recipe(where / "plain.yaml", evaluate=rare, checkpoint=rare)
    return where


def line_of(what: str) -> int:
    """The line of HOLDERS that is marked so."""
    (found,) = [number for number, line in enumerate(HOLDERS.split("\n"), 1) if line.endswith(f"# here: {what}")]
    return found


def loop_of(folder: Path, *overrides: str) -> LoopMeasurement:
    with closing(MeasurementJob.from_recipe(load_recipe(folder / "plain.yaml", overrides))) as job:
        return measure_loop(job, limit_s=0.6, passes_s=0.2)


def longest(found: LoopMeasurement) -> str:
    return max(found.seconds, key=lambda stage: found.seconds[stage])


def assert_named(found: LoopMeasurement, stage: str, within: str, what: str, line: str) -> None:
    assert longest(found) == stage
    first = found.code[stage][0]
    assert (Path(first.file).name, first.line) == ("holders.py", line_of(line))
    assert (first.within, first.what) == (within, what)
    assert str(first).endswith(f"at holders.py:{first.line} in {within}")


@pytest.mark.parametrize(
    ("does", "stage"),
    [
        ("sleeps", "sleep"),
        pytest.param("sorts", "python", marks=pytest.mark.check),
        pytest.param("counts", "python", marks=pytest.mark.check),
        pytest.param("reads", "sync", marks=pytest.mark.check),
        pytest.param("collects", "gc", marks=pytest.mark.check),
        pytest.param("opens", "file", marks=pytest.mark.check),
    ],
)
def test_what_a_line_of_the_network_does_is_named(folder: Path, does: str, stage: str) -> None:
    found = loop_of(folder, f"model={{factory: 'holders.py:Net', args: {{does: {does}}}}}")
    assert_named(found, stage, "forward", stage, does)


@pytest.mark.check
def test_a_lock_that_another_thread_holds_is_named(folder: Path) -> None:
    hold = import_user_object("holders.py:hold", base=folder, what="test")
    released = import_user_object("holders.py:RELEASED", base=folder, what="test")
    thread = threading.Thread(target=hold)
    thread.start()
    try:
        found = loop_of(folder, "model={factory: 'holders.py:Net', args: {does: locks}}")
    finally:
        released.set()
        thread.join()
    assert_named(found, "lock", "forward", "lock", "locks")


@pytest.mark.check
@pytest.mark.parametrize(
    ("overrides", "within", "line"),
    [
        (("task={factory: 'holders.py:Slow'}",), "loss", "loss"),
        (("task={factory: 'holders.py:Judging'}", "log_every_steps=1"), "metrics", "metrics"),
    ],
)
def test_a_loss_and_a_metric_are_told_from_the_network(
    folder: Path, overrides: tuple[str, ...], within: str, line: str
) -> None:
    assert_named(loop_of(folder, *overrides), "sleep", within, "sleep", line)


@pytest.mark.check
def test_the_verdict_names_the_line_of_a_transform(folder: Path) -> None:
    short = Budget(each=0.4, passes=0.2, side=0.1, whole=0.4, tries=0.2)
    with closing(MeasurementJob.from_recipe(load_recipe(folder / "plain.yaml", ["transform=holders.py:waits"]))) as job:
        found = examine_job(job, short, quick=True)
    assert found.verdict.stage == "transform"
    assert f"the recipe's transform (sleep at holders.py:{line_of('waits')} in transform" in found.verdict.sentence
    row = found.find_ceiling("transform")
    assert row is not None
    assert found.verdict.code == row.code[0]
    assert row.code[0].line == line_of("waits")
    assert row.seconds >= 0.5 * 0.05 / found.batch
    assert found.knobs
    assert any(str(row.code[0]) in knob.name and not knob.override for knob in found.knobs)


IMAGE, BYTES = ("data.image_transform=holders.py:make_slow",), ("transform=holders.py:naps", "transform_on=uint8")


@pytest.mark.parametrize(("overrides", "what", "line"), [(IMAGE, "python", "image"), (BYTES, "sleep", "naps")])
def test_the_lines_of_a_transform_beside_the_loop_are_found(
    folder: Path, overrides: tuple[str, ...], what: str, line: str
) -> None:
    with closing(MeasurementJob.from_recipe(load_recipe(folder / "plain.yaml", overrides))) as job:
        first, *_ = find_transform_lines(job, stage_s=1.0, limit_s=0.3)
    assert (Path(first.file).name, first.line, first.within, first.what) == (
        "holders.py",
        line_of(line),
        "transform",
        what,
    )
    assert 0.5 < first.seconds <= 1.01


@pytest.mark.check
def test_the_verdict_names_the_line_of_a_slow_transform_of_images(folder: Path) -> None:
    short = Budget(each=0.4, passes=0.2, side=0.1, whole=0.4, tries=0.2)
    overrides = ["data.image_transform=holders.py:make_lazy", "data.transform_workers=1"]
    with closing(MeasurementJob.from_recipe(load_recipe(folder / "plain.yaml", overrides))) as job:
        found = examine_job(job, short, quick=True)
    assert found.verdict.stage == "transform", found.verdict.sentence
    assert found.verdict.kind == "host/IO limited"
    assert f"the recipe's transform (sleep at holders.py:{line_of('lazy')} in transform" in found.verdict.sentence
    assert [one.side for one in found.ceilings if one.stage == "transform"] == ["input"]
    assert any(f"holders.py:{line_of('lazy')}" in knob.name for knob in found.knobs)


def test_a_transform_that_is_faster_alone_than_in_the_run_makes_no_work_of_others(folder: Path) -> None:
    # A machine that is busy during the run slows the transform there alone. The rest once counted as normalising.
    found = loop_of(folder, "transform=holders.py:hurries")
    assert found.seconds["transform"] > 2 * found.seconds["normalise"]


@pytest.mark.check
def test_a_network_of_ours_has_no_lines(folder: Path) -> None:
    found = loop_of(folder)
    assert not found.code
    assert found.seconds["python"] == found.seconds["sleep"] == 0


# The sampler.


def test_a_sampler_leaves_the_interpreter_as_it_was() -> None:
    def state() -> object:
        goes, every_s = signal.getitimer(signal.ITIMER_REAL)
        return signal.getsignal(signal.SIGALRM), goes > 0, every_s, list(gc.callbacks)

    before = state()
    with StackSampler() as seen:
        time.sleep(0.6)
    assert state() == before
    place = max(seen.seconds, key=lambda one: seen.seconds[one])
    assert Path(place.file).name == Path(__file__).name
    assert seen.waited[place] > 0.5 * seen.seconds[place]


def test_a_thread_that_gets_no_signals_is_not_seen() -> None:
    seen = StackSampler()

    def work() -> None:
        with seen:
            time.sleep(0.05)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen.total_s == 0


def test_collections_are_timed_as_they_are() -> None:
    heap = [{"number": number} for number in range(200_000)]
    with StackSampler() as seen:
        begun = time.perf_counter()
        gc.collect()
        took = time.perf_counter() - begun
    assert len(heap) == 200_000
    # Another thread may hold the interpreter between the two clocks.
    assert 0.5 * took < sum(seen.collected.values()) <= 1.1 * took
    assert sum(seen.collected.values()) <= seen.total_s


# What a line is, without a clock.


def test_code_is_the_users_unless_it_is_a_librarys() -> None:
    import json

    import numpy as np
    import torch

    import headway.core.random_keys

    assert find_owner(__file__) == "user"
    assert (
        find_owner(json.__file__) == find_owner(np.__file__) == find_owner("<frozen importlib._bootstrap>") == "library"
    )
    assert find_owner(torch.nn.__file__) == "torch"
    assert find_owner(headway.core.random_keys.__file__) == "headway"
    assert find_owner(pytest.__file__) == "package"


def test_a_library_works_for_the_line_that_calls_it() -> None:
    import json

    seen: list[UserCodeLine | None] = []

    def default(value: object) -> str:
        seen.append(find_user_line(sys._getframe(1)))  # json's own frame
        return ""

    json.dumps(object(), default=default)
    assert seen[0] is not None
    assert seen[0].file == __file__


def test_functions_that_wait_are_known_by_their_modules() -> None:
    import os
    import queue

    assert classify_wait(time.sleep) == "sleep"
    assert classify_wait(threading.Lock().acquire) == classify_wait(queue.SimpleQueue().get) == "lock"
    assert classify_wait(open) == classify_wait(os.read) == classify_wait(sys.__stdout__.write) == "file"  # type: ignore[union-attr]
    assert classify_wait(len) is classify_wait(time.perf_counter) is classify_wait([].append) is None


@pytest.mark.check
def test_taking_the_time_of_calls_does_not_count() -> None:
    """It was a third of the loop, and a line that logs was said to write to a file all the time."""
    found, nothing = SyncCounts(), io.BytesIO().tell
    with count_calls(found):
        begun = time.perf_counter()
        for _ in range(100_000):
            nothing()
        took = time.perf_counter() - begun
    (line,) = found.lines.values()
    assert line.calls["file"] < 0.2 * took


@pytest.mark.parametrize(
    ("waited", "line", "what"),
    [
        (0.0, LineCounts(), "python"),
        (0.9, LineCounts(), "sleep"),
        (0.9, LineCounts(calls={"lock": 0.8}), "lock"),
        (0.0, LineCounts(calls={"file": 0.6}), "file"),
        (0.0, LineCounts(calls={"file": 0.2}), "python"),
        (0.1, LineCounts(operations=3, operation_s=0.9), None),
        (0.0, LineCounts(operations=200_000), None),
        (0.0, LineCounts(reads=100_000, operations=400_000), "sync"),
        (0.0, LineCounts(reads=1, operations=3), "python"),
    ],
)
def test_a_line_is_what_takes_most_of_it(waited: float, line: LineCounts, what: str | None) -> None:
    place = UserCodeLine("forward", __file__, 1)
    assert classify(1.0, waited, line, place, read_s=1e-5, on_cpu=True) == what


def test_who_reads_a_value_of_a_device_waits_for_it() -> None:
    place, line = UserCodeLine("forward", __file__, 1), LineCounts(reads=1, operations=1, operation_s=0.9)
    assert classify(1.0, 0.9, line, place, read_s=1e-5, on_cpu=False) == "sync"
