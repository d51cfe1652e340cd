"""The user's own optimizer, schedule, loss and metrics by import path, in whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests._support import damage, finished, headway, packed_digits, records, refused, write_recipe

import headway as headway_api
from headway.checkpoint.checkpoints import Checkpoints
from headway.data import opening
from headway.setup.set_metrics import compute_auc

OWN = '''
import math
import numpy as np
import torch
from torch.nn import functional as F
from headway.setup.set_metrics import SetMetric

class Counting(torch.optim.Optimizer):
    """State in Python numbers, in a list, and in a group."""
    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": 0.0, "steps": 0})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["seen"], state["mean"] = [0.0], torch.zeros_like(p)
                state["seen"] = [state["seen"][0] * 0.9 + float(p.grad.norm())]
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                p.add_(state["mean"] / (1 + state["seen"][0]), alpha=-group["lr"] / group["steps"] ** 0.1)

def wave(epochs, *, waves=3):
    return lambda epoch: 0.6 + 0.4 * math.cos(2 * math.pi * waves * epoch / epochs)

def focal(outputs, labels, *, gamma=2.0):
    losses = F.cross_entropy(outputs, labels, reduction="none")
    return (1 - (-losses).exp()) ** gamma * losses

def hard(outputs, labels):
    return F.nll_loss(outputs.log_softmax(1), labels, reduction="none")

def averaged(outputs, labels):
    return F.cross_entropy(outputs, labels)

def detached(outputs, labels):
    return F.cross_entropy(outputs.detach(), labels, reduction="none")

class Center(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = torch.nn.Parameter(torch.zeros(10))

def margin(outputs, labels):
    best = outputs.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]

def within(outputs, labels, *, distance):
    return ((outputs.argmax(1) - labels).abs() <= distance).float()

def total(outputs, labels):
    return outputs.sum()

class Kappa(SetMetric):
    names = ("kappa", "seen")
    def __init__(self, target):
        self.classes = len(target.classes)
    def collect(self, outputs, labels):
        return torch.stack([labels, outputs.argmax(1)], 1)
    def compute(self, collected):
        n = len(collected)
        cells = np.zeros((self.classes, self.classes))
        np.add.at(cells, tuple(collected.T), 1)
        chance = (cells.sum(0) * cells.sum(1)).sum() / n**2
        return {"kappa": (np.trace(cells) / n - chance) / (1 - chance), "seen": n}

class Broken(Kappa):
    def compute(self, collected):
        return {"kappa": 1.0}
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    packed_digits(folder)
    (folder / "own.py").write_text(OWN)
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:dropout"},
        optimizer={"name": None, "factory": "own.py:Counting", "lr": 0.5, "args": {"beta": 0.8}},
        schedule={"factory": "own.py:wave", "args": {"waves": 2}},
        task={
            "loss": "own.py:focal",
            "loss_args": {"gamma": 1.5},
            "metrics": ["top3", "f1", "balanced_accuracy", "auc", "own.py:margin", "own.py:Kappa"],
            "primary": "f1",
        },
        checkpoint={"every_steps": 5, "keep": 9},
    )
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    headway("train", folder / "recipe.yaml", "--run", folder / "whole", "epochs=4")
    return folder / "whole"


def without_clock(run: Path) -> list[dict[str, Any]]:
    clock = ("seconds", "images_s", "wait_share")
    return [{name: value for name, value in record.items() if name not in clock} for record in records(run)]


def test_a_run_of_own_parts_resumes_exactly(folder: Path, run: Path) -> None:
    resumed = folder / "resumed"
    shutil.copytree(run, resumed)
    for path in sorted((resumed / "checkpoints").glob("step-*"))[3:]:
        shutil.rmtree(path)
    assert "Resumed at step 15 of 24" in headway("train", "--resume", resumed).err
    assert without_clock(resumed) == without_clock(run)
    one, other = (Checkpoints(path / "checkpoints").newest() for path in (run, resumed))
    assert one is not None
    assert other is not None
    assert one.tensors.keys() == other.tensors.keys()
    assert "optimizer_values" in one.tensors
    for name, value in one.tensors.items():
        assert value.equal(other.tensors[name]), name
    assert (resumed / "weights.safetensors").read_bytes() == (run / "weights.safetensors").read_bytes()


def test_every_metric_is_that_of_the_whole_set(folder: Path, run: Path) -> None:
    """From what `predict` writes for the files of the evaluation set, and from the counts of the record."""
    best = json.loads((run / "summary.json").read_text())["best"]
    evaluated = records(run, "evaluate")
    assert best["f1"] == max(record["f1"] for record in evaluated)
    (record,) = [record for record in evaluated if record["step"] == best["step"]]
    data = opening.open(folder / "digits.packed/eval")
    names = [data.name(sample) for sample in range(len(data))]
    said = headway("predict", run, *(folder / "digits" / name for name in names), "--top", "10", "--json")
    rows = [json.loads(line) for line in said.out.splitlines()]
    ranks = [[row[f"label{f'_{k}' if k > 1 else ''}"] for k in range(1, 11)] for row in rows]
    truth = [str(label) for label in data.label]
    assert all(sorted(rank) == sorted(data.classes) for rank in ranks)
    assert record["top3"] == pytest.approx(
        np.mean([label in rank[:3] for label, rank in zip(truth, ranks, strict=True)])
    )
    right = [sum(label == one == rank[0] for label, rank in zip(truth, ranks, strict=True)) for one in data.classes]
    assert record["classes"]["right"] == right
    assert record["classes"]["count"] == [truth.count(one) for one in data.classes]
    assert record["classes"]["predicted"] == [sum(rank[0] == one for rank in ranks) for one in data.classes]
    recalls = np.array(right) / record["classes"]["count"]
    assert record["balanced_accuracy"] == pytest.approx(recalls.mean())
    assert record["accuracy"] == pytest.approx(sum(right) / len(rows))
    assert record["seen"] == len(rows)
    assert record["kappa"] < record["accuracy"]
    by_class = [
        {row[f"label{end}"]: row[f"probability{end}"] for end in ("", *(f"_{k}" for k in range(2, 11)))} for row in rows
    ]
    areas = [
        compute_auc(np.array([row[one] for row in by_class]), np.array([label == one for label in truth]))
        for one in data.classes
    ]
    assert record["auc"] == pytest.approx(np.mean(areas), abs=0.01)  # type: ignore[arg-type]
    trained = records(run, "train")[-1]
    assert {"top3", "margin", "accuracy"} <= trained.keys()
    assert not {"f1", "auc", "kappa"} & trained.keys()


def test_the_report_and_the_verb_have_them(folder: Path, run: Path) -> None:
    said = headway("evaluate", run, "--json").json()
    best = json.loads((run / "summary.json").read_text())["best"]
    assert {name: said[name] for name in ("f1", "kappa", "auc", "top3")} == {
        name: best[name] for name in ("f1", "kappa", "auc", "top3")
    }
    about = json.loads((run / "evaluation.json").read_text())["classes"]
    assert about.keys() == set("0123456789")
    assert np.mean([one["f1"] for one in about.values()]) == pytest.approx(said["f1"])
    headway("report", run)
    table = json.loads((run / "panels/classes.json").read_text())
    rows = {row[0]: row[1:] for row in table["data"]["rows"]}
    assert rows["3"][:4] == [
        f"{about['3']['count']:,}",
        *(f"{about['3'][name]:.1%}" for name in ("precision", "recall", "f1")),
    ]
    assert f"epoch {best['epoch']:.4g}" in table["note"]


def test_the_python_interface_ranks_classes_too(folder: Path, run: Path) -> None:
    (row,) = headway_api.Run(run).predict(folder / "digits/3/000.png", top=2)
    assert list(row) == ["path", "label", "probability", "label_2", "probability_2"]
    assert row["probability"] >= row["probability_2"]


@pytest.mark.check
def test_a_dry_run_knows_the_state_of_an_own_optimizer(folder: Path) -> None:
    """RMSprop with momentum: two arrays of the parameter's size, and a count."""
    optimizer = "optimizer={factory: 'torch.optim:RMSprop', lr: 0.001, args: {momentum: 0.5}}"
    out = folder / "own.workload.json"
    headway("train", folder / "recipe.yaml", optimizer, "--dry-run", "--out", out)
    update = json.loads(out.read_text())["step"]["update"]
    weights = sum(layer["gradient_bytes"] for layer in json.loads(out.read_text())["layers"])
    assert 2 * weights < update["state_bytes"] < 2.1 * weights


def test_the_schedule_is_drawn(folder: Path) -> None:
    said = headway("schedule", folder / "recipe.yaml", "epochs=4", "--json").json()
    curve = said["curve"]
    for epoch, rate in zip(curve["epoch"], curve["lr"], strict=True):
        assert rate == pytest.approx(0.5 * (0.6 + 0.4 * np.cos(2 * np.pi * 2 * epoch / 4)))
    assert "learning rate" in headway("schedule", folder / "recipe.yaml").out


@pytest.mark.check
def test_the_shortest_form(folder: Path) -> None:
    """torch's own optimizer and loss, and a schedule as one path; the state is exact with 16-bit weights too."""
    overrides = (
        "optimizer={factory: 'torch.optim:RMSprop', lr: 0.001, args: {momentum: 0.5}}",
        "schedule=own.py:wave",
        "task={loss: 'torch.nn:CrossEntropyLoss', loss_args: {label_smoothing: 0.1}, metrics: [top2], primary: loss}",
        "precision=bf16",
        "half_weights=true",
        "augment={mixup: {alpha: 0.2}}",
    )
    headway("train", folder / "recipe.yaml", "--run", folder / "short", *overrides)
    best = json.loads((folder / "short/summary.json").read_text())["best"]
    assert best["loss"] == min(record["loss"] for record in records(folder / "short", "evaluate"))


REFUSED = {
    "a mean": (
        "task={loss: 'own.py:averaged'}",
        "task.loss: 'own.py:averaged' gives the shape () for 2 samples, and should give the shape (2,): one number",
    ),
    "no gradient": ("task={loss: 'own.py:detached'}", "gives losses without a gradient, so nothing would be trained"),
    "parameters": ("task={loss: 'own.py:Center'}", "has parameters of its own, which nothing would train"),
    "a wrong argument": (
        "task={loss: 'own.py:focal', loss_args: {gama: 1}}",
        "task.loss_args.gama: 'own.py:focal' has no argument 'gama'. Did you mean 'gamma'?",
    ),
    "arguments alone": ("task={loss_args: {gamma: 1}}", "loss_args are for the loss that you name: set loss"),
    "smoothing": (
        "task={loss: 'own.py:focal', args: {label_smoothing: 0.1}}",
        "label_smoothing belongs to the loss that task.loss replaces",
    ),
    "no metric": ("task={metrics: [f2]}", "there is no metric 'f2' for labels that are classes. Known here: auc, "),
    "of numbers": ("task={metrics: [rmse]}", "there is no metric 'rmse' for labels that are classes"),
    "always right": ("task={metrics: [top10]}", "'top10' is always right for 10 classes. Take top9 or less"),
    "twice": ("task={metrics: [f1, f1]}", "two metrics are called 'f1'"),
    "taken": ("task={metrics: [{factory: 'own.py:margin', name: accuracy}]}", "reports 'accuracy' already"),
    "an own mean": ("task={metrics: ['own.py:total']}", "gives the shape () for 2 samples"),
    "an argument": ("task={metrics: ['own.py:within']}", "missing a required argument: 'distance'"),
    "a record's": ("task={metrics: [{factory: 'own.py:margin', name: step}]}", "a metric cannot be called 'step'"),
    "broken": ("task={metrics: ['own.py:Broken']}", "Broken.compute gives kappa, and its names are kappa, seen"),
    "a goal": ("stop_at={f3: 1}", "no evaluation reports 'f3'. Known here: accuracy, auc, "),
    "a goal in per cent": (
        "stop_at={accuracy: 90}",
        "lies between 0 and 1, so 90 is never reached. For 90 % write 0.9.",
    ),
    "primary": ("task={primary: f1}", "its primary metric 'f1' is not reported"),
    "a name": ("optimizer={name: 'own.py:Counting', lr: 1}", "an import path is not a name. Write factory: 'own.py"),
    "its option": ("optimizer={factory: 'own.py:Counting', lr: 1, momentum: 0.9}", "Write args: {momentum: 0.9}"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.thin(4)
def test_parts_of_the_wrong_form_are_refused(folder: Path, case: str) -> None:
    override, expected = REFUSED[case]
    sentence = refused("train", folder / "recipe.yaml", override, "--run", folder / "refused", status=2)
    assert expected in sentence
    assert not (folder / "refused").exists()


def test_a_loss_that_cannot_take_soft_labels_is_told_before_the_run(folder: Path) -> None:
    more = ("task={loss: 'own.py:hard'}", "augment={mixup: {alpha: 0.2}}")
    said = headway("train", folder / "recipe.yaml", *more, "--run", folder / "soft", status=1)
    assert "With mixup or cutmix, labels are float [b, classes]: take them too." in said.err
    assert not (folder / "soft").exists()


def test_top_of_what_has_no_classes_is_refused(folder: Path, run: Path, tmp_path: Path) -> None:
    assert "top: there are 10 classes. Set it to at most 10." in refused(
        "predict", run, folder / "digits/3", "--top", "11", status=2
    )
    chance = np.random.default_rng(0)
    lines = ["path,value"]
    for number in range(40):
        level = int(chance.integers(0, 255))
        Image.fromarray(np.full((8, 8), level, np.uint8)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{level / 255}")
    (tmp_path / "values.csv").write_text("\n".join(lines) + "\n")
    headway("pack", tmp_path / "values.csv", tmp_path / "digits.packed", "--split", "0.25")
    loss = {"loss": "huber", "loss_args": {"delta": 0.1}}
    task = {**loss, "metrics": ["mae", "rmse", "r2"], "primary": "rmse"}
    recipe = write_recipe(tmp_path / "recipe.yaml", task=task, epochs=10, stop_at={"rmse": 0.0})
    headway("train", recipe, "--run", tmp_path / "run")
    evaluated = records(tmp_path / "run", "evaluate")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["best"]["rmse"] == min(record["rmse"] for record in evaluated)
    assert summary["stop_at"]["seconds_to_reach"] is None
    assert evaluated[-1]["mae"] == pytest.approx(evaluated[-1]["absolute_error"])
    assert "classes" not in evaluated[-1]
    sentence = refused("predict", tmp_path / "run", tmp_path / "1.png", "--top", "2", status=2)
    assert "this run does not choose one of several classes" in sentence
    # The loss of the best weights, by what they predict: a bend at 0.1.
    data = opening.open(tmp_path / "digits.packed/eval")
    names = [tmp_path / data.name(sample) for sample in range(len(data))]
    rows = headway("predict", tmp_path / "run", *names, "--json").out.splitlines()
    errors = np.abs([json.loads(row)["value"] for row in rows] - data.label)
    losses = np.where(errors < 0.1, errors**2 / 2, 0.1 * (errors - 0.05))
    said = headway("evaluate", tmp_path / "run", "--json").json()
    assert said["loss"] == pytest.approx(losses.mean(), rel=1e-4)
    assert said["rmse"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-4)
    headway("report", tmp_path / "run")
    assert "huber" in (tmp_path / "run/report.html").read_text()


@pytest.mark.check
def test_ranks_of_uneven_shares_and_damaged_samples_have_the_same_values(tmp_path: Path) -> None:
    """60 samples, of which two are damaged and masked, on one rank and on three; batches of 7."""
    packed_digits(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    damage(tmp_path / "digits.packed/eval", 3, 41)
    task = {"metrics": ["top3", "f1", "auc", "own.py:Kappa"]}
    data = {"on_bad": "mask", "max_bad_share": 0.1}
    recipe = write_recipe(tmp_path / "recipe.yaml", task=task, data=data, evaluate={"batch": 7}, optimizer={"lr": 1e-9})
    found = []
    for name, more in (("one", ()), ("three", ("--procs", "3"))):
        said = finished("train", recipe, "--run", tmp_path / name, "epochs=1", *more)
        assert said.status == 0, said.err
        found.append(records(tmp_path / name, "evaluate")[-1])
    one, three = found
    assert one["damaged"] == three["damaged"] == 2
    assert one["seen"] == three["seen"] == 58
    for name in ("top3", "f1", "kappa", "classes"):
        assert one[name] == three[name], name
    assert one["auc"] == pytest.approx(three["auc"], abs=1e-9)
