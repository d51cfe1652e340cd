"""`init` and `shutdown`: how this process and the others come together, and part."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Literal

import torch

from headway.comm.algorithm_choice import AlgorithmChooser, run_trials
from headway.comm.communicator import Algorithm, Communicator
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
from headway.core.world import World

CPU = torch.device("cpu")

EXPLANATION_S = 15.0
"""How long the launcher may take to say why a meeting failed; it notices silence after 10 s."""

_met: Rendezvous | None = None
"""Of the first `init`: it holds the store where the worlds of later ones meet, to the end of the process."""
_times = 0
"""Calls of `init` that found no launcher of ours."""
_member: CoordinatorClient | None = None
"""This process as our launcher knows it; from the first `init` to the end of the process."""


def init(
    comm: Iterable[int] | None = None, process_sets: Iterable[ProcessSet] | Literal["dynamic"] | None = None
) -> None:
    """Meets the other processes of the job. Once is enough; a second call does nothing.

    A process that no launcher started is a job of one.

    Args:
        comm: all ranks, or None; part of them, and MPI's communicators, are refused.
        process_sets: sets to make at once; the same on all ranks, in the same order. `dynamic` makes none.

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
        world.abort("this process did not get through init")
        if communicator is not None:
            communicator.close()
        world.close()
        raise
    if _member is not None:
        _member.watch_generation(world.generation, lambda: engine.fail("a worker was lost"))
    context.replace_job(context.HorovodJob(engine, places))
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    sets.register_all(() if process_sets is None or isinstance(process_sets, str) else process_sets)


def shutdown() -> None:
    """Ends the job on all ranks: what is pending anywhere fails. `init` may be called again afterwards, on all."""
    job = context.replace_job(None)
    if job is not None:
        sets.forget_all()
        job.engine.shut_down()


def has_newcomers() -> bool:
    """Whether new workers wait for the others to come together again, as far as this process knows."""
    return _member is not None and _member.has_newcomers


def can_reinitialise() -> bool:
    """Whether the workers that are there can come together after a collective failed."""
    return _member is not None or not context.get_engine().failed


def reinitialise() -> None:
    """Ends the job, and begins anew with the workers that there are now.

    Raises:
        FencedError: the others have gone on without this process. CommunicationError: they cannot be reached.
    """
    while True:
        shutdown()
        try:
            init()
            return
        except CommunicationError:
            if _member is None or not _is_worker_lost(_member):
                raise


def _is_worker_lost(member: CoordinatorClient) -> bool:
    """Whether a meeting failed because somebody was lost meanwhile, so that there will be another one.

    Raises:
        FencedError, CommunicationError: this process is out, or the launcher is gone.
    """
    until = time.monotonic() + EXPLANATION_S
    while not member.has_changed and time.monotonic() < until:
        time.sleep(0.01)
    try:
        member.check()
    except GenerationEndedError:
        return True
    return False


def _join_world(settings: Settings) -> tuple[World, tuple[int, int]]:
    """The world, and this process's (local rank, local size)."""
    global _met, _times, _member
    found = read_launcher_environment()
    if _member is None:
        _member = CoordinatorClient.from_environment()
    if _member is not None:
        return _join_generation(_member, settings)
    _times += 1
    if found is None or found.size == 1:
        return World.create_single(CPU), (0, 1)
    limits: dict[str, Any] = {"timeout_s": settings.timeout_s, "interface": settings.interface}
    if _met is None:
        world = World.join(found, CPU, **limits)
        _met, world.meeting = world.meeting, None
    else:
        assert found.address is not None
        # The first world took the number of the launcher's attempt.
        generation = _met.attempt + _times - 1
        limits |= {"master": found.address, "secret": _met.secret, "generation": generation}
        world = World.create(_met.store, found.rank, found.size, CPU, **limits)
    if found.local_rank is None or found.local_size is None:
        return world, (world.local_rank, world.local_size)
    return world, (found.local_rank, found.local_size)


def _join_generation(member: CoordinatorClient, settings: Settings) -> tuple[World, tuple[int, int]]:
    info = member.wait_for_generation()
    world = member.build_world(
        info, CPU, why="a worker was lost", timeout_s=settings.timeout_s, interface=settings.interface
    )
    return world, (info.local_ranks[info.rank], world.local_size)


def _gather_places(world: World, place: tuple[int, int]) -> list[tuple[int, int]]:
    """What every rank knows of its place, in the order of ranks."""
    rows = [row.decode().split() for row in world.control.gather_bytes(f"{place[0]} {place[1]}".encode())]
    by_rank = {rank: (int(local), int(size)) for rank, (local, size) in zip(world.control.ranks, rows, strict=True)}
    return [by_rank[rank] for rank in range(world.size)]


def _build_chooser(communicator: Communicator, settings: Settings) -> Callable[[int], Algorithm]:
    """How sums over all ranks go: by host if the user says so, else by whatever the measured links make fastest."""
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
        raise ValueError("comm is no list of ranks; MPI is not used here, so that its communicators mean nothing")
    ranks = sorted(comm)
    if ranks and ranks != list(range(size)):
        raise ValueError(f"comm={ranks} is not all of the {size} ranks; use a ProcessSet for a part of them")


def _at_exit() -> None:
    """Leaves the others in order; where an exception ended the program they take this process for lost."""
    global _met, _member
    shutdown()
    if _met is not None:
        meeting, _met = _met, None
        meeting.close()
    if _member is not None:
        member, _member = _member, None
        if not hasattr(sys, "last_value"):
            with suppress(CommunicationError):
                member.leave(done=True)
        member.close()
