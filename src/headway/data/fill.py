"""BatchFiller fills one slot of the loader's ring: positions -> samples -> records -> pixels and labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data.batch import BadSample, Batch
from headway.data.columns import FLAG_PLANAR, FLAG_RAW
from headway.data.decode import Decoder
from headway.data.decode_request import DecodeRequest, GatherRequest, Pixels
from headway.data.host_transform import HostDraws, HostTransform
from headway.data.loader_spec import LoaderSpec
from headway.data.loader_stats import LoaderStats
from headway.data.records import Records
from headway.data.reference import DecodeStatus, find_record_kinds
from headway.data.tiers import Tier
from headway.data.tiers.device import DeviceTier

if TYPE_CHECKING:
    from headway.data.dataset import Dataset

# Damaged samples in a row after which the search for a good one ends: some seconds, whatever the set's size.
MAX_SUBSTITUTE_SEARCH = 1 << 16


@final
@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Positions and samples of one batch; arrays of shape [b]."""

    positions: NDArray[np.int64]
    epochs: NDArray[np.int64]
    samples: NDArray[np.int64]
    drawn: HostDraws


@final
class BatchFiller:
    """Makes a Loader's batches in memory it is given. Not thread-safe.

    Labels and names come from the data set, records and the columns that describe them from the tier.

    Attributes:
        is_on_device: True if the tier keeps pixels on the device; then the loader gathers the images there.
    """

    def __init__(
        self,
        dataset: Dataset,
        tier: Tier,
        spec: LoaderSpec,
        transform: HostTransform,
        decoder: Decoder,
        stats: LoaderStats,
    ) -> None:
        self._dataset, self._tier, self._transform = dataset, tier, transform
        self._decoder, self._stats = decoder, stats
        self._order, self._on_bad, self._verify = spec.order, spec.on_bad, spec.verify
        self._seed = spec.order.seed if spec.order else 0
        self.is_on_device = isinstance(tier, DeviceTier)
        # Scratch memory for pixels that are decoded first and shifted afterwards.
        self._scratch = np.empty(0, np.uint8)
        # Samples found damaged so far: they are never tried as a substitute again.
        self._known_bad: set[int] = set()

    def plan_batches(self, spans: Sequence[tuple[int, int]]) -> Iterator[BatchRequest]:
        """Computes samples and random parameters of the batches at these [low, high) positions."""
        begun = perf_counter()
        # One draw for all spans: numpy's overhead on a small array costs as much as its work.
        positions = np.concatenate([np.arange(low, high) for low, high in spans])
        epochs, samples = self._order(positions) if self._order else (np.zeros_like(positions), positions)
        drawn = self._transform.draw(self._seed, epochs, samples)
        self._stats.stage_s["order"] += perf_counter() - begun
        begin = 0
        # Views of the large arrays, one for each batch.
        for low, high in spans:
            end = begin + high - low
            yield BatchRequest(positions[begin:end], epochs[begin:end], samples[begin:end], drawn.select(begin, end))
            begin = end

    def fill(self, memory: torch.Tensor, request: BatchRequest) -> Batch:
        """Makes a batch whose images lie in `memory` (uint8, flat), unless they are gathered on the device."""
        transform, stats = self._transform, self._stats
        samples, drawn = request.samples, request.drawn
        # The whole batch has the size of its first position's epoch.
        size = transform.compute_size(int(request.epochs[0]) if len(request.epochs) else 0)
        shape = (len(samples), *size, transform.channels)
        images = memory[: int(np.prod(shape))].view(shape)
        pixels = images.numpy()
        if self.is_on_device:
            damaged, boxes = self._tier.damaged, None
            status = np.zeros(len(samples), np.uint8) if damaged is None else damaged[samples]
        else:
            status, boxes = self._decode(samples, drawn, pixels)
        # Damaged samples are few, so they are replaced one at a time.
        begun = perf_counter()
        served, bad = samples, []
        if status.any():
            served = samples.copy()
            for place in np.flatnonzero(status).tolist():
                entry, box = self._substitute(request, place, pixels, DecodeStatus(status[place]).name.lower())
                served[place] = entry.served
                if boxes is not None and box is not None:
                    boxes[place] = box
                bad.append(entry)
        # Masked samples are served as -1; they get the label of sample 0, which no loss counts.
        labels = np.ascontiguousarray(self._dataset.label[np.maximum(served, 0)])
        # The labels are mapped too: a file that was cut would have given zeros.
        self._dataset.check_columns()
        stats.stage_s["labels"] += perf_counter() - begun
        stats.stage_images += len(samples)
        return Batch(
            images=images,
            labels=torch.from_numpy(labels),
            positions=request.positions,
            epochs=request.epochs,
            samples=samples,
            served=served,
            seed=self._seed,
            boxes=boxes,
            flips=drawn.flips,
            shifts=drawn.shifts,
            bad=tuple(bad),
        )

    def _decode(
        self, samples: NDArray[np.int64], drawn: HostDraws, out: Pixels
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        """Fills `out` with the samples' pixels. Returns their statuses, and the boxes that were resized."""
        tier, stats, begun = self._tier, self._stats, perf_counter()
        records = tier.read(samples)
        stats.record_bytes += int(records.length.sum())
        read = perf_counter()
        stats.stage_s["read"] += read - begun
        # Only records that this process has not checked yet, unless `verify` says otherwise.
        check = self._dataset.select_unchecked(samples, self._verify)
        sums: dict[str, Any] = {"crc": tier.crc32c[samples], "check": check} if check.any() else {}
        boxes: NDArray[np.float32] | None = None
        if self._is_stored_as_served(samples, out):
            # Raw pixels of the batch's size: a copy, without a decoder and a resize.
            planar = bool(tier.flags[samples[0]] & FLAG_PLANAR) if len(samples) else False
            request = GatherRequest(records, out, planar, drawn.shifts, drawn.flips, **sums)
            status = self._decoder.gather(request)
        else:
            status, boxes = self._decode_boxes(samples, records, drawn, out, sums)
        # A tier that keeps pixels has zeros for a damaged sample, and its status of then.
        if tier.damaged is not None:
            status = np.where(tier.damaged[samples], tier.damaged[samples], status)
        self._dataset.check_columns()
        if check.any():
            self._dataset.mark_checked(samples[check & (status == DecodeStatus.OK)])
        stats.stage_s["decode"] += perf_counter() - read
        return status, boxes

    def _is_stored_as_served(self, samples: NDArray[np.int64], out: Pixels) -> bool:
        tier = self._tier
        return bool(
            self._transform.takes_whole_images
            and ((tier.flags[samples] & FLAG_RAW) > 0).all()
            and self._dataset.description.channels == out.shape[3]
            and (tier.width[samples] == out.shape[2]).all()
            and (tier.height[samples] == out.shape[1]).all()
        )

    def _decode_boxes(
        self, samples: NDArray[np.int64], records: Records, drawn: HostDraws, out: Pixels, sums: dict[str, Any]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        tier, channels = self._tier, self._dataset.description.channels
        flags, width, height = tier.flags[samples], tier.width[samples], tier.height[samples]
        boxes = self._transform.compute_boxes(drawn.keys, width, height, (out.shape[1], out.shape[2]))
        more: dict[str, Any] = {"scaled": self._transform.scaled, **sums}
        # A batch of JPEGs alone, the usual one, needs neither kinds nor shapes.
        if flags.any():
            more["kinds"] = find_record_kinds(flags)
        if (flags & FLAG_RAW).any():
            more["shapes"] = np.stack([height, width, np.full_like(width, channels)], axis=1)
        if drawn.shifts is None:
            return self._decoder.decode(DecodeRequest(records, boxes, out, drawn.flips, **more)), boxes
        if self._scratch.size < out.size:
            self._scratch = np.empty(out.size, np.uint8)
        # A shift fills the border by reflection of the resized image, so it is a second pass over whole pixels.
        still = self._scratch[: out.size].reshape(out.shape)
        status = self._decoder.decode(DecodeRequest(records, boxes, still, **more))
        self._decoder.gather(GatherRequest(Records.from_rows(still), out, shifts=drawn.shifts, flips=drawn.flips))
        return status, boxes

    def _substitute(
        self, request: BatchRequest, place: int, pixels: Pixels, reason: str
    ) -> tuple[BadSample, NDArray[np.float32] | None]:
        """Replaces a damaged sample by the first good one after it in its epoch's permutation, or masks it.

        Returns:
            the record of it, with -1 served if it is masked; and the box of the substitute.

        Raises:
            DataError: `on_bad` is "stop", or no good sample was found.
        """
        dataset, order = self._dataset, self._order
        position, asked = int(request.positions[place]), int(request.samples[place])
        if self._on_bad == "stop":
            raise DataError(
                f"sample {asked} ({dataset.name(asked)}) is damaged ({reason})",
                where=str(dataset.folder),
                fix="Run headway verify on the folder and pack again, or set data.on_bad to substitute or mask.",
            )
        if self._on_bad == "mask" or order is None:
            return BadSample(position, asked, -1, reason), None
        n = len(dataset)
        first = position - position % n
        self._known_bad.add(asked)
        for step in range(1, min(n, MAX_SUBSTITUTE_SEARCH + 1)):
            _, found = order(np.array([first + (position - first + step) % n]))
            sample, boxes = int(found[0]), None
            if sample in self._known_bad:
                continue
            if self.is_on_device:
                is_bad = self._tier.damaged is not None and bool(self._tier.damaged[sample])
            else:
                # The substitute keeps the random parameters of the sample that was asked for.
                drawn = request.drawn.select(place, place + 1)
                status, boxes = self._decode(found, drawn, pixels[place : place + 1])
                is_bad = bool(status.any())
            if not is_bad:
                return BadSample(position, asked, sample, reason), None if boxes is None else boxes[0]
            self._known_bad.add(sample)
        few = n <= MAX_SUBSTITUTE_SEARCH + 1
        what = "every sample is damaged" if few else f"{MAX_SUBSTITUTE_SEARCH:,} samples in a row are damaged"
        fix = "Run headway verify on the folder, and pack the data again."
        raise DataError(what, where=str(dataset.folder), fix=fix)
