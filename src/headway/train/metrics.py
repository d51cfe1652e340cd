"""Ledger: what a run counts between two records, and writes: losses, damaged samples, rates."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.comm.reducer import StepReduction
from headway.core.clock import Clock
from headway.core.errors import DataError
from headway.core.run_folder import RunFolder, read_json_lines
from headway.data.batch import BadSample, Batch
from headway.launch.ranks import Ranks
from headway.observe import stragglers
from headway.setup.build import Setup
from headway.setup.run_log import RunLog
from headway.train.step_observer import Observer

Outputs = tuple[torch.Tensor, torch.Tensor]
"""What the network gave for the last samples, and their labels."""


@final
class Ledger:
    """Of one run; with several ranks each has one, all count the same, and the one that leads writes.

    Attributes:
        log: its files.
        observer: what the recipe has watched.
        damaged: how often a damaged sample came up.
        ending: some rank was told to stop. regrouping: newcomers wait. As of the newest step that was read.
    """

    def __init__(
        self, setup: Setup, run: RunFolder, ranks: Ranks | None, show: Callable[[dict[str, Any]], None]
    ) -> None:
        leads, name = (True, "") if ranks is None else (ranks.speaks, ranks.name)
        self.log = RunLog(run, sinks=setup.recipe.sinks, leads=leads, name=name)
        self.damaged = 0
        self.ending = self.regrouping = False
        self._setup, self._run, self._ranks, self._show = setup, run, ranks, show
        self._losses: list[torch.Tensor] = []
        self._verdicts: list[StepReduction] = []
        self._step_losses: list[float] = []
        self._sizes: list[int] = []
        self._bad: list[BadSample] = []
        self._bad_ahead = 0
        self._damaged: set[int] = set()
        self._since: tuple[int, dict[str, float]] = (0, {})
        self._recent: list[dict[str, Any]] = []
        self.observer = Observer(setup)

    def add(self, losses: torch.Tensor) -> None:
        """Losses of some samples of a step that is under way; they stay on the device."""
        self._losses.append(losses)

    def loss_of_step(self, size: int) -> torch.Tensor:
        """This rank's part of the loss of the step under way, of so many samples over all ranks; it is then no longer
        counted here."""
        loss = torch.cat(self._losses).sum() / size
        self._losses.clear()
        return loss

    def drop_step(self) -> None:
        """The step under way does not come about."""
        self._losses.clear()

    def served(self, batch: Batch) -> None:
        """Writes the ids of a batch. Before its step comes about: who is killed then has said what it gave to it."""
        self.log.ids(batch.positions, batch.samples, batch.served)

    def stepped(self, step: int, batch: Batch, size: int, verdict: StepReduction | None = None) -> None:
        """A step of so many samples over all ranks has come about; the verdict is that of several ranks."""
        self.observer.stepped(step, size, verdict, 1 if self._ranks is None else self._ranks.world.size)
        self._bad += batch.bad
        self._recent.clear()
        if verdict is not None:
            self._verdicts.append(verdict)
            if self._setup.device.type == "cpu":  # elsewhere they are read where the host waits anyway
                self.read_verdicts()
        else:
            self._sizes.append(size)

    def read_verdicts(self) -> None:
        """Takes over what the ranks have agreed on since; on CUDA this waits for the device.

        Raises:
            CommunicationError: ranks issued different operations.
        """
        for verdict in self._verdicts:
            assert self._ranks is not None
            self._ranks.reducer.check(verdict)
            self._step_losses.append(verdict.loss)
            bad, stopping, regroup = verdict.flags
            self._bad_ahead += round(bad)
            self.ending |= stopping > 0
            self.regrouping |= regroup > 0
        self._verdicts.clear()

    def losses(self) -> NDArray[np.float64]:
        """The loss of each step since the last record; reading them waits for the device. Several ranks tell each other
        of damaged samples here, where a step had some.

        Raises:
            CommunicationError: a rank was lost; nothing has changed then.
        """
        if self._ranks is not None:
            self._gather_bad(self._ranks)
            found = np.array(self._step_losses)
            self._step_losses = []
            return found
        if not self._losses:
            return np.empty(0)
        losses, sizes = torch.cat(self._losses).double().cpu().numpy(), np.array(self._sizes)
        self._losses.clear()
        self._sizes.clear()
        means: NDArray[np.float64] = np.add.reduceat(losses, np.cumsum(sizes) - sizes) / sizes
        return means

    def record(self, step: int, losses: NDArray[np.float64], outputs: Outputs | None, clock: Clock) -> None:
        """Writes a record of training.

        Raises:
            DataError: too many samples are damaged.
        """
        setup, plan = self._setup, self._setup.plan
        since_step, before = self._since
        self.restart_rate(step, clock)
        spent = {stage: seconds - before.get(stage, 0.0) for stage, seconds in self._since[1].items()}
        elapsed = max(sum(spent.values()), 1e-9)
        position, last = plan.find_position(step), plan.find_position(step - 1)
        with torch.no_grad():  # a newcomer has put nothing through the network yet
            metrics = setup.task.metrics(*outputs) if outputs is not None else {}
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
            "seconds": clock.total_seconds(),
        }
        if setup.precision.name == "fp16":
            record["loss_scale"] = setup.precision.state().get("scale")
        record |= self._slowest(step, step - since_step, spent)
        self.write(record | self.observer.record(self.log, step, position))
        self._write_bad()

    def look(self, step: int, losses: NDArray[np.float64]) -> str | None:
        """Before `record`: the sentence where the run diverges; see `Observer.look`."""
        return self.observer.look(step, losses, self._setup.precision.state().get("scale"))

    def diverged(self, step: int, clock: Clock, what: str) -> None:
        """Writes that a run diverges."""
        position = self._setup.plan.find_position(step)
        at = {"step": step, "position": position, "epoch": position / self._setup.epoch}
        self.write({"kind": "divergence", **at, "what": what, "seconds": clock.total_seconds()})

    def write(self, record: dict[str, Any]) -> None:
        """Writes and shows a record."""
        self._recent.append(record)
        self.log.record(record)
        self._show({name: value for name, value in record.items() if not isinstance(value, dict)})

    def restart_rate(self, step: int, clock: Clock) -> None:
        """images/s and waiting share count from here: evaluation and checkpoints are no part of them."""
        self._since = (step, clock.seconds)

    def lead(self, position: int, step: int) -> None:
        """From now on this process writes for all, also what the one that was lost had not come to in this step."""
        self.log.lead(after=(position, step))
        self._tell_recent()

    def resume(self, position: int, step: int, damaged: int) -> None:
        """Cuts the logs back to where a checkpoint was saved."""
        self.log.cut_back(position, step)
        self.damaged = damaged
        found = read_json_lines(self._run.quarantine_path)  # of several ranks only the one that leads has cut it
        self._damaged = {record["asked"] for record in found if record["position"] < position}
        self._bad_ahead = 0
        for counted in (self._losses, self._verdicts, self._step_losses, self._sizes, self._bad, self._recent):
            counted.clear()

    def state(self) -> dict[str, Any]:
        """What another rank needs to go on from here; for JSON."""
        self.read_verdicts()
        return {
            "recent": self._recent,
            "losses": self._step_losses,
            "bad": [asdict(bad) for bad in self._bad],
            "bad_ahead": self._bad_ahead,
            "damaged": self.damaged,
            "damaged_samples": sorted(self._damaged),
            "since": self._since,
            "ending": self.ending,
        }

    def take(self, state: dict[str, Any]) -> None:
        """Goes on from another rank's."""
        if not state["bad_ahead"]:  # the ranks have told each other; else each still has its own to tell
            self._bad = [BadSample(**bad) for bad in state["bad"]]
        self._recent, self._step_losses = state["recent"], state["losses"]
        self._verdicts.clear()
        self._bad_ahead, self.damaged = state["bad_ahead"], state["damaged"]
        self._damaged = set(state["damaged_samples"])
        step, seconds = state["since"]
        self._since = (step, seconds)
        self.ending = state["ending"]
        if self.log.leads:
            self._tell_recent()

    def _tell_recent(self) -> None:
        """What all ranks have counted in this step, and nobody may have come to write."""
        written = {(record["kind"], record["step"]) for record in self._run.read_metrics()}
        for record in self._recent:
            if (record["kind"], record["step"]) not in written:
                self.log.record(record)

    def _slowest(self, step: int, steps: int, spent: dict[str, float]) -> dict[str, Any]:
        """Tells the other ranks what seconds this one has spent in the last `steps`, by stage. Who leads writes it of
        all, as far as all have told, and the record says which was the slowest."""
        ranks = self._ranks
        if ranks is None or ranks.world.size == 1 or not steps:
            return {}
        ranks.board.write(step, [spent.get(stage, 0.0) / steps for stage in stragglers.COLUMNS])
        if not self.log.leads or (found := ranks.board.read()) is None:
            return {}
        at, seconds = found
        names, position = [str(rank) for rank in range(len(seconds))], self._setup.plan.find_position(at)
        self.log.row(stragglers.KIND, names, stragglers.COLUMNS, position, at, seconds.astype(np.float32))
        slowest = stragglers.find_slowest_rank(seconds)
        return {} if slowest is None else {"slowest": {**asdict(slowest), "step": at}}

    def _gather_bad(self, ranks: Ranks) -> None:
        """The damaged samples of all ranks, where any rank had some: each step has told how many."""
        self.read_verdicts()
        if self._bad_ahead:
            mine = json.dumps([asdict(bad) for bad in self._bad]).encode()
            found = [BadSample(**bad) for some in ranks.world.control.gather_bytes(mine) for bad in json.loads(some)]
            self._bad, self._bad_ahead = sorted(found, key=lambda bad: bad.position), 0

    def _write_bad(self) -> None:
        if not self._bad:
            return
        setup = self._setup
        self.log.quarantine(self._bad, setup.train.name if setup.train is not None else str)
        self.damaged += len(self._bad)
        self._damaged |= {bad.asked for bad in self._bad}
        self._bad.clear()
        found, limit = len(self._damaged), setup.recipe.data.max_bad_share
        if found > limit * setup.epoch:
            raise DataError(
                f"{found} of {setup.epoch} samples are damaged, more than data.max_bad_share {limit}",
                where=str(self._run.quarantine_path),
                fix="Run headway verify on the data, pack it again, and start a new run.",
            )
