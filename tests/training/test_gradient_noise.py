"""The gradient of a step with noise is the sum of the samples' own gradients, each times its factor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests._support import damage, packed_digits, records, write_recipe

from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.optim import draw_gradient_noise
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer

NOISY = "optimizer={name: sgd, lr: 1.0, momentum: 0.0, gradient_noise: 0.25}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    packed_digits(tmp_path)
    write_recipe(tmp_path / "recipe.yaml", optimizer={"name": "sgd", "lr": 1.0, "momentum": 0.0}, epochs=1)
    return tmp_path


def lost(folder: Path, name: str, *overrides: str) -> dict[str, torch.Tensor]:
    """What each parameter loses in the first step: its gradient."""
    setup = build_setup(read_recipe(folder / "recipe.yaml", overrides, TrainRecipe))
    before = {key: value.clone() for key, value in setup.model.state_dict().items()}
    trainer = Trainer(setup, RunFolder.create(folder / name), SilentDisplay())
    trainer.run(1)
    trainer.close()
    return {key: before[key] - value for key, value in setup.model.state_dict().items()}


@pytest.mark.parametrize("micro", ["30", "7"])
def test_a_step_weights_each_samples_gradient(folder: Path, micro: str) -> None:
    setup = build_setup(read_recipe(folder / "recipe.yaml", (NOISY,), TrainRecipe))
    batch = next(iter(setup.batches(0)))
    factors = draw_gradient_noise(batch.keys(), 0.25 * 30**0.5)
    images, labels = setup.augment(batch.images, batch.labels, batch.keys())
    wanted = {name: torch.zeros_like(value) for name, value in setup.model.named_parameters()}
    for sample, factor in enumerate(factors.tolist()):
        loss = setup.task.loss(setup.model(images[sample : sample + 1]), labels[sample : sample + 1]).sum()
        for name, gradient in zip(wanted, torch.autograd.grad(loss, list(setup.model.parameters())), strict=True):
            wanted[name] += gradient * factor / 30
    setup.inputs.close()
    found = lost(folder, "noisy", NOISY, f"micro_batch={micro}")
    plain = lost(folder, "plain", f"micro_batch={micro}")
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)
        assert not torch.allclose(found[name], plain[name], atol=1e-3)


def test_the_loss_that_is_logged_has_no_noise(folder: Path) -> None:
    damage(folder / "digits.packed/train", 3)
    for name, overrides in (("plain", ()), ("noisy", (NOISY,))):
        lost(folder, name, "data.on_bad=mask", "batch=180", *overrides)
    losses = [records(folder / name)[0]["loss"] for name in ("plain", "noisy")]
    assert losses[0] == losses[1]
