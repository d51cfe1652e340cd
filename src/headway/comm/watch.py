"""Watch: which operation each rank is at, in the store, so that a stall can be named by those who wait."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import Any, final

from headway.comm.communicator import Communicator

INTERVAL_S = 0.5
"""Between two looks at the log; nothing is written where nothing was issued."""


@final
class Watch:
    """Publishes a communicator's newest operation from a thread of its own. Close it before the communicator's world.

    A rank that stops, or whose host is gone, leaves what it issued last.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self._world = communicator, communicator.world
        self._store: Any = communicator.world.store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-watch", daemon=True)
        self._thread.start()

    def behind(self) -> dict[int, str]:
        """The ranks that have not issued the operation that this rank waits for, and what each issued last."""
        log = self._communicator.log
        waiting = next((entry for entry in tuple(log) if not entry.done), None)
        if waiting is None:
            return {}
        found = {}
        with suppress(RuntimeError):  # the store is gone: nothing can be said
            for rank in range(self._world.size):
                if rank == self._world.rank:
                    continue
                seq, tag = 0, "nothing yet"
                if self._store.check([f"ops/{rank}"]):
                    seq, tag = json.loads(self._store.get(f"ops/{rank}"))
                if seq < waiting.seq:
                    found[rank] = tag
        return found

    def explain(self) -> str:
        """A sentence that names them; empty where nobody is behind."""
        behind = self.behind()
        waiting = next((entry for entry in tuple(self._communicator.log) if not entry.done), None)
        if not behind or waiting is None:
            return ""
        who = ", ".join(f"rank {rank} (last: {tag})" for rank, tag in behind.items())
        return f"It was {waiting.tag!r}, which never came from {who}"

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        published = 0
        while not self._stop.wait(INTERVAL_S):
            log = self._communicator.log
            newest = log[-1] if log else None
            if newest is None or newest.seq == published:
                continue
            try:
                self._store.set(f"ops/{self._world.rank}", json.dumps([newest.seq, newest.tag]))
            except RuntimeError:  # the store is gone, and with it whoever would read
                return
            published = newest.seq
