"""Reduces the batch if one step takes seconds, so that an examination has time for several steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from time import perf_counter

from headway.core.errors import RecipeError
from headway.core.recipe import LoadedRecipe
from headway.doctor.loop_measurement import SMALL, build_pass
from headway.doctor.measurement_job import LOG, MeasurementJob, resize_batch, with_values
from headway.setup.recipe import TrainRecipe

# A pass of this length gives the time of a sample; a shorter one mostly shows the machine's noise.
SHOWS_S = 0.1
REPEATS = 2


@contextmanager
def open_reduced_job(loaded: LoadedRecipe[TrainRecipe], longest_s: float) -> Iterator[MeasurementJob]:
    """Sets up a recipe's job and closes it after use. Its batch is halved until a step takes at most `longest_s`.

    The batch stays as it is if halving it does not help: the time does not grow with the samples, or the step is
    already one micro-batch. It also stays in a compiled network, which would be compiled again for each size.

    Args:
        longest_s: seconds.

    Raises:
        HeadwayError: recipe, data, network or task are wrong.
    """
    with closing(MeasurementJob.from_recipe(loaded)) as job:
        shorter, why = _reduce_batch(job, longest_s)
        if shorter is None:
            yield job
            return
    LOG.info(why)
    with closing(MeasurementJob.from_recipe(shorter)) as job:
        job.batch_note = why
        yield job


def estimate_step_seconds(job: MeasurementJob) -> tuple[float, float]:
    """Estimates the fixed seconds of forward and backward in a step, and the seconds per sample.

    Passes over 2, 4, 8, ... samples are timed until one takes 0.1 s or is the whole batch; the two largest give the
    line.
    """
    count = SMALL
    before = after = _measure_pass_s(job, count)
    while 2 * count <= job.batch and (count == SMALL or after < SHOWS_S):
        count *= 2
        before, after = after, _measure_pass_s(job, count)
    each = max(0.0, after - before) / (count / 2)
    return max(0.0, after - each * count), each


def _reduce_batch(job: MeasurementJob, longest_s: float) -> tuple[LoadedRecipe[TrainRecipe] | None, str]:
    """Returns the recipe with a smaller batch (for evaluations too) and the reason; None: it stays as it is."""
    recipe = job.loaded.recipe
    if recipe.compile:
        return None, ""
    fixed_s, each_s = estimate_step_seconds(job)
    least = recipe.micro_batch if isinstance(recipe.micro_batch, int) else SMALL
    # Halving helps as long as samples, and not fixed costs, take most of the step.
    reduced, batch = None, job.batch
    while fixed_s + each_s * batch > longest_s and each_s * batch > fixed_s and batch // 2 >= least:
        values = {"batch": batch // 2}
        if recipe.evaluate.batch is not None:
            values["evaluate.batch"] = min(batch // 2, recipe.evaluate.batch)
        try:
            reduced = with_values(job.loaded, values, "as it is measured")
        except RecipeError:
            # Another value of the recipe, such as `micro_batch`, needs a larger batch.
            break
        batch //= 2
    whole_s, part_s = fixed_s + each_s * job.batch, fixed_s + each_s * batch
    why = f"takes about {whole_s:.2g} s. All figures are for batch={batch}, whose steps take {part_s:.2g} s."
    return reduced, f"A step of {job.batch:,} samples {why}"


def _measure_pass_s(job: MeasurementJob, samples: int) -> float:
    """Returns the seconds of the fastest of some passes, transform included, without the first one, which allocates."""
    batch, taken = resize_batch(job.load_batches()[0], samples, job.setup.device), list[float]()
    for _ in range(1 + REPEATS):
        begun = perf_counter()
        build_pass(job, batch)()
        taken.append(perf_counter() - begun)
    return min(taken[1:])
