"""Processes that own the optimizer's state train as data parallel ones do, and read each other's checkpoints."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests._support import finished, packed_digits, records, refused, write_recipe
from tests.training._runs import DIE, TIED, cut_back, train, weights
from tests.training.test_ranks import rows_of

from headway.checkpoint.checkpoints import Checkpoints
from headway.core.errors import UsageError
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
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.Dropout(0.1),
        nn.Flatten(), nn.Linear(6 * 64, 24), nn.ReLU(), nn.Linear(24, num_classes),
    )


class Gaps(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_classes, 128)[:, ::2])

    def forward(self, x):
        return x.flatten(1) @ self.weight.T


def gaps(num_classes):
    return Gaps(num_classes)


def make(parameters):
    return torch.optim.SGD(parameters, lr=0.01)

"""
SHARDED = "parallel={strategy: sharded, what: optimizer}"
DATA = "parallel={strategy: data}"
HALF = ("precision=bf16", "half_weights=true", "model.ema=null", "model.factory=net.py:tied")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    packed_digits(folder, per_class=30)
    (folder / "net.py").write_text(NET + TIED + DIE)
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:build", "ema": {"half_life_steps": 5}},
        optimizer={"name": "adamw", "lr": 0.003, "clip_norm": 1.0},
        observe={"layer_rates": True, "noise_scale": True},
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
def sharded(folder: Path) -> Path:
    return train(folder, "sharded", "--procs", "2", SHARDED)


def read_checkpoint(run: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint of a run, with whole tensors."""
    found = Checkpoints(run / "checkpoints").newest()
    assert found is not None
    return {name: found.tensors[name] for name in found.tensors if not name.startswith("random/")}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def go_on(run: Path, procs: str, *options: str) -> str:
    said = finished("train", "--resume", run, *(("--procs", procs) if procs != "1" else ()), *options)
    assert said.status == 0, said.err
    return said.err


def test_two_processes_have_the_weights_of_two_data_parallel_ones(data: Path, sharded: Path) -> None:
    """Bit for bit, with batch norm, EMA, clipping, evaluations and the whole checkpoint; and they say the same."""
    assert_same(weights(data), weights(sharded))
    assert_same(read_checkpoint(data), read_checkpoint(sharded))
    assert (rows_of(data) == rows_of(sharded)).all()
    for kind in ("train", "evaluate"):
        for one, other in zip(records(data, kind), records(sharded, kind), strict=True):
            for key in one.keys() - {"seconds", "images_s", "stages"}:
                if isinstance(one[key], float) and "noise" in key:
                    assert other[key] == pytest.approx(one[key], rel=1e-3)
                elif key in ("loss", "accuracy", "lr"):
                    assert other[key] == one[key]


def test_a_state_is_saved_by_its_owner_alone(sharded: Path) -> None:
    checkpoint = sharded / "checkpoints/step-00000004"
    files = [load_file(checkpoint / f"tensors-{rank}.safetensors") for rank in (0, 1)]
    states = [{name for name in file if name.startswith("optimizer/")} for file in files]
    assert not states[0] & states[1]
    assert len(states[0] | states[1]) == 3 * 10
    pieces = json.loads((checkpoint / "manifest.json").read_text())
    assert "optimizer/0.weight/exp_avg" in json.dumps(pieces)


@pytest.mark.check
def test_resumed_is_uninterrupted_bit_for_bit(sharded: Path, tmp_path: Path) -> None:
    cut = cut_back(sharded, tmp_path / "cut")
    go_on(cut, "2")
    assert_same(weights(sharded), weights(cut))
    assert_same(read_checkpoint(sharded), read_checkpoint(cut))
    assert (rows_of(cut) == rows_of(sharded)).all()


@pytest.mark.parametrize(("start", "strategy"), [("data", SHARDED), ("sharded", DATA)])
@pytest.mark.check
def test_a_run_changes_its_strategy_and_keeps_its_bits(
    folder: Path, data: Path, sharded: Path, tmp_path: Path, start: str, strategy: str
) -> None:
    cut = cut_back(folder / start, tmp_path / "cut")
    go_on(cut, "2", strategy)
    assert_same(read_checkpoint(data), read_checkpoint(cut))


def assert_alike(one: Path, other: Path) -> None:
    for kind in ("train", "evaluate"):
        for left, right in zip(records(one, kind), records(other, kind), strict=True):
            assert right["loss"] == pytest.approx(left["loss"], rel=0.05)


@pytest.mark.parametrize(
    ("start", "procs", "strategy"),
    [
        ("sharded", "1", DATA),
        pytest.param("data", "3", SHARDED, marks=pytest.mark.check),
        pytest.param("sharded", "3", None, marks=pytest.mark.check),
    ],
)
def test_any_number_of_processes_goes_on(
    folder: Path, data: Path, sharded: Path, tmp_path: Path, start: str, procs: str, strategy: str | None
) -> None:
    cut = cut_back(folder / start, tmp_path / "cut")
    go_on(cut, procs, *(() if strategy is None else (strategy,)))
    assert_alike(data, cut)
    said = finished("evaluate", cut)
    assert said.status == 0, said.err


@pytest.mark.check
def test_it_does_not_matter_who_wrote_a_checkpoint(data: Path, sharded: Path, tmp_path: Path) -> None:
    """Three owners go on alike, bit for bit, from two data parallel processes and from two owners."""
    ends = []
    for start in (data, sharded):
        cut = cut_back(start, tmp_path / start.name)
        go_on(cut, "3", SHARDED)
        ends.append(read_checkpoint(cut))
    assert_same(*ends)


@pytest.mark.check
def test_muon_goes_from_four_processes_to_two_to_one_with_the_bits_of_data_parallel_ones(
    folder: Path, tmp_path: Path
) -> None:
    muon, ends = "optimizer={name: muon, lr: 0.02, lr_rest: 0.1, clip_norm: 1.0}", []
    for name, option in (("data", "comm.algorithm=tree"), ("sharded", SHARDED)):
        four = train(folder, f"muon-{name}", "--procs", "4", muon, option)
        two = cut_back(four, tmp_path / f"{name}-2", step=4)
        go_on(two, "2")
        one = cut_back(two, tmp_path / f"{name}-1", step=8)
        go_on(one, "1")
        ends.append([read_checkpoint(run) for run in (four, two, one)])
    for data, sharded in zip(*ends, strict=True):
        assert_same(data, sharded)


@pytest.mark.check
def test_16_bit_weights_have_masters_at_their_owners(folder: Path, tmp_path: Path) -> None:
    """With the same bits as data parallel training, and back and forth between the two; tied weights are one."""
    data, sharded = (
        train(folder, f"half-{name}", "--procs", "2", *HALF, one)
        for name, one in (("data", DATA), ("sharded", SHARDED))
    )
    assert_same(read_checkpoint(data), read_checkpoint(sharded))
    assert {value.dtype for name, value in read_checkpoint(sharded).items() if "weight" in name} == {torch.float32}
    narrow = {name: value.bfloat16().float() for name, value in weights(data).items()}
    assert_same(narrow, weights(sharded))
    for start, strategy in ((data, SHARDED), (sharded, DATA)):
        cut = cut_back(start, tmp_path / start.name)
        go_on(cut, "2", strategy)
        assert_same(read_checkpoint(data), read_checkpoint(cut))
    found, best = (
        finished("evaluate", sharded, "--json").json(),
        max(r["accuracy"] for r in records(sharded, "evaluate")),
    )
    assert found["accuracy"] == best


@pytest.mark.check
@pytest.mark.parametrize("what", ["freeze_after=[{match: '^0', after_epochs: 0.4}]", "freeze=['^0']"])
def test_frozen_layers_stay_as_they_are(folder: Path, what: str) -> None:
    more = (f"model.{what}", "micro_batch=8", "optimizer.lookahead={every_steps: 3}", "model.ema=null")
    one, other = (
        train(folder, f"{what[:8]}{number}", "--procs", "2", *more, strategy)
        for number, strategy in enumerate((DATA, SHARDED))
    )
    assert_same(read_checkpoint(one), read_checkpoint(other))


@pytest.mark.check
def test_after_a_loss_all_start_again_from_the_last_checkpoint(folder: Path, sharded: Path) -> None:
    options = ("callbacks=[net.py:Die]", "checkpoint.asynchronous=false")
    said = finished("train", folder / "recipe.yaml", "--run", folder / "lost", "--procs", "2", SHARDED, *options)
    assert said.status == 0, said.err
    assert "All workers are started again" in said.err
    assert "Resumed at step 4" in said.err
    assert_same(weights(folder / "lost"), weights(sharded))


def test_one_process_has_all_of_it(folder: Path) -> None:
    said = finished("train", folder / "recipe.yaml", "--run", folder / "alone", SHARDED)
    assert said.status == 0, said.err


@pytest.mark.check
def test_a_dry_run_says_the_memory_of_an_owner(folder: Path, tmp_path: Path) -> None:
    asked = (
        "train",
        folder / "recipe.yaml",
        "--dry-run",
        "--procs",
        "2",
        "--json",
        "--out",
        tmp_path / "workload.json",
    )
    said = {strategy: finished(*asked, strategy).json()["memory"] for strategy in (DATA, SHARDED)}
    whole, owned = ({item["name"]: item["bytes"] for item in one} for one in said.values())
    assert 0.5 <= owned["optimizer state"] / whole["optimizer state"] < 1
    assert "buckets" in whole
    assert "buckets" not in owned


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "an optimizer of the user": (
        (SHARDED, "optimizer={factory: net.py:make, lr: 0.01}"),
        "parallel.strategy sharded does not work with optimizer.factory, as nothing is known of its state",
    ),
    "averages of masters": (
        (SHARDED, "half_weights=true", "precision=bf16"), "does not work with half_weights and model.ema",
    ),
    "slow weights of masters": (
        (SHARDED, "half_weights=true", "precision=bf16", "model.ema=null", "optimizer.lookahead={every_steps: 3}"),
        "does not work with half_weights and optimizer.lookahead",
    ),
    "an algorithm of all-reduces": ((SHARDED, "comm.algorithm=tree"), "does not work with comm.algorithm: tree"),
    "rails": ((SHARDED, "comm.rails=2"), "does not work with comm.rails"),
    "interfaces": ((SHARDED, "comm.interface=[eth0, eth1]"), "does not work with several interfaces in comm.interface"),
    "going on": ((SHARDED, "comm.on_rank_failure=continue"), "does not work with comm.on_rank_failure: continue"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(folder: Path, name: str) -> None:
    options, said = REFUSED[name]
    assert said in refused("train", folder / "recipe.yaml", "--run", folder / "no", *options, status=2)


def test_a_process_that_sees_no_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    """It would go on without the state that it owns: the state of another rank has nothing of it."""
    loaded = read_recipe(folder / "recipe.yaml", (SHARDED,), TrainRecipe)
    seat = LaunchedProcess(1, 2, 0, 1, "127.0.0.1", 1, "torchrun")
    with Ranks(loaded.recipe.comm, seat, None) as ranks:
        setup = build_setup(loaded, ranks=ranks)
        with (
            closing(setup.inputs),
            closing(Trainer(setup, RunFolder.create(tmp_path / "run"), LogLines(), ranks)) as trainer,
            pytest.raises(UsageError) as error,
        ):
            trainer.recovery.load_state_dict({"step": 4}, {})
    assert "this process holds its part of the state at step 0, and the others are at step 4" in str(error.value)
    assert "Let all hosts see the folder of the run" in str(error.value)


def test_a_parameter_with_gaps_is_refused_by_name(folder: Path) -> None:
    options = ("--run", folder / "no-gaps", "--procs", "2", SHARDED, "model.factory=net.py:gaps")
    found = finished("train", folder / "recipe.yaml", *options)
    assert found.status == 2, found.err
    assert "weight: this parameter is a view with gaps in memory, which cannot be sent. Make it contiguous" in found.err
