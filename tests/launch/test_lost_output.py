"""The launcher goes on without its output, and no error in one of its threads leaves it waiting."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

import pytest
from tests.launch.test_launch import PATIENCE_S, build_launcher_command, build_plan, parse_local

from headway.comm.coordinator import Coordinator, CoordinatorEvent, CoordinatorFailed
from headway.comm.coordinator_client import CoordinatorClient
from headway.core.errors import CommunicationError
from headway.launch.launcher import launch
from headway.launch.remote_workers import RemoteWorkers
from headway.launch.workers import LocalWorkers, WorkerCrew

WRITES = """
import sys
from headway.launch.worker_output import write
for stream in (1, 2, 1, 2):
    write("lines\\n", stream)
"""


def test_a_run_goes_on_after_its_reader_has_ended(tmp_path: Path) -> None:
    # Rank 0 writes to the pipe itself, so it is lost and replaced. The output of rank 1 goes through the launcher.
    plan = build_plan(tmp_path, (2, 2), r0="await closed", r1="await closed")
    command = build_launcher_command("localhost:2", 200.0, plan)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        # Lines of rank 1 are shown once the run has begun.
        while "[rank 1] note 0" not in process.stdout.readline():
            pass
        process.stdout.close()
        (tmp_path / "closed").touch()
        try:
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_lines_for_a_full_disk_are_dropped(full: str) -> None:
    with open("/dev/full", "w") as file:
        files = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {full: file}
        said = subprocess.run([sys.executable, "-c", WRITES], text=True, check=True, timeout=PATIENCE_S, **files)
    assert (said.stdout or "") + (said.stderr or "") == "lines\nlines\n"


class BrokenInThreads(io.StringIO):
    """A stream of a program that starts the launcher; it fails in all threads but the main one."""

    def write(self, text: str) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no words")
        return super().write(text)


def test_an_error_in_a_thread_ends_the_run_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", BrokenInThreads())
    with pytest.raises(CommunicationError, match=r"after an error of its own \(RuntimeError\('no words'\)\)"):
        launch(build_plan(tmp_path, (9, 9)), parse_local(2), timeout_s=200.0)


@pytest.mark.parametrize("where", ["here", "on another host"])
def test_a_crew_outlives_an_error_of_its_thread(where: str) -> None:
    ends = SimpleQueue[tuple[str, int, str]]()

    def fail(worker: str, stream: int, lines: str) -> None:
        raise RuntimeError("no words")

    def report(worker: str, status: int, reason: str) -> None:
        ends.put((worker, status, reason))

    crew: WorkerCrew = LocalWorkers(fail, report)
    if where != "here":
        crew.close()
        crew = RemoteWorkers("b", fail, report, timeout_s=200.0, remote_shell="sh -c 'eval \"$1\"'")
    try:
        crew.start("silent", ["-c", "import time; time.sleep(600)"], {}, inherit_output=False)
        crew.start("loud", ["-c", "import time; print(1, flush=True); time.sleep(600)"], {}, inherit_output=False)
        reason = "the launcher has ended its workers after an error of its own (RuntimeError('no words'))"
        found = sorted(ends.get(timeout=PATIENCE_S) for _ in range(2))
        assert found == [("loud", 1, reason), ("silent", 1, reason)]
        crew.start("next", ["-c", ""], {}, inherit_output=False)
        assert ends.get(timeout=PATIENCE_S) == ("next", 0, "")
    finally:
        crew.close()


def test_a_coordinator_reports_its_own_failure() -> None:
    failures = SimpleQueue[Exception]()

    def fail(event: CoordinatorEvent) -> None:
        if not isinstance(event, CoordinatorFailed):
            raise RuntimeError("no words")
        failures.put(event.error)

    with (
        closing(Coordinator([(0, 0)], secret=b"x", timeout_s=200.0, store_port=1, on_event=fail)) as coordinator,
        closing(CoordinatorClient("127.0.0.1", coordinator.port, secret="x", worker="0.0.0")),
    ):
        assert str(failures.get(timeout=PATIENCE_S)) == "no words"
