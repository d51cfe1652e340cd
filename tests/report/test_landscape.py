"""`headway landscape`: what it draws is the loss of the networks, and what it cannot draw it says."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests._support import headway, packed_digits, refused, write_recipe

from headway.core.errors import UsageError
from headway.core.run_folder import RunFolder
from headway.data import opening
from headway.page.panel import Panel
from headway.report.landscape import Landscape, LandscapeOptions, compute_landscape
from headway.report.solution import open_solution

NET = {"factory": "headway.model:small_net", "args": {"width": 4}}
QUICK: dict[str, Any] = {"points": 3, "grid": 3, "samples": 30, "sharpness": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of one network with batch norm, that differ in seed, decay and batch; one of another network."""
    folder = tmp_path_factory.mktemp("landscape")
    packed_digits(folder, per_class=12)
    changed = {"optimizer": {"lr": 0.1}, "checkpoint": {"keep": 9}, "log_every_steps": 50}
    recipe = write_recipe(folder / "recipe.yaml", model=NET, epochs=3, **changed)
    for name, more in (
        ("a", ()),
        ("b", ("seed=1", "optimizer.weight_decay=0.01")),
        ("c", ("seed=2", "batch=45")),
        ("linear", ("model={factory: 'net.py:linear'}", "checkpoint.keep=2", "epochs=2")),
    ):
        headway("train", recipe, "--run", folder / name, *more)
    return folder


def drawn(folder: Path, *names: str, **options: Any) -> Landscape:
    return compute_landscape([folder / name for name in names], LandscapeOptions(**QUICK | options))


@pytest.mark.check
def test_at_the_solution_it_is_the_evaluation(folder: Path) -> None:
    """And over a whole set, which has no order then."""
    held_out = json.loads(headway("evaluate", folder / "a", "--json").out)
    found = drawn(folder, "a", samples=10_000, points=5)
    (one,), (line,) = found.runs, found.lines
    assert one.samples == {"training": 90, "evaluation": 30}
    for metric in ("loss", "accuracy"):
        assert one.numbers["evaluation"][metric] == pytest.approx(held_out[metric], rel=1e-5)
        middle = line.x.index(0.0)
        assert line.curves["evaluation"][metric][middle] == one.numbers["evaluation"][metric]
    assert line.x == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert line.statistics == "kept"


@pytest.mark.parametrize("sharpness", [False, pytest.param(True, marks=pytest.mark.check)])
def test_it_is_the_same_from_the_same_seed(folder: Path, sharpness: bool) -> None:
    one, again = (drawn(folder, "a", seed=3, samples=20, sharpness=sharpness) for _ in range(2))
    other = drawn(folder, "a", seed=4, samples=20)
    assert one == again
    assert one.lines[0].curves != other.lines[0].curves
    assert one.runs[0].numbers != other.runs[0].numbers, "another sample"


def test_a_line_between_two_runs_begins_and_ends_at_them(folder: Path) -> None:
    found = drawn(folder, "a", "b", between=True, points=9, statistics="keep")
    line = found.lines[-1]
    assert (line.kind, line.name, line.statistics) == ("between", "a to b", "kept")
    assert line.x == [-0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    for place, run in ((0.0, found.runs[0]), (1.0, found.runs[1])):
        for name, curve in line.curves.items():
            for metric, values in curve.items():
                assert values[line.x.index(place)] == pytest.approx(run.numbers[name][metric], rel=1e-4)
    weights = [load_file(folder / name / "weights.safetensors") for name in "ab"]
    trained = [name for name in weights[0] if name.rpartition(".")[2] in ("weight", "bias")]
    apart = math.sqrt(sum(float((weights[0][name] - weights[1][name]).square().sum()) for name in trained))
    assert line.distance == pytest.approx(apart, rel=1e-5)
    losses = np.array(line.curves["training"]["loss"][2:7], float)
    assert line.barrier["training"] == pytest.approx(max(losses - np.linspace(losses[0], losses[-1], 5)), abs=1e-6)


def test_statistics_of_batch_norm_fit_every_place_between(folder: Path) -> None:
    """Recomputed, they make of the middle what its weights can do; moved along, they fit no network."""
    kept, made = (
        drawn(folder, "a", "b", between=True, samples=90, statistics=how).lines[-1] for how in ("keep", "auto")
    )
    assert (kept.statistics, made.statistics) == ("kept", "recomputed")
    here = [line.curves["training"]["loss"][line.x.index(0.5)] for line in (kept, made)]
    assert here[0] != pytest.approx(here[1], rel=1e-3)


def test_planes_hold_the_line_and_the_solutions(folder: Path) -> None:
    found = drawn(folder, "a", "b", "c", plane=True, between=True, path=True, grid=3)
    kinds = [(plane.kind, plane.name) for plane in found.planes]
    assert kinds == [
        ("around", "a"), ("path", "a"), ("around", "b"), ("path", "b"), ("around", "c"), ("path", "c"),
        ("between", "a, b, c"),
    ]  # fmt: skip
    around, line = found.planes[0], found.lines[0]
    assert (around.x, around.y) == ([-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0])
    for name, curve in line.curves.items():  # the plane's first direction is the line's
        rows = around.surfaces[name]["loss"]
        assert rows[1] == [curve["loss"][line.x.index(at)] for at in around.x]
    assert around.marks == [("a", 0.0, 0.0)]
    path = found.planes[1]
    assert [name for name, _, _ in path.marks] == ["step 3", "step 6", "step 9"]
    assert path.marks[-1][1:] == (0.0, 0.0)
    assert 0.5 < sum(path.shares) <= 1.000001
    assert path.x[0] < min(x for _, x, _ in path.marks) < max(x for _, x, _ in path.marks) < path.x[-1]
    between = found.planes[-1]
    assert [name for name, _, _ in between.marks] == ["a", "b", "c"]
    assert between.marks[1][1] == pytest.approx(found.lines[3].distance, rel=1e-5)
    assert math.hypot(*between.marks[2][1:]) == pytest.approx(found.lines[4].distance, rel=1e-5)


def test_runs_are_told_apart_by_what_differs(folder: Path) -> None:
    found = drawn(folder, "a", "b", "c")
    recipes = {one.name: one.recipe for one in found.runs}
    assert recipes["a"].keys() == {"batch", "optimizer.lr", "optimizer.weight_decay", "seed"}
    assert [recipes[name]["batch"] for name in "abc"] == [30, 30, 45]
    assert recipes["b"]["optimizer.weight_decay"] == 0.01
    shutil.copytree(folder / "a", folder / "other/a")
    assert [one.name for one in drawn(folder, "a", "other/a").runs] == [f"{folder.name}/a", "other/a"]


def test_networks_of_two_kinds_side_by_side(folder: Path) -> None:
    """With and without skip connections, for example."""
    found = drawn(folder, "a", "linear")
    assert [line.statistics for line in found.lines] == ["kept", "none"]


@pytest.mark.check
def test_rescaled_weights_have_the_same_curve(folder: Path) -> None:
    """A convolution ten times as large, and what its batch norm takes out again: the curve and the relative eigenvalue
    stay, to what batch norm adds to the variance."""
    with closing(open_solution("a", RunFolder.open(folder / "a"), "both", 60, 0)) as solution:
        names = dict(solution.setup.model.named_buffers())

        def measured() -> tuple[list[float], float, float]:
            from headway.observe.directions import draw_direction

            direction = draw_direction(solution.setup.model, 1)
            curves = solution.measure_line([[(at, direction)] for at in (-0.5, 0.0, 0.5)], recompute=False)
            _, plain, relative = solution.measure_sharpness(1e-3, 0)
            assert plain is not None
            assert relative is not None
            return [float(value or 0) for value in curves["training"]["loss"]], plain.value, relative.value

        before, plain, relative = measured()
        with torch.no_grad():
            for layer in ("layer1", "layer2", "layer3"):
                solution.setup.model.get_parameter(f"{layer}.conv.weight").mul_(10)
                names[f"{layer}.norm.running_mean"].mul_(10)
                names[f"{layer}.norm.running_var"].mul_(100)
        after, other, still = measured()
    assert after == pytest.approx(before, rel=2e-2)
    assert still == pytest.approx(relative, rel=5e-2)
    assert other < plain


def test_training_goes_on_from_a_run_that_was_drawn(folder: Path) -> None:
    """Drawing changes nothing of a run but its panels and its page."""
    before = {path: path.read_bytes() for path in (folder / "b").rglob("*") if path.is_file()}
    headway("landscape", folder / "b", "--points", "3", "--samples", "20", "--no-sharpness")
    after = {path: path.read_bytes() for path in (folder / "b").rglob("*") if path.is_file()}
    new = {path.relative_to(folder / "b").as_posix() for path in after.keys() - before.keys()}
    assert {"landscape.html", "panels/landscape-numbers.json", "panels/landscape-around-loss.json"} <= new
    assert all(name.startswith(("landscape", "panels/landscape-")) for name in new)
    assert {path: after[path] for path in before} == before


@pytest.mark.check
def test_the_verb_its_page_and_its_report(folder: Path) -> None:
    options = ("--points", "3", "--grid", "3", "--samples", "20", "--plane", "--path")
    found = headway("landscape", folder / "c", *options, "--json").json()
    assert found["page"] == str(folder / "c/landscape.html")
    sharp = found["runs"][0]["sharpness"]
    assert sharp["keskar"]["percent"] > 0
    assert sharp["eigenvalue"]["value"] > 0
    assert sharp["relative"]["value"] > 0
    panels = {path.stem: Panel.from_json(path.read_text()) for path in (folder / "c/panels").glob("landscape-*.json")}
    assert panels.keys() == {
        "landscape-numbers", "landscape-around-loss", "landscape-around-accuracy",
        *(f"landscape-plane-{n}-{which}" for n in (0, 1) for which in ("training", "evaluation")),
    }  # fmt: skip
    assert panels["landscape-plane-1-training"].data["path"] is True
    headway("report", folder / "c")
    for page in ("landscape.html", "report.html"):
        html = (folder / "c" / page).read_text()
        assert "Loss landscape" in html
        assert "by power iteration" in html
    headway("landscape", folder / "c", "--points", "3", "--samples", "20", "--no-sharpness")
    assert not (folder / "c/panels/landscape-plane-0-training.json").exists(), "what is drawn anew takes its place"


def test_several_runs_make_a_page_of_their_own(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--between", "--points", "3", "--grid", "3", "--samples", "20", "--no-sharpness")
    said = headway("landscape", folder / "a", folder / "b", *options)
    assert said.out.endswith("Page: landscape.html\n")
    assert "a to b: Distance " in said.out
    assert [line.split()[0] for line in said.out.splitlines()[:3]] == ["run", "a", "b"]
    assert (tmp_path / "landscape.html").is_file()
    headway("landscape", folder / "a", folder / "b", *options, "--out", tmp_path / "other.html")
    assert (tmp_path / "other.html").is_file()
    assert not (folder / "a/landscape.html").exists()


def test_a_loss_that_is_no_number_is_a_gap(folder: Path) -> None:
    line = drawn(folder, "linear", radius=3e38).lines[0]
    assert line.curves["training"]["loss"][0] is None
    assert line.curves["training"]["loss"][1] is not None
    assert "NaN" not in json.dumps(line.curves)


def test_damaged_samples_are_left_out(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tests._support import damage

    packed_digits(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", data={"max_bad_share": 0.5}, epochs=1)
    headway("train", recipe, "--run", tmp_path / "run")
    damage(tmp_path / "digits.packed/eval", 3, 7)
    found = compute_landscape([tmp_path / "run"], LandscapeOptions(**QUICK | {"samples": 1000}))
    assert found.runs[0].samples == {"training": 180, "evaluation": 58}
    assert any("2 of 60 samples of digits.packed/eval are damaged and left out." in text for text in caplog.messages)
    assert len(opening.open(tmp_path / "digits.packed/eval")) == 60


def test_what_cannot_be_drawn_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    a, linear = folder / "a", folder / "linear"
    bare = tmp_path / "bare"
    shutil.copytree(a, bare)
    (bare / "weights.safetensors").unlink()
    for arguments, sentence in (
        ((tmp_path / "none",), "there is no such run folder"),
        ((bare,), "this run has no weights yet"),
        ((a, "--between"), "--between: a line between solutions needs two runs"),
        ((a, linear, "--between"), "this run has another network than"),
        ((a, a), "this run is named twice"),
        ((linear, "--path"), "a path needs at least three checkpoints, and this run kept 2"),
        ((a, "--points", "2"), "--points 2 is too few. Give 3 or more"),
        ((a, "--grid", "1"), "--grid 1 is too few"),
        ((a, "--samples", "0"), "--samples 0 is too few"),
        ((a, "--radius", "0"), "--radius 0 is not a distance"),
        ((a, "--epsilon", "nan"), "--epsilon nan is not a distance"),
        ((a, "--sets", "all"), "there is no --sets 'all'. Known here: both, eval, train."),
        ((a, "--statistics", "keeps"), "there is no --statistics 'keeps'. Did you mean 'keep'?"),
        ((a, "--sets", "eval"), "sharpness needs the training set. Add --no-sharpness"),
        (
            (a, "--sets", "eval", "--no-sharpness", "--statistics", "recompute"),
            "batch norm statistics need the training set",
        ),
    ):
        assert sentence in refused("landscape", *arguments, status=2), arguments
    with pytest.raises(UsageError, match="no run was given"):
        compute_landscape([], LandscapeOptions())


@pytest.mark.check
def test_a_data_set_that_is_gone_or_never_was(folder: Path, tmp_path: Path) -> None:
    packed_digits(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml")
    headway("train", recipe, "--run", tmp_path / "run")
    headway("train", recipe, "--run", tmp_path / "alone", "data.eval=null")
    quick = ("--points", "3", "--samples", "20", "--no-sharpness")
    sentence = refused("landscape", tmp_path / "alone", "--sets", "eval", *quick, status=2)
    assert "the run has no evaluation set" in sentence
    said = headway("landscape", tmp_path / "alone", *quick)
    assert "has no evaluation set: only its training set is drawn." in said.err
    shutil.rmtree(tmp_path / "digits.packed/eval")
    for extra, status in (((), 2), (("--sets", "train"), 0), (("--sets", "eval"), 2)):
        said = headway("landscape", tmp_path / "run", *quick, *extra, status=status)
        assert ("Or draw only the other set: --sets train" in said.err) == (extra == ())
    synthetic = tmp_path / "s.yaml"
    synthetic.write_text(
        "data: {train: synthetic, synthetic: {samples: 64, size: [8, 8]}}\n"
        "model: {factory: 'headway.model:small_net', args: {width: 4}}\n"
        "optimizer: {name: sgd, lr: 0.1}\nbatch: 16\nepochs: 1\nprecision: fp32\n"
    )
    headway("train", synthetic, "--run", tmp_path / "synthetic")
    assert "trained on synthetic data, so there is nothing to draw" in refused(
        "landscape", tmp_path / "synthetic", status=2
    )


def test_runs_of_other_classes_or_another_normalisation_are_not_joined(folder: Path, tmp_path: Path) -> None:
    recipe = folder / "recipe.yaml"
    headway("train", recipe, "--run", tmp_path / "other", "epochs=1", "augment.mean=[100]", "augment.std=[50]")
    sentence = refused("landscape", folder / "a", tmp_path / "other", "--between", status=2)
    assert "normalises its images differently from" in sentence
    assert "Leave --between out: the runs are then drawn side by side." in sentence
