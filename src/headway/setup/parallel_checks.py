"""Refuses the keys of a recipe that its `parallel` strategy does not work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.parallel.parallel_recipe import (
    AsyncRecipe,
    DataParallelRecipe,
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


NOT_SUMMED = "gradients go to the processes that own them, and not through an all-reduce"
MASTERS = "it follows the fp32 masters, of which each process has a part"
GATHERED = "whether a weight is trained is settled when it is first gathered"

ADVICE = {
    "activation_checkpointing": ("layers that are computed again would exchange values again", "set it to false"),
    "batch_growth": ("rounds are counted in steps, whose share of an epoch would change", "remove it"),
    "callbacks": ("", "remove them"),
    "comm.algorithm": (NOT_SUMMED, "set it to auto"),
    "comm.batch_norm": ("not all processes exchange statistics in every step", "set it to per_rank"),
    "comm.bucket_mb": ("gradients travel block by block", "set it to auto"),
    "comm.on_rank_failure": ("the other processes cannot go on without a lost one", "set it to restart"),
    "comm.rails": (NOT_SUMMED, "set it to auto"),
    "comm.wire": ("gradients are sent as they are", "set it to fp32"),
    "compile": ("layers exchange values between processes while they run", "set it to false"),
    "compile: graphs": ("", "set it to true or false"),
    "compile with observe.activations": ("they are those of one more pass, of the network alone", "remove one of them"),
    "data.partition: independent": ("processes share samples, or take them as they are free", "set it to global"),
    "half_weights": ("", "set it to false"),
    "half_weights and model.ema": (MASTERS, "remove one of them"),
    "half_weights and optimizer.lookahead": (MASTERS, "remove one of them"),
    "micro_batch": ("processes exchange values of all samples of a step at once", "remove it"),
    "micro_batch: auto": ("processes would choose different sizes, and gather weights in unlike order", "set a number"),
    "model.batch_norm.ghost": ("statistics are of all images that processes share", "remove it"),
    "model.ema.every_steps": ("the common weights change once a round", "remove it"),
    "model.freeze_after": (GATHERED, "remove it, or use model.freeze"),
    "model.unfreeze_at": (GATHERED, "remove it"),
    "observe.activations": ("one process alone cannot run the network", "remove it"),
    "observe.layer_rates": ("it needs whole layers on one process", "set it to false"),
    "observe.layer_times": ("layers also wait for other processes, which is no time of theirs", "set it to false"),
    "observe.noise_scale": (
        "it needs the gradients of all weights for the samples of each process, and their sum",
        "set it to false",
    ),
    "optimizer.clip_norm": ("a process has the gradients of one tower alone", "remove it"),
    "optimizer.factory": ("nothing is known of its state", "set optimizer.name, for example to adamw"),
    "optimizer.factory with several servers": ("", "set parallel.servers to 1"),
    "optimizer.lookahead": ("both step the weights by the change of several steps", "remove it"),
    "optimizer.name": ("it needs whole weights, of which a process has a part", "take for example sgd, adamw or lamb"),
    "optimizer.name soap": (
        "a run that goes on with another number of processes begins with means of their states, and eigenvectors have"
        " none",
        "take muon",
    ),
    "optimizer.precision: bf16": (
        "its rounding is alike on all processes for whole weights that all of them step together",
        "set it to fp32",
    ),
    "precision": ("each process would decide for itself which steps its loss scale skips", "set it to bf16 or fp32"),
    "several interfaces in comm.interface": (NOT_SUMMED, "name one"),
}
"""Reasons why strategies do not work with a key, and ways out, by key, if need be with its value."""


def check_parallel(recipe: TrainRecipe) -> None:
    """Raises ValueError if a recipe has a key that its strategy does not work with."""
    is_async = isinstance(recipe.parallel, AsyncRecipe)
    if is_async:
        check_async(recipe)
    refused = _list_refused(recipe) | _list_refused_by_shared_steps(recipe)
    for key, is_set in refused.items():
        if is_set:
            which = " with what: all" if divides_weights(recipe.parallel) else ""
            why, fix = ADVICE.get(key) or ADVICE[key.partition(":")[0]]
            why = "its processes take no steps together" if is_async else why
            reason = f", as {why}" if why else ""
            raise ValueError(
                f"parallel.strategy {recipe.parallel.strategy}{which} does not work with {key}{reason}: {fix}, or take"
                " another strategy"
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


def _list_refused_by_shared_steps(recipe: TrainRecipe) -> dict[str, bool]:
    """Returns what only strategies allow whose ranks read and compute their own samples alone."""
    is_alone = isinstance(recipe.parallel, DataParallelRecipe | LocalRecipe)
    reads_alone = is_alone or isinstance(recipe.parallel, ShardedRecipe)
    return {
        "observe.layer_times": recipe.observe.layer_times and not is_alone,
        "data.partition: independent": recipe.data.partition == "independent" and not reads_alone,
    }


def _list_refused_by_spatial(recipe: TrainRecipe) -> dict[str, bool]:
    norm = recipe.model.batch_norm
    return {
        "compile": recipe.compile is not False,
        "half_weights": recipe.half_weights,
        "micro_batch": recipe.micro_batch is not None,
        "activation_checkpointing": recipe.activation_checkpointing is not False,
        "observe.noise_scale": recipe.observe.noise_scale,
        "observe.activations": bool(recipe.observe.activations),
        "model.batch_norm.ghost": norm is not None and norm.ghost is not None,
        "comm.batch_norm: sync": recipe.comm.batch_norm == "sync",
        "comm.on_rank_failure: continue": recipe.comm.on_rank_failure == "continue",
    }


def _list_refused_by_divided(recipe: TrainRecipe) -> dict[str, bool]:
    """Returns what all strategies refuse in which each rank steps parameters, or parts of them, that others lack."""
    name = recipe.optimizer.name
    return {
        "optimizer.factory" if name == "own" else f"optimizer.name: {name}": name not in DIVISIBLE,
        "precision: fp16": recipe.precision == "fp16",
        "optimizer.precision: bf16": recipe.optimizer.precision == "bf16",
        "half_weights": recipe.half_weights,
        "observe.noise_scale": recipe.observe.noise_scale,
        "observe.layer_rates": recipe.observe.layer_rates,
        "comm.on_rank_failure: continue": recipe.comm.on_rank_failure == "continue",
    }


def _list_refused_by_hybrid(recipe: TrainRecipe) -> dict[str, bool]:
    return _list_refused_by_divided(recipe) | {
        "micro_batch": recipe.micro_batch is not None,
        "compile with observe.activations": recipe.compile is not False and bool(recipe.observe.activations),
    }


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
    has_masters = recipe.half_weights and recipe.optimizer.precision == "fp32"
    return _list_refused_by_owners(recipe) | {
        "optimizer.factory": recipe.optimizer.name == "own",
        "half_weights and model.ema": has_masters and recipe.model.ema is not None,
        "half_weights and optimizer.lookahead": has_masters and recipe.optimizer.lookahead is not None,
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
            f"comm.wire: {recipe.comm.wire}": recipe.comm.wire != "fp32",
            "comm.bucket_mb": recipe.comm.bucket_mb != "auto",
            "micro_batch: auto": recipe.micro_batch == "auto",
            "compile": recipe.compile is not False,
            "model.freeze_after": bool(recipe.model.freeze_after),
            "model.unfreeze_at": bool(recipe.model.unfreeze_at),
            "observe.activations": bool(recipe.observe.activations),
        }
    )


def _list_refused_by_local(recipe: TrainRecipe) -> dict[str, bool]:
    ema = recipe.model.ema
    return {
        "observe.noise_scale": recipe.observe.noise_scale,
        "batch_growth": recipe.batch_growth is not None,
        "comm.batch_norm: sync": recipe.comm.batch_norm == "sync",
        "precision: fp16": recipe.precision == "fp16",
        "optimizer.factory": recipe.optimizer.name == "own",
        "optimizer.name soap": recipe.optimizer.name == "soap",
        "optimizer.precision: bf16": recipe.optimizer.precision == "bf16",
        "optimizer.lookahead": recipe.optimizer.lookahead is not None,
        "model.ema.every_steps": ema is not None and ema.every_steps != 1,
    }
