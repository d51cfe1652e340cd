"""The model: what loader and loop give together, from what each gives alone and beside the other.

Both work at the same time, joined by a ring of batches. While both run, each takes as long for a sample as it was
measured beside the other; once one of them has to wait, the other one is alone. So for each sample

    both = min(input_beside, loop_beside)
    seconds = both + (1 - both / input_beside) input_alone + (1 - both / loop_beside) loop_alone

Where they share nothing (beside = alone) this is the larger of the two. Where they share one core (beside = twice
alone, for two that take as long) it is their sum. What stands between, such as threads of a network that wait for the
one whose core decodes, was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from headway.core.profile import Ceiling, Together


def compute_seconds_together(input_alone: float, loop_alone: float, input_beside: float, loop_beside: float) -> float:
    """Seconds of a sample when loader and loop run side by side; the arguments are seconds of a sample too."""
    both = min(input_beside, loop_beside)
    return both + (1 - both / input_beside) * input_alone + (1 - both / loop_beside) * loop_alone


@final
@dataclass(frozen=True)
class ThroughputModel:
    """Predicts images/s of the whole job.

    Attributes:
        seconds: of a sample, by side and stage.
        input_slower, loop_slower: how many times as long each takes beside the other.
    """

    seconds: Mapping[str, Mapping[str, float]]
    input_slower: float
    loop_slower: float

    @staticmethod
    def from_ceilings(ceilings: Sequence[Ceiling], together: Together | None) -> ThroughputModel:
        """Args: together: None where the input costs nothing."""
        seconds: dict[str, dict[str, float]] = {"input": {}, "loop": {}, "stall": {}}
        for one in ceilings:
            seconds[one.side][one.stage] = one.seconds
        alone = ThroughputModel(seconds, 1.0, 1.0)
        return alone if together is None else alone.with_contention(together)

    def with_contention(self, found: Together) -> ThroughputModel:
        """The same with what was measured of both beside each other."""
        # Noise may make one faster beside the other.
        slower = (found.input_beside / found.input_alone, found.loop_beside / found.loop_alone)
        return ThroughputModel(self.seconds, max(1.0, slower[0]), max(1.0, slower[1]))

    def sum_seconds(self, side: str) -> float:
        """Returns the seconds of a sample on one side, over all its stages."""
        return sum(self.seconds[side].values())

    def predict_images_s(self, *, stalls: bool = True) -> float:
        """Args: stalls: what evaluations, checkpoints and records take is counted."""
        into, loop = self.sum_seconds("input"), self.sum_seconds("loop")
        if not into or not loop:
            steady = into + loop
        else:
            steady = compute_seconds_together(into, loop, into * self.input_slower, loop * self.loop_slower)
        return 1 / max(steady + (self.sum_seconds("stall") if stalls else 0.0), 1e-12)

    def with_seconds(self, changed: Mapping[str, float]) -> ThroughputModel:
        """The same with other seconds for some stages."""
        seconds = {
            side: {stage: changed.get(stage, value) for stage, value in stages.items()}
            for side, stages in self.seconds.items()
        }
        return ThroughputModel(seconds, self.input_slower, self.loop_slower)

    def without_stage(self, stage: str) -> ThroughputModel:
        """The same if a stage took nothing."""
        return self.with_seconds({stage: 0.0})

    def rank_gains(self) -> list[tuple[str, float]]:
        """Every stage that takes time, with how many times the images/s the job would give if it took nothing. The
        first is the limit: the largest gain, and of two that would give as much, the stage that takes longer. So no
        other row of its side, loader, loop or stalls, is lower in the table."""
        now = self.predict_images_s()
        found = [
            (stage, self.without_stage(stage).predict_images_s() / now, seconds)
            for stages in self.seconds.values()
            for stage, seconds in stages.items()
            if seconds > 0
        ]
        found.sort(key=lambda one: (-round(one[1], 3), -one[2]))
        return [(stage, gain) for stage, gain, _ in found]
