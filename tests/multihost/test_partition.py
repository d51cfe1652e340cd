"""A run over two hosts whose link is cut: the launcher's host goes on, and the other one comes back with the link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench._hosts import Hosts
from bench._soak.network import FOLDER
from bench._soak.traces import lost_positions, read_weights, weights
from tests._support import packed_digits

pytestmark = [pytest.mark.root, pytest.mark.check]

SHELL = Path(__file__).with_name("_shell.py")
BATCH = 30
RECIPE = """
data: {train: digits.packed/train, eval: digits.packed/eval, threads: 1}
model: {factory: 'bench._soak.network:Watched'}
optimizer: {name: sgd, lr: 0.02}
batch: 30
epochs: 100000
precision: fp32
comm: {timeout_s: 2}
evaluate: {every_epochs: 20}
checkpoint: {every_steps: 50}
log_every_steps: 1
log_ids: true
"""
GIVES_UP_S = 120


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as found:
        yield found


def wait(condition: Callable[[], bool], launcher: subprocess.Popen[Any]) -> None:
    until = time.monotonic() + GIVES_UP_S
    while not condition():
        assert launcher.poll() is None, "the run has ended"
        assert time.monotonic() < until
        time.sleep(0.02)


def step(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def test_a_cut_link(hosts: Hosts, tmp_path: Path) -> None:
    packed_digits(tmp_path)
    run, traces, recipe = tmp_path / "run", tmp_path / "traces", tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    traces.mkdir()
    shell = hosts.run(1, [sys.executable, SHELL, "serve", hosts.addresses[1]], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    remote = f"{sys.executable} {SHELL} {shell.stdout.readline().strip()}"
    environ = {"HEADWAY_RSH": remote, FOLDER: str(traces), "OMP_NUM_THREADS": "1"}
    where = f"localhost:2,{hosts.addresses[1]}:2"
    command = [sys.executable, "-m", "headway", "train", recipe, "--run", run, "--hosts", where]
    with hosts.run(0, command, environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            wait(lambda: step(run) > 40, launcher)
            began = {path.stem for path in traces.iterdir()}
            assert len(began) == 4
            hosts.cut(1)
            was = step(run)
            wait(lambda: step(run) > was + 40, launcher)
            hosts.restore(1)
            wait(lambda: len({path.stem for path in traces.iterdir()} - began) == 2, launcher)
            was = step(run)
            wait(lambda: step(run) > was + 40, launcher)
        finally:
            launcher.terminate()
            out, err = launcher.communicate()
            shell.kill()
            shell.communicate()
    assert launcher.returncode == 1, err
    assert "Stopped" in out + err
    assert "silent" in err
    found = weights(read_weights(traces), victims=set())
    done = json.loads((run / "summary.json").read_text())["step"]
    assert found.steps == done
    assert (found.strays, found.others, found.repeated_most) == (0, 2, 1)
    assert lost_positions(run, done * BATCH) == 0


def test_the_shell_is_one(hosts: Hosts) -> None:
    server = hosts.run(1, [sys.executable, SHELL, "serve", hosts.addresses[1]], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    call = [sys.executable, SHELL, server.stdout.readline().strip(), hosts.addresses[1]]
    for _ in range(2):
        done = subprocess.run(hosts.command(0, [*call, "tr a-z A-Z; pwd"]), input=b"abc", capture_output=True)
        assert done.stdout == b"ABC" + os.fsencode(Path(SHELL).parents[2]) + b"\n"
    server.kill()
    server.communicate()
