"""What bench.soak concludes from: checksums of weights, ids, and faults that hit whom they should."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from bench._soak.faults import Faults, SoakError
from bench._soak.network import FOLDER, Watched
from bench._soak.traces import Steps, Weights, lost_positions, read_given, read_weights, weights
from tests.comm._fleet import until

# The bench counts the children of a launcher, which are workers all.
pytestmark = pytest.mark.fresh
WHOLE = list(range(100, 120))


def dead(launcher: subprocess.Popen[bytes]) -> set[int]:
    """Children that have ended. A busy processor delivers a signal some time after it was sent: wait for them."""
    children = psutil.Process(launcher.pid).children()
    return {child.pid for child in children if child.status() == psutil.STATUS_ZOMBIE}


def test_one_way_of_weights_that_all_have() -> None:
    newcomer, victim = WHOLE[12:], WHOLE[:7]
    traces = {"a": WHOLE, "b": WHOLE, "new": newcomer, "victim": victim}
    assert weights(traces, {"victim"}) == Weights(20, 0, 0, 0, 0)
    assert weights(traces, set()) == Weights(20, 0, 1, 0, 0)


@pytest.mark.parametrize("back", [1, 2, 3])
def test_steps_begun_again(back: int) -> None:
    again = WHOLE[:10] + WHOLE[10 - back :]
    assert weights({"a": again, "b": WHOLE[:9] + WHOLE[9:]}, set()) == Weights(20, 0, 0, back, back)


def test_what_a_victim_alone_has_seen_last_is_no_stray() -> None:
    traces = {"a": WHOLE, "victim": [*WHOLE[:8], 999]}
    assert weights(traces, {"victim"}).strays == 0
    assert weights({**traces, "victim": [*WHOLE[:8], 998, 999]}, {"victim"}).strays == 1
    assert weights({**traces, "b": [*WHOLE[:8], 998, *WHOLE[9:]]}, {"victim"}).strays == 1


def test_who_ends_elsewhere_is_a_stray() -> None:
    found = weights({"a": WHOLE, "b": WHOLE, "c": [*WHOLE[:18], 998, 999]}, set())
    assert (found.steps, found.strays, found.others) == (20, 1, 1)


def test_the_network_writes_down_its_weights_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv(FOLDER, str(tmp_path))
    network, images = Watched(10), torch.randn(4, 1, 8, 8)
    for _ in range(2):
        network(images)
    network.eval()(images)
    with torch.no_grad():
        next(network.parameters()).view(-1)[0] += 1
    network.train()(images)
    (trace,) = read_weights(tmp_path).values()
    assert len(trace) == 3
    assert trace[0] == trace[1] != trace[2]
    other = Watched(10)
    other.load_state_dict(network.state_dict())
    other.to(memory_format=torch.channels_last)(images)
    (trace,) = read_weights(tmp_path).values()
    assert trace[3] == trace[2]


def test_what_was_given_away_at_the_end_of_a_step_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv(FOLDER, str(tmp_path))
    holder, newcomer, images = Watched(10), Watched(10), torch.randn(4, 1, 8, 8)
    holder(images)
    with torch.no_grad():
        next(holder.parameters()).view(-1)[0] += 1
    newcomer.load_state_dict(holder.state_dict())
    holder(images)
    ((first, after),) = read_given(tmp_path)
    (trace,) = read_weights(tmp_path).values()
    assert trace == [first, after]
    assert Steps({"holder": [7, first], "new": [after, 9]}, {"holder"}, [[first, after]]).place(after) == 2


def ids(run: Path, name: str, positions: list[int]) -> None:
    np.stack([positions] * 3, axis=1).astype("<i8").tofile(run / f"ids-{name}.bin")


def test_positions_that_did_not_come_once(tmp_path: Path) -> None:
    ids(tmp_path, "0", [0, 1, 4, 5])
    ids(tmp_path, "1", [2, 3, 6, 7])
    assert lost_positions(tmp_path, 8) == 0
    assert lost_positions(tmp_path, 10) == 2
    assert lost_positions(tmp_path, 7) == 1
    ids(tmp_path, "2", [7, 3])
    assert lost_positions(tmp_path, 8) == 2


WORKER = """
import json, os, sys, time
from pathlib import Path
name, lead = os.environ["HEADWAY_MEMBER"], sys.argv[1] == "1"
metrics = open("metrics.jsonl", "a") if lead else None
ids = open(f"ids-{name}.bin", "ab", buffering=0)
while True:
    ids.write(bytes(24))
    time.sleep(0.005)
"""
# The stand-in for a launcher counts the steps itself, so that they go on whoever is harmed.
LAUNCHER = """
import json, os, subprocess, sys, time
workers = []
for n in range(4):
    environ = {**os.environ, "HEADWAY_MEMBER": str(n)}
    workers.append(subprocess.Popen([sys.executable, "-c", sys.argv[1], str(int(n == 0))], env=environ))
for step in range(1, int(sys.argv[2]) + 1):
    with open("metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "train", "step": step, "loss": 1.0}) + "\\n")
    time.sleep(0.02)
for worker in workers:
    worker.kill()
    worker.wait()
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for launcher in found:
        for child in psutil.Process(launcher.pid).children() if launcher.poll() is None else []:
            child.kill()
        launcher.kill()
        launcher.wait()


def started(folder: Path, steps: int, status: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, WORKER, str(steps), str(status)], cwd=folder)


def test_faults_hit_members_and_the_lead_is_known(
    tmp_path: Path, launchers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench._soak.faults.KINDS", {"kill": 1.0})
    monkeypatch.setattr("bench._soak.faults.LEAD", 1.0)
    launchers.append(started(tmp_path, 10_000))
    while len([path for path in tmp_path.glob("ids-*.bin") if path.stat().st_size]) < 4:
        time.sleep(0.01)
    harm = Faults(launchers[0], tmp_path, 2.0, seed=3)
    harm.harm(1, 20)
    monkeypatch.setattr("bench._soak.faults.LEAD", 0.0)
    harm.harm(2, 40)
    first, second = harm.done
    assert (first.kind, first.lead, second.lead) == ("kill", True, False)
    until(lambda: dead(launchers[0]) == {*first.victims, *second.victims}, "the death of both victims alone")


def test_two_at_once_and_one_while_a_checkpoint_is_written(
    tmp_path: Path, launchers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, count in (("two", 2), ("save", 1)):
        (tmp_path / kind / "checkpoints/.step-00000001.part").mkdir(parents=True)
        monkeypatch.setattr("bench._soak.faults.KINDS", {kind: 1.0})
        launchers.append(started(tmp_path / kind, 10_000))
        while len([path for path in (tmp_path / kind).glob("ids-*.bin") if path.stat().st_size]) < 4:
            time.sleep(0.01)
        harm = Faults(launchers[-1], tmp_path / kind, 2.0, seed=0)
        harm.harm(1, 20)
        (fault,) = harm.done
        assert len(set(fault.victims)) == count
        until(lambda fault=fault: dead(launchers[-1]) == set(fault.victims), "the death of the victims alone")


def test_who_is_stopped_to_wake_is_woken(
    tmp_path: Path, launchers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("wake", "stop"):
        monkeypatch.setattr("bench._soak.faults.KINDS", {kind: 1.0})
        launchers.append(started(tmp_path, 10_000))
        harm = Faults(launchers[-1], tmp_path, 0.05, seed=0)
        harm.harm(1, 20)
        victim = psutil.Process(harm.done[0].victims[0])
        stops = kind == "stop"
        until(lambda one=victim, stops=stops: (one.status() == psutil.STATUS_STOPPED) == stops, f"the end of {kind}")


def test_a_run_that_ends_before_its_faults(tmp_path: Path, launchers: list[subprocess.Popen[bytes]]) -> None:
    launchers.append(started(tmp_path, 20))
    harm = Faults(launchers[0], tmp_path, 0.05, seed=0)
    harm.harm(1000, 1_000_000)
    assert harm.done == []
    launchers.append(started(tmp_path, 5, status=3))
    with pytest.raises(SoakError, match="ended with status 3"):
        Faults(launchers[1], tmp_path, 0.05, seed=0).harm(1000, 1_000_000)


def test_steps_of_a_way_that_was_given_up() -> None:
    """The run went back to its step 10, and on from there with other weights."""
    again = [*WHOLE[:10], *range(300, 310)]
    traces = {"victim": WHOLE[:15], "new": again[10:], "newer": WHOLE[13:15]}
    steps = Steps({**traces, "first": again}, {"victim", "newer"})
    assert [steps.place(traces[process][0]) for process in traces] == [0, 10, 13]
    assert steps.place(999) == -1
    found = weights({**traces, "first": again}, {"victim", "newer"}, given_up=5)
    assert (found.steps, found.strays) == (20, 0)
    assert weights({**traces, "first": again}, {"victim", "newer"}).strays == 5


@pytest.mark.check
@pytest.mark.timeout(900)
@pytest.mark.root
def test_the_last_holder_of_the_state_is_lost_without_dns(tmp_path: Path) -> None:
    """Really: two processes of a run; the run ends whole. `bench.soak --quick` does it with DNS."""
    out, tries = tmp_path / "claims.json", 1
    command = [sys.executable, "-m", "bench.soak", "--pattern", "last-holder", "--no-dns", "--json", str(out)]
    subprocess.run([*command, "--faults", str(tries)], check=True)
    claims = {claim["name"]: claim["value"] for claim in json.loads(out.read_text())["claims"]}
    assert claims.pop("faults") == claims.pop("ended_at_or_after_checkpoint") == tries
    assert claims == {"lost_positions": 0, "lost_steps": 0, "lost_records": 0, "unfinished": 0}
