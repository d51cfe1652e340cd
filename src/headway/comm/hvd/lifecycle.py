"""`init` and `shutdown`: how the processes of a job connect, and part."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Literal

import torch

from headway.comm.algorithm_choice import AlgorithmChooser, run_trials
from headway.comm.comm_recipe import Algorithm
from headway.comm.communicator import Communicator
from headway.comm.coordinator_client import CoordinatorClient
from headway.comm.hvd import context
from headway.comm.hvd import process_sets as sets
from headway.comm.hvd.engine import Engine
from headway.comm.hvd.process_sets import ProcessSet
from headway.comm.hvd.settings import Settings
from headway.comm.links import measure_links
from headway.core.errors import CommunicationError, GenerationEndedError
from headway.core.launcher_environment import read_launcher_environment
from headway.core.rendezvous import Rendezvous
from headway.core.world import Membership, World

CPU = torch.device("cpu")

# How long the launcher may take to explain why a meeting failed; it notices silence after 10 s.
EXPLANATION_S = 15.0

# The meeting of the first `init`. It holds the store that the worlds of later ones use, until the process ends.
_met: Rendezvous | None = None

# Calls of `init` without a launcher of ours.
_times = 0

# The connection to our launcher, from the first `init` until the process ends.
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
        ValueError: another `comm`, or the same set twice. UsageError: the launcher's variables contradict each other.
        CommunicationError: the others did not come.
    """
    if context.is_initialized():
        return
    settings = Settings.read()
    world, place = _join_world(settings)
    communicator: Communicator | None = None
    try:
        _check_comm(comm, world.size)
        places = _gather_places(world, place)
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
    context.replace_job(context.HorovodJob(engine, places))
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)
    sets.register_all(() if process_sets is None or isinstance(process_sets, str) else process_sets)


def shutdown() -> None:
    """Ends the job on all ranks: pending operations fail. `init` may be called again afterwards, on all ranks."""
    job = context.replace_job(None)
    if job is not None:
        sets.forget_all()
        job.engine.shut_down()


def has_newcomers() -> bool:
    """Returns True if new workers wait to join, as far as this process knows."""
    return _client is not None and _client.has_newcomers


def can_reinitialise() -> bool:
    """Returns True if the remaining workers can connect again after a collective failed."""
    return _client is not None or not context.get_engine().has_failed


def reinitialise() -> None:
    """Ends the job, and begins anew with the present workers. It raises as `init` does.

    Raises:
        FencedError: the others have gone on without this process.
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
    # A meeting may fail because another worker was lost: then the launcher says so, and there will be a next one.
    until = time.monotonic() + EXPLANATION_S
    while not client.has_changed and time.monotonic() < until:
        time.sleep(0.01)
    try:
        client.check()
    except GenerationEndedError:
        return True
    return False


def _join_world(settings: Settings) -> tuple[World, tuple[int, int]]:
    # Three ways: by our launcher, alone, or by another launcher's variables, such as torchrun's. The world, and this
    # process's (local rank, local size).
    global _met, _times, _client
    found = read_launcher_environment()
    if _client is None:
        _client = CoordinatorClient.from_environment()
    if _client is not None:
        return _join_generation(_client, settings)
    _times += 1
    if found is None or found.size == 1:
        return World.create_single(CPU), (0, 1)
    limits: dict[str, Any] = {"timeout_s": settings.timeout_s, "interface": settings.interface}
    if _met is None:
        world = World.join(found, CPU, **limits)
        _met, world.rendezvous = world.rendezvous, None
    else:
        assert found.address is not None
        # The first world took the number of the launcher's attempt.
        membership = Membership(found.rank, found.size, generation=_met.attempt + _times - 1)
        limits |= {"master": found.address, "secret": _met.secret}
        world = World.create(_met.store, membership, CPU, **limits)
    if found.local_rank is None or found.local_size is None:
        return world, (world.local_rank, world.local_size)
    return world, (found.local_rank, found.local_size)


def _join_generation(client: CoordinatorClient, settings: Settings) -> tuple[World, tuple[int, int]]:
    info = client.wait_for_generation()
    world = client.build_world(
        info, CPU, why="a worker was lost", timeout_s=settings.timeout_s, interface=settings.interface
    )
    return world, (info.local_ranks[info.rank], world.local_size)


def _gather_places(world: World, place: tuple[int, int]) -> list[tuple[int, int]]:
    # The (local rank, local size) of all ranks, in their order.
    rows = [row.decode().split() for row in world.control.gather_bytes(f"{place[0]} {place[1]}".encode())]
    by_rank = {rank: (int(local), int(size)) for rank, (local, size) in zip(world.control.ranks, rows, strict=True)}
    return [by_rank[rank] for rank in range(world.size)]


def _build_chooser(communicator: Communicator, settings: Settings) -> Callable[[int], Algorithm]:
    # By host if the user says so, else the fastest by the measured links.
    world = communicator.world
    if len(world.hosts) == 1 or settings.hierarchical is False:
        return lambda nbytes: "ring"
    if settings.hierarchical:
        by_host: Algorithm = "two_dimensional" if "two_dimensional" in communicator.algorithms else "leader"
        return lambda nbytes: by_host
    network = measure_links(world, rails=1).build_network(world)
    trials = run_trials(communicator, network)
    return AlgorithmChooser(network, trials, settings.fusion_bytes, bucket_bytes=max(1, settings.fusion_bytes))


def _check_comm(comm: Any, size: int) -> None:
    if comm is None:
        return
    if not isinstance(comm, Iterable):
        raise ValueError("comm has to be a list of ranks; MPI's communicators are not supported")
    ranks = sorted(comm)
    if ranks and ranks != list(range(size)):
        raise ValueError(f"comm={ranks} is not all of the {size} ranks; use a ProcessSet for a part of them")


def _leave_at_exit() -> None:
    # Leaves the others in order; after an uncaught exception they take this process for lost.
    global _met, _client
    shutdown()
    if _met is not None:
        meeting, _met = _met, None
        meeting.close()
    if _client is not None:
        client, _client = _client, None
        # Set by the interpreter when an uncaught exception ends the program.
        if not hasattr(sys, "last_value"):
            with suppress(CommunicationError):
                client.leave(done=True)
        client.close()
