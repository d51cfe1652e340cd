"""A step that takes seconds is made of fewer samples, so that an examination has time for several steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from time import perf_counter

from pydantic import ValidationError

from headway.core.recipe import Loaded
from headway.doctor.loop_measurement import SMALL, build_pass
from headway.doctor.measurement_job import MeasurementJob, resize_batch, with_values
from headway.setup.inputs import Say
from headway.setup.recipe import TrainRecipe

SHOWS_S = 0.1
"""A pass that takes so long tells what a sample takes; a shorter one tells the machine's hiccups."""
REPEATS = 2


@contextmanager
def open_reduced_job(loaded: Loaded[TrainRecipe], say: Say, longest_s: float) -> Iterator[MeasurementJob]:
    """Sets up a recipe's job and closes it after use. Its batch is halved until a step takes at most `longest_s`.

    The batch stays where halving it does not help: the time does not grow with the samples, or a micro-batch is the
    least that a step can be. It also stays in a compiled network, which would be compiled anew for each size.

    Args:
        longest_s: seconds.

    Raises:
        HeadwayError: whatever is wrong with recipe, data, network or task.
    """
    with closing(MeasurementJob.from_recipe(loaded, say)) as job:
        shorter, why = _reduce_batch(job, longest_s)
        if shorter is None:
            yield job
            return
    say(why)
    with closing(MeasurementJob.from_recipe(shorter, say)) as job:
        job.batch_note = why
        yield job


def estimate_step_seconds(job: MeasurementJob) -> tuple[float, float]:
    """Estimates the seconds of forward and backward that a step takes whatever its batch, and those that each sample
    adds, from the two largest of passes over 2, 4, 8, ... samples. The last one takes 0.1 s, or is the whole batch."""
    count = SMALL
    before = after = _measure_pass_s(job, count)
    while 2 * count <= job.batch and (count == SMALL or after < SHOWS_S):
        count *= 2
        before, after = after, _measure_pass_s(job, count)
    each = max(0.0, after - before) / (count / 2)
    return max(0.0, after - each * count), each


def _reduce_batch(job: MeasurementJob, longest_s: float) -> tuple[Loaded[TrainRecipe] | None, str]:
    """The recipe with a smaller batch, in evaluations too, and why; None: it stays as it is."""
    recipe = job.loaded.recipe
    if recipe.compile:
        return None, ""
    fixed_s, each_s = estimate_step_seconds(job)
    least = recipe.micro_batch if isinstance(recipe.micro_batch, int) else SMALL
    found, batch = None, job.batch
    while fixed_s + each_s * batch > longest_s and each_s * batch > fixed_s and batch // 2 >= least:
        values = {"batch": batch // 2}
        if recipe.evaluate.batch is not None:
            values["evaluate.batch"] = min(batch // 2, recipe.evaluate.batch)
        try:
            found = with_values(job.loaded, values, "as it is measured")
        except ValidationError:  # other values of the recipe want a larger batch
            break
        batch //= 2
    whole_s, part_s = fixed_s + each_s * job.batch, fixed_s + each_s * batch
    why = f"one takes about {whole_s:.2g} s. All figures are those of batch={batch}, whose steps take {part_s:.2g} s."
    return found, f"Steps of {job.batch:,} samples: {why}"


def _measure_pass_s(job: MeasurementJob, samples: int) -> float:
    """Seconds of the shortest of some passes, the transform included. The first one, which allocates, is left out."""
    batch, taken = resize_batch(job.load_batches()[0], samples, job.setup.device), list[float]()
    for _ in range(1 + REPEATS):
        begun = perf_counter()
        build_pass(job, batch)()
        taken.append(perf_counter() - begun)
    return min(taken[1:])
