"""Kills the last process that holds the state of a run while its successors join.

The run has two processes. One is killed. While another one takes its place, the last one is killed too: when the
newcomer has reached the launcher, when it has reached the store, or when it is reported to have joined, plus a random
time. Then the run either continues by itself, or ends with a message that tells how to continue, and the bench does so.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import psutil

from bench._arms import ROOT
from bench._soak.faults import SoakError, steps_of
from bench._soak.network import FOLDER, SLOWLY
from headway.checkpoint.checkpoints import Checkpoints
from headway.checkpoint.locations import parse_step

MOMENTS = ("launcher", "store", "joined")
"""After what of the newcomer the last holder is killed: it has a connection to the launcher; one to the store; the
launcher says that it has joined."""
OFTEN = (1, 3, 3)
AFTER_S = {"launcher": 1.0, "store": 0.1, "joined": 0.1}
"""How long after that, at most."""
POLL_S = 0.01
GIVES_UP_S = 240.0
RESOLVER = "127.77.0.53"
"""Where nobody answers a question for a name, with `no_dns`."""


@dataclass(frozen=True)
class Strike:
    """One try.

    Attributes:
        moment: see MOMENTS. checkpoint: step of the newest one when it came. step: steps done by then.
        before: processes that had trained by then. victims: the two that were killed.
        outcome: `took over` (the newcomer had the state already), `checkpoint` (it loaded the newest one), `ended` (the
            run did, with a sentence, and was gone on with).
    """

    moment: str
    checkpoint: int
    step: int
    before: frozenset[str]
    victims: tuple[str, str]
    outcome: str


@final
class Run:
    """A run of two processes, begun and gone on with as often as it ends by a sentence.

    Args:
        recipe, folder: of the run. wrap: makes of a command the one that is started.
    """

    def __init__(self, recipe: Path, folder: Path, wrap: Callable[[list[str]], list[str]] = lambda command: command):
        self.folder, self.traces, self.log = folder, Path(f"{folder}.traces"), Path(f"{folder}.log")
        self._wrap = wrap
        self.traces.mkdir()
        self.go_on: list[str] = []
        self.launcher = self._start(["train", str(recipe), "--run", str(folder), "--procs", "2"])

    def _start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        command = self._wrap([sys.executable, "-m", "headway", *arguments])
        environ = {**os.environ, FOLDER: str(self.traces), "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as said:
            return subprocess.Popen(command, env=environ, cwd=ROOT, stdout=said, stderr=said)

    def resumed(self) -> None:
        """After its end: does what the sentence says. Raises SoakError: there is none."""
        found = re.findall(
            r"(?:Go on from the last checkpoint|go on with its last checkpoint): headway (.*)", self.said()
        )
        if self.launcher.returncode == 0 or not found:
            raise SoakError(f"the run has ended with status {self.launcher.returncode}\n{self.said()[-4000:]}")
        self.launcher = self._start(shlex.split(found[-1].rstrip(".")))

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def workers(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            found = psutil.Process(self.launcher.pid).children()
            return [
                child
                for child in found
                if child.status() != psutil.STATUS_ZOMBIE and "HEADWAY_MEMBER" in _environ(child)
            ]
        return []

    def trained(self) -> frozenset[str]:
        """Processes that have begun a step."""
        return frozenset(path.stem for path in self.traces.glob("*.weights") if path.stat().st_size)

    def members(self) -> list[psutil.Process]:
        """Workers that have begun a step."""
        trained = self.trained()
        return [worker for worker in self.workers() if str(worker.pid) in trained]

    def step(self) -> int:
        return steps_of(self.folder)

    def checkpoint(self) -> int:
        """Step of the newest checkpoint; 0 where there is none."""
        paths = Checkpoints(self.folder / "checkpoints").paths()
        return (parse_step(paths[0].name) or 0) if paths else 0

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """What the condition gives; None where the run has ended before."""
        until = time.monotonic() + GIVES_UP_S
        while not (found := condition()):
            if self.launcher.poll() is not None:
                return None
            if time.monotonic() > until:
                raise SoakError(f"{what} did not come within {GIVES_UP_S:.0f} s\n{self.said()[-4000:]}")
            time.sleep(POLL_S)
        return found

    def close(self) -> None:
        if self.launcher.poll() is None:
            self.launcher.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.launcher.wait(30)
        for worker in self.workers():
            worker.kill()
        self.launcher.kill()
        self.launcher.wait()


def strike(run: Run, chance: random.Random) -> Strike | None:
    """One try; None where the run has ended before it came to it."""
    at = run.step()
    saved = run.checkpoint()
    ready = run.wait(
        lambda: len(run.members()) == 2 and run.step() > at + 4 and run.checkpoint() > saved, "two members"
    )
    if ready is None or len(members := run.members()) != 2:
        return None
    chance.shuffle(members)
    first, last = members
    said, known = len(run.said()), {worker.pid for worker in run.workers()}
    (moment,) = chance.choices(MOMENTS, OFTEN)
    _kill(first)
    newcomer = run.wait(lambda: next((one for one in run.workers() if one.pid not in known), None), "a newcomer")
    if newcomer is None:
        return None

    def has_come() -> bool:
        if moment == "joined":
            # After an attempt to connect that failed, as it does while names are looked up in vain, they meet anew.
            return re.search(" joined|met anew", run.said()[said:]) is not None
        return _connections(newcomer) > MOMENTS.index(moment) or not newcomer.is_running()

    if run.wait(has_come, f"the newcomer at the {moment}") is None:
        return None
    time.sleep(chance.uniform(0, AFTER_S[moment]))
    checkpoint, step, before = run.checkpoint(), run.step(), run.trained()
    _kill(last)
    spoken = len(run.said())
    run.wait(lambda: run.trained() - before - {str(last.pid)} and run.step() > 0, "a process that goes on")
    outcome = "took over"
    if run.launcher.poll() is not None:
        outcome = "ended"
        run.resumed()
    elif "continues from the checkpoint" in run.said()[spoken:]:
        outcome = "checkpoint"
    return Strike(moment, checkpoint, step, before, (str(first.pid), str(last.pid)), outcome)


def strikes(run: Run, count: int, seed: int) -> list[Strike]:
    """So many tries on one run, which is let to its end then."""
    chance, done = random.Random(seed), list[Strike]()
    (run.traces / SLOWLY).touch()
    while len(done) < count:
        if (found := strike(run, chance)) is not None:
            done.append(found)
            print(
                f"try {len(done)}: {found.moment}, step {found.step}, checkpoint {found.checkpoint}: {found.outcome}",
                flush=True,
            )
        elif run.launcher.poll() is not None:
            if run.launcher.returncode == 0:
                break
            run.resumed()
    (run.traces / SLOWLY).unlink()
    while run.launcher.wait() != 0:
        run.resumed()
    return done


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _connections(process: psutil.Process) -> int:
    """TCP connections that it has opened to others: first to the launcher, then to the store."""
    try:
        found = process.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return 0
    return sum(one.status == psutil.CONN_ESTABLISHED for one in found)


@contextmanager
def without_dns(folder: Path) -> Iterator[Callable[[list[str]], list[str]]]:
    """Gives what makes a command run where no question for a name is answered: it waits for 5 s, twice.

    Raises:
        SoakError: not root.
    """
    if os.geteuid() != 0:
        raise SoakError("--no-dns needs root, for a mount namespace")
    resolver = folder / "resolv.conf"
    resolver.write_text(f"nameserver {RESOLVER}\n")
    mount = f'mount --bind {shlex.quote(str(resolver))} /etc/resolv.conf && exec "$@"'
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole:
        hole.bind((RESOLVER, 53))
        threading.Thread(target=_swallow, args=(hole,), daemon=True).start()
        yield lambda command: ["unshare", "-m", "sh", "-c", mount, "sh", *command]


def _swallow(hole: socket.socket) -> None:
    with suppress(OSError):
        while hole.recv(4096):
            pass
