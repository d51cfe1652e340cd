"""Refuses the keys of a recipe that its `parallel` strategy does not work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.parallel.parallel_recipe import (
    AsyncRecipe,
    ExpertsRecipe,
    HybridRecipe,
    LocalRecipe,
    ShardedRecipe,
    SpatialRecipe,
    TowersRecipe,
    divides_weights,
)
from headway.setup.async_checks import check_async, list_refused_by_async

if TYPE_CHECKING:
    from headway.setup.recipe import TrainRecipe

DIVISIBLE = frozenset({"sgd", "nag", "adam", "adamw", "signum", "ftml", "rmsprop_sgd", "lars", "lamb", "lbsgd"})
"""Optimizers that treat each parameter alone, keep nothing of it but tensors of its shape and counts of steps, and need
no more of a whole parameter than norms."""


def check_parallel(recipe: TrainRecipe) -> None:
    """Raises ValueError if a recipe has a key that its strategy does not work with."""
    if isinstance(recipe.parallel, AsyncRecipe):
        check_async(recipe)
    for key, is_set in _list_refused(recipe).items():
        if is_set:
            which = " with what: all" if divides_weights(recipe.parallel) else ""
            raise ValueError(
                f"parallel.strategy {recipe.parallel.strategy}{which} does not work with {key}: remove one of them"
            )


def _list_refused(recipe: TrainRecipe) -> dict[str, bool]:
    """Returns, by key, if a recipe sets what its strategy refuses."""
    if isinstance(recipe.parallel, SpatialRecipe):
        return _list_refused_by_spatial(recipe)
    if isinstance(recipe.parallel, HybridRecipe):
        return _list_refused_by_hybrid(recipe)
    if isinstance(recipe.parallel, AsyncRecipe):
        return list_refused_by_async(recipe, recipe.parallel.servers)
    if isinstance(recipe.parallel, TowersRecipe):
        return _list_refused_by_towers(recipe)
    if isinstance(recipe.parallel, ExpertsRecipe):
        return _list_refused_by_experts(recipe)
    if isinstance(recipe.parallel, ShardedRecipe):
        return _list_refused_by_sharded(recipe)
    if isinstance(recipe.parallel, LocalRecipe):
        return _list_refused_by_local(recipe)
    return {}


def _list_refused_by_spatial(recipe: TrainRecipe) -> dict[str, bool]:
    norm = recipe.model.batch_norm
    return {
        "compile": recipe.compile is not False,
        "half_weights": recipe.half_weights,
        "micro_batch": recipe.micro_batch is not None,
        "activation_checkpointing": recipe.activation_checkpointing is not False,
        "observe.noise_scale": recipe.observe.noise_scale,
        "model.batch_norm.ghost": norm is not None and norm.ghost is not None,
        "comm.batch_norm: sync": recipe.comm.batch_norm == "sync",
        "comm.on_rank_failure: continue": recipe.comm.on_rank_failure == "continue",
    }


def _list_refused_by_divided(recipe: TrainRecipe) -> dict[str, bool]:
    """Returns what all strategies refuse in which each rank steps parameters, or parts of them, that others lack."""
    return {
        f"optimizer.name: {recipe.optimizer.name}": recipe.optimizer.name not in DIVISIBLE,
        # Whether a step is skipped would be decided by each rank for its own gradients.
        "precision: fp16": recipe.precision == "fp16",
        "half_weights": recipe.half_weights,
        "observe.noise_scale": recipe.observe.noise_scale,
        "observe.layer_rates": recipe.observe.layer_rates,
        "comm.on_rank_failure: continue": recipe.comm.on_rank_failure == "continue",
    }


def _list_refused_by_hybrid(recipe: TrainRecipe) -> dict[str, bool]:
    return _list_refused_by_divided(recipe) | {"micro_batch": recipe.micro_batch is not None}


def _list_refused_by_towers(recipe: TrainRecipe) -> dict[str, bool]:
    return _list_refused_by_divided(recipe) | {
        "optimizer.clip_norm": recipe.optimizer.clip_norm is not None,
        "compile": recipe.compile is not False,
        "micro_batch": recipe.micro_batch is not None,
        "activation_checkpointing": recipe.activation_checkpointing is not False,
        "observe.activations": bool(recipe.observe.activations),
        "comm.batch_norm: sync": recipe.comm.batch_norm == "sync",
    }


def _list_refused_by_experts(recipe: TrainRecipe) -> dict[str, bool]:
    return _list_refused_by_divided(recipe) | {"compile": recipe.compile is not False}


def _list_refused_by_sharded(recipe: TrainRecipe) -> dict[str, bool]:
    if divides_weights(recipe.parallel):
        return _list_refused_by_full_shards(recipe)
    return _list_refused_by_owners(recipe) | {
        # Nothing is known of its state, which may belong to several parameters.
        "optimizer.factory": recipe.optimizer.name == "own",
        # The averages follow the fp32 masters, of which each process has a part.
        "half_weights and model.ema": recipe.half_weights and recipe.model.ema is not None,
        "half_weights and optimizer.lookahead": recipe.half_weights and recipe.optimizer.lookahead is not None,
    }


def _list_refused_by_owners(recipe: TrainRecipe) -> dict[str, bool]:
    """Returns what both kinds of `sharded` refuse: gradients go to their owners, and not through an all-reduce."""
    comm = recipe.comm
    return {
        f"comm.algorithm: {comm.algorithm}": comm.algorithm != "auto",
        "comm.rails": comm.rails != "auto",
        "several interfaces in comm.interface": isinstance(comm.interface, tuple) and len(comm.interface) > 1,
        "comm.on_rank_failure: continue": comm.on_rank_failure == "continue",
    }


def _list_refused_by_full_shards(recipe: TrainRecipe) -> dict[str, bool]:
    return (
        _list_refused_by_divided(recipe)
        | _list_refused_by_owners(recipe)
        | {
            # FSDP2 sends gradients as they are, block by block.
            f"comm.wire: {recipe.comm.wire}": recipe.comm.wire != "fp32",
            "comm.bucket_mb": recipe.comm.bucket_mb != "auto",
            # Each process would choose its own, and all have to gather weights equally often.
            "micro_batch: auto": recipe.micro_batch == "auto",
            "compile": recipe.compile is not False,
            # FSDP2 takes from a parameter when it is first gathered if it is trained.
            "model.freeze_after": bool(recipe.model.freeze_after),
            "model.unfreeze_at": bool(recipe.model.unfreeze_at),
            # One process would run the network while the others do not.
            "observe.activations": bool(recipe.observe.activations),
        }
    )


def _list_refused_by_local(recipe: TrainRecipe) -> dict[str, bool]:
    ema = recipe.model.ema
    return {
        # The noise is measured where gradients are summed.
        "observe.noise_scale": recipe.observe.noise_scale,
        # Rounds are counted in steps, which would change their share of an epoch.
        "batch_growth": recipe.batch_growth is not None,
        # The statistics of all processes would be needed in every step.
        "comm.batch_norm: sync": recipe.comm.batch_norm == "sync",
        # Each process would have a loss scale of its own, and a checkpoint has room for one.
        "precision: fp16": recipe.precision == "fp16",
        # What such an optimizer keeps besides tensors may differ between the processes.
        "optimizer.factory": recipe.optimizer.name == "own",
        # Both would step the weights by the change of several steps.
        "optimizer.lookahead": recipe.optimizer.lookahead is not None,
        # The average is that of the common weights, which change once a round.
        "model.ema.every_steps": ema is not None and ema.every_steps != 1,
    }
