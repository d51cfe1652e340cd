"""Killed with -9 at random moments while it saves: what is there always opens, and what was said to be there is."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests._support import read_newest
from tests.checkpoint import _bucket  # makes fsspec know bucket://
from torch.distributed import TCPStore

from headway.checkpoint.agreement import StoreExchange
from headway.checkpoint.background_saver import BackgroundSaver
from headway.checkpoint.checkpoints import Checkpoints, read

assert _bucket
ROOT = Path(__file__).resolve().parents[2]


def state(step: int) -> dict[str, torch.Tensor]:
    return {f"model/{size}": torch.full((size,), float(step)) for size in (3, 40_000, 50_000, 60_000)}


SAVES_FOR_EVER = """
import sys

sys.path.insert(0, sys.argv[1])
from tests.checkpoint import test_checkpoint_kill

test_checkpoint_kill.save_for_ever(*sys.argv[2:])
"""


def save_for_ever(folder: str, staging: str, *numbers: str) -> None:
    """Prints the step of every checkpoint that is whole, and that of the first before it begins."""
    first, rank, size, port = map(int, numbers)
    torch.set_num_threads(1)
    tempfile.tempdir = staging
    with closing(BackgroundSaver(Checkpoints(folder, keep=2))) as saver:
        if size > 1:
            saver.set_exchange(StoreExchange(TCPStore("127.0.0.1", port, is_master=False), rank, size))
        print(first, flush=True)
        for step in range(first + 1, first + 10_000):
            saver.save(step, state(step), {"step": step})
            if step % 3 == 0:
                saver.wait()
                print(step, flush=True)


def killed(folder: str, staging: str, first: int, size: int, port: int, chance: random.Random) -> int:
    """Some ranks save until one, then the others, are killed; the last step that was said to be there."""
    program = [sys.executable, "-c", SAVES_FOR_EVER, str(ROOT), folder, staging, str(first)]
    processes = [
        subprocess.Popen([*program, str(rank), str(size), str(port)], stdout=subprocess.PIPE) for rank in range(size)
    ]
    said: list[bytes] = []
    try:
        for _ in range(chance.randrange(1, 4)):
            said += [process.stdout.readline() for process in processes if process.stdout]
        time.sleep(chance.uniform(0, 0.05))
        for number in chance.sample(range(size), size):
            processes[number].kill()
            processes[number].wait()
            time.sleep(chance.choice((0, 0.02)))
    finally:
        for process in processes:
            process.kill()
            rest, _ = process.communicate()
            said += rest.splitlines(keepends=True)
    assert all(said)
    return max(int(line) for line in said if line.endswith(b"\n"))


@pytest.mark.parametrize(
    ("kind", "size", "kills"),
    [
        ("disk", 1, 3),
        pytest.param("disk", 1, 25, marks=pytest.mark.check),
        pytest.param("disk", 2, 15, marks=pytest.mark.check),
        pytest.param("bucket", 1, 15, marks=pytest.mark.check),
        pytest.param("bucket", 2, 10, marks=pytest.mark.check),
    ],
)
def test_killed_while_saving(tmp_path: Path, kind: str, size: int, kills: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance, step, went_on = random.Random(seed), 0, 0
    folder = str(tmp_path / "here") if kind == "disk" else f"bucket://{tmp_path}/there"
    staging = tmp_path / "staging"
    staging.mkdir()
    for _ in range(kills):
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        last = killed(folder, str(staging), step, size, server.port, chance)
        found = read_newest(Checkpoints(folder))
        if found is None:
            assert last == 0
            continue
        assert found.step >= last
        assert found.scalars == {"step": found.step}
        assert found.tensors.keys() == state(1).keys()
        assert all((value == found.step).all() for value in found.tensors.values())
        if kind == "disk" and (tmp_path / "here/latest").exists():
            # It may name the one before, where the kill came between the rename and its own moving.
            assert read(tmp_path / "here" / (tmp_path / "here/latest").read_text().strip()).step <= found.step
        went_on += found.step > step
        step = found.step
    assert went_on
    assert list(staging.iterdir()) == []
    checkpoints = Checkpoints(folder)
    checkpoints.save(step + 1, state(step + 1), {})
    assert len(checkpoints.paths()) == 2
    if kind == "disk":
        assert all(path.name == "latest" or path.name.startswith("step-") for path in (tmp_path / "here").iterdir())
