"""Writes docs/decks.md: every figure of the decks that Headway began with, beside what Headway has, and a verdict.

It reads stored results (bench/results), asks the planner, and trains nothing; it takes seconds. --train makes the small
trainings that some figures ask for, of which bench/_decks/studies.py says more: about half an hour of one core.
--statements measures the statements of docs/statements.md, and draws its pictures: seconds.

figures            figures in the page
reproduced, planned, refuted_here, not_measurable_here, not_measured_yet   figures with this verdict

--texts FOLDER compares the numbers of the decks' own texts, which are not a part of Headway, with the list of them in
bench/_decks/numbers.csv: each number belongs to a figure, or the list says why it is none.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from bench._accuracy.results import Results
from bench._common import Claim, parser, report
from bench._decks import studies
from bench._decks.drawing import write_pictures
from bench._decks.numbers import compare_texts
from bench._decks.page import PAGE, build_rows, count_verdicts, format_page
from bench._decks.statements import measure_statements
from bench._decks.verdict import NAMES
from bench._family import run_bench


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="where the page is written")
    asked.add_argument("--train", action="store_true", help="make the missing trainings first")
    asked.add_argument("--only", nargs="+", choices=studies.STUDIES, default=studies.STUDIES, metavar="STUDY")
    asked.add_argument("--minutes", type=float, metavar="M", help="of --train: begin no run after so long")
    asked.add_argument("--statements", action="store_true", help="measure the statements of docs/statements.md first")
    asked.add_argument("--texts", type=Path, metavar="FOLDER", help="compare the numbers of the decks' texts")
    options = asked.parse_args()
    if options.texts:
        sys.exit("\n".join(compare_texts(options.texts)) or 0)
    run(options)


def run(options: argparse.Namespace) -> None:
    """Trains if asked to, and writes the page; --quick only counts."""
    if options.train and not options.quick:
        studies.run_missing(Results(studies.RESULTS), options.only, options.minutes)
    if options.statements and not options.quick:
        measure_statements()
        write_pictures()
    rows = build_rows()
    count = Counter(row.verdict.name for row in rows)
    claims = [Claim("figures", len(rows), "", "in the page")]
    claims += [Claim(name.replace(" ", "_"), count[name], "", "figures with this verdict") for name in NAMES]
    if not options.quick:
        options.page.write_text(format_page(rows), encoding="utf-8")
    report(claims, options, count_verdicts(rows))


if __name__ == "__main__":
    run_bench(main)
