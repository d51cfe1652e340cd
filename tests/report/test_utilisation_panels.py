"""What a report says of a run's load: of rows that are known, in the folder of a real run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tests._support import headway, packed_digits, records, write_recipe

from headway.core import row_file
from headway.core.run_folder import RunFolder
from headway.observe import host_load, nvml
from headway.page.panel import Panel
from headway.report import utilisation_panels
from headway.report.thinning import MAX_POINTS

STEPS = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("utilised")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml")
    headway("train", folder / "recipe.yaml", "--run", folder / "run")
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunFolder:
    """A run of 120 seconds, 30 of them waiting, without rows."""
    shutil.copytree(trained, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    for path in run.folder.glob("*.rows"):
        path.unlink()
    stages = {"wait": 30.0, "forward": 60.0, "evaluate": 30.0}
    run.write_json("summary", {**run.read_summary(), "seconds": 120.0, "seconds_by_stage": stages, "images_s": 1000.0})
    return run


def about(run: RunFolder, **changes: Any) -> None:
    run.write_json("provenance", {**run.read_json("provenance"), **changes})


def write(run: RunFolder, kind: str, columns: tuple[str, ...], **values: Any) -> None:
    """Rows of half a second each; what is not given is not known."""
    count = max(len(column) for column in values.values())
    given = {"seconds": 0.5 * np.arange(1, count + 1), **values}
    for place in range(count):
        row = [given[name][place] if name in given else math.nan for name in columns]
        step = STEPS * place // count
        row_file.append_row(run.rows_path(kind), (kind,), columns, 30 * step, step, np.array([row], np.float32))


def host(run: RunFolder, **values: Any) -> None:
    write(run, host_load.SOURCE_KIND, host_load.COLUMNS, **values)


def gpu(run: RunFolder, **values: Any) -> None:
    write(run, nvml.SOURCE_KIND, nvml.COLUMNS, **values)


def made(run: RunFolder) -> dict[str, Panel]:
    found = utilisation_panels.build_panels(run, records(run.folder), run.read_json("provenance"))
    for one in found:
        json.loads(one.to_json(), parse_constant=pytest.fail)
    return {one.name: one for one in found}


def told(found: dict[str, Panel]) -> dict[str, str]:
    rows = found["utilisation-table"].data["rows"]
    assert not any("nan" in cell for row in rows for cell in row)
    return dict(rows)


def series(found: Panel) -> dict[str, list[float]]:
    return {one["name"]: one["y"] for one in found.data["series"]}


DIPS = np.tile([0.9] * 12 + [0.1] * 4, 15)
"""For 120 seconds, a dip every eight; the run has steps of 10 s and epochs of 60 s."""


def test_a_run_on_a_processor(run: RunFolder) -> None:
    host(run, busy=np.ones(240), own=DIPS, memory_bytes=np.full(240, 3e9), throttled=np.full(240, 0.25))
    found = made(run)
    assert found.keys() == {"utilisation", "utilisation-table"}
    assert {one.section for one in found.values()} == {"Time"}
    numbers = told(found)
    mean = DIPS[1:].mean()  # when the first reading began is not known
    assert numbers["utilisation, mean"] == f"{mean:.1%}"
    assert numbers["spikiness, 1 - mean / p90"] == f"{1 - mean / 0.9:.1%}"
    assert numbers["dips below half of p90"] == "7.5 per minute, median length 2 s"
    assert numbers["period"].startswith("every 8 s, unlike the intervals of the run (steps 10 s, epochs 60 s")
    assert numbers["processor: throttled by its quota"] == "in 25.0% of the scheduler's periods"
    assert numbers["processor: memory of this process, mean"] == "3 GB"
    assert numbers["model FLOPs utilisation"] == "unknown: no peak is known for cpu in fp32"
    assert "the dips come from the input" in found["utilisation-table"].note
    lines = series(found["utilisation"])
    assert lines.keys() == {"processor, this process", "processor, all processes", "waiting for data"}
    assert np.mean(lines["processor, this process"]) == pytest.approx(70)
    assert set(lines["processor, all processes"]) == {100}
    waits = [100 * record["wait_share"] for record in records(run.folder, "train")]
    assert lines["waiting for data"] == pytest.approx(waits, rel=1e-3)


@pytest.mark.parametrize(
    ("length", "says"), [(20, "steps"), (40, None), (120, "epochs and evaluations and checkpoints")]
)
def test_a_period_of_the_runs_own_is_named(run: RunFolder, length: int, says: str | None) -> None:
    host(run, own=np.tile([0.9] * (length - 4) + [0.1] * 4, 1200 // length))
    text = told(made(run))["period"]
    assert text.startswith(f"every {length / 2:.3g} s")
    assert text.endswith(f"as the run's {says}") if says else "unlike the intervals of the run" in text


def test_a_run_on_a_gpu(run: RunFolder) -> None:
    about(run, device="NVIDIA A100-SXM4-80GB", multiply_adds=4 * 10**9)
    host(run, busy=np.full(240, 0.5), own=np.full(240, 0.25))
    slow = np.where(np.arange(240) < 60, 0x4 | 0x20, 0x4)
    gpu(
        run,
        busy=np.full(240, 0.95),
        memory_busy=np.full(240, 0.4),
        power_w=np.full(240, 150.0),
        power_limit_w=np.full(240, 400.0),
        throttle=slow,
        sm_clock_hz=np.full(240, 1.4e9),
    )
    found = made(run)
    assert found.keys() == {"utilisation", "power", "utilisation-table"}
    assert series(found["utilisation"]).keys() == {"GPU", "processor, all processes", "waiting for data"}
    assert set(series(found["power"])["power"]) == {150}
    assert set(series(found["power"])["power limit"]) == {400}
    numbers = told(found)
    assert numbers["GPU: busy but light"].startswith("yes")
    assert numbers["GPU: clock limited by"] == "the power limit, 100.0% of the time; heat, 25.0% of the time"
    assert numbers["GPU: clock, mean"] == "1,400 MHz"
    assert numbers["processor: used by this process"] == "25.0% of the usable cores"
    assert numbers["model FLOPs utilisation"] == f"{1000 * 24e9 / 156e12:.1%} of 156 TFLOP/s in fp32"
    assert "GPU: temperature, mean" not in numbers
    about(run, ranks=4)
    assert told(made(run))["model FLOPs utilisation"].startswith(f"{1000 * 24e9 / 156e12 / 4:.1%} of")


def test_the_gpu_of_every_rank_is_drawn_over_time(run: RunFolder) -> None:
    about(run, device="NVIDIA A100-SXM4-80GB")
    gpu(run, busy=np.full(240, 0.9), memory_bytes=np.full(240, 4e9), temperature_c=np.linspace(40, 70, 240))
    found = made(run)
    assert found.keys() == {"utilisation", "utilisation-table", "gpu-memory", "gpu-temperature"}
    assert set(series(found["gpu-memory"])["the leading rank"]) == {4}
    for name, busy in (("10", 0.5), ("2", 0.7)):
        temperature = np.full(240, math.nan if name == "10" else 80.0)
        write(
            run,
            f"gpu-{name}",
            nvml.COLUMNS,
            busy=np.full(240, busy),
            memory_bytes=DIPS * 1e9,
            temperature_c=temperature,
        )
    found = made(run)
    assert list(series(found["gpu-busy"])) == ["the leading rank", "rank 2", "rank 10"]
    assert np.mean(series(found["gpu-busy"])["rank 10"]) == pytest.approx(50)
    assert list(series(found["gpu-temperature"])) == ["the leading rank", "rank 2"]
    rows = found["gpu-table"].data["rows"]
    assert rows[0] == ["the leading rank", "90.0%", "unknown", "4 GB", "70 °C"]
    assert rows[2] == ["rank 10", "50.0%", "unknown", "900 MB", "unknown"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": "NVIDIA GeForce RTX 4090"}, "no peak is known for NVIDIA GeForce RTX 4090"),
        ({"multiply_adds": None}, "were not counted"),
        ({"freeze_after": [{"after_epochs": 1, "parameters": "^0"}]}, "changes during the run"),
    ],
)
def test_a_share_of_the_peak_that_is_not_known(run: RunFolder, changes: dict[str, Any], says: str) -> None:
    about(run, **{"device": "NVIDIA A100-SXM4-80GB", "multiply_adds": 10**9, **changes})
    if "freeze_after" in changes:
        tree = yaml.safe_load(run.recipe_path.read_text())
        tree["model"] |= changes
        run.recipe_path.write_text(yaml.safe_dump(tree))
    gpu(run, busy=np.full(40, 0.95))
    text = told(made(run))["model FLOPs utilisation"]
    assert text.startswith("unknown: ")
    assert says in text


def test_a_gpu_that_was_not_sampled(run: RunFolder) -> None:
    about(run, device="NVIDIA A100-SXM4-80GB")
    host(run, busy=np.full(240, 0.5), own=np.full(240, 0.25))
    found = made(run)
    assert found.keys() == {"utilisation-table"}
    assert "Install nvidia-ml-py" in found["utilisation-table"].note
    assert told(found)["processor: used by this process"] == "25.0% of the usable cores"


def test_too_short_a_run_has_nothing_to_say(run: RunFolder) -> None:
    assert made(run) == {}
    host(run, own=np.full(15, 0.5))
    assert made(run) == {}


def test_a_run_that_has_not_ended(run: RunFolder) -> None:
    host(run, busy=DIPS, own=DIPS)
    (run.folder / "summary.json").unlink()
    found = made(run)
    assert found["utilisation-table"].note == ""
    assert told(found)["period"] == "every 8 s"


def test_many_readings_become_few_points_with_what_lies_around_them(run: RunFolder) -> None:
    busy = np.random.default_rng(0).random(2400)
    host(run, busy=busy, own=busy)
    found = made(run)["utilisation"].data
    assert found["x_label"] == "minutes"
    assert len(found["series"][0]["x"]) == MAX_POINTS
    assert found["series"][0]["x"][-1] == pytest.approx(20, rel=0.01)
    assert found["series"][0]["y"] == pytest.approx(100 * busy.reshape(240, 10).mean(1), rel=1e-3)
    assert found["bands"][0]["low"] == pytest.approx(100 * busy.reshape(240, 10).min(1), rel=1e-3)
    assert found["bands"][0]["high"] == pytest.approx(100 * busy.reshape(240, 10).max(1), rel=1e-3)


def test_it_stands_in_the_report(run: RunFolder) -> None:
    host(run, busy=DIPS, own=DIPS)
    headway("report", run.folder)
    assert {"utilisation.json", "utilisation-table.json"} <= {path.name for path in run.panels.iterdir()}
    assert "Utilisation of the processor in numbers" in run.report_path.read_text()


@pytest.mark.parametrize(("share", "says"), [(0.4, "40%"), (0.05, None)])
def test_programs_that_took_the_processor_are_named_beside_the_result(
    run: RunFolder, share: float, says: str | None
) -> None:
    host(run, busy=np.full(240, 0.9), own=np.full(240, 0.9 - share), others=np.full(240, share))
    headway("report", run.folder)
    cards = Panel.from_json((run.panels / "result.json").read_text()).data["cards"]
    assert [card["value"] for card in cards if card["label"] == "other programs"] == ([] if says is None else [says])
    assert told(made(run))["processor: used by other programs"] == f"{share:.1%} of the usable cores"


def test_a_run_of_before_did_not_look_at_other_programs(run: RunFolder) -> None:
    write(run, host_load.SOURCE_KIND, host_load.COLUMNS[:-1], busy=DIPS, own=DIPS)
    assert utilisation_panels.read_other_load(run) is None
    assert "processor: used by other programs" not in told(made(run))
