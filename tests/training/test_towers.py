"""Processes that compute a tower each train as one does, go on where they stopped, with any number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests._support import finished, packed_digits, records, refused, write_recipe
from tests.training._runs import DIE, cut_back, train, weights
from tests.training.test_ranks import rows_of

NET = r"""
import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(8, 4, 3, padding=1)


class Net(nn.Module):
    def __init__(self, num_classes, wide=False):
        super().__init__()
        self.towers = nn.ModuleList([Tower(), Tower()])
        if wide:
            self.towers[1].second = nn.Conv2d(8, 6, 3, padding=1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16 + (32 if wide else 0), 24), nn.ReLU(),
                                  nn.Linear(24, num_classes))

    def forward(self, x):
        x = torch.cat([tower.norm(tower.first(x)).relu() for tower in self.towers], 1)
        return self.head(nn.functional.max_pool2d(torch.cat([tower.second(x) for tower in self.towers], 1), 2))


def build(num_classes):
    return Net(num_classes)


def unlike(num_classes):
    return Net(num_classes, wide=True)


class Sum(Net):
    def forward(self, x):
        one, two = (tower.norm(tower.first(x)) for tower in self.towers)
        return self.head(torch.cat([one + two, one + two], 1)[..., ::2, ::2])


def added(num_classes):
    return Sum(num_classes)

"""
TOWERS = "parallel={strategy: towers}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towers")
    packed_digits(folder, per_class=30)
    (folder / "net.py").write_text(NET + DIE)
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:build", "ema": {"half_life_steps": 5}},
        augment={"translate": 1, "mixup": {"alpha": 0.2}},
        optimizer={"name": "adamw", "lr": 0.003},
        batch=29,
        epochs=2,
        log_every_steps=3,
        log_ids=True,
        checkpoint={"every_steps": 4, "keep": 9},
    )
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    return train(folder, "alone")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Path:
    return train(folder, "shared", "--procs", "2", TOWERS)


@pytest.mark.check
def test_two_processes_have_the_weights_of_one(alone: Path, shared: Path) -> None:
    """Bit for bit, over the whole run: with batch norm, mixup, EMA and evaluations."""
    assert all(torch.equal(value, weights(shared)[name]) for name, value in weights(alone).items())
    assert (rows_of(shared) == rows_of(alone)).all()
    for one, several in zip(records(alone, "evaluate"), records(shared, "evaluate"), strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-6)
    for one, several in zip(records(alone, "train"), records(shared, "train"), strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-6)


@pytest.mark.parametrize("procs", ["2", pytest.param("1", marks=pytest.mark.check)])
def test_resumed_is_uninterrupted_bit_for_bit(shared: Path, tmp_path: Path, procs: str) -> None:
    """By as many processes, and by one that has the whole network."""
    cut = cut_back(shared, tmp_path / "cut")
    said = finished("train", "--resume", cut, *(("--procs", procs) if procs != "1" else ()))
    assert said.status == 0, said.err
    assert all(torch.equal(value, weights(cut)[name]) for name, value in weights(shared).items())
    assert (rows_of(cut) == rows_of(shared)).all()


@pytest.mark.check
def test_two_places_have_the_weights_of_two_data_parallel_processes(folder: Path, tmp_path: Path) -> None:
    """Each place saves a share of its towers, and any number of processes goes on from all shares."""
    two = train(folder, "two", "--procs", "2")
    places = train(folder, "places", "--procs", "4", TOWERS)
    assert all(torch.equal(value, weights(places)[name]) for name, value in weights(two).items())
    assert (rows_of(places) == rows_of(two)).all()
    for procs in ("4", "2"):
        cut = cut_back(places, tmp_path / procs)
        said = finished("train", "--resume", cut, "--procs", procs)
        assert said.status == 0, said.err
        assert (rows_of(cut) == rows_of(two)).all()
        if procs == "4":
            assert all(torch.equal(value, weights(cut)[name]) for name, value in weights(two).items())


@pytest.mark.check
def test_a_tower_that_is_frozen_later_stays_as_it_is(folder: Path) -> None:
    frozen = "model.freeze_after=[{match: '^towers\\.0', after_epochs: 0.6}]"
    run, alone = train(folder, "frozen", "--procs", "2", TOWERS, frozen), train(folder, "frozen-alone", frozen)
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(alone).items())


@pytest.mark.check
def test_after_a_loss_all_start_again_from_the_last_checkpoint(folder: Path, shared: Path) -> None:
    options = ("callbacks=[net.py:Die]", "checkpoint.asynchronous=false")
    said = finished("train", folder / "recipe.yaml", "--run", folder / "lost", "--procs", "2", TOWERS, *options)
    assert said.status == 0, said.err
    assert "All workers are started again" in said.err
    assert "Resumed at step 4" in said.err
    assert all(torch.equal(value, weights(folder / "lost")[name]) for name, value in weights(shared).items())


@pytest.mark.check
@pytest.mark.parametrize("name", ["sgd", "nag", "adam", "signum", "ftml", "rmsprop_sgd", "lars", "lamb", "lbsgd"])
def test_every_optimizer_that_is_not_refused_saves_and_goes_on(folder: Path, tmp_path: Path, name: str) -> None:
    # Its change from RMSprop to SGD has to lie within the run.
    more = ", center_epochs: 0.2, period_epochs: 0.1" if name == "rmsprop_sgd" else ""
    options = (f"optimizer={{name: {name}, lr: 0.01{more}}}", "epochs=0.5", "model.ema=null")
    run = train(folder, f"optimizer-{name}", "--procs", "2", TOWERS, *options)
    cut = cut_back(run, tmp_path / "cut")
    said = finished("train", "--resume", cut, "--procs", "2")
    assert said.status == 0, said.err
    assert all(torch.equal(value, weights(cut)[key]) for key, value in weights(run).items())
    alone = train(folder, f"alone-{name}", *options)
    assert all(torch.equal(value, weights(alone)[key]) for key, value in weights(run).items())


def test_each_process_keeps_its_tower_alone(shared: Path) -> None:
    checkpoint = shared / "checkpoints/step-00000004"
    first, second = (load_file(checkpoint / f"tensors-{rank}.safetensors") for rank in (0, 1))
    for name in (
        "model/towers.{}.second.weight",
        "optimizer/towers.{}.second.weight/exp_avg",
        "ema/towers.{}.first.bias",
    ):
        for tower in (0, 1):
            rows = [len(file.get(name.format(tower), ())) for file in (first, second)]
            assert rows == ([4, 0] if tower == 0 else [0, 4])


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "no regular expression": (("parallel={strategy: towers, match: '('}",), "'(' is not a regular expression"),
    "no group": (("parallel={strategy: towers, match: '^towers'}",), "has 0 groups: put one around the number"),
    "an optimizer with more of a parameter than its shape": (
        (TOWERS, "optimizer={name: novograd, lr: 0.01}"),
        "parallel.strategy towers does not work with optimizer.name: novograd",
    ),
    "matrices": ((TOWERS, "optimizer={name: muon, lr: 0.01}"), "does not work with optimizer.name: muon"),
    "a norm of all gradients": ((TOWERS, "optimizer.clip_norm=1"), "does not work with optimizer.clip_norm"),
    "fp16": ((TOWERS, "precision=fp16"), "does not work with precision: fp16"),
    "16-bit weights": ((TOWERS, "half_weights=true", "precision=bf16"), "does not work with half_weights"),
    "compiled": ((TOWERS, "compile=true"), "does not work with compile"),
    "micro-batches": ((TOWERS, "micro_batch=4"), "does not work with micro_batch"),
    "recomputed": ((TOWERS, "activation_checkpointing=true"), "does not work with activation_checkpointing"),
    "noise": ((TOWERS, "observe.noise_scale=true"), "does not work with observe.noise_scale"),
    "rates of layers": ((TOWERS, "observe.layer_rates=true"), "does not work with observe.layer_rates"),
    "activations": ((TOWERS, "observe.activations=['first']"), "does not work with observe.activations"),
    "synchronised": ((TOWERS, "comm.batch_norm=sync"), "does not work with comm.batch_norm: sync"),
    "going on": ((TOWERS, "comm.on_rank_failure=continue"), "does not work with comm.on_rank_failure: continue"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(folder: Path, name: str) -> None:
    options, said = REFUSED[name]
    assert said in refused("train", folder / "recipe.yaml", "--run", folder / "no", *options, status=2)


LATE: dict[str, tuple[str, tuple[str, ...], int, str]] = {
    "no towers": (
        "2", ("parallel={strategy: towers, match: '^columns\\.(\\d+)'}",), 2,
        "matches no module of this network. Its modules are for example: towers, towers.0",
    ),
    "an odd number of processes": (
        "3", (TOWERS,), 2, "2 processes train a network of 2 towers together, and there are 3. Start a multiple of 2",
    ),
    "unlike towers": ("2", (TOWERS, "model.factory=net.py:unlike"), 2, "tower 1 has other parameters or buffers"),
    "towers that meet elsewhere": (
        "2", (TOWERS, "model.factory=net.py:added"), 2,
        "Tensor.add of values of the towers 0, 1 has no rule for towers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_what_a_network_does_not_allow_is_refused(folder: Path, name: str) -> None:
    procs, options, status, said = LATE[name]
    found = finished("train", folder / "recipe.yaml", "--procs", procs, "--run", folder / f"no-{name}", *options)
    assert found.status == status, found.err
    assert said in found.err
    assert "Traceback" not in found.err
    assert not (folder / f"no-{name}").exists()
