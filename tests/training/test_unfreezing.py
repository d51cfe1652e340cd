"""`model.unfreeze_at` in whole runs: the state of the optimizer, resumed runs, several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests._support import finished, headway, packed_digits, read_newest, write_recipe

from headway.checkpoint.checkpoints import Checkpoints

INTERRUPT = """
import os, signal
from pathlib import Path

class Interrupt:
    def on_step(self, run):
        file = Path(__file__).with_name("interrupt")
        if file.exists() and run.step == int(file.read_text()):
            file.unlink()
            os.kill(os.getpid(), signal.SIGTERM)
"""
FROZEN = "model={factory: net.py:dropout, freeze: ['^[01]'], unfreeze_at: "
LATE = FROZEN + "[{match: '^1', at_epoch: 0.5}, {match: '^0', at_epoch: 1.5}]}"
OPTIMIZERS = {
    "nag": "optimizer={name: nag, lr: 0.02, weight_decay: 0.1}",
    "adamw": "optimizer={name: adamw, lr: 0.01}",
    "lamb": "optimizer={name: lamb, lr: 0.01}",
    "lars": "optimizer={name: lars, lr: 0.1}",
    "muon": "optimizer={name: muon, lr: 0.01}",
    "half": "half_weights=true",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unfreezing")
    packed_digits(folder)
    (folder / "user.py").write_text(INTERRUPT)
    write_recipe(folder / "recipe.yaml", callbacks=["user.py:Interrupt"], checkpoint={"every_steps": 1, "keep": 20})
    return folder


def states_of(run: Path, step: int) -> set[str]:
    """The parameters that have a state of the optimizer at a step; SGD's begins as zeros."""
    tensors = load_file(next((run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")))
    return {name.split("/")[1] for name, one in tensors.items() if name.startswith("optimizer/") and one.any()}


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_unfreezes_alike(folder: Path, tmp_path: Path, name: str) -> None:
    options = [LATE, OPTIMIZERS[name]]
    if name == "half":
        options += ["precision=bf16", OPTIMIZERS["nag"]]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    headway("train", folder / "recipe.yaml", "--run", whole, *options)
    # 6 steps an epoch: layer 1 from step 4 on, layer 0 from step 10 on.
    assert states_of(whole, 3).isdisjoint({"0.weight", "0.bias", "1.weight", "1.bias"})
    assert len(states_of(whole, 3)) >= 2
    assert states_of(whole, 4) - states_of(whole, 3) == {"1.weight", "1.bias"}
    assert states_of(whole, 10) - states_of(whole, 9) == {"0.weight", "0.bias"}
    weights = {
        step: load_file(next((whole / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))) for step in (1, 9, 10)
    }
    assert torch.equal(weights[1]["model/0.weight"], weights[9]["model/0.weight"])
    assert not torch.equal(weights[9]["model/0.weight"], weights[10]["model/0.weight"])
    # Interrupted before, between and after the two moments.
    for step in (2, 7, 11):
        (folder / "interrupt").write_text(str(step))
        if step == 2:
            headway("train", folder / "recipe.yaml", "--run", cut, *options, status=1)
        else:
            headway("train", "--resume", cut, status=1)
    headway("train", "--resume", cut)
    mine, theirs = (read_newest(Checkpoints(run / "checkpoints")) for run in (cut, whole))
    assert mine is not None
    assert theirs is not None
    assert mine.tensors.keys() == theirs.tensors.keys()
    for key, value in mine.tensors.items():
        assert torch.equal(value, theirs.tensors[key]), key


@pytest.mark.check
def test_ranks_unfreeze_alike(folder: Path, tmp_path: Path) -> None:
    options = [FROZEN.replace("dropout", "wide") + "0.5}", OPTIMIZERS["nag"], "callbacks=[]"]
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "one", *options)
    said = finished("train", folder / "recipe.yaml", "--run", tmp_path / "two", "--procs", "2", *options)
    assert said.status == 0, said.err
    one, two = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-6)


def test_bad_recipes(folder: Path, tmp_path: Path) -> None:
    for more, said in {
        "unfreeze_at: 1": "set freeze, or remove unfreeze_at",
        "freeze: [bias], unfreeze_at: 2": "model.unfreeze_at.0.at_epoch has 2",
        "freeze: [bias], unfreeze_at: [{match: weight, at_epoch: 1}]": "'weight' matches no parameter",
    }.items():
        option = f"model={{factory: net.py:linear, {more}}}"
        assert said in headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", option, status=2).err
