"""What goes on beside a run: its load, its trace, its page of numbers; and that the run is the same without."""

from __future__ import annotations

import json
import math
import signal
import socket
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests._support import finished, free_port, headway, packed_digits, records, refused, running, write_recipe
from tests.observe.test_nvml import Driver

from headway.core import row_file
from headway.core.run_folder import RunFolder
from headway.data.batch_plan import BatchPlan
from headway.observe import load_sampler
from headway.observe.host_load import COLUMNS, HostLoadSource
from headway.observe.nvml import COLUMNS as COLUMNS_OF_GPU
from headway.observe.nvml import GpuSource
from headway.training import monitors

OF_A_STEP = {"wait", "augment", "forward", "loss", "backward", "optimizer"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml", epochs=4, checkpoint={"every_steps": 6}, model={"factory": "net.py:dropout"})
    return folder


def load_of(run: Path) -> row_file.RowTable:
    found = row_file.read_rows(run / "host.rows")
    assert found is not None
    return found


def events(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    return json.loads((run / f"trace-{rank}.json").read_text())["traceEvents"]  # type: ignore[no-any-return]


def test_the_load_is_sampled_while_a_run_trains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_sampler, "INTERVAL_S", 0.005)
    run = tmp_path / "run"
    headway("train", folder / "recipe.yaml", "--run", run)
    table = load_of(run)
    assert (table.names, table.columns) == (("host",), COLUMNS)
    seconds, positions = table.values[:, 0, 0], table.positions
    assert (np.diff(seconds) > 0).all()
    assert (np.diff(positions) >= 0).all()
    assert (table.steps * 30 == positions).all()
    assert positions[-1] <= 24 * 30
    assert seconds[0] > 0
    own = table.values[:, 0, COLUMNS.index("own")]
    assert (own > 0).all()
    assert (own <= 1).all()


def test_every_rank_writes_the_load_of_its_gpu(tmp_path: Path) -> None:
    gpu, host = GpuSource(Driver(), "handle"), HostLoadSource([0])
    plan, run = BatchPlan(30), RunFolder(tmp_path / "run")
    for name, is_lead in (("0", True), ("1", False), ("2", False)):
        trainer: Any = SimpleNamespace(
            is_lead=is_lead, step=4, setup=SimpleNamespace(plan=plan), ranks=SimpleNamespace(name=name), run_folder=run
        )
        for source in (gpu, host):
            for row in source.read(1.0):
                monitors._append_row(trainer, source, row)
    # The host's load is the leading rank's alone.
    assert sorted(path.name for path in run.folder.iterdir()) == ["gpu-1.rows", "gpu-2.rows", "gpu.rows", "host.rows"]
    assert list(run.list_process_rows("gpu")) == ["", "1", "2"]
    for path in run.list_process_rows("gpu").values():
        table = row_file.read_rows(path)
        assert table is not None
        assert table.positions.tolist() == [120]
        assert table.values[0, 0, COLUMNS_OF_GPU.index("temperature_c")] == 61
    sampler: Any = SimpleNamespace(latest={"gpu_memory_bytes": 5e9, "gpu_temperature_c": math.nan, "host_own": 0.5})
    assert monitors._select_gpu_numbers(sampler) == {"gpu_memory_bytes": 5e9}


def test_a_run_is_the_same_with_it_and_without(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_sampler, "INTERVAL_S", 0.002)
    for name, on in (("on", "{trace_steps: 5}"), ("off", "{utilisation: false}")):
        headway("train", folder / "recipe.yaml", "--run", tmp_path / name, f"observe={on}")
    on, off = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("on", "off"))
    assert on == off
    assert not [path.name for path in (tmp_path / "off").iterdir() if path.name.startswith(("host", "gpu", "trace"))]


def test_a_resumed_run_goes_on_with_the_rows_before(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint of step 18: rows of later positions are cut off, then there are new ones."""
    monkeypatch.setattr(load_sampler, "INTERVAL_S", 0.002)
    run = tmp_path / "run"
    headway("train", folder / "recipe.yaml", "--run", run)
    before = load_of(run)
    for path in (run / "checkpoints/step-00000024").iterdir():
        path.unlink()
    (run / "checkpoints/step-00000024").rmdir()
    headway("train", "--resume", run)
    after = load_of(run)
    kept = before.values[before.positions <= 18 * 30]
    assert np.array_equal(after.values[: len(kept)], kept, equal_nan=True)
    assert (np.diff(after.positions) >= 0).all()
    (saved,) = (record["seconds"] for record in records(run, "train") if record["step"] == 18)
    assert len(after.values) > len(kept)
    assert (after.values[len(kept) :, 0, 0] > saved).all()  # the clock of the run goes on


def test_a_trace_has_the_stages_of_so_many_steps(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    headway("train", folder / "recipe.yaml", "--run", run, "observe.trace_steps=5")
    found = [event for event in events(run) if event["ph"] == "X"]
    steps = [event for event in found if event["tid"] == 1]
    stages = [event for event in found if event["tid"] == 2]
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(11, 16)]
    for row in (steps, stages):  # one after the other, without a gap
        ends = [event["ts"] + event["dur"] for event in row]
        assert [event["ts"] for event in row[1:]] == pytest.approx(ends[:-1], abs=0.01)
        assert all(event["dur"] >= 0 for event in row)
    for step in steps:
        end = step["ts"] + step["dur"]
        inside = {one["name"] for one in stages if step["ts"] <= one["ts"] and one["ts"] + one["dur"] <= end}
        assert inside >= OF_A_STEP, step
        assert ("checkpoint" in inside) == (step["name"] == "step 12")
    assert {event["pid"] for event in found} == {0}


@pytest.mark.parametrize(("overrides", "left"), [(("epochs=1",), None), (("epochs=2", "observe.trace_steps=50"), 2)])
def test_a_run_that_ends_before_its_trace_leaves_what_there_is(
    folder: Path, tmp_path: Path, overrides: tuple[str, ...], left: int | None
) -> None:
    run = tmp_path / "run"
    headway("train", folder / "recipe.yaml", "--run", run, "observe.trace_steps=5", *overrides)
    if left is None:
        assert not (run / "trace-0.json").exists()
    else:
        assert len([event for event in events(run) if event.get("tid") == 1 and event["ph"] == "X"]) == left


@pytest.mark.check
def test_each_rank_leaves_a_trace_of_its_own(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = finished("train", folder / "recipe.yaml", "--run", run, "--procs", "2", "observe.trace_steps=4")
    assert said.status == 0, said.err
    for rank in range(2):
        spans = [event for event in events(run, rank) if event["ph"] == "X"]
        assert {event["pid"] for event in spans} == {rank}
        assert "reduce" in {event["name"] for event in spans}


@pytest.fixture
def port() -> int:
    return free_port()


def page(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return answer.read().decode()  # type: ignore[no-any-return]
    except OSError:
        return ""


def test_prometheus_is_answered_while_a_run_trains(folder: Path, tmp_path: Path, port: int) -> None:
    run = tmp_path / "a run"
    words = ("epochs=100000", "evaluate.every_epochs=1", "sinks=[prometheus]", f"observe.prometheus_port={port}")
    wanted = ("headway_train_loss{", "headway_evaluate_accuracy{", "headway_host_busy{")
    with running("train", folder / "recipe.yaml", "--run", run, *words) as process:
        while process.poll() is None and not all(name in (found := page(port)) for name in wanted):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    numbers = dict(line.rsplit(" ", 1) for line in found.splitlines() if not line.startswith("#"))
    assert float(numbers['headway_steps{run="a run"}']) == 600_000
    step = float(numbers['headway_train_step{run="a run"}'])
    (record,) = (record for record in records(run, "train") if record["step"] == step)
    assert float(numbers['headway_train_loss{run="a run"}']) == record["loss"]
    assert page(port) == ""


def test_a_port_that_is_taken_is_refused(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        words = ("sinks=[prometheus]", f"observe.prometheus_port={taken.getsockname()[1]}")
        said = refused("train", folder / "recipe.yaml", "--run", tmp_path / "run", *words, status=2)
    assert "cannot be used for Prometheus" in said


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("observe.prometheus_port=9400", "observe.prometheus_port is for the sink prometheus"),
        ("observe.prometheus_address=0.0.0.0", "observe.prometheus_address is for the sink prometheus"),
        ("observe.prometheus_address=localhost", "'localhost' is not an IP address"),
        ("observe.prometheus_port=0", "prometheus_port"),
        ("observe.trace_steps=-1", "trace_steps"),
        ("observe.utilisation=often", "utilisation"),
    ],
)
def test_recipes_that_cannot_be(folder: Path, tmp_path: Path, wrong: str, says: str) -> None:
    said = refused("train", folder / "recipe.yaml", "--run", tmp_path / "run", wrong, status=2)
    assert says in said
    assert not (tmp_path / "run").exists()
