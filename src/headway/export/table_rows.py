"""The rows of an inference table, from the answers of their processes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.statistics import compute_median_interval
from headway.export.table_engines import Engine
from headway.export.table_process import Timing
from headway.export.table_record import Cell, Row
from headway.export.top_classes import compute_top_share

MIN_COMPARED = 256
"""Images that are compared even if that takes longer than it may."""


def build_row(engine: Engine, folder: Path, answers: Sequence[Mapping[str, Any]]) -> Row:
    """Builds a row of the answers of all rounds, without accuracy."""
    timings = [[_read_timing(one) for one in answer["timings"]] for answer in answers]
    places = list(dict.fromkeys((one.threads, one.batch) for found in timings for one in found))
    cells = []
    for threads, batch in places:
        same = [one for found in timings for one in found if (one.threads, one.batch) == (threads, batch)]
        cells.append(build_cell(same))
    return Row(
        name=engine.name,
        precision=engine.precision,
        file_bytes=(folder / engine.file).stat().st_size if engine.file else None,
        load_s=statistics.median(answer["load_s"] for answer in answers),
        first_bytes=max(answer["first_bytes"] for answer in answers),
        peak_bytes=max(answer["peak_bytes"] for answer in answers),
        peak_batch=max(answer["peak_batch"] for answer in answers),
        cells=tuple(cells),
        skipped=tuple(dict.fromkeys(what for answer in answers for what in answer["skipped"])),
    )


def _read_timing(entry: Mapping[str, Any]) -> Timing:
    return Timing(entry["threads"], entry["batch"], tuple(entry["wall_s"]), entry["cpu_s"])


def build_cell(rounds: Sequence[Timing]) -> Cell:
    """Builds a cell of the timings of all rounds."""
    walls_ms = 1e3 * np.concatenate([one.wall_s for one in rounds])
    p50, p95, p99 = (float(value) for value in np.percentile(walls_ms, (50, 95, 99)))
    batch = rounds[0].batch
    # The median call of each round: one call that another program has delayed does not count.
    middle, low, high = compute_median_interval([batch / statistics.median(one.wall_s) for one in rounds])
    return Cell(
        threads=rounds[0].threads,
        batch=batch,
        calls=len(walls_ms),
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        images_s=middle,
        images_s_low=low,
        images_s_high=high,
        cpu_ms_image=statistics.median(1e3 * one.cpu_s / (len(one.wall_s) * batch) for one in rounds),
    )


def count_comparable(count: int, rows: Sequence[Row], limit_s: float) -> int:
    """Returns how many images all rows can compute in so many seconds."""
    speeds = [max((cell.images_s for cell in row.cells), default=1.0) for row in rows]
    # The seconds that one image takes, all rows together.
    image_s = sum(1 / speed for speed in speeds)
    return min(count, max(MIN_COMPARED, int(limit_s / image_s)))


def compare_rows(
    rows: Sequence[Row],
    outputs: Mapping[str, NDArray[np.float32] | str],
    labels: NDArray[np.int64] | None,
    classes: int,
) -> list[Row]:
    """Adds accuracy and the differences from the first row to rows.

    Args:
        outputs: outputs [n, outputs] by the name of the row.
        labels: classes [n]; None if labels are not classes.
        classes: number of classes; with five or fewer there is no top-5.
    """
    base = np.asarray(outputs[rows[0].name], np.float32)
    found = []
    for row in rows:
        own = np.asarray(outputs[row.name], np.float32)
        more: dict[str, Any] = {"largest_difference": float(np.abs(own - base).max())}
        if labels is not None:
            more["top1"] = compute_top_share(own, labels, 1)
            more["top5"] = compute_top_share(own, labels, 5) if classes > 5 else None
            more["flips"] = int((own.argmax(axis=1) != base.argmax(axis=1)).sum())
        found.append(row.model_copy(update=more))
    return found
