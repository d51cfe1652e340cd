"""MetricsAccumulator: counts losses, damaged samples and seconds between two records, and writes the records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.comm.reducer import StepReduction
from headway.core.clock import Clock
from headway.core.errors import DataError
from headway.core.exchange_waits import describe_exchanges, select_exchanges
from headway.core.run_folder import RunFolder, read_json_lines
from headway.data.batch import BadSample, Batch
from headway.launch.ranks import Ranks
from headway.model.mixture import list_mixtures
from headway.observe import stragglers
from headway.setup.follow_weights import describe_weights
from headway.setup.run_log import RunLog
from headway.setup.train_setup import TrainSetup
from headway.training.step_observer import StepObserver

OutputsAndLabels = tuple[torch.Tensor, torch.Tensor]
"""Outputs of the network for one micro-batch, and its labels."""


@final
class MetricsAccumulator:
    """Collects the numbers of a run's steps, and writes a record on logging steps.

    Losses stay on the device until `read_losses`. With several ranks each has an accumulator; all of them count the
    same, and the lead writes.

    Attributes:
        log: the files of the run.
        next_record: more numbers for the next record of kind `train`.
        observer: observes single steps as the recipe's part `observe` says.
        damaged: number of times that a damaged sample came up.
        must_stop: some rank was told to stop, as of the newest step whose reduction was read.
        must_regroup: new processes wait to join, likewise.
        must_end: a callback of some rank ends the run, likewise.
    """

    def __init__(
        self, setup: TrainSetup, run: RunFolder, ranks: Ranks | None, show: Callable[[dict[str, Any]], None]
    ) -> None:
        is_lead, name = (True, "") if ranks is None else (ranks.is_lead, ranks.name)
        metadata = describe_weights(setup.loaded.recipe)
        self.log = RunLog(run, sinks=setup.recipe.sinks, is_lead=is_lead, name=name, weights_metadata=metadata)
        self.damaged = 0
        self.must_stop = self.must_regroup = self.must_end = False
        self._setup, self._run, self._ranks, self._show = setup, run, ranks, show
        # Alone: the losses of all samples, on the device. With ranks: those of the current step only.
        self._losses: list[torch.Tensor] = []
        # With ranks: reductions not read yet, and the losses of the steps whose reductions were read.
        self._reductions: list[StepReduction] = []
        self._step_losses: list[float] = []
        self._sizes: list[int] = []
        # Damaged samples not written yet; `_bad_ahead` counts those of all ranks that are not exchanged yet.
        self._bad: list[BadSample] = []
        self._bad_ahead = 0
        self._damaged: set[int] = set()
        self._since: tuple[int, dict[str, float]] = (0, {})
        # Records of the newest step, which a next lead may have to write.
        self._recent: list[dict[str, Any]] = []
        self.next_record: dict[str, Any] = {}
        # The newest numbers of this rank's GPU; the monitors of the run set it.
        self.read_load: Callable[[], dict[str, float]] = dict
        self.observer = StepObserver(setup)
        self._mixtures = list(list_mixtures(setup.model))

    def add_losses(self, losses: torch.Tensor) -> None:
        """Adds the losses of one micro-batch of the current step."""
        self._losses.append(losses)

    def pop_step_loss(self, size: int) -> torch.Tensor:
        """Removes and returns this rank's part of the current step's loss. Args: size: samples over all ranks."""
        loss = torch.cat(self._losses).sum() / size
        self._losses.clear()
        return loss

    def add_segment(self, losses: list[float], bad: int) -> None:
        """Adds the losses of consecutive steps, made by any ranks, and their number of damaged samples."""
        self._step_losses += losses
        self._bad_ahead += bad if self._ranks is not None else 0

    def add_bad(self, bad: list[BadSample]) -> None:
        """Adds damaged samples of this rank."""
        self._bad += bad

    def drop_step(self) -> None:
        """Forgets the current step, which failed."""
        self._losses.clear()

    def log_ids(self, batch: Batch) -> None:
        """Writes the sample ids of a batch; called before its step, so that a rank killed in it has logged them."""
        self.log.write_ids(batch.positions, batch.samples, batch.served)

    def add_step(self, step: int, batch: Batch, size: int, reduction: StepReduction | None = None) -> None:
        """Adds a completed step. Args: size: samples over all ranks. reduction: None without other ranks."""
        self.observer.end_step(step, size, reduction, 1 if self._ranks is None else self._ranks.world.size)
        self._bad += batch.bad
        self._recent.clear()
        if reduction is not None:
            self._reductions.append(reduction)
            # On CUDA reading would wait for the device, so reductions are read on logging steps.
            if self._setup.device.type == "cpu":
                self.read_reductions()
        # A step that this rank makes alone among others is added with its round.
        elif self._ranks is None:
            self._sizes.append(size)

    def add_round(self, reduction: StepReduction, steps: int) -> tuple[float, float]:
        """Adds a round of steps that each rank made alone. On CUDA this waits for the device.

        Returns:
            the sum of the ranks' shares of the samples: below 1 if a rank was lost in the round; and the mean squared
            length of the ranks' changes.

        Raises:
            CommunicationError: ranks issued different operations.
        """
        self.read_reductions()
        total, change_sq, *losses = self._read_flags(reduction)
        self._step_losses += [loss / total for loss in losses[:steps]]
        return total, change_sq / total

    def read_reductions(self) -> None:
        """Reads the losses and flags reduced since the last call. On CUDA this waits for the device.

        Raises:
            CommunicationError: ranks issued different operations.
        """
        for reduction in self._reductions:
            self._read_flags(reduction)
            self._step_losses.append(reduction.loss)
        self._reductions.clear()

    def _read_flags(self, reduction: StepReduction) -> Sequence[float]:
        """Reads the flags of a reduction, and returns the numbers behind them; see `Ranks.finish_round`."""
        assert self._ranks is not None
        self._ranks.reducer.check(reduction)
        bad, stopping, regroup, ending, *more = reduction.flags
        self._bad_ahead += round(bad)
        self.must_stop |= stopping > 0
        self.must_regroup |= regroup > 0
        self.must_end |= ending > 0
        return more

    def read_losses(self, *, meets: bool = True) -> NDArray[np.float64]:
        """Returns the loss of each step since the last call. This waits for the device.

        Args:
            meets: all ranks call this. If a step had damaged samples, they also exchange these here.

        Raises:
            CommunicationError: a rank was lost; nothing has changed.
        """
        if self._ranks is not None and meets:
            self._gather_bad(self._ranks)
        if self._ranks is not None or self._step_losses:
            values = np.array(self._step_losses)
            self._step_losses = []
            return values
        if not self._losses:
            return np.empty(0)
        losses, sizes = torch.cat(self._losses).double().cpu().numpy(), np.array(self._sizes)
        self._losses.clear()
        self._sizes.clear()
        # The losses of all steps lie one after another; each step's mean is over its own number of samples.
        means: NDArray[np.float64] = np.add.reduceat(losses, np.cumsum(sizes) - sizes) / sizes
        return means

    def write_train_record(
        self, step: int, losses: NDArray[np.float64], outputs: OutputsAndLabels | None, clock: Clock
    ) -> None:
        """Writes a record of kind `train`.

        Raises:
            DataError: too many samples are damaged.
        """
        setup, plan = self._setup, self._setup.plan
        # Seconds and samples since the last record, or since an evaluation or checkpoint after it.
        since_step, before = self._since
        self.restart_rate(step, clock)
        spent = {stage: seconds - before.get(stage, 0.0) for stage, seconds in self._since[1].items()}
        elapsed = max(sum(spent.values()), 1e-9)
        position, last = plan.find_position(step), plan.find_position(step - 1)
        # A rank that has just joined has no outputs yet; one that shares the images of others may have none of its own.
        with torch.no_grad():
            metrics = setup.task.metrics(*outputs) if outputs is not None and len(outputs[1]) else {}
        record = {
            "kind": "train",
            "step": step,
            "position": position,
            "epoch": position / setup.epoch,
            "loss": float(losses.mean()),
            **{name: float(value.float().mean()) for name, value in metrics.items()},
            "lr": setup.lr_at(last),
            "batch": position - last,
            "images_s": (position - plan.find_position(since_step)) / elapsed,
            "wait_share": spent.get("wait", 0.0) / elapsed,
            **describe_exchanges(spent, elapsed),
            "seconds": clock.total_seconds(),
        }
        if setup.precision.name == "fp16":
            record["loss_scale"] = setup.precision.state_dict().get("scale")
        if loads := {name: layer.load.summarise() for name, layer in self._mixtures if layer.load is not None}:
            record["experts"] = loads
        record |= self.next_record | self.read_load()
        self.next_record = {}
        record |= self._exchange_stage_seconds(step, step - since_step, spent)
        self.write(record | self.observer.write_rows(self.log, step, position))
        self._write_bad()

    def check_divergence(self, step: int, losses: NDArray[np.float64]) -> str | None:
        """Returns a sentence if the run diverges; to be called before `write_train_record`."""
        return self.observer.check_divergence(step, losses, self._setup.precision.state_dict().get("scale"))

    def write_divergence(self, step: int, clock: Clock, what: str) -> None:
        """Writes a record of kind `divergence`."""
        position = self._setup.plan.find_position(step)
        at = {"step": step, "position": position, "epoch": position / self._setup.epoch}
        self.write({"kind": "divergence", **at, "what": what, "seconds": clock.total_seconds()})

    def write(self, record: dict[str, Any]) -> None:
        """Writes and shows a record."""
        self._recent.append(record)
        self.log.write_record(record)
        self._show({name: value for name, value in record.items() if not isinstance(value, dict)})

    def restart_rate(self, step: int, clock: Clock) -> None:
        """Counts images/s and the waiting share from this step on, without the evaluation or checkpoint before it."""
        self._since = (step, clock.seconds)

    def take_lead(self, position: int, step: int) -> None:
        """Makes this process the writer of the run, also of records that the lost lead did not write in this step."""
        self.log.take_lead(after=(position, step))
        self._write_recent()

    def cut_back(self, position: int, step: int, damaged: int) -> None:
        """Cuts the logs back to the position of a checkpoint."""
        self.log.cut_back(position, step)
        self.damaged = damaged
        # Only the lead has cut this file, so the positions are compared on every rank.
        quarantined = read_json_lines(self._run.quarantine_path)
        self._damaged = {record["asked"] for record in quarantined if record["position"] < position}
        self._bad_ahead = 0
        # Steps after the checkpoint are repeated, and counted again.
        for counted in (self._losses, self._reductions, self._step_losses, self._sizes, self._bad, self._recent):
            counted.clear()

    def state(self) -> dict[str, Any]:
        """Returns all that another rank needs to continue from here, for JSON."""
        self.read_reductions()
        return {
            "recent": self._recent,
            "losses": self._step_losses,
            "bad": [asdict(bad) for bad in self._bad],
            "bad_ahead": self._bad_ahead,
            "damaged": self.damaged,
            "damaged_samples": sorted(self._damaged),
            "since": self._since,
            "must_stop": self.must_stop,
            "must_end": self.must_end,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues from the state of another rank."""
        # If damaged samples are still to be exchanged, each rank keeps its own until then.
        if not state["bad_ahead"]:
            self._bad = [BadSample(**bad) for bad in state["bad"]]
        self._recent, self._step_losses = state["recent"], state["losses"]
        self._reductions.clear()
        self._bad_ahead, self.damaged = state["bad_ahead"], state["damaged"]
        self._damaged = set(state["damaged_samples"])
        step, seconds = state["since"]
        self._since = (step, seconds)
        self.must_stop, self.must_end = state["must_stop"], state["must_end"]
        if self.log.is_lead:
            self._write_recent()

    def _write_recent(self) -> None:
        """Writes the records of this step that the lost lead did not come to write."""
        # The lost lead may have written some of them already.
        written = {(record["kind"], record["step"]) for record in self._run.read_metrics()}
        for record in self._recent:
            if (record["kind"], record["step"]) not in written:
                self.log.write_record(record)

    def _exchange_stage_seconds(self, step: int, steps: int, spent: dict[str, float]) -> dict[str, Any]:
        """Tells the other ranks the seconds that this one spent in each stage of the last `steps` steps.

        The lead writes the seconds of all ranks, once all have told them, and returns the slowest rank for its record.
        """
        ranks = self._ranks
        if ranks is None or ranks.world.size == 1 or not steps:
            return {}
        spent = {**spent, "exchange": sum(select_exchanges(spent).values())}
        ranks.rank_timings.write(step, [spent.get(stage, 0.0) / steps for stage in stragglers.COLUMNS])
        if not self.log.is_lead or (timings := ranks.rank_timings.read()) is None:
            return {}
        at, seconds = timings
        names, position = [str(rank) for rank in range(len(seconds))], self._setup.plan.find_position(at)
        self.log.write_rows(
            stragglers.ROW_FILE_KIND, names, stragglers.COLUMNS, position, at, seconds.astype(np.float32)
        )
        slowest = stragglers.find_slowest_rank(seconds)
        return {} if slowest is None else {"slowest": {**asdict(slowest), "step": at}}

    def _gather_bad(self, ranks: Ranks) -> None:
        """Gathers the damaged samples of all ranks, if there are any."""
        # Every reduction carries the number of damaged samples, so all ranks gather or none does.
        self.read_reductions()
        if self._bad_ahead:
            mine = json.dumps([asdict(bad) for bad in self._bad]).encode()
            samples = [BadSample(**bad) for some in ranks.world.control.gather_bytes(mine) for bad in json.loads(some)]
            self._bad, self._bad_ahead = sorted(samples, key=lambda bad: bad.position), 0

    def _write_bad(self) -> None:
        if not self._bad:
            return
        setup = self._setup
        self.log.write_quarantine(self._bad, setup.train.name if setup.train is not None else str)
        self.damaged += len(self._bad)
        # A sample counts once, however often it comes up: the limit is a share of the data set.
        self._damaged |= {bad.asked for bad in self._bad}
        self._bad.clear()
        count, limit = len(self._damaged), setup.recipe.data.max_bad_share
        if count > limit * setup.epoch:
            raise DataError(
                f"{count} of {setup.epoch} samples are damaged, more than data.max_bad_share {limit}",
                where=str(self._run.quarantine_path),
                fix="Run headway verify on the data, pack it again, and start a new run.",
            )
