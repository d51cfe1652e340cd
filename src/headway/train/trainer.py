"""The Trainer: a plain loop, read from top to bottom. It waits for the device on logging steps only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from headway.core.clock import Clock
from headway.core.errors import DataError, TrainingError, UserCodeError
from headway.core.keys import keys as keys_of
from headway.core.run import Run, read_lines
from headway.data.batch import Bad, Batch
from headway.data.decode import chosen
from headway.data.upload import to_device
from headway.optim import set_lr
from headway.train.checkpoint import Checkpoint, Checkpoints, restore, state_of
from headway.train.evaluate import Evaluation, evaluate
from headway.train.log import RunLog
from headway.train.setup import Setup


class Display(Protocol):
    """Whoever shows the progress of a run."""

    def step(self, trainer: Trainer) -> None:
        """Called after every step; must be cheap."""

    def record(self, record: dict[str, Any]) -> None:
        """Called with every record of metrics.jsonl."""


class Trainer:
    """Trains the network of a setup into a run folder.

    The loss rule: a step's gradient is the sum over its samples of loss / global batch. Each micro-batch, and each
    rank, adds its own samples' part; so parts may be uneven, and a masked sample counts zero.

    Attributes:
        step, position: steps done and samples served.
        stopping: set it, and the run saves a checkpoint and ends at the next step's boundary.
        finished: the run is at its end, or has reached `stop_at`.
        best: metrics of the best evaluation so far, with its step and epoch.
        metrics: those of the last one.
        evaluation: the last one.
        reached_s: seconds of the clock until `stop_at` was reached.
        damaged: how often a damaged sample came up.
    """

    def __init__(self, setup: Setup, run: Run, display: Display) -> None:
        recipe = setup.recipe
        self.setup, self.run_folder, self._display = setup, run, display
        self.step = self.position = 0
        self.stopping = self.finished = False
        self.best: dict[str, float] | None = None
        self.metrics: dict[str, float] | None = None
        self.reached_s: float | None = None
        self.evaluation: Evaluation | None = None
        self.clock = Clock()
        self._log = RunLog(run, log_ids=recipe.log_ids, sinks=recipe.sinks)
        self._checkpoints = Checkpoints(run.checkpoints, recipe.checkpoint.keep)
        self._stream: Iterator[Batch] | None = None
        self._parameters = [p for group in setup.optimizer.param_groups for p in group["params"]]
        self._weights = torch.full((recipe.batch,), 1 / recipe.batch, device=setup.device)
        self._micro = recipe.micro_batch if isinstance(recipe.micro_batch, int) else recipe.batch
        self._losses: list[torch.Tensor] = []
        self._bad: list[Bad] = []
        self.damaged = 0
        self._damaged: set[int] = set()
        self._last_outputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._since = (0, 0.0, 0.0)
        self._saved_step: int | None = None

    def resume(self, checkpoint: Checkpoint) -> None:
        """Goes back to where a checkpoint was saved; the logs are cut back to it.

        Raises:
            CheckpointError: it belongs to another network. TrainingError: to other data or another decoder.
        """
        scalars = checkpoint.scalars
        if scalars["data"] != self._data_state():
            what = "the data, the seed or the decoder is not what this run began with"
            raise TrainingError(what, where=str(checkpoint.path), fix="Put the data back, or start a new run.")
        restore(checkpoint, self.setup.model, self.setup.optimizer)
        self.setup.precision.load(scalars["precision"])
        self.step = self._saved_step = checkpoint.step
        self.position = scalars["position"]
        self.best, self.metrics = scalars["best"], scalars["metrics"]
        self.reached_s, self.damaged = scalars["reached_s"], scalars["damaged"]
        self.clock = Clock(scalars["seconds"])
        self._restart_rate()
        self._log.cut_back(self.position, self.step)
        self._damaged = {record["asked"] for record in read_lines(self.run_folder.quarantine_path)}
        self.finished = self.step >= self.setup.steps or self.reached_s is not None

    def run(self, steps: int | None = None) -> None:
        """Trains to the end of the run, or for so many steps."""
        setup, clock, recipe = self.setup, self.clock, self.setup.recipe
        last = setup.steps if steps is None else min(setup.steps, self.step + steps)
        clock.start()
        while self.step < last and not self.finished and not self.stopping:
            if self._stream is None:
                self._stream = iter(setup.batches(self.position))
                batch = next(self._stream)
                clock.lap("first batch")
            else:
                batch = next(self._stream)
                clock.lap("wait")
            set_lr(setup.optimizer, recipe.optimizer.lr * setup.schedule(self.position))
            self._forward_backward(batch)
            setup.precision.step(setup.optimizer, recipe.optimizer.clip_norm, self._parameters)
            setup.optimizer.zero_grad(set_to_none=True)
            clock.lap("optimizer")

            before, self.position = self.position, self.position + recipe.batch
            self.step += 1
            self._note_samples(batch)
            if self.step % recipe.log_every_steps == 0:
                self._record()
                clock.lap("log")
            if setup.eval is not None and self._due(before, recipe.evaluate.every_epochs):
                self._evaluate()
                clock.lap("evaluate")
                self._restart_rate()
            if self._checkpoint_due(before) or self.finished:
                self._save()
                clock.lap("checkpoint")
                self._restart_rate()
            self._display.step(self)
            clock.lap("log")
        if self.stopping and not self.finished and self._saved_step != self.step:
            self._save()
            clock.lap("checkpoint")

    def close(self) -> None:
        """Ends the loader's threads and closes the logs."""
        if self._stream is not None and hasattr(self._stream, "close"):
            self._stream.close()
        self._stream = None
        self._log.close()

    def _forward_backward(self, batch: Batch) -> None:
        setup, clock = self.setup, self.clock
        keys = batch.keys() if setup.augment.random or setup.transform else None
        missing = batch.served < 0 if batch.bad else None
        images, labels = setup.augment(
            batch.images,
            batch.labels,
            keys,
            epochs=batch.epochs,
            first=keys_of(batch.seed, 0, batch.samples) if setup.augment.alternating else None,
            masked=missing,
        )
        if setup.transform is not None:
            images, labels = self._transform(setup.transform, images, labels, keys)
        weights, masked = self._weights, missing is not None and bool(missing.any())
        if masked:
            mask = to_device((batch.served >= 0).astype(np.float32), weights.device)
            weights = weights * mask
        clock.lap("augment")
        parts = [(images, labels, weights)]
        if self._micro < len(images):  # a slice of a tensor takes 1.5 us
            count = -(-len(images) // self._micro)  # equal parts: batch norm wants no tail of one sample
            parts = list(zip(*(tensor.tensor_split(count) for tensor in parts[0]), strict=True))
        for part, part_labels, part_weights in parts:
            with setup.precision.autocast():
                outputs = setup.forward(part)
            outputs = outputs.float()  # the loss is computed in fp32, whatever the precision
            losses = setup.task.loss(outputs, part_labels)
            clock.lap("forward")
            setup.precision.backward(losses, part_weights)
            clock.lap("backward")
            self._losses.append(losses.detach() if not masked else losses.detach() * part_weights * len(self._weights))
        self._last_outputs = outputs.detach(), part_labels

    def _transform(self, transform: Callable[..., Any], images: torch.Tensor, labels: torch.Tensor, keys: Any) -> Any:
        try:
            images, labels = transform(images, labels, keys)
            return images, labels
        except Exception as error:
            what = f"the transform {self.setup.recipe.transform!r} failed: {type(error).__name__}: {error}"
            raise UserCodeError(what, where=f"step {self.step + 1}") from error

    def _note_samples(self, batch: Batch) -> None:
        if batch.bad:
            self._bad += batch.bad
        if self.setup.recipe.log_ids:
            self._log.ids(batch.positions, batch.samples, batch.served)

    def _due(self, before: int, every_epochs: float) -> bool:
        interval = every_epochs * self.setup.epoch
        return self.step == self.setup.steps or math.floor(self.position / interval) > math.floor(before / interval)

    def _checkpoint_due(self, before: int) -> bool:
        options = self.setup.recipe.checkpoint
        if options.every_steps is not None:
            return self.step == self.setup.steps or self.step % options.every_steps == 0
        return self._due(before, options.every_epochs)

    def _restart_rate(self) -> None:
        """images/s and waiting share count from here: evaluation and checkpoints are no part of them."""
        self._since = (self.step, self.clock.total(), self.clock.seconds.get("wait", 0.0))

    def _record(self) -> None:
        """Reads losses since the last record (this waits for the device), checks them, and writes a record."""
        setup = self.setup
        if not self._losses:
            return
        losses = torch.cat(self._losses).double().cpu().numpy()
        count = len(losses) // setup.recipe.batch
        by_step = losses.reshape(count, setup.recipe.batch).mean(axis=1)
        self._losses.clear()
        lr = setup.recipe.optimizer.lr * setup.schedule(self.position - setup.recipe.batch)
        if not np.isfinite(by_step).all():
            self._stop_non_finite("loss is", self.step - count + 1 + int(np.flatnonzero(~np.isfinite(by_step))[0]))
        since_step, since_seconds, since_wait = self._since
        self._restart_rate()
        _, seconds, wait = self._since
        elapsed = max(seconds - since_seconds, 1e-9)
        assert self._last_outputs is not None
        with torch.no_grad():
            metrics = setup.task.metrics(*self._last_outputs)
        record = {
            "kind": "train",
            "step": self.step,
            "position": self.position,
            "epoch": self.position / setup.epoch,
            "loss": float(by_step.mean()),
            **{name: float(value.float().mean()) for name, value in metrics.items()},
            "lr": lr,
            "images_s": (self.step - since_step) * setup.recipe.batch / elapsed,
            "wait_share": (wait - since_wait) / elapsed,
            "seconds": seconds,
        }
        if setup.precision.name == "fp16":
            record["loss_scale"] = setup.precision.state().get("scale")
        self._write(record)
        self._write_bad()

    def _check_parameters(self) -> None:
        """A finite loss can have made them infinite: neither the best weights nor a checkpoint may be replaced then."""
        if not torch.stack([parameter.isfinite().all() for parameter in self._parameters]).all():
            self._stop_non_finite("weights are", self.step)

    def _stop_non_finite(self, what: str, step: int) -> None:
        recipe = self.setup.recipe
        lr = recipe.optimizer.lr * self.setup.schedule((step - 1) * recipe.batch)
        saved = self._checkpoints.paths()
        kept = f"The checkpoint {saved[0].name} is kept" if saved else "There was no checkpoint yet"
        weights = self.run_folder.weights_path.resolve()
        self.close()
        raise TrainingError(
            f"the {what} not finite at step {step} (learning rate {lr:.4g}); training has stopped. {kept}",
            where=str(self.run_folder.folder),
            fix="Start a new run with a lower optimizer.lr, a longer warm-up, optimizer.clip_norm or precision=fp32"
            + (f", from its best weights if you like: model.weights={weights}." if weights.exists() else "."),
        )

    def _write_bad(self) -> None:
        if not self._bad:
            return
        name = self.setup.train.name if self.setup.train is not None else str
        self._log.quarantine(self._bad, name)
        self.damaged += len(self._bad)
        self._damaged |= {bad.asked for bad in self._bad}
        self._bad.clear()
        found, limit = len(self._damaged), self.setup.recipe.data.max_bad_share
        if found > limit * self.setup.epoch:
            raise DataError(
                f"{found} of {self.setup.epoch} samples are damaged, more than data.max_bad_share {limit}",
                where=str(self.run_folder.quarantine_path),
                fix="Run headway verify on the data, pack it again, and start a new run.",
            )

    def _evaluate(self) -> None:
        setup = self.setup
        assert setup.eval is not None
        self._record()
        self._check_parameters()
        self.clock.lap("log")
        started = perf_counter()
        self.evaluation = evaluate(setup, setup.eval)
        metrics = self.metrics = self.evaluation.metrics
        seconds = self.clock.total() + perf_counter() - started
        self._write(
            {
                "kind": "evaluate",
                "step": self.step,
                "position": self.position,
                "epoch": self.position / setup.epoch,
                **metrics,
                "damaged": self.evaluation.damaged,
                "seconds": seconds,
            }
        )
        if self._is_best(metrics):
            self.best = {**metrics, "step": self.step, "epoch": self.position / setup.epoch}
            self._log.weights(setup.model)
        goals = setup.recipe.stop_at
        if goals and all(self._reaches(name, metrics[name], goal) for name, goal in goals.items()):
            self.reached_s = seconds
            self.finished = True

    def _reaches(self, name: str, value: float, goal: float) -> bool:
        task = self.setup.task
        lower_is_better = name == "loss" or (name == task.primary and not task.higher_is_better)
        return value <= goal if lower_is_better else value >= goal

    def _is_best(self, metrics: dict[str, float]) -> bool:
        """Ties keep the earlier weights; so does a metric that is no number."""
        name = self.setup.task.primary
        if self.best is None:
            return True
        return not math.isnan(metrics[name]) and not self._reaches(name, self.best[name], metrics[name])

    def _save(self) -> None:
        setup = self.setup
        self._record()
        self._check_parameters()
        self.finished = self.finished or self.step >= setup.steps
        if setup.eval is None:
            self._log.weights(setup.model)
        self._log.flush()
        scalars = {
            "position": self.position,
            "data": self._data_state(),
            "precision": setup.precision.state(),
            "best": self.best,
            "metrics": self.metrics,
            "reached_s": self.reached_s,
            "damaged": self.damaged,
            "seconds": self.clock.seconds,
        }
        self._checkpoints.save(self.step, state_of(setup.model, setup.optimizer), scalars)
        self._saved_step = self.step

    def _data_state(self) -> dict[str, Any]:
        recipe = self.setup.recipe
        fingerprint = self.setup.train.fingerprint if self.setup.train is not None else "synthetic"
        backend = chosen(recipe.data.decoder) if self.setup.train is not None else "none"
        return {"seed": recipe.seed, "fingerprint": fingerprint, "decoder": backend, "window": recipe.data.window}

    def _write(self, record: dict[str, Any]) -> None:
        self._log.record(record)
        self._display.record(record)
