"""Detects that a run diverges, and the layer that diverged first, from values that a logging step has read anyway.

The learning rate of a large batch can blow up the weights in the first epochs, even after a warm-up. A single jump of
the loss proves nothing: single steps of healthy runs are worse than an untrained network. So every sign has to last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# For a few tens of numbers, statistics.median is ten times as fast as numpy's.
from statistics import median
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.untrusted_json import is_any_number

# The loss at the start is the median of this many steps, if that is above the loss of the first step,
START_STEPS = 10
# but at most this many standard errors above it. Each sample's deviation is taken to be as large as its loss. A run may
# diverge from its second step on, and only the first loss is that of the untrained network.
START_DEVIATIONS = 3.0
# The recent loss is a median of at least this many steps: a spike of nine steps does not move it.
MEDIAN_STEPS = 20
# Logging steps in a row that have to agree that the run diverges,
DIVERGING_CHECKS = 2
# or that it lost its progress: the loss also rises at a restart of the schedule, and falls again.
LOST_CHECKS = 3
# The run diverges if the median is above the loss at the start by this share of it,
LOSS_RISE = 1.0
# or by this many standard deviations of a single step's loss, if these are more,
NOISE_DEVIATIONS = 3.0
# but by at most this many first losses: the loss of a diverging run is noisy itself.
MAX_NOISE_RISE = 3.0
# A run has progress to lose after the loss fell by this share of the loss at the start.
LEARNED_SHARE = 0.3
# Share of the progress that has to be lost,
LOST_SHARE = 0.9
# for at least this many steps.
LOST_STEPS = 40
# A layer has blown up if its norm grew by this factor while the loss is no lower than at the start,
WEIGHT_GROWTH = 30.0
# and the root mean square of its weights is at least this: a layer that starts near zero grows by large factors.
MIN_WEIGHT_RMS = 1.0
# The gradient has blown up if it is this many times its median, while the loss is above that at the start.
GRADIENT_GROWTH = 1000.0
# A layer jumps if its |dw| / (lr |w|) is this many times its median before.
STEP_JUMP = 10.0
# Logging steps that are remembered of each layer and of the gradient.
HISTORY_CHECKS = 16


@final
class DivergenceDetector:
    """Checks the logging steps of a run for divergence.

    Args:
        layers: Names of the layers, for the message.
        sizes: Number of weights of each layer.
        weights: |w| of each layer at the start.
        batch: Samples of the first step, for the standard error of its loss.
    """

    def __init__(
        self, layers: Sequence[str] = (), sizes: Sequence[int] = (), weights: Sequence[float] = (), batch: int = 1
    ) -> None:
        # The names of the attributes below are keys of the checkpoint: a change breaks resuming older runs.
        self._layers, self._sizes, self._batch = list(layers), list(sizes), batch
        self._first: list[float] = []
        self._first_step = 1
        self._recent: list[float] = []
        # Lowest median of MEDIAN_STEPS or more.
        self._best: float | None = None
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
        """Checks a logging step. Returns a message if the run diverges, and only once.

        Args:
            step: Last step of `losses`, which are those of the steps since the last check.
            layers: [n, ...]: |w| before the step, |g| and |dw| of each layer at `step`.
            gradient: Norm of the whole gradient.
            loss_scale: Loss scale of fp16.
            lr: Learning rate of the step: |dw| grows with it, which is not a jump.
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
        """Describes the layer that blew up first, as a sentence to append; empty if none is known.

        Args:
            by_weights: The message names a layer already, so only a jump is worth another sentence.
        """
        if not self._looks:
            return ""
        table, steps = np.array([moved for *_, moved in self._looks]), [step for step, *_ in self._looks]
        rates = np.array([[lr] for _, lr, _ in self._looks])
        by_rate = np.divide(table, rates, out=np.zeros_like(table), where=rates > 0)
        # The oldest sign counts: later ones are its consequences.
        for row in range(len(table)):
            broken = np.flatnonzero(~np.isfinite(table[row]))
            if len(broken) == 1 < table.shape[1]:
                name = self._layers[broken[0]]
                said = f"it was the first layer with |dw| / |w| not finite, at step {steps[row]:,}"
                return f" Look at {name}: {said}."
            if len(broken):
                many = f"{len(broken)} layers was not finite at step {steps[row]:,}"
                return f" |dw| / |w| of {many}. A lower log_every_steps shows which layer was the first."
            if row:
                before = np.median(by_rate[:row], axis=0)
                times = np.divide(by_rate[row], before, out=np.zeros_like(before), where=before > 0)
                layer = int(np.argmax(times))
                if times[layer] >= STEP_JUMP:
                    many = f"{times[layer]:,.0f} times its median at step {steps[row]:,}"
                    return f" Look at {self._layers[layer]}: it was the first to jump: |dw| / (lr |w|) was {many}."
        if by_weights:
            return ""
        # Without a jump, the layer that moves most is the best guess.
        layer = int(np.argmax(table[-1]))
        largest = f"the largest of all layers, {table[-1, layer]:.2g} at step {steps[-1]:,}"
        return f" Look at {self._layers[layer]}: its |dw| / |w| is {largest}."

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        return {key: value for key, value in vars(self).items() if key not in ("_layers", "_sizes", "_batch")}

    def load_state_dict(self, state: Any) -> None:
        """Continues from a saved state. Raises ValueError if it is not valid."""
        mine = self.state_dict()
        if not isinstance(state, dict) or state.keys() != mine.keys():
            raise ValueError("other entries")
        # Checkpoints can come from others: every entry is checked before it is used.
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
        # The level to compare with: the untrained network's, as far as single noisy losses tell.
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
        # Both the long median and that of the newest steps must be high: a run that recovers is left alone.
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
                f"The run diverges: at step {step:,} the median loss of {len(self._recent)} steps is {level:.4g}; "
                f"{self._describe_start()}."
            )
        if self._lost >= LOST_CHECKS and step - self._since >= LOST_STEPS:
            return (
                f"The run lost its progress: at step {step:,} the median loss of {len(self._recent)} steps is "
                f"{level:.4g}, after {best:.4g} at step {self._best_step:,}; {self._describe_start()}."
            )
        return grown

    def _describe_start(self) -> str:
        """Describes the first loss; at step 1 it is that of the network before any update."""
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
        """Checks for weights or gradients that grow while nothing is learned."""
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
    """Divides two arrays; 0 if the divisor is 0, as for weights that start at zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(other == 0, 0.0, one.astype(float) / other)
