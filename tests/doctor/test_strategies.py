"""The doctor examines every strategy of `parallel`, alone and on two ranks."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from tests._support import packed_digits, write_recipe

from headway.core.profile import Profile
from headway.doctor.budget import Budget
from headway.doctor.examination import examine_job
from headway.doctor.measurement_job import MeasurementJob
from headway.launch.hosts import parse_hosts
from headway.launch.launcher import launch
from headway.training.runs import load_recipe

NET = r"""
import torch
from torch import nn

from headway.model import MixtureOfExperts, SwitchGate


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.towers = nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(1, 4, 3, padding=1)])
        self.mixture = MixtureOfExperts(8, 8, experts=2, gate=SwitchGate(8, 2))
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        x = torch.cat([tower(x) for tower in self.towers], 1)
        return self.fc(self.mixture(x.mean((2, 3))))


class Plain(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, num_classes)

    def forward(self, x):
        return self.fc(self.conv(x).relu().mean((2, 3)))
"""

SYNTHETIC = "data={train: synthetic, synthetic: {size: [8, 8], channels: 1, classes: 10, samples: 400}}"
# Two ranks take seconds, so only those strategies run on them whose ranks do not sum the same gradients in each step.
ALONE = (
    "{strategy: spatial}",
    "{strategy: hybrid, layers: ['^fc$']}",
    "{strategy: experts}",
    "{strategy: sharded}",
    "{strategy: sharded, what: all}",
    "{strategy: async}",
    "{strategy: local, every_steps: 2}",
)
ON_TWO_RANKS = ("{strategy: towers}", "{strategy: async}", "{strategy: local, every_steps: 2}")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strategies")
    packed_digits(folder, mode="seekable")
    (folder / "net.py").write_text(NET)
    return write_recipe(folder / "plain.yaml", model={"factory": "net.py:Net"}, batch=20)


def override(strategy: str) -> list[str]:
    network = "Net" if "towers" in strategy or "experts" in strategy else "Plain"
    return [f"parallel={strategy}", f"model.factory=net.py:{network}"]


@pytest.mark.check
@pytest.mark.parametrize("strategy", ALONE)
def test_alone(recipe: Path, strategy: str) -> None:
    short = Budget(each=0.05, passes=0.05, side=0.02, whole=0.05, tries=0.0, wall=1.0)
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, [*override(strategy), SYNTHETIC]))) as job:
        found = examine_job(job, short, quick=True)
    assert [(run.name, run.steps > 0) for run in found.runs if run.name == "warm"] == [("warm", True)]
    # The user's own value, not that of the measurement.
    assert job.loaded.recipe.parallel == load_recipe(recipe, override(strategy)).recipe.parallel


@pytest.mark.check
@pytest.mark.parametrize("strategy", ON_TWO_RANKS)
def test_on_two_ranks(recipe: Path, tmp_path: Path, strategy: str) -> None:
    asked = {"recipe": str(recipe), "overrides": override(strategy), "quick": False, "folder": str(tmp_path)}
    command = [str(Path(__file__).parent / "_brief_rank.py"), json.dumps(asked)]
    assert launch(command, parse_hosts(2, None), environ={"OMP_NUM_THREADS": "1"}, respawn=False) == 0
    found = Profile.read(tmp_path / "profile.json")
    assert found.ranks == 2
    # Each process of `async` takes whole batches.
    assert found.batch == (20 if "async" in strategy else 10)
