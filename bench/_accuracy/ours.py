"""Headway's arm: a recipe through the Trainer, as `headway train` runs it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench._arms import ROOT
from headway.core.messages import show_messages
from headway.core.recipe import LoadedRecipe, read_recipe
from headway.core.run_folder import RunFolder
from headway.data.resolution import compute_progressive_size
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.setup.train_setup import TrainSetup
from headway.training.evaluate import compute_outputs, evaluate
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer

RECIPE = ROOT / "recipes/cifar10-fast.yaml"
NOT_TRAINING = ("evaluate", "checkpoint")


def recipe(packed: Path, overrides: Sequence[str] = ()) -> LoadedRecipe[TrainRecipe]:
    """The recipe on this data, evaluated once at its end."""
    places = [f"data.train={packed}/train", f"data.eval={packed}/eval"]
    return read_recipe(RECIPE, [*places, *overrides], TrainRecipe)


def taken_from(precision: str, compiled: bool, device: str) -> list[str]:
    """The port's setting as overrides: on a GPU its compiled network is tuned, and its fp16 is that of the weights."""
    on_gpu = device == "cuda"
    compile_ = ("max-autotune" if on_gpu else "true") if compiled else "false"
    half = on_gpu and precision == "fp16"
    return [f"precision={precision}", f"compile={compile_}", f"half_weights={str(half).lower()}"]


def train(packed: Path, *, seed: int, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """One run. `seconds`: of training alone; `tta_seconds`: of the evaluation by views, and of writing the best
    weights."""
    loaded = recipe(packed, [f"seed={seed}", *overrides])
    loaded = loaded.resolve("evaluate.every_epochs", loaded.recipe.epochs, "once, at the end")
    show_messages()
    setup = build_setup(loaded)
    warm_up(setup)
    with closing(setup.inputs), closing(Trainer(setup, RunFolder.create(folder), SilentDisplay())) as trainer:
        trainer.run()
        stages = trainer.clock.seconds
        assert trainer.metrics is not None
        assert setup.eval is not None
        off = {"flip": False, "shift": 0, "views_below": None}
        as_it_is = setup.loaded.resolve_all({f"evaluate.{key}": (value, "no views") for key, value in off.items()})
        with trainer.use_averages():
            plain = evaluate(replace(setup, loaded=as_it_is), setup.eval)
        return {
            "seconds": sum(taken for stage, taken in stages.items() if stage not in NOT_TRAINING),
            "tta_seconds": stages["evaluate"],
            "accuracy": plain.metrics["accuracy"],
            "accuracy_tta": trainer.metrics["accuracy"],
            "steps": trainer.step,
            "how": how(setup.recipe),
        }


def how(recipe: TrainRecipe) -> str:
    """Precision and compile setting, as the port says its own."""
    compiled = {False: "eager", True: "compiled"}.get(recipe.compile, f"compiled, {recipe.compile}")  # type: ignore[call-overload]
    return f"{recipe.precision}{' weights' if recipe.half_weights else ''}, {compiled}"


def kinds_of_step(
    recipe: TrainRecipe, full: tuple[int, int], steps: int, samples: int
) -> list[tuple[tuple[int, int], tuple[str, ...]]]:
    """(size of the images, what is frozen) of every kind of step that training has, in their order. A whole epoch has
    one size; what is frozen changes within it.

    Args:
        samples: of an epoch.
    """
    out: dict[tuple[tuple[int, int], tuple[str, ...]], None] = {}
    for position in range(0, steps * recipe.batch, recipe.batch):
        size = full
        if recipe.data.progressive is not None:
            size = compute_progressive_size(recipe.data.progressive, full, position // samples)
        frozen = (part.match for part in recipe.model.freeze_after if part.after_epochs <= position / samples)
        out[size, tuple(frozen)] = None
    return list(out)


def warm_up(setup: TrainSetup) -> None:
    """Forward and backward at every size that training has, and an evaluation, on data that mean nothing; without
    effect: what torch.compile makes, or a convolution library, is there when the clock starts."""
    recipe = setup.recipe
    before = {name: value.clone() for name, value in setup.model.state_dict().items()}
    parameters = {name: value for name, value in setup.model.named_parameters() if value.requires_grad}
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    for (height, width), frozen in kinds_of_step(recipe, setup.size, setup.steps, setup.epoch):
        for name, parameter in parameters.items():
            parameter.requires_grad_(not any(re.search(match, name) for match in frozen))
        images = torch.randn(recipe.batch, setup.channels, height, width, device=setup.device)
        with setup.precision.autocast():
            outputs = setup.forward(images.to(memory_format=layout))
        outputs.float().square().mean().backward()
        setup.model.zero_grad(set_to_none=True)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    setup.model.eval()
    with torch.no_grad():
        samples = min(recipe.evaluate.batch or recipe.batch, len(setup.eval or ()))
        images = torch.randn(samples, setup.channels, *setup.size, device=setup.device).to(memory_format=layout)
        compute_outputs(setup, images)
        # A compiled network meets the other batch sizes of unsure images.
        if recipe.evaluate.views_below is not None:
            compute_outputs(setup, images[: samples // 2])
    setup.model.train()
    setup.model.load_state_dict(before)
