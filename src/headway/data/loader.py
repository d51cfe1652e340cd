"""Loader: batches in the Order, decoded ahead of need by a thread of its own into a ring of preallocated slots."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter, sleep
from typing import Any, Literal, final

import numpy as np
import torch

from headway.core.cpu_count import read_local_ranks
from headway.core.errors import UsageError, suggest_nearest
from headway.data.batch import Batch
from headway.data.batch_plan import BatchPlan
from headway.data.dataset import Dataset
from headway.data.decode import Backend, chosen, decoder
from headway.data.fill import Filler, View
from headway.data.ops.move import flip_and_translate
from headway.data.options import Cache, CropRecipe, OnBad, Verify
from headway.data.order import Order, share
from headway.data.resolution import ProgressiveRecipe
from headway.data.stats import LoaderStats, Tally
from headway.data.tiers import HostSlots, Tier, choose_tier
from headway.data.tiers.device import DeviceTier
from headway.data.upload import to_device

PAUSE_S = 0.0005
"""Before a batch is made that is not urgent. Training on digits waits 1.3 % of its time with it and 6.5 % without."""

DRAWN_SAMPLES = 4096
"""Order, keys and choices of so many samples are computed together: of 512 they cost 0.5 us a sample, of these 0.2."""


@final
class Loader:
    """Iterates batches of a data set.

    Args:
        dataset: where the samples lie.
        batch: the global batch; a step takes the next `batch` positions, across an epoch's end too. Or a plan of
            batches that grow.
        order: the order of training; None: every sample once in index order, the last batch short (evaluation).
        start, stop: positions served; `stop` None: without end (with an order), or the whole set (without).
        rank, world: this rank takes its share of every step.
        size: side or (height, width) of the images; None: their own, where they share one.
        channels: 1 or 3; None: as the data set has them.
        crop: "center", "random" or a `CropRecipe`: the box of each image that is resized.
        flip: True or "random", "alternating", False: mirrored left to right while decoding.
        translate: moved by up to so many pixels both ways; the border is filled by reflection.
        progressive: smaller images in the first epochs.
        scaled: decode large JPEGs smaller; see `DataRecipe`.
        threads: decoding threads; see `choose_thread_count`.
        backend: what decodes: "auto", "native" or "pillow".
        ahead: slots of the ring, so many batches are decoded ahead of need.
        device: where the batch is put.
        pin: each decoding thread keeps to one CPU; see `decoder`.
        cache: where the samples are kept while this loader lives: "auto", "device", "memory", "disk" or "none"; see
            `headway.data.tiers`. A set that is kept decoded is decoded before the first batch.
        tier: the tier itself, in place of `cache`, where several loaders share one; who made it closes it.
        on_bad: a damaged sample is `substitute`d by the first good one after it in the Order, `mask`ed (zeros, served
            -1), or it `stop`s the iteration with DataError.
        verify: when checksums are looked at; see `Dataset.unchecked`.

    Crop, flip and translate are drawn from the samples' keys, so they need an order.

    Memory: `ahead` x batch x H x W x C bytes for the ring, what the tier keeps, and one byte a sample for `verify`.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch: int | BatchPlan,
        order: Order | None = None,
        start: int = 0,
        stop: int | None = None,
        rank: int = 0,
        world: int = 1,
        size: int | tuple[int, int] | None = None,
        channels: int | None = None,
        crop: Literal["center", "random"] | CropRecipe = "center",
        flip: bool | Literal["random", "alternating"] = False,
        translate: int = 0,
        progressive: ProgressiveRecipe | None = None,
        scaled: bool = False,
        threads: int | None = None,
        backend: Backend = "auto",
        ahead: int = 3,
        device: torch.device | str = "cpu",
        pin: bool = False,
        cache: Cache = "none",
        tier: Tier | None = None,
        on_bad: OnBad = "substitute",
        verify: Verify = "first",
    ) -> None:
        plan = batch if isinstance(batch, BatchPlan) else BatchPlan(batch)
        if order is None and stop is not None and stop > len(dataset):
            raise UsageError(
                f"a stop at {stop} of {len(dataset)} samples", fix="Give an order to go through them again."
            )
        if start < 0 or (stop is not None and stop < start):
            raise UsageError(
                f"positions from {start} to {stop}", fix="Positions count from 0, and stop is not below start."
            )
        sides = size if isinstance(size, tuple) else (size,) if size is not None else ()
        if not all(isinstance(side, int) and side >= 1 for side in sides) or len(sides) not in (0, 1, 2):
            raise UsageError(f"{size!r} is no size", fix="Give one side, or (height, width), in pixels.")
        if isinstance(flip, str) and flip not in ("random", "alternating"):
            fix = suggest_nearest(flip, ("random", "alternating"))
            raise UsageError(f"{flip!r} is no kind of flip", fix=f"{fix} Or give True or False.".strip())
        if isinstance(crop, str) and crop not in ("center", "random"):
            raise UsageError(f"{crop!r} is no kind of crop", fix=suggest_nearest(crop, ("center", "random")))
        if backend not in ("auto", "native", "pillow"):
            raise UsageError(f"{backend!r} is no decoder", fix=suggest_nearest(backend, ("auto", "native", "pillow")))
        if ahead < 1:
            raise UsageError(f"{ahead} batches ahead", fix="Set 1 or more.")
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} of a world of {world}", fix="Ranks count from 0.")
        common = dataset.description.common_size
        if size is None and common is None:
            raise UsageError("the images have different sizes", fix="Give the loader a size=(height, width).")
        if order is not None and order.samples != len(dataset):
            raise UsageError(f"an order of {order.samples} samples over a data set of {len(dataset)}")
        self.dataset, self.plan, self.order, self.start = dataset, plan, order, start
        self.stop = len(dataset) if order is None and stop is None else stop
        self.rank, self.world = rank, world
        self.view = View(
            size=(size, size) if isinstance(size, int) else size or (common[1], common[0]),  # type: ignore[index]
            channels=channels or dataset.description.channels,
            crop=crop if isinstance(crop, CropRecipe) else CropRecipe(name=crop),
            flip=("random" if flip else None) if isinstance(flip, bool) else flip,
            translate=translate,
            progressive=progressive,
            scaled=scaled,
        )
        if order is None and (self.view.random or progressive is not None):
            raise UsageError(
                "random crops, flips and shifts are drawn from an order's seed, and there is no order",
                fix="Give an order, or leave them out.",
            )
        self.threads, self.backend, self.pin, self.ahead = threads, chosen(backend), pin, ahead
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError("PyTorch sees no GPU here", fix='Leave device out, or give "cpu".')
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.on_bad, self.verify = on_bad, verify
        self._cache, self._tier = cache, tier
        self._choosing = threading.Lock()
        self._tally = Tally()
        self._threads_used = 0

    def __repr__(self) -> str:
        steps = "without end" if self.stop is None else f"{len(self)} steps"
        return f"Loader of {self.dataset!r}: {steps} of {self.plan}, images of {self.size[0]} x {self.size[1]}"

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the images at the end of training."""
        return self.view.size

    @property
    def tier(self) -> Tier:
        """Where the bytes are kept; chosen, and filled, at first use."""
        with self._choosing:
            if self._tier is None:
                # Pixels on a GPU can be gathered there, not resized.
                device = self.device if self.takes_pixels_as_they_are() else "cpu"
                cache = self._cache
                if self.view.scaled and cache == "auto":  # kept pixels are not the smaller decode's
                    cache = "none"
                self._tier = choose_tier(self.dataset, cache, device=device, threads=self.threads, backend=self.backend)
        return self._tier

    def takes_pixels_as_they_are(self) -> bool:
        """Whether every image already has the size and the channels of the batch."""
        found, (height, width) = self.dataset.description, self.view.size
        alike = found.common_size == (width, height) and found.channels == self.view.channels
        return self.view.whole and alike

    def __len__(self) -> int:
        """Number of steps. Raises TypeError where the loader has no end."""
        if self.stop is None:
            raise TypeError("this loader has no end: it was given no stop")
        return self.plan.steps_between(self.start, self.stop)

    def __iter__(self) -> Iterator[Batch]:
        ring = _Ring(self)
        try:
            yield from ring
        finally:  # also when the iterator is abandoned: its threads end with it
            ring.close()

    def stats(self) -> LoaderStats:
        """What was measured in all iterations so far."""
        tally = self._tally
        return LoaderStats(
            images=tally.images,
            batches=tally.batches,
            timed_images=tally.timed_images,
            seconds=tally.seconds,
            wait_s=tally.wait_s,
            occupancy=tally.ready / tally.asked if tally.asked else 0.0,
            ahead=self.ahead,
            stage_s=dict(tally.stage_s),
            stage_images=tally.stage_images,
            cores=replace(tally.cores),
            record_bytes=tally.record_bytes,
            threads=self._threads_used,
            backend=self.backend,
            tier=self._tier.why if self._tier is not None else "",
        )

    def _slots_of_host(self) -> HostSlots | None:
        """The slots of a step that the ranks of this host take, where the launcher says how many they are."""
        ranks = read_local_ranks()
        if self.world == 1 or ranks is None or self.world % ranks or self.order is None:
            return None
        first = self.rank // ranks * ranks
        return HostSlots(self.plan, first, first + ranks, self.world)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """(low, high) positions of this rank in each step."""
        position = self.start
        while self.stop is None or position < self.stop:
            # With an order every step is full; without one the set is served once and the last step is short.
            total = self.plan.batch_at(position)
            if self.order is None and self.stop is not None:
                total = min(total, self.stop - position)
            low, high = share(total, self.rank, self.world)
            yield position + low, position + high
            position += total


def _grouped(spans: Iterator[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Spans of DRAWN_SAMPLES positions together, or the rest."""
    group: list[tuple[int, int]] = []
    count = 0
    for low, high in spans:
        group.append((low, high))
        count += high - low
        if count >= DRAWN_SAMPLES or len(group) >= DRAWN_SAMPLES:
            yield group
            group, count = [], 0
    if group:
        yield group


@dataclass(slots=True)
class _Slot:
    memory: torch.Tensor
    """uint8, flat: batches of different sizes lie in it."""
    free: torch.cuda.Event | None = None


@final
class _Ring:
    """The producing thread, the slots, and what the consumer waits on."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._tally = loader, loader._tally
        self._tier = tier = loader.tier
        if loader.view.scaled and tier.damaged is not None:
            what = "samples that are kept decoded are whole, and scaled asks for a smaller decode"
            raise UsageError(what, where="scaled", fix="Leave scaled out, or set cache to none or disk.")
        if isinstance(tier, DeviceTier) and not loader.takes_pixels_as_they_are():
            what = "samples that are kept decoded on the device cannot be cropped or resized"
            raise UsageError(what, where="cache", fix="Set cache to memory or none, or leave size and crop out.")
        tier.expect(loader._spans(), loader.order, loader._slots_of_host())
        self._process = os.getpid()
        self._decoder = decoder(loader.threads, loader.backend, pin=loader.pin)
        loader._threads_used = self._decoder.threads
        self._filler = Filler(
            loader.dataset,
            tier,
            loader.order,
            loader.view,
            self._decoder,
            self._tally,
            on_bad=loader.on_bad,
            verify=loader.verify,
        )
        self._cuda = loader.device.type == "cuda"
        self._free: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        height, width = loader.size
        most = loader.plan.largest
        if loader.order is None:
            most = min(most, max(0, loader.stop or 0))
        largest = -(-most // loader.world) * height * width * loader.view.channels
        try:
            slots = loader.ahead if loader.stop is None else min(loader.ahead, len(loader))
            for _ in range(slots):
                self._free.put(_Slot(torch.empty(largest, dtype=torch.uint8, pin_memory=self._cuda)))
        except RuntimeError:  # there is not so much memory
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
                what = "a process that was forked while it went through a loader has none of its threads"
                raise UsageError(what, fix="Begin anew there: iterate the loader again, with start= where it goes on.")
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
            if self._filler.on_device:
                batch, here = self._gathered(batch), False
            elif stream is not None:
                batch, here = self._copied(slot, batch, stream), False
            else:
                here = True  # the images are the slot's
            if not here:
                self._free.put(slot)
            yield batch
            if here:
                self._free.put(slot)
            tally.images += len(batch.positions)
            tally.batches += 1
            if not first:  # the first one had to be waited for
                tally.timed_images += len(batch.positions)
                tally.seconds += perf_counter() - asked
            first = False

    def _copied(self, slot: _Slot, batch: Batch, stream: torch.cuda.Stream) -> Batch:
        device = self._loader.device
        with torch.cuda.stream(stream):
            images = batch.images.to(device, non_blocking=True)
            labels = batch.labels.pin_memory().to(device, non_blocking=True)
            slot.free = torch.cuda.Event()
            slot.free.record(stream)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        images.record_stream(current)
        labels.record_stream(current)
        return replace(batch, images=images, labels=labels)

    def _gathered(self, batch: Batch) -> Batch:
        """The batch's images from where they lie on the device; its labels beside them. The host does not wait."""
        assert isinstance(self._tier, DeviceTier)
        device = self._loader.device
        images = self._tier.gather(np.maximum(batch.served, 0))
        masked = np.flatnonzero(batch.served < 0)
        if masked.size:
            images.index_fill_(0, to_device(masked, device), 0)
        if batch.flips is not None or batch.shifts is not None:
            images = flip_and_translate(images, batch.flips, batch.shifts)
        return replace(batch, images=images, labels=to_device(batch.labels.numpy(), device))

    def close(self) -> None:
        self._stopped = True
        self._free.put(None)
        if os.getpid() == self._process:
            self._thread.join()

    def _free_slot(self) -> _Slot | None:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            slot = self._free.get()
        # The consumer has just come for a batch, another one is ready, and it is about to run Python, as we are: that
        # of the two takes turns. A little later it is inside its network, which leaves the interpreter to us.
        sleep(PAUSE_S)
        return slot

    def _produce(self) -> None:
        try:
            for spans in _grouped(self._loader._spans()):
                for step in self._filler.steps(spans):
                    slot = self._free_slot()
                    if slot is None or self._stopped:
                        return
                    if slot.free is not None:
                        slot.free.synchronize()  # this thread waits for the copy, never the training loop
                    self._ready.put((slot, self._filler.fill(slot.memory, step)))
            self._ready.put(None)
        except BaseException as error:  # the consumer must hear of it, whatever it is
            self._ready.put(error)
        finally:
            self._tally.cores.add(self._decoder.stats)
            self._decoder.close()
