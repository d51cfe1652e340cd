"""The job as this process sees it: one engine between `init` and `shutdown`, and what can be asked about it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch

from headway.comm.hvd.collectives import HAS_NCCL
from headway.comm.hvd.engine import Engine
from headway.comm.hvd.errors import HorovodInternalError

NOT_INITIALIZED = "hvd.init() was not called yet"


@final
class HorovodJob:
    """What `init` has made.

    Attributes:
        places: (local rank, local size) of each rank, as the launcher counts.
    """

    def __init__(self, engine: Engine, places: Sequence[tuple[int, int]]) -> None:
        self.engine, self.places = engine, tuple(places)


_job: HorovodJob | None = None


def replace_job(job: HorovodJob | None) -> HorovodJob | None:
    """Sets the job of this process, and returns the one before."""
    global _job
    before, _job = _job, job
    return before


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return _job is not None


def get_engine() -> Engine:
    """The engine that operations go to.

    Raises:
        HorovodInternalError: before `init`.
    """
    if _job is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    return _job.engine


def _require_job() -> HorovodJob:
    if _job is None:
        raise ValueError(NOT_INITIALIZED)
    return _job


def size() -> int:
    """Number of processes. Like the five below, raises ValueError before `init`."""
    return _require_job().engine.world.size


def rank() -> int:
    """Number of this process, from 0."""
    return _require_job().engine.world.rank


def local_size() -> int:
    """Number of processes on this host, as the launcher counts."""
    return _require_job().places[rank()][1]


def local_rank() -> int:
    """Number of this process on its host: which device it uses."""
    return _require_job().places[rank()][0]


def cross_size() -> int:
    """Number of hosts that have a process of this local rank."""
    return sum(place[0] == local_rank() for place in _require_job().places)


def cross_rank() -> int:
    """Number of this host among those that have a process of this local rank."""
    return sum(place[0] == local_rank() for place in _require_job().places[: rank()])


def is_elastic() -> bool:
    """Whether the number of processes may change while this one runs."""
    return os.environ.get("HOROVOD_ELASTIC") == "1" or bool(os.environ.get("HEADWAY_COORDINATOR"))


def is_homogeneous() -> bool:
    """Whether all hosts have equally many processes."""
    return len({place[1] for place in _require_job().places}) == 1


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Rank 0 records a Chrome trace from now on, into a new file.

    Raises:
        ValueError: before `init`.
    """
    if rank() == 0:
        _require_job().engine.timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends the recording; does nothing where there is none.

    Raises:
        ValueError: before `init`.
    """
    _require_job().engine.timeline.stop()


def nccl_built() -> int:
    """NCCL's version as one number, such as 22105; 0 where torch has none."""
    if not HAS_NCCL:
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10_000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built for ROCm."""
    return torch.version.hip is not None


def gloo_built() -> bool:
    """Always: sums on CPU go through torch's Gloo."""
    return True


def gloo_enabled() -> bool:
    """Always."""
    return True


def mpi_built() -> bool:
    """Never: `mpirun` may start the processes, but they do not speak MPI."""
    return False


def mpi_enabled() -> bool:
    """Never."""
    return False


def mpi_threads_supported() -> bool:
    """Raises ValueError, as Horovod without MPI does; a script's own mpi4py may be used freely."""
    raise ValueError("MPI is not used here")


def ddl_built() -> bool:
    """Never."""
    return False


def ccl_built() -> bool:
    """Never."""
    return False
