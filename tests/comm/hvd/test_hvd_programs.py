"""Whole scripts, under the launchers that people use, and with a worker that dies."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench._hosts import Hosts, why_not
from tests.comm._ranks import ROOT
from torch.distributed import TCPStore

from headway.launch import launcher
from headway.launch.hosts import parse_hosts
from headway.launch.launcher import launch

FOLDER = Path(__file__).parent
PATIENCE_S = 150
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def environ(**more: str) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "TORCH_CPP_LOG_LEVEL": "ERROR", **more}


def run(processes: int, script: str, *arguments: str) -> str:
    """What the script's rank 0 prints; the ranks have torchrun's variables, and this process serves their store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(processes):
        place = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        variables = {name: str(text) for name, text in {**place, **where}.items()}
        command = [sys.executable, str(FOLDER / script), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=environ(**variables), **pipes))  # type: ignore[call-overload]
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * processes, said
    assert not any(said[1:])
    return str(said[0])


def accuracy(said: str, processes: int) -> float:
    assert f"{processes} ranks, the same weights" in said
    return float(re.findall(r"accuracy ([0-9.]+)", said)[-1])


@pytest.mark.check
@pytest.mark.parametrize("processes", [1, 4])
def test_a_training_script(processes: int) -> None:
    assert accuracy(run(processes, "mnist_like.py"), processes) > 0.85


@pytest.mark.check
@pytest.mark.parametrize("options", [["--use-adasum"], ["--fp16-allreduce", "--gradient-predivide-factor=2"]])
def test_a_training_script_with_options(options: list[str]) -> None:
    assert accuracy(run(2, "mnist_like.py", *options), 2) > 0.8


@pytest.mark.check
def test_a_benchmark_script() -> None:
    said = run(2, "synthetic_like.py", "--fp16-allreduce")
    assert "2 processes" in said
    assert float(re.findall(r"total: ([0-9.]+)", said)[0]) > 0


@pytest.mark.check
def test_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(FOLDER / "mnist_like.py"), "--epochs", "1"]
    done = subprocess.run(
        [*command, *script], env=environ(PYTHONWARNINGS=""), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    accuracy(done.stdout, 2)


@pytest.mark.check
def test_under_mpirun() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here: Debian's package is openmpi-bin")
    command = [*MPIRUN, "-np", "2", sys.executable, str(FOLDER / "mnist_like.py"), "--epochs", "1"]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    accuracy(done.stdout, 2)


@pytest.mark.check
@pytest.mark.root
@pytest.mark.parametrize("hierarchical", ["", "1"])
def test_on_two_hosts(hierarchical: str) -> None:
    """Ranks in turn, and the links measured unless the user says how sums go."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Hosts(2, rate_bits_s=None) as hosts:
        command = [sys.executable, str(FOLDER / "two_hosts.py")]
        place = {
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": hosts.addresses[0],
            "MASTER_PORT": "29517",
            "HEADWAY_SECRET": "known on both of these hosts alone",
        }  # of a namespace of its own
        started = []
        for rank in range(4):
            variables = environ(**place, RANK=str(rank), LOCAL_RANK=str(rank // 2))
            variables["HOROVOD_HIERARCHICAL_ALLREDUCE"] = hierarchical
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(hosts.run(rank % 2, command, variables, **pipes))
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 4, said
    assert said[0].strip() == str([(rank, rank // 2, 2, rank % 2, 2) for rank in range(4)])


@pytest.mark.check
def test_a_script_that_nobody_launched() -> None:
    command = [sys.executable, str(FOLDER / "mnist_like.py"), "--epochs", "1"]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    accuracy(done.stdout, 1)


@pytest.mark.check
@pytest.mark.parametrize(("victim", "signal"), [("0.1.0", "SIGKILL"), ("0.0.0", "SIGKILL"), ("0.2.0", "SIGSTOP")])
def test_an_elastic_script_goes_on_without_a_worker_and_takes_its_replacement_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, signal: str
) -> None:
    monkeypatch.setattr(launcher, "REPLACEMENT_BACKOFF_S", 0.01)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "wait").touch()  # until the replacement has come
    script = [str(FOLDER / "elastic_like.py"), str(tmp_path), victim, signal, "12"]
    timeout_s = 6.0 if signal == "SIGSTOP" else 200.0  # one that is killed is not found by silence
    assert launch(script, parse_hosts(3, None), timeout_s=timeout_s) == 0
    logs = {path.stem: path.read_text().splitlines() for path in tmp_path.glob("*.log")}
    replacement = f"{victim[:-1]}1"
    assert set(logs) == {"0.0.0", "0.1.0", "0.2.0", replacement}
    assert [line.split()[:2] for line in logs[victim]] == [["begin", "0"]]
    batches = set()
    for worker in set(logs) - {victim, replacement}:
        first, reset, without, *rest = (line.split() for line in logs[worker])
        assert (first[0], first[3], reset[0], reset[2], without[3]) == ("begin", "3", "reset", "2", "2")
        assert without[:2] == ["begin", "5"]  # its last commit
        assert rest[-1][0] == "end"
        batches |= {rest[-1][1], *(line[1] for line in rest if line[0] == "begin")}
    joined, end = (line.split() for line in logs[replacement])
    assert (joined[0], joined[3], end[0]) == ("begin", "3", "end")
    assert batches == {joined[1], end[1]}  # where it came in, all began anew, without going back
    weights = [torch.load(path, weights_only=True) for path in tmp_path.glob("*.pt")]
    assert len(weights) == 3
    assert all(torch.equal(weights[0][name], other[name]) for other in weights for name in weights[0])
