"""DecodeSource: batches of a data set of Headway, decoded by its own threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from typing import final

import torch

from headway.core.cpu_count import read_local_ranks
from headway.core.errors import UsageError
from headway.data.batch import Batch
from headway.data.batch_source import BatchSource
from headway.data.dataset import Dataset
from headway.data.decode import build_decoder, resolve_backend
from headway.data.decode_ring import DecodeRing
from headway.data.epoch_cursor import EpochCursor
from headway.data.fill import BatchFiller
from headway.data.loader_spec import LoaderSpec
from headway.data.loader_stats import LoaderStats, LoaderTally
from headway.data.spans import iterate_spans
from headway.data.tiers import HostSlots, Tier, choose_tier
from headway.data.tiers.device import DeviceTier
from headway.data.workers.image_transform import ImageTransform
from headway.data.workers.transform_stage import TransformStage


@final
class DecodeSource(BatchSource[Batch]):
    """Decodes the images of a data set ahead of need, on the host or out of a tier.

    Attributes:
        transform: crop, resize, flip and shift.
        backend: the decoder in use.
        device: device of the batches.
    """

    def __init__(self, dataset: Dataset, spec: LoaderSpec, device: torch.device) -> None:
        spec.refuse_sample_options()
        self.spec = spec = spec.resolve_order(len(dataset))
        self.dataset, self.device = dataset, device
        self.cursor = EpochCursor(len(dataset), spec.order, spec.plan, spec.start, spec.stop)
        self.transform = spec.build_transform(dataset.description)
        self.backend = resolve_backend(spec.backend)
        # Chosen at first use: filling a tier may take minutes, and a loader that only answers len() needs none.
        self._tier = spec.tier
        self._choosing = threading.Lock()
        self._tally = LoaderTally()
        self._threads_used = 0
        self._image_transform = spec.transform if isinstance(spec.transform, ImageTransform) else None
        if spec.transform is not None and self._image_transform is None:
            self._image_transform = ImageTransform(spec.transform)
        # Slots and workers of the transform: all that this process has, and those that no iteration uses.
        self._stages, self._idle_stages = list[TransformStage](), list[TransformStage]()
        self._process = os.getpid()

    @property
    def tier(self) -> Tier:
        """Storage of the samples' bytes; chosen, and filled, at first use."""
        with self._choosing:
            if self._tier is None:
                # Pixels on a GPU are not given to the user's transform, and resized only if that is asked for.
                is_simple = self._fits_device_tier() and self._image_transform is None
                device = self.device if is_simple else "cpu"
                # Kept pixels are those of a full decode, so a smaller decode cannot use them.
                cache = "none" if self.spec.scaled and self.spec.cache == "auto" else self.spec.cache
                self._tier = choose_tier(
                    self.dataset, cache, device=device, threads=self.spec.threads, backend=self.backend
                )
        return self._tier

    def uses_stored_pixels(self) -> bool:
        """Returns True if every image has the size and the channels of the batch already."""
        return self.spec.uses_stored_pixels(self.dataset.description)

    def _fits_device_tier(self) -> bool:
        return self.spec.fits_device_tier(self.dataset.description, self.backend)

    def serve(self, start: int, stop: float) -> Generator[Batch, None, None]:
        """Yields the batches of the steps that begin at these positions."""
        stage = None if self._image_transform is None else self._take_stage(self._image_transform)
        try:
            ring = self._open_ring(start, stop, stage)
            # An abandoned iterator comes here too, so its threads end with it.
            try:
                yield from ring
            finally:
                ring.close()
                if stage is not None:
                    self._return_stage(stage)
        # After an error the workers are of no use; the next iteration starts others.
        except Exception:
            if stage in self._idle_stages:
                self._idle_stages.remove(stage)
                self._stages.remove(stage)
                stage.close()
            raise

    def _return_stage(self, stage: TransformStage) -> None:
        # A closed loader, or a forked child, has no use for it.
        if self._process == os.getpid() and stage in self._stages:
            stage.settle()
            self._idle_stages.append(stage)

    def _take_stage(self, transform: ImageTransform) -> TransformStage:
        if self._process != os.getpid():
            # A forked child has none of its parent's workers.
            self._stages, self._idle_stages, self._process = [], [], os.getpid()
        if self._idle_stages:
            return self._idle_stages.pop()
        largest = self.spec.plan.largest_batch
        if self.spec.order is None:
            largest = min(largest, len(self.dataset))
        size = (*self.transform.size, self.transform.channels)
        self._stages.append(TransformStage(transform, self.spec, size, -(-largest // self.spec.world), self._tally))
        return self._stages[-1]

    def _open_ring(self, start: int, stop: float, stage: TransformStage | None) -> DecodeRing:
        spec, tier = self.spec, self.tier
        if spec.scaled and tier.damaged is not None:
            what = "samples that are kept decoded are whole, and scaled asks for a smaller decode"
            raise UsageError(what, where="scaled", fix="Leave scaled out, or set cache to none or disk.")
        if isinstance(tier, DeviceTier) and (stage is not None or not self._fits_device_tier()):
            what = "samples that are kept decoded on the device cannot be cropped, resized or given to a transform"
            fix = "Set cache to memory or none, or crop_on to device, or leave size, crop and transform out."
            raise UsageError(what, where="cache", fix=fix)
        # The tier reads the positions again from its own iterator, further ahead than the ring.
        tier.expect(iterate_spans(spec, start, stop), spec.order, self._find_host_slots())
        decoder = build_decoder(spec.threads, self.backend, pin=spec.pin)
        self._threads_used = decoder.threads
        filler = BatchFiller(self.dataset, tier, spec, self.transform, decoder, self._tally)
        return DecodeRing(filler, decoder, tier, spec, self.transform, self.device, self._tally, (start, stop), stage)

    def _find_host_slots(self) -> HostSlots | None:
        """Returns the slots of a step taken by this host's ranks; None if the launcher does not give their number."""
        ranks, spec = read_local_ranks(), self.spec
        if spec.world == 1 or ranks is None or spec.world % ranks or spec.order is None:
            return None
        first = spec.rank // ranks * ranks
        return HostSlots(spec.plan, first, first + ranks, spec.world)

    def make_stats(self) -> LoaderStats:
        """Returns the measurements of all iterations so far."""
        return self._tally.summarise(
            prefetch_batches=self.spec.prefetch_batches,
            threads=self._threads_used,
            backend=self.backend,
            tier=self._tier.why if self._tier is not None else "",
        )

    def describe(self) -> str:
        """Returns the size of the images in words."""
        height, width = self.transform.size
        return f"images of {height} x {width}"

    def close(self) -> None:
        """Ends the workers of the transform. The threads of the decoder end with each iterator."""
        if self._process == os.getpid():
            for stage in self._stages:
                stage.close()
        self._stages, self._idle_stages = [], []
