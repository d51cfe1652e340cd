"""Reads files of annotations from outside, with limits of size and depth, and checks their entries."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from headway.core.errors import DataError, UsageError
from headway.core.files import describe_os_error, read_text
from headway.core.path_suggestions import suggest_path
from headway.core.untrusted_json import Checks, JsonError, is_number, is_text, is_whole_number, parse_value
from headway.lifecycle.interchange.annotations import MOST_SIDE, Size

MOST_BYTES = 512 << 20
"""Largest file of annotations: COCO's training set has 470 MB."""

ID: Checks = {"id": (lambda value: is_whole_number(value, -(1 << 63)) or is_text(value), "a number or a text")}


@contextmanager
def explain_format(path: Path, kind: str) -> Iterator[None]:
    """Turns a JsonError inside the block into a DataError: "this is not a COCO file: it lacks images"."""
    try:
        yield
    except JsonError as error:
        fix = "Name its format with --from, or write the file again."
        raise DataError(f"this is not {kind}: {error}", where=str(path), fix=fix) from None


def read_annotation_text(path: Path) -> str:
    """Returns the text of a file of annotations.

    Raises:
        UsageError: there is no such file, or it cannot be read as UTF-8 text.
    """
    try:
        return read_text(path, MOST_BYTES)
    except FileNotFoundError:
        raise_missing(path)
    except UnicodeDecodeError:
        what = "this is not UTF-8 text"
        raise UsageError(what, where=str(path), fix="Unpack an archive first, and name the file in it.") from None
    except OSError as error:
        raise UsageError(f"it cannot be read ({describe_os_error(error)})", where=str(path)) from None


def raise_missing(path: Path) -> NoReturn:
    """Raises UsageError for a file that does not exist, with the nearest name beside it."""
    fix = suggest_path(path, lambda entry: entry.is_file())
    raise UsageError("there is no such file", where=str(path), fix=fix) from None


def read_json(path: Path) -> Any:
    """Reads JSON of any kind. Raises UsageError as `read_annotation_text` does, and JsonError."""
    value = parse_value(read_annotation_text(path))
    expect_finite(value)
    return value


def expect_finite(tree: Any) -> None:
    """Raises JsonError if a tree holds NaN or an infinity: Python reads them, and JSON has no form for them."""
    rest = [tree]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise JsonError(f"it holds {value}, which is not a number of JSON")


def get_size(entry: dict[str, Any], path: str, names: tuple[str, str] = ("width", "height")) -> Size | None:
    """Returns (width, height) of an entry; None if it has neither. Raises JsonError for anything else."""
    width, height = (entry.get(name) for name in names)
    if width is None and height is None:
        return None
    for name, side in zip(names, (width, height), strict=True):
        if not is_whole_number(side, 1, MOST_SIDE):
            raise JsonError(f"it has {side!r:.60} as {path}{name}, not a whole number from 1")
    assert width is not None
    assert height is not None
    return width, height


def get_text(entry: dict[str, Any], name: str, path: str) -> str:
    """Returns a text of an entry; empty if there is none. Raises JsonError for anything else."""
    value = entry.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise JsonError(f"it has {value!r:.60} as {path}{name}, not a text")
    return value


def get_numbers(value: Any, path: str) -> tuple[float, float, float, float]:
    """Returns the four numbers of a box. Raises JsonError for anything else."""
    if not isinstance(value, list) or len(value) != 4 or not all(map(is_float_number, value)):
        raise JsonError(f"it has {value!r:.80} as {path}, not four numbers")
    left, top, a, b = map(float, value)
    return left, top, a, b


def is_float_number(value: Any) -> bool:
    """Returns True for a number that a float can hold: JSON has whole numbers of any length."""
    return is_number(value, -sys.float_info.max, sys.float_info.max)


def count_note(counts: dict[str, int], reason: str) -> list[str]:
    """Returns one sentence for each kind of thing that was left out: `Left out 3 polygons: REASON.`"""
    return [f"Left out {count:,} of {kind!r}: {reason}." for kind, count in sorted(counts.items()) if count]
