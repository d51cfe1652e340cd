"""A worker without training, for the launcher: _worker.py PLAN FOLDER.

PLAN is JSON: `do` maps the id of a worker to its fate, and `until` has number and size of the generation in which all
workers say farewell. FOLDER/ID.json has the arguments and variables of a worker, FOLDER/ID.log a line per generation.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.comm.coordinator_client import CoordinatorClient, Generation
from headway.core.errors import CommunicationError


def act_at_start(words: list[str]) -> None:
    match words:
        case ["fail", status, text]:
            print(f"headway: {text}", file=sys.stderr, flush=True)
            sys.exit(int(status))
        case ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["leave"]:
            sys.exit(0)
        case ["farewell", status, text]:
            member = CoordinatorClient.from_environment()
            assert member is not None
            leave_with(member, status, text)


def leave_with(member: CoordinatorClient, status: str, text: str) -> None:
    """Says farewell, then ends with an error."""
    member.leave(True)
    member.close()
    print(f"headway: {text}", file=sys.stderr, flush=True)
    os._exit(int(status))


def act_in_generation(words: list[str], folder: Path, member: CoordinatorClient) -> None:
    """Waits until all workers are in the generation, then acts."""
    while words != [""] and len(list(folder.glob("*.log"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.005)
    match words:
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["exit", status]:
            print(f"headway: exit {status}", file=sys.stderr, flush=True)
            os._exit(int(status))
        case ["own", status]:
            leave_with(member, status, "the disk is full.")
        case ["await", name]:
            while not (folder / name).exists():
                time.sleep(0.01)
            print(f"{name} is there", file=sys.stderr, flush=True)
        case ["hang"]:  # leaves without a farewell, and does not end
            member.close()
            time.sleep(600)
        case ["late", status]:  # says why long after its connection has ended
            member.close()
            time.sleep(0.5)
            print(f"headway: late {status}", file=sys.stderr, flush=True)
            os._exit(int(status))
        case ["child"]:  # which holds the connection when its parent dies, until another has taken that one's place
            successor, deadline = folder / f"{member.worker[:-1]}1.log", time.monotonic() + 60
            if os.fork() == 0:
                os.setsid()
                while not successor.exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


class PlannedWorker:
    """A worker that goes from generation to generation, as its plan says."""

    def __init__(self, plan: dict[str, Any], folder: Path, member: CoordinatorClient) -> None:
        self.plan, self.folder, self.member = plan, folder, member
        self.stopping = False
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, number: int, frame: object) -> None:
        self.stopping = True
        self.log("SIGTERM")

    def log(self, text: str) -> None:
        with (self.folder / f"{self.member.worker}.log").open("a") as file:
            file.write(text + "\n")

    def run(self) -> int:
        while True:
            found = self.member.wait_for_generation()
            self.log(f"{found.number} {found.rank} {found.size} {int(self.member.joining)}")
            print(f"generation {found.number} of {found.size}", flush=True)
            print(f"note {found.number}", file=sys.stderr, flush=True)
            if found.number == 0:
                act_in_generation(self.plan["do"].get(self.member.worker, "").split(" ", 1), self.folder, self.member)
            if self.leaves(found):
                self.member.leave(not self.stopping)
                return int(self.stopping)

    def leaves(self, found: Generation) -> bool:
        number, size = self.plan["until"]
        while not self.member.has_changed and not self.member.has_newcomers:
            if self.stopping or (found.number >= number and found.size == size):
                return True
            time.sleep(0.01)
        return False


def read_command_lines() -> Iterator[str]:
    """Yields the command lines of all processes of this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield path.read_bytes().decode(errors="replace")


def main() -> int:
    plan, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    worker = os.environ["HEADWAY_MEMBER"]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "HEADWAY_JOINING", "EXTRA")
    seen = {name: os.environ.get(name) for name in names}
    seen["secret on a command line"] = any(os.environ["HEADWAY_SECRET"] in line for line in read_command_lines())
    (folder / f"{worker}.json").write_text(json.dumps(seen | {"pid": os.getpid(), "cwd": os.getcwd()}))
    print(f"out of {worker}", flush=True)
    act_at_start(plan["do"].get(worker, "").split(" ", 2))
    member = CoordinatorClient.from_environment()
    assert member is not None
    try:
        return PlannedWorker(plan, folder, member).run()
    except CommunicationError as error:
        print(f"headway: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        member.close()


if __name__ == "__main__":
    sys.exit(main())
