"""Sweeps over several machines: workers that join, are lost, sleep and come back."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests._support import headway, refused
from tests.sweep._machines import (
    OPTIONS,
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machines")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The sweep on one machine."""
    given = (folder / "recipe.yaml", "--space", folder / "space.yaml", *OPTIONS, "--out", folder / "whole")
    headway("sweep", *given, "--slots", "1")
    return folder / "whole"


@pytest.mark.check
@pytest.mark.timeout(900)
def test_whatever_happens_to_machines_the_winner_has_the_same_bits(folder: Path, whole: Path) -> None:
    """One joined before there was a sweep, and sleeps over its lease; a worker and the coordinator are killed.

    HEADWAY_TEST_KILLS adds so many random events.
    """
    name, sweep, chance = "killed", folder / "killed", random.Random(random.SystemRandom().randrange(1 << 32))
    (folder / "slowly").touch()
    with Machines(folder) as machines:
        early = machines.join(name)
        coordinator = machines.sweep(name, *SHARED)
        wait_until(lambda: count_steps(sweep, 0) > 1)
        asleep = list_tree(early)
        assert len(asleep) == 2
        send(asleep, signal.SIGSTOP)
        late = machines.join(name)
        # Another one trains what the sleeper had begun.
        wait_until(lambda: any(trial.scores for trial in read_journal(sweep).trials))
        assert "has not answered for 3 s: others train what it trained" in machines.read(coordinator)
        send(asleep, signal.SIGCONT)
        # It has lost its worker, and comes back with another one.
        wait_until(lambda: machines.read(early).count("works for the coordinator") == 2)
        send(list_tree(late)[1:], signal.SIGKILL)
        for _ in range(int(os.environ.get("HEADWAY_TEST_KILLS", "0"))):
            time.sleep(chance.uniform(1, 6))
            disturb(machines, [early, late], chance)
        coordinator.kill()
        coordinator.wait()
        (folder / "slowly").unlink()
        said = machines.finish(machines.sweep(name))
        assert "Measuring" not in said
        for machine in (early, late):
            assert "The sweep has ended" in machines.finish(machine)
    assert read_decisions(sweep) == read_decisions(whole)
    assert read_weights(sweep) == read_weights(whole)
    expect_no_double_writes(sweep)


def disturb(machines: Machines, joined: list[subprocess.Popen[bytes]], chance: random.Random) -> None:
    """Stops a machine or its worker for a while, or kills the worker."""
    tree = list_tree(chance.choice(joined))
    if chance.random() < 0.3:
        send(tree[1:], signal.SIGKILL)
        return
    stopped = chance.choice([tree, tree[1:]])
    send(stopped, signal.SIGSTOP)
    time.sleep(chance.uniform(0.5, 2) * LEASE_S)
    send(stopped, signal.SIGCONT)


@pytest.mark.check
def test_hosts_are_started_by_the_remote_shell_and_again_after_a_kill(folder: Path) -> None:
    """One of them has no Python: it is named, and the other one does the work."""
    shell = folder / "shell"
    shell.write_text('#!/bin/sh\n[ "$1" = b ] && { echo "python: not found" >&2; exit 127; }\nexec sh -c "$2"\n')
    shell.chmod(0o755)
    (folder / "slowly").touch()
    environment = {"HEADWAY_RSH": str(shell), "HEADWAY_ADDRESS": "127.0.0.1"}
    with Machines(folder) as machines:
        options = ("--hosts", "a:1,b:2", "--lease", str(LEASE_S), "--max-trials", "1", "--seeds", "0")
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
    expect_no_double_writes(folder / "hosts")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--join", "s", "--resume", "s"), "--resume would do nothing here. Write headway sweep --join SWEEP"),
        (("--hosts", "a:1", "--slots", "2"), "--hosts says how many processes each machine runs"),
        (("--hosts", "a"), "not of the form HOST:NUMBER"),
        (("--hosts", "no-such-host.invalid:1"), "no-such-host.invalid is not known here"),
        (("--lr", "--hosts", "a:1"), "--hosts would do nothing here"),
        (("--lr", "--slots", "0", "recipe.yaml"), "--lr trains on this machine alone"),
        (("--join", "s", "--seed", "0"), "--seed would do nothing here"),
        (("--lr", "--fuse", "auto", "recipe.yaml"), "--fuse would do nothing here"),
        (("--wait", "5"), "--wait belongs to --join"),
        (("--lease", "5"), "--lease is for workers on other machines"),
        (("--resume", "s", "--slots", "1"), "slots, hosts and joinable may be changed"),
        (("--resume", "s", "--method", "halving"), "--method would do nothing here"),
        (("--resume", "s", "--hosts", "a:1"), "--hosts would do nothing here. Write headway sweep --resume SWEEP"),
    ],
)
def test_what_cannot_be_started_is_refused_before_there_is_a_folder(
    folder: Path, arguments: tuple[str, ...], said: str
) -> None:
    options = (
        ()
        if {"--join", "--resume", "--lr"} & {*arguments}
        else (folder / "recipe.yaml", "--space", folder / "space.yaml", "--budget", "2", "--out", folder / "none")
    )
    assert said in refused("sweep", *options, *arguments, status=2)
    assert not (folder / "none").exists()
