"""Rank, size and rendezvous of this process, read from the environment that its launcher set.

The order is torchrun (`headway train --procs` sets the same variables), Open MPI, launchers that speak PMI (MPICH,
Intel MPI, MVAPICH, Cray), Slurm's `srun`. The innermost launcher wins, since it numbered the processes.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, final

import psutil

from headway.core.errors import UsageError

Launcher = Literal["headway", "torchrun", "openmpi", "pmi", "slurm"]

# Ports for jobs that name none: above the usual services, below Linux's range for outgoing connections.
PORTS = range(15_000, 31_000)

LOOPBACK = "127.0.0.1"

# Variables that hold the name of the job: equal in all of its processes, different in the next job.
JOB_NAMES = {
    "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    "pmi": ("PMI_JOBID", "PALS_APID", "PMIX_NAMESPACE"),
    "slurm": ("SLURM_JOB_ID", "SLURM_JOBID"),
}

# Process names of MPICH's launchers on a host; they give the job no name.
HYDRA = ("hydra_pmi_proxy", "pmi_proxy", "mpiexec", "mpirun")


@final
@dataclass(frozen=True)
class LaunchedProcess:
    """One of several processes that a launcher started together.

    Attributes:
        rank, size: rank of this process and number of ranks.
        local_rank, local_size: the same on its host; None if the launcher does not set them.
        address, port: rendezvous on rank 0's host; None if no variable gives it.
        launcher: launcher that set the variables.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: str | None
    port: int | None
    launcher: Launcher


def read_launcher_environment(environ: Mapping[str, str] | None = None) -> LaunchedProcess | None:
    """Reads the launcher's variables; None if no launcher started this process.

    MASTER_ADDR and MASTER_PORT override the derived rendezvous. Slurm counts only if `srun` started this process: a
    batch script has a SLURM_PROCID too, but is one process.

    Args:
        environ: variables; default: those of this process.

    Raises:
        UsageError: the variables are incomplete, are not numbers, or contradict each other.
    """
    environ = os.environ if environ is None else environ
    launched = _read_torchrun(environ) or _read_openmpi(environ) or _read_pmi(environ) or _read_slurm(environ)
    if launched is None:
        return None
    address, port = environ.get("MASTER_ADDR") or None, _read_number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        raise UsageError(f"MASTER_PORT={port} is not a port", fix="Ports are 1 to 65535.")
    launched = replace(launched, address=address or launched.address, port=launched.port if port is None else port)
    if launched.launcher == "torchrun" and launched.size > 1 and (launched.address is None or launched.port is None):
        what = f"WORLD_SIZE is {launched.size}, but {'MASTER_ADDR' if address is None else 'MASTER_PORT'} is not set"
        raise UsageError(what, fix="Set both: MASTER_ADDR to the address of rank 0's host, MASTER_PORT to a free port.")
    return launched


def _read_torchrun(environ: Mapping[str, str]) -> LaunchedProcess | None:
    launcher: Launcher = "headway" if environ.get("HEADWAY_COORDINATOR") else "torchrun"
    return _read_variables(environ, launcher, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _read_openmpi(environ: Mapping[str, str]) -> LaunchedProcess | None:
    world = "OMPI_COMM_WORLD_"
    launched = _read_variables(
        environ, "openmpi", *(world + end for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    )
    if launched is None:
        return None
    # Rank 0 runs on mpirun's own host unless a host file moves it; MASTER_ADDR is needed then. PMIX_SERVER_URI does not
    # help: it names the daemon of each process's own host.
    return _add_rendezvous(
        environ, launched, _find_first_slurm_host(environ) or _find_orte_host(environ) or _find_prte_host(environ)
    )


def _read_pmi(environ: Mapping[str, str]) -> LaunchedProcess | None:
    # MPICH's Hydra and Intel MPI set MPI_LOCAL*, Cray's PALS PMI_LOCAL_*.
    local = (
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS") if "MPI_LOCALRANKID" in environ else ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    )
    launched = _read_variables(environ, "pmi", "PMI_RANK", "PMI_SIZE", *local)
    return launched and _add_rendezvous(environ, launched, _find_first_slurm_host(environ))


def _read_slurm(environ: Mapping[str, str]) -> LaunchedProcess | None:
    if not any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS")):
        return None
    # SLURM_NTASKS may be that of the job around the step.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    launched = _read_variables(environ, "slurm", "SLURM_PROCID", size, "SLURM_LOCALID", None)
    if launched is not None and environ.get("SLURM_STEP_NUM_NODES") == "1":
        launched = replace(launched, local_size=launched.size)
    return launched and _add_rendezvous(environ, launched, _find_first_slurm_host(environ))


def _read_variables(
    environ: Mapping[str, str], launcher: Launcher, rank: str, size: str, local_rank: str, local_size: str | None
) -> LaunchedProcess | None:
    """Reads a launcher's four variables, of which the last two may be missing; None if the first two are."""
    if not environ.get(rank) and not environ.get(size):
        return None
    # One of the pair alone is left over from another job, or the user set it by hand.
    for there, absent in ((rank, size), (size, rank)):
        if not environ.get(absent):
            what = f"{there}={environ[there]} is set, but {absent} is not"
            raise UsageError(what, fix="A launcher sets both; unset it, or set the other one too.")
    values = {name: _read_number(environ, name) for name in (rank, size, local_rank, local_size) if name is not None}
    number, count, local = values[rank] or 0, values[size] or 0, values[local_rank]
    locals_ = None if local_size is None else values[local_size]
    # Each rank is below its size.
    for low, high in ((rank, size), (local_rank, local_size), (local_rank, size)):
        below, above = values[low], None if high is None else values[high]
        if below is not None and above is not None and below >= above:
            raise UsageError(f"{low}={below} and {high}={above} contradict each other", fix="Ranks count from 0.")
    if locals_ is not None and locals_ > count:
        raise UsageError(f"{local_size}={locals_} and {size}={count} contradict each other")
    return LaunchedProcess(number, count, local, locals_, None, None, launcher)


def _read_number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"{name}={text!r} is not a whole number of 0 or more")
    return int(text)


def _add_rendezvous(environ: Mapping[str, str], launched: LaunchedProcess, host: str | None) -> LaunchedProcess:
    """Adds the rendezvous: a host of the job, and a port derived from the job's name."""
    name = next((environ[name] for name in JOB_NAMES[launched.launcher] if environ.get(name)), None)
    here = launched.local_size == launched.size
    if name is None and here and launched.launcher == "pmi":
        name = _find_hydra_pid()
    port = None
    # All processes derive the same port without talking to each other; two jobs on a host rarely share one.
    if name is not None:
        step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") if launched.launcher == "slurm" else None
        port = PORTS[zlib.crc32(f"{name}.{step or 0}".encode()) % len(PORTS)]
    return replace(launched, address=LOOPBACK if here else host, port=port)


def _find_hydra_pid() -> str | None:
    """Returns the id of the nearest parent that is an MPI launcher; all processes of a host share it."""
    try:
        above = psutil.Process().parents()
        return next((str(parent.pid) for parent in above if parent.name().startswith(HYDRA)), None)
    except psutil.Error:
        return None


def _find_orte_host(environ: Mapping[str, str]) -> str | None:
    """Returns mpirun's address under Open MPI 2 to 4, from `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`."""
    match = re.search(r"tcp6?://(?:\[([^]]+)\]|([^:;]+)):\d", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return (match[1] or match[2]).split(",")[0] if match else None


def _find_prte_host(environ: Mapping[str, str]) -> str | None:
    """Returns mpirun's host under Open MPI 5, from the job name `prterun-HOST-PID@1`."""
    match = re.fullmatch(r"prterun-(.+)-\d+@\d+", environ.get("PMIX_NAMESPACE", ""))
    return match[1] if match else None


def _find_first_slurm_host(environ: Mapping[str, str]) -> str | None:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in names if environ.get(name)), None)
    return parse_first_host(nodes) if nodes else None


def parse_first_host(nodes: str) -> str:
    """Returns the first host of a Slurm node list: `n[03-05,9]x,m1` -> `n03x`.

    Raises:
        UsageError: the brackets do not match.
    """
    # A host name with any number of bracketed ranges; the first number of each range counts.
    match = re.match(r"(?:[^\[\],]|\[[0-9][0-9,-]*\])+", nodes)
    if match is None or (match.end() < len(nodes) and nodes[match.end()] != ","):
        raise UsageError(f"{nodes!r} is not a Slurm node list", fix="Set MASTER_ADDR.")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[0])
