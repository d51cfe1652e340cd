"""The Trainer: a plain loop, read from top to bottom. It waits for the device on logging steps only."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from time import perf_counter
from typing import Any, ClassVar, NoReturn, cast

import numpy as np
import torch

from headway.checkpoint.background_saver import BackgroundSaver
from headway.checkpoint.checkpoints import Checkpoint, Checkpoints, restore, state_of
from headway.checkpoint.compatibility import expect_position, expect_same_data, expect_scalars
from headway.checkpoint.pieces import Piece
from headway.comm.reducer import StepReduction
from headway.core.clock import Clock
from headway.core.run_folder import RunFolder
from headway.data.batch import Batch
from headway.launch.ranks import Ranks
from headway.model.auxiliary import AuxiliaryLosses
from headway.observe.host_syncs import HostSyncCounter
from headway.optim import set_lr
from headway.setup.divide_layers import join_layers
from headway.setup.prepare import prepare_batch, split_micro_batches
from headway.setup.task import is_better
from headway.setup.train_setup import TrainSetup
from headway.setup.user_callbacks import NamedCallback
from headway.training.actions import Action, ActionRules
from headway.training.async_training import AsyncTraining
from headway.training.averages import WeightAverages
from headway.training.callbacks import Callbacks
from headway.training.display import Display
from headway.training.evaluate import Evaluation, evaluate
from headway.training.first_batch import build_first_batch_panel
from headway.training.forward import run_network
from headway.training.local_rounds import LocalRounds
from headway.training.metrics import MetricsAccumulator
from headway.training.nonfinite import build_nonfinite_error
from headway.training.place_batch import gather_batch
from headway.training.recovery import Recovery
from headway.training.run_end import RunEnd
from headway.training.sample_weights import SampleWeights

LOG = logging.getLogger("headway.training")


class Trainer:
    """Trains the network of a setup into a run folder, alone or as one of several ranks.

    The loss rule: a step's gradient is the sum over its samples of loss / global batch. Each micro-batch, and each
    rank, adds its own samples' part; so parts may be uneven, and a masked sample counts zero.

    Attributes:
        step, position: steps done and samples served.
        stopping: set it to True, and the run saves a checkpoint and ends at the next step's boundary.
        finished: the run is at its end, or has reached `stop_at`, or a callback or `early_stopping` ended it.
        end: the goals and reasons that end the run before its last step.
        best: metrics of the best evaluation so far, with its step and epoch.
        metrics: metrics of the newest evaluation.
        evaluation: the newest evaluation.
        precision: the precision of the setup.
        last_outputs, last_losses: outputs and labels, and losses, of the newest micro-batch.
        gradient_source: computes the gradient of a step in place of `forward_backward`; None: nobody else does.
        averages, rules, display: what is evaluated and saved; which actions are due; shows the progress.
        asynchronous: makes the steps, if the recipe says `parallel.strategy: async`.
        accumulator: losses and damaged samples since the last record, and the logs of the run.
        rounds: steps that this rank makes alone, and the mean of all ranks' weights after them.
        recovery: the actions due between steps, and what happens after a rank is lost.
        host_syncs: counts the tensor values that the steps read in Python.
        checkpoints, saver, saved_step: folder of the checkpoints; what writes them; the step of the newest one.
    """

    def __init__(
        self,
        setup: TrainSetup,
        run: RunFolder,
        display: Display,
        ranks: Ranks | None = None,
        callbacks: Sequence[NamedCallback] = (),
    ) -> None:
        self.setup, self.run_folder, self.display, self.ranks = setup, run, display, ranks
        self.precision = setup.precision
        self.step = self.position = 0
        self.stopping = self.finished = False
        self.best: dict[str, float] | None = None
        self.metrics: dict[str, float] | None = None
        self.evaluation: Evaluation | None = None
        self.end = RunEnd(setup)
        self.saved_step: int | None = None
        self.clock, self.host_syncs = Clock(), HostSyncCounter()
        self.accumulator = MetricsAccumulator(setup, run, ranks, display.record)
        self.rounds = LocalRounds(setup, ranks, self.accumulator)
        options = setup.recipe.checkpoint
        self.checkpoints = Checkpoints.locate(run.folder, options.keep, options.folder, setup.loaded.base)
        self.saver = BackgroundSaver(
            self.checkpoints, asynchronous=options.asynchronous, resume_command=run.resume_command
        )
        self.averages = WeightAverages(setup)
        self._auxiliary = AuxiliaryLosses(setup.model)
        self._parameters = [p for group in setup.optimizer.param_groups for p in group["params"]]
        self._stream: Iterator[Batch] | None = None
        self._weights = SampleWeights(setup)
        self.last_outputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self.last_losses: torch.Tensor | None = None
        self.gradient_source: Callable[[Batch], None] | None = None
        self._divergence = ""
        self.callbacks = Callbacks(cast("Trainer", weakref.proxy(self)), callbacks)
        self.rules = ActionRules(setup, needs_statistics=self.averages.needs_statistics, has_callbacks=bool(callbacks))
        # Last, because it reads the parts above.
        self.recovery = Recovery(self, self.checkpoints)
        self.asynchronous = AsyncTraining.create(self)

    def run(self, steps: int | None = None) -> None:
        """Trains to the end of the run, or for at most `steps` steps."""
        for _ in self.iterate(steps):
            pass

    def iterate(self, steps: int | None = None) -> Iterator[None]:
        """Trains as `run` does; yields after each step and after its actions, so that trainers can take turns."""
        last = self.setup.steps if steps is None else min(self.setup.steps, self.step + steps)
        recovery = self.recovery
        self.clock.start()
        self.callbacks.start()
        if self.asynchronous is not None:
            self.asynchronous.start()
        while True:
            # If a rank is lost, this block ends early: the ranks meet again, and the next pass continues from there.
            with recovery:
                if not recovery.actions:
                    if self._is_over(last):
                        # The run ends only when its last checkpoint is written.
                        if not self.saver.is_pending:
                            break
                        recovery.queue(Action.SETTLE)
                    elif self._must_stop:
                        recovery.queue(*self.rules.list_log_actions(), Action.CHECKPOINT)
                    elif self._must_end:
                        self.finished = True
                        is_evaluated = self.end.evaluated_step == self.step
                        recovery.queue(*self.rules.list_final(is_evaluated=is_evaluated))
                    elif self.asynchronous is not None:
                        self.asynchronous.run_segment(last)
                    else:
                        self.host_syncs.run_step(self._train_step, recovery.actions)
                recovery.run_actions(self._run_action)
            self.display.step(self)
            self.clock.lap("log")
            yield
        self.callbacks.end()

    def _train_step(self) -> None:
        """Makes one step over one global batch, and queues the actions that are due after it."""
        setup, before = self.setup, self.position
        batch = self._next_batch()
        batch_size = setup.plan.get_batch_size(before)
        self.rounds.begin_step(self.step + 1)
        # A step alone is a step at the rank's share of the batch: it divides its losses by that.
        self.set_schedules(len(batch.images) if self.rounds.is_alone else batch_size)
        # Logged before the step: a rank that is killed in it has then said which samples it got.
        if setup.recipe.log_ids:
            self.accumulator.log_ids(batch)
        with self.recovery.undo_on_loss():
            (self.gradient_source or self.forward_backward)(batch)
            reduction = self._reduce(batch, batch_size)
        # The reduction succeeded on all ranks: from here on the step cannot be undone.
        setup.step_optimizer(self._parameters)
        self.accumulator.add_step(self.step + 1, batch, batch_size, reduction)
        self.step, self.position = self.step + 1, before + batch_size
        if not self.rounds.is_alone:
            self.averages.update(self.step)
        self.recovery.advance()
        self.clock.lap("optimizer")
        self.callbacks.step()
        self.recovery.queue(*self.rules.list_due(self.step))
        if self.accumulator.must_regroup:
            self.recovery.queue(Action.REGROUP)

    # The parts of a step, in their order.

    def _next_batch(self) -> Batch:
        """Returns the next batch of this rank; opens the loader at the current position if there is none."""
        is_first = self._stream is None
        if self._stream is None:
            self._stream = iter(self.setup.batches(self.position, *self._rank_and_world))
        batch = next(self._stream)
        self.clock.lap("first batch" if is_first else "wait")
        return batch

    def set_schedules(self, divisor: int) -> None:
        """Sets all that depends on the position: divisor of the losses, learning rate, frozen layers and generators."""
        setup = self.setup
        self._weights.set_divisor(divisor)
        set_lr(setup.optimizer, setup.lr_at(self.position))
        # Within a round nothing is frozen: what some ranks have changed alone must be averaged first.
        setup.freezing.freeze_until(self.position - self.rounds.samples)
        if self.ranks is not None:
            # Seeded per position and rank: a repeated or resumed step draws the same numbers.
            self.ranks.seed(setup.recipe.seed, self.position)

    def forward_backward(self, batch: Batch) -> None:
        """Adds the gradient of this rank's samples, one micro-batch after another."""
        setup, clock = self.setup, self.clock
        batch, own = gather_batch(setup, batch, self._weights.divisor)
        images, labels = prepare_batch(setup, batch, self.step + 1)
        if self.is_lead and not self.step and (panel := build_first_batch_panel(setup, images, labels)) is not None:
            self.accumulator.log.write_panels([panel], 1)
        weights, noisy_weights, masked = self._weights.weigh(batch, images.shape[0])
        clock.lap("augment")
        largest = -(-self._weights.divisor // self._rank_and_world[1])
        parts = split_micro_batches(setup, images, labels, weights, noisy_weights, largest=largest)
        self.accumulator.observer.begin_step(self.step + 1, parts, self._rank_and_world[1])
        for number, (part, part_labels, part_weights, part_noisy_weights) in enumerate(parts, 1):
            with setup.precision.autocast():
                outputs = run_network(setup, self.ranks, part, self._weights.divisor)
            clock.lap("forward")
            # The loss is computed in fp32 in every precision.
            outputs = outputs.float()
            losses = setup.task.loss(outputs, part_labels)
            clock.lap("loss")
            # Gradients are final in the last micro-batch only; there the all-reduce overlaps with backward.
            sends = self.ranks is not None and self.asynchronous is None and not self.rounds.is_alone
            if self.ranks is not None and sends and number == len(parts):
                self.ranks.prepare_for_backward(len(batch.images) / self._weights.divisor)
            setup.precision.backward(losses, part_noisy_weights, self._auxiliary.pop(len(parts)))
            clock.lap("backward")
            losses = losses.detach()
            if own is not None:
                place = (losses, outputs, part_labels, part_weights)
                losses, outputs, part_labels, part_weights = (one[own] for one in place)
            self.last_losses = losses
            self.accumulator.add_losses(losses * part_weights * self._weights.divisor if masked else losses)
        self.last_outputs = outputs.detach(), part_labels

    def _reduce(self, batch: Batch, batch_size: int) -> StepReduction | None:
        """Waits until the gradients are summed over all ranks; returns None for a step that is made alone."""
        # The sum of the losses travels with the gradients, or with the weights of a round.
        loss = None if self.ranks is None else self.accumulator.pop_step_loss(batch_size)
        if self.rounds.is_alone:
            self.rounds.add_step(loss, own=len(batch.images), samples=batch_size, bad=len(batch.bad))
        if self.ranks is None or loss is None or self.rounds.is_alone:
            return None
        ending = self.end.reason is not None
        reduction = self.ranks.finish(loss, bad=len(batch.bad), stopping=self.stopping, ending=ending)
        self.clock.lap("reduce")
        return reduction

    # The actions between two steps.

    def _average(self) -> None:
        """Ends a round: all ranks take the mean of their weights, or the outer step."""
        steps = self.rounds.average(self.position, stopping=self.stopping, ending=self.end.reason is not None)
        self.averages.update(self.step, steps)
        if self.accumulator.must_regroup:
            self.recovery.queue(Action.REGROUP)

    def _run_action(self, action: Action) -> None:
        run, stage = self.ACTIONS[action]
        run(self)
        self.clock.lap(stage)
        # images/s and the waiting share are about training alone.
        if action in (Action.EVALUATE, Action.CHECKPOINT, Action.SETTLE):
            self.accumulator.restart_rate(self.step, self.clock)

    def _log(self, *, meets: bool = True) -> None:
        """Reads the losses since the last record (this waits for the device), checks them, and writes a record."""
        accumulator = self.accumulator
        self.callbacks.flush()
        losses = accumulator.read_losses(meets=meets)
        if not len(losses):
            return
        # The wait for the device belongs to the steps of this record, so it ends its lap before the record is written.
        self.clock.lap("log")
        divergence = accumulator.check_divergence(self.step, losses)
        if not np.isfinite(losses).all():
            # The first of the steps since the last record.
            first = self.step - len(losses) + 1 + int(np.flatnonzero(~np.isfinite(losses))[0])
            self._raise_nonfinite(f"the loss is not finite at step {first}", first, accumulator.observer.find_culprit())
        accumulator.write_train_record(self.step, losses, self.last_outputs, self.clock)
        if divergence:
            accumulator.write_divergence(self.step, self.clock, divergence)
            # With on_divergence: stop, the error that ends the run says it.
            if self.setup.recipe.observe.on_divergence != "stop":
                LOG.warning(divergence)
            self._divergence = divergence

    def record_losses(self) -> bool:
        """Writes a record between two meetings of the ranks; returns True if the run diverges and has to stop."""
        self._log(meets=False)
        return bool(self._divergence) and self.setup.recipe.observe.on_divergence == "stop"

    def _stop_if_diverged(self) -> None:
        """Stops all ranks if the lead saw the run diverge; each rank has looked at its own numbers only."""
        divergence = self._divergence
        if self.ranks is not None:
            divergence = self.ranks.world.control.broadcast_bytes(divergence.encode()).decode()
        if divergence:
            self._raise_nonfinite(divergence.rstrip("."), self.step)

    def _evaluate(self) -> None:
        """Evaluates, keeps the weights if they are the best, and ends the run if `stop_at` is reached."""
        setup = self.setup
        assert setup.eval is not None
        self._check_parameters()
        started = perf_counter()
        with self.use_averages(), join_layers(setup.divided):
            self.evaluation = evaluate(setup, setup.eval, self.ranks)
            metrics = self.metrics = self.evaluation.metrics
            seconds = self.clock.total_seconds() + perf_counter() - started
            progress = {"step": self.step, "position": self.position, "epoch": self.position / setup.epoch}
            record = {"kind": "evaluate", **progress, **metrics, "damaged": self.evaluation.damaged, "seconds": seconds}
            if self.evaluation.counts is not None:
                record["classes"] = self.evaluation.counts.to_json()
            self.accumulator.write(record)
            if self.best is None or is_better(setup.task, metrics, self.best):
                # The best weights are the network as evaluated, which is still joined here.
                self.best = {**metrics, "step": self.step, "epoch": self.position / setup.epoch}
                self._store_weights()
        if self.end.add_evaluation(metrics, self.step, self.position, seconds):
            self.finished = True
        self.callbacks.evaluate()
        if self.finished and Action.CHECKPOINT not in self.recovery.actions:
            self.recovery.queue(Action.CHECKPOINT)

    def _save_checkpoint(self) -> None:
        """Begins to save a checkpoint; a thread writes it while training continues."""
        self._check_parameters()
        self.finished = self.finished or self.step >= self.setup.steps
        if self.setup.eval is None:
            self.write_weights()
        # The logs go first: a resumed run cuts them back to the checkpoint, and must find them complete up to it.
        self.accumulator.log.flush()
        tensors, divided = self.rounds.wrap(self.collect_tensors(), self.step), self.setup.divided
        if divided is not None:
            tensors = divided.parts.share(tensors)
        self.saver.save(self.step, tensors, self.collect_scalars())
        self.saved_step = self.step

    def _settle(self) -> None:
        """Waits until the newest checkpoint is written, on all ranks."""
        self.saver.wait()
        if self.ranks is not None:
            self.ranks.check()

    def _regroup(self) -> None:
        """Lets the ranks that wait join the run."""
        # The ranks of this generation can finish a checkpoint together only now.
        self.saver.wait()
        self.recovery.meet()

    ACTIONS: ClassVar[dict[Action, tuple[Callable[[Trainer], None], str]]] = {
        Action.AVERAGE: (_average, "reduce"),
        Action.LOG: (_log, "log"),
        Action.AGREE: (_stop_if_diverged, "log"),
        Action.STATISTICS: (lambda own: own.averages.recompute_statistics(own.step, own.ranks), "evaluate"),
        Action.EVALUATE: (_evaluate, "evaluate"),
        Action.CHECKPOINT: (_save_checkpoint, "checkpoint"),
        Action.SETTLE: (_settle, "checkpoint"),
        Action.REGROUP: (_regroup, "regroup"),
        Action.EPOCH: (lambda own: own.callbacks.epoch(), "callbacks"),
    }
    """Method and clock stage of each action."""

    def _check_parameters(self) -> None:
        """Raises TrainingError if a weight is not finite, before the best weights or a checkpoint are replaced.

        The loss may still be finite: it was computed before the step that made the weights infinite.
        """
        if not torch.stack([parameter.isfinite().all() for parameter in self._parameters]).all():
            what = f"the weights are not finite at step {self.step}"
            self._raise_nonfinite(what, self.step, self.accumulator.observer.find_culprit())

    def _raise_nonfinite(self, what: str, step: int, culprit: str = "") -> NoReturn:
        self.close()
        raise build_nonfinite_error(self, what, step, culprit)

    def use_averages(self) -> AbstractContextManager[None]:
        """Gives the network, for the duration of the block, the weights and statistics that are evaluated and saved."""
        return self.averages.swap_in()

    def write_weights(self) -> None:
        """Replaces the best weights in the run folder."""
        with self.use_averages(), join_layers(self.setup.divided):
            self._store_weights()

    def _store_weights(self) -> None:
        """Writes the weights as they are now in the network."""
        divided = self.setup.divided
        whole = {} if divided is None else divided.list_whole()
        self.accumulator.log.write_weights(self.setup.state_dict() | whole)

    # The state of the run, for checkpoints and for other ranks.

    def collect_scalars(self) -> dict[str, Any]:
        """Returns the scalars of a checkpoint, for JSON."""
        return {
            "position": self.position,
            "data": self.setup.inputs.build_state(self.setup.recipe),
            "precision": self.setup.precision.state_dict(),
            "best": self.best,
            "metrics": self.metrics,
            "damaged": self.accumulator.damaged,
            "observer": self.accumulator.observer.state(),
            "callbacks": self.callbacks.state(),
            **self.end.state(is_final=self.finished),
            "seconds": self.clock.seconds,
        }

    def collect_tensors(self) -> dict[str, torch.Tensor | Piece]:
        """Returns the tensors of a checkpoint, not copied; of what ranks share this rank's pieces."""
        setup = self.setup
        more = {} if self.asynchronous is None else self.asynchronous.state()
        more |= self.averages.state() | self.rounds.state()
        tensors = state_of(setup.stepped, setup.optimizer) | more
        return {**tensors} if setup.parts is None else setup.parts.wrap(tensors)

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads the state of a checkpoint, or of another rank. The logs stay as they are.

        Raises:
            CheckpointError: it belongs to another network, or is damaged.
        """
        scalars, where = checkpoint.scalars, str(checkpoint.path)
        expect_scalars(scalars, where)
        expect_position(scalars["position"], checkpoint.step, self.setup.plan, where)
        if self.setup.parts is not None:
            checkpoint = replace(checkpoint, tensors=self.setup.parts.cut(checkpoint.tensors))
        checkpoint = replace(checkpoint, tensors=self.rounds.select(checkpoint.tensors))
        restore(checkpoint, self.setup.stepped, self.setup.optimizer)
        self.averages.load_state(checkpoint.tensors, where)
        self.rounds.load(checkpoint.tensors, where)
        if self.asynchronous is not None:
            self.asynchronous.load_state(checkpoint.tensors)
        self.setup.precision.load_state_dict(scalars["precision"], where)
        self.step, self.position = checkpoint.step, scalars["position"]
        self.best, self.metrics = scalars["best"], scalars["metrics"]
        self.accumulator.observer.load_state(scalars.get("observer"), where)
        self.callbacks.load_state(scalars.get("callbacks"), self.step, where)
        self.finished = self.end.load_state(scalars, where) or self.step >= self.setup.steps
        # A new clock continues from the seconds of the checkpoint.
        self.clock = Clock(scalars["seconds"], self.clock.waits)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Goes back to the step at which a checkpoint was saved; the logs are cut back to it.

        Raises:
            CheckpointError: it belongs to another network, or is damaged. TrainingError: to other data or decoder.
        """
        scalars = checkpoint.scalars
        expect_scalars(scalars, str(checkpoint.path))
        expect_same_data(scalars["data"], self.setup.inputs.build_state(self.setup.recipe), str(checkpoint.path))
        self.load(checkpoint)
        self.saved_step = self.step
        self.accumulator.restart_rate(self.step, self.clock)
        self.accumulator.cut_back(self.position, self.step, scalars["damaged"])
        # A callback ended the run, and the checkpoint came before the step in which all ranks knew.
        self.accumulator.must_end = self.end.reason is not None

    def close_stream(self) -> None:
        """Ends the loader's threads. The next step opens a loader at its position."""
        if self._stream is not None and hasattr(self._stream, "close"):
            self._stream.close()
        self._stream = None

    def close(self) -> None:
        """Ends the loader's threads and closes the logs."""
        self.close_stream()
        self.saver.close()
        self.accumulator.log.close()
        self.recovery.close()

    def _is_over(self, last: int) -> bool:
        stopped = self._must_stop and self.saved_step == self.step
        return self.finished or self.step >= last or stopped

    @property
    def _must_stop(self) -> bool:
        """True once the run must end at the next step's boundary; all ranks learn it in the same step."""
        return self.stopping and not self.rounds.steps if self.ranks is None else self.accumulator.must_stop

    @property
    def _must_end(self) -> bool:
        """True once a callback has ended the run; all ranks learn it in the same step."""
        is_ended = self.end.reason is not None and not self.rounds.steps
        return is_ended if self.ranks is None else self.accumulator.must_end

    @property
    def _rank_and_world(self) -> tuple[int, int]:
        return (0, 1) if self.ranks is None else (self.ranks.world.rank, self.ranks.world.size)

    @property
    def is_lead(self) -> bool:
        """True for the one process of a run that writes its records, weights and summary."""
        return self.ranks is None or self.ranks.is_lead
