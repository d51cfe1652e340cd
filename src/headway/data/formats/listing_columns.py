"""Columns of a list of images: those that are used, and those that cannot be dropped without a word."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from headway.core.errors import DataError, UsageError, suggest_nearest

LAYOUT_HINT = (
    "The first line of a CSV names its columns, each line of JSON its keys: "
    "path, and one of label, labels, value or several value_NAME."
)
PATH, LABELS, VALUE_PREFIX = "path", ("label", "labels", "value"), "value_"

# Words in the names of columns that hold what is learned from an image, and is not a class, label or number of it.
_TARGETS = re.compile(
    "b?box(es)?|boundingbox(es)?|masks?|rle|polygons?|segmentations?|keypoints?|landmarks?|annotations?|objects|"
    "[xy]min|[xy]max|[xy][12]"
)
# Names of columns that say which set a row belongs to.
_SETS = re.compile("split|set|subset|partition|fold|phase|usage|is(train|test|val|valid|validation)")
# Usual names of the columns that we call path and label.
_PATHS = re.compile("file(name|path)?|image(path|file|name|id)?|img(path)?|name|url")
_CLASSES = re.compile("class(name)?|category(name)?|species|target|y|tag|labelname")

ColumnNames = Mapping[str, str]
"""Our name (path, label, ...) of each column that is used, by the column's name in the file."""


def parse_columns(text: str) -> ColumnNames:
    """Parses `path,label` or `path=file,label=species`: our names, each with its column in the file.

    Raises:
        UsageError: a name is not one of ours, or is given twice.
    """
    columns: dict[str, str] = {}
    for part in text.split(","):
        ours, equals, name = (one.strip() for one in part.partition("="))
        if ours not in (PATH, *LABELS) and not (ours.startswith(VALUE_PREFIX) and ours != VALUE_PREFIX):
            fix = suggest_nearest(ours, (PATH, *LABELS, "value_NAME"))
            raise UsageError(f"{ours!r} is not the name of a column", where="--columns", fix=fix)
        name = name if equals else ours
        if name in columns or ours in columns.values():
            raise UsageError(f"{part.strip()!r} names a column twice", where="--columns", fix="Name each once.")
        columns[name] = ours
    return columns


def rename_columns(names: Sequence[str], columns: ColumnNames | None, where: str) -> list[str]:
    """Returns our name of each column; an empty text for a column that is not used.

    Args:
        names: names of the columns in the file.
        columns: names that the user chose; None: our own names, and all others are kept as they are.

    Raises:
        DataError: a chosen column is not in the file.
    """
    if columns is None:
        return list(names)
    if missing := [name for name in columns if name not in names]:
        what = f"there is no column {missing[0]!r} ({_quote('found', names)})"
        raise DataError(what, where=where, fix=suggest_nearest(missing[0], names, only_close=True))
    return [columns.get(name, "") for name in names]


def find_label_columns(names: Sequence[str], where: str) -> list[str]:
    """Returns the columns that hold labels. Raises DataError unless there is one kind, and a path."""
    # csv.DictReader would keep the last of two columns silently.
    if duplicates := sorted({name for name in names if name and names.count(name) > 1}):
        raise DataError(f"column {duplicates[0]!r} occurs twice", where=where, fix="Give each column its own name.")
    names = [name for name in names if name]
    found_columns = _quote("found", names)
    if PATH not in names:
        # Spreadsheet programs write semicolons in some locales.
        has_other_separator = len(names) == 1 and any(mark in names[0] for mark in ";\t|")
        fix = "Separate the columns with commas." if has_other_separator else f"{LAYOUT_HINT} {_suggest_names(names)}"
        raise DataError(f"there is no column 'path' ({found_columns})", where=where, fix=fix)
    # A file with two kinds of labels is ambiguous, so it is refused.
    label_groups = [[name] for name in LABELS if name in names]
    if value_columns := [name for name in names if name.startswith(VALUE_PREFIX) and name != VALUE_PREFIX]:
        label_groups.append(value_columns)
    if not label_groups:
        fix = f"{LAYOUT_HINT} {_suggest_names(names)}"
        raise DataError(f"there is no column of labels ({found_columns})", where=where, fix=fix)
    if len(label_groups) > 1:
        both = " and ".join(repr(kind[0]) for kind in label_groups)
        fix = f"Keep one kind of label: headway pack FILE DST --columns path,{label_groups[0][0]}"
        raise DataError(f"{both} are both labels", where=where, fix=fix)
    return label_groups[0]


def check_dropped_columns(dropped: Iterable[str], used: Sequence[str], structured: set[str], where: str) -> None:
    """Raises DataError if a column that is not used probably holds what the user wants to learn, or a split.

    Args:
        dropped: names of the columns that are not used.
        used: names of those that are.
        structured: those of `dropped` that hold lists or mappings.
    """
    dropped = list(dropped)
    targets = [name for name in dropped if name in structured or _is_target(name)]
    sets = [name for name in dropped if _SETS.fullmatch(_join(name))]
    keep = f"headway pack {shlex.quote(where)} DST --columns {','.join(used)}"
    if targets:
        what = f"{_describe_columns(targets)} would be lost: Headway learns classes, labels or numbers of whole images"
        raise DataError(what, where=where, fix=f"To leave {_pronoun(targets)} out, name the columns to use: {keep}")
    if sets:
        what = f"{_describe_columns(sets)} would be lost: all rows would become one set"
        fix = f"Write one list for each set, and pack each. To take all rows as one set: {keep}"
        raise DataError(what, where=where, fix=fix)


def _suggest_names(names: Sequence[str]) -> str:
    """Returns a sentence that says how to use columns with other names, with those of the file where they are known."""
    path = PATH if PATH in names else next((name for name in names if _PATHS.fullmatch(_join(name))), "NAME")
    label = next((name for name in names if _CLASSES.fullmatch(_join(name))), "NAME")
    label = next((name for name in LABELS if name in names), f"label={label}")
    path = path if path == PATH else f"path={path}"
    return f"To use columns of other names: headway pack FILE DST --columns {shlex.quote(f'{path},{label}')}"


def _is_target(name: str) -> bool:
    # bbox_x, boundingBox and "Bounding box" count.
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())
    return any(map(_TARGETS.fullmatch, (*words, "".join(words))))


def _join(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _describe_columns(names: Sequence[str]) -> str:
    return f"the column{'s'[: len(names) > 1]} {', '.join(map(repr, names))}"


def _pronoun(names: Sequence[str]) -> str:
    return "them" if len(names) > 1 else "it"


def _quote(word: str, names: Sequence[str]) -> str:
    return f"{word}: {', '.join(map(repr, names))}"
