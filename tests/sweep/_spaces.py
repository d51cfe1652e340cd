"""What the tests of the search space share: spaces and base recipes from mappings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from headway.core.recipe import LoadedRecipe, read_recipe
from headway.setup.recipe import TrainRecipe
from headway.sweep.space import Space
from headway.sweep.space_recipe import SpaceRecipe

BASE = """
data: synthetic
model: {factory: "headway.model:cifar_net"}
optimizer: {name: sgd, lr: 0.1, momentum: 0.8, weight_decay: 0.0005}
batch: 64
epochs: 4
"""

OPTIMIZERS: dict[str, Any] = {
    "optimizer.name": {"choice": ["sgd", "adamw", "lars", "lamb", "muon"]},
    "optimizer.lr": {"log": [0.001, 1]},
    "optimizer.momentum": {"linear": [0.8, 0.99], "when": {"optimizer.name": ["sgd", "lars", "muon"]}},
    "optimizer.trust": {"log": [0.001, 0.1], "when": {"optimizer.name": "lars"}},
    "model.args.width": {"log_integer": [8, 64]},
}


def build_space(parameters: dict[str, Any], method: str = "random") -> Space:
    # Not by `build_recipe`, which sorts the keys.
    return Space(SpaceRecipe.model_validate({"method": method, "parameters": parameters}))


def read_base(folder: Path, text: str = BASE, *overrides: str) -> LoadedRecipe[TrainRecipe]:
    path = folder / "base.yaml"
    path.write_text(text, encoding="utf-8")
    return read_recipe(path, overrides, TrainRecipe)


@st.composite
def conditional_choices(draw: st.DrawFn) -> dict[str, Any]:
    """Up to five parameters with up to three values each, some of which depend on earlier ones."""
    parameters: dict[str, Any] = {}
    # In an order that is not that of their names.
    for name in draw(st.lists(st.sampled_from("abcde"), min_size=1, unique=True)):
        values = list(range(draw(st.integers(1, 3))))
        when = {}
        for other in draw(
            st.lists(st.sampled_from(sorted(parameters)), max_size=2, unique=True) if parameters else st.just([])
        ):
            when[other] = draw(st.lists(st.sampled_from(parameters[other]["choice"]), min_size=1, unique=True))
        parameters[f"model.args.{name}"] = {"choice": values, "when": when}
    return parameters
