"""Servers of asynchronous training: each has a share of the weights, and threads that talk to the workers.

Server 0 leads: it leases the steps and puts all updates into one order. The other servers follow that order, so all
weights that a worker reads are of one version. A worker sends its gradients to the followers first, which acknowledge
them; so what the leader has got is applied everywhere, or, if the worker is lost before, nowhere.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from torch import Tensor

from headway.core.errors import CommunicationError
from headway.parallel.buffers import SharedBuffers
from headway.parallel.flat_tensors import FlatTensors
from headway.parallel.ledger import Lease, Ledger, Update
from headway.parallel.shards import WeightShard


class Push(NamedTuple):
    """The numbers that a worker sends with gradients and buffers.

    Attributes:
        loss: mean loss of the step.
        bad: number of damaged samples.
        stops: this process was told to stop.
    """

    loss: float
    bad: int = 0
    stops: bool = False


class Event(NamedTuple):
    """An entry in the order that all servers follow.

    Attributes:
        kind: `apply` a worker's gradients, `give` it weights, `drop` it, or `end`.
        is_stale: the weights have changed since the worker read them.
    """

    kind: str
    worker: int = -1
    lr: float = 0.0
    is_stale: bool = False


def build_end_error() -> CommunicationError:
    """Returns the error of those who wait for servers that have ended, whose own errors say why."""
    fix = "Look at the messages of the other processes, and start the run again with --resume."
    return CommunicationError("the servers of this run have ended", fix=fix)


@final
class Outbox:
    """The weights that a worker is given: filled by the thread that applies updates, taken by the worker's thread."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.flat = FlatTensors(tensors)
        self._filled: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copies the weights for the worker."""
        self.flat.pack(tensors)
        self._filled.put(True)

    def cancel(self) -> None:
        """Ends the wait: the worker is gone, or the servers end."""
        self._filled.put(False)

    def wait(self) -> FlatTensors:
        """Waits for the weights. Raises CommunicationError if there will be none."""
        if not self._filled.get():
            raise build_end_error()
        return self.flat


@final
class ShardServer:
    """A server's weights and the mail of its workers, without the order of updates.

    Args:
        shard: its weights.
        workers: ranks of all workers.
        buffers: the network's buffers, on the leader.
        on_applied: called after each update.
    """

    def __init__(
        self,
        shard: WeightShard,
        workers: Sequence[int],
        buffers: SharedBuffers | None = None,
        on_applied: Callable[[], None] = lambda: None,
    ) -> None:
        self.shard, self.buffers, self._on_applied = shard, buffers, on_applied
        self.like = [*shard.weights, *(buffers.tensors if buffers else ())]
        self.inboxes = {worker: FlatTensors(self.like) for worker in workers}
        self.outboxes = {worker: Outbox(self.like) for worker in workers}

    def handle(self, event: Event) -> float:
        """Does what an event says; returns the relative size of the compensation."""
        ratio, worker = 0.0, event.worker
        if event.kind == "apply":
            received = self.inboxes[worker].unpack()
            gradients = received[: len(self.shard.weights)]
            ratio = self.shard.apply(worker, gradients, event.lr, is_stale=event.is_stale)
            if self.buffers is not None:
                pushed = [buffer for buffer in received[len(gradients) :] if buffer is not None]
                self.buffers.add(worker, pushed, is_stale=event.is_stale)
            self._on_applied()
        elif event.kind == "give":
            self.shard.note_read(worker)
            if self.buffers is not None:
                self.buffers.note_read(worker)
            self.outboxes[worker].fill(self.like)
        elif event.kind == "drop":
            self.shard.forget(worker)
            if self.buffers is not None:
                self.buffers.forget(worker)
            self.outboxes[worker].cancel()
        return ratio


@final
class LeadServer:
    """Server 0: leases steps and orders all updates. Any thread may call its methods.

    Args:
        server: its weights.
        ledger: the steps of this segment.
        lr_at: learning rate of the update with a number, from 0.
        on_update: called with each update, its loss and the relative size of its compensation.
        followers: queues of the other servers' events.
    """

    def __init__(
        self,
        server: ShardServer,
        ledger: Ledger,
        lr_at: Callable[[int], float],
        on_update: Callable[[Update, Push, float], None],
        followers: Sequence[queue.SimpleQueue[Event]] = (),
    ) -> None:
        self._server, self._ledger, self._lr_at, self._on_update = server, ledger, lr_at, on_update
        self._followers = followers
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._has_ended = False

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that are not lost."""
        return self._ledger.workers

    @property
    def version(self) -> int:
        """Number of updates applied."""
        return self._ledger.version

    def exchange(self, worker: int, push: Push | None) -> Lease | None:
        """Applies what lies in a worker's inbox, and gives it the next step and the weights for it.

        Waits while the worker is too far ahead, and at the end for the steps of the others.

        Args:
            push: what the worker says about its step; None: it has none yet.

        Returns:
            The step; None once the segment is over.
        """
        # At once, so that no update comes between: the mean delay of W workers is then W - 1, whatever their speeds.
        with self._changed:
            self._raise_error()
            if push is not None:
                self._apply(worker, push)
            while True:
                self._raise_error()
                if lease := self._ledger.take(worker):
                    self._emit(Event("give", worker))
                    return lease
                if self._ledger.is_drained:
                    self._end()
                    return None
                self._changed.wait()

    def _apply(self, worker: int, push: Push) -> None:
        update = self._ledger.complete(worker)
        lr = self._lr_at(update.applied - 1)
        ratio = self._emit(Event("apply", worker, lr, update.staleness > 0))
        if push.stops:
            self._ledger.stop_leasing()
        self._on_update(update, push, ratio)
        self._changed.notify_all()

    def drop(self, worker: int) -> bool:
        """Goes on without a worker that is lost. Returns False if it is dropped already, or the servers have ended."""
        with self._changed:
            if worker not in self._ledger.workers:
                return False
            self._ledger.drop(worker)
            self._emit(Event("drop", worker))
            self._changed.notify_all()
            return self._error is None

    def stop_leasing(self) -> None:
        """Ends the segment after the steps that are under way."""
        with self._changed:
            self._ledger.stop_leasing()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Makes every call from now on raise this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def end(self) -> None:
        """Tells the followers that nothing else will come."""
        with self._changed:
            self._end()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            for follower in self._followers:
                follower.put(Event("end"))

    def _emit(self, event: Event) -> float:
        for follower in self._followers:
            follower.put(event)
        return self._server.handle(event)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
