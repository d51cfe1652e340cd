"""`parallel.layers: auto` behind slow links: large layers are divided, recorded, and divided again by a resume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from bench._hosts import Hosts
from tests._support import finished, packed_digits, records, write_recipe

pytestmark = [pytest.mark.root, pytest.mark.check]

# The gradients of the first layer are 1.1 MB; its inputs and outputs of a step are 34 kB.
NET = """
from torch import nn


def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, num_classes))
"""


def run_all(hosts: Hosts, command: list[str | Path], port: int) -> str:
    """Runs a command on two hosts, and returns what rank 0 says."""
    ranks = []
    for rank in (0, 1):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(port)}
        environ = {**place, "HEADWAY_SECRET": "of a test, and long", "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ranks.append(hosts.run(rank, [sys.executable, "-m", "headway", *command], environ, **pipes))
    said = [process.communicate()[0].decode() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    return said[0]


def test_large_layers_are_divided_and_a_resume_divides_the_same(tmp_path: Path) -> None:
    packed_digits(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        model={"factory": "net.py:build"},
        batch=4,
        parallel={"strategy": "hybrid"},
    )
    run = tmp_path / "run"
    with Hosts(2, 50e6) as hosts:
        said = run_all(hosts, ["train", recipe, "--run", run], 2950)
        assert "Divided layers: 1" in said
        recorded = yaml.safe_load((run / "recipe.yaml").read_text())["parallel"]["layers"]
        assert "^1$" in recorded
        said = run_all(hosts, ["train", "--resume", run, "epochs=2"], 2951)
        assert "Divided layers" not in said
    assert yaml.safe_load((run / "recipe.yaml").read_text())["parallel"]["layers"] == recorded


def test_a_slow_link_shows_in_the_waits_for_exchanges(tmp_path: Path) -> None:
    """A step sends half a megabyte each way, twice: 0.17 s here, and next to nothing inside a host."""
    packed_digits(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        model={"factory": "net.py:build"},
        batch=64,
        log_every_steps=2,
        parallel={"strategy": "hybrid", "layers": ["^1$"]},
    )
    said = finished("train", recipe, "--procs", "2", "--run", tmp_path / "near")
    assert said.status == 0, said.err
    with Hosts(2, 50e6) as hosts:
        run_all(hosts, ["train", recipe, "--run", tmp_path / "far"], 2952)
    near, far = (records(tmp_path / name, "train")[-1] for name in ("near", "far"))
    assert near["exchange"].keys() == far["exchange"].keys() == {"divided layers"}
    assert far["exchange_share"] > near["exchange_share"]
