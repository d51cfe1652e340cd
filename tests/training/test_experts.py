"""Processes that share experts train as one does, resume on other numbers of processes, and refuse what they cannot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tests._support import finished, packed_digits, read_newest, records, refused, write_recipe
from tests.training._runs import cut_back, weights
from tests.training.test_ranks import rows_of

from headway.checkpoint.checkpoints import Checkpoints

NET = """
import torch
from torch import nn

from headway.model import MixtureOfExperts, NoisyTopKGate, SwitchGate


class Net(nn.Module):
    def __init__(self, num_classes, gate, capacity_factor=None):
        super().__init__()
        self.body = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.mixture = MixtureOfExperts(16, 24, experts=4, gate=gate, capacity_factor=capacity_factor)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x):
        x = torch.relu(self.body(x)).permute(0, 2, 3, 1)
        return self.head((x + self.mixture(x)).mean((1, 2)))


def switch(num_classes, capacity_factor=None):
    return Net(num_classes, SwitchGate(16, 4), capacity_factor)


def noisy(num_classes):
    return Net(num_classes, NoisyTopKGate(16, 4))


def wide(num_classes):
    return Net(num_classes, SwitchGate(16, 4, balance_weight=0.1))


class Deep(Net):
    # The second gate's loss is a function of the first experts' weights.
    def __init__(self, num_classes):
        super().__init__(num_classes, SwitchGate(16, 4))
        self.first = MixtureOfExperts(16, 24, experts=4, gate=SwitchGate(16, 4))

    def forward(self, x):
        x = self.first(torch.relu(self.body(x)).permute(0, 2, 3, 1))
        return self.head((x + self.mixture(x)).mean((1, 2)))


def plain(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""
TWO, FOUR = ("parallel={strategy: experts, ranks: 2}", "parallel={strategy: experts, ranks: 4}")

EACH = "log_every_steps=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    packed_digits(folder, per_class=60)
    (folder / "net.py").write_text(NET)
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:switch"},
        optimizer={"name": "nag", "lr": 0.4, "clip_norm": 1.0},
        batch=47,
        epochs=2,
        log_every_steps=3,
        log_ids=True,
    )
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    said = finished("train", folder / "recipe.yaml", "--run", folder / "alone")
    assert said.status == 0, said.err
    return folder / "alone"


def train(folder: Path, name: str, procs: int, *options: str, recipe: Path | None = None) -> Path:
    file = (recipe or folder) / "recipe.yaml"
    said = finished("train", file, "--procs", str(procs), "--run", folder / name, *options)
    assert said.status == 0, said.err
    assert "started again" not in said.err
    return folder / name


def compare(run: Path, alone: Path) -> None:
    assert (rows_of(run) == rows_of(alone)).all()
    for kind in ("train", "evaluate"):
        found = {record["step"]: record["loss"] for record in records(run, kind)}
        for record in records(alone, kind):
            assert found[record["step"]] == pytest.approx(record["loss"], rel=1e-3)
    for name, value in weights(alone).items():
        torch.testing.assert_close(weights(run)[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.check
def test_processes_that_share_experts_train_as_one_process_does(folder: Path, alone: Path) -> None:
    """With the clipped norm and the load of all, whole weights, and a checkpoint that one process evaluates."""
    run = train(folder, "two", 2, TWO)
    compare(run, alone)
    first, second = (records(one, "train")[-1]["experts"]["mixture"] for one in (run, alone))
    assert first["load_cv"] == pytest.approx(second["load_cv"], abs=0.05)
    assert first["dropped"] == 0
    assert finished("evaluate", run).status == 0


@pytest.mark.check
@pytest.mark.parametrize(
    ("procs", "options"),
    [
        (4, [FOUR]),
        (4, [TWO]),
        (2, []),
        (4, [TWO, "model.factory=net.py:wide", "optimizer={name: lars, lr: 1, clip_norm: 1}"]),
    ],
)
def test_several_places_train_as_one_process_does(folder: Path, tmp_path: Path, procs: int, options: list[str]) -> None:
    """And processes that share no experts: they sum the load."""
    own = [option for option in options if not option.startswith("parallel")]
    assert finished("train", folder / "recipe.yaml", "--run", tmp_path / "one", *own).status == 0
    said = finished("train", folder / "recipe.yaml", "--procs", str(procs), "--run", tmp_path / "several", *options)
    assert said.status == 0, said.err
    compare(tmp_path / "several", tmp_path / "one")


@pytest.mark.check
def test_ranks_with_uneven_shares_have_as_many_micro_batches(folder: Path) -> None:
    """24 and 23 samples in parts of 23: with one part the second rank would leave the first alone."""
    run = train(folder, "parts", 2, TWO, "micro_batch=23", "model.args={capacity_factor: 0.5}", "data.eval=null")
    last = records(run, "train")[-1]["experts"]["mixture"]
    assert 0 < last["dropped"] < 1


@pytest.mark.check
def test_a_measured_precision_leaves_no_graph_of_whole_weights(folder: Path) -> None:
    train(folder, "auto", 2, TWO, "precision=auto", "epochs=0.2", "data.eval=null", "model.factory=net.py:Deep")


@pytest.mark.check
@pytest.mark.parametrize("average", ["model.ema={half_life_steps: 3}", "optimizer.lookahead={every_steps: 2}"])
def test_other_numbers_of_processes_go_on_with_the_same_run(folder: Path, tmp_path: Path, average: str) -> None:
    """2 -> 4 -> 1 process: the run ends as that of one process, with momentum and averages of the experts."""
    said = finished("train", folder / "recipe.yaml", "--run", tmp_path / "one", average, "epochs=1.5", EACH)
    assert said.status == 0, said.err
    run = tmp_path / "several"
    options = ("--run", run, TWO, average, "epochs=0.5", "checkpoint={keep: 9}", EACH)
    for command in (
        ("train", folder / "recipe.yaml", "--procs", "2", *options),
        ("train", "--resume", run, "--procs", "4", FOUR, "epochs=1.0"),
        ("train", "--resume", run, "parallel={strategy: data}", "epochs=1.5"),
    ):
        said = finished(*command)
        assert said.status == 0, said.err
    compare(run, tmp_path / "one")
    newest, last = (read_newest(Checkpoints(one / "checkpoints")) for one in (tmp_path / "one", run))
    assert newest is not None
    assert last is not None
    assert newest.tensors.keys() == last.tensors.keys()
    for name in (name for name in newest.tensors if not name.startswith("random/")):
        torch.testing.assert_close(last.tensors[name], newest.tensors[name], rtol=1e-3, atol=1e-4)
    # Each rank has written its own experts, and nobody all of them.
    manifests = [json.loads(path.read_text()) for path in sorted(run.glob("checkpoints/step-*/manifest.json"))]
    assert [len(one["tensors"]["model/mixture.experts.up"]["pieces"]) for one in manifests[:2]] == [2, 4]
    assert {name.split("/")[0] for name in manifests[0]["tensors"]} == {name.split("/")[0] for name in last.tensors} - {
        "random"
    }


@pytest.mark.check
def test_resumed_is_uninterrupted_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    options = (TWO, "model.factory=net.py:noisy", "checkpoint={every_steps: 4, keep: 9}")
    whole = train(folder, "whole", 2, *options)
    cut = cut_back(whole, tmp_path / "cut")
    said = finished("train", "--resume", cut, "--procs", "2")
    assert said.status == 0, said.err
    assert all(torch.equal(value, weights(cut)[name]) for name, value in weights(whole).items())


@pytest.mark.parametrize("procs", [1, pytest.param(2, marks=pytest.mark.check)])
def test_asynchronous_processes_have_the_load_of_their_own_batch(folder: Path, tmp_path: Path, procs: int) -> None:
    """One alone is SGD bit for bit, with the loss of the layer; the log of two repeats their run."""
    shared = ("model.factory=net.py:wide", "epochs=0.5", "data.eval=null")
    run = train(tmp_path, "async", procs, "parallel={strategy: async, compensate: none}", *shared, recipe=folder)
    if procs == 1:
        plain = train(tmp_path, "plain", 1, *shared, recipe=folder)
        assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(run).items())
    else:
        said = finished("replay", run, "--json")
        assert json.loads(said.out)["first_difference"] == ""
    assert records(run, "train")[-1]["experts"]["mixture"]["load_cv"] > 0


DYING = """
import os
import signal
from pathlib import Path

calls = 0


def die(images, labels, keys):
    global calls
    calls += 1
    once = Path(__file__).with_name("died")
    if os.environ.get("RANK") == "1" and calls == 8 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return images, labels
"""


@pytest.mark.check
def test_after_a_loss_all_begin_again_from_the_last_checkpoint(folder: Path, alone: Path) -> None:
    """The experts of the lost process are in its checkpoint alone."""
    (folder / "dying.py").write_text(DYING)
    said = finished(
        "train", folder / "recipe.yaml", "--procs", "2", "--run", folder / "lost", TWO, "transform=dying.py:die",
        "checkpoint.every_steps=3",
    )  # fmt: skip
    assert said.status == 0, said.err
    assert "All workers are started again" in said.err
    assert re.search(r"Resumed at step [36] of", said.err), said.err
    for name, value in weights(alone).items():
        torch.testing.assert_close(weights(folder / "lost")[name], value, rtol=1e-3, atol=1e-4)


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "one process": (
        (TWO,),
        "2 processes share the experts, and there is 1. Start a multiple of 2, such as --procs 2, or add "
        "'parallel={strategy: data}': both work with --resume too.",
    ),
    "one rank": (("parallel={strategy: experts, ranks: 1}",), "parallel.ranks must be at least 2, not 1"),
    "compiled": ((TWO, "compile=true"), "parallel.strategy experts does not work with compile"),
    "narrow": ((TWO, "half_weights=true", "precision=bf16"), "does not work with half_weights"),
    "scaled": ((TWO, "precision=fp16", "device=cuda"), "does not work with precision: fp16"),
    "noise": ((TWO, "observe.noise_scale=true"), "does not work with observe.noise_scale"),
    "whole layers": ((TWO, "optimizer={name: muon, lr: 0.1}"), "does not work with optimizer.name: muon"),
    "going on": ((TWO, "comm.on_rank_failure=continue"), "does not work with comm.on_rank_failure: continue"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(folder: Path, name: str) -> None:
    options, said = REFUSED[name]
    assert said in refused("train", folder / "recipe.yaml", "--run", folder / "no", *options, status=2)


@pytest.mark.parametrize(
    ("procs", "options", "message"),
    [
        ("3", [TWO], "2 processes share the experts, and there are 3. Start a multiple of 2"),
        (
            "2",
            [TWO, "model.factory=net.py:plain"],
            "the network has no mixture of experts, so there is nothing to share",
        ),
        pytest.param(
            "2",
            ["parallel={strategy: local, every_steps: 2}"],
            "the network has a loss of its own, such as that of experts, which is of the samples of all processes",
            marks=pytest.mark.check,
        ),
        pytest.param(
            "3",
            ["parallel={strategy: experts, ranks: 3}"],
            "mixture has 4 experts, which 3 processes cannot share evenly. Set it to a divisor of 4",
            marks=pytest.mark.check,
        ),
    ],
)
def test_ranks_and_networks_that_do_not_fit_are_refused(
    folder: Path, procs: str, options: list[str], message: str
) -> None:
    said = finished("train", folder / "recipe.yaml", "--procs", procs, "--run", folder / "no", *options)
    assert said.status == 2
    assert message in said.err
    assert "Traceback" not in said.err


def test_a_run_that_goes_on_takes_up_no_updates_of_its_own(folder: Path, alone: Path) -> None:
    said = refused("train", "--resume", alone, "parallel={strategy: local}", "epochs=3", status=2)
    assert "a run that goes on cannot change parallel.strategy, because each process of local training" in said
