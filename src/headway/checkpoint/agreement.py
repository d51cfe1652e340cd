"""How the ranks that write one checkpoint agree on it: small messages, and no collective.

The threads that write run beside the training, so they may not take part in its collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

from headway.core.errors import CommunicationError
from headway.core.torch_c10d import summarise_error

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.25
"""Between two looks into the store: doubled from the one to the other."""


class Exchange(Protocol):
    """What a save needs from the other ranks. Every key is published once by a rank."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def publish(self, key: str, value: bytes) -> None:
        """Lets the others see a value."""

    def collect(self, key: str, ranks: Sequence[int], check: Callable[[], None]) -> list[bytes]:
        """The values that these ranks published under `key`, waited for.

        Args:
            check: called before every look; what it raises ends the waiting.
        """

    def forget(self, key: str, ranks: Sequence[int]) -> None:
        """Removes what these ranks published, once nobody needs it any more."""


@final
class Alone:
    """One process, which has nobody to talk to."""

    rank, size = 0, 1

    def publish(self, key: str, value: bytes) -> None:
        pass

    def collect(self, key: str, ranks: Sequence[int], check: Callable[[], None]) -> list[bytes]:
        assert not ranks
        return []

    def forget(self, key: str, ranks: Sequence[int]) -> None:
        pass


class Store(Protocol):
    """What is used of a torch.distributed store: TCPStore, FileStore, PrefixStore..."""

    def set(self, key: str, value: Any, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def delete_key(self, key: str, /) -> bool: ...


@final
class StoreExchange:
    """Messages by way of a store of torch.distributed that all ranks reach.

    It never waits inside of the store: a store has one connection, and whoever waits in it keeps the others out.

    Args:
        store: may be used by other threads at the same time.
        rank, size: of this process.
        alive: called at every look; what it raises ends the waiting: the generation is over.
        name: begins every key; two Savers on one store need two names, and so does one after a change of its ranks.

    Raises:
        CommunicationError: by every method, where the store cannot be reached.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        alive: Callable[[], None] = lambda: None,
        name: str = "checkpoints",
    ) -> None:
        self._store, self._alive, self._name = store, alive, name
        self.rank, self.size = rank, size

    def publish(self, key: str, value: bytes) -> None:
        self._call(self._store.set, self._key(key, self.rank), value)

    def collect(self, key: str, ranks: Sequence[int], check: Callable[[], None]) -> list[bytes]:
        keys, pause_s = [self._key(key, rank) for rank in ranks], FIRST_PAUSE_S
        while True:
            check()
            self._alive()
            if not keys or self._call(self._store.check, keys):
                return [self._call(self._store.get, one) for one in keys]
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def forget(self, key: str, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._call(self._store.delete_key, self._key(key, rank))

    def _key(self, key: str, rank: int) -> str:
        return f"{self._name}/{key}/{rank}"

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:  # DistError is one
            what = f"the store of the ranks cannot be reached ({summarise_error(error)})"
            raise CommunicationError(what, fix="Start again with headway train --resume.") from None
