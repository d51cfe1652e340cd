"""What bench.batch_effects stands on: its recipes, and claims from kept runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench import batch_effects
from bench._accuracy.results import Results
from bench.batch_effects import ARMS, BATCHES, GROWTH_SEEDS, SAMPLES, Effects, build_recipe, measure_effects

from headway.core.recipe import read_recipe
from headway.setup.recipe import TrainRecipe


@pytest.mark.parametrize("arm", [*ARMS, ""])
def test_every_arm_is_a_recipe(arm: str, tmp_path: Path) -> None:
    study = "growth" if arm else "epochs"
    tree = build_recipe({"study": study, "arm": arm, "batch": 128, "lr": 0.2, "seed": 3}, "packed")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    recipe = read_recipe(tmp_path / "recipe.yaml", (), TrainRecipe).recipe
    assert (recipe.seed, recipe.optimizer.lr) == (3, 0.2)
    assert (recipe.batch_growth is not None) == (arm == "grow")
    assert recipe.stop_at == (None if arm else {"accuracy": 0.97})


def test_claims_of_kept_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_effects, "pack_digits", lambda folder: folder)

    def train(tree: dict[str, Any]) -> dict[str, Any]:
        """Growth is as accurate as decay, and better than neither; epochs grow with the root of the batch."""
        batch = tree["batch"]
        if "stop_at" not in tree:
            changes = "schedule" in tree or "batch_growth" in tree
            steps = 270 if "batch_growth" in tree else 360
            return {"accuracy": 0.98 if changes else 0.97, "steps": steps, "diverged": False, "evaluations": []}
        steps = round(90 * (32 / batch) ** 0.5 * (1 + abs(tree["optimizer"]["lr"] / (0.1 * (batch / 32) ** 0.5) - 1)))
        return {"accuracy": 0.97, "steps": steps, "diverged": False, "evaluations": [[steps, 0.97]]}

    results, options = Results(tmp_path / "kept.jsonl"), argparse.Namespace(minutes=None)
    claims = {claim.name: claim for claim in measure_effects(tmp_path, options, results, train)}
    assert claims["growth_gap"].value == pytest.approx(0)
    assert claims["growth_gain"].value == pytest.approx(1)
    assert claims["growth_steps"].value == pytest.approx(0.75)
    assert claims["epochs_ratio_512"].value == pytest.approx(4, rel=0.05)
    kept = results.all()
    assert len([one for one in kept if one["study"] == "growth"]) == len(ARMS) * len(GROWTH_SEEDS)
    assert {one["batch"] for one in kept if one["study"] == "epochs"} == set(BATCHES)
    assert SAMPLES == 1438
    # Nothing is done twice, and a run of other settings does not count.
    assert measure_effects(tmp_path, options, results, pytest.fail) == list(claims.values())
    assert Effects([{**one, "settings": "other"} for one in kept]).build_claims() == []
