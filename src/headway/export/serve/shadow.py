"""Shadow: a second export that answers the same images off the critical path, and is compared with the first."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Full, Queue
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.text_format import pluralise
from headway.export.serve.inputs import Payload
from headway.export.serve.served_model import BatchRecord, ServedModel
from headway.http.problems import ProblemError

LOG = logging.getLogger("headway.export")

WAITING_BATCHES, WAITING_BYTES = 4, 64 << 20
"""Most batches that wait for the shadow, and most bytes of their files, which are kept if it decodes them otherwise.
It may be slower than the first export, and then leaves some out."""
NICENESS = 10
"""Lower priority of the shadow's thread."""
LOG_EVERY_S = 10.0
"""Seconds between two log lines of a kind: about differences, and about failures."""
VALUE_TOLERANCE = 0.01
"""Numbers of a regression differ if they are further apart than this share of the larger one."""

Report = Callable[[str, int, float], None]
"""Called with result ("same", "different", "dropped", "failed"), number of images, largest difference of an output."""


@final
@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that waits.

    Attributes:
        model: the export that has answered it.
        payloads: its images: pixels, or files if the shadow makes other pixels of them.
        outputs: answers of `model`, [images, outputs].
    """

    model: ServedModel
    payloads: list[Payload]
    outputs: NDArray[np.float32]

    def count_bytes(self) -> int:
        """Returns how many bytes of files it holds."""
        return sum(payload.count_bytes() for payload in self.payloads)


@final
class Shadow:
    """Thread of the second export.

    Args:
        model: the second export; closed by `close`.
        report: called from the thread.
    """

    def __init__(self, model: ServedModel, report: Report) -> None:
        self.model = model
        self._report = report
        self._queue: Queue[_Batch | None] = Queue(WAITING_BATCHES)
        # Bytes of files so far. Each is written by one thread alone, so that neither needs a lock.
        self._given_bytes, self._done_bytes = 0, 0
        self._logged_s = {"different": -LOG_EVERY_S, "failed": -LOG_EVERY_S}
        self._unlogged = Counter[str]()
        self._thread = threading.Thread(target=self._work, name="headway-shadow", daemon=True)
        self._thread.start()

    def offer(self, model: ServedModel, record: BatchRecord) -> None:
        """Gives the shadow a batch that `model` has answered; drops it if the shadow is behind. Never waits."""
        if record.pixels is None or record.outputs is None:
            return
        payloads, row = record.good, 0
        # Pixels that both decode alike are decoded once.
        if has_same_input(model, self.model):
            payloads = []
            for payload in record.good:
                payloads.append(Payload(payload.names, pixels=record.pixels[row : row + len(payload)]))
                row += len(payload)
        batch = _Batch(model, payloads, record.outputs)
        size = batch.count_bytes()
        if self._given_bytes - self._done_bytes + size <= WAITING_BYTES:
            with suppress(Full):
                self._queue.put_nowait(batch)
                self._given_bytes += size
                return
        self._report("dropped", record.images, 0.0)

    def close(self) -> None:
        """Compares what waits, then ends the thread and closes the export."""
        self._queue.put(None)
        self._thread.join()
        self.model.close()

    def _work(self) -> None:
        # Linux has a priority for each thread, and sets that of the calling one.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (batch := self._queue.get()) is not None:
            try:
                self._compare(batch)
            # The shadow is on trial: nothing that it does may stop it from being compared, or the server.
            except Exception as error:
                self._fail(len(batch.outputs), f"{type(error).__name__}: {error}")
            self._done_bytes += batch.count_bytes()

    def _compare(self, batch: _Batch) -> None:
        # Another export may have taken over since the start.
        if mismatch := find_mismatch(batch.model, self.model):
            self._fail(len(batch.outputs), mismatch)
            return
        outcomes, own = self.model.answer(batch.payloads)
        problems = [(len(p), o) for p, o in zip(batch.payloads, outcomes, strict=True) if isinstance(o, ProblemError)]
        if problems or own.outputs is None:
            self._fail(sum(images for images, _ in problems), problems[0][1].what)
            return
        manifest = batch.model.exported.manifest
        differs = find_differences(manifest.task, batch.outputs, own.outputs, manifest.threshold)
        largest = float(np.abs(batch.outputs - own.outputs).max())
        different = int(differs.sum())
        self._report("same", len(differs) - different, largest)
        if different:
            self._report("different", different, largest)
            self._log("different", different, "answered", f"differently; outputs are up to {largest:.3g} apart.")

    def _fail(self, images: int, reason: str) -> None:
        self._report("failed", images, 0.0)
        self._log("failed", images, "failed on", f"({reason}). Leave --shadow out, or export its run again.")

    def _log(self, kind: str, images: int, before: str, after: str) -> None:
        """Logs a sentence around the number of images since the last one, at most once in `LOG_EVERY_S`."""
        self._unlogged[kind] += images
        now = time.monotonic()
        if now - self._logged_s[kind] >= LOG_EVERY_S:
            LOG.warning(f"The shadow export {before} {pluralise(self._unlogged[kind], 'image')} {after}")
            self._logged_s[kind], self._unlogged[kind] = now, 0


def find_mismatch(first: ServedModel, second: ServedModel) -> str:
    """Returns why the answers of two exports cannot be compared, or an empty text."""
    a, b = first.exported.manifest, second.exported.manifest
    if a.task != b.task:
        return f"its task is {b.task}, and that of the first export {a.task}"
    return "" if a.names == b.names else "its classes, or the names of its outputs, are others"


def has_same_input(first: ServedModel, second: ServedModel) -> bool:
    """Returns True if two exports make the same pixels of a file."""
    a, b = first.exported.manifest, second.exported.manifest
    names = ("size", "channels", "crop_share", "scaled", "decoder", "orientation")
    return all(getattr(a, name) == getattr(b, name) for name in names)


def find_differences(task: str, first: np.ndarray, second: np.ndarray, threshold: float | None) -> np.ndarray:
    """Returns which images two exports answer differently, bool [b].

    Args:
        task: kind of the task, as in the manifest.
        first, second: outputs [b, outputs].
        threshold: probability from which on a label is predicted (`multi`).
    """
    if task == "class":
        return np.asarray(first.argmax(axis=1) != second.argmax(axis=1))
    if task == "multi":
        limit = 0.5 if threshold is None else threshold
        return np.asarray(((first > limit) != (second > limit)).any(axis=1))
    # NaN differs from everything.
    near = np.abs(first - second) <= VALUE_TOLERANCE * np.maximum(np.abs(first), np.abs(second))
    return np.asarray(~near.all(axis=1))
