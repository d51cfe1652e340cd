"""A run goes on with another strategy, on any number of ranks, from the very state that another one saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests._support import free_port, headway, packed_digits, refused, write_recipe

from headway.checkpoint.checkpoints import Checkpoints

NET = r"""
import torch
from torch import nn

from headway.model import MixtureOfExperts, SwitchGate


class Towers(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.towers = nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(1, 4, 3, padding=1)])
        self.norm, self.fc = nn.BatchNorm2d(8), nn.Linear(8, num_classes)

    def forward(self, x):
        return self.fc(self.norm(torch.cat([tower(x) for tower in self.towers], 1)).relu().mean((2, 3)))


class Mixture(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body, self.fc = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, num_classes)
        self.mixture = MixtureOfExperts(8, 8, experts=6, gate=SwitchGate(8, 6))

    def forward(self, x):
        return self.fc(self.mixture(self.body(x).mean((2, 3))))
"""

DATA, OWNERS = "{strategy: data}", "{strategy: sharded}"
HYBRID, ALL, TOWERS = "{strategy: hybrid, layers: ['^fc$']}", "{strategy: sharded, what: all}", "{strategy: towers}"
CASES = {
    1: {"Towers": (DATA, HYBRID, OWNERS, ALL)},
    2: {"Towers": (HYBRID, OWNERS, ALL, TOWERS, "{strategy: spatial}"), "Mixture": ("{strategy: experts}",)},
    3: {
        "Towers": (HYBRID, OWNERS, ALL, "{strategy: spatial, ranks: 3}"),
        "Mixture": ("{strategy: experts, ranks: 3}",),
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changed")
    packed_digits(folder)
    (folder / "net.py").write_text(NET)
    for network in ("Towers", "Mixture"):
        recipe = write_recipe(
            folder / f"{network}.yaml", model={"factory": f"net.py:{network}"},
            optimizer={"name": "adamw", "lr": 0.01}, epochs=1,
        )  # fmt: skip
        headway("train", recipe, "--run", folder / network)
    return folder


def read_state(run: Path) -> dict[str, torch.Tensor]:
    """Weights, statistics and optimizer state of the newest checkpoint, each whole."""
    found = Checkpoints(run / "checkpoints").newest()
    assert found is not None
    return {name: found.tensors[name] for name in found.tensors if not name.startswith("random/")}


@pytest.mark.check
@pytest.mark.parametrize("size", CASES)
def test_what_one_strategy_saved_another_loads_bit_for_bit(folder: Path, tmp_path: Path, size: int) -> None:
    """From one process to each strategy, and from each to the next one: what the last one saved is what the first one
    had."""
    asked = list[dict[str, object]]()
    for network, strategies in CASES[size].items():
        before = folder / network
        for number, strategy in enumerate(strategies):
            to = tmp_path / f"{network}-{number}"
            recipe = str(folder / f"{network}.yaml")
            overrides = [f"parallel={strategy}", "epochs=2"]
            asked.append(
                {"recipe": recipe, "overrides": overrides, "run": str(before), "to": str(to), "port": free_port()}
            )
            before = to
    script = Path(__file__).with_name("_loading_rank.py")
    environ = os.environ | {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": str(size)}
    environ |= {"OMP_NUM_THREADS": "1", "MASTER_PORT": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps(asked)],
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    assert [process.wait() for process in processes] == [0] * size
    for one in asked:
        network = Path(str(one["recipe"])).stem
        saved, loaded = read_state(folder / network), read_state(Path(str(one["to"])))
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(value, loaded[name]) for name, value in saved.items()), one["overrides"]


@pytest.mark.check
def test_a_run_goes_on_with_another_strategy_unless_it_computes_other_updates(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    headway("train", folder / "Towers.yaml", "--run", run)
    for epochs, strategy in enumerate((HYBRID, OWNERS, DATA), 2):
        headway("train", "--resume", run, f"parallel={strategy}", f"epochs={epochs}")
    assert json.loads((run / "summary.json").read_text())["step"] == 24
    # No run begins on too few processes.
    assert "2 processes share each image" in refused(
        "train", "--resume", run, "parallel={strategy: spatial}", "epochs=5", status=2
    )
    for strategy, why in (("local", "each process of local training"), ("async", "of older weights")):
        said = refused("train", "--resume", run, f"parallel={{strategy: {strategy}}}", "epochs=5", status=2)
        assert "cannot change parallel.strategy, because" in said
        assert why in said
