"""Process sets: subsets of the ranks with collectives of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from headway.comm.hvd import context
from headway.comm.hvd.negotiator import GLOBAL_SET_ID
from headway.comm.hvd.requests import Request


@final
class ProcessSet:
    """A subset of the ranks. Pass it to `init` or `add_process_set`, and then to any collective.

    Args:
        ranks_or_comm: ranks, in any order; MPI's communicators are refused.

    Attributes:
        process_set_id: id of the set; None until it is registered, and after it was removed.
        ranks: its ranks in ascending order.

    Raises:
        ValueError: `ranks_or_comm` is not a list of ranks.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError("a ProcessSet needs a list of ranks; MPI's communicators are not supported")
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"a ProcessSet needs a list of ranks, not {ranks}")
        # All ranks must have them in one order: the index in it is the rank inside the set.
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Returns the number of its ranks; None if it is not registered."""
        if self.process_set_id is None:
            return None
        return len(self._get_registered())

    def rank(self) -> int | None:
        """Returns this process's index in it; None if it is not registered. Raises ValueError for another process."""
        if self.process_set_id is None:
            return None
        ranks = self._get_registered()
        if context.rank() not in ranks:
            raise ValueError(f"rank {context.rank()} is not in {self}")
        return ranks.index(context.rank())

    def includes_self(self) -> bool | None:
        """Returns True if this process is in it; None while its ranks are not known."""
        return None if self.ranks is None else context.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def _get_registered(self) -> Sequence[int]:
        ranks_by_set_id = context.get_engine().ranks_by_set_id
        if self.process_set_id not in ranks_by_set_id:
            raise ValueError(f"{self} is not registered in this job; call add_process_set first")
        return ranks_by_set_id[self.process_set_id]


# All ranks; the default of every collective. Its ranks are filled in by `init`.
global_process_set = ProcessSet([])
global_process_set.process_set_id = GLOBAL_SET_ID

# Sets of this job, to be forgotten at `shutdown`.
_registered: list[ProcessSet] = []


def register_all(process_sets: Iterable[ProcessSet]) -> None:
    """Fills in the set of all ranks, and adds the given sets. Called by `init`.

    Raises ValueError if a set is given twice.
    """
    global_process_set.ranks = list(range(context.size()))
    for index, process_set in enumerate(process_sets):
        try:
            add_process_set(process_set)
        except ValueError as error:
            raise ValueError(f"process_sets[{index}]: {error}") from error


def unregister_all() -> None:
    """Unregisters the sets of this job, whose ids mean nothing in the next one. Called by `shutdown`."""
    for process_set in _registered:
        process_set.process_set_id = None
    _registered.clear()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a set and returns it; all ranks of the job call it, those outside of the set, too.

    Raises:
        ValueError: a set of these ranks exists, or a rank does not.
        HorovodInternalError: the ranks name different sets.
    """
    process_set = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    engine, ranks = context.get_engine(), tuple(process_set.ranks or ())
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(engine.ranks_by_set_id[GLOBAL_SET_ID]):
        raise ValueError(f"{list(ranks)} are not ranks of a job of {engine.world.size}, each once")
    if ranks in engine.ranks_by_set_id.values():
        raise ValueError(f"there is a process set of the ranks {list(ranks)} already")
    # The negotiator gives the id, the same on all ranks.
    name = engine.build_name("add_set", GLOBAL_SET_ID, None)
    process_set.process_set_id = engine.execute(Request(GLOBAL_SET_ID, name, "add_set", splits=ranks))
    _registered.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set; all ranks of the job call it.

    Returns False, without effect, for the set of all ranks and for one that is not registered.
    """
    # The engine removes the set in the order of operations, after those that were submitted to it before.
    set_id, engine = process_set.process_set_id, context.get_engine()
    if set_id is None or set_id == GLOBAL_SET_ID or set_id not in engine.ranks_by_set_id:
        return False
    # Before the wait, so that no other thread submits to a set that is going away.
    process_set.process_set_id = None
    if process_set in _registered:
        _registered.remove(process_set)
    name = engine.build_name("remove_set", GLOBAL_SET_ID, None)
    engine.execute(Request(GLOBAL_SET_ID, name, "remove_set", root=set_id))
    return True
