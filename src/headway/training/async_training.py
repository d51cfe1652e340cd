"""Asynchronous training: each rank takes whole batches, and a server applies its gradients at once.

The run is divided into segments that end where all ranks have to meet: at an evaluation, a checkpoint, or the end.
Within a segment no rank waits for another one. At its end no more steps are leased, all gradients come in, and every
rank takes the state of the servers: weights, statistics, the optimizer's state. So a checkpoint is one like any other.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from headway.checkpoint.compatibility import select_by_prefix
from headway.core.errors import CommunicationError, UsageError
from headway.data.batch import BadSample, Batch
from headway.launch.step_seeds import seed_step
from headway.parallel.host import ServerHost, State
from headway.parallel.ledger import Lease, Ledger, Update
from headway.parallel.parallel_recipe import AsyncRecipe
from headway.parallel.server import Event, LeadServer, Push, ShardServer
from headway.parallel.worker import AsyncWorker, merge_states
from headway.training.actions import Action
from headway.training.async_server import MEAN_SQUARE, ServerState, divide_weights, load_network, load_optimizer

if TYPE_CHECKING:
    from headway.training.trainer import Trainer


@final
class AsyncTraining:
    """Makes the steps of a trainer whose recipe says `parallel: {strategy: async}`.

    Attributes:
        mean_squares: state of adaptive compensation between two segments, by weight.
    """

    def __init__(self, trainer: Trainer) -> None:
        if trainer.callbacks:
            what = "asynchronous training calls no callbacks, since each process has steps of its own"
            raise UsageError(what, fix="Train without them, or with another parallel.strategy.")
        # A proxy, because a reference cycle would keep the trainer's tensors until the next garbage collection.
        self._trainer = cast("Trainer", weakref.proxy(trainer))
        self.mean_squares: dict[str, Tensor] = {}

    @staticmethod
    def create(trainer: Trainer) -> AsyncTraining | None:
        """Returns None if the recipe has another strategy. Raises UsageError if there are callbacks."""
        return AsyncTraining(trainer) if isinstance(trainer.setup.recipe.parallel, AsyncRecipe) else None

    def start(self) -> None:
        """Queues a checkpoint at the beginning of a run: a lost server takes weights along that no other rank has."""
        trainer = self._trainer
        if trainer.ranks is not None and trainer.saved_step is None:
            trainer.recovery.queue(Action.CHECKPOINT)

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint needs besides those of other runs."""
        return {MEAN_SQUARE + name: value for name, value in self.mean_squares.items()}

    def load_state(self, tensors: Any) -> None:
        """Restores them."""
        self.mean_squares = select_by_prefix(tensors, MEAN_SQUARE)

    def run_segment(self, last: int) -> None:
        """Trains to the next step at which all ranks meet, at most to the step `last`.

        Raises:
            CommunicationError: a server was lost. The weights are then those of no step.
        """
        trainer = self._trainer
        stop = self._find_stop(last)
        ranks = trainer.ranks
        if ranks is not None:
            ranks.check()
        with nullcontext(lambda: None) if ranks is None else ranks.continue_without_lost() as check_member:
            segment = _Segment(trainer, self.mean_squares, stop, check_member)
            try:
                scalars, tensors = segment.run()
            # Whatever it was, the weights in this process are not those of a step.
            except CommunicationError:
                trainer.recovery.lose_state()
                raise
        self._take_over(scalars, tensors)

    def _find_stop(self, last: int) -> int:
        """Finds the first step after which something other than a record is due."""
        trainer = self._trainer
        step = trainer.step + 1
        while step < last:
            due = trainer.rules.list_due(step)
            if set(due) - {Action.LOG, Action.AGREE}:
                break
            step += 1
        return step

    def _take_over(self, scalars: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Takes the state of the servers, on every rank."""
        trainer, setup = self._trainer, self._trainer.setup
        load_network(setup.model, tensors)
        load_optimizer(setup.optimizer, setup.model, tensors)
        trainer.averages.load_state(tensors, "the state of the servers")
        self.load_state(tensors)
        trainer.step = scalars["version"]
        trainer.position = setup.plan.find_position(trainer.step)
        trainer.accumulator.add_segment(scalars["losses"], scalars["bad"])
        trainer.accumulator.must_stop |= scalars["stops"]
        trainer.recovery.advance()
        # Every meeting has a record, also one before the step at which one is due: with it all ranks gather the damaged
        # samples, judge the losses, and learn whether the lead saw the run diverge.
        rules = trainer.rules
        trainer.recovery.queue(*(rules.list_due(trainer.step) or rules.list_log_actions()))
        if scalars["regroups"]:
            trainer.recovery.queue(Action.REGROUP)


@final
class _Segment:
    """One segment on this rank: the worker, and the server if this rank is one."""

    def __init__(
        self, trainer: Trainer, mean_squares: dict[str, Tensor], stop: int, check_member: Callable[[], None]
    ) -> None:
        self._check_member = check_member
        self._trainer, self._setup, self._start = trainer, trainer.setup, trainer.step
        setup, ranks = trainer.setup, trainer.ranks
        options = setup.recipe.parallel
        assert isinstance(options, AsyncRecipe)
        self._pairs = None if ranks is None else ranks.pairs
        self._rank, size = (0, 1) if self._pairs is None else (self._pairs.rank, self._pairs.size)
        servers = 1 if self._pairs is None else self._pairs.servers
        shares = divide_weights(setup, servers)
        self._books = _Books(trainer) if self._rank == 0 else None
        self._lead: LeadServer | None = None
        self._host: ServerHost | None = None
        if self._rank < servers:
            state = ServerState(
                setup, trainer.averages, mean_squares, shares[self._rank], leads=self._rank == 0, step=trainer.step
            )
            server = ShardServer(state.shard, range(size), state.buffers, state.count_update)
            events = {follower: queue.SimpleQueue[Event]() for follower in range(1, servers)}
            if self._books is not None:
                books, plan = self._books, setup.plan
                ledger = Ledger(trainer.step, stop, tuple(range(size)), options.ahead)
                self._lead = LeadServer(
                    server,
                    ledger,
                    lambda update: setup.lr_at(plan.find_position(update)),
                    books.add,
                    list(events.values()),
                )
            # No method of this object: a reference cycle would keep all tensors until the next garbage collection.
            collect = partial(_collect, trainer, state, self._books, self._lead)
            self._host = ServerHost(server, self._lead, self._pairs, collect, events)
        weights = dict(setup.model.named_parameters())
        self._worker = AsyncWorker(self._rank, weights, list(setup.model.buffers()), shares, self._host, self._pairs)

    def run(self) -> State:
        """Computes steps until the segment is over; returns the state of all servers."""
        trainer, host = self._trainer, self._host
        try:
            with _prefetch(self._build_reader()) as read:
                bad: list[BadSample] = []
                while lease := self._worker.pull():
                    self._record()
                    # Until here the process has waited for weights, and not for data.
                    trainer.clock.lap("reduce")
                    batch = read(lease)
                    bad += batch.bad
                    self._compute(lease, batch)
            if host is not None:
                host.finish()
            self._cut_lost_ids()
            trainer.accumulator.add_bad(bad)
            return merge_states(self._worker.states)
        except BaseException as error:
            trainer.accumulator.drop_step()
            if host is not None:
                host.abort()
                # An ended connection is only the consequence of an error in a thread of this server.
                cause = None if isinstance(host.error, CommunicationError) else host.error
                if isinstance(error, CommunicationError) and cause is not None:
                    raise cause from error
            elif self._pairs is not None:
                self._pairs.abort()
            raise
        finally:
            trainer.setup.optimizer.zero_grad(set_to_none=True)
            if self._books is not None:
                self._books.sync()

    def _build_reader(self) -> Callable[[int], Batch]:
        setup = self._setup
        read_step = setup.inputs.build_step_reader(setup.recipe, setup.plan)
        return lambda step: read_step(setup.plan.find_position(step))

    def _compute(self, lease: Lease, batch: Batch) -> None:
        """Computes the gradients of a step, and notes them for the server."""
        trainer, setup = self._trainer, self._setup
        trainer.clock.lap("wait")
        trainer.step, trainer.position = lease.step, setup.plan.find_position(lease.step)
        if setup.recipe.log_ids:
            trainer.accumulator.log_ids(batch)
        loss = compute_step(trainer, batch)
        # The others may have gone on without this process. A server would go on alone, and write the run's log.
        self._check_member()
        self._worker.push(Push(loss, len(batch.bad), trainer.stopping))
        setup.optimizer.zero_grad(set_to_none=True)
        trainer.clock.lap("reduce")

    def _record(self) -> None:
        """On rank 0: writes the record that is due, and ends the segment if something is up."""
        trainer, lead = self._trainer, self._lead
        if lead is None or self._books is None:
            return
        trainer.step, trainer.position = lead.version, self._setup.plan.find_position(lead.version)
        if self._books.record() or trainer.stopping or (trainer.ranks is not None and trainer.ranks.has_newcomers):
            lead.stop_leasing()
        trainer.display.step(trainer)

    def _cut_lost_ids(self) -> None:
        """Removes from the ids of lost workers the step that each was lost in: another worker has made it."""
        trainer, lead, books = self._trainer, self._lead, self._books
        if lead is None or books is None or trainer.ranks is None or not self._setup.recipe.log_ids:
            return
        find_position = self._setup.plan.find_position
        for worker in range(trainer.ranks.world.size):
            if worker not in lead.workers:
                made = [find_position(step) + slot for step in books.steps[worker] for slot in range(find_position(1))]
                trainer.run_folder.keep_ids(trainer.ranks.get_name(worker), find_position(self._start), made)


def _collect(trainer: Trainer, state: ServerState, books: _Books | None, lead: LeadServer | None) -> State:
    """Returns the state of a server at the end of a segment, and what the leader tells all ranks."""
    tensors = state.collect()
    if books is None or lead is None:
        return {}, tensors
    ranks = trainer.ranks
    regroups = ranks is not None and ranks.has_newcomers
    return {**books.summarise(), "version": lead.version, "regroups": regroups}, tensors


class _Entry(NamedTuple):
    """The numbers of one update that go into a record."""

    loss: float
    staleness: int
    ratio: float


@final
class _Books:
    """The leader's records of the updates of a segment."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._log = trainer.accumulator.log.open_updates(trainer.step)
        self._every = trainer.setup.recipe.log_every_steps
        self._recorded = trainer.step
        # Any thread adds updates while the main thread records them.
        self._lock = threading.Lock()
        self._pending: list[_Entry] = []
        self._bad, self._stops = 0, False
        # The steps that each worker has made.
        self.steps: dict[int, list[int]] = defaultdict(list)

    def add(self, update: Update, push: Push, ratio: float) -> None:
        """Adds an update; called by any thread, one at a time."""
        self._log.write(update)
        self.steps[update.worker].append(update.step)
        with self._lock:
            self._pending.append(_Entry(push.loss, update.staleness, ratio))
            self._bad += push.bad
            self._stops |= push.stops

    def record(self) -> bool:
        """Writes a record if one is due; returns True if the segment has to end."""
        with self._lock:
            due = (self._recorded + len(self._pending)) // self._every * self._every
            # A segment may begin behind the newest step of a record.
            if due <= self._recorded:
                return False
            entries = self._pending[: due - self._recorded]
            # All ranks have to learn of it: it is recorded, and judged, when they meet.
            if not np.isfinite([entry.loss for entry in entries]).all():
                return True
            self._pending = self._pending[len(entries) :]
            self._recorded = due
        self._note_delays(entries)
        trainer = self._trainer
        step, position = trainer.step, trainer.position
        trainer.step, trainer.position = due, trainer.setup.plan.find_position(due)
        trainer.accumulator.add_segment([entry.loss for entry in entries], 0)
        diverged = trainer.record_losses()
        trainer.step, trainer.position = step, position
        return diverged

    def summarise(self) -> dict[str, Any]:
        """Returns what all ranks need to know at the end."""
        with self._lock:
            self._note_delays(self._pending)
            return {"losses": [entry.loss for entry in self._pending], "bad": self._bad, "stops": self._stops}

    def _note_delays(self, entries: Sequence[_Entry]) -> None:
        if not entries:
            return
        extra = {"staleness": float(np.mean([entry.staleness for entry in entries]))}
        options = self._trainer.setup.recipe.parallel
        assert isinstance(options, AsyncRecipe)
        if options.compensate != "none":
            extra["correction"] = float(np.mean([entry.ratio for entry in entries]))
        self._trainer.accumulator.next_record |= extra

    def sync(self) -> None:
        """Syncs the log to disk: a checkpoint relies on it."""
        self._log.sync()


def compute_step(trainer: Trainer, batch: Batch) -> float:
    """Computes the gradients of the step at the trainer's position into the network; returns its mean loss."""
    setup = trainer.setup
    batch_size = setup.plan.get_batch_size(trainer.position)
    trainer.set_schedules(batch_size)
    # By position alone, so that a step draws the same numbers on any worker, and in a replay.
    seed_step(setup.recipe.seed, trainer.position, 0, setup.device)
    trainer.forward_backward(batch)
    if (clip_norm := setup.recipe.optimizer.clip_norm) is not None:
        torch.nn.utils.clip_grad_norm_(list(setup.model.parameters()), clip_norm)
    return float(trainer.accumulator.pop_step_loss(batch_size))


@contextmanager
def _prefetch(read: Callable[[int], Batch]) -> Iterator[Callable[[Lease], Batch]]:
    """Gives a function that returns the batch of a lease, and reads that of the next one in a thread meanwhile."""
    with ThreadPoolExecutor(1, "headway-steps") as pool:
        ahead: dict[int, Future[Batch]] = {}

        def get(lease: Lease) -> Batch:
            future = ahead.pop(lease.step, None) or pool.submit(read, lease.step)
            # A promise may have been given to another worker.
            ahead.clear()
            if lease.next is not None:
                ahead[lease.next] = pool.submit(read, lease.next)
            return future.result()

        yield get
