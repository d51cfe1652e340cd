"""Publishes in the store which operation each rank is at, so that ranks that wait can name the one that stalls."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import Any, final

from headway.comm.communicator import Communicator, LoggedOperation

# Nothing is written unless a new operation was issued.
PUBLISH_INTERVAL_S = 0.5


@final
class StallWatch:
    """Publishes a communicator's newest operation from a thread of its own. Close it before the communicator's world.

    A rank that stops, or whose host is gone, leaves its last operation in the store.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self._world = communicator, communicator.world
        self._store: Any = communicator.world.store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-watch", daemon=True)
        self._thread.start()

    def find_lagging_ranks(self) -> dict[int, str]:
        """Returns the ranks that have not issued the operation that this rank waits for, with each one's last tag."""
        pending = self._find_oldest_pending()
        if pending is None:
            return {}
        last_tags = {}
        # RuntimeError: the store is gone, and nothing can be said.
        with suppress(RuntimeError):
            for rank in range(self._world.size):
                if rank == self._world.rank:
                    continue
                seq, tag = 0, "nothing yet"
                if self._store.check([f"ops/{rank}"]):
                    seq, tag = json.loads(self._store.get(f"ops/{rank}"))
                if seq < pending.seq:
                    last_tags[rank] = tag
        return last_tags

    def explain(self) -> str:
        """Returns a sentence that names the lagging ranks; empty if there are none."""
        last_tags, pending = self.find_lagging_ranks(), self._find_oldest_pending()
        if not last_tags or pending is None:
            return ""
        ranks = ", ".join(f"rank {rank} (last: {tag})" for rank, tag in last_tags.items())
        return f"It was {pending.tag!r}, which never came from {ranks}"

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _find_oldest_pending(self) -> LoggedOperation | None:
        """Returns the oldest operation that has not completed; None if there is none."""
        # A copy of the log, to which other threads append.
        return next((entry for entry in tuple(self._communicator.log) if not entry.done), None)

    def _run(self) -> None:
        published_seq = 0
        while not self._stop.wait(PUBLISH_INTERVAL_S):
            log = self._communicator.log
            newest = log[-1] if log else None
            if newest is None or newest.seq == published_seq:
                continue
            try:
                self._store.set(f"ops/{self._world.rank}", json.dumps([newest.seq, newest.tag]))
            # The store is gone, and with it whoever would read.
            except RuntimeError:
                return
            published_seq = newest.seq
