"""Predicts the throughput of loader and loop together from measurements of each alone and of both at once.

Both work at the same time, joined by a ring of batches. While both run, a sample takes each as long as it was measured
with the other one running; as soon as one waits, the other runs alone. For each sample

    both = min(input_beside, loop_beside)
    seconds = both + (1 - both / input_beside) input_alone + (1 - both / loop_beside) loop_alone

If they share nothing (beside = alone) this is the larger of the two. If they share one core (beside = twice alone, for
equal times) it is their sum. Cases in between, such as network threads that wait for a core that decodes, are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from headway.core.profile import JointTiming, StageCeiling


def compute_seconds_together(input_alone: float, loop_alone: float, input_beside: float, loop_beside: float) -> float:
    """Returns the seconds of a sample with loader and loop side by side; the arguments are seconds of a sample, too."""
    both = min(input_beside, loop_beside)
    return both + (1 - both / input_beside) * input_alone + (1 - both / loop_beside) * loop_alone


@final
@dataclass(frozen=True)
class ThroughputModel:
    """Predicts images/s of the whole job."""

    # Seconds of a sample, by side and stage.
    seconds: Mapping[str, Mapping[str, float]]
    # input_slower, loop_slower: slow-down factor of each side while the other one runs.
    input_slower: float
    loop_slower: float

    @staticmethod
    def from_ceilings(ceilings: Sequence[StageCeiling], together: JointTiming | None) -> ThroughputModel:
        """Builds the model; `together` is None if the input costs nothing."""
        seconds: dict[str, dict[str, float]] = {"input": {}, "loop": {}, "stall": {}}
        for one in ceilings:
            seconds[one.side][one.stage] = one.seconds
        alone = ThroughputModel(seconds, 1.0, 1.0)
        return alone if together is None else alone.with_contention(together)

    def with_contention(self, timing: JointTiming) -> ThroughputModel:
        """Returns the same model with measured slow-downs of both sides."""
        # Noise may make a side look faster with the other one running; a factor below 1 has no meaning.
        slower = (timing.input_beside / timing.input_alone, timing.loop_beside / timing.loop_alone)
        return ThroughputModel(self.seconds, max(1.0, slower[0]), max(1.0, slower[1]))

    def sum_seconds(self, side: str) -> float:
        """Returns the seconds of a sample on one side, over all its stages."""
        return sum(self.seconds[side].values())

    def predict_images_s(self, *, stalls: bool = True) -> float:
        """Predicts images/s; `stalls` includes the time of evaluations, checkpoints and records."""
        into, loop = self.sum_seconds("input"), self.sum_seconds("loop")
        if not into or not loop:
            # One side alone, such as synthetic data: nothing runs beside it, and the formula would divide by zero.
            steady = into + loop
        else:
            steady = compute_seconds_together(into, loop, into * self.input_slower, loop * self.loop_slower)
        return 1 / max(steady + (self.sum_seconds("stall") if stalls else 0.0), 1e-12)

    def with_seconds(self, changed: Mapping[str, float]) -> ThroughputModel:
        """Returns the same model with other seconds for some stages."""
        seconds = {
            side: {stage: changed.get(stage, value) for stage, value in stages.items()}
            for side, stages in self.seconds.items()
        }
        return ThroughputModel(seconds, self.input_slower, self.loop_slower)

    def with_less(self, stage: str, saved_s: float) -> ThroughputModel:
        """Returns the same model with a stage that takes so many seconds less, or no time."""
        seconds = {
            side: {name: max(0.0, value - saved_s) if name == stage else value for name, value in stages.items()}
            for side, stages in self.seconds.items()
        }
        return ThroughputModel(seconds, self.input_slower, self.loop_slower)

    def without_stage(self, stage: str) -> ThroughputModel:
        """Returns the same model with a stage that takes no time."""
        return self.with_seconds({stage: 0.0})

    def rank_gains(self) -> list[tuple[str, float]]:
        """Returns each stage that takes time, with the speed-up if it took none, sorted: the first one is the limit.

        Between equal gains the stage that takes longer comes first, so no other row of its side is lower in the table.
        """
        now = self.predict_images_s()
        gains = [
            (stage, self.without_stage(stage).predict_images_s() / now, seconds)
            for stages in self.seconds.values()
            for stage, seconds in stages.items()
            if seconds > 0
        ]
        # Rounding makes gains equal that differ only by floating-point noise.
        gains.sort(key=lambda one: (-round(one[1], 3), -one[2]))
        return [(stage, gain) for stage, gain, _ in gains]
