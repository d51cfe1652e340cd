"""Small messages by which the ranks agree on one checkpoint, without collectives.

A checkpoint is written by a thread beside the training, and a collective of that thread would mix with the training's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

from headway.core.errors import CommunicationError
from headway.core.torch_c10d import summarise_error

# Pauses between two polls of the store double from the first to the longest: a fast save is noticed within 5 ms, and a
# slow one costs four polls a second.
FIRST_POLL_PAUSE_S = 0.005
MAX_POLL_PAUSE_S = 0.25


class SaveExchange(Protocol):
    """Messages that a save exchanges with the other ranks. A rank publishes each key once."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def publish(self, key: str, value: bytes) -> None:
        """Makes a value visible to the other ranks."""

    def collect(self, key: str, ranks: Sequence[int], check: Callable[[], None]) -> list[bytes]:
        """Waits for the values that `ranks` publish under `key`, and returns them in the order of `ranks`.

        Args:
            check: called before every poll; an exception that it raises ends the wait.
        """

    def forget(self, key: str, ranks: Sequence[int]) -> None:
        """Removes the values that `ranks` published under `key`."""


@final
class SingleRankExchange:
    """The exchange of a single process: it publishes to nobody."""

    rank, size = 0, 1

    def publish(self, key: str, value: bytes) -> None:
        pass

    def collect(self, key: str, ranks: Sequence[int], check: Callable[[], None]) -> list[bytes]:
        assert not ranks
        return []

    def forget(self, key: str, ranks: Sequence[int]) -> None:
        pass


class KeyValueStore(Protocol):
    """The methods used of a torch.distributed store: TCPStore, FileStore, PrefixStore..."""

    def set(self, key: str, value: Any, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def delete_key(self, key: str, /) -> bool: ...


@final
class StoreExchange:
    """Exchanges messages through a torch.distributed store that all ranks reach.

    Args:
        store: store of the run; other threads may use it at the same time.
        rank, size: rank of this process, and number of ranks.
        check_alive: called at every poll; an exception that it raises (the generation is over) ends the wait.
        name: prefix of every key. Two savers on one store need two names, and so does a saver whose ranks change.

    Raises:
        CommunicationError: from every method, if the store cannot be reached.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        size: int,
        *,
        check_alive: Callable[[], None] = lambda: None,
        name: str = "checkpoints",
    ) -> None:
        self._store, self._check_alive, self._name = store, check_alive, name
        self.rank, self.size = rank, size

    def publish(self, key: str, value: bytes) -> None:
        self._call(self._store.set, self._build_key(key, self.rank), value)

    def collect(self, key: str, ranks: Sequence[int], check: Callable[[], None]) -> list[bytes]:
        # Poll, never wait inside the store: it has one connection, so a waiting thread would block the training thread.
        keys = [self._build_key(key, rank) for rank in ranks]
        # Short at first: most saves end at about the same time on all ranks.
        pause_s = FIRST_POLL_PAUSE_S
        while True:
            check()
            self._check_alive()
            if not keys or self._call(self._store.check, keys):
                return [self._call(self._store.get, rank_key) for rank_key in keys]
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_POLL_PAUSE_S)

    def forget(self, key: str, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._call(self._store.delete_key, self._build_key(key, rank))

    def _build_key(self, key: str, rank: int) -> str:
        # Only this rank writes the key, and the others only read it: no lock is needed.
        return f"{self._name}/{key}/{rank}"

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        # torch.distributed.DistError is a RuntimeError too.
        except RuntimeError as error:
            what = f"the ranks' store cannot be reached ({summarise_error(error)})"
            raise CommunicationError(what, fix="Start again with headway train --resume.") from None
