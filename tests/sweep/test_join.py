"""Sweeps over several machines: workers that join, are lost, sleep and come back."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.sweep._machines import (
    Machines,
    expect_no_double_writes,
    list_tree,
    prepare,
    read_decisions,
    read_weights,
    send,
)

LEASE_S = 3.0
SHARED = ("--slots", "0", "--lease", str(LEASE_S))
KILLS = int(os.environ.get("HEADWAY_TEST_KILLS", "3"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machines")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The sweep on one machine."""
    with Machines(folder) as machines:
        machines.finish(machines.sweep("whole", "--slots", "1"))
    return folder / "whole"


@pytest.mark.check
@pytest.mark.timeout(900)
def test_whatever_happens_to_machines_the_winner_has_the_same_bits(folder: Path, whole: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    (folder / "slowly").touch()
    with Machines(folder) as machines:
        joined = [machines.join("killed") for _ in range(2)]
        coordinator = machines.sweep("killed", *SHARED)
        for _ in range(KILLS):
            time.sleep(chance.uniform(1, 6))
            what = chance.choice(["kill worker", "kill machine", "kill coordinator", "stop worker", "stop machine"])
            number = chance.randrange(2)
            tree = list_tree(joined[number])
            print(f"{time.monotonic():.1f} {what} {number}")
            if what == "kill worker":
                send(tree[1:], signal.SIGKILL)
            elif what == "kill machine":
                # Its worker may live on without it for a while.
                send(chance.choice([tree[:1], tree]), signal.SIGKILL)
                joined[number].wait()
                joined[number] = machines.join("killed")
            elif what == "kill coordinator":
                coordinator.kill()
                coordinator.wait()
                print(machines.read(coordinator))
                coordinator = machines.sweep("killed", *SHARED)
            else:
                stopped = tree[1:] if what == "stop worker" else tree
                send(stopped, signal.SIGSTOP)
                time.sleep(chance.uniform(0.5, 2) * LEASE_S)
                send(stopped, signal.SIGCONT)
        (folder / "slowly").unlink()
        try:
            print(machines.finish(coordinator))
        finally:
            for one in joined:
                print(machines.read(one))
        for one in joined:
            machines.finish(one)
    assert read_decisions(folder / "killed") == read_decisions(whole)
    assert read_weights(folder / "killed") == read_weights(whole)
    expect_no_double_writes(folder / "killed")
