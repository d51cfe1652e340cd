"""The job of this process: one engine between `init` and `shutdown`, and Horovod's questions about it."""

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
    """The engine that `init` has built, and the local ranks.

    Attributes:
        local_places: (local rank, local size) of each rank, as the launcher counts.
    """

    def __init__(self, engine: Engine, local_places: Sequence[tuple[int, int]]) -> None:
        self.engine, self.local_places = engine, tuple(local_places)


# One job at a time, as in Horovod.
_job: HorovodJob | None = None


def replace_job(job: HorovodJob | None) -> HorovodJob | None:
    """Sets the job of this process, and returns the one before."""
    global _job
    previous, _job = _job, job
    return previous


def is_initialized() -> bool:
    """Returns True if `init` was called, and `shutdown` not since."""
    return _job is not None


def get_engine() -> Engine:
    """Returns the engine that executes operations. Raises HorovodInternalError before `init`."""
    if _job is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    return _job.engine


def _require_job() -> HorovodJob:
    # Horovod's questions raise ValueError, its collectives HorovodInternalError.
    if _job is None:
        raise ValueError(NOT_INITIALIZED)
    return _job


def size() -> int:
    """Returns the number of processes. Raises ValueError before `init`, like the five functions below."""
    return _require_job().engine.world.size


def rank() -> int:
    """Returns the rank of this process."""
    return _require_job().engine.world.rank


def local_size() -> int:
    """Returns the number of processes on this host, as the launcher counts."""
    return _require_job().local_places[rank()][1]


def local_rank() -> int:
    """Returns the rank of this process on its host, which selects its device."""
    return _require_job().local_places[rank()][0]


def cross_size() -> int:
    """Returns the number of hosts that have a process of this local rank."""
    return sum(local == local_rank() for local, _ in _require_job().local_places)


def cross_rank() -> int:
    """Returns the index of this host among those that have a process of this local rank."""
    return sum(local == local_rank() for local, _ in _require_job().local_places[: rank()])


def is_elastic() -> bool:
    """Returns True if the number of processes may change while this one runs."""
    # Set by Horovod's launcher, or by Headway's.
    return os.environ.get("HOROVOD_ELASTIC") == "1" or bool(os.environ.get("HEADWAY_COORDINATOR"))


def is_homogeneous() -> bool:
    """Returns True if all hosts have equally many processes."""
    return len({size for _, size in _require_job().local_places}) == 1


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Makes rank 0 record a Chrome trace from now on, into a new file. Raises ValueError before `init`."""
    # Only rank 0 has the negotiator, which knows when each rank requested an operation.
    if rank() == 0:
        _require_job().engine.timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends the recording, if there is one. Raises ValueError before `init`."""
    _require_job().engine.timeline.stop()


def nccl_built() -> int:
    """Returns NCCL's version as one number, such as 22105; 0 if torch has none."""
    if not HAS_NCCL:
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    # The form of NCCL_VERSION_CODE.
    return int(major * 10_000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Returns True if torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Returns True if torch was built for ROCm."""
    return torch.version.hip is not None


def gloo_built() -> bool:
    """Returns True: on CPU sums use torch's Gloo."""
    return True


def mpi_built() -> bool:
    """Returns False: `mpirun` may start the processes, but they do not speak MPI."""
    return False


# Answers that never change either.
gloo_enabled = gloo_built
mpi_enabled = ddl_built = ccl_built = mpi_built


def mpi_threads_supported() -> bool:
    """Raises ValueError, as Horovod without MPI does; a script may use its own mpi4py freely."""
    raise ValueError("MPI is not used here")
