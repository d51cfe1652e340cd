"""DecodeRing: one iteration over a data set of Headway: a thread decodes batches into a ring of preallocated slots."""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter, sleep
from typing import Any, final

import numpy as np
import torch

from headway.core.errors import UsageError
from headway.data.batch import Batch
from headway.data.decode import Decoder
from headway.data.fill import BatchFiller
from headway.data.host_transform import HostTransform
from headway.data.loader_spec import LoaderSpec
from headway.data.loader_stats import LoaderTally
from headway.data.ops.move import flip_and_translate
from headway.data.ops.resize import ResizePlan, crop_and_resize, plan_resize
from headway.data.spans import group_spans, iterate_spans
from headway.data.tiers import Tier
from headway.data.tiers.device import DeviceTier
from headway.data.upload import to_device
from headway.data.workers.transform_stage import TransformStage

# Pause before a batch that is not urgent. Training on digits waits 1.3 % of its time with it and 6.5 % without.
PRODUCER_PAUSE_S = 0.0005


@dataclass(slots=True)
class _RingSlot:
    memory: torch.Tensor
    """uint8, flat: it holds batches of different sizes."""
    number: int
    copied: torch.cuda.Event | None = None
    """Recorded behind the slot's copy to the device."""
    resize: ResizePlan | None = None
    """Crops of the batch, if the device makes them."""


@final
class DecodeRing:
    """One iteration: the producer thread, the slots, and the queues between producer and consumer."""

    def __init__(
        self,
        filler: BatchFiller,
        decoder: Decoder,
        tier: Tier,
        spec: LoaderSpec,
        transform: HostTransform,
        device: torch.device,
        tally: LoaderTally,
        positions: tuple[int, float],
        stage: TransformStage | None,
    ) -> None:
        self._stage = stage
        self._filler, self._decoder, self._tier, self._spec = filler, decoder, tier, spec
        self._device, self._tally = device, tally
        self._start, self._stop = start, stop = positions
        # The consumer calls it if the images come together on the device, or if it runs the transform of images itself.
        is_late = filler.is_on_device or (stage is not None and not stage.workers)
        self._transforms_batches = spec.batch_transform is not None and not is_late
        # A forked child inherits this object without its threads; `__iter__` compares the process.
        self._process = os.getpid()
        self._cuda = device.type == "cuda"
        self._free: queue.SimpleQueue[_RingSlot | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Slots have the size of this rank's largest batch, so nothing is allocated while training runs.
        largest = spec.plan.largest_batch
        if spec.order is None:
            largest = min(largest, int(stop))
        slot_bytes = -(-largest // spec.world) * transform.size[0] * transform.size[1] * transform.channels
        slots = spec.prefetch_batches
        if not math.isinf(stop):
            slots = min(slots, spec.plan.count_steps(start, int(stop)))
        try:
            for number in range(slots):
                memory = (
                    torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=self._cuda)
                    if stage is None
                    else stage.inputs[number]
                )
                self._free.put(_RingSlot(memory, number))
        # Too little memory: the decoder's threads must not outlive this call.
        except RuntimeError:
            self._decoder.close()
            raise
        self._stopped = False
        self._thread = threading.Thread(target=self._produce, name="headway-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        tally = self._tally
        stream = torch.cuda.Stream(self._device) if self._cuda else None
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
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            slot, batch = item
            if self._stage is not None and not self._transforms_batches:
                batch = self._stage.finish(slot.number, batch)
            if not first:
                tally.wait_s += perf_counter() - asked
            # On a CPU the images are the slot's memory: it is free only when the next batch is asked for.
            is_slot_lent = not self._filler.is_on_device and stream is None
            if self._filler.is_on_device:
                batch = self._gather_on_device(batch, slot.resize)
            if self._spec.batch_transform is not None and not self._transforms_batches:
                batch = self._spec.batch_transform.transform_batch(batch)
            if stream is not None and not self._filler.is_on_device:
                batch = self._copy_to_device(slot, batch, stream)
            if not is_slot_lent:
                self._free.put(slot)
            yield batch
            if is_slot_lent:
                self._free.put(slot)
            tally.count_batch(len(batch.positions), asked, is_first=first)
            first = False

    # The copy runs on its own stream beside the network; the training stream waits for it, the host never does.
    def _copy_to_device(self, slot: _RingSlot, batch: Batch, stream: torch.cuda.Stream) -> Batch:
        device = self._device
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

    def _gather_on_device(self, batch: Batch, resize: ResizePlan | None) -> Batch:
        """Gathers the batch's images on the device and copies its labels there. The host does not wait."""
        assert isinstance(self._tier, DeviceTier)
        device = self._device
        images = self._tier.gather(np.maximum(batch.served, 0))
        if resize is not None:
            images = crop_and_resize(images, resize)
        # Masked samples must be zeros, as they are after decoding on the host.
        masked = np.flatnonzero(batch.served < 0)
        if masked.size:
            images.index_fill_(0, to_device(masked, device), 0)
        moves = batch.flips, batch.shifts, batch.vertical_flips
        if any(move is not None for move in moves):
            images = flip_and_translate(images, *moves)
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

    def _transform_batch(self, slot: _RingSlot, batch: Batch) -> Batch:
        """Calls the user's transform of whole batches, in the loader's thread."""
        assert self._spec.batch_transform is not None
        if self._stage is not None:
            batch = self._stage.finish(slot.number, batch)
        begun, seconds = perf_counter(), self._tally.stage_s
        batch = self._spec.batch_transform.transform_batch(batch)
        seconds["transform"] = seconds.get("transform", 0.0) + perf_counter() - begun
        if self._stage is None:
            self._tally.transformed_images += len(batch.samples)
        return batch

    def _produce(self) -> None:
        try:
            for spans in group_spans(iterate_spans(self._spec, self._start, self._stop)):
                for request in self._filler.plan_batches(spans):
                    slot = self._wait_for_slot()
                    if slot is None or self._stopped:
                        return
                    # This thread waits for the copy to the device, so the training loop never does.
                    if slot.copied is not None:
                        slot.copied.synchronize()
                    batch = self._filler.fill(slot.memory, request)
                    if isinstance(self._tier, DeviceTier) and batch.boxes is not None:
                        _, height, width, _ = self._tier.pixels.shape
                        slot.resize = plan_resize(batch.boxes, (height, width), (*batch.images.shape[1:3],))
                    # The workers of the user's transform go on with it while the next batch is decoded.
                    if self._stage is not None:
                        self._stage.begin(slot.number, batch)
                    if self._transforms_batches:
                        batch = self._transform_batch(slot, batch)
                    self._ready.put((slot, batch))
            self._ready.put(None)
        # The consumer raises it, whatever it is: an error that ended here would leave it waiting for ever.
        except BaseException as error:
            self._ready.put(error)
        finally:
            self._tally.cores.add(self._decoder.stats)
            self._decoder.close()
