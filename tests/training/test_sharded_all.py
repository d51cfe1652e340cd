"""Processes with rows of all weights train as data parallel ones do, and read each other's checkpoints."""

from __future__ import annotations

import gc
import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests._support import finished, packed_digits, records, refused, write_recipe
from tests.training._runs import DIE, TIED, cut_back, train, weights
from tests.training.test_ranks import rows_of

from headway.checkpoint.checkpoints import Checkpoints
from headway.core.launcher_environment import LaunchedProcess
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.launch.ranks import Ranks
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training.progress import LogLines
from headway.training.trainer import Trainer

NET = r"""
import torch
from torch import nn


def build(num_classes):
    # No bias before batch norm: its gradient is rounding alone, which Adam makes large.
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU()),
        nn.Conv2d(5, 2, 3, padding=1), nn.Dropout(0.1), nn.Flatten(), nn.Linear(2 * 64, 23), nn.ReLU(),
        nn.Linear(23, num_classes),
    )


def make(parameters):
    return torch.optim.SGD(parameters, lr=0.01)

"""
ALL = "parallel={strategy: sharded, what: all}"
OWNERS = "parallel={strategy: sharded, what: optimizer}"
DATA = "parallel={strategy: data}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("all")
    packed_digits(folder, per_class=30)
    (folder / "net.py").write_text(NET + TIED + DIE)
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:build", "ema": {"half_life_steps": 5}},
        optimizer={"name": "adamw", "lr": 0.01, "clip_norm": 1.0},
        activation_checkpointing=["^0$", "^4$"],
        micro_batch=8,
        batch=29,
        epochs=1,
        log_every_steps=3,
        log_ids=True,
        checkpoint={"every_steps": 4, "keep": 9},
    )
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return train(folder, "data", "--procs", "2")


@pytest.fixture(scope="module")
def divided(folder: Path) -> Path:
    return train(folder, "divided", "--procs", "2", ALL)


def read_checkpoint(run: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint of a run, with whole tensors."""
    found = Checkpoints(run / "checkpoints").newest()
    assert found is not None
    return {name: found.tensors[name] for name in found.tensors if not name.startswith("random/")}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6, msg=lambda said, name=name: name + said)


def go_on(run: Path, procs: str, *options: str) -> str:
    said = finished("train", "--resume", run, *(("--procs", procs) if procs != "1" else ()), *options)
    assert said.status == 0, said.err
    return said.err


@pytest.mark.check
def test_two_processes_have_the_weights_of_two_data_parallel_ones(data: Path, divided: Path) -> None:
    """With batch norm, EMA, clipping, micro-batches, recomputed blocks, evaluations and the whole checkpoint."""
    assert_close(weights(data), weights(divided))
    assert_close(read_checkpoint(data), read_checkpoint(divided))
    assert (rows_of(data) == rows_of(divided)).all()
    for kind in ("train", "evaluate"):
        for one, other in zip(records(data, kind), records(divided, kind), strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
            assert other["accuracy"] == one["accuracy"]
    assert all(record["exchange"]["sharded weights"] > 0 for record in records(divided, "train"))


def test_nothing_keeps_whole_weights(folder: Path, tmp_path: Path) -> None:
    """Neither the setup of a process nor its trainer, with EMA and the observer of layers."""
    loaded = read_recipe(folder / "recipe.yaml", (ALL,), TrainRecipe)
    with Ranks(loaded.recipe.comm, LaunchedProcess(1, 2, 0, 1, "127.0.0.1", 1, "torchrun"), None) as ranks:
        setup = build_setup(loaded, ranks=ranks)
        with (
            closing(setup.inputs),
            closing(Trainer(setup, RunFolder.create(tmp_path / "run"), LogLines(), ranks)) as trainer,
        ):
            gc.collect()
            plain = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
            assert [one for one in plain if one.shape == (23, 128)] == []
            assert trainer.collect_tensors()["model/4.weight"].tensor.shape == (11, 128)  # type: ignore[union-attr]


def test_each_process_saves_its_rows(divided: Path) -> None:
    checkpoint = divided / "checkpoints/step-00000004"
    files = [load_file(checkpoint / f"tensors-{rank}.safetensors") for rank in (0, 1)]
    for name in ("model/4.weight", "optimizer/4.weight/exp_avg", "ema/4.weight"):
        assert [tuple(file[name].shape) for file in files] == [(12, 128), (11, 128)]
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["format"] == 2


@pytest.mark.check
def test_resumed_is_uninterrupted_bit_for_bit(divided: Path, tmp_path: Path) -> None:
    cut = cut_back(divided, tmp_path / "cut")
    go_on(cut, "2")
    for one, other in ((weights(divided), weights(cut)), (read_checkpoint(divided), read_checkpoint(cut))):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert (rows_of(cut) == rows_of(divided)).all()


@pytest.mark.parametrize(
    ("start", "strategy"),
    [
        pytest.param("data", ALL, marks=pytest.mark.check),
        pytest.param("divided", DATA, marks=pytest.mark.check),
        pytest.param("divided", OWNERS, marks=pytest.mark.check),
    ],
)
def test_a_run_changes_its_strategy(
    folder: Path, data: Path, divided: Path, tmp_path: Path, start: str, strategy: str
) -> None:
    cut = cut_back(folder / start, tmp_path / "cut")
    go_on(cut, "2", strategy)
    assert_close(read_checkpoint(data), read_checkpoint(cut))


@pytest.mark.parametrize(
    ("start", "procs", "strategy"),
    [
        pytest.param("divided", "3", None, marks=pytest.mark.check),
        pytest.param("divided", "1", DATA, marks=pytest.mark.check),
        pytest.param("data", "3", ALL, marks=pytest.mark.check),
    ],
)
def test_any_number_of_processes_goes_on(
    folder: Path, data: Path, divided: Path, tmp_path: Path, start: str, procs: str, strategy: str | None
) -> None:
    """Two rows of a layer leave a third process without any."""
    cut = cut_back(folder / start, tmp_path / "cut")
    go_on(cut, procs, *(() if strategy is None else (strategy,)))
    for left, right in zip(records(data, "evaluate"), records(cut, "evaluate"), strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=0.05)


def test_it_evaluates_and_predicts_with_whole_weights(folder: Path, divided: Path) -> None:
    best = max(record["accuracy"] for record in records(divided, "evaluate"))
    assert finished("evaluate", divided, "--json").json()["accuracy"] == best
    assert weights(divided)["4.weight"].shape == (23, 128)
    assert finished("predict", divided, folder / "digits/3").status == 0


@pytest.mark.check
@pytest.mark.parametrize(
    "options",
    [
        ("optimizer={name: lars, lr: 1.0}", "model.ema=null", "optimizer.lookahead={every_steps: 3}"),
        ("comm.batch_norm=sync", "model.freeze=['^0']", "precision=bf16", "activation_checkpointing=false"),
        ("model.batch_norm={recompute_batches: 2}", "micro_batch=null", "channels_last=false"),
    ],
)
def test_what_works_beside_it(folder: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    one, other = (
        train(folder, str(tmp_path / name), "--procs", "3", *options, strategy)
        for name, strategy in (("data", DATA), ("all", ALL))
    )
    assert_close(read_checkpoint(one), read_checkpoint(other))
    assert_close(weights(one), weights(other))


@pytest.mark.check
def test_after_a_loss_all_start_again_from_the_last_checkpoint(folder: Path, divided: Path) -> None:
    options = ("callbacks=[net.py:Die]", "checkpoint.asynchronous=false")
    said = finished("train", folder / "recipe.yaml", "--run", folder / "lost", "--procs", "2", ALL, *options)
    assert said.status == 0, said.err
    assert "All workers are started again" in said.err
    assert "Resumed at step 4" in said.err
    lost, whole = weights(folder / "lost"), weights(divided)
    assert all(torch.equal(value, lost[name]) for name, value in whole.items())


@pytest.mark.check
def test_one_process_has_all_of_it(folder: Path) -> None:
    said = finished("train", folder / "recipe.yaml", "--run", folder / "alone", ALL)
    assert said.status == 0, said.err


def test_a_dry_run_says_the_memory_of_rows(folder: Path, tmp_path: Path) -> None:
    asked = ("train", folder / "recipe.yaml", "--dry-run", "--procs", "3", "--json", "--out", tmp_path / "known.json")
    said = {strategy: finished(*asked, strategy).json() for strategy in (DATA, ALL)}
    assert said[ALL]["sent_bytes"] == pytest.approx(1.5 * said[DATA]["sent_bytes"])
    whole, rows = ({item["name"]: item["bytes"] for item in one["memory"]} for one in said.values())
    shapes = [(5, 9), (5,), (5,), (2, 45), (2,), (23, 128), (23,), (10, 23), (10,)]
    held = sum(-(-one[0] // 3) * (one[1] if one[1:] else 1) for one in shapes)
    for name, copies in (("weights", 1), ("gradients", 1), ("optimizer state", 2)):
        # Adam has a count of steps for each tensor too.
        assert rows[name] == pytest.approx(4 * copies * held, rel=0.01), name
        assert rows[name] < whole[name]
    assert rows["gradients of micro-batches"] == whole["gradients"]
    assert "buckets" not in rows
    assert rows["blocks at work"] > 0


REFUSED: dict[str, tuple[str, ...]] = {
    "half_weights": ("half_weights=true", "precision=bf16", "model.ema=null"),
    "optimizer.name: muon": ("optimizer={name: muon, lr: 0.01}",),
    "optimizer.factory": ("optimizer={factory: net.py:make, lr: 0.01}",),
    "precision: fp16": ("precision=fp16",),
    "compile": ("compile=true", "activation_checkpointing=false"),
    "model.freeze_after": ("model.freeze_after=[{match: '^0', after_epochs: 0.4}]",),
    "model.unfreeze_at": ("model.freeze=['^0']", "model.unfreeze_at=[{match: '^0', at_epoch: 0.4}]"),
    "observe.activations": ("observe.activations=['^0']",),
    "observe.layer_rates": ("observe.layer_rates=true",),
    "observe.noise_scale": ("observe.noise_scale=true",),
    "comm.algorithm: tree": ("comm.algorithm=tree",),
    "comm.rails": ("comm.rails=2",),
    "several interfaces in comm.interface": ("comm.interface=[eth0, eth1]",),
    "comm.wire: bf16": ("comm.wire=bf16",),
    "comm.bucket_mb": ("comm.bucket_mb=1",),
    "micro_batch: auto": ("micro_batch=auto",),
    "comm.on_rank_failure: continue": ("comm.on_rank_failure=continue",),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(folder: Path, name: str) -> None:
    said = refused("train", folder / "recipe.yaml", "--run", folder / "no", ALL, *REFUSED[name], status=2)
    assert f"parallel.strategy sharded with what: all does not work with {name}" in said
    assert ", or take another strategy" in said


@pytest.mark.check
def test_tied_weights_are_refused_by_name(folder: Path) -> None:
    more = ("model.factory=net.py:tied", "activation_checkpointing=false")
    found = finished("train", folder / "recipe.yaml", "--run", folder / "no-ties", "--procs", "2", ALL, *more)
    assert found.status == 2, found.err
    said = "second.weight: this parameter is also first.weight, and FSDP2 would make two of it. Set parallel.what to"
    assert said in found.err
