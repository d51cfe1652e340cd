"""A worker without training: goes from generation to generation, says what happens, and does what it is told.

Says JSON lines on stdout; takes on stdin: `bye`, `confirm N`, `leave N` (stand at a boundary, where the
generation is at most N), `slow SECONDS` (before it is ready for the next one).
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

from headway.comm.coordinator_client import CoordinatorClient, Generation
from headway.core.errors import CommunicationError, FencedError, GenerationEndedError


def say(what: str, **more: Any) -> None:
    os.write(1, json.dumps({"what": what, **more}).encode() + b"\n")  # one write: two threads say something


def commands() -> Any:
    """Complete lines that lie on stdin, without waiting for more than a moment."""
    rest = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.005)
        if readable:
            rest += os.read(0, 4096)
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield line.decode().split()
        yield []


def stay(member: CoordinatorClient, generation: Generation, orders: Any) -> tuple[bool, float]:
    """In a generation until it is over or a boundary is wanted; (whether to go on, seconds to wait)."""
    number, slow_s = generation.number, 0.0
    member.watch_generation(number, lambda: say("changed", number=number))
    for words in orders:
        try:
            match words:
                case ["bye"]:
                    member.leave(True)
                    say("bye")
                    return False, 0.0
                case ["confirm", wanted]:
                    member.confirm(int(wanted))
                    say("confirmed")
                case ["leave", latest] if number <= int(latest):
                    return True, slow_s
                case ["slow", seconds]:
                    slow_s = float(seconds)
            member.check()
        except GenerationEndedError as error:
            say("lost", why=str(error))
            return True, slow_s
        if member.has_newcomers:
            return True, slow_s
    raise AssertionError


def main() -> int:
    member = CoordinatorClient.from_environment()
    assert member is not None
    orders, on, slow_s = commands(), True, 0.0
    try:
        while on:
            time.sleep(slow_s)
            found = member.wait_for_generation()
            say(
                "generation",
                number=found.number,
                rank=found.rank,
                size=found.size,
                lost=found.lost_workers,
                why=found.reason,
            )
            on, slow_s = stay(member, found, orders)
    except FencedError as error:
        say("fenced", why=str(error))
        return 3
    except CommunicationError as error:
        say("gone", why=str(error))
        return 4
    finally:
        member.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
