"""The global batch and the values that follow from it: learning rate, epochs, steps; warnings about large batches."""

from __future__ import annotations

from typing import Any

from headway.core.errors import RecipeError
from headway.core.recipe import LoadedRecipe
from headway.core.text_format import pluralise
from headway.data.batch_plan import BatchPlan
from headway.optim.batch_scaling import BatchScaledRecipe, require_number
from headway.parallel.parallel_recipe import LocalRecipe
from headway.setup.recipe import TrainRecipe

LARGE_BATCH = 1024
"""Batch above which a constant learning rate causes a warning."""
VERY_LARGE_BATCH = 4096
"""Batch above which an optimizer without layer-wise rates causes a warning."""
FEW_STEPS = 10
"""Steps of a run below which a large batch causes a warning."""
MAX_EPOCHS_DEVIATION = 0.1
"""Share of its epochs by which a run may be longer or shorter than asked without a warning."""


def resolve_batch(loaded: LoadedRecipe[TrainRecipe], ranks: int) -> LoadedRecipe[TrainRecipe]:
    """Returns the recipe with its global batch in place of {per_device}.

    Raises RecipeError if the recipe refuses a batch of this size.
    """
    batch = loaded.recipe.batch
    if isinstance(batch, int):
        return loaded
    return loaded.resolve("batch", ranks * batch.per_device, describe_batch(batch.per_device, ranks))


def describe_batch(per_device: int, ranks: int) -> str:
    """Describes a batch per device, for example `64 a device, 256 in all`."""
    return f"{per_device:,} a device, {ranks * per_device:,} in all"


def resolve_rates(loaded: LoadedRecipe[TrainRecipe]) -> LoadedRecipe[TrainRecipe]:
    """Returns the recipe with a number in place of each {base, per, scale}.

    If the epochs follow the batch, all other epochs of the recipe are scaled with them, so that each part of the run
    has as many steps as with the small batch (regime adaptation: Hoffer et al. 2017, arXiv 1705.08741).
    """
    recipe = loaded.recipe
    values: dict[str, tuple[Any, str]] = {}
    batch, schedule, growth = recipe.global_batch, recipe.schedule, recipe.batch_growth
    if isinstance(lr := recipe.optimizer.lr, BatchScaledRecipe):
        value = lr.compute_value(batch)
        values["optimizer.lr"] = (value, lr.explain(batch))
        if schedule.warmup.start == "base":
            # With a batch below `per` the scaled rate is the lower one, and there is nothing to rise to.
            start = min(1.0, lr.base / value)
            values["schedule.warmup_start"] = (
                start,
                f"base {lr.base:g} of a learning rate of {value:.6g}",
            )
    if isinstance(epochs := recipe.epochs, BatchScaledRecipe):
        values["epochs"] = (epochs.compute_value(batch), epochs.explain(batch))
        factor = epochs.compute_factor(batch)
        reason = f"x {factor:.6g}, as the epochs of the run"
        # The moments of the run that are given in epochs.
        epoch_values: dict[str, Any] = {
            **{f"schedule.{field}": value for field, value in schedule.epoch_fields.items()},
            "batch_growth.milestones_epochs": growth.milestones_epochs if growth is not None else (),
            **{f"optimizer.{field}": value for field, value in recipe.optimizer.epoch_fields.items()},
        }
        for index, part in enumerate(recipe.model.freeze_after):
            epoch_values[f"model.freeze_after.{index}.after_epochs"] = part.after_epochs
        for index, late in enumerate(recipe.model.unfreeze_at):
            epoch_values[f"model.unfreeze_at.{index}.at_epoch"] = late.at_epoch
        if isinstance(recipe.parallel, LocalRecipe) and recipe.parallel.from_epoch != "auto":
            epoch_values["parallel.from_epoch"] = recipe.parallel.from_epoch
        if (progressive := recipe.data.progressive) is not None:
            epoch_values["data.progressive.from_epoch"] = progressive.from_epoch
            epoch_values["data.progressive.until_epoch"] = progressive.until_epoch
        for key, value in epoch_values.items():
            # 0 and an empty tuple mean that the setting is off.
            if value and factor != 1:
                scaled = [epoch * factor for epoch in value] if isinstance(value, tuple) else value * factor
                values[key] = (scaled, reason)
    if isinstance(local := recipe.parallel, LocalRecipe) and local.from_epoch == "auto":
        # Averages from the start cost small networks accuracy; data parallel first wins most of it back.
        start, reason = (0.0, "rounds from the start, as outer is set") if local.outer else (0.5, "half of the run")
        end, _ = values.get("epochs", (require_number(recipe.epochs, "epochs"), ""))
        values["parallel.from_epoch"] = (start * end, reason)
    return loaded.resolve_all(values) if values else loaded


def find_step_warnings(recipe: TrainRecipe, samples: int, plan: BatchPlan, steps: int) -> list[str]:
    """Returns warnings about settings that are hardly meant: few and large steps, another length, a flat warm-up.

    Args:
        recipe: its rates are resolved.
        samples: size of the training set.
        plan: number of samples in each step.
        steps: number of steps of the run.
    """
    warnings = []
    if recipe.schedule.warmup.epochs and recipe.schedule.warmup.start == 1:
        what = f"The warm-up of {recipe.schedule.warmup.epochs:g} epochs begins at the rate at which it ends"
        fix = "take a larger batch (base is the rate of `per`), or remove schedule.warmup_epochs"
        warnings.append(f"{what}, so that nothing rises: {fix}.")
    requested_epochs = require_number(recipe.epochs, "epochs")
    actual_epochs = plan.find_position(steps) / samples
    has_few_steps = steps < FEW_STEPS and plan.largest_batch > min(LARGE_BATCH, samples)
    if not has_few_steps and abs(actual_epochs / requested_epochs - 1) <= MAX_EPOCHS_DEVIATION:
        return warnings
    # A batch that grows has several sizes; the largest is the one to be named.
    size = f"{'up to ' if plan.grows else ''}{plan.largest_batch:,}"
    epochs_per_step = plan.largest_batch / samples
    what = f"The run has {pluralise(steps, 'step')} of {size} samples, {epochs_per_step:.3g} epochs each"
    if abs(actual_epochs / requested_epochs - 1) > MAX_EPOCHS_DEVIATION:
        what += f", and ends after {actual_epochs:.4g} epochs in place of {requested_epochs:.4g}, as every step is full"
    return [
        *warnings,
        f"{what}. {'So few steps hardly train: set' if has_few_steps else 'Set'} batch to less, or train for longer.",
    ]


def plan_steps(recipe: TrainRecipe, samples: int) -> tuple[BatchPlan, int]:
    """Returns the number of samples in each step, and the number of steps.

    Args:
        recipe: its rates are resolved.
        samples: size of the training set.
    """
    plan = BatchPlan(recipe.global_batch, recipe.batch_growth, epoch=samples)
    return plan, plan.round_to_steps(require_number(recipe.epochs, "epochs") * samples)


def check_length(recipe: TrainRecipe, steps: int) -> None:
    """Raises RecipeError if a setting would never take effect in so few steps."""
    lookahead, ema = recipe.optimizer.lookahead, recipe.model.ema
    steps_per_update = recipe.optimizer.steps_per_update
    if lookahead is not None and steps < lookahead.every_steps:
        what = f"it looks ahead every {lookahead.every_steps} steps, and the run has {steps}"
        raise RecipeError(what, where="optimizer.lookahead", fix="Set every_steps to less, or train for longer.")
    if ema is not None and steps < ema.every_steps:
        what = f"the average is updated every {ema.every_steps} steps, and the run has {steps}"
        raise RecipeError(what, where="model.ema", fix="Set every_steps to less, or train for longer.")
    if steps < steps_per_update:
        what = f"weights move once in {steps_per_update} steps, and the run has {steps}, so nothing would be trained"
        raise RecipeError(what, where="optimizer.batch_scale", fix="Set it to less, or train for longer.")


def find_batch_warnings(recipe: TrainRecipe) -> list[str]:
    """Returns warnings about known problems with a batch of this size, each with its fix."""
    warnings = []
    optimizer = recipe.optimizer
    # With lbsgd the weights move once for a macro-batch of several steps.
    steps_per_update = optimizer.steps_per_update
    steps_text = f" ({steps_per_update} steps of {{:,}})" if steps_per_update > 1 else ""
    effective_batch = recipe.global_batch * steps_per_update
    largest_effective_batch = recipe.largest_batch * steps_per_update
    # A warm-up that fits into the run.
    warmup_epochs = min(5.0, require_number(recipe.epochs, "epochs") / 4)
    if (
        effective_batch > LARGE_BATCH
        and not recipe.schedule.changes_lr
        and not optimizer.changes_lr
        and recipe.batch_growth is None
    ):
        warnings.append(
            f"A batch of {effective_batch:,}{steps_text.format(recipe.global_batch)} trains at one learning rate "
            f"throughout: above {LARGE_BATCH:,} that often diverges early or ends at a lower accuracy. Set for example "
            f"schedule: {{name: cosine, warmup_epochs: {warmup_epochs:.2g}}}."
        )
    # Layer-wise rates (LARS, LAMB) were made for batches of this size, and SOAP has coordinates for each layer.
    treats_layers_alike = not optimizer.is_layer_wise and optimizer.name != "soap"
    if largest_effective_batch > VERY_LARGE_BATCH and treats_layers_alike:
        fix = "optimizer.warmup to lars, or optimizer.name" if optimizer.name == "lbsgd" else "optimizer.name"
        warnings.append(
            f"A batch of {largest_effective_batch:,}{steps_text.format(recipe.largest_batch)} is taken by "
            f"{optimizer.name}, which treats all layers alike: above {VERY_LARGE_BATCH:,} that often loses accuracy. "
            f"Set {fix} to soap, lars or lamb."
        )
    return warnings
