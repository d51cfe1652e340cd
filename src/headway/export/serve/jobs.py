"""Job: one request on its way through the inference thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from headway.export.serve.inputs import Payload
from headway.export.serve.problems import refuse_late
from headway.http.problems import ProblemError


@final
@dataclass(frozen=True, slots=True)
class Answer:
    """The network's answer about the images of one request.

    Attributes:
        rows: one for each image, with the columns of `headway predict`.
        headers: headers that name the model.
    """

    rows: list[dict[str, Any]]
    headers: tuple[tuple[bytes, bytes], ...]


@final
class Job:
    """Images of one request that wait for their answer.

    Attributes:
        images: number of images.
        pixels: number of pixels that are to be decoded.
        payload: the images; None once an answer without them is given, so that a queue of such jobs holds no memory.
        deadline_ms: milliseconds that the answer may take; None: there is no deadline.
        deadline_s: `time.monotonic` after which there is no answer; None: there is no deadline.
        future: gets an Answer or a ProblemError; set by the event loop's thread alone.
    """

    __slots__ = ("_is_lost", "deadline_ms", "deadline_s", "future", "images", "payload", "pixels")

    def __init__(
        self,
        payload: Payload,
        future: asyncio.Future[Answer | ProblemError],
        *,
        arrival_s: float = 0.0,
        deadline_ms: float | None = None,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self.images, self.pixels, self.future = len(payload), payload.count_pixels(), future
        self.payload: Payload | None = payload
        self.deadline_ms, self._is_lost = deadline_ms, is_lost
        self.deadline_s = None if deadline_ms is None else arrival_s + deadline_ms / 1000

    def is_late(self) -> bool:
        """Returns True if the deadline has passed."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    def is_wanted(self) -> bool:
        """Returns True if somebody waits for the answer: neither answered already, nor has the client left."""
        return not self.future.done() and not self._is_lost()

    def refuse_late(self) -> ProblemError:
        """Returns the answer to a job whose deadline has passed."""
        return refuse_late(self.deadline_ms or 0.0)

    def settle(self, outcome: Answer | ProblemError) -> None:
        """Sets the outcome, unless there is one; a result that is late becomes a ProblemError."""
        self.payload = None
        if self.future.done():
            return
        self.future.set_result(self.refuse_late() if isinstance(outcome, Answer) and self.is_late() else outcome)
