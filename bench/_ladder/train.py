"""A contestant that runs `headway train` without end: the Trainer's own loop with any recipe."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import torch

import headway
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer

BIG = 10**9
ENDLESS = ("data.eval=null", f"epochs={BIG}", f"checkpoint={{every_steps: {BIG}}}")
WARM_STEPS = 4
"""The first compiles, CUDA graphs are recorded in the second and third."""
PACE_S = 0.1
"""Between two looks at the clock, at each of which a GPU is waited for."""


def endless(recipe: Path, overrides: tuple[str, ...]) -> Trainer:
    """The Trainer of a recipe that neither evaluates nor saves nor ends; its run folder is a temporary one."""
    setup = build_setup(read_recipe(recipe, (*overrides, *ENDLESS), TrainRecipe))
    return Trainer(setup, RunFolder.create(Path(tempfile.mkdtemp()) / "run"), SilentDisplay())


def batches(trainer: Trainer) -> Iterator[int]:
    """Trains for ever; every PACE_S or so the number of images that were trained on."""
    on_gpu = trainer.setup.device.type == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
    trainer.run(WARM_STEPS)
    wait()
    steps = 1
    while True:
        before, started = trainer.position, perf_counter()
        trainer.run(steps)
        wait()
        if perf_counter() - started < PACE_S / 2:
            steps *= 2
        yield trainer.position - before


def waiting(trainer: Trainer) -> float:
    """Share of its time in which the loop waited for batches."""
    return trainer.clock.seconds.get("wait", 0.0) / trainer.clock.total_seconds()


if __name__ == "__main__":
    from bench._peers.serve import argument, serve  # it takes stdout for itself

    asked = argument()
    trainer = endless(Path(asked["recipe"]), tuple(asked["overrides"]))
    serve(
        batches(trainer),
        version=f"headway {headway.__version__}, torch {torch.__version__}",
        kernel="none",
        drain=1,
        facts=lambda: {"waiting": waiting(trainer)},
    )
