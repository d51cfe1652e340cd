"""BatchFiller: fills one slot of the loader's ring: positions -> samples -> records -> pixels and labels."""

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
from headway.data.loader_stats import LoaderTally
from headway.data.records import Records
from headway.data.reference import DecodeStatus, find_record_kinds
from headway.data.tiers import Tier
from headway.data.tiers.device import DeviceTier

if TYPE_CHECKING:
    from headway.data.dataset import Dataset

MAX_SUBSTITUTE_SEARCH = 1 << 16
"""Most damaged samples in a row that are tried as substitutes: a few seconds, whatever the size of the set."""


@final
@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Positions, epochs, samples and random parameters of one batch; arrays of shape [b]."""

    positions: NDArray[np.int64]
    epochs: NDArray[np.int64]
    samples: NDArray[np.int64]
    drawn: HostDraws


@final
class BatchFiller:
    """Fills a Loader's batches into memory that the caller provides. Not thread-safe.

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
        tally: LoaderTally,
    ) -> None:
        self._dataset = dataset
        self._tier = tier
        self._transform = transform
        self._decoder = decoder
        self._tally = tally
        self._order = spec.order
        self._on_bad = spec.on_bad
        self._verify = spec.verify
        self._seed = spec.order.seed if spec.order else 0
        self.is_on_device = isinstance(tier, DeviceTier)
        self._serves_stored_pixels = spec.uses_stored_pixels(dataset.description)
        # Scratch memory for pixels that are decoded first and shifted afterwards.
        self._scratch = np.empty(0, np.uint8)
        # Samples that were found damaged: they are never tried as substitutes again.
        self._known_bad: set[int] = set()

    def plan_batches(self, spans: Sequence[tuple[int, int]]) -> Iterator[BatchRequest]:
        """Yields samples and random parameters of the batch at each span [low, high) of positions."""
        start_time = perf_counter()
        # One draw for all spans: numpy's overhead on a small array costs as much as its work.
        positions = np.concatenate([np.arange(low, high) for low, high in spans])
        epochs, samples = self._order(positions) if self._order else (np.zeros_like(positions), positions)
        draws = self._transform.draw(self._seed, epochs, samples)
        self._tally.stage_s["order"] += perf_counter() - start_time
        begin = 0
        # Views of the large arrays, one for each batch.
        for low, high in spans:
            end = begin + high - low
            yield BatchRequest(positions[begin:end], epochs[begin:end], samples[begin:end], draws.select(begin, end))
            begin = end

    def fill(self, memory: torch.Tensor, request: BatchRequest) -> Batch:
        """Fills a batch: writes its images to `memory` (uint8, flat), unless they are gathered on the device.

        Returns:
            the batch; its images are a view of `memory`.

        Raises:
            DataError: a record cannot be read, or a damaged sample cannot be replaced; see `_substitute`.
        """
        transform, tally = self._transform, self._tally
        samples, draws = request.samples, request.drawn
        # The whole batch has the size of its first position's epoch.
        size = transform.compute_size(int(request.epochs[0]) if len(request.epochs) else 0)
        shape = (len(samples), *size, transform.channels)
        images = memory[: int(np.prod(shape))].view(shape)
        pixels = images.numpy()
        if self.is_on_device:
            damaged = self._tier.damaged
            boxes = None
            if not self._serves_stored_pixels:
                sides = self._tier.width[samples], self._tier.height[samples]
                boxes = transform.compute_boxes(draws.keys, *sides, size)
            status = np.zeros(len(samples), np.uint8) if damaged is None else damaged[samples]
        else:
            status, boxes = self._decode(samples, draws, pixels)
        # Damaged samples are rare, so they are replaced one at a time.
        start_time = perf_counter()
        served = samples
        bad_samples: list[BadSample] = []
        if status.any():
            served = samples.copy()
            for index in np.flatnonzero(status).tolist():
                bad_sample, box = self._substitute(request, index, pixels, DecodeStatus(status[index]).name.lower())
                served[index] = bad_sample.served
                if boxes is not None and box is not None:
                    boxes[index] = box
                bad_samples.append(bad_sample)
        # Masked samples are served as -1; they get the label of sample 0, which no loss counts.
        labels = np.ascontiguousarray(self._dataset.label[np.maximum(served, 0)])
        # The labels are mapped too: a truncated file would have given zeros.
        self._dataset.check_columns()
        tally.stage_s["labels"] += perf_counter() - start_time
        tally.stage_images += len(samples)
        return Batch(
            images=images,
            labels=torch.from_numpy(labels),
            positions=request.positions,
            epochs=request.epochs,
            samples=samples,
            served=served,
            seed=self._seed,
            boxes=boxes,
            flips=draws.flips,
            vertical_flips=draws.vertical_flips,
            shifts=draws.shifts,
            bad=tuple(bad_samples),
        )

    def _decode(
        self, samples: NDArray[np.int64], draws: HostDraws, out: Pixels
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        """Writes the samples' pixels to `out`. Returns their `DecodeStatus`, and the resized boxes or None."""
        tier, tally = self._tier, self._tally
        start_time = perf_counter()
        records = tier.read(samples)
        tally.record_bytes += int(records.length.sum())
        read_end = perf_counter()
        tally.stage_s["read"] += read_end - start_time
        # Only records that this process has not checked yet, unless `verify` says otherwise.
        is_checked = self._dataset.select_unchecked(samples, self._verify)
        checksum_args: dict[str, Any] = {"crc": tier.crc32c[samples], "check": is_checked} if is_checked.any() else {}
        boxes: NDArray[np.float32] | None = None
        if self._can_copy_without_decoding(samples, out):
            planar = bool(tier.flags[samples[0]] & FLAG_PLANAR) if len(samples) else False
            request = GatherRequest(
                records, out, planar, draws.shifts, draws.flips, draws.vertical_flips, **checksum_args
            )
            status = self._decoder.gather(request)
        else:
            status, boxes = self._decode_boxes(samples, records, draws, out, checksum_args)
        # A tier of pixels has zeros for a sample that was damaged when it was filled, and kept its status.
        if tier.damaged is not None:
            status = np.where(tier.damaged[samples], tier.damaged[samples], status)
        self._dataset.check_columns()
        if is_checked.any():
            self._dataset.mark_checked(samples[is_checked & (status == DecodeStatus.OK)])
        tally.stage_s["decode"] += perf_counter() - read_end
        return status, boxes

    def _can_copy_without_decoding(self, samples: NDArray[np.int64], out: Pixels) -> bool:
        """Returns True if all records are raw pixels of the output's size and are served whole."""
        tier = self._tier
        return bool(
            self._transform.takes_whole_images
            and ((tier.flags[samples] & FLAG_RAW) > 0).all()
            and self._dataset.description.channels == out.shape[3]
            and (tier.width[samples] == out.shape[2]).all()
            and (tier.height[samples] == out.shape[1]).all()
        )

    def _decode_boxes(
        self, samples: NDArray[np.int64], records: Records, draws: HostDraws, out: Pixels, checksum_args: dict[str, Any]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Decodes, crops and resizes the records into `out`; returns their `DecodeStatus` and the boxes."""
        tier = self._tier
        channels = self._dataset.description.channels
        flags, width, height = tier.flags[samples], tier.width[samples], tier.height[samples]
        boxes = self._transform.compute_boxes(draws.keys, width, height, (out.shape[1], out.shape[2]))
        options: dict[str, Any] = {"scaled": self._transform.scaled, **checksum_args}
        # A batch of JPEGs alone, the usual one, needs neither kinds nor shapes.
        if flags.any():
            options["kinds"] = find_record_kinds(flags)
        if (flags & FLAG_RAW).any():
            options["shapes"] = np.stack([height, width, np.full_like(width, channels)], axis=1)
        if draws.shifts is None:
            request = DecodeRequest(records, boxes, out, draws.flips, draws.vertical_flips, **options)
            return self._decoder.decode(request), boxes
        if self._scratch.size < out.size:
            self._scratch = np.empty(out.size, np.uint8)
        # A shift pads by reflection of the resized image, so it is a second pass over the pixels.
        unshifted = self._scratch[: out.size].reshape(out.shape)
        status = self._decoder.decode(DecodeRequest(records, boxes, unshifted, **options))
        rows = Records.from_rows(unshifted)
        self._decoder.gather(
            GatherRequest(rows, out, shifts=draws.shifts, flips=draws.flips, vertical_flips=draws.vertical_flips)
        )
        return status, boxes

    def _substitute(
        self, request: BatchRequest, index: int, pixels: Pixels, reason: str
    ) -> tuple[BadSample, NDArray[np.float32] | None]:
        """Replaces a damaged sample by the first good one after it in its epoch's permutation, or masks it.

        Returns:
            the bad sample, with `served` -1 if it is masked; and the box of the substitute, if it was resized.

        Raises:
            DataError: `on_bad` is "stop", or MAX_SUBSTITUTE_SEARCH samples in a row are damaged.
        """
        dataset, order = self._dataset, self._order
        position = int(request.positions[index])
        requested_sample = int(request.samples[index])
        if self._on_bad == "stop":
            raise DataError(
                f"sample {requested_sample} ({dataset.name(requested_sample)}) is damaged ({reason})",
                where=str(dataset.folder),
                fix="Run headway verify on the folder and pack again, or set data.on_bad to substitute or mask.",
            )
        if self._on_bad == "mask" or order is None:
            return BadSample(position, requested_sample, -1, reason), None
        num_samples = len(dataset)
        epoch_start = position - position % num_samples
        self._known_bad.add(requested_sample)
        for offset in range(1, min(num_samples, MAX_SUBSTITUTE_SEARCH + 1)):
            _, candidates = order(np.array([epoch_start + (position - epoch_start + offset) % num_samples]))
            sample = int(candidates[0])
            boxes = None
            if sample in self._known_bad:
                continue
            if self.is_on_device:
                is_bad = self._tier.damaged is not None and bool(self._tier.damaged[sample])
            else:
                # The substitute keeps the random parameters of the sample that was asked for.
                draws = request.drawn.select(index, index + 1)
                status, boxes = self._decode(candidates, draws, pixels[index : index + 1])
                is_bad = bool(status.any())
            if not is_bad:
                return BadSample(position, requested_sample, sample, reason), None if boxes is None else boxes[0]
            self._known_bad.add(sample)
        searched_all = num_samples <= MAX_SUBSTITUTE_SEARCH + 1
        what = "every sample is damaged" if searched_all else f"{MAX_SUBSTITUTE_SEARCH:,} samples in a row are damaged"
        fix = "Run headway verify on the folder, and pack the data again."
        raise DataError(what, where=str(dataset.folder), fix=fix)
