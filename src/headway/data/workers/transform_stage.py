"""TransformStage: the slots and workers that apply a transform of the user's own to decoded batches."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import final

import torch

from headway.core.cpu_count import choose_thread_count
from headway.core.errors import UsageError
from headway.data.batch import Batch
from headway.data.loader_spec import LoaderSpec
from headway.data.loader_stats import LoaderTally
from headway.data.order import get_rank_slots
from headway.data.workers.image_transform import ImageTransform
from headway.data.workers.transform_work import TransformedPart, TransformImages, TransformTask, check_form
from headway.data.workers.user_failure import UserFailure
from headway.data.workers.worker_pool import WorkerPool, build_pool

# A transform that takes less for a whole batch runs in the loop itself: a hand-over to processes takes as long.
INLINE_S = 0.001


@final
class TransformStage:
    """Transforms batches that lie in its slots, in their order. The producer of a ring begins each, and its consumer
    ends each.

    Attributes:
        inputs: flat uint8 memory of each slot, for decoded images.
        workers: number of processes or threads; 0: the consumer does the work.
    """

    def __init__(
        self, transform: ImageTransform, spec: LoaderSpec, size: tuple[int, int, int], samples: int, tally: LoaderTally
    ) -> None:
        self._transform, self._tally = transform, tally
        image, seconds = self._try_out(size, is_thread=spec.worker_kind == "thread")
        inline = seconds * samples < INLINE_S
        self.workers: int = (0 if inline else choose_thread_count()) if spec.workers is None else spec.workers
        self._parts = max(1, self.workers)
        is_process = bool(self.workers) and spec.worker_kind == "process"
        pixels = size[0] * size[1] * size[2]
        self.inputs = [_allocate(samples * pixels, shared=is_process) for _ in range(spec.prefetch_batches)]
        # Sized by the trial's image: all images must have its form, which `finish` checks.
        outputs = [_allocate(samples * image.nbytes, shared=is_process) for _ in self.inputs]
        work = TransformImages(transform, self.inputs, outputs, shares_generators=not is_process and bool(self.workers))
        self._outputs = outputs
        self._pool: WorkerPool = build_pool(work, self.workers, kind=spec.worker_kind)

    def begin(self, slot: int, batch: Batch) -> None:
        """Hands the images of a slot to the workers."""
        count, keys = len(batch.samples), batch.keys()
        for number in range(self._parts):
            low, high = get_rank_slots(count, number, self._parts)
            # Each worker gets a part of each batch, also an empty one: tasks go round.
            part = slice(low, high)
            self._pool.submit(
                TransformTask(slot, tuple(batch.images.shape), (low, high), batch.samples[part], keys[part])
            )

    def finish(self, slot: int, batch: Batch) -> Batch:
        """Waits for the workers, and returns the batch with the transformed images.

        Raises:
            UserCodeError: the transform failed, or its results have different shapes.
            HeadwayError: a worker process ended.
        """
        parts = [self._pool.receive() for _ in range(self._parts)]
        filled: list[TransformedPart] = [part for part in parts if part is not None]
        tally = self._tally.stage_s
        # The workers run side by side, so the stage takes the mean of their times.
        seconds = sum(part.seconds for part in filled) / self._parts
        tally["transform"] = tally.get("transform", 0.0) + seconds
        self._tally.transformed_images += len(batch.samples)
        if not filled:
            return batch
        first, output = filled[0], self._outputs[slot]
        for part in filled[1:]:
            try:
                # On the meta device, because only shape and type are compared.
                check_form(first, torch.empty(part.shape, dtype=part.dtype, device="meta"), part.first_sample)
            except ValueError as error:
                UserFailure.describe(f"the transform {self._transform.name!r}", error).raise_error()
        count = len(batch.samples)
        whole = torch.Size((count, *first.shape))
        images = output[: whole.numel() * first.dtype.itemsize].view(first.dtype).view(whole)
        return replace(batch, images=images)

    def settle(self) -> None:
        """Waits until no worker uses the slots any more."""
        self._pool.discard(settle=True)

    def close(self) -> None:
        """Ends the workers."""
        self._pool.close()

    def _try_out(self, size: tuple[int, int, int], *, is_thread: bool) -> tuple[torch.Tensor, float]:
        """Returns the result of the transform for one image, and the seconds that it takes."""
        try:
            # The first call is not timed: it pays for imports and caches.
            self._transform.try_out(size)
            begun = perf_counter()
            image, draws = self._transform.try_out(size)
            seconds = perf_counter() - begun
        except (Exception, SystemExit) as error:
            UserFailure.describe(f"the transform {self._transform.name!r} of an image of {size}", error).raise_error()
        if is_thread and draws:
            what = f"the transform {self._transform.name!r} draws from a global random generator, which threads share"
            fix = "Give it a parameter rng, which gets a numpy Generator of each sample, or leave worker_kind out."
            raise UsageError(what, where="worker_kind", fix=fix)
        return image, seconds


def _allocate(size: int, *, shared: bool) -> torch.Tensor:
    memory = torch.empty(size, dtype=torch.uint8)
    return memory.share_memory_() if shared else memory
