"""Runs: stopped at a goal, repeated, evaluated; what their folders hold."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors.numpy import load_file
from tests._support import damage, digits, files, headway, packed_digits, records, refused, write_recipe

from headway.core.recipe import read_recipe
from headway.core.statistics import compute_interval
from headway.data import opening
from headway.setup.recipe import TrainRecipe
from headway.training import runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml")
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """A logistic regression that knows most digits; its last evaluation is not its best."""
    run = folder / "trained"
    overrides = ("epochs=20", "optimizer.lr=0.5", "log_ids=true")
    headway("train", folder / "recipe.yaml", "--run", run, *overrides)
    return run


def test_a_run_folder_has_what_the_design_names(trained: Path) -> None:
    names = {name for name in files(trained) if not name.startswith("checkpoints/step")}
    # Another test of this file, which may come first, evaluates the run.
    assert names - {"evaluation.json"} == {
        "recipe.yaml",
        "provenance.json",
        "metrics.jsonl",
        "host.rows",
        "ids.bin",
        "weights.safetensors",
        "summary.json",
        "panels/confusion.json",
        "panels/worst.json",
        "panels/first-batch.json",
        "checkpoints/latest",
    }
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["finished"] is True
    assert summary["step"] == summary["steps"] == 120
    assert summary["epochs"] == 20
    stages = {"first batch", "wait", "augment", "forward", "loss", "backward", "optimizer", "log"}
    assert summary["seconds_by_stage"].keys() == stages | {"evaluate", "checkpoint"}
    assert summary["seconds"] == pytest.approx(sum(summary["seconds_by_stage"].values()))
    last = records(trained, "evaluate")[-1]
    assert (summary["accuracy"], summary["loss"]) == (last["accuracy"], last["loss"])
    assert 0 <= summary["wait_share"] <= 1


def test_the_best_weights_are_kept(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    found = [(record["accuracy"], -record["loss"]) for record in records(trained, "evaluate")]
    assert summary["best"]["accuracy"] == max(found)[0]
    assert summary["best"]["step"] == 6 * (found.index(max(found)) + 1)  # of equal accuracies the lowest loss
    assert summary["best"]["step"] < summary["step"]


def test_evaluate_gives_the_best_of_the_summary(trained: Path, folder: Path) -> None:
    best = json.loads((trained / "summary.json").read_text())["best"]
    found = headway("evaluate", trained, "--json").json()
    assert found == {"loss": best["loss"], "accuracy": best["accuracy"], "samples": 60}
    assert json.loads((trained / "evaluation.json").read_text())["accuracy"] == best["accuracy"]
    said = headway("evaluate", trained)
    assert said.out == f"loss {best['loss']:.4f}  accuracy {best['accuracy']:.4f}  over 60 images\n"
    other = headway("evaluate", trained, "--data", folder / "digits.packed/train", "--json").json()
    assert other["samples"] == 180
    assert other["accuracy"] != best["accuracy"]
    assert refused("evaluate", trained, "--data", folder / "digits.packed", status=2)
    headway("evaluate", trained)


def test_evaluate_without_weights_or_data(folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "data.eval=null", "epochs=0.2")
    assert "this run has no evaluation set. Name one as --data or data=." in refused(
        "evaluate", tmp_path / "run", status=2
    )
    assert (
        headway("evaluate", tmp_path / "run", "--data", folder / "digits.packed/eval", "--json").json()["samples"] == 60
    )
    (tmp_path / "run/weights.safetensors").unlink()
    assert "this run has no weights yet" in refused("evaluate", tmp_path / "run", status=2)


def test_damaged_samples_are_left_out_of_an_evaluation(tmp_path: Path) -> None:
    packed_digits(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", epochs=1, data={"max_bad_share": 0.05})
    headway("train", recipe, "--run", tmp_path / "run")
    whole = headway("evaluate", tmp_path / "run", "--json").json()
    damage(tmp_path / "digits.packed/eval", 3, 4)
    found = headway("evaluate", tmp_path / "run", "--json").json()
    assert found["samples"] == 58
    assert found["loss"] != whole["loss"]
    headway("train", recipe, "--run", tmp_path / "again")
    assert records(tmp_path / "again", "evaluate")[0]["damaged"] == 2
    damage(tmp_path / "digits.packed/eval", 17, 18)
    assert "4 of 60 samples are damaged, more than data.max_bad_share 0.05." in refused(
        "evaluate", tmp_path / "run", status=1
    )


def predictions(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_predict_says_what_the_weights_say(trained: Path, folder: Path) -> None:
    """Against the network computed by hand from files, weights and the recipe's mean and std."""
    paths = sorted((folder / "digits").rglob("*.png"))[::7]
    said = headway("predict", trained, *paths)
    rows = predictions(said.out)
    assert [row["path"] for row in rows] == [str(path) for path in paths]
    weights = load_file(trained / "weights.safetensors")
    augment = yaml.safe_load((trained / "recipe.yaml").read_text())["augment"]
    pixels = np.stack([np.asarray(Image.open(path)).reshape(-1) for path in paths]).astype(np.float64)
    logits = (pixels - augment["mean"][0]) / augment["std"][0] @ weights["1.weight"].T.astype(np.float64)
    logits += weights["1.bias"]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert [row["label"] for row in rows] == [str(k) for k in probabilities.argmax(axis=1)]
    found = [float(row["probability"]) for row in rows]
    assert found == pytest.approx(probabilities.max(axis=1), abs=2e-6)
    right = sum(row["label"] == path.parent.name for row, path in zip(rows, paths, strict=True))
    assert right / len(rows) > 0.9


def test_predict_takes_folders_and_writes_csv_and_jsonl(trained: Path, folder: Path, tmp_path: Path) -> None:
    images = digits(tmp_path / "images", per_class=2)
    (images / "notes.txt").write_text("no image")
    (images / ".hidden.png").write_text("no image")
    screen = headway("predict", trained, images)
    assert len(predictions(screen.out)) == 20
    said = headway("predict", trained, images, "--out", tmp_path / "p.csv")
    assert (said.out, (tmp_path / "p.csv").read_text()) == ("", screen.out)
    assert f"Wrote 20 rows to {tmp_path / 'p.csv'}." in said.err
    headway("predict", trained, images, "--out", tmp_path / "p.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [{name: str(value) for name, value in row.items()} for row in rows] == predictions(screen.out)
    assert headway("predict", trained, images, "--json").out == (tmp_path / "p.jsonl").read_text()


def test_predict_refuses_what_is_no_image_and_leaves_the_old_file(trained: Path, folder: Path, tmp_path: Path) -> None:
    images = digits(tmp_path / "images", per_class=1)
    out = tmp_path / "p.csv"
    out.write_text("kept")
    whole = (images / "3/000.png").read_bytes()
    (images / "3/000.png").write_bytes(whole[: len(whole) // 2])
    assert f"{images / '3/000.png'}: this image is damaged." in refused(
        "predict", trained, images, "--out", out, status=1
    )
    (images / "3/000.png").write_text("hello")
    assert "this file is not an image." in refused("predict", trained, images, "--out", out, status=1)
    assert out.read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert "there is no such file or folder" in refused("predict", trained, tmp_path / "none", status=2)
    (tmp_path / "empty").mkdir()
    assert "there is no image to predict" in refused("predict", trained, tmp_path / "empty", status=2)
    (images / "3/000.png").unlink()
    assert "neither .csv nor .jsonl" in refused("predict", trained, images, "--out", tmp_path / "p.txt", status=2)


def test_stop_at_stops_early_and_says_when(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = headway("train", folder / "recipe.yaml", "--run", run, "epochs=30", "stop_at={accuracy: 0.6, loss: 2.0}")
    summary = json.loads((run / "summary.json").read_text())
    evaluations = records(run, "evaluate")
    reached = [e["accuracy"] >= 0.6 and e["loss"] <= 2.0 for e in evaluations]
    assert reached == [False] * (len(reached) - 1) + [True]
    assert summary["finished"] is True
    assert summary["step"] == evaluations[-1]["step"] < summary["steps"] == 180
    took = summary["stop_at"]["seconds_to_reach"]
    assert took == evaluations[-1]["seconds"]
    assert 0 < took <= summary["seconds"]
    for excluded in ("imports", "opening the data", "building the network"):
        assert excluded in summary["clock_excludes"]
    assert f"accuracy 0.6, loss 2.0 after {took:.1f} s (the clock leaves out {summary['clock_excludes']})" in said.out
    again = headway("train", "--resume", run)
    assert "nothing is left to do" in again.err
    assert json.loads((run / "summary.json").read_text()) == summary


def test_stop_at_that_is_never_reached(folder: Path, tmp_path: Path) -> None:
    said = headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "stop_at={loss: -1.5}")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["stop_at"] == {"goal": {"loss": -1.5}, "seconds_to_reach": None}
    assert summary["step"] == 12
    assert "loss -1.5 was not reached" in said.out


def test_stop_at_names_the_nearest_metric(folder: Path) -> None:
    recipe = folder / "recipe.yaml"
    assert "stop_at: no evaluation reports 'acuracy'. Did you mean 'accuracy'?" in refused(
        "train", recipe, "stop_at={acuracy: 0.9}", status=2
    )
    assert "Known here: accuracy, loss." in refused("train", recipe, "stop_at={zzz: 0.9}", status=2)


def test_the_last_evaluation_survives_a_kill_before_the_summary(trained: Path, tmp_path: Path) -> None:
    """Killed after its last checkpoint: resumed, it has the summary and the panels that the run would have had."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for name in ("summary.json", "panels/confusion.json", "panels/worst.json"):
        (run / name).unlink()
    headway("train", "--resume", run)
    found, expected = (json.loads((folder / "summary.json").read_text()) for folder in (run, trained))
    for name in ("accuracy", "loss", "best", "step", "finished", "damaged_samples"):
        assert found[name] == expected[name], name
    assert found["loss"] != found["best"]["loss"]
    assert json.loads((run / "panels/confusion.json").read_text())["data"]["values"]


def test_repeat_makes_runs_with_their_own_seeds(folder: Path, tmp_path: Path) -> None:
    said = headway(
        "train", folder / "recipe.yaml", "seed=7", "--run", tmp_path / "three", "--repeat", "3", "--json"
    ).json()
    assert said["runs"] == [str(tmp_path / "three" / str(number)) for number in (1, 2, 3)]
    values = []
    for number, run in enumerate(map(Path, said["runs"])):
        assert yaml.safe_load((run / "recipe.yaml").read_text())["seed"] == 7 + number
        origin = json.loads((run / "provenance.json").read_text())["origins"]["seed"]
        assert origin == ("command line" if number == 0 else f"auto: --repeat, run {number + 1}")
        values.append(json.loads((run / "summary.json").read_text())["accuracy"])
    assert len({(Path(run) / "weights.safetensors").read_bytes() for run in said["runs"]}) == 3
    mean, half = compute_interval(values)
    assert said["accuracy"] == {"mean": mean, "interval": half}
    shown = headway("train", folder / "recipe.yaml", "--run", tmp_path / "two", "--repeat", "2", "epochs=0.5").out
    assert f"2 runs in {tmp_path / 'two'}; mean and 95 % interval:" in shown
    assert [line.split()[0] for line in shown.splitlines()[1:]] == ["loss", "accuracy", "seconds", "images_s"]
    assert " +- " in shown
    shutil.rmtree(tmp_path / "two/1")
    assert "two/2: this run folder exists" in refused(
        "train", folder / "recipe.yaml", "--run", tmp_path / "two", "--repeat", "2", status=2
    )
    assert not (tmp_path / "two/1").exists()


def test_the_same_seed_gives_the_same_run(folder: Path, trained: Path, tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        headway("train", folder / "recipe.yaml", "--run", tmp_path / name, "model.factory=net.py:dropout")
        found.append((tmp_path / name / "weights.safetensors").read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [2, 3, 5, 20, 31, 32, 60, 1000])
def test_the_interval_is_students(count: int) -> None:
    from scipy import stats

    values = list(np.random.default_rng(count).normal(0.9, 0.01, count))
    mean, half = compute_interval(values)
    low, high = stats.t.interval(0.95, count - 1, loc=np.mean(values), scale=stats.sem(values))
    assert mean == pytest.approx(np.mean(values))
    assert (mean - half, mean + half) == pytest.approx((low, high), rel=1e-6)


def test_one_value_has_no_interval() -> None:
    mean, half = compute_interval([0.5])
    assert mean == 0.5
    assert math.isnan(half)


@pytest.mark.check
def test_a_runs_own_recipe_trains_again(trained: Path, tmp_path: Path) -> None:
    """Its paths start where the run's recipe lay, wherever the run folder is."""
    again = read_recipe(trained / "recipe.yaml", (), TrainRecipe)
    going_on = runs.reload_recipe(runs.RunFolder.open(trained))
    for key in runs.MACHINE_KEYS:
        part, _, name = key.rpartition(".")
        value = getattr(getattr(again.recipe, part) if part else again.recipe, name)
        assert value != "auto"
        going_on = going_on.resolve(key, value, "as it was")
    assert again.recipe == going_on.recipe
    headway("train", trained / "recipe.yaml", "--run", tmp_path / "again")
    for name in ("weights.safetensors", "recipe.yaml", "ids.bin"):
        assert (tmp_path / "again" / name).read_bytes() == (trained / name).read_bytes(), name


def test_names_of_run_folders(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for expected in ("digits", "digits-2"):
        found = headway("train", folder / "recipe.yaml", "name=digits", "epochs=0.1", "--json").json()
        assert found["run"] == f"runs/{expected}"
    assert "cannot name a folder" in refused("train", folder / "recipe.yaml", "name=../up", status=2)


def test_tensorboard_gets_the_records(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    headway("train", folder / "recipe.yaml", "--run", run, "sinks=[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("evaluate/accuracy")]
    assert shown == [(r["step"], pytest.approx(r["accuracy"])) for r in records(run, "evaluate")]
    assert [event.step for event in events.Scalars("train/loss")] == [r["step"] for r in records(run, "train")]


def test_tensorboard_of_a_resumed_run_has_each_step_once(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    headway("train", folder / "recipe.yaml", "--run", run, "sinks=[tensorboard]")
    shutil.rmtree(run / "checkpoints/step-00000012")
    time.sleep(1.1)  # an event file is named by the second
    headway("train", "--resume", run)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 13))
    assert [event.step for event in events.Scalars("evaluate/loss")] == [6, 12]


def test_trained_weights_need_no_data(trained: Path, folder: Path, tmp_path: Path) -> None:
    """Evaluated and used for predictions where the training data are not."""
    shutil.copytree(trained, tmp_path / "run")
    about = json.loads((tmp_path / "run/provenance.json").read_text())
    (tmp_path / "run/provenance.json").write_text(json.dumps({**about, "base": str(tmp_path)}))
    shutil.copy(folder / "net.py", tmp_path)
    images = digits(tmp_path / "images", per_class=2)
    expected = headway("predict", trained, images).out
    assert headway("predict", tmp_path / "run", images).out == expected
    shutil.copytree(folder / "digits.packed/eval", tmp_path / "digits.packed/eval")
    best = json.loads((trained / "summary.json").read_text())["best"]
    assert headway("evaluate", tmp_path / "run", "--json").json()["loss"] == best["loss"]


def test_the_provenance_names_the_data(trained: Path) -> None:
    about = json.loads((trained / "provenance.json").read_text())
    assert about["fingerprint"] == opening.open(trained.parent / "digits.packed/train").fingerprint
