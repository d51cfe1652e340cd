"""`headway report RUN --against RUN2`: what both gave, what differs, and one sentence of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests._support import headway, packed_digits, records, refused, write_recipe

from headway.page.panel import Panel
from headway.report.comparison import Comparison, compare_runs
from headway.report.comparison_page import build_panels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("against")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml", epochs=4)
    headway("train", folder / "recipe.yaml", "--run", folder / "one")
    headway("train", folder / "recipe.yaml", "--run", folder / "two", "batch=60", "optimizer.lr=0.1", "stop_at.loss=0")
    return folder


def made(
    folder: Path, original: Path, rate: float, stages: dict[str, float], *, noise: float = 0.01, **more: Any
) -> Path:
    """A copy of a run as it would be at another rate, with some noise in its records."""
    shutil.copytree(original, folder)
    seconds = sum(stages.values())
    told = {"images_s": rate, "seconds": seconds, "seconds_by_stage": stages, "wait_share": stages["wait"] / seconds}
    summary = json.loads((folder / "summary.json").read_text()) | told | more
    (folder / "summary.json").write_text(json.dumps(summary))
    changed = []
    for place, record in enumerate(records(folder)):
        if record["kind"] == "train":
            record["images_s"] = rate * (1 + noise * (place % 3 - 1))
        changed.append(json.dumps(record) + "\n")
    (folder / "metrics.jsonl").write_text("".join(changed))
    return folder


def slow_and_fast(tmp_path: Path, folder: Path, **stages: float) -> Comparison:
    """One stage or several take less than before; a step is as many images in both."""
    usual = {"wait": 0.1, "forward": 0.5, "backward": 1.0}
    before, after = sum(usual.values()), sum((usual | stages).values())
    slow = made(tmp_path / "slow", folder / "one", 720 / before, usual)
    fast = made(tmp_path / "fast", folder / "one", 720 / after, usual | stages)
    return compare_runs(fast, slow)


def by_name(found: Comparison) -> dict[str, Panel]:
    return {one.name: one for one in build_panels(found)}


def test_numbers_are_those_of_the_summaries(folder: Path) -> None:
    said = headway("report", folder / "one", "--against", folder / "two", "--json").json()
    one, two = (json.loads((folder / name / "summary.json").read_text()) for name in ("one", "two"))
    for name in ("images_s", "seconds", "wait_share"):
        assert said["numbers"][name]["run"] == one[name]
        assert said["numbers"][name]["against"] == two[name]
        assert said["numbers"][name]["ratio"] == pytest.approx(one[name] / two[name])
    assert said["numbers"]["accuracy"]["run"] == records(folder / "one", "evaluate")[-1]["accuracy"]
    assert "seconds_to_reach" not in said["numbers"]  # only one of them had a goal
    assert {row["what"]: (row["run"], row["against"]) for row in said["recipe"]} == {
        "batch": ("30", "60"),
        "optimizer.lr": ("0.02", "0.1"),
        "stop_at": ("unset", "absent"),
        "stop_at.loss": ("absent", "0.0"),
    }
    assert said["machine"] == []
    assert said["report"] == str(folder / "one/against-two.html")
    assert "; the recipe differs in optimizer.lr, batch, stop_at, stop_at.loss; " in said["sentence"]
    assert f"; accuracy {one['accuracy']:.2%} against {two['accuracy']:.2%}." in said["sentence"]


def test_stages_of_other_batches_are_compared_by_image(folder: Path) -> None:
    found = compare_runs(folder / "one", folder / "two")
    assert found.unit == "ms per 1,000 images"
    for place, side in enumerate(found.sides):
        assert side.images == 720
        total = sum(both[place] for both in found.list_stages().values())
        assert total * side.images / 1000 == pytest.approx(side.summary["seconds"])


def test_the_page(folder: Path) -> None:
    said = headway("report", folder / "one", "--against", folder / "two", "--out", folder / "page.html")
    assert said.out.splitlines()[-1] == f"Page: {folder / 'page.html'}"
    html = (folder / "page.html").read_text(encoding="utf-8")
    found = compare_runs(folder / "one", folder / "two")
    assert found.describe() == said.out.splitlines()[0]
    drawn = by_name(found)
    assert drawn.keys() == {
        "result", "stages", "stage-table", "train-images_s", "train-loss", "evaluate-accuracy", "evaluate-loss",
        "recipe",
    }  # fmt: skip
    for one in drawn.values():
        assert f'id="{one.name}"' in html
    assert drawn["result"].note == found.describe()
    assert drawn["stages"].data["names"] == ["one", "two"]
    curve = drawn["train-loss"].data["series"]
    assert [series["name"] for series in curve] == ["one", "two"]
    assert curve[1]["y"] == [record["loss"] for record in records(folder / "two", "train")]
    cards = {card["label"]: card for card in drawn["result"].data["cards"]}
    assert {"images/s", "time", "waiting for data", "accuracy"} <= cards.keys()
    assert " x" in cards["images/s"]["note"]


def test_the_sentence_names_what_made_the_difference(tmp_path: Path, folder: Path) -> None:
    found = slow_and_fast(tmp_path, folder, wait=0.9)
    assert found.unit == "ms per step"
    assert found.describe().startswith(
        "0.67 times the images/s (300 against 450): waiting rose from 6% to 38%; the rec"
    )
    assert "; the recipes are the same" in found.describe()
    assert "against 450: 0.667 x" in by_name(found)["result"].data["cards"][0]["note"]
    assert "recipe" not in by_name(found)


def test_another_stage_than_waiting(tmp_path: Path, folder: Path) -> None:
    found = slow_and_fast(tmp_path, folder, forward=0.1)
    steps = found.run.summary["step"]
    rates = f"{720 / 1.2:,.0f} against {720 / 1.6:,.0f}"
    said = f"1.33 times the images/s ({rates}): forward fell from {500 / steps:.3g} to {100 / steps:.3g} ms per step;"
    assert found.describe().startswith(said)


def test_several_stages_together(tmp_path: Path, folder: Path) -> None:
    usual = {"wait": 0.1, "augment": 0.3, "forward": 0.5, "backward": 1.0}
    less = {stage: seconds - 0.1 for stage, seconds in usual.items()}
    slow = made(tmp_path / "slow", folder / "one", 720 / 1.9, usual)
    fast = made(tmp_path / "fast", folder / "one", 720 / 1.5, less)
    assert ": several stages together; " in compare_runs(fast, slow).describe()


@pytest.mark.parametrize(("rate", "noise", "told"), [(459, 0.0, False), (500, 0.2, False), (500, 0.01, True)])
def test_rates_that_vary_more_than_they_differ_are_the_same(
    tmp_path: Path, folder: Path, rate: float, noise: float, told: bool
) -> None:
    """And so are those that differ by less than anybody would care for."""
    stages = {"wait": 0.1, "forward": 0.5, "backward": 1.0}
    slow = made(tmp_path / "slow", folder / "one", 450, stages, noise=noise)
    fast = made(tmp_path / "fast", folder / "one", rate, {**stages, "forward": 720 / rate - 1.1}, noise=noise)
    found = compare_runs(fast, slow)
    assert found.is_distinguishable() is told
    same = f"About the same images/s ({rate} against 450); "
    varied = f"{rate} images/s against 450, a difference within the spread of each run; "
    assert found.describe().startswith((same, varied)) is not told


def test_where_the_machines_differ(tmp_path: Path, folder: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder / "one", other)
    about = json.loads((other / "provenance.json").read_text())
    about["host"]["processor"], about["device"] = "Another processor", "NVIDIA H200"
    (other / "provenance.json").write_text(json.dumps(about))
    found = compare_runs(other, folder / "one")
    assert [(one.what, one.run) for one in found.list_machine_differences()][1] == ("device", "NVIDIA H200")
    assert "; also different: processor, device; " in found.describe()
    table = by_name(found)["machine"].data
    assert table["columns"] == ["property", "other", "one"]
    assert table["rows"][0][1].startswith("Another processor, ")


def test_both_had_one_goal(tmp_path: Path, folder: Path) -> None:
    usual = {"wait": 0.1, "forward": 0.5, "backward": 1.0}
    slow = made(
        tmp_path / "slow", folder / "one", 450, usual, stop_at={"goal": {"accuracy": 0.5}, "seconds_to_reach": 2.0}
    )
    never = made(
        tmp_path / "never", folder / "one", 450, usual, stop_at={"goal": {"accuracy": 0.5}, "seconds_to_reach": None}
    )
    assert compare_runs(never, slow).to_json()["numbers"]["seconds_to_reach"] == {
        "run": None,
        "against": 2.0,
        "ratio": None,
    }
    card = next(
        one for one in by_name(compare_runs(never, slow))["result"].data["cards"] if one["label"] == "time to goal"
    )
    assert (card["value"], card["note"]) == ("not reached", "against 2.0s")


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path, folder: Path) -> None:
    for parent in ("a", "b"):
        shutil.copytree(folder / "one", tmp_path / parent / "run")
    found = compare_runs(tmp_path / "a/run", tmp_path / "b/run")
    assert [side.name for side in found.sides] == ["a/run", "b/run"]


def test_a_run_that_was_stopped_is_said_so(tmp_path: Path, folder: Path) -> None:
    stopped = made(
        tmp_path / "stopped", folder / "one", 450, {"wait": 0.1, "forward": 1.5}, finished=False, step=12, epochs=2.0
    )
    assert compare_runs(folder / "one", stopped).describe().endswith("; stopped was stopped at step 12 of 24.")


def test_what_cannot_be_compared_is_refused(tmp_path: Path, folder: Path) -> None:
    def said(one: Path, other: Path, *more: str | Path) -> str:
        return refused("report", one, "--against", other, *more, status=2)

    one, two = folder / "one", folder / "two"
    (tmp_path / "empty").mkdir()
    assert "there is no such run folder" in said(one, tmp_path / "nowhere")
    assert "this is not a run folder" in said(tmp_path / "empty", one)
    assert "both folders are the same run" in said(one, one)
    (tmp_path / "link").symlink_to(one)
    assert "both folders are the same run" in said(one, tmp_path / "link")
    assert "cannot be combined" in said(one, two, "--beside", two)
    assert "Add --against RUN" in refused("report", one, "--out", tmp_path / "page.html", status=2)
    running = tmp_path / "running"
    shutil.copytree(two, running)
    (running / "summary.json").unlink()
    for pair in ((one, running), (running, one)):
        sentence = said(*pair)
        assert "this run has not ended" in sentence
        assert f"headway train --resume {running}" in sentence
    begun = made(tmp_path / "begun", one, 450, {"wait": 0.1}, step=0)
    assert "made no step" in said(one, begun)
    assert not list(one.glob("against-running*"))
