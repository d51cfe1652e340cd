"""Ranks of asynchronous training, which go on when one of them is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headway.comm.coordinator_client import CoordinatorClient
from headway.core.world import World
from headway.parallel.pairs import ServerPairs


@contextmanager
def continue_without_lost(
    client: CoordinatorClient | None, world: World, pairs: ServerPairs, names: Sequence[str]
) -> Iterator[Callable[[], None]]:
    """Keeps a generation alive for the duration of the block although ranks are lost.

    Only the connections of `pairs` with a lost rank end. After the block the generation ends, if it is over.

    Args:
        client: None: there is no launcher, and the run ends with a lost rank.
        names: names of all processes, in the order of `world.control`.

    Yields:
        a function that raises FencedError or CommunicationError if this process is out of the run.
    """
    if client is None:
        yield lambda: None
        return

    def drop_lost() -> None:
        members = client.list_members()
        for rank, name in zip(world.control.ranks, names, strict=True):
            if name not in members:
                pairs.drop(rank)
        # This process itself is out of the run, or the launcher is gone.
        if not members:
            pairs.abort()

    def check() -> None:
        if client.has_changed and not client.list_members():
            client.check()

    # The generation stays the same for the block, whoever is lost in it, and each loss is announced.
    client.watch_generation(world.generation, drop_lost, repeats=True)
    try:
        yield check
    finally:
        client.watch_generation(world.generation, lambda: world.abort("the generation is over"))
