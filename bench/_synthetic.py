"""A Trainer that runs without end on random images on the device, for benches that leave out the input."""

from __future__ import annotations

import os
from pathlib import Path

from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.launch.ranks import Ranks
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.setup.train_setup import TrainSetup
from headway.training.display import Display
from headway.training.trainer import Trainer

BIG = 10**9


def setup(
    factory: str,
    size: tuple[int, int],
    batch: int,
    folder: Path,
    *overrides: str,
    ranks: Ranks | None = None,
) -> TrainSetup:
    """Of a network by its import path: momentum SGD, a cosine schedule, fp32, and what the overrides say."""
    recipe = folder / f"recipe-{os.getpid()}.yaml"
    recipe.write_text(
        f"data: {{train: synthetic, synthetic: {{size: [{size[0]}, {size[1]}]}}}}\n"
        f"model: {{factory: '{factory}'}}\n"
        f"optimizer: {{name: sgd, lr: 0.001, momentum: 0.9}}\nschedule: {{name: cosine}}\n"
        f"batch: {batch}\nepochs: {BIG}\nprecision: fp32\ncheckpoint: {{every_steps: {BIG}}}\n"
    )
    return build_setup(read_recipe(recipe, overrides, TrainRecipe), ranks=ranks)


def trainer(found: TrainSetup, folder: Path, display: Display, ranks: Ranks | None = None) -> Trainer:
    """Of several ranks rank 0 makes the run's folder."""
    run = RunFolder.create(folder / "run") if ranks is None or ranks.is_lead else RunFolder(folder / "run")
    return Trainer(found, run, display, ranks)
