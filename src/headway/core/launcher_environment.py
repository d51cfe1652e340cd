"""Launched: what the program that started this process says of it, read from the environment.

Read are torchrun's variables (and those of our own launcher, which are the same), Open MPI's, those of launchers that
speak PMI (MPICH, Intel MPI, MVAPICH, Cray), and Slurm's `srun`, in this order: the innermost launcher wins, since it is
the one that numbered the processes.
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

PORTS = range(15_000, 31_000)
"""Where the port of a job without one lies: above the services, below what Linux gives to outgoing connections."""

LOOPBACK = "127.0.0.1"

JOB_NAMES = {
    "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    "pmi": ("PMI_JOBID", "PALS_APID", "PMIX_NAMESPACE"),
    "slurm": ("SLURM_JOB_ID", "SLURM_JOBID"),
}
"""Variables with the name of the job, the same in all of its processes and different in the next job."""

HYDRA = ("hydra_pmi_proxy", "pmi_proxy", "mpiexec", "mpirun")
"""How the programs are called that start a host's processes for MPICH and its kin; they give the job no name."""


@final
@dataclass(frozen=True)
class LaunchedProcess:
    """One of several processes that were started together.

    Attributes:
        rank, size: number of this process, and of how many.
        local_rank, local_size: on its host; None where the launcher does not say.
        address, port: where the processes meet, on rank 0's host; None where nothing says it.
        launcher: who started it.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: str | None
    port: int | None
    launcher: Launcher


def read_launcher_environment(environ: Mapping[str, str] | None = None) -> LaunchedProcess | None:
    """What the launcher says; None where no launcher started this process.

    MASTER_ADDR and MASTER_PORT win over what is derived. Slurm counts where `srun` started this process: a batch script
    itself has a SLURM_PROCID too, but is one process.

    Args:
        environ: default: the process's environment.

    Raises:
        UsageError: variables that belong together are set in part, are no numbers, or contradict each other.
    """
    environ = os.environ if environ is None else environ
    found = _read_torchrun(environ) or _read_openmpi(environ) or _read_pmi(environ) or _read_slurm(environ)
    if found is None:
        return None
    address, port = environ.get("MASTER_ADDR") or None, _read_number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        raise UsageError(f"MASTER_PORT={port} is no port", fix="Ports are 1 to 65535.")
    found = replace(found, address=address or found.address, port=found.port if port is None else port)
    if found.launcher == "torchrun" and found.size > 1 and (found.address is None or found.port is None):
        what = f"WORLD_SIZE is {found.size}, but {'MASTER_ADDR' if address is None else 'MASTER_PORT'} is not set"
        raise UsageError(what, fix="Set both to where the processes meet: an address of rank 0's host, a free port.")
    return found


def _read_torchrun(environ: Mapping[str, str]) -> LaunchedProcess | None:
    launcher: Launcher = "headway" if environ.get("HEADWAY_COORDINATOR") else "torchrun"
    return _read_variables(environ, launcher, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _read_openmpi(environ: Mapping[str, str]) -> LaunchedProcess | None:
    world = "OMPI_COMM_WORLD_"
    found = _read_variables(environ, "openmpi", *(world + end for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
    if found is None:
        return None
    # mpirun's own host is where rank 0 is, unless a host file says otherwise; then MASTER_ADDR has to. PMIX_SERVER_URI
    # would be the daemon of each process's own host.
    return _add_rendezvous(
        environ, found, _find_first_slurm_host(environ) or _find_orte_host(environ) or _find_prte_host(environ)
    )


def _read_pmi(environ: Mapping[str, str]) -> LaunchedProcess | None:
    local = (
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS") if "MPI_LOCALRANKID" in environ else ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    )
    found = _read_variables(environ, "pmi", "PMI_RANK", "PMI_SIZE", *local)
    return found and _add_rendezvous(environ, found, _find_first_slurm_host(environ))


def _read_slurm(environ: Mapping[str, str]) -> LaunchedProcess | None:
    if not any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS")):
        return None
    # SLURM_NTASKS may still be that of the job around the step.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    found = _read_variables(environ, "slurm", "SLURM_PROCID", size, "SLURM_LOCALID", None)
    if found is not None and environ.get("SLURM_STEP_NUM_NODES") == "1":
        found = replace(found, local_size=found.size)
    return found and _add_rendezvous(environ, found, _find_first_slurm_host(environ))


def _read_variables(
    environ: Mapping[str, str], launcher: Launcher, rank: str, size: str, local_rank: str, local_size: str | None
) -> LaunchedProcess | None:
    """What the four variables of a launcher say, the last two where they are set."""
    if not environ.get(rank) and not environ.get(size):
        return None
    for there, absent in ((rank, size), (size, rank)):
        if not environ.get(absent):
            what = f"{there}={environ[there]} is set, but {absent} is not"
            raise UsageError(what, fix="A launcher sets both; unset it, or set the other one too.")
    values = {name: _read_number(environ, name) for name in (rank, size, local_rank, local_size) if name is not None}
    number, count, local = values[rank] or 0, values[size] or 0, values[local_rank]
    locals_ = None if local_size is None else values[local_size]
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
        raise UsageError(f"{name}={text!r} is no whole number from 0 on")
    return int(text)


def _add_rendezvous(environ: Mapping[str, str], found: LaunchedProcess, host: str | None) -> LaunchedProcess:
    """With the place where the processes meet: a host of the job, and a port that its name gives."""
    name = next((environ[name] for name in JOB_NAMES[found.launcher] if environ.get(name)), None)
    here = found.local_size == found.size
    if name is None and here and found.launcher == "pmi":
        name = _find_hydra_pid()
    port = None
    if name is not None:
        step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") if found.launcher == "slurm" else None
        port = PORTS[zlib.crc32(f"{name}.{step or 0}".encode()) % len(PORTS)]
    return replace(found, address=LOOPBACK if here else host, port=port)


def _find_hydra_pid() -> str | None:
    """The nearest of the processes above this one that starts MPI's: all processes of a host have the same."""
    try:
        above = psutil.Process().parents()
        return next((str(parent.pid) for parent in above if parent.name().startswith(HYDRA)), None)
    except psutil.Error:
        return None


def _find_orte_host(environ: Mapping[str, str]) -> str | None:
    """mpirun's address of Open MPI 2 to 4: `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`."""
    found = re.search(r"tcp6?://(?:\[([^]]+)\]|([^:;]+)):\d", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return (found[1] or found[2]).split(",")[0] if found else None


def _find_prte_host(environ: Mapping[str, str]) -> str | None:
    """mpirun's host of Open MPI 5: the job is called `prterun-HOST-PID@1`."""
    found = re.fullmatch(r"prterun-(.+)-\d+@\d+", environ.get("PMIX_NAMESPACE", ""))
    return found[1] if found else None


def _find_first_slurm_host(environ: Mapping[str, str]) -> str | None:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in names if environ.get(name)), None)
    return parse_first_host(nodes) if nodes else None


def parse_first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `n[03-05,9]x,m1` -> `n03x`.

    Raises:
        UsageError: brackets that do not match.
    """
    # A host name, with any number of bracketed ranges in it; the first number of each counts.
    found = re.match(r"(?:[^\[\],]|\[[0-9][0-9,-]*\])+", nodes)
    if found is None or (found.end() < len(nodes) and nodes[found.end()] != ","):
        raise UsageError(f"{nodes!r} is no list of hosts as Slurm writes it", fix="Set MASTER_ADDR.")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found[0])
