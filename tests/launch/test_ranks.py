"""Ranks keep their measurements and messages from one generation to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from tests._support import collect_messages, packed_digits, write_recipe

from headway.comm.coordinator import Coordinator, CoordinatorEvent, GenerationFormed
from headway.comm.coordinator_client import CoordinatorClient
from headway.core.key_value_store import StoreServer
from headway.core.launcher_environment import LOOPBACK, LaunchedProcess
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.launch.ranks import Ranks
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training.progress import LogLines
from headway.training.trainer import Trainer

IDLE = """
from torch import nn

def net(num_classes):
    made = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
    made.register_parameter("idle", nn.Parameter(made[1].bias.detach().clone()))
    return made
"""


@contextmanager
def run_single_member(tmp_path: Path, events: list[CoordinatorEvent], *overrides: str) -> Iterator[Trainer]:
    """Runs the only process of a launcher: 15 steps per epoch, and a new generation at each `meet`."""
    packed_digits(tmp_path)
    write_recipe(tmp_path / "recipe.yaml", batch=12, epochs=4)
    (tmp_path / "idle.py").write_text(IDLE)
    loaded = read_recipe(tmp_path / "recipe.yaml", ("model.factory=idle.py:net", *overrides), TrainRecipe)
    store = StoreServer(b"x", LOOPBACK)
    coordinator = Coordinator([(0, 0)], secret=b"x", timeout_s=20, store_port=store.port, on_event=events.append)
    with closing(store), closing(coordinator):
        member = CoordinatorClient(LOOPBACK, coordinator.port, secret="x", worker="0.0.0")
        with Ranks(loaded.recipe.comm, LaunchedProcess(0, 1, 0, 1, None, None, "headway"), member) as ranks:
            setup = build_setup(loaded, ranks=ranks)
            with closing(Trainer(setup, RunFolder.create(tmp_path / "run"), LogLines(), ranks)) as trainer:
                yield trainer


def test_parameters_without_a_gradient_are_named_in_one_generation(tmp_path: Path) -> None:
    events: list[CoordinatorEvent] = []
    with collect_messages() as said, run_single_member(tmp_path, events) as trainer:
        for _ in range(3):
            trainer.recovery.meet()
            trainer.run(2)
    assert [event.number for event in events if isinstance(event, GenerationFormed)] == [0, 1, 2]
    found = [text for text in said if "gradient" in text]
    assert found == ["Without a gradient in the first step, counted as zero: idle."]


def test_frozen_parameters_stay_frozen_in_the_next_generation(tmp_path: Path) -> None:
    """A newcomer has frozen nothing yet, and all ranks need the same buckets."""
    frozen = "model.freeze_after=[{match: '^1.weight', after_epochs: 0.1}]"
    with run_single_member(tmp_path, [], frozen) as trainer:
        weight = trainer.setup.model.get_parameter("1.weight")
        begun, seen = weight.detach().clone(), []
        for _ in range(3):
            trainer.recovery.meet()
            assert trainer.ranks is not None
            names = [name for bucket in trainer.ranks.reducer.buckets for name in bucket.names]
            assert sorted(names) == ["1.bias", "1.weight", "idle"]
            trainer.run(2)
            seen.append(weight.detach().clone())
            trainer.run(1)
    assert not torch.equal(seen[0], begun)
    assert all(torch.equal(one, seen[0]) for one in seen)
