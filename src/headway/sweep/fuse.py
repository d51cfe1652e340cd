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
from headway.sweep.fused_pass import Group, Member, split_members
from headway.training.trainer import Trainer

LOG = logging.getLogger("headway.sweep")


@final
class Fusing:
    """Chooses which trials of a process are fused.

    Args:
        chosen: the number at once of trials whose choice is in the journal already.
        measured: `at_once` and `gain` of earlier measurements, by `network`.
        tell: called with each new choice, before it counts.
    """

    def __init__(
        self,
        chosen: Mapping[int, int],
        measured: Mapping[str, tuple[int, float]],
        tell: Callable[[FuseChoice], None],
    ) -> None:
        self.chosen, self.measured, self._tell = dict(chosen), dict(measured), tell
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
            LOG.info(f"Trials are not fused, because {reason}.")


@final
class FusedTrials:
    """Trials of a cohort that may take forward and backward together. Close it, and they are as before."""

    def __init__(self, fusing: Fusing, trials: Mapping[int, tuple[Trainer, int]]) -> None:
        self._fusing = fusing
        self._undecided: list[Group] = []
        self._groups: dict[int, Group] = {}
        by_name: dict[tuple[str, int | None], dict[int, Member]] = defaultdict(dict)
        for trial, (trainer, until) in trials.items():
            at_once = fusing.chosen.get(trial)
            if at_once == 0:
                continue
            if reason := find_obstacle(trainer):
                fusing.explain(reason)
                continue
            by_name[describe_network(trainer), at_once][trial] = Member(trainer, until)
        for (name, at_once), members in by_name.items():
            if at_once is not None:
                self._split(members, at_once)
            elif len(members) > 1:
                self._undecided.append(Group(members, name))
        for trial, (trainer, _) in trials.items():
            if trial in self._groups or any(trial in group.members for group in self._undecided):
                trainer.gradient_source = partial(self._compute, trial, trainer)

    def _split(self, members: Mapping[int, Member], at_once: int) -> None:
        for own in split_members(members, at_once):
            self._groups |= dict.fromkeys(own, Group(own))

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
        if choice.at_once:
            self._split(members, choice.at_once)
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
