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

    The private attributes are the state that a checkpoint keeps, under these names:

    Attributes:
        _first: Losses of the first START_STEPS steps, of which the first is `_first_step`.
        _recent: Losses of the newest steps, at least MEDIAN_STEPS of them.
        _best: Lowest median of MEDIAN_STEPS or more losses, reached at `_best_step`.
        _moves: Absolute differences of the losses of neighbouring steps.
        _bad: Checks in a row with a loss far above the start.
        _lost: Checks in a row in which the progress was lost, since step `_since`.
        _steep: Checks in a row with a large gradient.
        _weights_first: |w| of each layer at the start.
        _gradients: Gradient norms of the newest checks.
        _looks: (step, learning rate, |dw| / |w| of each layer) of the newest checks.
        _told: A message was returned.
    """

    def __init__(
        self, layers: Sequence[str] = (), sizes: Sequence[int] = (), weights: Sequence[float] = (), batch: int = 1
    ) -> None:
        self._layers, self._sizes = list(layers), list(sizes)
        self._batch = batch
        # The names of the attributes below are keys of the checkpoint: a change breaks resuming older runs.
        self._first: list[float] = []
        self._first_step = 1
        self._recent: list[float] = []
        self._best: float | None = None
        self._best_step = 0
        self._moves: list[float] = []
        self._bad = self._lost = self._since = self._steep = 0
        self._weights_first = list(weights)
        self._gradients: list[float] = []
        self._looks: list[tuple[int, float, list[float]]] = []
        self._told = False

    @property
    def start_loss(self) -> float | None:
        """The loss of the first step, which is that of the untrained network; None before it."""
        return self._first[0] if self._first else None

    def check(
        self,
        step: int,
        losses: NDArray[np.float64],
        layers: NDArray[np.float32] | None = None,
        gradient: float | None = None,
        loss_scale: float | None = None,
        lr: float = 1.0,
    ) -> str | None:
        """Checks a logging step. Returns a message the first time that the run diverges, else None.

        Args:
            step: Last step of `losses`, which are those of the steps since the last check.
            layers: [n, 3 or more]: |w| before the step, |g| and |dw| of each of the n layers at `step`.
            gradient: Norm of the whole gradient.
            loss_scale: Loss scale of fp16.
            lr: Learning rate of the step. A |dw| that grows with it is not a jump.
        """
        if layers is not None and len(layers):
            relative_steps = _divide(layers[:, 2], layers[:, 0])
            self._looks = [*self._looks, (step, lr, relative_steps.astype(np.float32).tolist())][-HISTORY_CHECKS:]
        message = self._find_divergence(step, losses, layers, gradient, loss_scale)
        if message is None or self._told:
            return None
        self._told = True
        return message + self.describe_culprit(by_weights="the weights of" in message)

    def describe_culprit(self, by_weights: bool = False) -> str:
        """Describes the layer that blew up first, as a sentence to append; empty if none is known.

        Args:
            by_weights: The message names a layer already, so only a jump is worth another sentence.
        """
        if not self._looks:
            return ""
        steps = [step for step, *_ in self._looks]
        relative_steps = np.array([ratios for *_, ratios in self._looks])
        rates = np.array([[lr] for _, lr, _ in self._looks])
        steps_per_lr = np.divide(relative_steps, rates, out=np.zeros_like(relative_steps), where=rates > 0)
        # The oldest sign counts: later ones are its consequences.
        for row, step in enumerate(steps):
            sentence = self._describe_nonfinite(step, relative_steps[row]) or self._describe_jump(
                step, steps_per_lr[: row + 1]
            )
            if sentence:
                return sentence
        if by_weights:
            return ""
        # Without a jump, the layer that moves most is the best guess.
        layer = int(np.argmax(relative_steps[-1]))
        largest = f"the largest of all layers, {relative_steps[-1, layer]:.2g} at step {steps[-1]:,}"
        return f" Look at {self._layers[layer]}: its |dw| / |w| is {largest}."

    def _describe_nonfinite(self, step: int, relative_step: NDArray[np.float64]) -> str:
        """Describes the layers whose |dw| / |w| is not finite at a step; empty if there is none."""
        layers = np.flatnonzero(~np.isfinite(relative_step))
        if len(layers) == 1 < len(relative_step):
            event = f"it was the first layer with |dw| / |w| not finite, at step {step:,}"
            return f" Look at {self._layers[layers[0]]}: {event}."
        if len(layers):
            event = f"{len(layers)} layers was not finite at step {step:,}"
            return f" |dw| / |w| of {event}. A lower log_every_steps shows which layer was the first."
        return ""

    def _describe_jump(self, step: int, steps_per_lr: NDArray[np.float64]) -> str:
        """Describes the layer whose step is far above its median before; empty if there is none.

        Args:
            step: The step.
            steps_per_lr: [checks, layers]: |dw| / (lr |w|) of all checks up to the step.
        """
        *earlier, newest = steps_per_lr
        if not earlier:
            return ""
        medians = np.median(earlier, axis=0)
        jumps = np.divide(newest, medians, out=np.zeros_like(medians), where=medians > 0)
        layer = int(np.argmax(jumps))
        if not jumps[layer] >= STEP_JUMP:
            return ""
        event = f"{jumps[layer]:,.0f} times its median at step {step:,}"
        return f" Look at {self._layers[layer]}: it was the first to jump: |dw| / (lr |w|) was {event}."

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        return {key: value for key, value in vars(self).items() if key not in ("_layers", "_sizes", "_batch")}

    def load_state_dict(self, state: Any) -> None:
        """Continues from the result of `state_dict`. Raises ValueError if it is not valid."""
        own_state = self.state_dict()
        if not isinstance(state, dict) or state.keys() != own_state.keys():
            raise ValueError("other entries")
        # Checkpoints can come from others: every entry is checked before it is used.
        for name, value in state.items():
            # There is no best value before the first record; a run may go back to that point.
            is_valid = is_any_number(value) or (value is None and name == "_best")
            if name == "_looks":
                is_valid = isinstance(value, list) and all(self._is_history_entry(entry) for entry in value)
            elif isinstance(own_state[name], list):
                is_valid = isinstance(value, list) and all(map(is_any_number, value))
                is_valid = is_valid and (name != "_weights_first" or len(value) == len(own_state[name]))
            elif isinstance(own_state[name], bool):
                is_valid = isinstance(value, bool)
            if not is_valid:
                raise ValueError(name)
        vars(self).update(state)

    def _is_history_entry(self, value: Any) -> bool:
        if not isinstance(value, list) or len(value) != 3 or not isinstance(value[2], list):
            return False
        step, lr, ratios = value
        return type(step) is int and all(map(is_any_number, [lr, *ratios])) and len(ratios) == len(self._layers)

    def _find_divergence(
        self,
        step: int,
        losses: NDArray[np.float64],
        layers: NDArray[np.float32] | None,
        gradient: float | None,
        loss_scale: float | None,
    ) -> str | None:
        """Adds the losses to the state, and returns a message if they, the weights or the gradient diverge."""
        if not np.isfinite(losses).all():
            bad_step = step - len(losses) + 1 + int(np.flatnonzero(~np.isfinite(losses))[0])
            return f"The run diverges: the loss is not finite at step {bad_step:,}."
        if loss_scale is not None and loss_scale < 1:
            return f"The run diverges: gradients overflow fp16 at step {step:,} with a loss scale of {loss_scale:g}."
        if not self._first:
            self._first_step = step - len(losses) + 1
        self._first = [*self._first, *losses.tolist()][:START_STEPS]
        start = self._compute_start_loss()
        loss_changes = np.abs(np.diff(np.concatenate([self._recent[-1:], losses])))
        self._moves = [*self._moves, *loss_changes.tolist()][-4 * MEDIAN_STEPS :]
        self._recent = [*self._recent, *losses.tolist()][-max(MEDIAN_STEPS, len(losses)) :]
        newest_median = median(losses.tolist())
        recent_median = median(self._recent)
        growth_message = self._check_growth(step, newest_median, recent_median, start, layers, gradient)
        if len(self._recent) < MEDIAN_STEPS:
            return growth_message
        return self._check_loss(step, len(losses), newest_median, recent_median, start) or growth_message

    def _compute_start_loss(self) -> float:
        """Returns the loss of the untrained network, as far as single noisy losses tell."""
        first_loss = self._first[0]
        max_loss = first_loss + abs(first_loss) * START_DEVIATIONS / math.sqrt(self._batch)
        return max(first_loss, min(median(self._first), max_loss))

    def _check_loss(
        self, step: int, steps_since_check: int, newest_median: float, recent_median: float, start: float
    ) -> str | None:
        """Returns a message if the loss is far above that at the start, or most of the progress was lost."""
        # The median of |x - y| of two normal numbers is 0.954 standard deviations of one.
        noise_std = median(self._moves) / 0.954 if self._moves else 0.0
        max_noise_rise = MAX_NOISE_RISE * abs(self._first[0])
        max_rise = max(LOSS_RISE * abs(start), min(NOISE_DEVIATIONS * noise_std, max_noise_rise))
        lowest_median = recent_median if self._best is None else self._best
        progress = start - lowest_median
        # Both the long median and that of the newest steps must be high: a run that recovers is left alone.
        loss = min(recent_median, newest_median)
        self._bad = self._bad + 1 if loss > start + max_rise else 0
        has_learned = progress >= LEARNED_SHARE * abs(start) and progress > NOISE_DEVIATIONS * noise_std
        if has_learned and loss > start - (1 - LOST_SHARE) * progress:
            self._lost += 1
            self._since = self._since or step - steps_since_check
        else:
            self._lost = self._since = 0
        if self._best is None or recent_median < self._best:
            self._best, self._best_step = recent_median, step
        loss_text = f"at step {step:,} the median loss of {len(self._recent)} steps is {recent_median:.4g}"
        if self._bad >= DIVERGING_CHECKS:
            return f"The run diverges: {loss_text}; {self._describe_start()}."
        if self._lost >= LOST_CHECKS and step - self._since >= LOST_STEPS:
            best_text = f"after {lowest_median:.4g} at step {self._best_step:,}"
            return f"The run lost its progress: {loss_text}, {best_text}; {self._describe_start()}."
        return None

    def _describe_start(self) -> str:
        """Describes the first loss. At step 1 no update was made before it."""
        note = ", before any update," if self._first_step == 1 else ""
        return f"at step {self._first_step:,}{note} it was {self._first[0]:.4g}"

    def _check_growth(
        self,
        step: int,
        newest_median: float,
        recent_median: float,
        start: float,
        layers: NDArray[np.float32] | None,
        gradient: float | None,
    ) -> str | None:
        """Returns a message if weights or gradients grow while the loss is above that at the start."""
        # Before this gradient is added: it is compared with earlier ones.
        median_gradient = median(self._gradients) if len(self._gradients) >= DIVERGING_CHECKS else math.inf
        if gradient is not None and math.isfinite(gradient):
            self._gradients = [*self._gradients, gradient][-HISTORY_CHECKS:]
        if min(newest_median, recent_median) > start and (message := self._describe_grown_layer(step, layers)):
            return message
        is_steep = (
            gradient is not None
            and newest_median > start + LOSS_RISE * abs(start)
            and gradient > GRADIENT_GROWTH * median_gradient
        )
        self._steep = self._steep + 1 if is_steep else 0
        if gradient is not None and self._steep >= DIVERGING_CHECKS:
            growth = gradient / median_gradient
            return f"The run diverges: the gradient at step {step:,} is {growth:,.0f} times its median before."
        return None

    def _describe_grown_layer(self, step: int, layers: NDArray[np.float32] | None) -> str:
        """Returns a message about the layer whose weights grew most, if they blew up; else an empty string."""
        if layers is None or not len(layers) == len(self._weights_first) > 0:
            return ""
        norms = layers[:, 0].astype(float)
        first_norms = np.array(self._weights_first)
        has_grown = (norms > WEIGHT_GROWTH * first_norms) & (norms > MIN_WEIGHT_RMS * np.sqrt(self._sizes))
        if not has_grown.any():
            return ""
        growth = norms / np.maximum(first_norms, 1e-30)
        layer = int(np.argmax(np.where(has_grown, growth, -1)))
        event = f"{growth[layer]:,.0f} times as large as at the start"
        return f"The run diverges: at step {step:,} the weights of {self._layers[layer]} are {event}."


def _divide(dividend: NDArray[np.float32], divisor: NDArray[np.float32]) -> NDArray[np.float64]:
    """Divides two arrays; 0 if the divisor is 0, as for weights that start at zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(divisor == 0, 0.0, dividend.astype(float) / divisor)
