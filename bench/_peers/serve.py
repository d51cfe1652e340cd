"""The contestant's side of a bench: reports that it is ready, waits for `go SECONDS`, iterates for that time, and
reports the number of images.

Runs in any virtual environment: imports the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

# What libraries print goes to stderr; stdout is for answers alone.
_ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def argument() -> dict[str, Any]:
    """What the bench asks for."""
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found


def serve(
    batches: Iterator[int],
    *,
    version: str,
    kernel: str,
    drain: int = 8,
    facts: Callable[[], Mapping[str, float | str]] = dict,
) -> None:
    """Answers until stdin ends.

    Args:
        batches: endless; each item is the number of images that came.
        version: of what does the work.
        kernel: what it resizes with, or moves pixels with.
        drain: batches taken before the clock starts. No contestant holds so many ready, so nobody gets a head start
            of what was left over from the round before.
        facts: asked after every turn: what else there is to know.
    """
    next(batches)  # starts workers, compiles what is compiled at first use
    answer(version=version, kernel=kernel)
    for line in sys.stdin:
        limit = float(line.split()[1])
        drained = sum(next(batches) for _ in range(drain))
        images, started = 0, perf_counter()
        while (seconds := perf_counter() - started) < limit:
            images += next(batches)
        answer(images=images, seconds=seconds, drained=drained, facts=facts())


def answer(**found: object) -> None:
    """Prints an answer. Called by a contestant itself if it takes no turns."""
    print(json.dumps(found), file=_ANSWERS, flush=True)
