"""Checkpoints: whole or refused by name."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save as save_tensors
from tests._support import headway, packed_digits, read_newest, records, write_recipe
from torch import nn

import headway as public
from headway.checkpoint import checkpoints
from headway.checkpoint.checkpoints import Checkpoints, read, restore, state_of
from headway.checkpoint.locations import hold
from headway.checkpoint.manifest import FORMAT_VERSION, MANIFEST, FileEntry, Manifest
from headway.core.errors import CheckpointError, UsageError
from headway.core.files import write_atomically

TENSORS = "tensors-0.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 18 steps with checkpoints at 5, 10, 15 and 18."""
    folder = tmp_path_factory.mktemp("checkpoints")
    packed_digits(folder)
    changes = {"model": {"factory": "net.py:dropout"}, "augment": {"translate": 1}, "epochs": 3, "log_ids": True}
    recipe = write_recipe(folder / "recipe.yaml", **changes, checkpoint={"every_steps": 5, "keep": 9})
    headway("train", recipe, "--run", folder / "run")
    assert [path.name for path in Checkpoints(folder / "run/checkpoints").paths()] == [
        f"step-{step:08d}" for step in (18, 15, 10, 5)
    ]
    return folder / "run"


def truncated(name: str, tenths: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[: len(data) * tenths // 10])

    return damage


def flipped(name: str, share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[int(len(data) * share)] ^= 1
        (path / name).write_bytes(data)

    return damage


def missing(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def garbage(text: str) -> Callable[[Path], None]:
    return lambda path: (path / MANIFEST).write_text(text) and None


def another_step(path: Path) -> None:
    """Still good JSON, and wrong."""
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(
        text.replace('"step": 18', '"step": 17', 1).replace('"position": 5', '"position": 4', 1)
    )


DAMAGES = {
    **{f"{name} at {tenths} tenths": truncated(name, tenths) for name in (TENSORS, MANIFEST) for tenths in range(10)},
    **{
        f"{name} flipped at {share}": flipped(name, share) for name in (TENSORS, MANIFEST) for share in (0.0, 0.5, 0.99)
    },
    "no tensors": missing(TENSORS),
    "no manifest": missing(MANIFEST),
    **{
        f"manifest {text!r}": garbage(text) for text in ("", "{}", "[]", "null", "7", '{"format": 1, "files": 3}', "\0")
    },
    "another step": another_step,
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", DAMAGES)
def test_the_newest_is_refused_by_name_and_the_one_before_is_used(run: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    newest = copy / "checkpoints/step-00000018"
    DAMAGES[name](newest)
    (copy / "weights.safetensors").unlink()
    (copy / "summary.json").unlink()
    said = headway("train", "--resume", copy)
    warning = next(line for line in said.err.splitlines() if str(newest) in line)
    assert warning.endswith("The one before it is used.")
    if name == f"{TENSORS} at 5 tenths":
        assert f"{TENSORS} is torn: " in warning
    assert "Resumed at step 15 of 18 from step-00000015." in said.err
    for file in ("weights.safetensors", "ids.bin", f"checkpoints/step-00000018/{TENSORS}"):
        assert (copy / file).read_bytes() == (run / file).read_bytes(), file
    assert [r["step"] for r in records(copy, "train")] == list(range(1, 19))
    assert read(newest).scalars["position"] == 540


@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_several_damaged_ones_are_passed_over(run: Path, tmp_path: Path, damaged: int) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    paths = Checkpoints(copy / "checkpoints").paths()
    for path in paths[:damaged]:
        (path / TENSORS).unlink()
    said = headway("train", "--resume", copy)
    assert [path.name in said.err for path in paths[:damaged]] == [True] * damaged
    assert f"from {paths[damaged].name}." in said.err
    assert (copy / "weights.safetensors").read_bytes() == (run / "weights.safetensors").read_bytes()


def test_where_all_are_damaged_nothing_is_touched(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    paths = Checkpoints(copy / "checkpoints").paths()
    for path in paths:
        (path / TENSORS).write_bytes(b"")
    before = (copy / "metrics.jsonl").read_bytes()
    said = headway("train", "--resume", copy, status=1)
    assert "every checkpoint is damaged (" in said.err
    assert all(f"{path.name}: {TENSORS} is torn: 0 of " in said.err for path in paths)
    assert said.err.endswith("Copy one of them here again if you have it elsewhere, or start the run anew.\n")
    # There is none before the last one.
    assert said.err.count("The one before it is used.") == len(paths) - 1
    assert (copy / "metrics.jsonl").read_bytes() == before
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        Checkpoints(copy / "checkpoints").newest([])


def test_a_later_format_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints/step-00000018", tmp_path / "step")
    manifest = json.loads((tmp_path / "step" / MANIFEST).read_text())
    write_atomically(tmp_path / "step" / MANIFEST, json.dumps({**manifest, "format": FORMAT_VERSION + 1}))
    with pytest.raises(
        CheckpointError, match=f"its format is {FORMAT_VERSION + 1}, this version reads {FORMAT_VERSION}"
    ):
        read(tmp_path / "step")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A pickle under the names of a checkpoint is damage, and its code does not run."""
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    for name in (TENSORS, MANIFEST):
        torch.save({"a": nn.Linear(1, 1)}, folder / name)
    with pytest.raises(CheckpointError, match="is damaged"):
        read(folder)


def test_the_newest_are_kept_and_latest_names_the_last(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.newest() is None
    for step in (1, 9, 10, 100):
        checkpoints.save(step, {"a": torch.full((3,), float(step))}, {"note": "x"})
    assert [path.name for path in checkpoints.paths()] == ["step-00000100", "step-00000010"]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-00000100\n"
    found = checkpoints.newest()
    assert found is not None
    assert (found.step, found.scalars) == (100, {"note": "x"})
    assert found.tensors["a"].tolist() == [100.0] * 3


def test_steps_are_numbers_and_what_lies_beside_them_is_left_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (99_999_998, 99_999_999, 100_000_000):
        checkpoints.save(step, {"a": torch.zeros(1)}, {})
    (tmp_path / "step-notes").mkdir()
    assert [path.name for path in checkpoints.paths()] == ["step-100000000", "step-99999999"]
    found = read_newest(checkpoints)
    assert found is not None
    assert found.step == 100_000_000
    assert (tmp_path / "step-notes").is_dir()


@pytest.mark.parametrize("address", ["{}/here", "memory://{}/here"])
def test_later_checkpoints_stay_when_an_earlier_step_is_saved(tmp_path: Path, address: str) -> None:
    """Whoever is at an earlier step may be wrong. What is damaged goes once the run has passed it."""
    checkpoints = Checkpoints(address.format(tmp_path), keep=2)

    def names() -> list[str]:
        return [path.name for path in checkpoints.paths()]

    def latest() -> str:
        path = f"{address.format(tmp_path)}/latest"
        with fsspec.open(path, "rt") as file:
            return str(file.read().strip())

    for step in (10, 20, 30):
        checkpoints.save(step, {"a": torch.full((1,), float(step))}, {})
    for step in (5, 7, 9):
        checkpoints.save(step, {"a": torch.zeros(1)}, {})
    assert names() == ["step-00000030", "step-00000020", "step-00000009", "step-00000007"]
    assert latest() == "step-00000030"
    found = read_newest(checkpoints)
    assert found is not None
    assert found.tensors["a"].item() == 30
    checkpoints.save(31, {"a": torch.zeros(1)}, {})
    assert (names(), latest()) == (["step-00000031", "step-00000030"], "step-00000031")


def test_latest_names_no_damaged_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (10, 20):
        checkpoints.save(step, {"a": torch.zeros(1)}, {})
    (tmp_path / "step-00000020" / MANIFEST).unlink()
    checkpoints.save(15, {"a": torch.zeros(1)}, {})
    assert [path.name for path in checkpoints.paths()] == ["step-00000020", "step-00000015", "step-00000010"]
    assert (tmp_path / "latest").read_text() == "step-00000015\n"


def test_the_same_step_can_be_saved_again_and_leftovers_are_cleared(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"a": torch.zeros(1)}, {})
    (tmp_path / ".step-00000004.77").mkdir()  # a kill in the middle of a save
    (tmp_path / ".step-00000004.77" / TENSORS).write_bytes(b"half")
    shutil.copytree(tmp_path / "step-00000003", tmp_path / ".step-00000003.78.replaced")  # or between two renames
    checkpoints.save(3, {"a": torch.ones(1)}, {})
    found = checkpoints.newest()
    assert found is not None
    assert found.tensors["a"].item() == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003"]


@pytest.mark.parametrize("content", [b"", b"step-000", b"step-00000009\n", b"\xff\x00", None])
def test_a_torn_latest_misleads_nobody(tmp_path: Path, content: bytes | None) -> None:
    """It is there for people; what opens is found by what is there."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"a": torch.full((2,), float(step))}, {})
    (tmp_path / ".latest.77").write_bytes(b"step-")  # a kill while it was written
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_bytes(content)
    found = read_newest(checkpoints)
    assert found is not None
    assert found.step == 2
    checkpoints.save(3, {"a": torch.zeros(1)}, {})
    assert (tmp_path / "latest").read_text() == "step-00000003\n"
    assert not (tmp_path / ".latest.77").exists()


@pytest.mark.parametrize("name", ["a b", "ü %20 #?", "[1-9]*", "-", "x://y"])
def test_any_name_of_a_folder(tmp_path: Path, name: str) -> None:
    folder: str | Path = tmp_path / name if "://" not in name else f"file://{tmp_path}/{name}"
    checkpoints = Checkpoints(folder, keep=1)
    for step in (1, 2):
        checkpoints.save(step, {f"{name}/{step}": torch.ones(1)}, {name: name})
    found = read_newest(Checkpoints(folder))
    assert found is not None
    assert (list(found.tensors), found.scalars) == ([f"{name}/2"], {name: name})
    assert [path.name for path in (tmp_path / name).glob("step-*")] == ["step-00000002"]


def test_where_the_checkpoints_of_a_run_are(tmp_path: Path) -> None:
    run, base = tmp_path / "run", tmp_path / "base"
    for folder, expected in (
        (None, f"{run}/checkpoints"),
        ("kept here", f"{base}/kept here"),
        ("/kept", "/kept"),
        ("file:///kept", "/kept"),
        ("memory://kept/here", "memory://kept/here"),
    ):
        checkpoints = Checkpoints.locate(run, 3, folder, base)
        assert (checkpoints.folder.shown, checkpoints.keep) == (expected, 3)


def test_a_new_run_does_not_remove_anothers_checkpoints(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "here")
    checkpoints.expect_none()
    checkpoints.save(7, {"a": torch.zeros(1)}, {})
    with pytest.raises(
        UsageError, match=r"here: checkpoints of another run are here already \(the newest is step-00000007"
    ):
        checkpoints.expect_none()


def test_what_is_being_read_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name the folder goes."""
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints("here", keep=1)
    checkpoints.save(1, {"a": torch.zeros(1)}, {})
    with hold(tmp_path / "here/step-00000001"), hold(tmp_path / "here/step-00000001"):
        checkpoints.save(2, {"a": torch.zeros(1)}, {})
        checkpoints.save(3, {"a": torch.zeros(1)}, {})
        assert [path.name for path in checkpoints.paths()] == ["step-00000003", "step-00000001"]
    checkpoints.save(4, {"a": torch.zeros(1)}, {})
    assert [path.name for path in checkpoints.paths()] == ["step-00000004"]


def test_what_another_process_removes_while_it_is_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer one is there then. The folder goes when the first of its two files has been read."""
    kept = Checkpoints(tmp_path)
    slow = Path(str(kept.save(1, {"a": torch.zeros(1)}, {})))
    data = save_tensors({"b": torch.zeros(1)})
    (slow / "tensors-1.safetensors").write_bytes(data)
    manifest = Manifest.from_json((slow / MANIFEST).read_bytes(), "")
    second = FileEntry("tensors-1.safetensors", len(data), hashlib.sha256(data).hexdigest())
    (slow / MANIFEST).write_bytes(replace(manifest, files=(*manifest.files, second)).to_json())
    assert read(slow).tensors.keys() == {"a", "b"}
    opens = checkpoints.open_file

    def open_and_remove(path: Path, file: FileEntry) -> Any:
        opened = opens(path, file)
        if slow.exists():
            kept.save(2, {"a": torch.ones(1)}, {})
            shutil.rmtree(slow)
        return opened

    monkeypatch.setattr(checkpoints, "open_file", open_and_remove)
    said: list[str] = []
    found = kept.newest(said)
    assert found is not None
    assert (found.step, said) == (2, [])


@pytest.mark.check
def test_a_reader_elsewhere_never_finds_half_a_checkpoint(tmp_path: Path) -> None:
    """One is kept, so each save removes what may be being read."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"a": torch.ones(300_000)}, {})
    with subprocess.Popen([sys.executable, "-c", READS, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        step = 1
        while process.poll() is None:
            step += 1
            checkpoints.save(step, {"a": torch.full((300_000,), float(step))}, {})
        said = process.stdout.read().split()
    assert process.returncode == 0
    assert said == sorted(set(said), key=int)
    assert len(said) > 1


READS = """
import sys
from headway.checkpoint.checkpoints import Checkpoints

before = 0
for _ in range(150):
    found = Checkpoints(sys.argv[1]).newest(warnings := [])
    assert not warnings, warnings
    assert (found.tensors["a"] == found.step).all() and found.step >= before
    if found.step > before:
        print(found.step, flush=True)
    before = found.step
"""


def _network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 4, 2))


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_plain_loop_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    """The library alone: any torch optimizer, any memory format, all random generators."""

    def begin(memory_format: torch.memory_format) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _network().to(memory_format=memory_format)
        more = {"momentum": 0.9, "nesterov": True} if name == "SGD" else {}
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.01, **more)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            images = torch.rand(4, 3, 4, 4) + float(np.random.rand()) + random.random()
            loss = model(images).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    model, optimizer = begin(torch.channels_last)
    steps(model, optimizer, 3)
    random.gauss(0, 1)  # leaves a spare number behind
    public.Checkpoints(tmp_path).save(3, public.state_of(model, optimizer), {"epoch": 1})
    expected = steps(model, optimizer, 3), random.gauss(0, 1)
    other, other_optimizer = begin(torch.channels_last)
    found = Checkpoints(tmp_path).newest()
    assert found is not None
    public.restore(found, other, other_optimizer)
    assert (steps(other, other_optimizer, 3), random.gauss(0, 1)) == expected
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


def test_another_networks_checkpoint_is_refused(tmp_path: Path) -> None:
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = Checkpoints(tmp_path).save(1, state_of(model, optimizer), {})
    for other in (nn.Linear(3, 3), nn.Sequential(*list(_network())[:3], nn.Linear(4 * 4, 5))):
        before = {key: value.clone() for key, value in other.state_dict().items()}
        with pytest.raises(CheckpointError, match="belongs to another network"):
            restore(read(path), other, torch.optim.SGD(other.parameters(), lr=0.1))
        assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
