"""Fills a slot of the ring: positions -> samples -> records -> pixels and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.core.random_keys import UInt64, make_keys
from headway.data.batch import Bad, Batch
from headway.data.columns import FLAG_PLANAR, FLAG_RAW
from headway.data.crops import center_boxes, flips, random_resized_boxes, shifts
from headway.data.decode import Decoder, Status
from headway.data.options import CropRecipe, OnBad, Verify
from headway.data.order import Order
from headway.data.records import Records
from headway.data.reference import kinds_of
from headway.data.resolution import ProgressiveRecipe, size_at
from headway.data.stats import Tally
from headway.data.tiers import Tier
from headway.data.tiers.device import DeviceTier

if TYPE_CHECKING:
    from headway.data.dataset import Dataset

SEARCHED = 1 << 16
"""Samples in a row that may be damaged before the search for a good one ends: some seconds, whatever the set's size."""

Size = tuple[int, int]
Pixels = NDArray[np.uint8]


@final
@dataclass(frozen=True, kw_only=True)
class View:
    """What the host makes of each image, on its way into the batch.

    Attributes:
        size: (height, width) at the end of training.
        crop: which box of the image is resized.
        flip, translate: as of `AugmentRecipe`; done while decoding.
        progressive: sizes before the end.
        scaled: whether large JPEGs may be decoded smaller.
    """

    size: Size
    channels: int
    crop: CropRecipe
    flip: Literal["random", "alternating"] | None = None
    translate: int = 0
    progressive: ProgressiveRecipe | None = None
    scaled: bool = False

    def __post_init__(self) -> None:
        smallest = min(self.size_at(0))
        if self.translate >= smallest:
            what = f"images of {smallest} pixels cannot be moved by {self.translate}"
            raise UsageError(what, where="augment.translate", fix=f"Set it to at most {smallest - 1}.")

    @property
    def whole(self) -> bool:
        """Whether each image is taken as it is, where it has the batch's size."""
        return not self.crop.random and self.crop.share == 1 and self.progressive is None

    @property
    def random(self) -> bool:
        """Whether samples need keys."""
        return self.crop.random or self.flip is not None or self.translate > 0

    def size_at(self, epoch: int) -> Size:
        """Returns height and width of the images of an epoch."""
        return self.size if self.progressive is None else size_at(self.progressive, self.size, epoch)

    def boxes(self, sample_keys: UInt64, width: NDArray[np.uint32], height: NDArray[np.uint32], size: Size) -> Any:
        """float32 [k, 4]."""
        crop = self.crop
        if crop.random:
            return random_resized_boxes(sample_keys, width, height, scale=crop.scale, ratio=crop.ratio)
        found = center_boxes(width, height, size)
        if crop.share < 1:
            found[:, :2] += found[:, 2:] * np.float32((1 - crop.share) / 2)
            found[:, 2:] *= np.float32(crop.share)
        return found


@dataclass(slots=True)
class _Drawn:
    """What was drawn for some samples: their keys, and those of the first epoch where a flip needs them."""

    keys: UInt64
    flips: NDArray[np.bool_] | None
    shifts: NDArray[np.int64] | None

    def part(self, low: int, high: int) -> _Drawn:
        part = slice(low, high)
        return _Drawn(*(None if array is None else array[part] for array in (self.keys, self.flips, self.shifts)))  # type: ignore[arg-type]


@final
@dataclass(frozen=True, slots=True)
class Step:
    """What one batch asks for; arrays of shape [b]."""

    positions: NDArray[np.int64]
    epochs: NDArray[np.int64]
    samples: NDArray[np.int64]
    drawn: _Drawn


@final
class Filler:
    """Makes batches of a Loader in memory it is given; one thread at a time.

    Args:
        dataset: labels and names.
        tier: the bytes, and the columns of what they are.
        order: None: index order.

    Attributes:
        on_device: the tier's pixels lie on the device: who puts batches there gathers them.
    """

    def __init__(
        self,
        dataset: Dataset,
        tier: Tier,
        order: Order | None,
        view: View,
        decoder: Decoder,
        tally: Tally,
        *,
        on_bad: OnBad,
        verify: Verify,
    ) -> None:
        self._dataset, self._tier, self._order, self._view = dataset, tier, order, view
        self._decoder, self._tally = decoder, tally
        self._on_bad, self._verify = on_bad, verify
        self._seed = order.seed if order else 0
        self.on_device = isinstance(tier, DeviceTier)
        self._moving = np.empty(0, np.uint8)  # pixels before they are moved
        self._known_bad: set[int] = set()

    def steps(self, spans: Sequence[tuple[int, int]]) -> Iterator[Step]:
        """What is asked for at these [low, high) positions. All is drawn at once: small arrays cost as much."""
        begun = perf_counter()
        positions = np.concatenate([np.arange(low, high) for low, high in spans])
        epochs, samples = self._order(positions) if self._order else (np.zeros_like(positions), positions)
        drawn = self._draw(epochs, samples)
        self._tally.stage_s["order"] += perf_counter() - begun
        begin = 0
        for low, high in spans:
            end = begin + high - low
            yield Step(positions[begin:end], epochs[begin:end], samples[begin:end], drawn.part(begin, end))
            begin = end

    def fill(self, memory: torch.Tensor, step: Step) -> Batch:
        """A batch whose images lie in `memory` (uint8, flat); or are to be gathered `on_device`."""
        view, tally = self._view, self._tally
        positions, epochs, samples, drawn = step.positions, step.epochs, step.samples, step.drawn
        size = view.size_at(int(epochs[0]) if len(epochs) else 0)
        shape = (len(samples), *size, view.channels)
        images = memory[: int(np.prod(shape))].view(shape)
        pixels = images.numpy()
        if self.on_device:
            damaged = self._tier.damaged
            status = np.zeros(len(samples), np.uint8) if damaged is None else damaged[samples]
            boxes = None
        else:
            status, boxes = self._pixels(samples, drawn, pixels)
        begun = perf_counter()
        served, bad = samples, []
        if status.any():
            served = samples.copy()
            for place in np.flatnonzero(status).tolist():
                reason = Status(status[place]).name.lower()
                at = int(positions[place])
                served[place], box = self._replace(at, int(samples[place]), drawn, pixels, place, reason)
                if boxes is not None and box is not None:
                    boxes[place] = box
                bad.append(Bad(int(positions[place]), int(samples[place]), int(served[place]), reason))
        labels = np.ascontiguousarray(self._dataset.label[np.maximum(served, 0)])
        self._dataset.check_columns()
        tally.stage_s["labels"] += perf_counter() - begun
        tally.stage_images += len(samples)
        return Batch(
            images=images,
            labels=torch.from_numpy(labels),
            positions=positions,
            epochs=epochs,
            samples=samples,
            served=served,
            seed=self._seed,
            boxes=boxes,
            flips=drawn.flips,
            shifts=drawn.shifts,
            bad=tuple(bad),
        )

    def _draw(self, epochs: NDArray[np.int64], samples: NDArray[np.int64]) -> _Drawn:
        view = self._view
        if not view.random:
            return _Drawn(np.empty(0, np.uint64), None, None)
        drawn = make_keys(self._seed, epochs, samples)
        mirrored = None
        if view.flip:
            first = drawn if view.flip == "random" else make_keys(self._seed, 0, samples)
            mirrored = flips(first, epochs, view.flip)
        return _Drawn(drawn, mirrored, shifts(drawn, view.translate) if view.translate else None)

    def _pixels(
        self, samples: NDArray[np.int64], drawn: _Drawn, out: Pixels
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        """Status of each sample, and the boxes that were taken."""
        tier, view, tally, begun = self._tier, self._view, self._tally, perf_counter()
        records = tier.read(samples)
        tally.record_bytes += int(records.length.sum())
        read = perf_counter()
        tally.stage_s["read"] += read - begun
        flags, width, height = tier.flags[samples], tier.width[samples], tier.height[samples]
        check = self._dataset.select_unchecked(samples, self._verify)
        sums: dict[str, Any] = {"crc": tier.crc32c[samples], "check": check} if check.any() else {}
        size = (out.shape[1], out.shape[2])
        raw = (flags & FLAG_RAW) > 0
        channels = self._dataset.description.channels
        if (
            view.whole
            and raw.all()
            and channels == out.shape[3]
            and (width == size[1]).all()
            and (height == size[0]).all()
        ):
            boxes = None
            planar = bool(flags[0] & FLAG_PLANAR) if len(flags) else False
            status = self._decoder.gather(records, out, planar=planar, shifts=drawn.shifts, flips=drawn.flips, **sums)
        else:
            boxes = view.boxes(drawn.keys, width, height, size)
            kinds = shapes = None
            if flags.any():
                kinds = kinds_of(flags)
                shapes = np.stack([height, width, np.full_like(width, channels)], axis=1) if raw.any() else None
            decode: Callable[..., NDArray[np.uint8]] = self._decoder
            more = {"kinds": kinds, "shapes": shapes, "scaled": view.scaled, **sums}
            if drawn.shifts is None:
                status = decode(records, boxes, out, flips=drawn.flips, **more)
            else:
                still = self._still(out)
                status = decode(records, boxes, still, **more)
                self._decoder.gather(Records.from_rows(still), out, shifts=drawn.shifts, flips=drawn.flips)
        if tier.damaged is not None:
            status = np.where(tier.damaged[samples], tier.damaged[samples], status)
        self._dataset.check_columns()
        if check.any():
            self._dataset.mark_checked(samples[check & (status == Status.OK)])
        tally.stage_s["decode"] += perf_counter() - read
        return status, boxes

    def _still(self, out: Pixels) -> Pixels:
        if self._moving.size < out.size:
            self._moving = np.empty(out.size, np.uint8)
        return self._moving[: out.size].reshape(out.shape)

    def _replace(
        self, position: int, asked: int, drawn: _Drawn, pixels: Pixels, place: int, reason: str
    ) -> tuple[int, NDArray[np.float32] | None]:
        """Serves the first good sample after the asked one in its epoch's permutation; -1 where it is masked. And the
        box of it that was taken."""
        dataset, order = self._dataset, self._order
        if self._on_bad == "stop":
            raise DataError(
                f"sample {asked} ({dataset.name(asked)}) is damaged ({reason})",
                where=str(dataset.folder),
                fix="Run headway verify on the folder and pack again, or set data.on_bad to substitute or mask.",
            )
        if self._on_bad == "mask" or order is None:
            return -1, None
        n = len(dataset)
        first = position - position % n
        self._known_bad.add(asked)
        for step in range(1, min(n, SEARCHED + 1)):
            near = np.array([first + (position - first + step) % n])
            _, sample = order(near)
            boxes = None
            if int(sample[0]) in self._known_bad:
                continue
            if self.on_device:
                bad = self._tier.damaged is not None and bool(self._tier.damaged[sample[0]])
            else:
                status, boxes = self._pixels(sample, drawn.part(place, place + 1), pixels[place : place + 1])
                bad = bool(status.any())
            if not bad:
                return int(sample[0]), None if boxes is None else boxes[0]
            self._known_bad.add(int(sample[0]))
        what = "every sample is damaged" if n <= SEARCHED + 1 else f"{SEARCHED:,} samples in a row are damaged"
        fix = "Run headway verify on the folder, and pack the data again."
        raise DataError(what, where=str(dataset.folder), fix=fix)
