"""An ensemble predicts the mean of its members' probabilities, wherever a run can be named."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from itertools import combinations
from operator import ne
from pathlib import Path
from typing import Any

import pytest
from tests._support import headway, packed_digits, refused, write_recipe
from tests.training._runs import weights
from tests.training.test_user_code import pack_a_list

from headway.api.run import Run
from headway.checkpoint.checkpoints import Checkpoints, read
from headway.data import opening

# Members with other networks, and another normalisation.
MEMBERS: dict[str, tuple[str, ...]] = {
    "a": (),
    "b": ("seed=5", "model.factory=net.py:wide"),
    "c": ("augment={mean: [40], std: [100]}", "evaluate.flip=true"),
}
KEPT = ("model.factory=net.py:dropout", "checkpoint.keep=4", "epochs=3", "seed=3")
AVERAGED = ("model.ema={half_life_steps: 4}", "model.batch_norm={recompute_batches: 4}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three members, one run with all its checkpoints, and the ensemble of the members."""
    folder = tmp_path_factory.mktemp("ensemble")
    packed_digits(folder)
    recipe = write_recipe(folder / "recipe.yaml")
    for name, options in (MEMBERS | {"kept": (*KEPT, *AVERAGED)}).items():
        headway("train", recipe, "--run", folder / name, *options)
    headway("ensemble", *(folder / name for name in MEMBERS), "--out", folder / "all")
    return folder


def study(*arguments: str | Path) -> Any:
    return headway("ensemble", *arguments, "--json").json()


def predict(run: Path, *images: Path) -> dict[str, dict[str, float]]:
    """The probabilities of all classes, by file."""
    rows = [json.loads(line) for line in headway("predict", run, *images, "--top", "10", "--json").out.splitlines()]
    endings = ["", *(f"_{number}" for number in range(2, 11))]
    return {row["path"]: {row[f"label{end}"]: row[f"probability{end}"] for end in endings} for row in rows}


def test_figures_are_those_of_evaluations(folder: Path) -> None:
    found = json.loads((folder / "all/study.json").read_text())
    for one, name in zip(found["members"], MEMBERS, strict=True):
        alone = headway("evaluate", folder / name, "--json").json()
        assert one["metrics"]["accuracy"] == pytest.approx(alone["accuracy"])
        assert one["metrics"]["nll"] == pytest.approx(alone["loss"], rel=1e-5)
    together = headway("evaluate", folder / "all", "--json").json()
    last = found["first"][-1]["metrics"]
    assert (last["accuracy"], last["nll"]) == pytest.approx((together["accuracy"], together["loss"]), rel=1e-5)
    assert found["first"][0]["metrics"] == pytest.approx(found["members"][0]["metrics"], rel=1e-5)
    for count, one in enumerate(found["first"], 1):
        alone_nll = [member["metrics"]["nll"] for member in found["members"][:count]]
        assert one["metrics"]["nll"] <= sum(alone_nll) / count + 1e-6
    assert 0 < found["disagreement"] < 1
    assert found["samples"] == 60
    times = [one["ms"] for one in (*found["members"], found["first"][-1])]
    assert min(times) > 0


def test_the_order_of_members_does_not_matter(folder: Path) -> None:
    found = study(*(folder / name for name in reversed(MEMBERS)))
    before = json.loads((folder / "all/study.json").read_text())
    assert found["first"][-1]["metrics"] == pytest.approx(before["first"][-1]["metrics"], rel=1e-5, abs=1e-6)
    assert found["disagreement"] == before["disagreement"]
    assert found["members"][0]["metrics"] == before["members"][-1]["metrics"]


def test_predictions_are_the_mean(folder: Path) -> None:
    with closing(opening.open(folder / "digits.packed/eval")) as held_out:
        images = [folder / "digits" / held_out.name(place) for place in range(len(held_out))]
    alone = [predict(folder / name, *images) for name in MEMBERS]
    for path, row in predict(folder / "all", *images).items():
        wanted = {label: sum(one[path][label] for one in alone) / len(alone) for label in row}
        assert row == pytest.approx(wanted, abs=2e-6)
    # The first column is the predicted class.
    labels = [[next(iter(row)) for row in one.values()] for one in alone]
    shares = [sum(map(ne, *pair)) / len(images) for pair in combinations(labels, 2)]
    found = json.loads((folder / "all/study.json").read_text())["disagreement"]
    assert found == pytest.approx(sum(shares) / len(shares))


def test_an_ensemble_in_python(folder: Path) -> None:
    run = Run(folder / "all")
    assert repr(run).endswith("all': ensemble of 3 networks)")
    assert run.classes == tuple("0123456789")
    found = run.predict(folder / "digits/3/000.png", top=2)
    assert found == [
        json.loads(headway("predict", folder / "all", folder / "digits/3/000.png", "--top", "2", "--json").out)
    ]
    assert run.evaluate()["samples"] == 60
    for use in (run.load_model, lambda: run.recipe):
        with pytest.raises(Exception, match=r"an ensemble has several networks and recipes\. Open one of its members"):
            use()


def test_checkpoints_are_members(folder: Path, tmp_path: Path) -> None:
    """Each has the weights that the run evaluated at its step, here averaged ones; the folder can be moved."""
    headway("ensemble", folder / "kept", "--snapshots", "--out", tmp_path / "made")
    (tmp_path / "made").rename(tmp_path / "moved")
    steps = [path.name for path in Checkpoints(folder / "kept/checkpoints").paths()[::-1]]
    assert sorted(path.name for path in (tmp_path / "moved/members").iterdir()) == steps
    assert len(steps) == 3
    best = json.loads((folder / "kept/summary.json").read_text())["best"]["step"]
    mine, saved = weights(tmp_path / f"moved/members/step-{best:08}"), weights(folder / "kept")
    assert mine.keys() == saved.keys()
    assert all(mine[name].equal(saved[name]) for name in saved)
    raw = read(Checkpoints(folder / "kept/checkpoints").paths()[0]).tensors
    newest = weights(tmp_path / "moved/members" / steps[-1])
    assert not newest["0.weight"].equal(raw["model/0.weight"])
    found = json.loads((tmp_path / "moved/study.json").read_text())
    # Members are in evaluation mode: this network has dropout.
    for one, step in zip(found["members"], steps, strict=True):
        alone = headway("evaluate", tmp_path / "moved/members" / step, "--json").json()
        assert one["metrics"]["nll"] == pytest.approx(alone["loss"], rel=1e-5)
    assert headway("evaluate", tmp_path / "moved", "--json").json()["loss"] == pytest.approx(
        found["first"][-1]["metrics"]["nll"], rel=1e-5
    )


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.thin(1)
def test_labels_that_are_no_single_class(tmp_path: Path, several: bool) -> None:
    """Sets of names, or numbers: the probabilities of each name, or the numbers, are averaged."""
    pack_a_list(tmp_path, several)
    recipe = write_recipe(tmp_path / "recipe.yaml", batch=10)
    for seed in (1, 2):
        headway("train", recipe, "--run", tmp_path / f"r{seed}", f"seed={seed}")
    found = study(tmp_path / "r1", tmp_path / "r2", "--out", tmp_path / "all")
    together = headway("evaluate", tmp_path / "all", "--json").json()
    for name, value in found["first"][-1]["metrics"].items():
        assert value == pytest.approx(together[name], rel=1e-5)
    assert together["loss"] <= sum(one["metrics"]["loss"] for one in found["members"]) / 2
    assert (found["disagreement"] is None) == (not several)
    image = tmp_path / "0.png"
    shown = [headway("predict", tmp_path / name, image, "--json").json() for name in ("r1", "r2", "all")]
    column = "probability_left" if several else "left"
    one, other, both = (row[column] for row in shown)
    assert both == pytest.approx((one + other) / 2, rel=1e-4, abs=2e-6)


def test_a_changed_member_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(folder / name, tmp_path / name)
    study(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "both")
    path = tmp_path / "b/weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    changed = f"{path}: member 2 of this ensemble has other weights than when the ensemble was made. Make the ensemble"
    for verb in (("evaluate", tmp_path / "both"), ("predict", tmp_path / "both", folder / "digits/3")):
        assert refused(*verb, status=1).startswith(changed)
    shutil.rmtree(tmp_path / "b")
    gone = refused("evaluate", tmp_path / "both", status=1)
    assert "member 2 of this ensemble cannot be used (there is no such run folder). Put it back" in gone


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "ensemble.json is damaged"),
        ('{"format": 1, "rule": "mean of probabilities", "members": []}', "not a list of two members or more"),
        ('{"format": 9, "rule": "mean of probabilities", "members": [1, 2]}', "not a format up to 1"),
        ('{"format": 1, "rule": "mean of probabilities", "members": [1, 2]}', "members[0]"),
        ('{"format": 1, "rule": "vote", "members": [1, 2]}', "it has 'vote' as rule"),
    ],
)
def test_a_damaged_file(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "ensemble.json").write_text(text)
    assert sentence in refused("evaluate", tmp_path, status=1)


def test_members_that_do_not_fit_together(folder: Path, tmp_path: Path) -> None:
    a, b = folder / "a", folder / "b"
    assert "an ensemble needs two runs or more. Name another run" in refused("ensemble", a, status=2)
    (tmp_path / "link").symlink_to(a)
    assert "link: this run is named twice" in refused("ensemble", a, tmp_path / "link", status=2)
    assert "all: this folder is not empty. Name another one with --out" in refused(
        "ensemble", a, b, "--out", folder / "all", status=2
    )
    assert "--snapshots takes the checkpoints of one run" in refused("ensemble", a, b, "--snapshots", status=2)
    assert "all: this is an ensemble" in refused("ensemble", a, folder / "all", status=2)
    for name in ("bare", "fewer", "larger", "twin"):
        shutil.copytree(a, tmp_path / name)
    (tmp_path / "bare/weights.safetensors").unlink()
    assert "bare: this run has no weights yet" in refused("ensemble", a, tmp_path / "bare", status=2)
    about = json.loads((a / "provenance.json").read_text())
    about["target"]["classes"][4] = "four"
    (tmp_path / "fewer/provenance.json").write_text(json.dumps(about))
    assert "the list of classes differs: number 4 is '4' and 'four'. Members need the same labels" in refused(
        "ensemble", a, tmp_path / "fewer", status=2
    )
    recipe = (a / "recipe.yaml").read_text()
    (tmp_path / "larger/recipe.yaml").write_text(recipe.replace("share: 1.0", "share: 0.5"))
    assert "data.crop.share differs: 1.0 and 0.5" in refused("ensemble", a, tmp_path / "larger", status=2)
    said = headway("ensemble", a, tmp_path / "twin")
    assert "have the same weights: the second one adds nothing" in said.err
    assert "disagree on 0.0% of the images" in said.out
    for verb in (("train", "--resume"), ("report",), ("landscape",)):
        assert "it predicts and is evaluated, and nothing else. Name one of its members" in refused(
            *verb, folder / "all", status=2
        )
