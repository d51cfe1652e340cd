"""Saver: checkpoints written beside the training, by all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from headway.checkpoint.agreement import Alone, Exchange
from headway.checkpoint.checkpoints import Checkpoints
from headway.checkpoint.save import Flight, Setting
from headway.core.errors import CommunicationError

GRACE_S = 10.0
"""How long `close` waits for ranks that may have ended."""


def _nothing() -> None:
    pass


@final
class Saver:
    """Writes checkpoints in a thread while training goes on; with several ranks, each its share of the tensors.

    One save is in flight at most: the next one, and `wait`, wait for it and raise what went wrong with it, on all ranks
    the same. A checkpoint that one of them did not finish never opens.

    Args:
        checkpoints: where they lie, and how many are kept.
        asynchronous: False writes before `save` returns, and needs no copy of the state.
        say: told where not all ranks see the folder; rank 0 then writes everything.
        go_on: the command with which training can be gone on with; the sentence about a save that failed ends with it.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        asynchronous: bool = True,
        say: Callable[[str], object] = print,
        go_on: str = "",
    ) -> None:
        self._checkpoints, self._asynchronous, self._say, self._go_on = checkpoints, asynchronous, say, go_on
        self._flight: Flight | None = None
        self._newest: Flight | None = None
        self._thread: threading.Thread | None = None
        self.meet(Alone())

    def meet(self, exchange: Exchange, confirm: Callable[[], None] = _nothing) -> None:
        """From now on it saves with these ranks. Returns at once; what the former ones have not finished is given up.

        Args:
            exchange: of the ranks; every one of them has to save the same steps in the same order.
            confirm: called by rank 0, in the thread that writes, right before a checkpoint can be opened; what it
                raises keeps it from being so.
        """
        if self._flight is not None:
            self._flight.give_up()
        self._exchange, self._confirm = exchange, confirm
        self._number, self._shared = 0, None if exchange.size > 1 else True

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
        """Saves a step. Every rank calls it with the same tensors; `scalars`, and those tensors whose names begin with
        `random/`, are rank 0's.

        Raises:
            HeadwayError: the save before this one failed (asynchronous=False: this one): the disk is full, ...
        """
        self.wait()
        self._number += 1
        setting = Setting(
            self._checkpoints.place,
            self._checkpoints.keep,
            self._exchange,
            self._number,
            self._shared,
            self._confirm,
            self._say,
            self._go_on,
        )
        self._flight = self._newest = Flight(setting, step, tensors, scalars, copy=self._asynchronous)
        if self._asynchronous:
            self._thread = threading.Thread(target=self._flight.run, name="headway-checkpoint")
            self._thread.start()
        else:
            self._flight.run()
            self.wait()

    @property
    def busy(self) -> bool:
        """Whether a save was begun that nobody has waited for."""
        return self._flight is not None

    @property
    def writing(self) -> bool:
        """Whether the newest save has not come about, as far as this rank knows: it is under way, or was given up."""
        return self._newest is not None and not self._newest.done

    def wait(self) -> None:
        """Waits for the save in flight.

        Raises:
            HeadwayError: it failed: the disk is full, ...
        """
        if self._thread is not None:
            self._thread.join()
        flight, self._flight, self._thread = self._flight, None, None
        if flight is None:
            return
        together = flight.exchange is self._exchange
        if flight.error is not None and (together or not isinstance(flight.error, CommunicationError)):
            raise flight.error  # that former ranks cannot be reached any more is no news
        if together:
            self._shared = flight.shared

    def close(self) -> None:
        """Ends it, also after an error elsewhere: waits for the save in flight, for other ranks only GRACE_S. Raises
        nothing; `wait` says how it went."""
        if self._flight is not None and self._exchange.size > 1:
            self._flight.give_up(after_s=GRACE_S)
        if self._thread is not None:
            self._thread.join()
        self._flight = self._thread = None
