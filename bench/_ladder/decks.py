"""Claims of published slides about the same steps, and if they hold here.

STEADY: C. M. Vahid, "The Steady State: Reduce Spikiness from GPU Utilization with Apache MXNet", AWS 2019; one to four
V100. SHORTER: "Making DL training times shorter", NVIDIA; a DGX-1 with eight of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from bench._common import Claim
from bench._ladder.rungs import times

Ratio = tuple[float, float, float]
"""(median, low, high)."""
Verdict = Literal["reproduced", "refuted here", "not told apart", "too few rounds", "not measured"]
LEAST_ROUNDS = 6
"""Fewer have no 95 % interval of their median, so that nothing is concluded; see `compute_median_interval`."""

STEADY, SHORTER = "The Steady State", "Making DL training times shorter"


@final
@dataclass(frozen=True)
class Said:
    """One claim of the slides, as a range in which the ratio measured here would have to lie.

    Attributes:
        name: of the claim that this bench makes of it.
        ratio: what is measured.
    """

    name: str
    deck: str
    text: str
    ratio: str
    low: float
    high: float = math.inf


SAID = (
    Said("prefetch_gain", STEADY, "load the next batch while one computes", "1 worker over 0", 1.0),
    Said("workers_gain", STEADY, "many workers: twice the speed, 307 -> 664", "a worker a core over 1", 2.0),
    Said("threads_gain", STEADY, "the same", "Headway, a thread a core over 1", 2.0),
    Said("workers_minus_3", STEADY, "cores - 3 workers are right", "cores - 3 workers over cores - 1", 0.97),
    Said("starved", STEADY, "1 worker: 1,500 of 17,000 at batch 640", "1 worker over data in memory", 0.0, 0.5),
    Said("binary_gain", STEADY, "binary input: tens of times as fast", "input alone, packed over loose files", 10.0),
    Said("decoded_gain", STEADY, "tiny data sets belong into memory", "input alone, kept decoded over packed", 1.0),
    Said(
        "pixels_gain", SHORTER, "1/pixels: 9,800 at 352 px, 4,900 at 480", "352 px over 480, over 1/pixels", 0.85, 1.15
    ),
    Said("compile_small_batch", STEADY, "graphs help small batches most", "LeNet, gain at smallest over largest", 1.0),
    Said("compile_small_network", STEADY, "and small networks, 664 -> 941", "gain of LeNet over cifar_net", 1.0),
    Said("bf16_lenet", STEADY, "16 bit halves the time, 941 -> 3,100", "LeNet, bf16 over fp32", 2.0),
    Said("bf16_cifar_net", STEADY, "the same", "cifar_net, bf16 over fp32", 2.0),
    Said("large_batch_lenet", STEADY, "a large batch: a tenth of the time", "LeNet, largest over smallest", 10.0),
    Said("large_batch_cifar_net", STEADY, "the same, 27.5 -> 6.8 s", "cifar_net, largest over smallest", 10.0),
)
"""Where the slides have orders of magnitude, one has to be there; `right` is no more than 3 % slower."""


@final
@dataclass(frozen=True)
class Found:
    """What was measured, how, and in how many rounds; or None, and why not."""

    ratio: Ratio | None
    how: str
    rounds: int = 0

    def __post_init__(self) -> None:
        if self.ratio is not None and self.rounds < 1:
            raise ValueError("a ratio is measured in 1 round or more")


def verdict(said: Said, found: Found) -> Verdict:
    """By the whole interval: inside of what was said, outside, or neither."""
    if found.ratio is None:
        return "not measured"
    if found.rounds < LEAST_ROUNDS:
        return "too few rounds"
    _, low, high = found.ratio
    if said.low <= low and high <= said.high:
        return "reproduced"
    if high < said.low or low > said.high:
        return "refuted here"
    return "not told apart"


def quotient(one: Ratio, other: Ratio) -> Ratio:
    """Of two that were not measured in the same rounds: the widest interval that both allow."""
    return one[0] / other[0], one[1] / other[2], one[2] / other[1]


def rows(found: Mapping[str, Found]) -> list[tuple[str, ...]]:
    """The table: what was said, beside what is so here."""
    table: list[tuple[str, ...]] = [("slides", "claim", "as a ratio of images/s", "measured here (95 %)", "verdict")]
    for said in SAID:
        one = found.get(said.name)
        if one is not None:
            shown = times(one.ratio) if one.ratio else one.how
            table.append((said.deck, said.text, said.ratio, shown, verdict(said, one)))
    return table


def claims(found: Mapping[str, Found]) -> list[Claim]:
    """Of all that was measured, in the order of the table."""
    made = []
    for said in SAID:
        one = found.get(said.name)
        if one is not None and one.ratio is not None:
            middle, low, high = one.ratio
            how = f"{said.ratio}; {one.how}; 95 % [{low:.3g}, {high:.3g}]; slides: {said.text}; {verdict(said, one)}"
            made.append(Claim(said.name, middle, "", how))
    return made
