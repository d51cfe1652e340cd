"""A batch that grows: the loss rule, resume, several processes, all by real runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests._support import finished, headway, packed_digits, records, refused, write_recipe
from torch.nn import functional as F

from headway.checkpoint.checkpoints import Checkpoints
from headway.core.run_folder import IDS_BYTES
from headway.data import opening
from headway.data.batch_plan import BatchGrowthRecipe, BatchPlan
from headway.data.loader import Loader
from headway.data.order import Order

SAMPLES, EPOCHS, BATCH = 180, 4, 14
GROWTH = BatchGrowthRecipe(milestones_epochs=(1, 2.5), factor=3)
PLAN = BatchPlan(BATCH, GROWTH, epoch=SAMPLES)
STEPS = PLAN.round_to_steps(EPOCHS * SAMPLES)
SIZES = [PLAN.get_batch_size(PLAN.find_position(step)) for step in range(STEPS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("growth")
    packed_digits(folder)
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:dropout"},
        augment={"flip": True, "translate": 1},
        optimizer={"name": "nag", "lr": 0.02, "clip_norm": 5.0},
        schedule={"name": "cosine", "warmup_epochs": 1},
        batch=BATCH,
        batch_growth=GROWTH.model_dump(),
        epochs=EPOCHS,
        checkpoint={"every_steps": 3, "keep": 100},
        log_every_steps=5,
        log_ids=True,
    )
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    headway("train", folder / "recipe.yaml", "--run", folder / "whole")
    return folder / "whole"


def rows_of(run: Path) -> np.ndarray[Any, Any]:
    """(position, asked, served) of all processes, by position."""
    found = [np.frombuffer(path.read_bytes(), "<i8").reshape(-1, IDS_BYTES // 8) for path in run.glob("ids*.bin")]
    rows = np.concatenate(found)
    return rows[np.argsort(rows[:, 0], kind="stable")]


def assert_served_once(run: Path) -> None:
    positions = np.arange(sum(SIZES))
    assert np.array_equal(rows_of(run)[:, :2], np.stack([positions, Order(SAMPLES, 0)(positions)[1]], axis=1))


def test_the_plan_of_these_tests_has_steps_of_three_sizes() -> None:
    assert SIZES == [14] * 13 + [42] * 7 + [126] * 2
    assert PLAN.find_position(STEPS) == 728  # of 720: the nearest end of a step


def test_every_position_is_served_once_and_the_records_follow(whole: Path) -> None:
    assert_served_once(whole)
    trained = records(whole, "train")
    assert [(r["step"], r["batch"]) for r in trained if r["step"] % 5 == 0] == [(5, 14), (10, 14), (15, 42), (20, 42)]
    assert trained[-1]["step"] == STEPS
    for record in trained:
        assert record["position"] == sum(SIZES[: record["step"]])
        assert record["epoch"] == record["position"] / SAMPLES
    assert [r["step"] for r in records(whole, "evaluate")] == [13, 18, 21, 22]  # the first at or after epochs 1 to 4
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["finished"], summary["steps"], summary["epochs"]) == (True, STEPS, 728 / SAMPLES)
    assert "batch_growth" in (whole / "recipe.yaml").read_text()


def test_the_report_draws_the_batch_where_it_grows(folder: Path, whole: Path, tmp_path: Path) -> None:
    assert '"curve-batch"' in Path(headway("report", whole, "--json").json()["report"]).read_text()
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "even", "batch_growth=null", "epochs=1")
    assert '"curve-batch"' not in Path(headway("report", tmp_path / "even", "--json").json()["report"]).read_text()


def test_a_steps_loss_is_the_mean_over_its_own_samples(folder: Path, tmp_path: Path) -> None:
    """SGD written out by hand, step after step; in float64 where torch's own sums are the only difference."""
    lr, recipe = 0.05, write_recipe(tmp_path / "recipe.yaml", batch=BATCH, batch_growth=GROWTH.model_dump())
    (tmp_path / "digits.packed").symlink_to(folder / "digits.packed")
    options = ("log_every_steps=8", "optimizer={name: sgd, lr: 0.05, momentum: 0}", f"epochs={EPOCHS}")
    options += ("evaluate.every_epochs=9", "checkpoint.every_epochs=9")  # so that a record has steps of two sizes
    headway("train", recipe, "--run", tmp_path / "run", *options, "micro_batch=10")
    data = opening.open(folder / "digits.packed/train")
    images = torch.cat([batch.images.clone() for batch in Loader(data, batch=60, threads=1)]).double().flatten(1)
    labels = torch.from_numpy(np.array(data.label)).long()
    resolved = (tmp_path / "run/recipe.yaml").read_text()
    mean, std = (float(resolved.split(f"{key}:\n  - ")[1].split("\n")[0]) for key in ("  mean", "  std"))
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 10)
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    losses = []
    for step, size in enumerate(SIZES):
        begin = PLAN.find_position(step)
        _, samples = Order(SAMPLES, 0)(np.arange(begin, begin + size))
        inputs, truth = (images[samples] - mean) / std, labels[samples]
        weight.requires_grad_(), bias.requires_grad_()
        loss = F.cross_entropy(inputs @ weight.T + bias, truth)
        gradients = torch.autograd.grad(loss, (weight, bias))
        weight, bias = (old.detach() - lr * g for old, g in zip((weight, bias), gradients, strict=True))
        losses.append(loss.item())
    newest = Checkpoints(tmp_path / "run/checkpoints").newest()
    assert newest is not None
    found = {name.rpartition(".")[2]: value for name, value in newest.tensors.items() if name.startswith("model/")}
    torch.testing.assert_close(found["weight"].double(), weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["bias"].double(), bias, rtol=1e-4, atol=1e-5)
    done = 0
    assert [record["step"] for record in records(tmp_path / "run", "train")] == [8, 16, 22]
    for record in records(tmp_path / "run", "train"):  # a record's loss is the mean over its steps, whatever their size
        assert record["loss"] == pytest.approx(np.mean(losses[done : record["step"]]), rel=1e-4)
        done = record["step"]
    data.close()


@pytest.mark.parametrize("step", [6, 12, 15, 21])
def test_resumed_is_uninterrupted_bit_for_bit(folder: Path, whole: Path, tmp_path: Path, step: int) -> None:
    """From a checkpoint in every phase, and from the ones nearest to where the batch grows."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    (run / "checkpoints/latest").write_text(f"step-{step:08d}")
    assert f"Resumed at step {step} of {STEPS}" in headway("train", "--resume", run).err
    assert (run / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    mine, theirs = Checkpoints(run / "checkpoints").newest(), Checkpoints(whole / "checkpoints").newest()
    assert mine is not None
    assert theirs is not None
    assert mine.step == theirs.step == STEPS
    for name, value in mine.tensors.items():
        assert torch.equal(value, theirs.tensors[name]), name
    assert_served_once(run)
    clock = ("seconds", "images_s", "wait_share")
    for one, other in zip(records(run), records(whole), strict=True):
        assert {k: v for k, v in one.items() if k not in clock} == {k: v for k, v in other.items() if k not in clock}


NORMED = """
from torch import nn

def normed(num_classes):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, num_classes)
    )
"""


@pytest.mark.parametrize(
    ("procs", "options"),
    [
        # Running statistics are shares of a step too.
        pytest.param(2, ("model.factory=normed.py:normed", "comm.batch_norm=sync"), marks=pytest.mark.check),
        pytest.param(3, ("model.factory=net.py:linear", "micro_batch=5"), marks=pytest.mark.check),
    ],
)
def test_several_processes_train_as_one_does(
    folder: Path, tmp_path: Path, procs: int, options: tuple[str, ...]
) -> None:
    (folder / "normed.py").write_text(NORMED)
    given = (*options, "augment={translate: 1}")
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "alone", *given)
    run = tmp_path / "run"
    said = finished("train", folder / "recipe.yaml", "--procs", str(procs), "--run", run, *given)
    assert said.status == 0, said.err
    assert_served_once(run)
    for kind in ("train", "evaluate"):
        for one, several in zip(records(tmp_path / "alone", kind), records(run, kind), strict=True):
            same = ("step", "position", *(("batch", "lr") if kind == "train" else ()))
            assert [one[name] for name in same] == [several[name] for name in same]
            assert several["loss"] == pytest.approx(one["loss"], rel=1e-3)
    for name, value in load_file(tmp_path / "alone/weights.safetensors").items():
        torch.testing.assert_close(load_file(run / "weights.safetensors")[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.check
def test_another_world_goes_on_where_one_stopped(folder: Path, tmp_path: Path) -> None:
    """Stopped after a checkpoint of two processes, resumed by three: each position is served once."""
    run = tmp_path / "run"
    said = finished("train", folder / "recipe.yaml", "--procs", "2", "--run", run)
    assert said.status == 0, said.err
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > 12:
            shutil.rmtree(path)
    (run / "checkpoints/latest").write_text("step-00000012")
    (run / "summary.json").unlink()
    said = finished("train", "--resume", run, "--procs", "3")
    assert said.status == 0, said.err
    assert_served_once(run)
    assert [r["batch"] for r in records(run, "train")][-1] == SIZES[-1]


def test_automatic_micro_batches_are_of_the_largest_step(folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "micro_batch=auto", "epochs=2.6")
    assert "\nmicro_batch: 126\n" in (tmp_path / "run/recipe.yaml").read_text()


def test_synthetic_data_grow_too(folder: Path, tmp_path: Path) -> None:
    synthetic = "data={train: synthetic, synthetic: {samples: 180, size: [8, 8], channels: 1}}"
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", synthetic)
    assert [r["batch"] for r in records(tmp_path / "run", "train")][-1] == 126
    assert sum(SIZES) == records(tmp_path / "run", "train")[-1]["position"]


def test_a_large_batch_is_warned_of_once(folder: Path, tmp_path: Path) -> None:
    large = ("batch=1500", "schedule={name: constant}", "batch_growth=null", "epochs=9")
    said = headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", *large)
    assert said.err.count("A batch of 1,500 trains at one learning rate throughout") == 1
    assert "trains at one learning rate" not in headway("evaluate", tmp_path / "run").err


def test_a_batch_that_cannot_grow_is_refused(folder: Path, tmp_path: Path) -> None:
    sentence = refused("train", folder / "recipe.yaml", "--run", tmp_path / "no", "batch_growth.factr=2", status=2)
    assert "there is no key 'batch_growth.factr'. Did you mean 'batch_growth.factor'?" in sentence


@pytest.mark.check
def test_the_noise_scale_is_that_of_the_steps_own_batch(folder: Path, tmp_path: Path) -> None:
    """With weights that hardly move it does not depend on the batch: grown after one step, or large from the start."""
    still = ("model.factory=net.py:linear", "optimizer.lr=1e-6", "observe.noise_scale=true", "epochs=12")
    found = []
    for name, batch, growth in (("grown", 14, "{milestones_epochs: [0.01], factor: 9}"), ("large", 126, "null")):
        given = (f"batch={batch}", f"batch_growth={growth}")
        run = tmp_path / name
        said = finished("train", folder / "recipe.yaml", "--procs", "2", "--run", run, *still, *given)
        assert said.status == 0, said.err
        found.append(records(run, "train")[-1]["noise_scale"])
    assert found[0] == pytest.approx(found[1], rel=0.5)
