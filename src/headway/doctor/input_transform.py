"""Finds the user's lines in transforms that run beside the loop: of images in workers, of batches in the loader's
thread."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from headway.core.profile import CodeLine
from headway.data.batch import Batch
from headway.data.workers.sample_seeds import preserve_generators
from headway.doctor.loop_measurement import measure_read_s
from headway.doctor.measurement_job import MeasurementJob, close_stream
from headway.doctor.stack_sampler import StackSampler
from headway.doctor.sync_counter import SyncCounts, count_calls
from headway.doctor.time_attribution import attribute_time
from headway.doctor.user_code import TRANSFORM
from headway.setup.inputs import Inputs

# The loader without the transforms.
BARE = {"transform": None, "batch_transform": None, "workers": None, "worker_kind": "process"}

# Lines that are kept, the longest first.
MOST_LINES = 5

# Images that are transformed again while the calls of each line are counted, which slows them down.
COUNTED_IMAGES = 8


def find_transform_lines(job: MeasurementJob, *, stage_s: float, limit_s: float) -> tuple[CodeLine, ...]:
    """Returns the user's lines that take the time of the input's transforms, the longest first.

    The transforms run in this thread, on images of the first batch, since a sampler sees no other process.

    Args:
        stage_s: seconds of a sample in the transforms; the lines' seconds are shares of it.
    """
    inputs, recipe = job.setup.inputs, job.setup.recipe
    assert inputs.train is not None
    stream = iter(inputs.build_training_loader(inputs.train, recipe, batch=job.setup.plan, **BARE))
    try:
        run = _build_run(inputs, next(stream))
        seen, syncs, begun, images = StackSampler(), SyncCounts(), perf_counter(), 0
        with preserve_generators(), seen:
            while not images or perf_counter() - begun < limit_s:
                images += run(None)
        image_s = (perf_counter() - begun) / images
        with preserve_generators(), count_calls(syncs):
            counted = run(COUNTED_IMAGES)
    finally:
        close_stream(stream)
    for line in syncs.lines.values():
        line.calls = {kind: seconds / counted for kind, seconds in line.calls.items()}
    spent, _ = attribute_time(seen, syncs, steps=images, step_s=image_s, read_s=measure_read_s("cpu"), on_cpu=True)
    lines = [
        CodeLine(file=place.file, line=place.line, within=TRANSFORM, what=what, seconds=seconds / image_s * stage_s)
        for (place, what), seconds in spent.items()
        if place.line
    ]
    return tuple(sorted(lines, key=lambda one: -one.seconds)[:MOST_LINES])


def _build_run(inputs: Inputs, batch: Batch) -> Callable[[int | None], int]:
    """Builds a function that transforms some images of a batch, or all of them, and returns their number."""
    keys, images = batch.keys().tolist(), batch.images.cpu()

    def run_transforms(most: int | None) -> int:
        count = len(images) if most is None else min(most, len(images))
        if inputs.image_transform is not None:
            for image, key in zip(images[:count], keys, strict=False):
                # A transform may write into its image.
                inputs.image_transform.transform_image(image.numpy().copy(), key)
        if inputs.batch_transform is not None:
            inputs.batch_transform.transform_batch(batch)
            count = len(images)
        return count

    return run_transforms
