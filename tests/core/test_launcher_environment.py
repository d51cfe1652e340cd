from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.core.launcher_environment import PORTS, LaunchedProcess, parse_first_host, read_launcher_environment

patient = settings(deadline=None)  # a busy machine is no failure

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "741015552.0;tcp://192.0.2.2,10.1.0.2:48605;tcp6://[fd00::2]:44317",
    "PMIX_NAMESPACE": "741015553",
    "PMIX_SERVER_URI4": "741015552.0;tcp4://127.0.0.1:40321",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[05-08]",
    "SLURM_JOB_ID": "4711",
}


def test_without_a_launcher_there_is_nothing() -> None:
    assert read_launcher_environment({}) is None
    assert read_launcher_environment({"MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "0", "SLURM_JOB_ID": "5"}) is None


def test_torchrun_says_everything() -> None:
    assert read_launcher_environment(TORCHRUN) == LaunchedProcess(3, 4, 1, 2, "10.0.0.1", 29400, "torchrun")


def test_our_own_launcher_needs_no_address() -> None:
    environ = {**TORCHRUN, "HEADWAY_COORDINATOR": "10.0.0.9:1234"}
    del environ["MASTER_ADDR"], environ["MASTER_PORT"]
    assert read_launcher_environment(environ) == LaunchedProcess(3, 4, 1, 2, None, None, "headway")


def test_a_world_of_one_needs_no_address() -> None:
    assert read_launcher_environment({"RANK": "0", "WORLD_SIZE": "1"}) == LaunchedProcess(
        0, 1, None, None, None, None, "torchrun"
    )


def test_open_mpi_meets_at_mpirun() -> None:
    found = read_launcher_environment(OPENMPI)
    assert found is not None
    assert found == LaunchedProcess(3, 4, 1, 2, "192.0.2.2", found.port, "openmpi")
    assert found.port in PORTS
    newer = {**OPENMPI, "PMIX_NAMESPACE": "prterun-login-node-3-14159@1"}
    del newer["OMPI_MCA_orte_hnp_uri"]
    assert read_launcher_environment(newer).address == "login-node-3"  # type: ignore[union-attr]


def test_open_mpi_inside_slurm_meets_at_the_first_host_of_the_job() -> None:
    found = read_launcher_environment(
        {**OPENMPI, "SLURM_JOB_NODELIST": "node[05-08]", "SLURM_PROCID": "1", "SLURM_JOB_ID": "8"}
    )
    assert found is not None
    assert (found.address, found.launcher, found.rank) == ("node05", "openmpi", 3)


def test_open_mpi_of_version_4_numbers_an_ipv6_only_host() -> None:
    found = read_launcher_environment({**OPENMPI, "OMPI_MCA_orte_hnp_uri": "7.0;tcp6://[fd00::2]:44317"})
    assert found is not None
    assert found.address == "fd00::2"


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "openmpi"),
        ({**PMI, "MPI_LOCALNRANKS": "4", "PMI_JOBID": "kvs_1"}, "pmi"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "3", "PMI_LOCAL_SIZE": "4", "PALS_APID": "a-1"}, "pmi"),
    ],
)
def test_processes_of_one_host_meet_on_the_loopback(environ: dict[str, str], launcher: str) -> None:
    found = read_launcher_environment(environ)
    assert found is not None
    assert (found.address, found.launcher, found.local_size) == ("127.0.0.1", launcher, 4)
    assert found.port in PORTS


def test_pmi_over_hosts_takes_its_place_from_slurm_or_has_none() -> None:
    assert read_launcher_environment(PMI) == LaunchedProcess(3, 4, 1, 2, None, None, "pmi")
    found = read_launcher_environment({**PMI, **SLURM, "PMI_JOBID": "77.0"})
    assert found is not None
    assert (found.launcher, found.address) == ("pmi", "node07")


def test_slurm_meets_at_the_first_host_of_the_step() -> None:
    found = read_launcher_environment(SLURM)
    assert found is not None
    assert found == LaunchedProcess(3, 4, 1, None, "node07", found.port, "slurm")
    assert found.port in PORTS


def test_steps_of_one_slurm_job_do_not_meet() -> None:
    ports = [read_launcher_environment({**SLURM, "SLURM_STEP_ID": str(step)}).port for step in range(50)]  # type: ignore[union-attr]
    assert len(set(ports)) > 45


def test_a_step_has_its_own_number_of_tasks() -> None:
    found = read_launcher_environment({**SLURM, "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "4"})
    assert found is not None
    assert found.size == 4


def test_a_batch_script_is_one_process_although_slurm_numbers_it() -> None:
    assert (
        read_launcher_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "5"})
        is None
    )


@pytest.mark.parametrize("environ", [OPENMPI, PMI, SLURM], ids=["openmpi", "pmi", "slurm"])
def test_the_master_variables_win(environ: dict[str, str]) -> None:
    found = read_launcher_environment({**environ, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert found is not None
    assert (found.address, found.port, found.rank, found.size) == ("head", 1234, 3, 4)


def test_the_innermost_launcher_wins() -> None:
    everything = {**SLURM, **PMI, **OPENMPI, **TORCHRUN}
    for launcher, gone in (("torchrun", TORCHRUN), ("openmpi", OPENMPI), ("pmi", PMI), ("slurm", SLURM)):
        found = read_launcher_environment(everything)
        assert found is not None
        assert found.launcher == launcher
        everything = {name: value for name, value in everything.items() if name not in gone}
    assert read_launcher_environment(everything) is None


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK is not"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "2"}, "PMI_RANK"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, "SLURM_NTASKS"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 and WORLD_SIZE=4"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 and WORLD_SIZE=4"),
        ({**SLURM, "SLURM_LOCALID": "4"}, "SLURM_LOCALID=4 and SLURM_NTASKS=4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1'"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE='four'"),
        ({**TORCHRUN, "WORLD_SIZE": "0", "RANK": "0"}, "contradict"),
        ({**TORCHRUN, "RANK": ""}, "RANK"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT=0"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-2"}, "n[1-2"),
    ],
)
def test_what_is_half_set_or_contradicts_itself_is_refused_by_name(environ: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_launcher_environment(environ)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alone", "alone"),
        ("a.b-c,d", "a.b-c"),
        ("n[01-03]", "n01"),
        ("n[9,11-12],m", "n9"),
        ("r[1-2]n[007-120]-ib,x", "r1n007-ib"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert parse_first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["[1-2", "n]", "n[]", "n[a-b]", ",n", "n[1]]"])
def test_a_node_list_that_is_none_is_refused(nodes: str) -> None:
    with pytest.raises(UsageError, match="not a Slurm node list"):
        parse_first_host(nodes)


@patient
@given(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True), min_size=1), st.integers(0, 999), st.data())
def test_ranges_begin_with_their_first_number(names: list[str], number: int, data: st.DataObject) -> None:
    width = data.draw(st.integers(len(str(number)), 6))
    host = f"{number:0{width}d}"
    assert parse_first_host(",".join([f"{names[0]}[{host}-{number + 1:0{width}d}]", *names[1:]])) == names[0] + host


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("OMPI_", "PMI", "SLURM_", "HEADWAY_")) or name in TORCHRUN:
            monkeypatch.delenv(name)
    assert read_launcher_environment() is None
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read_launcher_environment() == read_launcher_environment(TORCHRUN)


SHOW = (
    "from headway.core.launcher_environment import read_launcher_environment; print(read_launcher_environment().port)"
)


def test_processes_under_one_mpiexec_without_a_job_name_find_one_port(tmp_path: Path) -> None:
    """MPICH's launcher gives no name; two real processes below one called so, one of them below a shell, agree."""
    mpiexec = tmp_path / "mpiexec.hydra"
    mpiexec.write_text(
        f'#!/bin/sh\n{sys.executable} -c "$1"\nsh -c \'"$0" -c "$1"; :\' {sys.executable} "$1"\n', encoding="utf-8"
    )
    mpiexec.chmod(0o755)
    base = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    environ = {**base, **PMI, "MPI_LOCALNRANKS": "4"}
    runs = [
        subprocess.run([mpiexec, SHOW], env=environ, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    for ports in runs:
        assert len(ports) == 2
        assert ports[0] == ports[1]
        assert int(ports[0]) in PORTS
    assert runs[0] != runs[1]  # the next mpiexec has another pid
