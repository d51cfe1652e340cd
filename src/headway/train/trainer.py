"""The Trainer: a plain loop, read from top to bottom. It waits for the device on logging steps only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from headway.checkpoint.background_saver import BackgroundSaver
from headway.checkpoint.checkpoints import Checkpoint, Checkpoints, restore, state_of
from headway.checkpoint.compatibility import expect_position, expect_same_data, expect_scalars
from headway.comm.reducer import StepReduction
from headway.core.clock import Clock
from headway.core.errors import CommunicationError, GenerationEndedError, UsageError
from headway.core.run_folder import RunFolder
from headway.data.batch import Batch
from headway.data.upload import to_device
from headway.launch.handover import State
from headway.launch.ranks import Ranks
from headway.observe.host_syncs import HostSyncCounter
from headway.optim import draw_gradient_noise, set_lr
from headway.setup.build import Setup
from headway.setup.prepare import divided, prepared
from headway.setup.task import better, reaches
from headway.train.averages import Averages
from headway.train.evaluate import Evaluation, evaluate
from headway.train.leftovers import Past, identity
from headway.train.metrics import Ledger
from headway.train.nonfinite import stopped


class Display(Protocol):
    """Whoever shows the progress of a run."""

    def step(self, trainer: Trainer) -> None:
        """Called after every step; must be cheap."""

    def record(self, record: dict[str, Any]) -> None:
        """Called with every record of metrics.jsonl."""


class Trainer:
    """Trains the network of a setup into a run folder, alone or as one of several ranks.

    The loss rule: a step's gradient is the sum over its samples of loss / global batch. Each micro-batch, and each
    rank, adds its own samples' part; so parts may be uneven, and a masked sample counts zero.

    Attributes:
        step, position: steps done and samples served.
        stopping: set it, and the run saves a checkpoint and ends at the next step's boundary.
        finished: the run is at its end, or has reached `stop_at`.
        best: metrics of the best evaluation so far, with its step and epoch.
        metrics: those of the last one.
        evaluation: the last one.
        precision: that of the setup.
        reached_s: seconds of the clock until `stop_at` was reached.
        reads, past: of values in the steps, counted once; what the run has left on the disk.
        say: tells the user of a run that diverges, or a checkpoint that is late.
    """

    def __init__(self, setup: Setup, run: RunFolder, display: Display, ranks: Ranks | None = None) -> None:
        recipe = setup.recipe
        self.setup, self.run_folder, self._display, self.ranks = setup, run, display, ranks
        self.precision = setup.precision
        self.step = self.position = 0
        self.stopping = self.finished = False
        self.best: dict[str, float] | None = None
        self.metrics: dict[str, float] | None = None
        self.reached_s: float | None = None
        self.evaluation: Evaluation | None = None
        self.clock, self.reads = Clock(), HostSyncCounter()
        self._ledger = Ledger(setup, run, ranks, display.record)
        options = recipe.checkpoint
        self._checkpoints = Checkpoints.locate(run.folder, options.keep, options.folder, setup.loaded.base)
        self.say = print if ranks is None else ranks.say
        self._diverged = ""
        self._saver = BackgroundSaver(
            self._checkpoints, asynchronous=options.asynchronous, say=self.say, resume_command=run.resume_command
        )
        self._averages = Averages(setup)
        self._lock = ExitStack()
        self._stream: Iterator[Batch] | None = None
        self._parameters = [p for group in setup.optimizer.param_groups for p in group["params"]]
        self._weights = torch.empty(0)
        self._last_outputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._saved_step: int | None = None
        self._chores: list[str] = []
        self._buffers = list(setup.model.buffers()) if ranks is not None else []
        self._kept = [buffer.clone() for buffer in self._buffers]
        self._progress = 0 if ranks is None or ranks.speaks else -1
        self.past = Past(setup, run, self._checkpoints)
        if ranks is not None and ranks.joins:
            self.precision.recorded = self.past.precision()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Goes back to where a checkpoint was saved; the logs are cut back to it.

        Raises:
            CheckpointError: it belongs to another network, or is damaged. TrainingError: to other data or decoder.
        """
        scalars = checkpoint.scalars
        expect_scalars(scalars, str(checkpoint.path))
        expect_same_data(scalars["data"], self.setup.inputs.build_state(self.setup.recipe), str(checkpoint.path))
        self._load(checkpoint)
        self._saved_step = self.step
        self._ledger.restart_rate(self.step, self.clock)
        self._ledger.resume(self.position, self.step, scalars["damaged"])
        self.finished = self.step >= self.setup.steps or self.reached_s is not None

    def _load(self, checkpoint: Checkpoint) -> None:
        scalars, where = checkpoint.scalars, str(checkpoint.path)
        expect_scalars(scalars, where)
        expect_position(scalars["position"], checkpoint.step, self.setup.plan, where)
        restore(checkpoint, self.setup.model, self.setup.optimizer, self.setup.masters)
        self._averages.load(checkpoint.tensors, where)
        self.setup.precision.load(scalars["precision"], where)
        self.step, self.position = checkpoint.step, scalars["position"]
        self.best, self.metrics = scalars["best"], scalars["metrics"]
        self.reached_s = scalars["reached_s"]
        self._ledger.observer.take(scalars.get("observer"), where)
        self.clock = Clock(scalars["seconds"])

    def run(self, steps: int | None = None) -> None:
        """Trains to the end of the run, or for so many steps."""
        last = self.setup.steps if steps is None else min(self.setup.steps, self.step + steps)
        self.clock.start()
        while True:
            try:
                if not self._chores:
                    ending = self.stopping if self.ranks is None else self._ledger.ending
                    if self.finished or self.step >= last or (ending and self._saved_step == self.step):
                        if not self._saver.is_pending:
                            break
                        self._chores.append("settle")
                    elif ending:
                        self._chores += [*self._logging(), "checkpoint"]
                    else:
                        self.reads.run_step(self._one_step, self._chores)
                while self._chores:
                    self._do(chore := self._chores[0])
                    if chore != "regroup":
                        self._chores.remove(chore)  # only now: what a lost rank interrupts is begun again
                        self._progress += 1
            except CommunicationError as error:
                self._go_on_after(error)
            self._display.step(self)
            self.clock.lap("log")

    def _one_step(self) -> None:
        setup, clock, recipe = self.setup, self.clock, self.setup.recipe
        if self._stream is None:
            self._stream = iter(setup.batches(self.position, *self._place()))
            batch = next(self._stream)
            clock.lap("first batch")
        else:
            batch = next(self._stream)
            clock.lap("wait")
        size = setup.plan.get_batch_size(self.position)
        if self._weights.shape[0] != size:
            self._weights = torch.full((size,), 1 / size, device=setup.device)
        set_lr(setup.optimizer, setup.lr_at(self.position))
        setup.freezing.freeze_until(self.position)
        if recipe.log_ids:
            self._ledger.served(batch)
        verdict = None
        if self.ranks is None:
            self._forward_backward(batch)
        else:
            verdict = self._together(self.ranks, batch)
        setup.precision.step(setup.optimizer, recipe.optimizer.clip_norm, self._parameters)
        setup.optimizer.zero_grad(set_to_none=True)
        self._ledger.stepped(self.step + 1, batch, size, verdict)
        before, self.position = self.position, self.position + size
        self.step += 1
        self._averages.stepped(self.step)
        self._progress += 1
        clock.lap("optimizer")
        chores = []
        if setup.eval is not None and self._due(before, recipe.evaluate.every_epochs):
            chores += ["statistics", "evaluate"] if self._averages.recomputes else ["evaluate"]
        if self._checkpoint_due(before):
            chores.append("checkpoint")
        if chores or self.step % recipe.log_every_steps == 0:
            chores[:0] = self._logging()
        self._chores += chores
        if self._ledger.regrouping:
            self._chores.append("regroup")

    def _logging(self) -> list[str]:
        """The chores of a logging step: at most one exchange between ranks each, see `progress`."""
        return ["log", "agree"] if self.setup.recipe.observe.on_divergence == "stop" else ["log"]

    def _do(self, chore: str) -> None:
        """Something between two steps: log, agree (on stopping, where it diverges), statistics (of batch norm),
        evaluate, checkpoint, settle (wait until it is written), or regroup."""
        if chore == "log":
            self._record()
        elif chore == "agree":
            self._stop_diverged()
        elif chore == "statistics":
            self._averages.recompute(self.step, self.ranks)
        elif chore == "evaluate":
            self._evaluate()
            if self.finished and "checkpoint" not in self._chores:
                self._chores.append("checkpoint")
        elif chore == "checkpoint":
            self._save()
        elif chore == "settle":
            self._saver.wait()
            if self.ranks is not None:
                self.ranks.check()
        else:
            self._saver.wait()  # what is not whole yet would be given up
            self.meet()
        self.clock.lap({"settle": "checkpoint", "statistics": "evaluate", "agree": "log"}.get(chore, chore))
        if chore in ("evaluate", "checkpoint", "settle"):
            self._ledger.restart_rate(self.step, self.clock)

    def _place(self) -> tuple[int, int]:
        """(rank, number of ranks)."""
        return (0, 1) if self.ranks is None else (self.ranks.world.rank, self.ranks.world.size)

    def close(self) -> None:
        """Ends the loader's threads and closes the logs."""
        self._close_stream()
        self._saver.close()
        self._ledger.log.close()
        self._lock.close()

    def _close_stream(self) -> None:
        if self._stream is not None and hasattr(self._stream, "close"):
            self._stream.close()
        self._stream = None

    # With other ranks.

    def meet(self) -> None:
        """Comes together with the other ranks, at the start or after some were lost, in one state.

        Raises:
            UsageError: another recipe or other data there. FencedError, CommunicationError: see `Ranks.meet`.
        """
        ranks = self.ranks
        assert ranks is not None
        led = self._ledger.log.leads
        self._close_stream()
        self.setup.freezing.thaw()
        met = ranks.meet(self.setup.model, self.setup.device, self)
        self._saver.meet(ranks.exchange(), ranks.confirmer())
        self._ledger.log.confirm = ranks.confirmer()
        if met.unsaved and "checkpoint" not in self._chores:
            self._chores.insert(0, "checkpoint")
        self._ledger.log.cut_ids(self.position)
        if ranks.speaks:
            for name in ranks.lost:
                self.run_folder.seal_ids(self.position, name)
            if not led:
                self.run_folder.seal_all_ids(self.position, besides=met.names)
                with suppress(UsageError):  # of one that sleeps
                    self._lock.enter_context(self.run_folder.lock())
                self._ledger.lead(self.position, self.step)
                if self.best is not None and self.best["step"] == self.step:
                    self._write_weights()  # who led before may not have come to it
        ranks.lost = ()
        self._ledger.regrouping = False
        self._chores = [chore for chore in self._chores if chore != "regroup"]

    def end(self, tell: Callable[[], None]) -> None:
        """Calls `tell` on the rank that leads, and holds the others until then; if it is lost, another one does it."""
        ranks = self.ranks
        assert ranks is not None
        while True:
            try:
                if ranks.speaks:
                    tell()
                    ranks.exchange().publish("end", b"")
                else:
                    ranks.exchange().collect("end", [0], lambda: None)
                return
            except CommunicationError as error:
                self._go_on_after(error)

    def _together(self, ranks: Ranks, batch: Batch) -> StepReduction:
        """A step with the others: it comes about on all ranks, or the network is as it was before."""
        if self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)
        ranks.seed(self.setup.recipe.seed, self.position)
        try:
            self._forward_backward(batch)
            loss = self._ledger.loss_of_step(len(self._weights))
            verdict = ranks.finish(loss, bad=len(batch.bad), stopping=self.stopping)
        except CommunicationError:
            self._ledger.drop_step()
            if self._buffers:
                torch._foreach_copy_(self._buffers, self._kept)
            self.setup.model.zero_grad(set_to_none=True)
            raise
        self.clock.lap("reduce")
        return verdict

    def _go_on_after(self, error: CommunicationError) -> None:
        """Continues with the remaining ranks after one was lost, or raises the error."""
        if self.ranks is None:
            raise error
        if not isinstance(seen := self.ranks.reason(error), GenerationEndedError):
            raise seen from error
        self.meet()
        self.clock.lap("regroup")

    def identity(self) -> dict[str, Any]:
        """Returns the settings that must be equal on all ranks."""
        return identity(self.setup)

    def progress(self) -> int:
        """Steps and chores done; -1 without a state. It tells a rank that has ended an exchange from one where that has
        failed, so no chore has two of them."""
        return self._progress

    def unsaved(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._saver.is_writing

    def go_back(self, checkpoint: Checkpoint | None, progress: int) -> None:
        """Goes on from a checkpoint, or from the beginning, as the rank that gives its state to the others."""
        if checkpoint is not None:
            self.resume(checkpoint)
        self._progress, self._chores = progress, []

    def state(self) -> State:
        """All that another rank needs to go on from here."""
        scalars = {
            **self._scalars(),
            "step": self.step,
            "progress": self._progress,
            "chores": self._chores,
            "saved_step": self._saved_step,
            "finished": self.finished,
            "ledger": self._ledger.state(),
        }
        return scalars, self._tensors()

    def _tensors(self) -> dict[str, torch.Tensor]:
        setup = self.setup
        return state_of(setup.model, setup.optimizer, setup.masters) | self._averages.state()

    def take(self, scalars: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Goes on from the state of another rank."""
        self._load(Checkpoint(Path("the state of another rank"), scalars["step"], scalars, tensors))
        self._ledger.take(scalars["ledger"])
        self._progress, self._chores = scalars["progress"], scalars["chores"]
        self._saved_step, self.finished = scalars["saved_step"], scalars["finished"]

    def _forward_backward(self, batch: Batch) -> None:
        setup, clock = self.setup, self.clock
        images, labels = prepared(setup, batch, self.step + 1)
        weights, masked = self._weights, bool(batch.bad) and bool((batch.served < 0).any())
        if self.ranks is not None:
            weights = weights[: images.shape[0]]  # of a rank's share
        if masked:
            mask = to_device((batch.served >= 0).astype(np.float32), weights.device)
            weights = weights * mask
        noisy = weights
        if (strength := setup.recipe.optimizer.gradient_noise) is not None:
            factors = draw_gradient_noise(batch.keys(), strength * len(self._weights) ** 0.5)
            noisy = weights * to_device(factors, weights.device)
        clock.lap("augment")
        parts = divided(setup, images, labels, weights, noisy)
        self._ledger.observer.begin(self.step + 1, parts, self._place()[1])
        for number, (part, part_labels, part_weights, part_noisy) in enumerate(parts, 1):
            with setup.precision.autocast():
                outputs = setup.forward(part)
            clock.lap("forward")
            outputs = outputs.float()  # the loss is computed in fp32, whatever the precision
            losses = setup.task.loss(outputs, part_labels)
            clock.lap("loss")
            if self.ranks is not None and number == len(parts):
                self.ranks.arm(len(batch.images) / len(self._weights))
            setup.precision.backward(losses, part_noisy)
            clock.lap("backward")
            found = losses.detach()
            self._ledger.add(found * part_weights * len(self._weights) if masked else found)
        self._last_outputs = outputs.detach(), part_labels

    def _due(self, before: int, every_epochs: float) -> bool:
        interval = every_epochs * self.setup.epoch
        return self.step == self.setup.steps or math.floor(self.position / interval) > math.floor(before / interval)

    def _checkpoint_due(self, before: int) -> bool:
        options = self.setup.recipe.checkpoint
        if options.every_steps is not None:
            return self.step == self.setup.steps or self.step % options.every_steps == 0
        return self._due(before, options.every_epochs)

    @property
    def damaged(self) -> int:
        """How often a damaged sample came up."""
        return self._ledger.damaged

    @property
    def leads(self) -> bool:
        """Whether this process writes what is written once."""
        return self.ranks is None or self.ranks.speaks

    def _record(self) -> None:
        """Reads losses since the last record (this waits for the device), checks them, and writes a record."""
        losses = self._ledger.losses()
        if not len(losses):
            return
        self.clock.lap("log")  # what the host has waited for is of the steps that this record is of
        said = self._ledger.look(self.step, losses)
        if not np.isfinite(losses).all():
            first = self.step - len(losses) + 1 + int(np.flatnonzero(~np.isfinite(losses))[0])
            self._stop(f"the loss is not finite at step {first}", first, self._ledger.observer.culprit())
        self._ledger.record(self.step, losses, self._last_outputs, self.clock)
        if said:
            self._ledger.diverged(self.step, self.clock, said)
            if self.setup.recipe.observe.on_divergence != "stop":  # which says it as it ends the run
                self.say(said)
            self._diverged = said

    def _check_parameters(self) -> None:
        """A finite loss can have made them infinite: neither the best weights nor a checkpoint may be replaced then."""
        if not torch.stack([parameter.isfinite().all() for parameter in self._parameters]).all():
            self._stop(f"the weights are not finite at step {self.step}", self.step, self._ledger.observer.culprit())

    def _stop(self, what: str, step: int, culprit: str = "") -> NoReturn:
        lr = self.setup.lr_at(self.setup.plan.find_position(step - 1))
        self.close()
        raise stopped(what, lr, self.run_folder, self._checkpoints, culprit, precision=self.precision.name)

    def _stop_diverged(self) -> None:
        """All ranks stop where the one that leads has seen the run diverge; each has looked at its own numbers."""
        said = self._diverged
        if self.ranks is not None:
            said = self.ranks.world.control.broadcast_bytes(said.encode()).decode()
        if said:
            self._stop(said.rstrip("."), self.step)

    def _evaluate(self) -> None:
        setup = self.setup
        assert setup.eval is not None
        self._check_parameters()
        started = perf_counter()
        with self.shown():
            self.evaluation = evaluate(setup, setup.eval, self.ranks)
        metrics = self.metrics = self.evaluation.metrics
        seconds = self.clock.total_seconds() + perf_counter() - started
        self._ledger.write(
            {
                "kind": "evaluate",
                "step": self.step,
                "position": self.position,
                "epoch": self.position / setup.epoch,
                **metrics,
                "damaged": self.evaluation.damaged,
                "seconds": seconds,
            },
        )
        if self.best is None or better(setup.task, metrics, self.best):
            self.best = {**metrics, "step": self.step, "epoch": self.position / setup.epoch}
            self._write_weights()
        goals = setup.recipe.stop_at
        if goals and all(reaches(setup.task, name, metrics[name], goal) for name, goal in goals.items()):
            self.reached_s = seconds
            self.finished = True

    def shown(self) -> AbstractContextManager[None]:
        """Within it the network has the weights and statistics that are evaluated and saved."""
        return self._averages.shown()

    def _write_weights(self) -> None:
        with self.shown():
            self._ledger.log.weights(self.setup.state_dict())

    def _save(self) -> None:
        setup = self.setup
        self._check_parameters()
        self.finished = self.finished or self.step >= setup.steps
        if setup.eval is None:
            self._write_weights()
        self._ledger.log.flush()
        self._saver.save(self.step, self._tensors(), self._scalars())
        self._saved_step = self.step

    def _scalars(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "data": self.setup.inputs.build_state(self.setup.recipe),
            "precision": self.setup.precision.state(),
            "best": self.best,
            "metrics": self.metrics,
            "reached_s": self.reached_s,
            "damaged": self._ledger.damaged,
            "observer": self._ledger.observer.state(),
            "seconds": self.clock.seconds,
        }
