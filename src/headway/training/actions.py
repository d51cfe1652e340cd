"""The actions between two steps, and the steps after which each is due."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import final

from headway.setup.build import TrainSetup


@final
class Action(StrEnum):
    """An action between two steps. Each contains one collective at most, see `Recovery.progress`."""

    LOG = "log"
    # All ranks learn whether the lead saw the run diverge.
    AGREE = "agree"
    STATISTICS = "statistics"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    # Wait until the newest checkpoint is written.
    SETTLE = "settle"
    REGROUP = "regroup"


@final
class ActionRules:
    """Tells which actions of a recipe are due.

    Args:
        needs_statistics: statistics of batch norm are recomputed before an evaluation.
    """

    def __init__(self, setup: TrainSetup, *, needs_statistics: bool) -> None:
        self._setup, self._needs_statistics = setup, needs_statistics

    def list_due(self, step: int, before: int, position: int) -> list[Action]:
        """Returns the actions due after a step, in order. Args: before, position: positions before and after it."""
        setup, actions = self._setup, list[Action]()
        options = setup.recipe.checkpoint
        is_last = step == setup.steps

        def is_due(every_epochs: float) -> bool:
            interval = every_epochs * setup.epoch
            return is_last or math.floor(position / interval) > math.floor(before / interval)

        if setup.eval is not None and is_due(setup.recipe.evaluate.every_epochs):
            # Recomputing statistics and evaluating are a collective each, so they are two actions.
            actions += [Action.STATISTICS, Action.EVALUATE] if self._needs_statistics else [Action.EVALUATE]
        every_steps = options.every_steps
        if is_due(options.every_epochs) if every_steps is None else is_last or step % every_steps == 0:
            actions.append(Action.CHECKPOINT)
        # The log goes first: it checks the loss before an evaluation or checkpoint uses the weights.
        if actions or step % setup.recipe.log_every_steps == 0:
            actions[:0] = self.list_log_actions()
        return actions

    def list_log_actions(self) -> list[Action]:
        """Returns the actions that write a record."""
        stops = self._setup.recipe.observe.on_divergence == "stop"
        return [Action.LOG, Action.AGREE] if stops else [Action.LOG]
