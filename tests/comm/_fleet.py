"""A coordinator in this process, and workers in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headway.comm.coordinator import Coordinator, CoordinatorEvent, GenerationFormed, RunBegan, WorkerLeft
from headway.comm.coordinator_client import CoordinatorClient
from headway.core.errors import GenerationEndedError

SECRET = "open sesame, for all of this run"
PATIENCE_S = 60.0
"""After which a test fails; nothing waits so long where all is well."""


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: did not come"
        time.sleep(0.005)
    return found


class Worker:
    """A process of `_client_worker.py`, and what it has said."""

    def __init__(self, where: str, worker: str, *, joining: bool) -> None:
        self.id, self.said = worker, []
        environ = os.environ | {"HEADWAY_COORDINATOR": where, "HEADWAY_SECRET": SECRET, "HEADWAY_MEMBER": worker}
        if joining:
            environ["HEADWAY_JOINING"] = "1"
        command = [sys.executable, str(Path(__file__).with_name("_client_worker.py"))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True, bufsize=1
        )
        self.said: list[dict[str, Any]]
        self._listen = threading.Thread(target=self._hear, daemon=True)
        self._listen.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(order + "\n")

    def heard(self, what: str) -> list[dict[str, Any]]:
        return [one for one in tuple(self.said) if one["what"] == what]

    def waits_for(self, what: str, count: int = 1) -> dict[str, Any]:
        return until(lambda: self.heard(what)[count - 1 :], f"{what!r} of {self.id}, which said {self.said}")[0]

    @property
    def generation(self) -> int:
        found = self.heard("generation")
        return found[-1]["number"] if found else -1

    def reaches(self, number: int) -> dict[str, Any]:
        until(lambda: self.generation >= number, f"generation {number} of {self.id}, which said {self.said}")
        return self.heard("generation")[-1]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._listen.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Fleet:
    """A coordinator, what it told, and the workers of it."""

    def __init__(self, slots: list[tuple[int, int]], timeout_s: float) -> None:
        self.events: list[CoordinatorEvent] = []
        self.workers: dict[str, Worker] = {}
        self.members: list[CoordinatorClient] = []
        self.coordinator = Coordinator(
            slots, secret=SECRET.encode(), timeout_s=timeout_s, store_port=1234, on_event=self.events.append
        )

    def start(self, *ids: str, joining: bool = False) -> list[Worker]:
        made = [Worker(f"127.0.0.1:{self.coordinator.port}", worker, joining=joining) for worker in ids]
        self.workers.update({worker.id: worker for worker in made})
        return made

    def member(self, worker: str, *, secret: str = SECRET, joining: bool = False) -> CoordinatorClient:
        """A member in this process."""
        made = CoordinatorClient("127.0.0.1", self.coordinator.port, secret=secret, worker=worker, joining=joining)
        self.members.append(made)
        return made

    @property
    def formed(self) -> list[GenerationFormed]:
        return [event for event in tuple(self.events) if isinstance(event, GenerationFormed)]

    @property
    def began(self) -> bool:
        return RunBegan() in tuple(self.events)

    @property
    def left(self) -> dict[str, str]:
        return {event.worker.id: event.how for event in tuple(self.events) if isinstance(event, WorkerLeft)}

    def forms(self, number: int) -> list[str]:
        """Ids of generation `number` in the order of ranks, once it is announced."""
        found = until(lambda: [one for one in self.formed if one.number == number], f"generation {number}")
        return [worker.id for worker in found[0].workers]

    def close(self) -> None:
        for member in self.members:
            member.close()
        self.coordinator.close()
        for worker in self.workers.values():
            worker.close()


@contextlib.contextmanager
def fleet(slots: list[tuple[int, int]], timeout_s: float = 20.0) -> Iterator[Fleet]:
    """A time-out that no test waits for, unless it says so: what is found sooner was not found by silence."""
    made = Fleet(slots, timeout_s)
    try:
        yield made
    finally:
        for worker in made.workers.values():
            if worker.process.poll() is None:
                worker.signal(signal.SIGCONT)
        made.close()


def asked(*members: CoordinatorClient) -> Callable[[], list[Any]]:
    """Begins `next` of several members at once; what is returned waits for the generations, or the errors."""
    out: list[Any] = [None] * len(members)

    def ask(place: int) -> None:
        try:
            out[place] = members[place].wait_for_generation()
        except Exception as error:
            out[place] = error

    threads = [threading.Thread(target=ask, args=(place,), daemon=True) for place in range(len(members))]
    for thread in threads:
        thread.start()

    def answers() -> list[Any]:
        for member, thread in zip(members, threads, strict=True):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"{member.worker}: its generation did not come"
        return out

    return answers


def next_of(*members: CoordinatorClient) -> list[Any]:
    """`next` of several members at once: the generations, or the errors."""
    return asked(*members)()


def heard(member: CoordinatorClient) -> None:
    """Returns when the coordinator has taken in what a member said before; it is in no generation yet."""
    with contextlib.suppress(GenerationEndedError):
        member.confirm(0)
