"""A scripted stranger attacks everything on which a run listens: the run ends as it does without him."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench._hosts import Hosts
from tests._support import command, finished, packed_digits, write_recipe
from tests.security._stranger import TEXT

pytestmark = pytest.mark.check

STRANGER = Path(__file__).with_name("_stranger.py")
SHELL = Path(__file__).parents[1] / "multihost/_shell.py"
SCRIPT = Path(__file__).parents[1] / "comm/hvd/mnist_like.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
PATIENCE_S = 500
"""A run takes some seconds on a quiet machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger")
    packed_digits(folder, per_class=60)
    write_recipe(folder / "recipe.yaml", batch=20, epochs=4)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> bytes:
    """The weights of a run by two processes that nobody attacks."""
    said = finished("train", folder / "recipe.yaml", "--procs", "2", "--run", folder / "quiet")
    assert said.status == 0, said.err
    return (folder / "quiet/weights.safetensors").read_bytes()


def attacked(
    argv: Sequence[str], *, spared: bool = False, environ: Mapping[str, str] | None = None
) -> tuple[str, dict[str, dict[str, int]]]:
    """What a command says that ends well, and by port what a stranger did meanwhile.

    Args:
        spared: the command's own process is no part of this project; its children are.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
    process = subprocess.Popen(argv, stderr=subprocess.STDOUT, env=variables, **pipes)
    asked = {"pids": [process.pid], "seconds": PATIENCE_S, "spared": [process.pid] if spared else []}
    stranger = subprocess.Popen([sys.executable, str(STRANGER), json.dumps(asked)], **pipes)
    return outcome(process, stranger)


def outcome(process: subprocess.Popen[str], stranger: subprocess.Popen[str]) -> tuple[str, dict[str, dict[str, int]]]:
    try:
        said, _ = process.communicate(timeout=PATIENCE_S)
        done, _ = stranger.communicate(timeout=60)
    finally:
        for one in (process, stranger):
            one.kill()
            one.communicate()
    assert process.returncode == 0, said
    assert TEXT not in said
    assert "\x1b" not in said
    assert "Traceback" not in said
    assert stranger.returncode == 0
    found: dict[str, dict[str, int]] = json.loads(done)
    # Some 500 to 3,000, the fewest on a busy machine: the stranger shares it with those he attacks.
    assert sum(count for one in found.values() for count in one.values()) > 100
    return said, found


def test_processes_of_our_launcher_on_one_host(folder: Path, undisturbed: bytes) -> None:
    run = folder / "procs"
    _, found = attacked(command("train", folder / "recipe.yaml", "--procs", "2", "--run", run))
    assert (run / "weights.safetensors").read_bytes() == undisturbed
    # The store and the coordinator, and a port of Gloo's of each worker: nothing that another host could reach.
    assert len(found) >= 4
    assert {place.split()[0] for place in found} == {"127.0.0.1"}


def test_processes_of_torchrun(folder: Path, undisturbed: bytes) -> None:
    run = folder / "torchrun"
    train = [*TORCHRUN, "--standalone", "-m", "headway", "train", str(folder / "recipe.yaml"), "--run-folder", str(run)]
    _, found = attacked(train, spared=True)
    assert (run / "weights.safetensors").read_bytes() == undisturbed
    assert len(found) >= 3
    assert {place.split()[0] for place in found} == {"127.0.0.1"}


def test_a_script_with_horovods_names() -> None:
    script = [*TORCHRUN, "--standalone", str(SCRIPT), "--epochs", "1"]
    quiet = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    said, _ = attacked(script, spared=True)
    results = [re.findall(r"accuracy [0-9.]+|2 ranks, the same weights", one) for one in (quiet.stdout, said)]
    assert results[0]
    assert results[0] == results[1]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3, rate_bits_s=None) as found:
        yield found


@pytest.mark.root
def test_two_hosts_with_a_stranger_on_a_third(folder: Path, undisturbed: bytes, hosts: Hosts) -> None:
    with hosts.run(1, [sys.executable, SHELL, "serve", hosts.addresses[1]], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        port, run = shell.stdout.readline().strip(), folder / "hosts"
        environ = {"HEADWAY_RSH": f"{sys.executable} {SHELL} {port}", "OMP_NUM_THREADS": "1"}
        places = ["--hosts", f"localhost:1,{hosts.addresses[1]}:1"]
        train = command("train", folder / "recipe.yaml", *places, "--run", run)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
        process = hosts.run(0, train, environ, stderr=subprocess.STDOUT, **pipes)
        asked = {"pids": [process.pid, shell.pid], "seconds": PATIENCE_S, "spared": [shell.pid]}
        said, found = outcome(process, hosts.run(2, [sys.executable, STRANGER, json.dumps(asked)], **pipes))
        shell.kill()
    assert (run / "weights.safetensors").read_bytes() == undisturbed
    listens = {place.split()[0] for place in found}
    assert set(hosts.addresses[:2]) <= listens <= {*hosts.addresses[:2], "127.0.0.1"}
    assert "made by no rank of this run" not in said  # he never came through the filter before Gloo
