"""A fork goes on from a checkpoint of another run, with other values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests._support import headway, packed_digits, write_recipe

from headway.core.errors import CheckpointError, RecipeError
from headway.core.run_folder import RunFolder
from headway.training import runs
from headway.training.fork import fork_run
from headway.training.progress import hide_progress

STEP = 6


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fork")
    packed_digits(folder, mode="seekable")
    options = {"checkpoint": {"every_steps": STEP, "keep": 9}, "model": {"factory": "net.py:dropout"}}
    write_recipe(folder / "recipe.yaml", optimizer={"momentum": 0.9}, epochs=3, device="cpu", **options)
    headway("train", folder / "recipe.yaml", "--run", folder / "parent")
    return folder / "parent"


def resume(run: RunFolder) -> Path:
    with hide_progress(True):
        runs.resume(run.folder)
    return run.folder


def newest(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
    return {key: value for path in checkpoint.glob("*.safetensors") for key, value in load_file(path).items()}


def is_same(run: Path, other: Path) -> bool:
    tensors, expected = newest(run), newest(other)
    assert tensors.keys() == expected.keys()
    return all(torch.equal(value, expected[key]) for key, value in tensors.items())


def test_a_fork_without_other_values_is_its_parent_bit_for_bit(parent: Path) -> None:
    before = {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()}
    fork = resume(fork_run(parent, STEP, parent.with_name("same"), {}, "a test"))
    assert is_same(fork, parent)
    # Of the parent nothing has changed.
    assert before == {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()}


def test_a_fork_trains_with_its_own_values_and_names_its_parent(parent: Path) -> None:
    values = {"optimizer.lr": 0.2, "optimizer.momentum": 0.5}
    fork = resume(fork_run(parent, STEP, parent.with_name("other"), values, "sweep: trial 7"))
    assert not is_same(fork, parent)
    provenance = json.loads((fork / "provenance.json").read_text())
    assert provenance["forked"] == {"run": str(parent), "step": STEP}
    assert provenance["origins"]["optimizer.lr"] == "sweep: trial 7"
    records = [json.loads(line) for line in (fork / "metrics.jsonl").read_text().splitlines()]
    # Its records begin after the step of the fork.
    assert min(record["step"] for record in records) == STEP + 1
    assert {record["lr"] for record in records if record["kind"] == "train"} == {0.2}


def test_a_crash_while_a_fork_is_made_leaves_no_run(parent: Path) -> None:
    folder = parent.with_name("torn")
    (folder / "checkpoints").mkdir(parents=True)
    (parent.with_name(".torn.fork") / "checkpoints").mkdir(parents=True)
    assert is_same(resume(fork_run(parent, STEP, folder, {}, "a test")), parent)
    assert not parent.with_name(".torn.fork").exists()


@pytest.mark.parametrize("key", ["batch", "seed", "epochs", "model.args.width", "optimizer.name", "data.size"])
def test_what_a_checkpoint_cannot_bear_is_refused(parent: Path, key: str) -> None:
    with pytest.raises(RecipeError, match="cannot change there"):
        fork_run(parent, STEP, parent.with_name("refused"), {key: 3}, "a test")
    assert not parent.with_name("refused").exists()


def test_a_step_without_a_checkpoint_is_refused(parent: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
        fork_run(parent, 5, parent.with_name("refused"), {}, "a test")
