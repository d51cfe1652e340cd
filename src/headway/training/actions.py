"""The actions between two steps, and the steps after which each is due."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import final

from headway.setup.train_setup import TrainSetup


@final
class Action(StrEnum):
    """An action between two steps. Each contains one collective at most, see `Recovery.progress`."""

    # All ranks take the mean of the weights that each has trained alone.
    AVERAGE = "average"
    LOG = "log"
    # All ranks learn whether the lead saw the run diverge.
    AGREE = "agree"
    STATISTICS = "statistics"
    EVALUATE = "evaluate"
    # Call the hook `on_epoch` of the callbacks.
    EPOCH = "epoch"
    CHECKPOINT = "checkpoint"
    # Wait until the newest checkpoint is written.
    SETTLE = "settle"
    REGROUP = "regroup"


@final
class ActionRules:
    """Tells which actions of a recipe are due.

    Args:
        needs_statistics: statistics of batch norm are recomputed before an evaluation.
        has_callbacks: the run has callbacks, which are called after an epoch.
    """

    def __init__(self, setup: TrainSetup, *, needs_statistics: bool, has_callbacks: bool) -> None:
        self._setup, self._has_callbacks = setup, has_callbacks
        # Recomputing statistics and evaluating are a collective each, so they are two actions.
        self._evaluation = [Action.STATISTICS, Action.EVALUATE] if needs_statistics else [Action.EVALUATE]

    def list_due(self, step: int) -> list[Action]:
        """Returns the actions due after a step, in order. Those that fall into a round wait for its end."""
        setup, actions = self._setup, list[Action]()
        options, rounds = setup.recipe.checkpoint, setup.rounds
        is_last = step == setup.steps
        if not rounds.is_end(step):
            return []
        before, position = setup.plan.find_position(rounds.find_start(step)), setup.plan.find_position(step)

        def is_due(every_epochs: float) -> bool:
            interval = every_epochs * setup.epoch
            return is_last or math.floor(position / interval) > math.floor(before / interval)

        evaluation = setup.recipe.evaluate
        at_steps = any(rounds.find_start(step) < one <= step for one in evaluation.at_steps)
        if setup.eval is not None and (at_steps or is_due(evaluation.every_epochs)):
            actions += self._evaluation
        # Before the checkpoint, which holds the state of the callbacks.
        if self._has_callbacks and position // setup.epoch > before // setup.epoch:
            actions.append(Action.EPOCH)
        every_steps = options.every_steps
        if is_due(options.every_epochs) if every_steps is None else is_last or rounds.is_due(step, every_steps):
            actions.append(Action.CHECKPOINT)
        # The log goes first: it checks the loss before an evaluation or checkpoint uses the weights.
        if actions or rounds.is_due(step, setup.recipe.log_every_steps):
            actions[:0] = self.list_log_actions()
        return [Action.AVERAGE, *actions] if rounds.is_alone(step) else actions

    def list_final(self, *, is_evaluated: bool) -> list[Action]:
        """Returns the actions of a run that ends before its last step. Args: is_evaluated: at this step already."""
        evaluation = [] if is_evaluated or self._setup.eval is None else self._evaluation
        return [*self.list_log_actions(), *evaluation, Action.CHECKPOINT]

    def list_log_actions(self) -> list[Action]:
        """Returns the actions that write a record."""
        stops = self._setup.recipe.observe.on_divergence == "stop"
        return [Action.LOG, Action.AGREE] if stops else [Action.LOG]
