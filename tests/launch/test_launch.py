"""The launcher with real workers that train nothing: on this host, through a remote shell, and on two hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench._hosts import Hosts
from tests._support import refused

from headway.core.errors import CommunicationError
from headway.launch import launcher
from headway.launch.hosts import Host, parse_hosts
from headway.launch.launcher import launch

SCRIPT = Path(__file__).with_name("_worker.py")
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "REPLACEMENT_BACKOFF_S", 0.01)
    monkeypatch.setattr(launcher, "ERROR_GRACE_S", 20.0)  # on a busy machine the others come late
    for name in ("OMP_NUM_THREADS", "HEADWAY_RSH", "HEADWAY_ADDRESS", "HEADWAY_REMOTE_PYTHON"):
        monkeypatch.delenv(name, raising=False)


def build_plan(folder: Path, until: tuple[int, int], **do: str) -> list[str]:
    """Builds the arguments of Python. `do` has the fate of each rank, for example r1="kill"."""
    plan = {"do": {f"0.{name[1:]}.0": what for name, what in do.items()}, "until": until}
    return [str(SCRIPT), json.dumps(plan), str(folder)]


def parse_local(procs: int) -> tuple[Host, ...]:
    return parse_hosts(procs, None)


def read_generations(folder: Path, worker: str) -> list[list[int]]:
    """Reads number, rank, size, and 1 if the worker joined, of each generation."""
    lines = (folder / f"{worker}.log").read_text().splitlines()
    return [[int(word) for word in line.split()] for line in lines if line != "SIGTERM"]


def read_facts(folder: Path, worker: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{worker}.json").read_text())
    return found


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def assert_gone(folder: Path, *workers: str) -> None:
    """Checks that the processes have ended. If their parent has ended too, they may still be zombies."""
    pids = [read_facts(folder, worker)["pid"] for worker in workers]
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    assert psutil.wait_procs(left, timeout=PATIENCE_S)[1] == []


@contextlib.contextmanager
def run_beside(action: Callable[[], None]) -> Iterator[None]:
    """Runs an action beside the launcher, which needs the main thread for its signals."""
    thread = threading.Thread(target=action)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_workers_get_their_ranks_and_only_rank_0_prints_on_stdout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(build_plan(tmp_path, (0, 3)), parse_local(3)) == 0
    said = capfd.readouterr()
    assert said.out == "out of 0.0.0\ngeneration 0 of 3\n"
    assert sorted(said.err.splitlines()) == ["[rank 1] note 0", "[rank 2] note 0", "note 0"]
    for rank in range(3):
        found = read_facts(tmp_path, f"0.{rank}.0")
        assert read_generations(tmp_path, f"0.{rank}.0") == [[0, rank, 3, 0]]
        assert [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [
            str(rank), "3", str(rank), "3"
        ]  # fmt: skip
        assert found["HEADWAY_JOINING"] == "0"
        assert int(found["OMP_NUM_THREADS"]) >= 1
        assert found["secret on a command line"] is False


def test_the_users_number_of_threads_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch(build_plan(tmp_path, (0, 1)), parse_local(1)) == 0
    assert read_facts(tmp_path, "0.0.0")["OMP_NUM_THREADS"] == "7"


CHECK = pytest.mark.check


@pytest.mark.parametrize(
    ("victim", "fate"),
    [
        (0, "kill"),
        (1, "child"),
        (1, "late 3"),
        pytest.param(1, "kill", marks=CHECK),
        pytest.param(0, "exit 3", marks=CHECK),
        pytest.param(1, "exit 3", marks=CHECK),
        pytest.param(0, "child", marks=CHECK),
        pytest.param(0, "late 3", marks=CHECK),
    ],
)
def test_a_lost_worker_is_replaced_and_the_others_go_on(
    victim: int, fate: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = build_plan(tmp_path, (2, 3), **{f"r{victim}": fate})
    assert launch(plan, parse_local(3), timeout_s=200.0) == 0  # no loss is found by silence
    assert [size for _, _, size, _ in read_generations(tmp_path, "0.2.0")] == [3, 2, 3]
    assert read_generations(tmp_path, f"0.{victim}.1") == [[2, 2, 3, 1]]
    assert read_facts(tmp_path, f"0.{victim}.1")["LOCAL_RANK"] == str(victim)
    said = capfd.readouterr()
    assert "[joining] " not in said.out
    lead = "0.1.0" if victim == 0 else "0.0.0"
    assert read_generations(tmp_path, lead)[-1] == [2, 0, 3, 0]
    assert "generation 2 of 3\n" in said.out  # of whoever is rank 0 by then
    assert said.out.count("generation 2") == 1


def test_without_respawn_the_others_go_on_alone(tmp_path: Path) -> None:
    assert launch(build_plan(tmp_path, (1, 2), r0="kill"), parse_local(3), respawn=False) == 0
    assert read_generations(tmp_path, "0.2.0") == [[0, 2, 3, 0], [1, 1, 2, 0]]
    assert not (tmp_path / "0.0.1.json").exists()


@pytest.mark.parametrize("respawn", [True, pytest.param(False, marks=CHECK)])
def test_a_stopped_worker_is_lost_after_the_time_out_and_killed(respawn: bool, tmp_path: Path) -> None:
    plan = build_plan(tmp_path, (2, 3) if respawn else (1, 2), r1="stop")
    assert launch(plan, parse_local(3), timeout_s=4.0, respawn=respawn) == 0  # the others beat, if late
    assert [size for _, _, size, _ in read_generations(tmp_path, "0.2.0")] == ([3, 2, 3] if respawn else [3, 2])
    assert_gone(tmp_path, "0.1.0")


def test_the_same_failure_at_the_start_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    same = dict.fromkeys(("r0", "r1", "r2"), "fail 2 no such recipe.")
    assert launch(build_plan(tmp_path, (0, 3), **same), parse_local(3)) == 2
    assert capfd.readouterr().err == "headway: no such recipe.\n"


@pytest.mark.check
def test_different_failures_at_the_start_are_all_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fates = {"r0": "fail 2 one.", "r1": "fail 2 two.", "r2": "fail 2 three.", "r3": "fail 2 two."}
    assert launch(build_plan(tmp_path, (0, 4), **fates), parse_local(4)) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "headway: one." or "headway: one." in lines
    assert len([line for line in lines if line.endswith("headway: two.")]) == 1
    assert "[rank 2] headway: three." in lines


def test_if_one_worker_fails_at_the_start_the_others_are_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "ERROR_GRACE_S", 0.2)
    assert launch(build_plan(tmp_path, (0, 3), r1="fail 5 my disk is gone."), parse_local(3)) == 5
    assert capfd.readouterr().err == "[rank 1] headway: my disk is gone.\n"


def test_a_worker_killed_at_the_start_is_replaced_as_if_it_had_never_been(tmp_path: Path) -> None:
    """The replacement gets the command that resumes the run."""
    plan, again = build_plan(tmp_path, (0, 2), r0="die"), tmp_path / "again"
    again.mkdir()
    assert launch(plan, parse_local(2), restart_command=lambda: build_plan(again, (0, 2))) == 0
    assert read_generations(again, "0.0.1")[-1][1:] == [0, 2, 0]
    assert read_generations(tmp_path, "0.1.0")[-1][1:] == [1, 2, 0]


def test_a_worker_that_is_killed_again_and_again_at_the_start_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "ERROR_GRACE_S", 0.1)
    plan = {"do": {f"0.1.{attempt}": "die" for attempt in range(9)}, "until": (0, 2)}
    with pytest.raises(CommunicationError, match=r"worker 1 on host localhost was ended by SIGKILL"):
        launch([str(SCRIPT), json.dumps(plan), str(tmp_path)], parse_local(2))
    assert sorted(path.stem for path in tmp_path.glob("0.1.*.json")) == [f"0.1.{attempt}" for attempt in range(5)]


@pytest.mark.check
def test_a_place_whose_workers_never_join_is_given_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = {"do": {"0.1.0": "kill"} | {f"0.1.{n}": "fail 1 again." for n in range(1, 9)}, "until": (9, 9)}

    def stop() -> None:
        wait_until(lambda: (tmp_path / "0.1.5.json").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    with run_beside(stop):
        assert launch([str(SCRIPT), json.dumps(plan), str(tmp_path)], parse_local(2)) == 1
    assert "[joining] headway: again.\n" in capfd.readouterr().err
    assert not (tmp_path / "0.1.6.json").exists()


def test_workers_that_find_nothing_to_do_are_no_failure(tmp_path: Path) -> None:
    assert launch(build_plan(tmp_path, (0, 1), r0="leave"), parse_local(2)) == 0
    assert launch(build_plan(tmp_path, (0, 1), r0="leave", r1="leave"), parse_local(2)) == 0


def test_if_no_worker_is_left_the_command_to_resume_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (one := tmp_path / "one").mkdir()
    with pytest.raises(CommunicationError, match=r"no worker is left: .* was ended by SIGKILL .*Go on with it\.$"):
        launch(build_plan(one, (9, 9), r0="kill"), parse_local(1), resume_hint="Go on with it.")
    assert (
        launch(build_plan(tmp_path, (9, 9), r0="exit 7", r1="exit 7"), parse_local(2), resume_hint="Go on with it.")
        == 7
    )
    assert capfd.readouterr().err.endswith("headway: No worker is left. Go on with it.\n")


@pytest.mark.parametrize(
    ("fate", "what"),
    [
        ("hang", "was killed by the launcher, as it had left the run and did not end"),
        pytest.param("stop", "did not respond and was ended", marks=CHECK),
    ],
)
def test_a_worker_that_the_launcher_has_killed_is_no_case_of_short_memory(fate: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(CommunicationError, match=rf"no worker is left: worker 0 on host localhost {what}\.$"):
        launch(build_plan(tmp_path, (9, 9), r0=fate), parse_local(1), timeout_s=2.0)


@pytest.mark.parametrize("on_rank_failure", ["continue", "restart"])
def test_a_worker_may_say_why_it_fails(on_rank_failure: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process is not killed as soon as its connection has ended, even if no worker is left."""
    plan = build_plan(tmp_path, (9, 9), r0="late 7", r1="late 7")
    assert launch(plan, parse_local(2), on_rank_failure=on_rank_failure, restarts=0) == 7
    assert "headway: late 7\n" in capfd.readouterr().err


@pytest.mark.parametrize("who", [("r0", "r1"), ("r1",), pytest.param(("r1", "r2"), marks=CHECK)])
def test_an_error_of_its_own_ends_the_run_and_is_said_once(
    who: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "ERROR_GRACE_S", 5.0 if "r0" in who else 1.0)  # on a busy machine it may be late
    plan = build_plan(tmp_path, (9, 9), **dict.fromkeys(who, "own 4"))
    assert launch(plan, parse_local(3), timeout_s=200.0, resume_hint="Go on with it.") == 4
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "note" not in line)
    assert line.endswith("headway: the disk is full.")
    assert ("[rank " in line) == ("r0" not in who)
    assert read_generations(tmp_path, "0.2.0") == [[0, 2, 3, 0]]  # nobody was told that a worker had died
    assert_gone(tmp_path, "0.0.0", "0.1.0", "0.2.0")


def test_a_newcomer_that_cannot_join_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = {"do": {"0.1.0": "kill", "0.1.1": "farewell 1 no data here."}, "until": (2, 3)}
    assert launch([str(SCRIPT), json.dumps(plan), str(tmp_path)], parse_local(3)) == 0
    assert read_generations(tmp_path, "0.1.2")[-1][1:] == [2, 3, 1]
    assert "[joining] headway: no data here.\n" in capfd.readouterr().err


def test_sigterm_is_passed_on_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def stop() -> None:
        wait_until(lambda: len(list(tmp_path.glob("*.log"))) == 3)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with run_beside(stop):
        assert launch(build_plan(tmp_path, (9, 9)), parse_local(3)) == 1
    for rank in range(3):
        assert (tmp_path / f"0.{rank}.0.log").read_text().count("SIGTERM") == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert "No worker is left" not in capfd.readouterr().err


def test_the_second_signal_kills(tmp_path: Path) -> None:
    def stop() -> None:
        wait_until(lambda: len(list(tmp_path.glob("*.log"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: "SIGTERM" in (tmp_path / "0.1.0.log").read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    with run_beside(stop):  # rank 0 is stopped, and cannot end
        assert launch(build_plan(tmp_path, (9, 9), r0="stop"), parse_local(2)) == 1
    assert_gone(tmp_path, "0.0.0")


def test_restart_ends_all_and_begins_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    first.mkdir()
    then.mkdir()
    plan, again = build_plan(first, (9, 9), r1="kill"), build_plan(then, (0, 2))
    assert launch(plan, parse_local(2), restart_command=lambda: again, on_rank_failure="restart") == 0
    assert read_generations(first, "0.0.0") == [[0, 0, 2, 0]]
    assert read_generations(then, "0.1.0") == [[0, 1, 2, 0]]
    assert "restart 1 of at most 3" in capfd.readouterr().err


def test_restarts_are_limited(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = build_plan(tmp_path, (9, 9), r0="exit 6", r1="exit 6")
    assert launch(plan, parse_local(2), on_rank_failure="restart", restarts=1) == 6
    assert capfd.readouterr().err.count("are started again") == 1


# Other hosts.


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A remote shell to this host, under any name. It prints a greeting, as login shells do."""
    path = tmp_path / "rsh"
    path.write_text('#!/bin/sh\necho welcome\necho careful >&2\nshift\nexec sh -c "$*"\n')
    path.chmod(0o755)
    monkeypatch.setenv("HEADWAY_RSH", str(path))
    monkeypatch.setenv("HEADWAY_ADDRESS", "127.0.0.1")
    return path


def parse_remote(hosts: str) -> tuple[Host, ...]:
    return parse_hosts(None, hosts)


def test_workers_of_other_hosts_go_through_the_remote_shell(
    shell: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXTRA", "not handed on where the shell does not")
    folder = tmp_path / "with a 'space"
    folder.mkdir()
    monkeypatch.chdir(folder)
    plan = {"do": {"1.0.0": "kill"}, "until": (2, 3)}
    assert launch([str(SCRIPT), json.dumps(plan), str(folder)], parse_remote("a:1,b:2")) == 0
    said = capfd.readouterr()
    assert said.out.splitlines()[0] == "out of 0.0.0"
    assert said.out.splitlines()[-1] == "generation 2 of 3"
    assert "[rank 2] note 2" in said.err
    assert "careful" not in said.err
    assert read_generations(folder, "1.0.1") == [[2, 2, 3, 1]]
    found = read_facts(folder, "1.1.0")
    assert found["cwd"] == str(folder)
    assert found["secret on a command line"] is False
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["2", "3", "1", "2"]


@pytest.mark.parametrize(
    ("rsh", "match"),
    [
        ("/no/such/shell", r"the remote shell '/no/such/shell' cannot be run"),
        (
            "sh -c 'echo No route to $0. >&2; exit 255'",
            r"host b cannot be used \(sh ended with status 255: No route to b\)",
        ),
        (
            "true",
            r"host b cannot be used \(true ended with status 0: it said nothing\)\. "
            r"Check that this command works: true b true\.$",
        ),
    ],
)
def test_a_host_that_cannot_be_reached_is_named(
    rsh: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "ERROR_GRACE_S", 0.1)
    monkeypatch.setenv("HEADWAY_RSH", rsh)
    monkeypatch.setenv("HEADWAY_ADDRESS", "127.0.0.1")
    with pytest.raises(CommunicationError, match=match):
        launch(build_plan(tmp_path, (0, 3)), parse_remote("localhost:1,b:2"))


def test_a_missing_python_is_reported_with_the_words_of_the_shell(
    shell: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "ERROR_GRACE_S", 0.1)
    monkeypatch.setenv("HEADWAY_REMOTE_PYTHON", "/no/such/python")
    with pytest.raises(CommunicationError, match=r"host b cannot be used .*/no/such/python: not found"):
        launch(build_plan(tmp_path, (0, 1)), parse_remote("b:1"))


def find_agents() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "headway.launch.agent" in child.cmdline() and child.name() != "sh":
                found.append(child)
    return found


@pytest.mark.parametrize(
    "number", [signal.SIGSTOP, *(pytest.param(n, marks=CHECK) for n in (signal.SIGKILL, signal.SIGTERM))]
)
def test_a_host_whose_agent_is_lost_is_lost_and_comes_back(
    number: int, shell: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def lose() -> None:
        wait_until(lambda: len(list(tmp_path.glob("*.log"))) == 3)
        for agent in find_agents():
            agent.send_signal(number)

    with run_beside(lose):
        plan = [str(SCRIPT), json.dumps({"do": {}, "until": (2, 3)}), str(tmp_path)]
        assert launch(plan, parse_remote("localhost:1,b:2"), timeout_s=3.0) == 0
    assert read_generations(tmp_path, "0.0.0")[-1][2] == 3
    last = []
    for local in range(2):
        newest = max(tmp_path.glob(f"1.{local}.*.log"), key=lambda path: int(path.stem.rpartition(".")[2]))
        last.append(read_generations(tmp_path, newest.stem)[-1][1:])
    assert sorted(last) == [[1, 3, 1], [2, 3, 1]]  # either may have joined first
    if number != signal.SIGTERM:  # where it can, it ends its workers and says so
        assert "headway: host b has been lost (" in capfd.readouterr().err
    assert find_agents() == []
    assert_gone(tmp_path, "1.0.0", "1.1.0")


LAUNCHER = """
import sys
from headway.launch.hosts import parse_hosts
from headway.launch.launcher import launch
sys.exit(launch(sys.argv[3:], parse_hosts(None, sys.argv[1]), timeout_s=float(sys.argv[2])))
"""


def build_launcher_command(hosts: str, timeout_s: float, plan: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", LAUNCHER, hosts, str(timeout_s), *plan]


def test_a_killed_launcher_takes_its_workers_with_it(shell: Path, tmp_path: Path) -> None:
    with subprocess.Popen(build_launcher_command("localhost:1,b:1", 3.0, build_plan(tmp_path, (9, 9)))) as process:
        wait_until(lambda: len(list(tmp_path.glob("*.log"))) == 2)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(family) >= 3
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []


@pytest.mark.root
def test_two_hosts_and_a_cut_link(tmp_path: Path) -> None:
    with Hosts(2, rate_bits_s=None) as hosts:
        rsh = tmp_path / "rsh"
        rsh.write_text(f'#!/bin/sh\nshift\nexec ip netns exec {hosts.namespace(1)} sh -c "$*"\n')
        rsh.chmod(0o755)
        plan = [str(SCRIPT), json.dumps({"do": {}, "until": (1, 2)}), str(tmp_path)]
        argv = build_launcher_command(f"localhost:2,{hosts.addresses[1]}:2", 4.0, plan)
        process = hosts.run(0, argv, {"HEADWAY_RSH": str(rsh)}, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: len(list(tmp_path.glob("*.log"))) == 4)
        hosts.cut(1)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        # Both workers behind the cut fall silent, maybe not in the same beat: generation 1 then waits in vain for the
        # second one, and generation 2 is that of the two that are left.
        number = read_generations(tmp_path, "0.0.0")[-1][0]
        assert number in (1, 2)
        for rank in range(2):
            assert read_generations(tmp_path, f"0.{rank}.0") == [[0, rank, 4, 0], [number, rank, 2, 0]]
        assert read_generations(tmp_path, "1.1.0") == [[0, 3, 4, 0]]
        assert_gone(tmp_path, "1.0.0", "1.1.0")


# What the user names.


def test_the_verb_refuses_contradicting_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "--repeat trains in one process" in refused("train", "r.yaml", "--procs", "2", "--repeat", "2", status=2)
    assert "not a number of processes" in refused("train", "r.yaml", "--hosts", "a:x", status=2)
    assert "train needs a recipe" in refused("train", "--procs", "2", status=2)
    assert "--no-respawn only works with" in refused("train", "r.yaml", "--no-respawn", status=2)
    assert "--respawn only works with" in refused("train", "r.yaml", "--respawn", status=2)
    assert str(tmp_path / "r.yaml") in refused("train", tmp_path / "r.yaml", "--procs", "2", status=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    said = refused("train", "r.yaml", "--procs", "2", status=2)
    assert "was started by a launcher (torchrun)" in said
