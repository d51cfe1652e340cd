"""Leases: a worker that lost its lease cannot write a run folder any more, whatever it was doing when it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.run_folder import RunFolder
from headway.sweep.lease import EXPIRED_STATUS, Lease, replace_folder, return_lease, revoke_old_leases

SLEEPER = """
import json, os, sys, time
from pathlib import Path
run = Path(sys.argv[1])
(run / "checkpoints/step-1").mkdir(parents=True)
(run / "checkpoints/step-1/weights").write_text("1")
(run / "checkpoints/.step-2.draft").mkdir()
log = open(run / "metrics.jsonl", "a")
log.write("before\\n"); log.flush()
print("wrote", flush=True)
sys.stdin.readline()
log.write("after\\n"); log.flush()
failed = []
for attempt in (
    lambda: (run / "summary.json").write_text("{}"),
    lambda: os.replace(run / "checkpoints/.step-2.draft", run / "checkpoints/step-2"),
    lambda: open(run / "metrics.jsonl", "a").write("again"),
    lambda: (run / "checkpoints/step-1/weights").unlink(),
):
    try:
        attempt()
    except OSError as error:
        failed.append(type(error).__name__)
print(json.dumps(failed), flush=True)
"""
HOLDER = """
import queue, time
from headway.sweep.lease import LeaseHolder
sent = queue.SimpleQueue()
# Before the first heartbeat, which the holder sends at once.
began = time.monotonic()
holder = LeaseHolder(0.6, sent.put)
for _ in range(4):
    holder.renew(sent.get())
print(time.monotonic() - began, flush=True)
time.sleep(60)
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    (tmp_path / "trials").mkdir()
    return tmp_path


def look(run: Path) -> dict[str, str]:
    return {str(path.relative_to(run)): path.read_text() for path in sorted(run.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("revoke", ["by the coordinator", "by the next coordinator"])
def test_a_worker_that_sleeps_over_its_lease_writes_nothing(sweep: Path, revoke: str) -> None:
    lease, run = Lease(sweep), sweep / "trials/7"
    path = sweep / lease.grant(7, run)
    run.mkdir()
    assert path.is_dir()
    assert sweep / lease.grant(7, run) == path
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SLEEPER, path], **pipes) as sleeper:
        assert sleeper.stdin is not None
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == "wrote\n"
        # It holds the lock of the folder, as a trainer does, so a new worker could not have it.
        with RunFolder(run).lock():
            if revoke == "by the coordinator":
                lease.end(is_dead=False)
            else:
                revoke_old_leases(sweep, 0, lambda text: None)
            with RunFolder(run).lock():
                left = look(run)
                assert left == {"checkpoints/step-1/weights": "1", "metrics.jsonl": "before\n"}
                sleeper.stdin.write("\n")
                sleeper.stdin.flush()
                failed = json.loads(sleeper.stdout.readline())
    assert failed == ["FileNotFoundError"] * 4
    assert look(run) == left
    assert [one.name for one in (sweep / "trials").iterdir()] == ["7"]


def test_a_returned_trial_cannot_be_written_and_a_returned_lease_has_no_trials(sweep: Path) -> None:
    lease = Lease(sweep)
    paths = [sweep / lease.grant(trial, sweep / "trials" / str(trial)) for trial in (1, 2)]
    for path in paths:
        path.mkdir()
    lease.give_back(1)
    assert [path.exists() for path in paths] == [False, True]
    assert not lease.is_returned
    return_lease(sweep, lease.name)
    assert lease.is_returned
    # The worker is gone, so the folders need no copies.
    before = [path.stat().st_ino for path in sorted((sweep / "trials").iterdir())]
    lease.end(is_dead=False)
    assert [path.stat().st_ino for path in sorted((sweep / "trials").iterdir())] == before


def test_the_winner_with_another_seed_has_a_number_below_0(sweep: Path) -> None:
    lease = Lease(sweep)
    path = sweep / lease.grant(-4, sweep / "retrained/3")
    path.mkdir()
    (path / "metrics.jsonl").write_text("before\n")
    before = (sweep / "retrained/3/metrics.jsonl").stat().st_ino
    lease.end(is_dead=False)
    assert (sweep / "retrained/3/metrics.jsonl").stat().st_ino != before


@pytest.mark.parametrize("renames", range(4))
def test_a_replacement_that_was_killed_is_ended_by_the_next_coordinator(
    sweep: Path, renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sweep / "trials/7"
    run.mkdir()
    (run / "metrics.jsonl").write_text("before\n")
    (run / "recipe.yaml").write_text("batch: 1\n")
    whole, left = look(run), [renames]

    class KilledError(BaseException):
        pass

    def kill(call: str) -> None:
        true = getattr(os, call)

        def killed(*args: object, **more: object) -> None:
            if not left[0]:
                raise KilledError
            left[0] -= 1
            true(*args, **more)

        monkeypatch.setattr(os, call, killed)

    kill("rename")
    kill("link")
    if renames < 3:
        with pytest.raises(KilledError):
            replace_folder(run)
    else:
        replace_folder(run)
    monkeypatch.undo()
    revoke_old_leases(sweep, 0, lambda text: None)
    assert look(run) == whole
    assert [one.name for one in (sweep / "trials").iterdir()] == ["7"]


def test_a_worker_whose_heartbeats_are_not_answered_ends_itself() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDER], capture_output=True, text=True, timeout=120)
    assert done.returncode == EXPIRED_STATUS
    # Four answers have kept it alive for longer than a lease.
    assert float(done.stdout) >= 0.6
    assert "has not answered" in done.stderr
