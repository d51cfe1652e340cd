"""`half_weights` through whole runs: what is saved, gone on with, evaluated, predicted, and summed over ranks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests._support import free_port, headway, packed_digits, records, refused, write_recipe
from tests.comm._ranks import Rank, run_ranks

from headway.checkpoint.checkpoints import Checkpoints
from headway.core.launcher_environment import LaunchedProcess
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.launch.ranks import Ranks
from headway.report.solution import open_solution
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training.progress import LogLines
from headway.training.runs import load_trained
from headway.training.trainer import Trainer

HALF = ("precision=bf16", "half_weights=true", "model.factory=net.py:dropout")
ALL_16 = "optimizer={name: adamw, lr: 0.01, precision: bf16, clip_norm: 1.0}"
EMA = "model={factory: net.py:dropout, ema: {half_life_steps: 4}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml", checkpoint={"every_steps": 4}, epochs=2)
    return folder


@pytest.mark.check
@pytest.mark.parametrize(
    "more",
    [(), (EMA, "optimizer={name: lamb, lr: 0.01, clip_norm: 1.0}"), (EMA, ALL_16)],
    ids=["sgd", "lamb, ema", "all in 16 bits"],
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(folder: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "whole", *HALF, *more)
    loaded = read_recipe(folder / "recipe.yaml", (*HALF, *more), TrainRecipe)
    run = RunFolder.create(tmp_path / "part")
    with closing(Trainer(build_setup(loaded), run, LogLines())) as trainer:
        trainer.run(7)
    saved = Checkpoints(run.folder / "checkpoints").newest()
    assert saved is not None
    assert saved.step == 4
    kinds = {name: value.dtype for name, value in saved.tensors.items() if name.endswith(("weight", "exp_avg"))}
    narrow = {name for name, kind in kinds.items() if kind == torch.bfloat16}
    # A norm stays fp32, and so do averages; the norm's state does not.
    wide = {name for name in kinds if name == "model/1.weight" or name.startswith("ema/")}
    assert narrow == (kinds.keys() - wide if ALL_16 in more else set())
    with closing(Trainer(build_setup(loaded, fresh=False), run, LogLines())) as trainer:
        trainer.resume(saved)
        trainer.run()
    ends = [Checkpoints(tmp_path / name / "checkpoints").newest() for name in ("whole", "part")]
    assert ends[0] is not None
    assert ends[1] is not None
    for name, value in ends[0].tensors.items():
        assert torch.equal(ends[1].tensors[name], value), name
    whole, part = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "part"))
    assert all(torch.equal(part[name], value) for name, value in whole.items())


def test_without_parts_it_is_autocast_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    """Both give each kernel the same 16-bit numbers, and the optimizer the same gradients, widened."""
    for name, overrides in (("half", HALF), ("autocast", (HALF[0], HALF[2]))):
        more = ("optimizer={name: lars, lr: 0.5, clip_norm: 1.0}",)
        headway("train", folder / "recipe.yaml", "--run", tmp_path / name, *overrides, *more)
    half, autocast = (Checkpoints(tmp_path / name / "checkpoints").newest() for name in ("half", "autocast"))
    assert half is not None
    assert autocast is not None
    for name, value in autocast.tensors.items():
        assert torch.equal(half.tensors[name], value), name


def test_training_goes_on_as_if_no_averages_had_been_shown(folder: Path, tmp_path: Path) -> None:
    for name, often in (("often", 0.5), ("once", 2)):
        headway("train", folder / "recipe.yaml", "--run", tmp_path / name, *HALF, EMA, f"evaluate.every_epochs={often}")
    often, once = (Checkpoints(tmp_path / name / "checkpoints").newest() for name in ("often", "once"))
    assert often is not None
    assert once is not None
    for name, value in once.tensors.items():
        assert torch.equal(often.tensors[name], value), name


def test_a_landscape_is_measured_in_float32(folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", *HALF, "epochs=1")
    saved = load_file(tmp_path / "run/weights.safetensors")
    with closing(open_solution("run", RunFolder.open(tmp_path / "run"), "both", 20, 0)) as solution:
        assert solution.setup.masters is None
        for name, value in solution.setup.model.state_dict().items():
            assert value.dtype == saved[name].dtype
            assert torch.equal(value, saved[name]), name


@pytest.mark.parametrize("more", [(), pytest.param((ALL_16,), marks=pytest.mark.check)], ids=["sgd", "all in 16 bits"])
def test_evaluation_and_prediction_use_the_rounded_weights(folder: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    headway("train", folder / "recipe.yaml", "--run", run, *HALF, EMA, *more, "epochs=3")
    saved = load_file(run / "weights.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32, torch.int64}
    best = max(records(run, "evaluate"), key=lambda record: (record["accuracy"], record["step"]))
    found = headway("evaluate", run, "--json").json()
    assert (found["accuracy"], found["loss"]) == (best["accuracy"], best["loss"])
    setup = load_trained(RunFolder.open(run))
    with closing(setup.inputs):
        for name, value in setup.model.state_dict().items():
            assert torch.equal(value, saved[name].to(value.dtype)), name
        assert setup.model[0].weight.dtype == torch.bfloat16
        assert setup.model[1].weight.dtype == torch.float32
    image = next((folder / "digits").rglob("*.png"))
    assert headway("predict", run, image).out.count("\n") == 2


def test_what_cannot_be_half_is_refused(folder: Path, tmp_path: Path) -> None:
    recipe = folder / "recipe.yaml"
    for precision in ("fp32", "auto"):
        sentence = refused("train", recipe, f"precision={precision}", "half_weights=true", status=2)
        assert f"half_weights are 16 bit wide, and precision is {precision}: set precision to bf16 or fp16" in sentence
    for options, said in (
        (
            "lookahead: {}",
            "optimizer.lookahead writes fp32 weights into 16-bit ones, which loses small updates: remove",
        ),
        ("", "half_weights are fp16 here, and optimizer.precision: bf16 rounds weights to bf16: set precision to bf16"),
    ):
        optimizer = f"optimizer={{name: sgd, lr: 0.1, precision: bf16, {options}}}"
        precision = HALF[0] if options else "precision=fp16"
        assert said in refused("train", recipe, precision, "half_weights=true", optimizer, status=2)
    (folder / "own.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, images):\n"
        "        return super().forward(images.flatten(1) + torch.ones(64))\n"
        "def net(num_classes):\n"
        "    return Net(64, num_classes)\n"
    )
    said = headway("train", recipe, "--run", tmp_path / "own", *HALF[:2], "model.factory=own.py:net", status=1)
    assert "give tensors that the network makes by itself the type of its weights, or remove half_weights" in said.err


def reduced(rank: Rank, folder: Path, run: Path, port: int, more: tuple[str, ...]) -> dict[str, Any]:
    """One step of two ranks, each with its half of the batch; plain networks, so that halves add up to the whole."""
    seat = LaunchedProcess(rank.rank, rank.size, rank.rank, rank.size, "127.0.0.1", port, "torchrun")
    overrides = (*HALF[:2], EMA, "comm.bucket_mb=0.001", "checkpoint={every_epochs: 9}", *more)
    loaded = read_recipe(folder / "recipe.yaml", overrides, TrainRecipe)
    with Ranks(loaded.recipe.comm, seat, None) as ranks:
        setup = build_setup(loaded, ranks=ranks)
        with closing(Trainer(setup, RunFolder.create(run / str(rank.rank)), LogLines(), ranks)) as trainer:
            trainer.recovery.meet()
            kinds = [bucket.flat.dtype for bucket in ranks.reducer.buckets]
            trainer.run(5)
            state = {name: value.double().numpy() for name, value in setup.state_dict().items()}
            return {"kinds": [str(kind) for kind in kinds], "state": state}


@pytest.mark.check
@pytest.mark.parametrize("more", [(), (ALL_16,)], ids=["sgd", "all in 16 bits"])
def test_ranks_sum_16_bit_gradients_as_they_are_and_end_alike(
    folder: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    found = run_ranks(2, reduced, folder, tmp_path, free_port(), more)
    assert "torch.bfloat16" in found[0]["kinds"]
    assert "torch.float32" in found[0]["kinds"]  # of the norms, and of what rides along
    for name, value in found[0]["state"].items():
        assert np.array_equal(found[1]["state"][name], value), name
