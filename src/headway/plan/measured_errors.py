"""Reads measured errors by training set size, for `--errors-at`: from the option itself, from files and from runs."""

from __future__ import annotations

import re
from pathlib import Path

from headway.core.errors import UsageError
from headway.core.files import describe_os_error, read_text
from headway.core.run_folder import RunFolder
from headway.plan.parsing import parse_pairs

OPTION = "--errors-at"
MEANING = "a number of samples with an error"
FIX = "Write samples, and the error with so many: 1e5:0.32,1e6:0.24. Or name a file of such lines, or run folders."


def read_errors(text: str) -> list[tuple[float, float]]:
    """Reads pairs (samples, error) from a list of SAMPLES:ERROR, files and run folders, separated by commas.

    A file has a pair in each line, separated by a comma, a colon or blanks; lines that begin with # count as comments.
    A run gives the size of its training set, and 1 - its best accuracy.

    Raises UsageError if a part is none of these, or a file or run lacks the numbers.
    """
    pairs: list[tuple[float, float]] = []
    for part in map(str.strip, text.split(",")):
        path = Path(part).expanduser()
        if part and path.is_dir():
            pairs.append(_read_run(path))
        elif part and path.is_file():
            pairs += _read_file(path)
        else:
            pairs += parse_pairs(part, OPTION, MEANING, FIX)
    return pairs


def _read_run(folder: Path) -> tuple[float, float]:
    run = RunFolder.open(folder)
    accuracy = (run.read_summary().get("best") or {}).get("accuracy")
    if not isinstance(accuracy, int | float) or not 0 <= accuracy < 1:
        problem = "this run has no best accuracy below 1, so no error is known"
        raise UsageError(problem, where=f"{OPTION}: {folder}", fix="Give its pair instead, as SAMPLES:ERROR.")
    return float(run.read_provenance(samples=int)["samples"]), 1.0 - accuracy


def _read_file(path: Path) -> list[tuple[float, float]]:
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the file cannot be read ({describe_os_error(error)})", where=f"{OPTION}: {path}") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            pair = ":".join(re.split(r"[\s,:]+", line.strip()))
            pairs += parse_pairs(pair, f"{OPTION}: {path}:{number}", MEANING, "Write one pair a line: 1e5,0.32.")
    return pairs
