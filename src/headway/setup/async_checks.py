"""Refuses the keys of a recipe that asynchronous training does not work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.data.batch_plan import PerDeviceBatchRecipe

if TYPE_CHECKING:
    from headway.setup.recipe import TrainRecipe

FOR_LARGE_BATCHES = ("lars", "lamb", "lbsgd", "muon", "soap")


def check_async(recipe: TrainRecipe) -> None:
    """Raises ValueError if a key asks asynchronous training for what it cannot do, with the way out."""
    if (name := recipe.optimizer.name) in FOR_LARGE_BATCHES:
        raise ValueError(
            f"optimizer {name} is for large batches that all processes share, and parallel.strategy async applies the"
            " batch of each process alone: take sgd or adamw, or another strategy"
        )
    if isinstance(recipe.batch, PerDeviceBatchRecipe):
        raise ValueError(
            "batch.per_device is multiplied by the number of processes, and with parallel.strategy async each process"
            f" takes whole batches: write batch: {recipe.batch.per_device}"
        )
    if recipe.precision == "fp16":
        raise ValueError(
            "fp16 scales the loss, and with parallel.strategy async no process knows which updates are skipped: set"
            " precision to bf16 or fp32"
        )


def list_refused_by_async(recipe: TrainRecipe, servers: int) -> dict[str, bool]:
    """Returns, by key, if a recipe sets what asynchronous training with so many servers refuses."""
    return {
        "batch_growth": recipe.batch_growth is not None,
        "model.freeze_after": bool(recipe.model.freeze_after),
        "model.unfreeze_at": bool(recipe.model.unfreeze_at),
        "optimizer.lookahead": recipe.optimizer.lookahead is not None,
        "half_weights": recipe.half_weights,
        "optimizer.precision: bf16": recipe.optimizer.precision == "bf16",
        "compile: graphs": recipe.compile == "graphs",
        # Gradients go to servers, and not through an all-reduce.
        f"comm.algorithm: {recipe.comm.algorithm}": recipe.comm.algorithm != "auto",
        "comm.rails": recipe.comm.rails != "auto",
        "comm.bucket_mb": recipe.comm.bucket_mb != "auto",
        "several interfaces in comm.interface": isinstance(recipe.comm.interface, tuple)
        and len(recipe.comm.interface) > 1,
        f"comm.wire: {recipe.comm.wire}": recipe.comm.wire != "fp32",
        "comm.batch_norm: sync": recipe.comm.batch_norm == "sync",
        "observe.noise_scale": recipe.observe.noise_scale,
        "observe.layer_rates": recipe.observe.layer_rates,
        "observe.activations": bool(recipe.observe.activations),
        "optimizer.factory with several servers": recipe.optimizer.name == "own" and servers > 1,
        "callbacks": bool(recipe.callbacks),
    }
