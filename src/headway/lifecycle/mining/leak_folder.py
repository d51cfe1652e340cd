"""The leak check as a folder: leaks.csv, leaks.json and a page with the pairs."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from headway.core.files import expect_empty_folder, write_atomically
from headway.core.sample_progress import SampleProgress
from headway.core.text_format import pluralise
from headway.data.dataset import Dataset
from headway.lifecycle.mining.leak import LeakReport, find_leaks
from headway.page import panel, renderer
from headway.page.panel import Panel
from headway.setup.inputs import open_dataset
from headway.training.evaluation_panels import encode_thumbnail

LOG = logging.getLogger("headway.lifecycle")
LEAKS, RESULT, PAGE = "leaks.csv", "leaks.json", "leaks.html"
SHOWN = 24
"""Pairs on the page."""


def check_leaks(sources: Sequence[str], out: Path | None) -> LeakReport:
    """Finds images that occur in several sets.

    Args:
        sources: the sets, the training set first.
        out: folder to create; None: nothing is written.

    Raises:
        UsageError: there are fewer than two sets, or `out` exists. DataError: a set is damaged.
    """
    if out is not None:
        expect_empty_folder(out, "--out")
    with ExitStack() as stack:
        sets = [stack.enter_context(closing(open_dataset(Path(), source))) for source in sources]
        with SampleProgress("Hashing", "images", LOG) as progress:
            # By the names that the user gave: a version's folder is a hash.
            report = replace(find_leaks(sets, progress), folders=tuple(sources))
        if out is not None:
            _write(report, sets, out)
    return report


def _write(report: LeakReport, sets: Sequence[Dataset], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("first_set", "first_name", "second_set", "second_name", "kind"))
    for leak in report.leaks:
        names = (sets[leak.first_set].name(leak.first), sets[leak.second_set].name(leak.second))
        kind = "equal bytes" if leak.is_equal else "near copy"
        table.writerow((report.folders[leak.first_set], names[0], report.folders[leak.second_set], names[1], kind))
    write_atomically(out / LEAKS, text.getvalue())
    html = renderer.render(
        build_panels(report, sets),
        title="Leaks between sets",
        subtitle=f"Headway: {pluralise(len(report.leaks), 'image')} with a copy in another set",
        sections=("Leaks",),
    )
    write_atomically(out / PAGE, html)
    write_atomically(out / RESULT, json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n")


def build_panels(report: LeakReport, sets: Sequence[Dataset]) -> list[Panel]:
    """Builds the panels of the page."""
    rows = [
        (folder, f"{size:,}", f"{count:,}", f"{count / size:.2%}")
        for folder, size, count in zip(report.folders, report.sizes, report.counts, strict=True)
    ]
    note = (
        "An evaluation image with a copy in the training set measures memory, not accuracy. Crops, rotations and "
        "mirror images are not found."
    )
    columns = ("set", "images", "with a copy elsewhere", "share")
    panels = [panel.table("sets", "Sets", columns, rows, section="Leaks", order=100, width="full", note=note)]
    pictures = []
    for number, leak in enumerate(report.leaks[:SHOWN], 1):
        for place, sample in ((leak.first_set, leak.first), (leak.second_set, leak.second)):
            note = f"{Path(report.folders[place]).name}: {sets[place].name(sample)}"
            kind = "equal" if leak.is_equal else "near copy"
            pictures.append((encode_thumbnail(sets[place], sample), f"pair {number}, {kind}", note))
    if pictures:
        note = f"The first {min(len(report.leaks), SHOWN)} of {len(report.leaks):,}; {LEAKS} has all."
        title = "Pairs"
        panels.append(panel.images("pairs", title, pictures, section="Leaks", order=110, width="full", note=note))
    return panels
