"""Fused trials: trials of a cohort take forward and backward together, where a measurement says that it pays.

All else of a step stays that of each trial: batch, rates, optimizer, averages, logs, evaluations and checkpoints.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import final

from headway.data.batch import Batch
from headway.sweep.fuse_choice import FuseChoice, describe_network, find_obstacle, measure_gain
from headway.sweep.fused_activations import CannotFuseError
from headway.sweep.fused_pass import Group, Member
from headway.training.trainer import Trainer

LOG = logging.getLogger("headway.sweep")


@final
class Fusing:
    """Chooses which trials of a process are fused.

    Args:
        chosen: the trials that take a pass together with each trial, in their places, if the journal has that already.
        measured: `at_once` and `gain` of earlier measurements, by `network`.
        tell: called with each new choice, before it counts.
        explain: called with the reason why trials cannot be fused, once for each reason.
    """

    def __init__(
        self,
        chosen: Mapping[int, tuple[int, ...]],
        measured: Mapping[str, tuple[int, float]],
        tell: Callable[[FuseChoice], None],
        explain: Callable[[str], None] = LOG.info,
    ) -> None:
        self.chosen, self.measured, self._tell, self._explain = chosen, dict(measured), tell, explain
        self._told: set[str] = set()

    def begin(self, trials: Mapping[int, tuple[Trainer, int]]) -> FusedTrials:
        """Begins with trials that are at one position.

        Args:
            trials: trainer of each trial, and the step that it trains to.
        """
        return FusedTrials(self, trials)

    def note(self, choice: FuseChoice) -> None:
        """Notes a choice, and tells it."""
        self.measured[choice.network] = choice.at_once, choice.gain
        self._tell(choice)

    def explain(self, reason: str) -> None:
        """Says why trials are not fused, once for each reason."""
        if reason not in self._told:
            self._told.add(reason)
            self._explain(f"Trials are not fused, because {reason}.")


@final
class FusedTrials:
    """Trials of a cohort that may take forward and backward together. Close it, and they are as before."""

    def __init__(self, fusing: Fusing, trials: Mapping[int, tuple[Trainer, int]]) -> None:
        self._fusing = fusing
        self._groups: dict[int, Group] = {}
        undecided: dict[str, dict[int, Member]] = defaultdict(dict)
        together: dict[tuple[int, ...], dict[int, Member]] = defaultdict(dict)
        for trial, (trainer, until) in trials.items():
            places = fusing.chosen.get(trial)
            if places == ():
                continue
            if reason := find_obstacle(trainer):
                fusing.explain(reason)
                continue
            own = undecided[describe_network(trainer)] if places is None else together[places]
            own[trial] = Member(trainer, until)
        self._undecided = [Group(own, (*own,), name) for name, own in undecided.items() if len(own) > 1]
        for places, own in together.items():
            self._groups |= dict.fromkeys(own, Group(own, places))
        for trial, (trainer, _) in trials.items():
            if trial in self._groups or any(trial in group.members for group in self._undecided):
                trainer.gradient_source = partial(self._compute, trial, trainer)

    def _compute(self, trial: int, trainer: Trainer, batch: Batch) -> None:
        """Computes the gradient of a trial's step, or takes it if another trial's turn has computed it."""
        # The first step of a run writes a panel of its images, and each trial takes it by itself.
        if trainer.step:
            for undecided in self._undecided:
                if trial in undecided.members:
                    self._decide(undecided, trial, batch)
                    break
            if (group := self._groups.get(trial)) is not None:
                try:
                    group.compute(trial, batch)
                    return
                except CannotFuseError as error:
                    self._give_up(group, str(error))
        trainer.forward_backward(batch)

    def _decide(self, group: Group, trial: int, batch: Batch) -> None:
        """Chooses for a group, by an earlier measurement or a new one."""
        members = group.list_ready(trial)
        if len(members) < 2:
            return
        # Gains of nearly as many trials are alike.
        network = f"{group.name} x {1 << (len(members).bit_length() - 1)}"
        try:
            if (known := self._fusing.measured.get(network)) is not None:
                choice = FuseChoice(trials=tuple(members), at_once=known[0], gain=known[1], network=network)
            else:
                choice = replace(measure_gain([members[one].trainer for one in members], batch), network=network)
                choice = replace(choice, trials=tuple(members))
        except CannotFuseError as error:
            self._give_up(group, str(error))
            return
        self._fusing.note(choice)
        self._undecided.remove(group)
        record = choice.to_record()
        for places in {record.find_places(one) for one in members}:
            self._groups |= dict.fromkeys(places, Group({one: members[one] for one in places}, places))
        for one, member in group.members.items():
            if one not in self._groups:
                member.trainer.gradient_source = None

    def _give_up(self, group: Group, reason: str) -> None:
        self._fusing.explain(reason)
        for trial in list(group.members):
            self.leave(trial)

    def leave(self, trial: int) -> None:
        """Takes a trial out that pauses, ends or has failed. The others go on together."""
        for group in (self._groups.pop(trial, None), *self._undecided):
            if group is not None and (member := group.leave(trial)) is not None:
                member.trainer.gradient_source = None

    def close(self) -> None:
        """Takes all trials out."""
        for trial in (*self._groups, *(trial for group in self._undecided for trial in group.members)):
            self.leave(trial)
