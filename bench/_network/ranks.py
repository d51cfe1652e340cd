"""Starts the ranks of a layout, one process each, and gives them their turns over pipes: the bench itself sends nothing
over the network.

All ranks run on one machine and share its clock: a turn starts at the same instant on all of them, and ends when the
last one has finished.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import IO, Any, final

from bench._hosts import Hosts
from bench._network.layout import Layout

LEAD_S = 0.02
"""From the command to the start: all ranks have read it by then."""

ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class RankError(Exception):
    """A rank has ended before its time; the end of what it said."""


@dataclass(frozen=True)
class Turn:
    """What an arm did in its turn.

    Attributes:
        seconds: of a step, from the common start to the last rank's end.
        payload: bytes that each host sent for a step, without headers.
        answers: of each rank, for each step.
    """

    seconds: float
    payload: tuple[float, ...]
    answers: list[list[float]]


@final
class Ranks:
    """Starts them and waits until they have met. A context: its end ends them.

    Args:
        asked: what every rank is told at its start; `arms` is the module that makes them.

    Attributes:
        facts: what each rank said of itself.

    Raises:
        RankError: a rank could not begin.
    """

    def __init__(self, hosts: Hosts, layout: Layout, asked: Mapping[str, object]) -> None:
        self._hosts, self.layout, self._asked = hosts, layout, asked
        self._logs: list[IO[str]] = []
        self._ranks: list[Any] = []
        self._stack = ExitStack()

    def __enter__(self) -> Ranks:
        with ExitStack() as stack:
            stack.callback(self._end)
            for rank in range(self.layout.size):
                self._start(rank)
            port = self._answer(0)["port"]
            self._tell(range(1, self.layout.size), {"port": port})
            self.facts = [self._answer(rank) for rank in range(self.layout.size)]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def turn(self, arm: str, steps: int = 1) -> Turn:
        """Lets an arm do so many steps.

        Raises:
            RankError: a rank has failed.
        """
        before = self._payload()
        started = perf_counter() + LEAD_S
        self._tell(range(self.layout.size), {"arm": arm, "at": started, "steps": steps})
        answers = [self._answer(rank) for rank in range(self.layout.size)]
        payload = tuple((after - first) / steps for first, after in zip(before, self._payload(), strict=True))
        seconds = max(answer["ended"] for answer in answers) - started
        return Turn(seconds / steps, payload, [answer["found"] for answer in answers])

    def _start(self, rank: int) -> None:
        self._logs.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        more = {"rank": rank, "size": self.layout.size, "address": self._hosts.addresses[self.layout.host(0)]}
        command = (sys.executable, "-m", "bench._network.rank", json.dumps({**self._asked, **more}))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._logs[rank], "text": True}
        self._ranks.append(self._hosts.run(self.layout.host(rank), command, ENV, **pipes))

    def _end(self) -> None:
        for process in self._ranks:
            process.kill()
            process.communicate()
        for log in self._logs:
            log.close()

    def _tell(self, ranks: range, order: Mapping[str, object]) -> None:
        for rank in ranks:
            self._ranks[rank].stdin.write(json.dumps(order) + "\n")
            self._ranks[rank].stdin.flush()

    def _answer(self, rank: int) -> dict[str, Any]:
        line = self._ranks[rank].stdout.readline()
        if not line:
            self._logs[rank].seek(0)
            said = self._logs[rank].read().strip().splitlines()
            status = self._ranks[rank].wait()
            raise RankError("\n".join([f"rank {rank} has ended with status {status}:", *said[-15:]]))
        found: dict[str, Any] = json.loads(line)
        return found

    def _payload(self) -> list[int]:
        return [self._hosts.payload_out(host) for host in range(self.layout.hosts)]
