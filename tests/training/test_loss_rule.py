"""A step's gradient is the sum over its samples of loss / global batch, however they are divided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests._support import damage, packed_digits, records, write_recipe
from torch import nn

from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.data import opening
from headway.data.augment import Augment
from headway.data.augment_recipe import AugmentRecipe
from headway.data.loader import Loader
from headway.data.order import Order
from headway.setup.build import build_setup
from headway.setup.precision import Precision
from headway.setup.recipe import TrainRecipe
from headway.setup.task import Classification, Regression, TargetSpec, Task, is_better
from headway.setup.train_setup import TrainSetup
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loss")
    packed_digits(folder)
    # With a learning rate of 1, without momentum, a step's gradient is what the weights lose.
    write_recipe(folder / "recipe.yaml", optimizer={"name": "sgd", "lr": 1.0, "momentum": 0.0}, epochs=1)
    return folder


def stepped(folder: Path, run: Path, *overrides: str, steps: int = 1) -> tuple[TrainSetup, dict[str, torch.Tensor]]:
    """The setup before its first step, and what each parameter lost in some steps."""
    setup = build_setup(read_recipe(folder / "recipe.yaml", overrides, TrainRecipe))
    before = {name: value.clone() for name, value in setup.model.state_dict().items()}
    trainer = Trainer(setup, RunFolder.create(run), SilentDisplay())
    try:
        trainer.run(steps)
    finally:
        trainer.close()
    lost = {name: before[name] - value for name, value in setup.model.state_dict().items()}
    setup.model.load_state_dict(before)
    return setup, lost


def by_hand(setup: TrainSetup, counted: NDArray[np.bool_] | None = None) -> dict[str, torch.Tensor]:
    """The gradient of the first step: sum of the losses of the samples that count / batch."""
    batch = next(iter(setup.batches(0)))
    losses = setup.task.loss(setup.model(setup.augment(batch.images, batch.labels, batch.keys())[0]), batch.labels)
    counts = torch.ones(len(losses)) if counted is None else torch.from_numpy(counted).float()
    named = dict(setup.model.named_parameters())
    gradients = torch.autograd.grad((losses * counts).sum() / setup.recipe.batch, list(named.values()))
    return dict(zip(named, gradients, strict=True))


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in other.items():
        assert value.abs().max() > 1e-3
        torch.testing.assert_close(one[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("micro", [30, 15, 7, 4, 1])
@pytest.mark.thin(2)
def test_micro_batches_make_the_whole_batch(folder: Path, tmp_path: Path, micro: int) -> None:
    _, whole = stepped(folder, tmp_path / "whole", steps=3)
    setup, parts = stepped(folder, tmp_path / "parts", f"micro_batch={micro}", steps=3)
    assert_close(parts, whole, 1e-6)
    _, first = stepped(folder, tmp_path / "first", f"micro_batch={micro}")
    assert_close(first, by_hand(setup), 1e-6)
    for name in ("whole", "parts"):
        assert [r["step"] for r in records(tmp_path / name)] == [1, 2, 3]
    losses = [[r["loss"] for r in records(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_the_batch_is_the_mean_over_its_samples(folder: Path, tmp_path: Path) -> None:
    """A batch of twice as many samples has a gradient of the same size, not of twice the size."""
    setup, gradient = stepped(folder, tmp_path / "a", "batch=180")
    batch = next(iter(setup.batches(0)))
    loss = nn.functional.cross_entropy(setup.model(setup.augment.normalise(batch.images)), batch.labels)
    named = dict(setup.model.named_parameters())
    expected = torch.autograd.grad(loss, list(named.values()))
    assert_close(gradient, dict(zip(named, expected, strict=True)), 1e-6)


@pytest.mark.parametrize("world", [2, 3, 7, 40])
@pytest.mark.parametrize("kind", ["class", "value"])
def test_the_ranks_shares_sum_to_the_whole_batch(folder: Path, world: int, kind: str) -> None:
    """In float64, with shares of uneven sizes, down to ranks without a sample."""
    data = opening.open(folder / "digits.packed/train")
    batch, order = 30, Order(len(data), 5)
    task: Task = Classification(TargetSpec(kind="class", classes=data.classes, numbers=1), label_smoothing=0.1)
    if kind == "value":
        task = Regression(TargetSpec(kind="value", classes=(), numbers=1))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, task.outputs)).double()
    augment = Augment(AugmentRecipe(mean=(77.0,), std=(95.0,), translate=1), "cpu")
    precision = Precision("fp32", torch.device("cpu"))

    def gradients(rank: int, world: int) -> list[torch.Tensor]:
        loader = Loader(data, batch=batch, order=order, stop=batch, rank=rank, world=world, threads=1)
        for part in loader:
            if len(part.images):
                outputs = model(augment(part.images, part.labels, part.keys())[0].double())
                labels = part.labels.double() if kind == "value" else part.labels
                losses = task.loss(outputs, labels).double()
                precision.backward(losses, torch.full((len(losses),), 1 / batch, dtype=torch.float64))
        found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found

    whole = gradients(0, 1)
    shares = [gradients(rank, world) for rank in range(world)]
    tolerance = 1e-12 if kind == "class" else 1e-5  # squared errors are computed in float32
    for number, expected in enumerate(whole):
        assert expected.abs().max() > 1e-3
        total = torch.stack([share[number] for share in shares]).sum(dim=0)
        torch.testing.assert_close(total, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("micro", [30, 8])
def test_a_masked_sample_counts_zero(folder: Path, tmp_path: Path, micro: int) -> None:
    packed_digits(tmp_path)
    (tmp_path / "recipe.yaml").write_text((folder / "recipe.yaml").read_text())
    (tmp_path / "net.py").write_text((folder / "net.py").read_text())
    first = Order(180, 0)(np.arange(30))[1]
    bad = first[[0, 11, 29]]
    damage(tmp_path / "digits.packed/train", *bad.tolist())
    more = ("data.on_bad=mask", "data.max_bad_share=1", f"micro_batch={micro}", "augment.mean=[70]", "augment.std=[90]")
    setup, gradient = stepped(tmp_path, tmp_path / "run", *more)
    counted = ~np.isin(first, bad)
    assert counted.sum() == 27
    assert_close(gradient, by_hand(setup, counted), 1e-6)
    everything = by_hand(setup)
    assert any((gradient[name] - everything[name]).abs().max() > 1e-3 for name in everything)
    batch = next(iter(setup.batches(0)))
    losses = setup.task.loss(setup.model(setup.augment.normalise(batch.images)), batch.labels).detach().numpy()
    assert records(tmp_path / "run")[0]["loss"] == pytest.approx(losses[counted].sum() / 30, abs=1e-6)


def test_clipping_comes_after_all_micro_batches(folder: Path, tmp_path: Path) -> None:
    _, whole = stepped(folder, tmp_path / "whole", "optimizer.clip_norm=0.01")
    _, parts = stepped(folder, tmp_path / "parts", "optimizer.clip_norm=0.01", "micro_batch=4")
    for lost in (whole, parts):
        norm = torch.stack([value.square().sum() for value in lost.values()]).sum().sqrt().item()
        assert norm == pytest.approx(0.01, rel=1e-4)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=1e-7)


def test_of_equal_accuracies_the_lower_loss_is_the_better() -> None:
    """A run that has diverged is as accurate as chance: its weights do not stand for the run's best."""
    accuracy = Classification(TargetSpec(kind="class", classes=("a", "b"), numbers=1))
    error = Regression(TargetSpec(kind="value", classes=(), numbers=1))
    best = {"accuracy": 0.1, "absolute_error": 0.1, "loss": 2.3}
    nan = float("nan")
    for task, name in ((accuracy, "accuracy"), (error, "absolute_error")):
        for loss, expected in ((2.2, True), (2.3, False), (900.0, False), (nan, False)):
            assert is_better(task, {name: 0.1, "loss": loss}, best) is expected
        assert is_better(task, {name: 0.1, "loss": 900.0}, {name: 0.1, "loss": nan})
        assert not is_better(task, {name: nan, "loss": 0.0}, best)
    assert is_better(accuracy, {"accuracy": 0.2, "loss": 900.0}, best)
    assert not is_better(error, {"absolute_error": 0.2, "loss": 0.0}, best)
