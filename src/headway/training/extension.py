"""Changes to the recipe of a run that goes on: more epochs, other goals, other logs. All else is refused with a reason.

Every rank computes the changed recipe from the run folder and the overrides, and the lead writes it. Doing so twice
gives the same recipe, so it does not matter which rank reads before the lead has written.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway.checkpoint.checkpoints import Checkpoints
from headway.checkpoint.locations import parse_step
from headway.core.errors import UsageError
from headway.core.files import write_atomically
from headway.core.interface import choose_wording
from headway.core.recipe import LoadedRecipe, format_value, read_recipe
from headway.core.run_folder import RunFolder
from headway.optim import Schedule
from headway.optim.batch_scaling import require_number
from headway.setup.checks import check_places
from headway.setup.rates import plan_steps
from headway.setup.recipe import MACHINE_KEYS, TrainRecipe

LOG = logging.getLogger("headway.training")

CHANGEABLE = (
    *("epochs", "stop_at", "early_stopping", "callbacks", "evaluate", "observe", "log_every_steps", "sinks"),
    *("checkpoint.every_epochs", "checkpoint.every_steps", "checkpoint.keep", "checkpoint.asynchronous"),
    *("data.cache_folder", "data.cache_gb", "data.threads", "data.pin", "data.prefetch_batches"),
    *("data.transform_workers", "data.worker_kind", "data.verify", "data.max_bad_share"),
    *("comm.timeout_s", "comm.stall_s", "comm.on_rank_failure"),
    *MACHINE_KEYS,
)
"""Keys that may change when a run goes on, with all keys below them."""
RESHARED = frozenset({"data", "spatial", "hybrid", "towers", "experts", "sharded"})
"""Values of `parallel.strategy` that may replace each other, with their options: the sums of gradients are the same up
to rounding, and checkpoints hold the same tensors."""
STRATEGY_REASONS = {
    "local": "each process of local training has weights, or an optimizer's state, of its own",
    "async": "the updates of asynchronous training are of older weights, which no other strategy computes",
}
"""Why a run may not change to a strategy, nor from it to another one."""
REASONS = {
    "name": "the run folder has its name already",
    "seed": "the order of the samples and all random choices follow from it",
    "data": "the steps after the change would see other images",
    "augment": "the steps after the change would see other images",
    "transform": "the steps after the change would see other images",
    "transform_on": "the steps after the change would see other images",
    "model": "the checkpoint holds the weights of this network",
    "task": "the losses and metrics before and after the change could not be compared",
    "optimizer": "the checkpoint holds the state of this optimizer, and the steps done were made with these values",
    "schedule": "the steps done were made with this schedule",
    "batch": "the step at which the run stands would begin at another sample",
    "batch_growth": "the step at which the run stands would begin at another sample",
    "checkpoint": "the checkpoints of the run lie there",
    "log_ids": "the file would lack the samples before the change",
}
"""Why a key may not change, by its first part."""
OTHER_REASON = "the steps before and after the change would be computed in different ways"


def extend_recipe(
    run: RunFolder, loaded: LoadedRecipe[TrainRecipe], overrides: Sequence[str], *, ranks: int, writes: bool
) -> LoadedRecipe[TrainRecipe]:
    """Returns the recipe of a run with overrides, and records them in the run folder.

    Args:
        loaded: the recipe of the run.
        overrides: `key=value`.
        ranks: number of processes that go on.
        writes: this process writes the run folder.

    Raises:
        RecipeError: an override is wrong. UsageError: a key may not change, the run is past its new end, or there are
            too few processes.
    """
    before = dict(loaded.list_leaves())
    recipe = read_recipe(run.recipe_path, overrides, TrainRecipe).recipe
    after = dict(replace(loaded, recipe=recipe).list_leaves())
    # `auto` stands again for the values that are resolved on each machine.
    given = {override.partition("=")[0] for override in overrides}
    changed = sorted(
        key
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key) and (key not in MACHINE_KEYS or key in given)
    )
    strategies = {loaded.recipe.parallel.strategy, recipe.parallel.strategy}
    reason = "" if len(strategies) == 1 else next((STRATEGY_REASONS[one] for one in sorted(strategies - RESHARED)), "")
    # The strategy first: its options change with it.
    for key in sorted(changed, key=lambda one: one != "parallel.strategy"):
        if not (strategies <= RESHARED and key.startswith("parallel.")):
            _expect_changeable(key, before.get(key), run, reason if key == "parallel.strategy" else "")
    check_places(recipe.parallel, ranks)
    # Nothing to write: a plain resume must not leave an entry in the list of changes.
    if not changed:
        return loaded
    paths = Checkpoints.locate(run.folder, 1, loaded.recipe.checkpoint.folder, loaded.base).paths()
    step = (parse_step(paths[0].name) or 0) if paths else 0
    origins = {key: origin for key, origin in loaded.origins.items() if key in after}
    origins |= {key: _describe_change(key, step, before) for key in changed if key in after}
    extended = replace(loaded, recipe=recipe, origins=origins)
    # Machine-specific keys that were not given stay as `loaded` has them, perhaps `auto`.
    for key in MACHINE_KEYS:
        if key not in given and before[key] != after[key]:
            extended = extended.resolve(key, before[key], "resolved again as the run continues")
    if "epochs" in changed:
        _explain_length(run, loaded, extended, step)
    if writes:
        _record(run, extended, {key: [before.get(key), after.get(key)] for key in changed}, step)
    return extended


def _expect_changeable(key: str, old_value: Any, run: RunFolder, own_reason: str = "") -> None:
    if any(key == one or key.startswith(f"{one}.") for one in CHANGEABLE):
        return
    reason = own_reason or REASONS.get(key.partition(".")[0], OTHER_REASON)
    start = choose_wording(
        command=f"headway train RECIPE model.weights={run.weights_path}",
        python=f'headway.train(RECIPE, {{"model.weights": "{run.weights_path}"}})',
    )
    fix = (
        f"Leave it at {format_value(old_value)}, or start a new run from these weights: "
        f"{start}. See What may change in docs/training.md"
    )
    raise UsageError(f"a run that goes on cannot change {key}, because {reason}", where=str(run.folder), fix=fix)


def _describe_change(key: str, step: int, before: Mapping[str, Any]) -> str:
    was = f", was {format_value(before[key])}" if key in before else ""
    return f"--resume at step {step:,}{was}"


def _explain_length(
    run: RunFolder, before: LoadedRecipe[TrainRecipe], after: LoadedRecipe[TrainRecipe], step: int
) -> None:
    """Says what the new length means for the learning rate. Raises UsageError: the run is past its new end."""
    old, new, samples = before.recipe, after.recipe, run.read_provenance(samples=int)["samples"]
    (plan, old_steps), (_, new_steps) = plan_steps(old, samples), plan_steps(new, samples)
    position = plan.find_position(step)
    if new_steps < step:
        what = f"the run stands at epoch {position / samples:.4g}, and epochs={require_number(new.epochs, 'epochs'):g}"
        raise UsageError(f"{what} would end it before that", where=str(run.folder), fix="Set it to more.")
    LOG.info(f"The run goes on to step {new_steps:,} in place of {old_steps:,}; it stands at step {step:,}.")
    # No step has been made, or none is left: the learning rate has nothing to jump from or to.
    if not step or step == new_steps:
        return
    # Curves over the whole run, such as cosine, are stretched to the new length.
    lr = require_number(new.optimizer.lr, "optimizer.lr")
    schedule = new.schedule.resolve_paths(after.base)
    last = lr * Schedule(schedule, total=plan.find_position(old_steps), epoch=samples)(plan.find_position(step - 1))
    following = lr * Schedule(schedule, total=plan.find_position(new_steps), epoch=samples)(position)
    if math.isclose(last, following, rel_tol=0.01):
        LOG.info(f"The learning rate goes on as it was: {following:.3g}.")
    else:
        what = f"The schedule {new.schedule.name} now spans the longer run: the learning rate jumps"
        LOG.warning(f"{what} from {last:.3g} at step {step:,} to {following:.3g} at the next one.")


def _record(run: RunFolder, loaded: LoadedRecipe[TrainRecipe], changes: Mapping[str, Any], step: int) -> None:
    """Writes the changed recipe, its origins and the change itself into the run folder."""
    about = run.read_provenance(origins=dict)
    entry = {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "keys": changes}
    about |= {"origins": dict(loaded.origins), "changes": [*about.get("changes", []), entry]}
    # Recipe last: if the process is killed between the two, the same command changes it again.
    run.write_json("provenance", about)
    write_atomically(run.recipe_path, loaded.to_yaml())
    # It is about a run that had ended.
    (run.folder / "summary.json").unlink(missing_ok=True)
