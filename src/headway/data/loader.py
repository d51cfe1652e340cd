"""Loader: batches in the Order, decoded ahead of need by its own thread into a ring of preallocated slots."""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter, sleep
from typing import Any, final

import numpy as np
import torch

from headway.core.cpu_count import read_local_ranks
from headway.core.errors import UsageError
from headway.data import opening
from headway.data.batch import Batch
from headway.data.dataset import Dataset
from headway.data.decode import build_decoder, resolve_backend
from headway.data.epoch_cursor import EpochCursor
from headway.data.fill import BatchFiller
from headway.data.loader_spec import LoaderSpec
from headway.data.loader_stats import LoaderStats, LoaderTally
from headway.data.ops.move import flip_and_translate
from headway.data.order import get_rank_slots
from headway.data.tiers import HostSlots, Tier, choose_tier
from headway.data.tiers.device import DeviceTier
from headway.data.upload import to_device

# Pause before a batch that is not urgent. Training on digits waits 1.3 % of its time with it and 6.5 % without.
PRODUCER_PAUSE_S = 0.0005

# Samples whose order, keys and choices are computed together. At 512 they cost 0.5 us a sample, at 4096 0.2.
SAMPLES_PER_DRAW = 4096


@final
class Loader:
    """Iterates over batches of a data set; each iteration serves the next epoch.

    `Loader("photos.packed", batch=64, seed=1)`, with the options of `LoaderSpec` as keywords; or `Loader(dataset,
    spec)`, with keywords for values that differ from the spec's. `state_dict` and `load_state_dict` save and restore
    its position, also inside an epoch, as torchdata's StatefulDataLoader does.

    Args:
        dataset: an open data set, or its path or URL as for `headway.open`.

    Memory: `prefetch_batches` x batch x H x W x C bytes for the ring, the bytes that the tier keeps, and one byte a
    sample for `verify`.

    Attributes:
        spec: the options.
        device: device of the batches, with its number.
        backend: the decoder in use, "native" or "pillow".

    Raises:
        UsageError: the options do not fit the data set or this machine, or `dataset` is none.
    """

    def __init__(
        self, dataset: Dataset | str | os.PathLike[str], spec: LoaderSpec | None = None, **options: Any
    ) -> None:
        dataset = _open_dataset(dataset)
        spec = LoaderSpec(**options) if spec is None else replace(spec, **options)
        self.spec = spec = spec.resolve_order(len(dataset))
        self.dataset, self.transform = dataset, spec.build_transform(dataset.description)
        self._cursor = EpochCursor(len(dataset), spec.order, spec.plan, spec.start, spec.stop)
        self.backend = resolve_backend(spec.backend)
        self.device = torch.device(spec.device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError("PyTorch sees no GPU here", fix='Leave device out, or give "cpu".')
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        # Chosen at first use: filling a tier may take minutes, and a loader that only answers len() needs none.
        self._tier = spec.tier
        self._choosing = threading.Lock()
        self._tally = LoaderTally()
        self._threads_used = 0
        self._ring: _LoaderRing | None = None

    def __repr__(self) -> str:
        steps = "without end" if self._cursor.is_endless else f"{len(self)} steps"
        return f"Loader of {self.dataset!r}: {steps} of {self.spec.plan}, images of {self.size[0]} x {self.size[1]}"

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the images at the end of training."""
        return self.transform.size

    @property
    def tier(self) -> Tier:
        """Storage of the samples' bytes; chosen, and filled, at first use."""
        with self._choosing:
            if self._tier is None:
                # Pixels on a GPU can be gathered there, but not resized.
                device = self.device if self.uses_stored_pixels() else "cpu"
                # Kept pixels are those of a full decode, so a smaller decode cannot use them.
                cache = "none" if self.spec.scaled and self.spec.cache == "auto" else self.spec.cache
                self._tier = choose_tier(
                    self.dataset, cache, device=device, threads=self.spec.threads, backend=self.backend
                )
        return self._tier

    def uses_stored_pixels(self) -> bool:
        """Returns True if every image has the size and the channels of the batch already."""
        return self.spec.uses_stored_pixels(self.dataset.description)

    def __len__(self) -> int:
        """Number of steps of the current epoch. Epochs may differ by one, since every step is full; the first has most.

        Raises TypeError if the loader has no end.
        """
        return self._cursor.count_steps()

    def __iter__(self) -> Iterator[Batch]:
        start, stop = self._cursor.begin()
        self._ring = ring = _LoaderRing(self, start, stop)
        # An abandoned iterator comes here too, so its threads end with it.
        try:
            for batch in ring:
                # An older iterator that is still open must not move the newest one's position.
                if self._ring is ring:
                    self._cursor.advance()
                yield batch
            if self._ring is ring:
                self._cursor.finish()
        finally:
            ring.close()

    @property
    def epoch(self) -> int:
        """Epoch that is served, or that the next iteration serves; counted from 0."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration serve this epoch from its beginning."""
        self._ring = None
        self._cursor.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the position behind the last batch that was served: plain numbers."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a saved position, and serve the rest of its epoch.

        Raises:
            CheckpointError: the state is damaged, or of another data set or seed.
        """
        self._ring = None
        self._cursor.load_state_dict(state)

    def stats(self) -> LoaderStats:
        """Returns the measurements of all iterations so far."""
        tally = self._tally
        return LoaderStats(
            images=tally.images,
            batches=tally.batches,
            timed_images=tally.timed_images,
            seconds=tally.seconds,
            wait_s=tally.wait_s,
            occupancy=tally.ready / tally.asked if tally.asked else 0.0,
            prefetch_batches=self.spec.prefetch_batches,
            stage_s=dict(tally.stage_s),
            stage_images=tally.stage_images,
            cores=replace(tally.cores),
            record_bytes=tally.record_bytes,
            threads=self._threads_used,
            backend=self.backend,
            tier=self._tier.why if self._tier is not None else "",
        )

    def _find_host_slots(self) -> HostSlots | None:
        """Returns the slots of a step taken by this host's ranks; None if the launcher does not give their number."""
        ranks, spec = read_local_ranks(), self.spec
        if spec.world == 1 or ranks is None or spec.world % ranks or spec.order is None:
            return None
        first = spec.rank // ranks * ranks
        return HostSlots(spec.plan, first, first + ranks, spec.world)

    def _iterate_spans(self, position: int, stop: float) -> Iterator[tuple[int, int]]:
        """Yields (low, high) positions of this rank in each step from a position on."""
        spec = self.spec
        while position < stop:
            # With an order every step is full; without one the set is served once and the last step is short.
            total = spec.plan.get_batch_size(position)
            if spec.order is None:
                total = min(total, int(stop) - position)
            low, high = get_rank_slots(total, spec.rank, spec.world)
            yield position + low, position + high
            position += total


def _open_dataset(dataset: object) -> Dataset:
    """Returns the data set itself, or opens the one at a path. Raises UsageError if it is neither."""
    if isinstance(dataset, str | os.PathLike):
        return opening.open(dataset)
    if not isinstance(dataset, Dataset):
        what = f"a Loader serves a data set of Headway, and this is a {type(dataset).__name__}"
        raise UsageError(what, fix="Give the path of a pack or of images, or what headway.open(path) returns.")
    return dataset


def _group_spans(spans: Iterator[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yields the spans in groups of about SAMPLES_PER_DRAW positions; the last group is smaller."""
    group: list[tuple[int, int]] = []
    count = 0
    for low, high in spans:
        group.append((low, high))
        count += high - low
        if count >= SAMPLES_PER_DRAW or len(group) >= SAMPLES_PER_DRAW:
            yield group
            group, count = [], 0
    if group:
        yield group


@dataclass(slots=True)
class _RingSlot:
    memory: torch.Tensor
    """uint8, flat: it holds batches of different sizes."""
    copied: torch.cuda.Event | None = None
    """Recorded behind the slot's copy to the device."""


@final
class _LoaderRing:
    """One iteration: the producer thread, the slots, and the queues between producer and consumer."""

    def __init__(self, loader: Loader, start: int, stop: float) -> None:
        spec = loader.spec
        self._start, self._stop = start, stop
        self._loader, self._tally = loader, loader._tally
        self._tier = tier = loader.tier
        if spec.scaled and tier.damaged is not None:
            what = "samples that are kept decoded are whole, and scaled asks for a smaller decode"
            raise UsageError(what, where="scaled", fix="Leave scaled out, or set cache to none or disk.")
        if isinstance(tier, DeviceTier) and not loader.uses_stored_pixels():
            what = "samples that are kept decoded on the device cannot be cropped or resized"
            raise UsageError(what, where="cache", fix="Set cache to memory or none, or leave size and crop out.")
        # The tier reads the positions again from its own iterator, further ahead than the ring.
        tier.expect(loader._iterate_spans(start, stop), spec.order, loader._find_host_slots())
        # A forked child inherits this object without its threads; `__iter__` compares the process.
        self._process = os.getpid()
        self._decoder = build_decoder(spec.threads, loader.backend, pin=spec.pin)
        loader._threads_used = self._decoder.threads
        self._filler = BatchFiller(loader.dataset, tier, spec, loader.transform, self._decoder, self._tally)
        self._cuda = loader.device.type == "cuda"
        self._free: queue.SimpleQueue[_RingSlot | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Slots have the size of this rank's largest batch, so nothing is allocated while training runs.
        largest = spec.plan.largest_batch
        if spec.order is None:
            largest = min(largest, int(stop))
        slot_bytes = -(-largest // spec.world) * loader.size[0] * loader.size[1] * loader.transform.channels
        slots = spec.prefetch_batches
        if not math.isinf(stop):
            slots = min(slots, spec.plan.count_steps(start, int(stop)))
        try:
            for _ in range(slots):
                self._free.put(_RingSlot(torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=self._cuda)))
        # Too little memory: the decoder's threads must not outlive this call.
        except RuntimeError:
            self._decoder.close()
            raise
        self._stopped = False
        self._thread = threading.Thread(target=self._produce, name="headway-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        tally = self._tally
        stream = torch.cuda.Stream(self._loader.device) if self._cuda else None
        first = True
        while True:
            if os.getpid() != self._process:
                what = "this process was forked during an iteration, and the loader's threads stayed in its parent"
                raise UsageError(
                    what, fix="Iterate the loader again in the child; load_state_dict takes it to the same position."
                )
            asked = perf_counter()
            tally.asked += 1
            tally.ready += self._ready.qsize()
            item = self._ready.get()
            now = perf_counter()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            slot, batch = item
            if not first:
                tally.wait_s += now - asked
            # On a CPU the images are the slot's memory: it is free only when the next batch is asked for.
            is_slot_lent = not self._filler.is_on_device and stream is None
            if self._filler.is_on_device:
                batch = self._gather_on_device(batch)
            elif stream is not None:
                batch = self._copy_to_device(slot, batch, stream)
            if not is_slot_lent:
                self._free.put(slot)
            yield batch
            if is_slot_lent:
                self._free.put(slot)
            tally.images += len(batch.positions)
            tally.batches += 1
            # The first batch always has to be waited for, so it is not part of the rate.
            if not first:
                tally.timed_images += len(batch.positions)
                tally.seconds += perf_counter() - asked
            first = False

    # The copy runs on its own stream beside the network; the training stream waits for it, the host never does.
    def _copy_to_device(self, slot: _RingSlot, batch: Batch, stream: torch.cuda.Stream) -> Batch:
        device = self._loader.device
        with torch.cuda.stream(stream):
            images = batch.images.to(device, non_blocking=True)
            labels = batch.labels.pin_memory().to(device, non_blocking=True)
            slot.copied = torch.cuda.Event()
            slot.copied.record(stream)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        # Without these the allocator could hand the memory out again while the training stream still reads it.
        images.record_stream(current)
        labels.record_stream(current)
        return replace(batch, images=images, labels=labels)

    def _gather_on_device(self, batch: Batch) -> Batch:
        """Gathers the batch's images on the device and copies its labels there. The host does not wait."""
        assert isinstance(self._tier, DeviceTier)
        device = self._loader.device
        images = self._tier.gather(np.maximum(batch.served, 0))
        # Masked samples must be zeros, as they are after decoding on the host.
        masked = np.flatnonzero(batch.served < 0)
        if masked.size:
            images.index_fill_(0, to_device(masked, device), 0)
        if batch.flips is not None or batch.shifts is not None:
            images = flip_and_translate(images, batch.flips, batch.shifts)
        return replace(batch, images=images, labels=to_device(batch.labels.numpy(), device))

    def close(self) -> None:
        """Stops the producer and waits for its end."""
        # The None wakes a producer that waits for a slot.
        self._stopped = True
        self._free.put(None)
        if os.getpid() == self._process:
            self._thread.join()

    def _wait_for_slot(self) -> _RingSlot | None:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            slot = self._free.get()
        # The consumer has just taken a batch and another is ready. It is about to run Python, as this thread is, so
        # both would compete for the GIL. A moment later it is inside its network and releases the GIL.
        sleep(PRODUCER_PAUSE_S)
        return slot

    def _produce(self) -> None:
        try:
            for spans in _group_spans(self._loader._iterate_spans(self._start, self._stop)):
                for request in self._filler.plan_batches(spans):
                    slot = self._wait_for_slot()
                    if slot is None or self._stopped:
                        return
                    # This thread waits for the copy to the device, so the training loop never does.
                    if slot.copied is not None:
                        slot.copied.synchronize()
                    self._ready.put((slot, self._filler.fill(slot.memory, request)))
            self._ready.put(None)
        # The consumer raises it, whatever it is: an error that ended here would leave it waiting for ever.
        except BaseException as error:
            self._ready.put(error)
        finally:
            self._tally.cores.add(self._decoder.stats)
            self._decoder.close()
