"""A sweep over two hosts whose link is cut: the worker beyond it ends before its trials are given away."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from bench._hosts import Hosts
from tests.sweep._machines import (
    Machines,
    count_steps,
    expect_no_double_writes,
    list_tree,
    prepare,
    send,
    wait_until,
)

pytestmark = [pytest.mark.root, pytest.mark.check]


def test_a_cut_link_ends_the_worker_beyond_it_before_another_one_gets_its_trial(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "slowly").touch()
    sweep = tmp_path / "cut"
    with Hosts(2) as hosts, Machines(tmp_path) as machines:
        here, there = (hosts.command(host, []) for host in (0, 1))
        beyond = machines.join("cut", before=there)
        # Long enough for all that follows, while there is a file `slowly`.
        options = ("epochs=100", "--slots", "0", "--lease", "6", "--max-trials", "1", "--seeds", "0")
        coordinator = machines.sweep("cut", *options, before=here)
        wait_until(lambda: count_steps(sweep, 0) > 1)
        assert json.loads((sweep / "coordinator.json").read_text())["address"] == hosts.addresses[0]
        (program, worker) = list_tree(beyond)[-2:]
        hosts.cut(1)
        wait_until(lambda: "has not answered for 6 s: others train what it trained" in machines.read(coordinator))
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
        assert program.is_running()
        near = machines.join("cut", before=here)
        wait_until(lambda: machines.read(coordinator).count("has joined") == 2)
        hosts.restore(1)
        wait_until(lambda: machines.read(coordinator).count("has joined") == 3)
        # An orderly end of the one that trains: the other one goes on from there.
        send(list_tree(near)[-2:-1], signal.SIGTERM)
        assert "Left the sweep" in machines.finish(near)
        (tmp_path / "slowly").unlink()
        machines.finish(coordinator)
        machines.finish(beyond)
    result = json.loads((sweep / "result.json").read_text())
    assert result["trials"] == 1
    assert result["core_s"] > 0
    expect_no_double_writes(sweep)
