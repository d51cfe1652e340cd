"""The inference table: its figures from given times and outputs, what it leaves out, and one of a real export."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from headway.core.errors import HeadwayError, UsageError
from headway.core.run_folder import RunFolder
from headway.data.order import Order
from headway.export import table
from headway.export.table import TableOptions, choose_engines, measure_table
from headway.export.table_data import write_images, write_noise
from headway.export.table_engines import EAGER, ENGINES, Engine, PipelineSource, TorchSession, turn_onednn_off
from headway.export.table_process import Job, Timing, read_peak_bytes, run_job, time_batch
from headway.export.table_record import TABLE_FILE, Cell, InferenceTable, Row, read_table
from headway.export.table_rows import build_cell, compare_rows, count_comparable
from headway.export.targets.target import Session
from headway.export.top_classes import compute_top_share, rank_labels
from headway.training.evaluate import open_evaluation_set
from headway.training.runs import load_trained

COUNTED_APART = 1 << 20
"""Bytes by which a process may read its own memory as lower than it is."""

VALUES = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0])


@given(arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 7)), elements=VALUES), st.data())
def test_the_rank_of_a_label_is_its_place_in_the_stable_order(
    outputs: NDArray[np.float32], data: st.DataObject
) -> None:
    count, classes = outputs.shape
    labels = np.array(data.draw(st.lists(st.integers(0, classes - 1), min_size=count, max_size=count)), np.int64)
    order = np.argsort(-outputs, axis=1, kind="stable")
    expected = [list(row).index(label) for row, label in zip(order, labels, strict=True)]
    assert rank_labels(outputs, labels).tolist() == expected
    assert compute_top_share(outputs, labels, 1) == (outputs.argmax(axis=1) == labels).mean()
    assert compute_top_share(outputs, labels, classes) == 1


def test_an_answer_with_nan_is_wrong() -> None:
    outputs = np.array([[0.5, math.nan], [0.5, 0.1]], np.float32)
    assert compute_top_share(outputs, np.array([0, 0]), 2) == 0.5


def test_a_cell_has_the_percentiles_of_all_calls_and_the_median_of_rounds() -> None:
    rounds = [Timing(2, 8, (0.1, 0.2, 0.3), 1.2), Timing(2, 8, (0.4, 0.4, 4.0), 2.4), Timing(2, 8, (0.1,), 0.8)]
    cell = build_cell(rounds)
    assert (cell.threads, cell.batch, cell.calls) == (2, 8, 7)
    assert cell.p50_ms == pytest.approx(300)
    assert cell.p95_ms < cell.p99_ms < 4000
    assert cell.p99_ms > 3700
    # Median calls of 0.2, 0.4 and 0.1 s.
    assert (cell.images_s_low, cell.images_s, cell.images_s_high) == pytest.approx((20, 40, 80))
    assert cell.cpu_ms_image == pytest.approx(100)


@final
class Sleeping(Session):
    """An engine whose calls take so long an image."""

    def __init__(self, image_s: float) -> None:
        self.image_s, self.seen = image_s, list[NDArray[np.uint8]]()

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        self.seen.append(pixels)
        time.sleep(self.image_s * len(pixels))
        return np.zeros((len(pixels), 2), np.float32)


PIXELS = np.arange(3 * 4, dtype=np.uint8).reshape(3, 2, 2, 1)


def test_a_batch_larger_than_the_set_repeats_its_images() -> None:
    session = Sleeping(0.0)
    found = time_batch(session, PIXELS, 1, 8, 0.001, ())
    assert isinstance(found, Timing)
    # One call more than are timed, unless that alone has taken the whole time.
    assert len(session.seen) - len(found.wall_s) in (0, 1)
    assert np.array_equal(session.seen[0], PIXELS[[0, 1, 2, 0, 1, 2, 0, 1]])


def test_a_call_that_takes_the_whole_time_is_made_once() -> None:
    session = Sleeping(0.01)
    found = time_batch(session, PIXELS, 1, 2, 0.001, ())
    assert isinstance(found, Timing)
    assert len(session.seen) == len(found.wall_s) == 1


def test_a_batch_that_would_take_too_long_is_left_out_with_the_reason() -> None:
    session = Sleeping(0.0)
    before = [Timing(2, 1, (9.0,), 9.0), Timing(1, 8, (2.0, 1.6), 3.6)]
    found = time_batch(session, PIXELS, 1, 32, 0.1, before)
    assert found == "batch 32 with 1 threads would take about 6.4 s a call"
    assert not session.seen
    assert isinstance(time_batch(session, PIXELS, 1, 32, 0.7, before), Timing)


def test_rows_without_their_file_are_told(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    # A file that the gate has refused has another name.
    (tmp_path / "REJECTED-int8.onnx").touch()
    engines, missing = choose_engines(tmp_path, TableOptions().resolve())
    names = [one.name for one in engines]
    assert names[0] == EAGER
    assert {"ONNX Runtime", "OpenVINO f32", "torch.compile, channels last"} <= set(names)
    assert set(names) | set(missing) == {one.name for one in ENGINES}
    assert missing["ONNX Runtime int8"] == "the export has no int8.onnx that passed the gate"
    assert "model.pt2" in missing["AOTInductor"]
    quick = choose_engines(tmp_path, TableOptions(is_quick=True).resolve())
    assert "minutes" in quick[1]["torch.compile, channels last"]
    few = choose_engines(tmp_path, TableOptions(engines=("ONNX Runtime",)))
    assert [one.name for one in few[0]] == [EAGER, "ONNX Runtime"]
    assert not few[1]


def build_row(name: str, images_s: float = 100.0, **more: Any) -> Row:
    """A row with one cell at batch 1 and one at 8, which has twice the images/s."""
    cells = tuple(
        Cell(
            threads=1,
            batch=batch,
            calls=9,
            p50_ms=1.0,
            p95_ms=2.0,
            p99_ms=3.0,
            images_s=speed,
            images_s_low=speed,
            images_s_high=speed,
            cpu_ms_image=1.5,
        )
        for batch, speed in ((1, images_s), (8, 2 * images_s))
    )
    values: dict[str, Any] = {
        "name": name,
        "precision": "fp32",
        "file_bytes": None,
        "load_s": 0.25,
        "first_bytes": 1_000_000,
        "peak_bytes": 2_000_000,
        "peak_batch": 8,
        "cells": cells,
    }
    return Row(**values | more)


def test_accuracy_is_compared_with_the_first_row() -> None:
    labels = np.array([0, 1, 2, 3])
    base = np.eye(6, dtype=np.float32)[[0, 1, 2, 4]]
    other = base.copy()
    other[0] = [0, 0.5, 0.4, 0.3, 0.2, 0.1]
    outputs: dict[str, Any] = {EAGER: base, "same": base + 1e-4, "other": other}
    rows = compare_rows([build_row(name) for name in outputs], outputs, labels, 6)
    assert [row.top1 for row in rows] == [0.75, 0.75, 0.5]
    assert [row.flips for row in rows] == [0, 0, 1]
    # The label 0 is the last of the six in the changed answer.
    assert [row.top5 for row in rows] == [1.0, 1.0, 0.75]
    assert rows[1].largest_difference == pytest.approx(1e-4, rel=0.01)
    five = compare_rows([build_row(EAGER)], {EAGER: base[:, :5]}, labels, 5)
    assert (five[0].top1, five[0].top5) == (0.75, None)
    numbers = compare_rows([build_row(EAGER)], {EAGER: base}, None, 0)
    assert (numbers[0].top1, numbers[0].flips, numbers[0].largest_difference) == (None, None, 0.0)


def build_table(*rows: Row, **more: Any) -> InferenceTable:
    values: dict[str, Any] = {
        "machine": {"processor": "a processor", "torch": "2.13"},
        "image": (8, 8, 3),
        "rounds": 3,
        "threads": (1,),
        "batches": (1, 8, 32),
        "samples": 597,
        "samples_of": 600,
        "rows": rows,
        "missing": {"ONNX Runtime int8": "the export has no int8.onnx that passed the gate"},
    }
    return InferenceTable(**values | more)


def test_the_text_has_every_row_and_what_is_missing() -> None:
    rows = [
        build_row(EAGER, top1=0.99, top5=1.0, flips=0, largest_difference=0.0),
        build_row("ONNX Runtime", top1=0.99 - 1e-17, top5=1.0, flips=0, largest_difference=1e-7, file_bytes=45_000_000),
        build_row("slow", top1=0.5, top5=1.0, flips=293, largest_difference=0.5, skipped=("batch 32 takes too long",)),
    ]
    text = build_table(*rows).describe()
    lines = {line[:12].strip(): line.split() for line in text.splitlines() if line}
    assert "597 of 600 samples" in text
    assert "0.99000000" in text
    # No difference is printed as zero, whatever its sign.
    assert "-0.00000000" not in text
    assert "-0.49000000" in lines["slow"]
    assert "45 MB" in text
    assert "Not here: ONNX Runtime int8: the export has no int8.onnx" in text
    assert "Not measured: slow: batch 32 takes too long" in text
    # Without images/s at 32.
    assert next(line.split()[-4] for line in text.splitlines() if line.startswith("slow")) == "-"
    assert "figures to quote" not in text
    assert "figures to quote" in build_table(*rows, is_quick=True).describe()


def test_without_classes_or_an_evaluation_set_the_columns_are_left_out() -> None:
    text = build_table(build_row(EAGER, largest_difference=0.0)).describe()
    assert "top-1" not in text
    assert "max difference" in text
    text = build_table(build_row(EAGER), samples=0, samples_of=0).describe()
    assert "no evaluation set" in text
    assert "max difference" not in text


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = build_table(build_row(EAGER, top1=0.5))
    written.write(tmp_path / TABLE_FILE)
    assert read_table(tmp_path) == written
    assert written.to_json() == json.loads((tmp_path / TABLE_FILE).read_text())
    for text in ("", "[]", '{"rows": 3}'):
        (tmp_path / TABLE_FILE).write_text(text)
        with pytest.raises(UsageError, match=r"--table\.$"):
            read_table(tmp_path)
    with pytest.raises(UsageError):
        read_table(tmp_path / "none")


def test_as_many_images_are_compared_as_there_is_time_for() -> None:
    rows = [build_row(EAGER, 50.0), build_row("other", 50.0)]
    # 100 images/s each: 0.02 s an image.
    assert count_comparable(10_000, rows, 10.0) == 500
    assert count_comparable(300, rows, 10.0) == 300
    assert count_comparable(10_000, rows, 0.0) == 256


def test_a_quick_table_has_fewer_rounds_and_batches() -> None:
    usual, quick = TableOptions(threads=(1, 2)).resolve(), TableOptions(threads=(1, 2), is_quick=True).resolve()
    assert (usual.rounds, usual.batches, usual.threads) == (3, (1, 8, 32, 128), (1, 2))
    assert quick.rounds == 1
    assert quick.seconds * 5 < usual.seconds
    assert TableOptions().resolve().threads[0] == 1


def test_noise_has_no_labels(tmp_path: Path) -> None:
    noise = write_noise(tmp_path, (4, 5, 3), 6)
    assert (noise.count, noise.shape, noise.labels, noise.available) == (6, (4, 5, 3), None, 0)


def test_the_images_are_those_of_an_evaluation(exported: Path, tmp_path: Path) -> None:
    setup = load_trained(RunFolder.open_trained(exported / "run"), wide=True)
    with closing(setup.inputs), closing(open_evaluation_set(setup, None, exported / "run")) as held_out:
        (tmp_path / "whole").mkdir()
        whole = write_images(setup, held_out, tmp_path / "whole")
        batches = [(one.images.numpy().copy(), one.labels.numpy().copy()) for one in
                   setup.inputs.build_evaluation_loader(setup.recipe, held_out)]  # fmt: skip
        part = write_images(setup, held_out, tmp_path, limit=50)
    pixels, labels = (np.concatenate(one) for one in zip(*batches, strict=True))
    # Random, also if all of them fit: the table compares the first ones, and a set is often sorted by class.
    _, drawn = Order(len(held_out), 0)(np.arange(len(held_out)))
    for written, count in ((whole, len(held_out)), (part, 50)):
        assert written.labels is not None
        assert np.array_equal(np.load(written.pixels), pixels[drawn[:count]])
        assert np.array_equal(written.labels, labels[drawn[:count]])
        assert (written.count, written.available, written.classes) == (count, len(held_out), 10)


def test_pytorch_is_left_as_it_was(exported: Path) -> None:
    source = PipelineSource("headway.export.table_engines:load_run_pipeline", {"run": str(exported / "run")})
    seen = list[torch.Tensor]()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), np.uint8)
    threads, outputs = torch.get_num_threads(), list[NDArray[np.float32]]()
    for engine in (Engine(name="a"), Engine(name="b", channels_last=True), Engine(name="c", onednn=False)):
        pipeline = source.build()
        network: Any = pipeline.members[0].network
        network.layer2.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        with TorchSession(pipeline, engine, threads + 1) as session:
            assert torch.get_num_threads() == threads + 1
            assert torch.backends.mkldnn.enabled == engine.onednn
            outputs.append(session.run(pixels))
        assert torch.get_num_threads() == threads
        assert torch.backends.mkldnn.enabled
        layout = torch.channels_last if engine.channels_last else torch.contiguous_format
        assert seen[-1].is_contiguous(memory_format=layout)
        assert not engine.channels_last or not seen[-1].is_contiguous()
    for one in outputs[1:]:
        np.testing.assert_allclose(one, outputs[0], atol=1e-5)


def test_onednn_is_on_again_after_an_error() -> None:
    def fail() -> None:
        with turn_onednn_off():
            assert not torch.backends.mkldnn.enabled
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.backends.mkldnn.enabled


def build_job(exported: Path, scratch: Path, **changes: Any) -> Job:
    """A job over a few images of noise."""
    source = PipelineSource("headway.export.table_engines:load_run_pipeline", {"run": str(exported / "run")})
    values: dict[str, Any] = {
        "engine": "ONNX Runtime",
        "folder": str(exported / "export"),
        "source": source.to_json(),
        "pixels": str(write_noise(scratch, (8, 8, 1), 5).pixels),
        "threads": (1,),
        "batches": (1, 4),
        "cell_s": 0.001,
    }
    return Job(**values | changes)


def test_a_job_times_its_batches_and_writes_the_outputs(exported: Path, tmp_path: Path) -> None:
    answer = run_job(build_job(exported, tmp_path, outputs=str(tmp_path / "out.npy"), threads=(1, 2)))
    timed = [(one["threads"], one["batch"]) for one in answer["timings"]]
    # On a busy machine a batch may be too slow.
    assert len(timed) + len(answer["skipped"]) == 4
    assert {(1, 1), (2, 1)} <= set(timed) <= {(1, 1), (1, 4), (2, 1), (2, 4)}
    # Linux counts the pages of a process on each core apart, and adds them up from time to time: a peak that is read
    # later may be some pages lower.
    assert 0 < answer["first_bytes"] <= answer["peak_bytes"] + COUNTED_APART
    assert answer["peak_bytes"] <= read_peak_bytes() + COUNTED_APART
    assert answer["load_s"] > 0
    assert np.load(tmp_path / "out.npy").shape == (5, 10)


@pytest.mark.fresh
def test_a_row_of_onnx_runtime_needs_no_torch(exported: Path, tmp_path: Path) -> None:
    """What a server needs: its memory has no torch in it, and its answer is one line whatever libraries print."""
    job = build_job(exported, tmp_path)
    program = "import sys; sys.argv[1:] = [sys.argv[1]]; from headway.export.table_process import main; main(); "
    program += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program, job.to_json()], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["peak_bytes"] < 200_000_000


def test_an_engine_that_cannot_run_is_told(exported: Path, tmp_path: Path) -> None:
    job = build_job(exported, tmp_path, folder=str(tmp_path))
    command = [sys.executable, "-m", "headway.export.table_process", job.to_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "model.onnx" in json.loads(done.stdout)["error"]


def test_a_real_export_is_measured(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(exported / "export", folder)
    before, told = {path.name for path in folder.iterdir()}, list[str]()
    options = TableOptions(seconds=0.2, rounds=1, batches=(1, 4), threads=(1,), engines=("ONNX Runtime",))
    found = table.measure_run_table(exported / "run", folder, options, tell=told.append)
    assert {path.name for path in folder.iterdir()} == before | {TABLE_FILE}
    assert read_table(folder) == found
    eager, runtime = found.rows
    assert (eager.name, runtime.name) == (EAGER, "ONNX Runtime")
    assert found.samples == found.samples_of > 50
    assert (runtime.flips, runtime.top1, runtime.top5) == (0, eager.top1, eager.top5)
    assert eager.top1 is not None
    assert eager.top1 > 0.1
    assert runtime.largest_difference is not None
    assert runtime.largest_difference < 1e-5
    assert runtime.file_bytes == (folder / "model.onnx").stat().st_size
    assert runtime.find_cell(1, 1) is not None
    assert runtime.find_cell(2, 1) is None
    assert told[0] == "Round 1 of 1: eager"
    assert "0.00000000" in found.describe()


def test_a_row_that_fails_is_missing_and_eager_must_not(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    source = PipelineSource("headway.export.table_engines:load_run_pipeline", {"run": str(exported / "run")})
    images = write_noise(tmp_path, (8, 8, 1), 4)
    options = TableOptions(seconds=0.1, rounds=1, batches=(1,), threads=(1,), engines=("ONNX Runtime",))
    found = measure_table(tmp_path, source, images, options, scratch=tmp_path)
    assert [row.name for row in found.rows] == [EAGER]
    assert "model.onnx" in found.missing["ONNX Runtime"]
    assert found.samples == 0
    broken = PipelineSource("headway.export.table_engines:load_run_pipeline", {"run": str(tmp_path)})
    with pytest.raises(HeadwayError, match="eager PyTorch cannot run this network"):
        measure_table(tmp_path, broken, images, options, scratch=tmp_path)


@pytest.mark.check
def test_all_rows_of_a_real_export_agree(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(exported / "export", folder)
    names = tuple(one.name for one in ENGINES if not one.compiled)
    found = table.measure_run_table(
        exported / "run", folder, TableOptions(seconds=2.0, rounds=1, batches=(1, 8), engines=names)
    )
    exact = {row.name: row for row in found.rows if row.precision == "fp32"}
    assert {"eager, no oneDNN", "eager, channels last", "ONNX Runtime", "OpenVINO f32"} <= set(exact)
    first = found.rows[0]
    assert all((row.flips, row.top1, row.top5) == (0, first.top1, first.top5) for row in exact.values())
    assert all(row.cells and row.load_s > 0 and row.peak_bytes > 1e6 for row in found.rows)
