"""The user's own network, task, transform and init: used as they are, and shown where they fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests._support import digits, finished, headway, packed_digits, records, refused, write_recipe

from headway.core.random_keys import draw_uniform, make_keys
from headway.data import opening
from headway.data.order import Order
from headway.data.pack import pack
from headway.setup.task import Classification, MultiLabel, Regression, TargetSpec

USER = '''
import numpy as np
import torch
from headway.core.random_keys import draw_uniform
from headway.setup.task import Task

class ParityTask(Task):
    """Even or odd, by one logit."""
    primary, higher_is_better = "error", False
    outputs = 1

    def __init__(self, target, *, factor=1.0):
        assert target.classes == tuple("0123456789")
        self.factor = factor

    def loss(self, outputs, labels):
        wanted = (labels % 2).float()
        return self.factor * torch.nn.functional.binary_cross_entropy_with_logits(
            outputs[:, 0], wanted, reduction="none")

    def metrics(self, outputs, labels):
        return {"error": ((outputs[:, 0] > 0) != (labels % 2 == 1)).float()}

    def predict(self, outputs):
        return [{"odd": bool(value > 0)} for value in outputs[:, 0].tolist()]

SEEN = []

def brighter(images, labels, keys):
    factor = 0.5 + draw_uniform(keys, 1000)
    SEEN.append((keys.copy(), factor))
    return images * torch.from_numpy(factor.astype(np.float32))[:, None, None, None], labels

CALLED = []

def init(model, images):
    CALLED.append(tuple(images.shape))
    model[1].weight.fill_(0.25)

def fails(*args, **kwargs):
    return {}["the user's own key"]

class FailingTask(ParityTask):
    def loss(self, outputs, labels):
        return {}["the user's own key"]

class FloatTask(ParityTask):
    def metrics(self, outputs, labels):
        return {"error": 0.5}

class MeanTask(ParityTask):
    def loss(self, outputs, labels):
        return super().loss(outputs, labels).mean()

class LossTask(ParityTask):
    def metrics(self, outputs, labels):
        return {**super().metrics(outputs, labels), "loss": outputs[:, 0]}

class StepTask(ParityTask):
    def metrics(self, outputs, labels):
        return {**super().metrics(outputs, labels), "step": outputs[:, 0]}

class LostTask(ParityTask):
    primary = "eror"

def number(target):
    return 7

class Failing(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = torch.nn.Linear(64, num_classes)
    def forward(self, images):
        return {}["the user's own key"]

class Late(Failing):
    def forward(self, images):
        if self.training:
            return {}["the user's own key"]
        return self.layer(images.flatten(1))

def twice(num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2 * num_classes))

class Pair(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = torch.nn.Linear(64, num_classes)

    def forward(self, images):
        return self.layer(images.flatten(1)), self.layer(images.flatten(1))

pair = Pair

def none(images, labels, keys):
    pass
'''


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its own for each test: a user's file is loaded once in a process."""
    folder = tmp_path_factory.mktemp("user")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml")
    (folder / "user.py").write_text(USER)
    return folder


def module_of(file: Path) -> Any:
    return next(module for module in sys.modules.values() if getattr(module, "__file__", "") == str(file))


def test_a_users_task(folder: Path) -> None:
    run = folder / "run"
    overrides = ("task={factory: 'user.py:ParityTask', args: {factor: 2.0}}", "epochs=20", "optimizer.lr=0.1")
    headway("train", folder / "recipe.yaml", "--run", run, *overrides)
    found = records(run, "evaluate")
    assert records(run, "train")[0]["loss"] > 1  # about twice the logarithm of 2, at chance
    best = json.loads((run / "summary.json").read_text())["best"]
    assert best["error"] == min(record["error"] for record in found) < 0.2
    said = headway("predict", run, folder / "digits/3", folder / "digits/4", "--json")
    rows = [json.loads(line) for line in said.out.splitlines()]
    right = [row["odd"] == (Path(row["path"]).parent.name == "3") for row in rows]
    assert sum(right) / len(right) > 0.8
    assert headway("evaluate", run, "--json").json()["error"] == best["error"]
    headway("report", run)


def test_a_users_transform_gets_the_keys_of_its_samples(folder: Path) -> None:
    for name in ("one", "other"):
        headway("train", folder / "recipe.yaml", "--run", folder / name, "transform=user.py:brighter", "seed=5")
    seen = module_of(folder / "user.py").SEEN
    assert len(seen) == 24
    epochs, samples = Order(180, 5)(np.arange(360))
    expected = make_keys(5, epochs, samples)
    found = np.concatenate([key for key, _ in seen[:12]])
    assert np.array_equal(found, expected)
    assert np.array_equal(np.concatenate([factor for _, factor in seen[:12]]), 0.5 + draw_uniform(expected, 1000))
    weights = [(folder / name / "weights.safetensors").read_bytes() for name in ("one", "other")]
    assert weights[0] == weights[1]
    headway("train", folder / "recipe.yaml", "--run", folder / "plain", "seed=5")
    assert (folder / "plain/weights.safetensors").read_bytes() != weights[0]
    headway("evaluate", folder / "one")
    assert len(seen) == 24  # training only


def test_init_is_called_once_with_the_first_batch(folder: Path) -> None:
    run = folder / "run"
    headway("train", folder / "recipe.yaml", "--run", run, "model.init=user.py:init", "checkpoint.every_steps=3")
    called = module_of(folder / "user.py").CALLED
    assert called == [(30, 1, 8, 8)]
    (run / "checkpoints/step-00000012/manifest.json").unlink()
    headway("train", "--resume", run)
    headway("evaluate", run)
    assert called == [(30, 1, 8, 8)]


SHOWN = {
    "model": ("model.factory=user.py:fails", "model.factory: 'user.py:fails' failed: KeyError"),
    "forward": ("model.factory=user.py:Failing", "network: the network failed on images of 1x8x8"),
    "task": ("task.factory=user.py:fails", "task: 'user.py:fails' failed: KeyError"),
    "task's loss": ("task.factory=user.py:FailingTask", "task: the task failed on images of 1x8x8"),
    "transform": ("transform=user.py:fails", "step 1: the transform 'user.py:fails' failed: KeyError"),
    "init": ("model.init=user.py:fails", "model.init: 'user.py:fails' failed: KeyError"),
}


@pytest.mark.parametrize("case", SHOWN)
def test_failing_user_code_shows_its_traceback(folder: Path, case: str) -> None:
    override, expected = SHOWN[case]
    said = headway("train", folder / "recipe.yaml", override, "--run", folder / "run", status=1)
    before, _, sentence = said.err.partition("headway: ")
    assert "Traceback (most recent call last):" in before
    assert f'File "{folder / "user.py"}", line' in before
    assert """return {}["the user's own key"]""" in before
    assert expected in sentence
    assert "the user's own key" in sentence


def test_a_file_that_fails_to_import_shows_its_traceback_from_a_real_process(folder: Path) -> None:
    (folder / "broken.py").write_text("import math\nvalue = math.nothing\n")
    said = finished("train", folder / "recipe.yaml", "model.factory=broken.py:net", "--run", folder / "run")
    assert said.status == 1
    assert f'File "{folder / "broken.py"}", line 2, in <module>' in said.err
    assert "AttributeError: module 'math' has no attribute 'nothing'" in said.err
    assert said.err.rstrip().splitlines()[-1].startswith("headway: model.factory: ")
    assert said.out == ""
    assert not (folder / "run").exists()


def test_a_network_that_fails_in_a_step_shows_its_traceback(folder: Path) -> None:
    said = finished("train", folder / "recipe.yaml", "model.factory=user.py:Late", "--run", folder / "run")
    assert said.status == 1
    assert f'File "{folder / "user.py"}", line' in said.err
    assert 'KeyError: "the user\'s own key"' in said.err


REFUSED = {
    "no such module": ("model.factory=no_such_module:net", "there is no module 'no_such_module'"),
    "no such file": ("model.factory=nett.py:linear", "there is no file"),
    "no such function": ("model.factory=net.py:liner", "Did you mean 'linear'?"),
    "no path": ("model.factory=linear", "'linear' is not an import path"),
    "a name of ours": ("model.factory=resnet50", "Did you mean 'headway.model:resnet50'?"),
    "a name of timm": ("model.factory=vit_tiny", "factory: timm:create_model, args: {model_name: vit_tiny}"),
    "twice the outputs": (
        "model.factory=user.py:twice",
        "it gives a tensor of the shape [2, 20], and the data need [2, 10] for 2 images of 1x8x8. Make the network",
    ),
    "a pair of outputs": (
        "model.factory=user.py:pair",
        "it gives a tuple of 2, and the data need [2, 10] for 2 images of 1x8x8. Let it return the tensor of outputs",
    ),
    "no task": ("task.factory=user.py:number", "'user.py:number' gave a int, no Task"),
    "a float": (
        "task.factory=user.py:FloatTask",
        "error has the type float for 2 samples, and (2,) is needed. Return one number for each sample",
    ),
    "a mean": (
        "task.factory=user.py:MeanTask",
        "loss has the shape () for 2 samples, and (2,) is needed. Return one number for each sample, for exam",
    ),
    "a metric called loss": ("task.factory=user.py:LossTask", "a metric cannot be called 'loss'"),
    "a metric called step": ("task.factory=user.py:StepTask", "a metric cannot be called 'step'"),
    "no primary metric": (
        "task.factory=user.py:LostTask",
        "its primary metric 'eror' is not reported. Did you mean 'error'?",
    ),
    "no function": ("transform=user.py:USER_DATA", "has no 'USER_DATA'"),
    "a list": ("transform=user.py:SEEN", "'user.py:SEEN' cannot be called. Name a function."),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.thin(5)
def test_user_code_of_the_wrong_form_is_refused(folder: Path, case: str) -> None:
    override, expected = REFUSED[case]
    sentence = refused("train", folder / "recipe.yaml", override, "--run", folder / "run", status=2)
    assert expected in sentence
    assert not (folder / "run").exists()


def test_a_transform_that_returns_nothing_is_named(folder: Path) -> None:
    said = headway("train", folder / "recipe.yaml", "transform=user.py:none", "--run", folder / "run", status=2)
    assert (
        "step 1: the transform 'user.py:none' returned nothing. Return (images, labels), here (float32 [30, 1, 8, 8], "
        "int64 [30]); another height and width are fine."
    ) in said.err


def test_weights_with_a_head_of_another_size(folder: Path, tmp_path: Path) -> None:
    """The rest is the file's, the head begins anew, and the user is told."""
    headway("train", folder / "recipe.yaml", "--run", folder / "ten", "model.factory=net.py:dropout")
    digits(tmp_path / "five", per_class=12)
    for label in range(5, 10):
        for path in (tmp_path / "five" / str(label)).iterdir():
            path.unlink()
        (tmp_path / "five" / str(label)).rmdir()
    pack(tmp_path / "five", tmp_path / "digits.packed", split=0.25, threads=1)
    (tmp_path / "net.py").write_text((folder / "net.py").read_text())
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        model={
            "factory": "net.py:dropout",
            "weights": str(folder / "ten/weights.safetensors"),
            "freeze": ["^0\\.", "^1\\."],
        },
    )
    said = headway("train", recipe, "--run", tmp_path / "run")
    assert "6.weight, 6.bias begin anew: absent or of another size there" in said.err
    before, after = (load_file(run / "weights.safetensors") for run in (folder / "ten", tmp_path / "run"))
    assert after["6.weight"].shape == (5, 384)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):  # frozen, and so still the file's
        assert torch.equal(before[name], after[name]), name
    assert not torch.equal(before["1.running_mean"], after["1.running_mean"])
    headway("train", "--resume", tmp_path / "run")
    (tmp_path / "ten.safetensors").write_bytes(b"torn")
    assert "no safetensors file" in refused("train", recipe, "model.weights=ten.safetensors", status=2)
    save_file({"other": torch.zeros(1)}, tmp_path / "ten.safetensors")
    said_no = refused("train", recipe, "model.weights=ten.safetensors", status=2)
    assert "the weights do not fit the network, no name is the same: the file has 'other'; the network has" in said_no


def test_frozen_parameters_do_not_move(folder: Path) -> None:
    (folder / "start.py").write_text(
        "import torch\n"
        "START = {}\n"
        "def keep(model, images):\n"
        "    START.update({name: value.clone() for name, value in model.state_dict().items()})\n"
    )
    more = ("model.freeze=['bias']", "model.init=start.py:keep")
    headway("train", folder / "recipe.yaml", "--run", folder / "run", *more)
    start = module_of(folder / "start.py").START
    after = load_file(folder / "run/weights.safetensors")
    assert torch.equal(after["1.bias"], start["1.bias"])
    assert not torch.equal(after["1.weight"], start["1.weight"])


def images_for_a_list(folder: Path, count: int = 60) -> list[tuple[str, int, int]]:
    """Gray images with a bright left or right half, or both; (name, left, right) in 0..3."""
    chance = np.random.default_rng(0)
    found = []
    for number in range(count):
        left, right = chance.integers(0, 4, 2)
        pixels = np.zeros((8, 8))
        pixels[:, :4], pixels[:, 4:] = 60 * left, 60 * right
        Image.fromarray((pixels + chance.integers(0, 10, (8, 8))).astype(np.uint8)).save(folder / f"{number}.png")
        found.append((f"{number}.png", int(left), int(right)))
    return found


def pack_a_list(folder: Path, several: bool) -> None:
    """Packs images with the labels left and right, or with two numbers, as digits.packed; half for the evaluation."""
    lines = ["path,labels" if several else "path,value_left,value_right"]
    for name, left, right in images_for_a_list(folder):
        on = [text for text, number in (("left", left), ("right", right)) if number > 1]
        lines.append(f"{name},{';'.join(on)}" if several else f"{name},{left},{right}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    headway("pack", folder / "labels.csv", folder / "digits.packed", "--split", "0.5")


def test_several_labels(tmp_path: Path) -> None:
    rows = images_for_a_list(tmp_path)
    lines = ["path,labels"]
    lines += [f"{name},{';'.join(n for n, on in (('left', a > 1), ('right', b > 1)) if on)}" for name, a, b in rows]
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    headway("pack", tmp_path / "labels.csv", tmp_path / "digits.packed", "--split", "0.2")
    recipe = write_recipe(tmp_path / "recipe.yaml", epochs=40, optimizer={"lr": 0.2}, batch=16)
    headway("train", recipe, "--run", tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["best"]["label_accuracy"] > 0.9
    assert {"exact", "label_accuracy", "loss"} <= records(tmp_path / "run", "evaluate")[-1].keys()
    images = [tmp_path / name for name, _, _ in rows]
    found = [json.loads(line) for line in headway("predict", tmp_path / "run", *images, "--json").out.splitlines()]
    wanted = [[n for n, on in (("left", a > 1), ("right", b > 1)) if on] for _, a, b in rows]
    assert sum(row["labels"] == want for row, want in zip(found, wanted, strict=True)) > 50
    assert all(0 <= row["probability_left"] <= 1 for row in found)
    for ending in ("csv", "jsonl"):  # what comes out can be packed again
        headway("predict", tmp_path / "run", *images, "--out", tmp_path / f"p.{ending}")
        headway("pack", tmp_path / f"p.{ending}", tmp_path / ending)
        data = opening.open(tmp_path / ending)
        assert data.classes == ("left", "right")
        assert data.description.class_counts == tuple(sum(n in row["labels"] for row in found) for n in data.classes)
    headway("report", tmp_path / "run")


@pytest.mark.thin(1)
@pytest.mark.parametrize("several", [False, True])
def test_regression(tmp_path: Path, several: bool) -> None:
    rows = images_for_a_list(tmp_path)
    lines = ["path,value_left,value_right" if several else "path,value"]
    lines += [f"{name},{a},{b}" if several else f"{name},{a - b}" for name, a, b in rows]
    (tmp_path / "values.csv").write_text("\n".join(lines) + "\n")
    headway("pack", tmp_path / "values.csv", tmp_path / "digits.packed", "--split", "0.2")
    recipe = write_recipe(tmp_path / "recipe.yaml", epochs=60, optimizer={"lr": 0.01}, batch=16)
    headway("train", recipe, "--run", tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    errors = [record["absolute_error"] for record in records(tmp_path / "run", "evaluate")]
    assert summary["best"]["absolute_error"] == min(errors) < 0.2
    said = headway("predict", tmp_path / "run", *(tmp_path / name for name, _, _ in rows), "--json")
    for line, (_, left, right) in zip(said.out.splitlines(), rows, strict=True):
        row = json.loads(line)
        wanted = {"left": left, "right": right} if several else {"value": left - right}
        assert {name: row[name] for name in wanted} == pytest.approx(wanted, abs=0.8)
    headway("report", tmp_path / "run")


def test_losses_against_torch() -> None:
    chance = torch.Generator().manual_seed(0)
    outputs = torch.randn(6, 4, generator=chance)
    classes = TargetSpec(kind="class", classes=tuple("abcd"), numbers=1)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    for smoothing in (0.0, 0.3):
        task = Classification(classes, label_smoothing=smoothing)
        wanted = torch.full((6, 4), smoothing / 4).scatter_add(1, labels[:, None], torch.full((6, 1), 1 - smoothing))
        by_hand = -(wanted * outputs.log_softmax(dim=1)).sum(dim=1)
        torch.testing.assert_close(task.loss(outputs, labels), by_hand)
    multi = MultiLabel(TargetSpec(kind="multi", classes=tuple("abcd"), numbers=4))
    several = torch.randint(0, 2, (6, 4), generator=chance).float()
    p = outputs.sigmoid()
    by_hand = -(several * p.log() + (1 - several) * (1 - p).log()).mean(dim=1)
    torch.testing.assert_close(multi.loss(outputs, several), by_hand)
    right = ((p > 0.5) == (several > 0.5)).float()
    torch.testing.assert_close(multi.metrics(outputs, several)["label_accuracy"], right.mean(dim=1))
    torch.testing.assert_close(multi.metrics(outputs, several)["exact"], right.prod(dim=1))
    numbers = Regression(TargetSpec(kind="value", classes=tuple("abcd"), numbers=4))
    torch.testing.assert_close(numbers.loss(outputs, several), ((outputs - several) ** 2).mean(dim=1))
    one = Regression(TargetSpec(kind="value", classes=(), numbers=1))
    torch.testing.assert_close(one.loss(outputs[:, :1], several[:, 0]), (outputs[:, 0] - several[:, 0]) ** 2)
    torch.testing.assert_close(
        one.metrics(outputs[:, :1], several[:, 0])["absolute_error"], (outputs[:, 0] - several[:, 0]).abs()
    )
