"""The Trainer: a plain loop, read from top to bottom. It waits for the device on logging steps only."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, ClassVar, NoReturn, cast

import numpy as np
import torch

from headway.checkpoint.background_saver import BackgroundSaver
from headway.checkpoint.checkpoints import Checkpoint, Checkpoints, restore, state_of
from headway.checkpoint.compatibility import expect_position, expect_same_data, expect_scalars
from headway.comm.reducer import StepReduction
from headway.core.clock import Clock
from headway.core.run_folder import RunFolder
from headway.data.batch import Batch
from headway.data.upload import to_device
from headway.launch.ranks import Ranks
from headway.observe.host_syncs import HostSyncCounter
from headway.optim import draw_gradient_noise, set_lr
from headway.parallel.maps import to_parts
from headway.parallel.strips import run_in_strips
from headway.setup.build import TrainSetup
from headway.setup.prepare import prepare_batch, split_micro_batches
from headway.setup.task import is_better
from headway.setup.user_callbacks import NamedCallback
from headway.training.actions import Action, ActionRules
from headway.training.averages import WeightAverages
from headway.training.callbacks import Callbacks
from headway.training.display import Display
from headway.training.evaluate import Evaluation, evaluate
from headway.training.first_batch import build_first_batch_panel
from headway.training.metrics import MetricsAccumulator
from headway.training.nonfinite import build_nonfinite_error
from headway.training.recovery import Recovery
from headway.training.run_end import RunEnd

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
        accumulator: losses and damaged samples since the last record, and the logs of the run.
        recovery: the actions due between steps, and what happens after a rank is lost.
        host_syncs: counts the tensor values that the steps read in Python.
        saver, saved_step: writes checkpoints; the step of the newest one.
    """

    def __init__(
        self,
        setup: TrainSetup,
        run: RunFolder,
        display: Display,
        ranks: Ranks | None = None,
        callbacks: Sequence[NamedCallback] = (),
    ) -> None:
        self.setup, self.run_folder, self._display, self.ranks = setup, run, display, ranks
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
        options = setup.recipe.checkpoint
        self._checkpoints = Checkpoints.locate(run.folder, options.keep, options.folder, setup.loaded.base)
        self.saver = BackgroundSaver(
            self._checkpoints, asynchronous=options.asynchronous, resume_command=run.resume_command
        )
        self._averages = WeightAverages(setup)
        self._parameters = [p for group in setup.optimizer.param_groups for p in group["params"]]
        self._stream: Iterator[Batch] | None = None
        self._sample_weights = torch.empty(0)
        self.last_outputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self.last_losses: torch.Tensor | None = None
        self._divergence = ""
        self.callbacks = Callbacks(cast("Trainer", weakref.proxy(self)), callbacks)
        self._rules = ActionRules(
            setup, needs_statistics=self._averages.needs_statistics, has_callbacks=bool(callbacks)
        )
        # Last, because it reads the parts above.
        self.recovery = Recovery(self, self._checkpoints)

    def run(self, steps: int | None = None) -> None:
        """Trains to the end of the run, or for at most `steps` steps."""
        last = self.setup.steps if steps is None else min(self.setup.steps, self.step + steps)
        recovery = self.recovery
        self.clock.start()
        self.callbacks.start()
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
                        recovery.queue(*self._rules.list_log_actions(), Action.CHECKPOINT)
                    elif self._must_end:
                        self.finished = True
                        is_evaluated = self.end.evaluated_step == self.step
                        recovery.queue(*self._rules.list_final(is_evaluated=is_evaluated))
                    else:
                        self.host_syncs.run_step(self._train_step, recovery.actions)
                recovery.run_actions(self._run_action)
            self._display.step(self)
            self.clock.lap("log")
        self.callbacks.end()

    def _train_step(self) -> None:
        """Makes one step over one global batch, and queues the actions that are due after it."""
        setup, before = self.setup, self.position
        batch = self._next_batch()
        batch_size = setup.plan.get_batch_size(before)
        self._set_schedules(batch_size)
        # Logged before the step: a rank that is killed in it has then said which samples it got.
        if setup.recipe.log_ids:
            self.accumulator.log_ids(batch)
        with self.recovery.undo_on_loss():
            self._forward_backward(batch)
            reduction = self._reduce(batch)
        # The reduction succeeded on all ranks: from here on the step cannot be undone.
        setup.precision.step(setup.optimizer, setup.recipe.optimizer.clip_norm, self._parameters)
        setup.optimizer.zero_grad(set_to_none=True)
        self.accumulator.add_step(self.step + 1, batch, batch_size, reduction)
        self.step, self.position = self.step + 1, before + batch_size
        self._averages.update(self.step)
        self.recovery.advance()
        self.clock.lap("optimizer")
        self.callbacks.step()
        self.recovery.queue(*self._rules.list_due(self.step, before, self.position))
        if self.accumulator.must_regroup:
            self.recovery.queue(Action.REGROUP)

    # The parts of a step, in their order.

    def _next_batch(self) -> Batch:
        """Returns the next batch of this rank; opens the loader at the current position if there is none."""
        if self._stream is None:
            self._stream = iter(self.setup.batches(self.position, *self._rank_and_world))
            batch = next(self._stream)
            self.clock.lap("first batch")
        else:
            batch = next(self._stream)
            self.clock.lap("wait")
        return batch

    def _set_schedules(self, batch_size: int) -> None:
        """Sets all that depends on the position: the batch size, learning rate, frozen layers and generators."""
        setup = self.setup
        # The weights of samples change only when the batch grows.
        if self._sample_weights.shape[0] != batch_size:
            self._sample_weights = torch.full((batch_size,), 1 / batch_size, device=setup.device)
        set_lr(setup.optimizer, setup.lr_at(self.position))
        setup.freezing.freeze_until(self.position)
        if self.ranks is not None:
            # Seeded per position and rank: a repeated or resumed step draws the same numbers.
            self.ranks.seed(setup.recipe.seed, self.position)

    def _forward_backward(self, batch: Batch) -> None:
        """Adds the gradient of this rank's samples, one micro-batch after another."""
        setup, clock = self.setup, self.clock
        images, labels = prepare_batch(setup, batch, self.step + 1)
        if self.is_lead and not self.step and (panel := build_first_batch_panel(setup, images, labels)) is not None:
            self.accumulator.log.write_panels([panel], 1)
        weights, noisy_weights, masked = self._weigh_samples(batch, images.shape[0])
        clock.lap("augment")
        parts = split_micro_batches(setup, images, labels, weights, noisy_weights)
        self.accumulator.observer.begin_step(self.step + 1, parts, self._rank_and_world[1])
        for number, (part, part_labels, part_weights, part_noisy_weights) in enumerate(parts, 1):
            with setup.precision.autocast():
                outputs = self._forward(part)
            clock.lap("forward")
            # The loss is computed in fp32 in every precision.
            outputs = outputs.float()
            losses = setup.task.loss(outputs, part_labels)
            clock.lap("loss")
            # Gradients are final in the last micro-batch only; there the all-reduce overlaps with backward.
            if self.ranks is not None and number == len(parts):
                self.ranks.prepare_for_backward(len(batch.images) / len(self._sample_weights))
            setup.precision.backward(losses, part_noisy_weights)
            clock.lap("backward")
            losses = self.last_losses = losses.detach()
            self.accumulator.add_losses(losses * part_weights * len(self._sample_weights) if masked else losses)
        self.last_outputs = outputs.detach(), part_labels

    def _forward(self, images: torch.Tensor) -> torch.Tensor:
        """Computes the outputs of this rank's images, together with the ranks that share images with it."""
        if self.ranks is None or (place := self.ranks.place) is None:
            return self.setup.forward(images)
        samples = self.ranks.divide_place(len(self._sample_weights))
        return run_in_strips(self.setup.model, to_parts(images, samples, place))

    def _weigh_samples(self, batch: Batch, samples: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Returns the weight of each sample in the gradient, without and with gradient noise, and if some are masked.

        Args:
            samples: number of samples on this rank.
        """
        # Most batches have no damaged sample, and are not searched for masked ones.
        weights, masked = self._sample_weights, bool(batch.bad) and bool((batch.served < 0).any())
        if self.ranks is not None:
            weights = weights[:samples]
        if masked:
            weights = weights * to_device((batch.served >= 0).astype(np.float32), weights.device)
        if (strength := self.setup.recipe.optimizer.gradient_noise) is None:
            return weights, weights, masked
        factors = draw_gradient_noise(batch.keys(), strength * len(self._sample_weights) ** 0.5)
        return weights, weights * to_device(factors, weights.device), masked

    def _reduce(self, batch: Batch) -> StepReduction | None:
        """Waits until the gradients are summed over all ranks; returns None for a process that trains alone."""
        if self.ranks is None:
            return None
        # The sum of the losses travels with the gradients.
        loss = self.accumulator.pop_step_loss(len(self._sample_weights))
        reduction = self.ranks.finish(
            loss, bad=len(batch.bad), stopping=self.stopping, ending=self.end.reason is not None
        )
        self.clock.lap("reduce")
        return reduction

    # The actions between two steps.

    def _run_action(self, action: Action) -> None:
        run, stage = self.ACTIONS[action]
        run(self)
        self.clock.lap(stage)
        # images/s and the waiting share are about training alone.
        if action in (Action.EVALUATE, Action.CHECKPOINT, Action.SETTLE):
            self.accumulator.restart_rate(self.step, self.clock)

    def _log(self) -> None:
        """Reads the losses since the last record (this waits for the device), checks them, and writes a record."""
        accumulator = self.accumulator
        self.callbacks.flush()
        losses = accumulator.read_losses()
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

    def _stop_if_diverged(self) -> None:
        """Stops all ranks if the lead saw the run diverge; each rank has looked at its own numbers only."""
        divergence = self._divergence
        if self.ranks is not None:
            divergence = self.ranks.world.control.broadcast_bytes(divergence.encode()).decode()
        if divergence:
            self._raise_nonfinite(divergence.rstrip("."), self.step)

    def _recompute_statistics(self) -> None:
        self._averages.recompute_statistics(self.step, self.ranks)

    def _evaluate(self) -> None:
        """Evaluates, keeps the weights if they are the best, and ends the run if `stop_at` is reached."""
        setup = self.setup
        assert setup.eval is not None
        self._check_parameters()
        started = perf_counter()
        with self.use_averages():
            self.evaluation = evaluate(setup, setup.eval, self.ranks)
        metrics = self.metrics = self.evaluation.metrics
        seconds = self.clock.total_seconds() + perf_counter() - started
        progress = {"step": self.step, "position": self.position, "epoch": self.position / setup.epoch}
        record = {"kind": "evaluate", **progress, **metrics, "damaged": self.evaluation.damaged, "seconds": seconds}
        if self.evaluation.counts is not None:
            record["classes"] = self.evaluation.counts.to_json()
        self.accumulator.write(record)
        if self.best is None or is_better(setup.task, metrics, self.best):
            # The best weights are the network as evaluated, with averages.
            self.best = {**metrics, "step": self.step, "epoch": self.position / setup.epoch}
            self.write_weights()
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
        self.saver.save(self.step, self.collect_tensors(), self.collect_scalars())
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
        self.meet()

    def _call_epoch_hooks(self) -> None:
        self.callbacks.epoch()

    ACTIONS: ClassVar[dict[Action, tuple[Callable[[Trainer], None], str]]] = {
        Action.LOG: (_log, "log"),
        Action.AGREE: (_stop_if_diverged, "log"),
        Action.STATISTICS: (_recompute_statistics, "evaluate"),
        Action.EVALUATE: (_evaluate, "evaluate"),
        Action.CHECKPOINT: (_save_checkpoint, "checkpoint"),
        Action.SETTLE: (_settle, "checkpoint"),
        Action.REGROUP: (_regroup, "regroup"),
        Action.EPOCH: (_call_epoch_hooks, "callbacks"),
    }
    """Method and clock stage of each action."""

    def _check_parameters(self) -> None:
        """Raises TrainingError if a weight is not finite, before the best weights or a checkpoint are replaced.

        The loss may still be finite: it was computed before the step that made the weights infinite.
        """
        if not torch.stack([parameter.isfinite().all() for parameter in self._parameters]).all():
            culprit = self.accumulator.observer.find_culprit()
            self._raise_nonfinite(f"the weights are not finite at step {self.step}", self.step, culprit)

    def _raise_nonfinite(self, what: str, step: int, culprit: str = "") -> NoReturn:
        lr = self.setup.lr_at(self.setup.plan.find_position(step - 1))
        self.close()
        raise build_nonfinite_error(
            what,
            lr,
            self.run_folder,
            self._checkpoints,
            culprit,
            precision=self.precision.name,
            best=self.best,
            start_loss=self.accumulator.observer.start_loss,
        )

    def use_averages(self) -> AbstractContextManager[None]:
        """Gives the network, for the duration of the block, the weights and statistics that are evaluated and saved."""
        return self._averages.swap_in()

    def write_weights(self) -> None:
        """Replaces the best weights in the run folder."""
        with self.use_averages():
            self.accumulator.log.write_weights(self.setup.state_dict())

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

    def collect_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of a checkpoint, not copied."""
        setup = self.setup
        return state_of(setup.model, setup.optimizer, setup.masters) | self._averages.state()

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads the state of a checkpoint, or of another rank. The logs stay as they are.

        Raises:
            CheckpointError: it belongs to another network, or is damaged.
        """
        scalars, where = checkpoint.scalars, str(checkpoint.path)
        expect_scalars(scalars, where)
        expect_position(scalars["position"], checkpoint.step, self.setup.plan, where)
        restore(checkpoint, self.setup.model, self.setup.optimizer, self.setup.masters)
        self._averages.load_state(checkpoint.tensors, where)
        self.setup.precision.load_state_dict(scalars["precision"], where)
        self.step, self.position = checkpoint.step, scalars["position"]
        self.best, self.metrics = scalars["best"], scalars["metrics"]
        self.accumulator.observer.load_state(scalars.get("observer"), where)
        self.callbacks.load_state(scalars.get("callbacks"), self.step, where)
        self.finished = self.end.load_state(scalars, where) or self.step >= self.setup.steps
        # A new clock continues from the seconds of the checkpoint.
        self.clock = Clock(scalars["seconds"])

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

    def meet(self) -> None:
        """Meets the other ranks before the first step; see `Recovery.meet`."""
        self.recovery.meet()

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
        return self.stopping if self.ranks is None else self.accumulator.must_stop

    @property
    def _must_end(self) -> bool:
        """True once a callback has ended the run; all ranks learn it in the same step."""
        return self.end.reason is not None if self.ranks is None else self.accumulator.must_end

    @property
    def _rank_and_world(self) -> tuple[int, int]:
        return (0, 1) if self.ranks is None else (self.ranks.world.rank, self.ranks.world.size)

    @property
    def damaged(self) -> int:
        """Number of times that a damaged sample came up."""
        return self.accumulator.damaged

    @property
    def is_lead(self) -> bool:
        """True for the one process of a run that writes its records, weights and summary."""
        return self.ranks is None or self.ranks.is_lead
