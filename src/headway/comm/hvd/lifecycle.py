"""`init` and `shutdown`: how the processes of a job connect, and part."""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Literal

import torch

from headway.comm.algorithm_choice import AlgorithmChooser
from headway.comm.comm_recipe import Algorithm
from headway.comm.communicator import Communicator
from headway.comm.coordinator_client import CoordinatorClient
from headway.comm.hvd import context
from headway.comm.hvd.engine import Engine
from headway.comm.hvd.process_sets import ProcessSet, register_all, unregister_all
from headway.comm.hvd.settings import Settings
from headway.core.errors import CommunicationError, GenerationEndedError
from headway.core.launcher_environment import read_launcher_environment
from headway.core.rendezvous import Rendezvous
from headway.core.world import Membership, World

CPU = torch.device("cpu")

# The launcher may take this long to tell why a rendezvous failed; it notices silence after 10 s.
EXPLANATION_TIMEOUT_S = 15.0

# The rendezvous of the first `init`. It holds the store that the worlds of later ones use, until the process ends.
_rendezvous: Rendezvous | None = None

# Number of calls of `init` without Headway's launcher.
_num_joins = 0

# The connection to Headway's launcher, from the first `init` until the process ends.
_client: CoordinatorClient | None = None


def init(
    comm: Iterable[int] | None = None, process_sets: Iterable[ProcessSet] | Literal["dynamic"] | None = None
) -> None:
    """Connects to the other processes of the job. A second call does nothing.

    A process that no launcher started is a job of one.

    Args:
        comm: all ranks, or None; part of them, and MPI's communicators, are refused.
        process_sets: sets to add at once; the same on all ranks, in the same order. `dynamic` adds none.

    Raises:
        ValueError: `comm` is something else, or `process_sets` has the same set twice.
        UsageError: the launcher's variables contradict each other.
        CommunicationError: the other processes did not come.
    """
    if context.is_initialized():
        return
    settings = Settings.read()
    world, local_place = _join_world(settings)
    communicator: Communicator | None = None
    try:
        _check_comm(comm, world.size)
        local_places = _gather_local_places(world, local_place)
        communicator = Communicator(world)
        engine = Engine(world, communicator, settings, _build_chooser(communicator, settings))
    except BaseException:
        # Abort first: the other ranks may wait in a collective for this one.
        world.abort("this process did not get through init")
        if communicator is not None:
            communicator.close()
        world.close()
        raise
    if _client is not None:
        _client.watch_generation(world.generation, lambda: engine.fail("a worker was lost"))
    context.replace_job(context.HorovodJob(engine, local_places))
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)
    register_all(() if process_sets is None or isinstance(process_sets, str) else process_sets)


def shutdown() -> None:
    """Ends the job on all ranks: pending operations fail. `init` may be called again afterwards, on all ranks."""
    job = context.replace_job(None)
    if job is not None:
        unregister_all()
        job.engine.shut_down()


def has_newcomers() -> bool:
    """Returns True if new workers wait to join, as far as this process knows."""
    return _client is not None and _client.has_newcomers


def can_reinitialise() -> bool:
    """Returns True if the remaining workers can connect again after a collective failed."""
    return _client is not None or not context.get_engine().has_failed


def reinitialise() -> None:
    """Ends the job, and begins anew with the present workers.

    Raises as `init` does, and FencedError if the others have gone on without this process.
    """
    # Another worker may be lost while they connect: then they connect once more.
    while True:
        shutdown()
        try:
            init()
            return
        except CommunicationError:
            if _client is None or not _is_worker_lost(_client):
                raise


def _is_worker_lost(client: CoordinatorClient) -> bool:
    # A rendezvous may fail because another worker was lost: then the launcher says so, and there will be a next one.
    client.wait_for_change(EXPLANATION_TIMEOUT_S)
    try:
        client.check()
    except GenerationEndedError:
        return True
    return False


def _join_world(settings: Settings) -> tuple[World, tuple[int, int]]:
    """Joins a world by Headway's launcher, alone, or by another launcher's variables, such as torchrun's.

    Returns:
        the world, and the (local rank, local size) of this process.
    """
    global _rendezvous, _num_joins, _client
    launched = read_launcher_environment()
    if _client is None:
        _client = CoordinatorClient.from_environment()
    if _client is not None:
        return _join_generation(_client, settings)
    _num_joins += 1
    if launched is None or launched.size == 1:
        return World.create_single(CPU), (0, 1)
    options: dict[str, Any] = {"timeout_s": settings.timeout_s, "interface": settings.interface}
    if _rendezvous is None:
        world = World.join(launched, CPU, **options)
        _rendezvous, world.rendezvous = world.rendezvous, None
    else:
        assert launched.address is not None
        # The first world took the number of the launcher's attempt.
        membership = Membership(launched.rank, launched.size, generation=_rendezvous.attempt + _num_joins - 1)
        options |= {"master": launched.address, "secret": _rendezvous.secret}
        world = World.create(_rendezvous.store, membership, CPU, **options)
    if launched.local_rank is None or launched.local_size is None:
        return world, (world.local_rank, world.local_size)
    return world, (launched.local_rank, launched.local_size)


def _join_generation(client: CoordinatorClient, settings: Settings) -> tuple[World, tuple[int, int]]:
    generation = client.wait_for_generation()
    world = client.build_world(
        generation, CPU, abort_reason="a worker was lost", timeout_s=settings.timeout_s, interface=settings.interface
    )
    return world, (generation.local_ranks[generation.rank], world.local_size)


def _gather_local_places(world: World, local_place: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns the (local rank, local size) of all ranks, in their order."""
    rows = map(json.loads, world.control.gather_bytes(json.dumps([world.rank, *local_place]).encode()))
    return [(local_rank, local_size) for _, local_rank, local_size in sorted(rows)]


def _build_chooser(communicator: Communicator, settings: Settings) -> Callable[[int], Algorithm]:
    """Builds the choice of algorithms: hierarchical if the user says so, else the fastest by the measured links."""
    if len(communicator.world.hosts) == 1 or settings.hierarchical is False:
        return lambda nbytes: "ring"
    if settings.hierarchical:
        hierarchical: Algorithm = "two_dimensional" if "two_dimensional" in communicator.algorithms else "leader"
        return lambda nbytes: hierarchical
    return AlgorithmChooser.measure(communicator, max(1, settings.fusion_bytes))


def _check_comm(comm: Any, size: int) -> None:
    if comm is None:
        return
    if not isinstance(comm, Iterable):
        raise ValueError("comm has to be a list of ranks; MPI's communicators are not supported")
    ranks = sorted(comm)
    if ranks and ranks != list(range(size)):
        raise ValueError(f"comm={ranks} is not all of the {size} ranks; use a ProcessSet for a part of them")


def _leave_at_exit() -> None:
    """Leaves the other ranks in order; after an uncaught exception they take this process for lost."""
    global _rendezvous, _client
    shutdown()
    if _rendezvous is not None:
        rendezvous, _rendezvous = _rendezvous, None
        rendezvous.close()
    if _client is not None:
        client, _client = _client, None
        # Set by the interpreter when an uncaught exception ends the program.
        if not hasattr(sys, "last_value"):
            with suppress(CommunicationError):
                client.leave(done=True)
        client.close()
