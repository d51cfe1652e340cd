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
    count_steps,
    expect_no_double_writes,
    list_tree,
    prepare,
    read_decisions,
    read_weights,
    send,
    wait_until,
)

from headway.sweep.journal import read_journal

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


def expect_same(sweep: Path, whole: Path) -> None:
    """The sweep has decided as the undisturbed one, its winners have the same bits, and nobody wrote twice."""
    assert read_decisions(sweep) == read_decisions(whole)
    assert read_weights(sweep) == read_weights(whole)
    expect_no_double_writes(sweep)


@pytest.mark.check
def test_a_machine_that_sleeps_over_its_lease_changes_nothing_when_it_wakes(folder: Path, whole: Path) -> None:
    """It joined before there was a sweep; another one trains what it had."""
    (folder / "slowly").touch()
    with Machines(folder) as machines:
        early = machines.join("slept")
        coordinator = machines.sweep("slept", *SHARED)
        wait_until(lambda: count_steps(folder / "slept", 0) > 1)
        asleep = list_tree(early)
        assert len(asleep) == 2
        send(asleep, signal.SIGSTOP)
        late = machines.join("slept")
        # A result of a trial that the sleeper has begun.
        wait_until(lambda: any(trial.scores for trial in read_journal(folder / "slept").trials))
        assert "has not answered for 3 s: others train what it trained" in machines.read(coordinator)
        send(asleep, signal.SIGCONT)
        # It has lost its worker, and comes back with another one.
        wait_until(lambda: machines.read(early).count("works for the coordinator") == 2)
        (folder / "slowly").unlink()
        machines.finish(coordinator)
        for machine in (early, late):
            assert "The sweep has ended" in machines.finish(machine)
    expect_same(folder / "slept", whole)


@pytest.mark.check
def test_hosts_are_started_by_the_remote_shell_and_again_after_a_kill(folder: Path, whole: Path) -> None:
    """One of them has no Python: it is named, and the other one does the work."""
    shell = folder / "shell"
    shell.write_text('#!/bin/sh\n[ "$1" = b ] && { echo "python: not found" >&2; exit 127; }\nexec sh -c "$2"\n')
    shell.chmod(0o755)
    (folder / "slowly").touch()
    environment = {"HEADWAY_RSH": str(shell), "HEADWAY_ADDRESS": "127.0.0.1"}
    with Machines(folder) as machines:
        options = ("--hosts", "a:1,b:2", "--lease", str(LEASE_S))
        coordinator = machines.sweep("hosts", *options, **environment)
        wait_until(lambda: count_steps(folder / "hosts", 0) > 1)
        (program,) = (one for one in list_tree(coordinator) if "--join" in one.cmdline())
        send([program], signal.SIGKILL)
        wait_until(lambda: "It is started again" in machines.read(coordinator))
        (folder / "slowly").unlink()
        said = machines.finish(coordinator)
    assert "Host b cannot be used" in said
    assert "python: not found" in said
    assert said.count("A worker on a has joined.") == 2
    expect_same(folder / "hosts", whole)


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
    expect_same(folder / "killed", whole)
