"""Writes checkpoints in a thread beside the training, on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from headway.checkpoint.agreement import SaveExchange, SingleRankExchange
from headway.checkpoint.checkpoints import Checkpoints
from headway.checkpoint.pieces import Piece
from headway.checkpoint.save import SaveJob, SaveSetting
from headway.core.errors import CommunicationError

# `close` waits this long for ranks that may have ended already.
CLOSE_TIMEOUT_S = 10.0


def _do_nothing() -> None:
    pass


@final
class BackgroundSaver:
    """Writes checkpoints in a thread while training continues; each of several ranks writes its share of the tensors.

    At most one save is in flight. The next `save`, and `wait`, wait for it and raise its error, the same on all ranks.
    A checkpoint that a rank did not finish can never be opened.

    Args:
        checkpoints: folder of the checkpoints, and how many it keeps.
        asynchronous: if False, `save` writes before it returns, and makes no copy of the state.
        resume_command: command that resumes the training; appended to the message of a failed save.
    """

    def __init__(self, checkpoints: Checkpoints, *, asynchronous: bool = True, resume_command: str = "") -> None:
        self._checkpoints, self._asynchronous, self._resume_command = checkpoints, asynchronous, resume_command
        self._job: SaveJob | None = None
        self._newest_job: SaveJob | None = None
        self._thread: threading.Thread | None = None
        self.set_exchange(SingleRankExchange())

    def set_exchange(self, exchange: SaveExchange, confirm: Callable[[], None] = _do_nothing) -> None:
        """Saves with these ranks from now on. Returns at once, and gives up an unfinished save of the former ranks.

        Args:
            exchange: messages between the ranks; all of them must save the same steps in the same order.
            confirm: called by rank 0 in the writing thread, right before a checkpoint becomes visible. If it raises,
                the checkpoint never becomes visible.
        """
        # Ranks of a generation that is over can no longer agree: their save would wait in vain.
        if self._job is not None:
            self._job.give_up()
        self._exchange, self._confirm = exchange, confirm
        self._save_number = 0
        # With several ranks the first save finds out if all of them see the folder.
        self._is_shared = None if exchange.size > 1 else True

    def save(self, step: int, tensors: Mapping[str, torch.Tensor | Piece], scalars: Mapping[str, Any]) -> None:
        """Saves a step. Every rank calls it with the same tensors, and its own pieces. Waits for the save before it.

        `scalars`, and tensors with names that begin with `random/`, are taken from rank 0.

        Raises:
            HeadwayError: the previous save failed (with asynchronous=False: this one), for example on a full disk.
        """
        # One save at a time: two copies of the state could exceed the host's memory.
        self.wait()
        self._save_number += 1
        setting = SaveSetting(
            self._checkpoints.folder,
            self._checkpoints.keep,
            self._exchange,
            self._save_number,
            self._is_shared,
            self._confirm,
            self._resume_command,
        )
        # The copy lets training change the state while the thread writes.
        self._job = self._newest_job = SaveJob(setting, step, tensors, scalars, copy=self._asynchronous)
        if self._asynchronous:
            # No daemon: at exit the interpreter waits until the checkpoint is whole.
            self._thread = threading.Thread(target=self._job.run, name="headway-checkpoint")
            self._thread.start()
        else:
            self._job.run()
            self.wait()

    @property
    def is_pending(self) -> bool:
        """True if a save was started and not waited for."""
        return self._job is not None

    @property
    def is_writing(self) -> bool:
        """True if the newest save is in flight or was given up, as far as this rank knows."""
        return self._newest_job is not None and not self._newest_job.done

    def wait(self) -> None:
        """Waits for the save in flight.

        Raises:
            HeadwayError: it failed, for example on a full disk.
        """
        if self._thread is not None:
            self._thread.join()
        job, self._job, self._thread = self._job, None, None
        if job is None:
            return
        # After a change of ranks, it is no news that the former ranks cannot be reached.
        has_same_ranks = job.exchange is self._exchange
        if job.error is not None and (has_same_ranks or not isinstance(job.error, CommunicationError)):
            raise job.error
        if has_same_ranks:
            # The ranks find out once if all of them see the folder; that holds until the ranks change.
            self._is_shared = job.shared

    def close(self) -> None:
        """Ends the saver, also after an error elsewhere. Raises nothing: call `wait` before, to learn of a failed save.

        Waits for the save in flight, but only CLOSE_TIMEOUT_S for other ranks.
        """
        if self._job is not None and self._exchange.size > 1:
            self._job.give_up(after_s=CLOSE_TIMEOUT_S)
        if self._thread is not None:
            self._thread.join()
        self._job = self._thread = None
