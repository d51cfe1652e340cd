"""`/runs` and `/exports`: recipes of the store alone, as processes that end with their job and with their server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lifecycle.service._service import WAIT_S, Reply, Served, check_problem, create, key, serving_data

from headway.http.problems import ProblemError
from headway.lifecycle.service.jobs import CancelledJobError, Job
from headway.lifecycle.service.processes import Command, Processes, end_process


def write_recipe(store: Path, name: str, text: str) -> None:
    (store / "recipes").mkdir(parents=True, exist_ok=True)
    (store / "recipes" / name).write_text(text)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("runs") / "store"
    with serving_data(folder) as found:
        create(found, "cars")
        write_recipe(folder, "bad.yaml", "no_such_key: 1")
        (folder.parent / "outside.yaml").write_text("x: 1")
        (folder / "recipes/link.yaml").symlink_to(folder.parent / "outside.yaml")
        yield found
        status, err = found.stop()
        assert status == 0, err


def post(served: Served, path: str, tree: Any) -> Reply:
    return served.ask("POST", path, json.dumps(tree).encode(), {"Content-Type": "application/json"} | key())


def test_only_recipes_of_the_store_are_run(served: Served) -> None:
    assert served.ask("GET", "/runs").json() == {"recipes": ["bad.yaml"], "runs": []}
    for name in ("none.yaml", "../outside.yaml", "link.yaml", "/etc/passwd", "", 5, None, ["bad.yaml"]):
        check_problem(post(served, "/runs", {"recipe": name}), 422, "/problems/wrong-change")
    for tree in ({}, {"recipe": "bad.yaml", "loop": "bad.yaml"}, {"recipe": "bad.yaml", "epochs": 5}, []):
        check_problem(post(served, "/runs", tree), 400, "/problems/malformed")
    check_problem(post(served, "/exports", {"run": "../cars"}), 422, "/problems/wrong-change")
    for tree in ({}, {"run": "x", "gate": 0}, {"to": ["onnx"]}):
        check_problem(post(served, "/exports", tree), 400, "/problems/malformed")
    for targets in ("onnx", [], ["--out=/tmp"]):
        check_problem(post(served, "/exports", {"run": "x", "to": targets}), 422, "/problems/wrong-change")
    assert not (served.folder / "runs").exists()


@pytest.mark.check
def test_a_run_that_fails_says_why_and_runs_once(served: Served) -> None:
    usual = {"Content-Type": "application/json"} | key()
    body = json.dumps({"recipe": "bad.yaml"}).encode()
    replies = [served.ask("POST", "/runs", body, usual) for _ in range(2)]
    assert [reply.status for reply in replies] == [202, 202]
    assert replies[0].body == replies[1].body
    place = replies[0].headers["location"]
    until = time.monotonic() + WAIT_S
    while (tree := served.ask("GET", place).json())["state"] in ("queued", "running"):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert (tree["state"], tree["kind"]) == ("failed", "run")
    assert tree["problem"]["type"] == "/problems/command-failed"
    assert any("no_such_key" in line for line in tree["log"]), tree


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path, tmp_path / "service/processes")


@pytest.mark.check
def test_a_cancelled_job_ends_its_process(processes: Processes, tmp_path: Path) -> None:
    # A verb that does not end by itself.
    verb = ("serve-data", str(tmp_path / "other"), "--bind", "127.0.0.1:0", "--json")
    job, ended = Job("0" * 16, "local", "x", 1, "run"), list[Exception]()

    def run() -> None:
        try:
            processes.run(Command("run", verb, tmp_path / "runs/x"), job)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until = time.monotonic() + WAIT_S
    while not (tmp_path / "other/service/tokens.json").parent.exists() and time.monotonic() < until:
        time.sleep(0.02)
    job.cancel()
    thread.join(WAIT_S)
    assert [type(error) for error in ended] == [CancelledJobError]
    assert list((tmp_path / "service/processes").iterdir()) == []


def test_what_a_cancelled_process_has_started_ends_too() -> None:
    """Such as a helper that holds the pipe for errors open, whose end the job waits for."""
    with subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo begun >&2; wait"], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "begun\n"
        end_process(process)
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGTERM


@pytest.mark.check
def test_a_process_ends_with_its_server(tmp_path: Path) -> None:
    arguments = ["serve-data", str(tmp_path / "other"), "--bind", "127.0.0.1:0", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "headway.lifecycle.service.child", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert b"url" in process.stdout.readline()
        # As if the server, which holds the other end, were killed.
        process.stdin.close()
        assert process.wait(WAIT_S) == 0


@pytest.mark.check
def test_a_verb_that_is_refused_fails_its_job(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "runs/x").mkdir(parents=True)
    command = Command("export", ("data-token", str(tmp_path / "none"), "--json"), tmp_path / "runs/x/export")
    with pytest.raises(ProblemError, match="data-token has ended with status 2"):
        processes.run(command, Job("1" * 16, "local", "x", 1))
    assert processes.list_runs() == ["x"]
