"""`headway train` with a network that does nothing: the Trainer's loop over the same pack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headway
from bench._peers.serve import argument, serve
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer

BIG = 10**9
STEPS = 4


class Nothing(nn.Module):
    """Gives the same numbers for every image."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.bias.expand(len(images), -1)


def batches(asked: dict[str, Any]) -> Iterator[int]:
    folder = Path(asked["folder"]) / f"train-{asked['normalise']}"
    folder.mkdir()
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"data: {{train: {asked['pack']}, size: 224, threads: {asked['threads']}, crop: random}}\n"
        f"augment: {{flip: true, normalise: {str(asked['normalise']).lower()}}}\n"
        f"model: {{factory: 'bench._peers.train:Nothing'}}\n"
        f"optimizer: {{name: sgd, lr: 0.001}}\n"
        f"batch: {asked['batch']}\nepochs: {BIG}\nprecision: fp32\ncheckpoint: {{every_steps: {BIG}}}\n"
    )
    trainer = Trainer(
        build_setup(read_recipe(recipe, (), TrainRecipe)), RunFolder.create(folder / "run"), SilentDisplay()
    )
    while True:
        trainer.run(STEPS)
        yield STEPS * asked["batch"]


if __name__ == "__main__":
    asked = argument()
    version = f"headway {headway.__version__}, torch {torch.__version__}"
    serve(batches(asked), version=version, kernel=asked["kernel"], drain=2)
