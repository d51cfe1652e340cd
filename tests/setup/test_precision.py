"""Precision: the loss scale of fp16, and what stops a run whose numbers are not finite."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tests._support import files, headway, packed_digits, records, refused, write_recipe
from tests._waits import counted
from torch import nn

from headway.checkpoint.checkpoints import Checkpoints
from headway.optim import build_optimizer, read_optimizer
from headway.setup.precision import Precision, describe_emulation, list_candidates
from headway.training.nonfinite import can_start_from

CPU = torch.device("cpu")
OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 0.1},
    "nag": {"name": "nag", "lr": 0.1, "weight_decay": 0.01},
    "adamw": {"name": "adamw", "lr": 0.1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml")
    return folder


def scaled(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Precision]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, build_optimizer(read_optimizer(**OPTIMIZERS[name]), model), Precision("fp16", CPU)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    images: torch.Tensor,
    clip_norm: float | None = None,
) -> None:
    losses = model(images).square().sum(dim=1)
    precision.backward(losses, torch.full((len(images),), 1 / len(images)))
    precision.step(optimizer, clip_norm, list(model.parameters()))
    optimizer.zero_grad(set_to_none=True)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: value.clone() for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value.clone() for key, value in optimizer.state[parameter].items()}
    return found


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_an_infinite_gradient_changes_nothing_and_halves_the_scale(name: str, clip: float | None) -> None:
    model, optimizer, precision = scaled(name)
    good, bad = torch.ones(2, 4), torch.full((2, 4), torch.inf)
    step(model, optimizer, precision, good, clip)
    before, scale = state(model, optimizer), precision.state_dict()["scale"]
    with counted() as found:
        step(model, optimizer, precision, bad, clip)
    assert found == {}
    after = state(model, optimizer)
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value), key
    assert precision.state_dict()["scale"] == scale / 2
    step(model, optimizer, precision, good, clip)
    assert not torch.equal(state(model, optimizer)["weight"], before["weight"])


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_steps_are_the_plain_ones(name: str, clip: float | None) -> None:
    """The scale is a power of two: what comes out is the same, up to where clipping rounds."""
    found = []
    for precision in (Precision("fp16", CPU), Precision("fp32", CPU)):
        model, optimizer, _ = scaled(name)
        for number in range(3):
            step(model, optimizer, precision, torch.full((2, 4), 0.1 * number + 0.1), clip)
        found.append(state(model, optimizer))
    for key, value in found[1].items():
        torch.testing.assert_close(found[0][key], value, rtol=1e-5, atol=1e-7, msg=key)


def test_the_scale_is_saved_and_put_back() -> None:
    model, optimizer, precision = scaled("sgd")
    for _ in range(2):
        step(model, optimizer, precision, torch.full((2, 4), torch.inf))
    step(model, optimizer, precision, torch.ones(2, 4))
    kept = json.loads(json.dumps(precision.state_dict()))
    other = Precision("fp16", CPU)
    other.load_state_dict(kept)
    assert other.state_dict() == precision.state_dict()
    assert kept["scale"] == 65536 / 4
    assert kept["_growth_tracker"] == 1
    assert Precision("bf16", CPU).state_dict() == {}


def test_forward_runs_in_the_precision_and_the_loss_in_fp32(folder: Path, tmp_path: Path) -> None:
    (folder / "spy.py").write_text(
        "import torch\n"
        "from headway.setup.task import Classification\n"
        "TYPES = {'network': set(), 'loss': set(), 'parameter': set()}\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, images):\n"
        "        out = super().forward(images.flatten(1))\n"
        "        TYPES['network'].add(out.dtype)\n"
        "        TYPES['parameter'].add(self.weight.dtype)\n"
        "        return out\n"
        "def net(num_classes):\n"
        "    return Net(64, num_classes)\n"
        "class Task(Classification):\n"
        "    def loss(self, outputs, labels):\n"
        "        TYPES['loss'].add(outputs.dtype)\n"
        "        assert outputs.dtype == torch.float32\n"
        "        return super().loss(outputs, labels)\n"
    )
    for name, expected in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        overrides = ("model.factory=spy.py:net", "task.factory=spy.py:Task", f"precision={name}")
        headway("train", folder / "recipe.yaml", "--run", tmp_path / name, *overrides)
        (types,) = [module.TYPES for key, module in sys.modules.items() if key.endswith("_spy")]
        assert types == {"network": {expected}, "loss": {torch.float32}, "parameter": {torch.float32}}
        for found in types.values():
            found.clear()


def test_fp16_on_a_cpu_is_refused(folder: Path) -> None:
    recipe = folder / "recipe.yaml"
    assert "fp16 on a CPU is emulated and slow: set precision to bf16 or fp32" in refused(
        "train", recipe, "precision=fp16", "device=cpu", status=2
    )
    if not torch.cuda.is_available():
        sentence = refused("train", recipe, "precision=fp16", "--run", folder / "never", status=2)
        assert "precision: fp16 on a CPU is emulated and slow, and PyTorch sees no GPU here." in sentence
        assert not (folder / "never").exists()


def test_bf16_that_is_emulated_is_told_once_where_it_was_asked_for(folder: Path, tmp_path: Path) -> None:
    slow = "Precision: bf16 is emulated on this processor, which has no units for it, and slower; auto takes fp32."
    assert describe_emulation("bf16", CPU) == ("" if "bf16" in list_candidates(CPU) else slow)
    assert describe_emulation("fp32", CPU) == describe_emulation("bf16", torch.device("cuda")) == ""
    for precision, times in (("bf16", bool(describe_emulation("bf16", CPU))), ("fp32", 0), ("auto", 0)):
        said = headway(
            "train", folder / "recipe.yaml", "--run", tmp_path / precision, f"precision={precision}", "epochs=1"
        )
        assert said.err.count("is emulated on this processor") == times


@pytest.mark.gpu
def test_fp16_trains_on_a_gpu(folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "precision=fp16", "device=cuda", "epochs=10")
    assert records(tmp_path / "run", "evaluate")[-1]["accuracy"] > 0.8
    assert records(tmp_path / "run", "train")[-1]["loss_scale"] > 0


def test_a_non_finite_loss_stops_and_keeps_the_last_good_checkpoint(folder: Path, tmp_path: Path) -> None:
    """The learning rate jumps where the warm-up ends; what was saved before is untouched and can be used."""
    run = tmp_path / "run"
    base = ("train", folder / "recipe.yaml", "checkpoint={every_steps: 2}", "model.factory=net.py:dropout")
    headway(*base, "--run", tmp_path / "good", "epochs=1")
    # from 0 to 1e38 over the first epoch: the first step has a rate of 0, the others throw the weights out of range
    more = ("optimizer.lr=1e38", "schedule={name: constant, warmup_epochs: 1}", "log_every_steps=5", "epochs=3")
    sentence = refused(*base, *more, "--run", run, status=1)
    found = re.search(r"the (loss is|weights are) not finite at step (\d+) \(learning rate ([\d.e+]+)\)", sentence)
    assert found is not None, sentence
    step, rate = int(found[2]), float(found[3])
    assert rate == pytest.approx(1e38 * (step - 1) / 6, rel=1e-3)
    assert "Start a new run with a lower optimizer.lr" in sentence
    assert str(run) in sentence
    for path in Checkpoints(run / "checkpoints").paths():
        assert path.name in sentence
    kept = Checkpoints(run / "checkpoints").newest()
    if kept is not None:
        assert all(torch.isfinite(value).all() for name, value in kept.tensors.items() if name.startswith("model/"))


def test_an_infinite_loss_is_named_with_its_own_step(folder: Path, tmp_path: Path) -> None:
    """The logging step comes later; the step and its learning rate are those of the loss."""
    (folder / "late.py").write_text(
        "calls = [0]\n"
        "def poison(images, labels, keys):\n"
        "    calls[0] += 1\n"
        "    return (images * float('inf') if calls[0] == 8 else images), labels\n"
    )
    run = tmp_path / "run"
    more = ("transform=late.py:poison", "log_every_steps=6", "checkpoint={every_steps: 5, keep: 3}", "epochs=3")
    schedule = "schedule={name: polynomial, power: 1}"
    sentence = refused("train", folder / "recipe.yaml", "--run", run, *more, schedule, status=1)
    assert "the loss is not finite at step 8 " in sentence
    rate = 0.02 * (1 - 7 / 18)
    assert f"(learning rate {rate:.4g})" in sentence
    assert "The checkpoint step-00000005 is kept" in sentence
    assert [path.name for path in Checkpoints(run / "checkpoints").paths()] == ["step-00000005"]
    assert records(run)[-1]["step"] == 6
    before = files(run)
    headway("report", run)
    (run / "report.html").unlink()
    assert {name: data for name, data in files(run).items() if not name.startswith("panels/")} == {
        name: data for name, data in before.items() if not name.startswith("panels/")
    }
    shutil.copytree(run, tmp_path / "again")
    said = headway("train", "--resume", tmp_path / "again")  # the poison was drunk
    assert "Resumed at step 5 of 18" in said.err


def test_weights_that_a_finite_loss_made_infinite_are_not_kept(folder: Path, tmp_path: Path) -> None:
    """The last step before an evaluation and a checkpoint has a finite loss, and breaks the weights."""
    (folder / "task.py").write_text(
        "import torch\n"
        "from headway.setup.task import Classification\n"
        "class Break(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, gradient):\n"
        "        return gradient * float('nan')\n"
        "class Task(Classification):\n"
        "    steps = 0\n"
        "    def loss(self, outputs, labels):\n"
        "        if outputs.requires_grad:\n"
        "            self.steps += 1\n"
        "            if self.steps == 12:\n"
        "                outputs = Break.apply(outputs)\n"
        "        return super().loss(outputs, labels)\n"
    )
    run, whole = tmp_path / "run", tmp_path / "whole"
    headway("train", folder / "recipe.yaml", "--run", whole, "epochs=1")
    more = ("task.factory=task.py:Task", "epochs=3")
    sentence = refused("train", folder / "recipe.yaml", "--run", run, *more, status=1)
    assert "the weights are not finite at step 12 (learning rate 0.02)" in sentence
    assert "The checkpoint step-00000006 is kept" in sentence
    assert (run / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()


SPOILED = """
calls = [0]

def spoil(images, labels, keys):
    calls[0] += 1
    return images / (0 if calls[0] > 8 else 1), labels
"""


@pytest.mark.parametrize("has_evaluation", [True, False])
def test_only_weights_whose_evaluation_was_good_are_recommended(
    folder: Path, tmp_path: Path, has_evaluation: bool
) -> None:
    """The images of the second epoch become infinite."""
    (tmp_path / "spoiled.py").write_text(SPOILED)
    run, recipe = tmp_path / "run", folder / "recipe.yaml"
    evaluation = () if has_evaluation else ("data.eval=",)
    spoil = f"transform={tmp_path / 'spoiled.py'}:spoil"
    sentence = refused("train", recipe, spoil, *evaluation, "--run", run, status=1)
    assert "the loss is not finite at step 9" in sentence
    assert (run / "weights.safetensors").exists()
    recommended = f"from the weights of epoch 1 if you like: model.weights={run.resolve() / 'weights.safetensors'}."
    assert (recommended in sentence) == has_evaluation
    assert ("model.weights" in sentence) == has_evaluation


def test_weights_are_recommended_by_their_loss() -> None:
    best = {"loss": 1.0, "accuracy": 0.5, "step": 6, "epoch": 1.0}
    assert can_start_from(best, 2.3)
    assert can_start_from(best, None)
    # A network that has blown up is right by chance.
    assert not can_start_from({**best, "loss": 40.0}, 2.3)
    assert not can_start_from({**best, "loss": math.inf}, None)
    assert not can_start_from({**best, "loss": math.nan}, 2.3)
