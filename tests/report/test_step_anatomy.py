"""The fifteen parts of a step: each measured once, none made up."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests._support import finished, headway, packed_digits, write_recipe

from headway.core.row_file import append_row
from headway.core.run_folder import RunFolder
from headway.observe import layer_times
from headway.page.panel import Panel
from headway.report.layer_clocks import LayerClocks, read_layer_clocks
from headway.report.layer_clocks import build_panels as build_layer_panels
from headway.report.step_anatomy import StepPart, build_panels, list_step_parts

NAMES = [
    "read", "transport", "pre-process", "queue", "transport to the device", "activation, layer 1",
    "activation, layer 2", "output", "loss", "back-propagation, layer 3", "back-propagation, layer 2",
    "back-propagation, layer 1", "optimizer", "update of the weights", "return to the beginning",
]  # fmt: skip

SUMMARY: dict[str, Any] = {
    "step": 100,
    "seconds_by_stage": {
        "first batch": 1.0, "wait": 0.3, "augment": 0.1, "forward": 1.0, "loss": 0.05, "backward": 2.0,
        "optimizer": 0.4, "log": 0.02, "evaluate": 3.0,
    },
    "input": {
        "images": 3000,
        "batches": 100,
        "ahead": 3,
        "tier": "none, local files are near",
        "stage_images_s": {"order": 30_000.0, "read": 15_000.0, "decode": 3000.0, "labels": 300_000.0},
    },
}  # fmt: skip


def changed(**changes: Any) -> dict[str, Any]:
    found = copy.deepcopy(SUMMARY)
    found |= {key: value for key, value in changes.items() if value is not None}
    return {key: value for key, value in found.items() if changes.get(key, value) is not None}


def by_name(summary: dict[str, Any], device: str = "cpu") -> dict[str, StepPart]:
    return {part.name: part for part in list_step_parts(summary, device)}


def test_the_fifteen_parts_in_their_order() -> None:
    found = list_step_parts(SUMMARY, "cpu")
    assert [part.name for part in found] == NAMES
    assert all(part.note for part in found)
    named = by_name(SUMMARY)
    assert named["read"].loader_s == pytest.approx(30 / 15_000)
    assert named["read"].loop_s is None
    assert named["pre-process"].loader_s == pytest.approx(30 / 30_000 + 30 / 3000 + 30 / 300_000)
    assert named["pre-process"].loop_s == pytest.approx(0.001)
    assert (named["queue"].loop_s, named["queue"].is_shared) == (pytest.approx(0.003), False)
    assert re.search(r"; \d batch(es)? ahead$", named["queue"].note)
    assert (named["loss"].loop_s, named["loss"].is_shared) == (pytest.approx(0.0005), False)
    assert named["return to the beginning"].loop_s == pytest.approx(0.0002)
    assert named["transport to the device"].loop_s is None  # on a CPU there is none


def test_what_cannot_be_told_apart_is_not_split() -> None:
    """Parts of one measurement all have the whole of it, marked; and all measurements together are the step's."""
    found = list_step_parts(SUMMARY, "cpu")
    for stage, count in (("forward", 3), ("backward", 3), ("optimizer", 2)):
        group = [part for part in found if part.stage == stage]
        assert len(group) == count
        assert all(part.is_shared for part in group)
        assert {part.loop_s for part in group} == {SUMMARY["seconds_by_stage"][stage] / 100}
    once = {part.stage: part.loop_s or 0.0 for part in found if part.stage}
    outside = ("first batch", "evaluate")
    whole = sum(seconds for stage, seconds in SUMMARY["seconds_by_stage"].items() if stage not in outside)
    assert sum(once.values()) == pytest.approx(whole / 100)


@pytest.mark.parametrize("weighted", [(1, 4, 6), (1, 6), (4,), ()])
def test_clocks_of_layers_give_each_part_a_number_of_its_own(weighted: tuple[int, ...]) -> None:
    names = ("(network)", "a", "a.norm", "block", "block.b", "block.relu", "head")
    clocks = np.arange(1.0, 8.0)
    weights = np.array([float(place in weighted) for place in range(7)])
    # One module runs in every second step, and so takes twice as long there.
    counts = np.array([4, 4, 4, 4, 2, 4, 4])
    times = clocks * 4 / counts
    layers = LayerClocks(names, counts, 1e-3 * times, 2e-3 * times, weights, step_s=0.001, steps=4, device="cpu")
    found = {part.name: part for part in list_step_parts(SUMMARY, "cpu", layers)}
    assert list(found) == NAMES
    assert not any(part.is_shared for part in found.values())
    forward = [found[name].loop_s or 0.0 for name in ("activation, layer 1", "activation, layer 2", "output")]
    backward = [found[f"back-propagation, layer {number}"].loop_s or 0.0 for number in (1, 2, 3)]
    # Nothing is lost, and nothing counts twice.
    assert sum(forward) == pytest.approx(0.028)
    assert backward == pytest.approx([2 * one for one in forward])
    if weighted == (1, 4, 6):
        # The first layer has its norm; the containers are between the layers.
        assert forward == pytest.approx([0.003, 0.018, 0.007])
    assert found["update of the weights"].loop_s == 0.001
    assert found["optimizer"].loop_s == pytest.approx(0.004 - 0.001)


@pytest.mark.parametrize(("taken", "mean"), [((1.0, math.nan, 3.0), 2.0), ((math.nan,), math.nan), ((), math.nan)])
def test_a_step_that_was_skipped_counts_for_no_time(taken: tuple[float, ...], mean: float, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step, seconds in enumerate(taken or (1.0,), 1):
        layers = np.ones((1, len(layer_times.COLUMNS)), np.float32)
        append_row(run.rows_path("layer_times"), ("head",), layer_times.COLUMNS, step, step, layers)
        if taken:
            row = np.array([[seconds]], np.float32)
            append_row(run.rows_path("optimizer_times"), ("optimizer",), layer_times.STEP_COLUMNS, step, step, row)
    clocks = read_layer_clocks(run, "cpu")
    assert clocks is not None
    assert clocks.step_s == pytest.approx(mean, nan_ok=True)


def test_a_module_that_some_steps_do_not_call_has_the_mean_of_those_that_do(tmp_path: Path) -> None:
    """Nothing of the other modules is lost when it is called, and its place is where it is called."""
    run = RunFolder(tmp_path)
    for step, rare in enumerate((None, 6.0, None, 2.0), 1):
        names = ("(network)", "first", "rare", "head") if rare else ("(network)", "first", "head")
        times = [(1.0, 2.0, 0.0), (3.0, 4.0, 9.0), *([(rare, 2 * rare, 8.0)] if rare else []), (step, step, 7.0)]
        path, row = run.rows_path("layer_times"), np.array(times, np.float32)
        append_row(path, names, layer_times.COLUMNS, step, step, row, keeps_names=True)
    clocks = read_layer_clocks(run, "cpu")
    assert clocks is not None
    assert clocks.names == ("(network)", "first", "rare", "head")
    assert (clocks.steps, clocks.counts.tolist()) == (4, [4, 4, 2, 4])
    assert clocks.forward_s.tolist() == [1, 3, 4, 2.5]
    assert clocks.backward_s.tolist() == [2, 4, 8, 2.5]
    assert clocks.weights.tolist() == [0, 9, 8, 7]
    bars, table = build_layer_panels(clocks)
    assert [row[:3] for row in table.data["rows"]][2] == ["rare", "2", "4000"]
    # Of a mean step of 3 + 7 + 12 / 2 + 5 seconds.
    assert [row[4] for row in table.data["rows"]] == ["14.3%", "33.3%", "28.6%", "23.8%"]
    assert "A module that some steps do not call" in bars.note


def test_a_run_of_before_has_no_stage_of_the_loss() -> None:
    stages = {stage: seconds for stage, seconds in SUMMARY["seconds_by_stage"].items() if stage != "loss"}
    found = by_name(changed(seconds_by_stage=stages))
    assert found["loss"] == StepPart(
        name="loss", stage="forward", loop_s=0.01, is_shared=True, loader_s=None, note="the loop's clock: forward"
    )
    assert [part.stage for part in found.values()].count("forward") == 4


def test_what_is_not_known_is_not_zero() -> None:
    older = changed(input={key: value for key, value in SUMMARY["input"].items() if key != "batches"})
    assert by_name(older)["read"].loader_s is None
    synthetic = by_name(changed(input=None))
    assert list(synthetic) == NAMES
    assert all(part.loader_s is None for part in synthetic.values())
    assert "nothing to do" in synthetic["read"].note
    fed = by_name(changed(input={"fed_batches": 7}))
    assert list(fed) == NAMES
    assert "in another process" in fed["read"].note
    assert list_step_parts(changed(step=0), "cpu") == ()
    assert build_panels({}, "cpu") == []


@pytest.mark.parametrize(
    ("tier", "device", "transport", "copied"),
    [
        ("none, x", "cpu", "part of pre-process", ""),
        ("memory, x", "cpu", "copied here before", ""),
        ("disk, x", "cpu", "part of read", ""),
        ("disk, x", "NVIDIA H200", "part of read", "wait"),
        ("device, x", "NVIDIA H200", "copied here before", ""),
    ],
)
def test_where_the_bytes_go(tier: str, device: str, transport: str, copied: str) -> None:
    found = by_name(changed(input={**SUMMARY["input"], "tier": tier}), device)
    assert transport in found["transport"].note
    assert found["transport to the device"].stage == copied
    assert found["queue"].is_shared == bool(copied)  # the hand-over is in the same measurement


def test_the_panels_show_each_measurement_once() -> None:
    bars, table = build_panels(SUMMARY, "cpu")
    assert bars.data["names"] == ["the loop", "the loader's thread"]
    loop = {stack["name"]: stack["values"][0] for stack in bars.data["stacks"]}
    assert sum(loop.values()) == pytest.approx(1e3 * (0.3 + 0.1 + 1.0 + 0.05 + 2.0 + 0.4 + 0.02) / 100)
    assert (loop["forward"], loop["loss"], loop["queue"]) == (10, 0.5, 3)
    rows = {row[0]: row[1:3] for row in table.data["rows"]}
    notes = {row[0]: row[3] for row in table.data["rows"]}
    assert (rows["activation, layer 1"], rows["output"]) == (["10", "-"], ["", "-"])
    assert notes["activation, layer 1"].endswith("observe.layer_times: true times single layers")
    assert (notes["activation, layer 2"], notes["output"]) == ("in the number above",) * 2
    assert rows["read"] == ["-", "2"]
    assert rows["pre-process"] == ["1", "11.1"]
    assert "first batch 10" in bars.note
    assert "evaluate 30" in bars.note
    assert "On a GPU" not in bars.note
    ranks = changed(seconds_by_stage={**SUMMARY["seconds_by_stage"], "reduce": 0.7}, input=None)
    bars, _ = build_panels(ranks, "NVIDIA H200")
    assert bars.data["names"] == ["the loop"]
    assert {stack["name"]: stack["values"] for stack in bars.data["stacks"]}["all-reduce"] == [7]
    assert "On a GPU" in bars.note


def test_reads_of_values_are_told() -> None:
    def note(found: dict[str, Any] | None, device: str = "cpu") -> str:
        return build_panels(SUMMARY | {"host_syncs": found}, device)[0].note

    reads: dict[str, Any] = {
        "steps": 3,
        "a_step": 2.0,
        "waits_a_step": 1.0,
        "places": [
            {"method": "item", "place": "net.py:31", "waits": True, "a_step": 1.0},
            {"method": "__bool__", "place": "net.py:33", "waits": False, "a_step": 1.0},
        ],
    }
    told = "Values read in Python: 2 per step, item at net.py:31 (1), __bool__ at net.py:33 (1); "
    assert note(reads).endswith(f"{told}on a GPU each read of a tensor there is a host-device sync.")
    assert note(reads, "NVIDIA H200").endswith(f"{told}1 of them waited for the device.")
    assert note({"steps": 3, "a_step": 0.0, "places": []}).endswith("Values read in Python: none in 3 steps.")
    assert "not counted" in note(None)
    assert "Values read" not in build_panels(SUMMARY, "cpu")[0].note, "runs of before do not tell"


READING = """
def reads(images, labels, keys):
    if images.sum().item() > 1e30:
        labels = labels * 0
    return (images if images.max() > 0 else -images), labels
"""


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((), "none in 3 steps"),
        (("transform=user.py:reads",), "2 per step, item at user.py:3 (1), __bool__ at user.py:5 (1); on a GPU"),
        (("--procs", "2", "transform=user.py:reads"), "4 per step, item at user.py:3 (1), __bool__ at user.py:5 (1),"),
        (("epochs=4",), "none in 3 steps"),
        (("epochs=3",), "not counted"),
        (("log_every_steps=1",), "not counted"),
    ],
)
def test_reads_of_values_in_a_real_run(overrides: tuple[str, ...], says: str, tmp_path: Path) -> None:
    """180 images in batches of 30: of steps 21 to 24, the last evaluates.

    The sum over ranks reads two values of its own on a CPU.
    """
    packed_digits(tmp_path)
    (tmp_path / "user.py").write_text(READING)
    recipe = write_recipe(tmp_path / "recipe.yaml", epochs=5, log_every_steps=10)
    run = tmp_path / "run"
    if "--procs" in overrides:
        said = finished("train", recipe, "--run", run, *overrides)
        assert said.status == 0, said.err
    else:
        headway("train", recipe, "--run", run, *overrides)
    headway("report", run)
    chart = Panel.from_json((run / "panels/anatomy.json").read_text())
    assert f"Values read in Python: {says}" in chart.note


def test_of_a_real_run(tmp_path: Path) -> None:
    """Its parts and what is outside of them are all of its time."""
    packed_digits(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", micro_batch=8)
    headway("train", recipe, "--run", tmp_path / "run")
    headway("report", tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    found = list_step_parts(summary, "cpu")
    once = {part.stage: part.loop_s or 0.0 for part in found if part.stage}
    assert set(once) == {"augment", "wait", "forward", "loss", "backward", "optimizer", "log"}
    outside = sum(summary["seconds_by_stage"].get(stage, 0.0) for stage in ("first batch", "evaluate", "checkpoint"))
    assert sum(once.values()) * summary["step"] + outside == pytest.approx(summary["seconds"])
    read, made = (next(part for part in found if part.name == name) for name in ("read", "pre-process"))
    assert read.loader_s is not None
    assert made.loader_s is not None
    assert min(made.loader_s, read.loader_s) > 0
    table = Panel.from_json((tmp_path / "run/panels/anatomy-table.json").read_text())
    assert [row[0] for row in table.data["rows"]] == NAMES
