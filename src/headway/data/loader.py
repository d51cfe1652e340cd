"""Loader: batches in the Order, decoded ahead of need by a thread of its own into a ring of preallocated slots."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.core.keys import UInt64, keys
from headway.data.dataset import Dataset
from headway.data.decode import Decoder, Status, center_boxes
from headway.data.options import OnBad, Verify
from headway.data.order import Order, share


@dataclass(frozen=True, slots=True)
class Bad:
    """A sample that could not be served: what was asked at a position, what came instead (-1: nothing), and why."""

    position: int
    asked: int
    served: int
    reason: str


@dataclass(slots=True, kw_only=True)  # frozen would take 2 us more to make
class Batch:
    """One rank's share of one step. Unpacks as `images, labels`.

    `images` (uint8 [b, H, W, C]) is a slot of the ring on a CPU: it is valid until the next batch is asked for.
    """

    images: torch.Tensor
    labels: torch.Tensor
    """int64 [b], or float32 [b] or [b, k]."""
    positions: NDArray[np.int64]
    epochs: NDArray[np.int64]
    samples: NDArray[np.int64]
    """What the Order asked for; random choices come from these."""
    served: NDArray[np.int64]
    """What was served: another sample where the asked one is damaged; -1 where it is masked."""
    seed: int
    bad: tuple[Bad, ...] = field(default=())

    def keys(self, view: int = 0) -> UInt64:
        """Keys of the samples, uint64 [b]."""
        return keys(self.seed, self.epochs, self.samples, view)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.images, self.labels))


class Loader:
    """Iterates batches of a data set.

    Args:
        dataset: where the samples lie.
        batch: the global batch; a step takes the next `batch` positions, across an epoch's end too.
        order: the order of training; None: every sample once in index order, the last batch short (evaluation).
        start, stop: positions served; `stop` None: without end (with an order), or the whole set (without).
        rank, world: this rank takes its share of every step.
        size: (height, width) of the images.
        channels: 1 or 3; None: as the data set has them.
        threads: decoding threads; see `Decoder`.
        ahead: slots of the ring, so many batches are decoded ahead of need.
        device: where the batch is put.
        on_bad: a damaged sample is `substitute`d by the first good one after it in the Order, `mask`ed (zeros, served
            -1), or it `stop`s the iteration with DataError.
        verify: when checksums are looked at; see `Dataset.intact`.

    Memory: `ahead` x batch x H x W x C bytes for the ring, and one byte a sample for `verify`.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch: int,
        order: Order | None = None,
        start: int = 0,
        stop: int | None = None,
        rank: int = 0,
        world: int = 1,
        size: tuple[int, int] | None = None,
        channels: int | None = None,
        threads: int | None = None,
        ahead: int = 3,
        device: torch.device | str = "cpu",
        on_bad: OnBad = "substitute",
        verify: Verify = "first",
    ) -> None:
        if batch < 1:
            raise UsageError(f"a batch of {batch} samples", fix="Set 1 or more.")
        if order is None and stop is not None and stop > len(dataset):
            raise UsageError(
                f"a stop at {stop} of {len(dataset)} samples", fix="Give an order to go through them again."
            )
        if ahead < 1:
            raise UsageError(f"{ahead} batches ahead", fix="Set 1 or more.")
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} of a world of {world}", fix="Ranks count from 0.")
        common = dataset.description.common_size
        if size is None and common is None:
            raise UsageError("the images have different sizes", fix="Give the loader a size=(height, width).")
        if order is not None and order.samples != len(dataset):
            raise UsageError(f"an order of {order.samples} samples over a data set of {len(dataset)}")
        self.dataset, self.batch, self.order, self.start = dataset, batch, order, start
        self.stop = len(dataset) if order is None and stop is None else stop
        self.rank, self.world = rank, world
        self.size = size or (common[1], common[0])  # type: ignore[index]
        self.channels = channels or dataset.description.channels
        self.threads, self.ahead = threads, ahead
        self.device = torch.device(device)
        self.on_bad, self.verify = on_bad, verify

    def __len__(self) -> int:
        """Number of steps. Raises TypeError where the loader has no end."""
        if self.stop is None:
            raise TypeError("this loader has no end: it was given no stop")
        return -(-(self.stop - self.start) // self.batch)

    def __iter__(self) -> Iterator[Batch]:
        ring = _Ring(self)
        try:
            yield from ring
        finally:  # also when the iterator is abandoned: its threads end with it
            ring.close()

    def _spans(self) -> Iterator[tuple[int, int]]:
        """(low, high) positions of this rank in each step."""
        position = self.start
        while self.stop is None or position < self.stop:
            # With an order every step is full; without one the set is served once and the last step is short.
            total = self.batch if self.order or self.stop is None else min(self.batch, self.stop - position)
            low, high = share(total, self.rank, self.world)
            yield position + low, position + high
            position += total


@dataclass(slots=True)
class _Slot:
    images: torch.Tensor
    pixels: NDArray[np.uint8]
    free: torch.cuda.Event | None = None


class _Ring:
    """The producing thread, the slots, and what the consumer waits on."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._decoder = Decoder(loader.threads)
        self._cuda = loader.device.type == "cuda"
        self._free: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        largest = -(-loader.batch // loader.world)
        for _ in range(loader.ahead):
            shape = (largest, *loader.size, loader.channels)
            images = torch.empty(shape, dtype=torch.uint8, pin_memory=self._cuda)
            self._free.put(_Slot(images, images.numpy()))
        self._stopped = False
        self._thread = threading.Thread(target=self._produce, name="headway-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        stream = torch.cuda.Stream() if self._cuda else None
        while True:
            item = self._ready.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            slot, batch = item
            if stream is not None:
                batch = self._to_device(slot, batch, stream)
                self._free.put(slot)
                yield batch
            else:
                yield batch
                self._free.put(slot)

    def _to_device(self, slot: _Slot, batch: Batch, stream: torch.cuda.Stream) -> Batch:
        device = self._loader.device
        with torch.cuda.stream(stream):
            images = batch.images.to(device, non_blocking=True)
            labels = batch.labels.pin_memory().to(device, non_blocking=True)
            slot.free = torch.cuda.Event()
            slot.free.record(stream)
        current = torch.cuda.current_stream()
        current.wait_stream(stream)
        images.record_stream(current)
        labels.record_stream(current)
        return Batch(
            images=images,
            labels=labels,
            positions=batch.positions,
            epochs=batch.epochs,
            samples=batch.samples,
            served=batch.served,
            seed=batch.seed,
            bad=batch.bad,
        )

    def close(self) -> None:
        self._stopped = True
        self._free.put(None)
        self._thread.join()

    def _produce(self) -> None:
        try:
            for low, high in self._loader._spans():
                slot = self._free.get()
                if slot is None or self._stopped:
                    return
                if slot.free is not None:
                    slot.free.synchronize()  # this thread waits for the copy, never the training loop
                self._ready.put((slot, self._fill(slot, np.arange(low, high))))
            self._ready.put(None)
        except BaseException as error:  # the consumer must hear of it, whatever it is
            self._ready.put(error)
        finally:
            self._decoder.close()

    def _fill(self, slot: _Slot, positions: NDArray[np.int64]) -> Batch:
        loader = self._loader
        if loader.order is not None:
            epochs, samples = loader.order(positions)
        else:
            epochs, samples = np.zeros_like(positions), positions
        pixels = slot.pixels[: len(samples)]
        status = self._decode(samples, pixels)
        served, bad = samples, []
        if status.any():
            served = samples.copy()
            for place in np.flatnonzero(status):
                reason = Status(status[place]).name.lower()
                served[place] = self._replace(int(positions[place]), int(samples[place]), pixels, int(place), reason)
                bad.append(Bad(int(positions[place]), int(samples[place]), int(served[place]), reason))
        labels = np.ascontiguousarray(loader.dataset.label[np.maximum(served, 0)])
        return Batch(
            images=slot.images[: len(samples)],
            labels=torch.from_numpy(labels),
            positions=positions,
            epochs=epochs,
            samples=samples,
            served=served,
            seed=loader.order.seed if loader.order else 0,
            bad=tuple(bad),
        )

    def _decode(self, samples: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        data = self._loader.dataset
        buffers = data.read(samples)
        boxes = center_boxes(data.width[samples], data.height[samples], self._loader.size)
        status = self._decoder(buffers, boxes, out)
        intact = data.intact(samples, buffers, self._loader.verify)
        if not intact.all():
            status[~intact] = Status.CHECKSUM
            out[~intact] = 0
        return status

    def _replace(self, position: int, asked: int, pixels: NDArray[np.uint8], place: int, reason: str) -> int:
        """Serves the first good sample after the asked one in its epoch's permutation; -1 where it is masked."""
        loader = self._loader
        if loader.on_bad == "stop":
            raise DataError(
                f"sample {asked} ({loader.dataset.name(asked)}) is damaged ({reason})",
                where=str(loader.dataset.folder),
                fix="Run headway verify on the folder and pack again, or set data.on_bad to substitute or mask.",
            )
        if loader.on_bad == "mask" or loader.order is None:
            return -1
        n = len(loader.dataset)
        first = position - position % n
        for step in range(1, n):
            near = np.array([first + (position - first + step) % n])
            _, sample = loader.order(near)
            if not self._decode(sample, pixels[place : place + 1]).any():
                return int(sample[0])
        raise DataError("every sample is damaged", where=str(loader.dataset.folder), fix="Pack the data again.")
