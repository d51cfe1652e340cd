"""Whether a run diverges, since when, and which layer did first; from what a logging step has read anyway.

A large batch's learning rate can blow the weights up in the first epochs, also behind a warm-up. A loss that jumps is
no sign of it: single steps of healthy runs are worse than an untrained network. What is asked for has to last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median  # of some tens of numbers ten times as fast as numpy's
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.untrusted_json import is_any_number

START_STEPS = 10
"""Steps whose median is taken for the loss at the start, where it is above the first step's own,"""
START_DEVIATIONS = 3.0
"""but by no more than so many standard deviations of the mean over its batch, of samples whose own is as large as their
loss. A run may diverge from its second step on, and only the first loss is that of the network as it began."""
MEDIAN_STEPS = 20
"""Steps at least whose median is compared with it: a spike of nine steps does not move it."""
DIVERGING_CHECKS = 2
"""Logging steps in a row that have to agree;"""
LOST_CHECKS = 3
"""and that what was learned is lost: a restart of the schedule climbs, too, and comes back."""
LOSS_RISE = 1.0
"""Of the loss at the start: the median above it by so much is diverging."""
NOISE_DEVIATIONS = 3.0
"""And by so many standard deviations of a single step's loss, where these are larger,"""
MAX_NOISE_RISE = 3.0
"""but by no more than so many losses of the first step: one that diverges jumps about."""
LEARNED_SHARE = 0.3
"""Share of the loss at the start that a run has to have learned before it can lose it again."""
LOST_SHARE = 0.9
"""Share of what was learned that is lost."""
LOST_STEPS = 40
"""Steps at least for which it is lost."""
WEIGHT_GROWTH = 30.0
"""A layer whose weights have so many times their first norm, while the loss is no lower than at the start."""
MIN_WEIGHT_RMS = 1.0
"""Root mean square of such weights: a layer that began near zero grows by more."""
GRADIENT_GROWTH = 1000.0
"""A gradient of so many times its median, while the loss is above that at the start."""
STEP_JUMP = 10.0
"""A layer's |dw| / (lr |w|) of so many times its median before is a jump."""
HISTORY_CHECKS = 16
"""Looks that are kept of each layer, and of the gradient."""


@final
class DivergenceDetector:
    """Looks at a run's logging steps.

    Args:
        layers: names, for the sentence.
        sizes: numbers of each layer's weights.
        weights: |w| of each layer at the start.
        batch: samples of the first step: how far its loss can be from the network's.
    """

    def __init__(
        self,
        layers: Sequence[str] = (),
        sizes: Sequence[int] = (),
        weights: Sequence[float] = (),
        batch: int = 1,
    ) -> None:
        self._layers, self._sizes, self._batch = list(layers), list(sizes), batch
        self._first: list[float] = []
        self._first_step = 1
        self._recent: list[float] = []
        self._best: float | None = None  # lowest median of STEPS steps or more
        self._best_step = 0
        self._moves: list[float] = []
        self._bad = self._lost = self._since = self._steep = 0
        self._weights_first = list(weights)
        self._gradients: list[float] = []
        self._looks: list[tuple[int, float, list[float]]] = []
        self._told = False

    def check(
        self,
        step: int,
        losses: NDArray[np.float64],
        layers: NDArray[np.float32] | None = None,
        gradient: float | None = None,
        loss_scale: float | None = None,
        lr: float = 1.0,
    ) -> str | None:
        """What a logging step has read; the sentence, once, where the run diverges.

        Args:
            step: the last one of `losses`, which are of the steps since the last look.
            layers: [n, ...]: |w| before, |g|, |dw| of each layer, at `step`.
            gradient: norm of the whole.
            loss_scale: of fp16. lr: of the step; a step that grows with it does not jump.
        """
        if layers is not None and len(layers):
            moved = _divide(layers[:, 2], layers[:, 0])
            self._looks = [*self._looks, (step, lr, moved.astype(np.float32).tolist())][-HISTORY_CHECKS:]
        what = self._judge(step, losses, layers, gradient, loss_scale)
        if what is None or self._told:
            return None
        self._told = True
        return what + self.describe_culprit(by_weights="the weights of" in what)

    def describe_culprit(self, by_weights: bool = False) -> str:
        """The layer that blew up first, as a sentence after another; empty where none is known.

        Args:
            by_weights: a layer is named already, so only one that jumped is worth another sentence.
        """
        if not self._looks:
            return ""
        table, steps = np.array([moved for *_, moved in self._looks]), [step for step, *_ in self._looks]
        rates = np.array([[lr] for _, lr, _ in self._looks])
        by_rate = np.divide(table, rates, out=np.zeros_like(table), where=rates > 0)
        for row in range(len(table)):
            broken = np.flatnonzero(~np.isfinite(table[row]))
            if len(broken) == 1 < table.shape[1]:
                name = self._layers[broken[0]]
                said = f"its |dw| / |w| was no longer finite at step {steps[row]:,}, the first of all layers"
                return f" Look at {name}: {said}."
            if len(broken):
                many = f"{len(broken)} layers were no longer finite at step {steps[row]:,}"
                return f" |dw| / |w| of {many}: a lower log_every_steps shows which was the first."
            if row:
                before = np.median(by_rate[:row], axis=0)
                times = np.divide(by_rate[row], before, out=np.zeros_like(before), where=before > 0)
                layer = int(np.argmax(times))
                if times[layer] >= STEP_JUMP:
                    many = f"{times[layer]:,.0f} times its median at step {steps[row]:,}"
                    return f" Look at {self._layers[layer]}: its |dw| / (lr |w|) was {many}, the first of all layers."
        if by_weights:
            return ""
        layer = int(np.argmax(table[-1]))
        largest = f"the largest of all layers, {table[-1, layer]:.2g} at step {steps[-1]:,}"
        return f" Look at {self._layers[layer]}: its |dw| / |w| is {largest}."

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {key: value for key, value in vars(self).items() if key not in ("_layers", "_sizes", "_batch")}

    def load_state_dict(self, state: Any) -> None:
        """Goes on from such a state. Raises ValueError: it is none."""
        mine = self.state_dict()
        if not isinstance(state, dict) or state.keys() != mine.keys():
            raise ValueError("other entries")
        for name, value in state.items():
            fits = is_any_number(value) or (value is None and mine[name] is None)
            if name == "_looks":
                fits = isinstance(value, list) and all(self._is_history_entry(one) for one in value)
            elif isinstance(mine[name], list):
                fits = isinstance(value, list) and all(map(is_any_number, value))
                fits = fits and (name != "_weights_first" or len(value) == len(mine[name]))
            elif isinstance(mine[name], bool):
                fits = isinstance(value, bool)
            if not fits:
                raise ValueError(name)
        vars(self).update(state)

    def _is_history_entry(self, value: Any) -> bool:
        if not isinstance(value, list) or len(value) != 3 or not isinstance(value[2], list):
            return False
        step, lr, moved = value
        return type(step) is int and all(map(is_any_number, [lr, *moved])) and len(moved) == len(self._layers)

    def _judge(
        self,
        step: int,
        losses: NDArray[np.float64],
        layers: NDArray[np.float32] | None,
        gradient: float | None,
        loss_scale: float | None,
    ) -> str | None:
        if not np.isfinite(losses).all():
            first = step - len(losses) + 1 + int(np.flatnonzero(~np.isfinite(losses))[0])
            return f"The run diverges: the loss is not finite at step {first:,}."
        if loss_scale is not None and loss_scale < 1:
            return f"The run diverges: gradients overflow fp16 at step {step:,} with a loss scale of {loss_scale:g}."
        if not self._first:
            self._first_step = step - len(losses) + 1
        self._first = [*self._first, *losses.tolist()][:START_STEPS]
        begun = self._first[0]
        start = max(begun, min(median(self._first), begun + abs(begun) * START_DEVIATIONS / math.sqrt(self._batch)))
        moves = np.abs(np.diff(np.concatenate([self._recent[-1:], losses])))
        self._moves = [*self._moves, *moves.tolist()][-4 * MEDIAN_STEPS :]
        self._recent = [*self._recent, *losses.tolist()][-max(MEDIAN_STEPS, len(losses)) :]
        now = median(losses.tolist())
        level = median(self._recent)
        grown = self._check_growth(step, now, level, start, layers, gradient)
        if len(self._recent) < MEDIAN_STEPS:
            return grown
        # The median of |x - y| of two normal numbers is 0.954 standard deviations of one.
        noise = median(self._moves) / 0.954 if self._moves else 0.0
        rise = max(LOSS_RISE * abs(start), min(NOISE_DEVIATIONS * noise, MAX_NOISE_RISE * abs(begun)))
        best = level if self._best is None else self._best
        learned = start - best
        if min(level, now) > start + rise:
            self._bad += 1
        else:
            self._bad = 0
        was_learned = learned >= LEARNED_SHARE * abs(start) and learned > NOISE_DEVIATIONS * noise
        if was_learned and min(level, now) > start - (1 - LOST_SHARE) * learned:
            self._lost += 1
            self._since = self._since or step - len(losses)
        else:
            self._lost = self._since = 0
        if self._best is None or level < self._best:
            self._best, self._best_step = level, step
        if self._bad >= DIVERGING_CHECKS:
            return (
                f"The run diverges: at step {step:,} the loss is {level:.4g} in the median of {len(self._recent)} "
                f"steps, and {self._describe_start()}."
            )
        if self._lost >= LOST_CHECKS and step - self._since >= LOST_STEPS:
            return (
                f"The run has lost what it had learned: at step {step:,} the loss is {level:.4g} in the median of "
                f"{len(self._recent)} steps, after {best:.4g} at step {self._best_step:,}; {self._describe_start()}."
            )
        return grown

    def _describe_start(self) -> str:
        """What the loss began at: that of step 1 is of the network before any update."""
        before = ", before any update," if self._first_step == 1 else ""
        return f"at step {self._first_step:,}{before} it was {self._first[0]:.4g}"

    def _check_growth(
        self,
        step: int,
        now: float,
        level: float,
        start: float,
        layers: NDArray[np.float32] | None,
        gradient: float | None,
    ) -> str | None:
        """Of weights or gradients, while nothing is learned."""
        usual = median(self._gradients) if len(self._gradients) >= DIVERGING_CHECKS else math.inf
        if gradient is not None and math.isfinite(gradient):
            self._gradients = [*self._gradients, gradient][-HISTORY_CHECKS:]
        if layers is not None and len(layers) == len(self._weights_first) > 0:
            weight = layers[:, 0].astype(float)
            least = MIN_WEIGHT_RMS * np.sqrt(self._sizes)
            grown = np.flatnonzero((weight > WEIGHT_GROWTH * np.array(self._weights_first)) & (weight > least))
            if len(grown) and min(level, now) > start:
                worst = int(grown[np.argmax(weight[grown] / np.maximum(np.array(self._weights_first)[grown], 1e-30))])
                times = weight[worst] / max(self._weights_first[worst], 1e-30)
                name = self._layers[worst]
                many = f"{times:,.0f} times as large as at the start"
                return f"The run diverges: at step {step:,} the weights of {name} are {many}."
        steep = gradient is not None and now > start + LOSS_RISE * abs(start) and gradient > GRADIENT_GROWTH * usual
        self._steep = self._steep + 1 if steep else 0
        if gradient is not None and self._steep >= DIVERGING_CHECKS:
            times = gradient / usual
            return f"The run diverges: the gradient at step {step:,} is {times:,.0f} times its median before."
        return None


def _divide(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """one / other; 0 where both are 0, and where weights begin at zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(other == 0, 0.0, one.astype(float) / other)
