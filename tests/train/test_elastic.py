"""Ranks from one generation to the next: what is known stays known."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from tests._support import packed_digits, write_recipe

from headway.comm.coordinator import Coordinator, Event, Formed
from headway.comm.member import Member
from headway.core.launched import LOOPBACK, Launched
from headway.core.recipe import load
from headway.core.run import Run
from headway.core.world import store_at
from headway.train.elastic import Ranks
from headway.train.progress import Lines
from headway.train.recipe import TrainRecipe
from headway.train.setup import set_up
from headway.train.trainer import Trainer

IDLE = """
from torch import nn

def net(num_classes):
    made = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
    made.register_parameter("idle", nn.Parameter(made[1].bias.detach().clone()))
    return made
"""


def test_what_is_said_of_parameters_without_a_gradient_is_said_in_one_generation(tmp_path: Path) -> None:
    packed_digits(tmp_path)
    write_recipe(tmp_path / "recipe.yaml", batch=12, epochs=4)
    (tmp_path / "idle.py").write_text(IDLE)
    loaded = load(tmp_path / "recipe.yaml", ("model.factory=idle.py:net",), TrainRecipe)
    store: Any = store_at(LOOPBACK, 0, serves=True)
    events: list[Event] = []
    said: list[str] = []
    coordinator = Coordinator([(0, 0)], token="x", timeout_s=20, store_port=store.port, tell=events.append)
    with closing(coordinator):
        member = Member(LOOPBACK, coordinator.port, token="x", worker="0.0.0")
        with Ranks(loaded.recipe.comm, Launched(0, 1, 0, 1, None, None, "headway"), member, said.append) as ranks:
            setup = set_up(loaded, say=said.append, ranks=ranks)
            with closing(Trainer(setup, Run.create(tmp_path / "run"), Lines(), ranks)) as trainer:
                for _ in range(3):
                    trainer.meet()
                    trainer.run(2)
    assert [event.number for event in events if isinstance(event, Formed)] == [0, 1, 2]
    found = [text for text in said if "gradient" in text]
    assert found == ["Without a gradient in the first step, counted as zero: idle."]
