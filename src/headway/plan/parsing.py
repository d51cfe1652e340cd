"""Parsers for the command-line options that hold lists: node counts, measured runs, pairs of numbers."""

from __future__ import annotations

import re

from headway.core.errors import UsageError
from headway.plan.calibration import MeasuredRun
from headway.plan.convergence import ConvergencePoint


def parse_nodes(text: str) -> list[int]:
    """Parses node counts: `1..64` (doubling, both ends included), `1,2,4` or `8`.

    Raises UsageError if the text has another form, or a count is below 1.
    """
    try:
        if match := re.fullmatch(r"(\d+)\.\.(\d+)", text.strip()):
            low, high = int(match[1]), int(match[2])
            if not 1 <= low <= high:
                raise ValueError
            counts = [low]
            while counts[-1] * 2 < high:
                counts.append(counts[-1] * 2)
            return sorted({*counts, high})
        counts = [int(part) for part in text.split(",")]
        if min(counts) < 1:
            raise ValueError
    except ValueError:
        fix = "Write 1..64 (the smaller count first, 1 or more), or 1,2,4."
        raise UsageError(f"{text!r} is not a list of node counts", where="--nodes", fix=fix) from None
    return counts


def parse_facility(text: str) -> int:
    """Parses the number of nodes of a facility. Raises UsageError if it is no whole number."""
    try:
        return int(text)
    except ValueError:
        fix = "Write headway plan --facility 36; --node dgx-h100 chooses the kind of nodes, and --node list prints all."
        raise UsageError(f"{text!r} is not a number of nodes", where="--facility", fix=fix) from None


def parse_runs(text: str) -> list[MeasuredRun]:
    """Parses measured runs: `DEVICESxSAMPLES:IMAGES_S,...`, with the samples of one device. Raises UsageError."""
    runs = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)x(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)\s*", part)
        if match is None or not all(float(number) > 0 for number in match.groups()):
            fix = "Write devices, samples per device and total images/s: 8x208:11105,512x65:604217."
            raise UsageError(f"{part.strip()!r} is not a measured run", where="--runs", fix=fix)
        runs.append(MeasuredRun(int(match[1]), float(match[2]), float(match[3])))
    return runs


def parse_points(text: str) -> list[ConvergencePoint]:
    """Parses `BATCH:EPOCHS,...`: the epochs that each batch took to the target. Raises UsageError."""
    fix = "Write each batch and its epochs to the target: 1632:35,32768:56."
    return [ConvergencePoint(*pair) for pair in parse_pairs(text, "--epochs-at", "a batch with its epochs", fix)]


def parse_pairs(text: str, where: str, meaning: str, fix: str) -> list[tuple[float, float]]:
    """Parses `X:Y,...`. All numbers must lie between 1e-18 and 1e18.

    Args:
        where: option that an error names. meaning: noun phrase for one pair in that error. fix: its advice.

    Raises UsageError if a part is not a pair of such numbers.
    """
    pairs = []
    for part in text.split(","):
        try:
            x, y = map(float, part.split(":"))
            # The fits take logarithms and products of these: the bounds keep them finite.
            if not (1e-18 < x < 1e18 and 1e-18 < y < 1e18):
                raise ValueError
        except ValueError:
            raise UsageError(f"{part.strip()!r} is not {meaning}", where=where, fix=fix) from None
        pairs.append((x, y))
    return pairs
