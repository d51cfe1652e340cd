"""The file of a finished part of a pack: its columns, and what the join has to know besides.

It is not named as the columns of a pack are: a part cannot be opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.untrusted_json import Checks, JsonError, expect_entries, is_whole_number, parse_object
from headway.data.columns import DatasetDescription, load_columns
from headway.data.pack_plan import MAX_PARTS

PART_FILE = "part.safetensors"

_METADATA_KEY = "headway_part"
_MAX_SAMPLES = (1 << 63) - 1


@final
@dataclass(frozen=True, kw_only=True)
class PartFacts:
    """Facts about one set of a part, beside its description."""

    index: int
    """Number of the part, from 1."""
    count: int
    """Number of parts."""
    planned: int
    """Samples of the whole set, bad ones included."""
    planned_classes: tuple[int, ...]
    """Classes that this part's samples have, bad ones included; empty without classes."""
    left_out: int
    """Samples that the transform left out."""
    skipped: tuple[tuple[str, str], ...]
    """(name, reason) of each bad image."""
    options: Mapping[str, str]
    """Options of `headway pack` that all parts share, and the text of each; see `PackJob`."""

    def to_metadata(self) -> dict[str, str]:
        """Returns an entry for the metadata of the columns."""
        return {_METADATA_KEY: json.dumps(asdict(self))}


def _is_list_of_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in value
    )


_ENTRIES: Checks = {
    "count": (lambda value: is_whole_number(value, 1, MAX_PARTS), f"a number from 1 to {MAX_PARTS:,}"),
    "index": (lambda value: is_whole_number(value, 1, MAX_PARTS), f"a number from 1 to {MAX_PARTS:,}"),
    "planned": (lambda value: is_whole_number(value, 0, _MAX_SAMPLES), "a number of samples"),
    "planned_classes": (
        lambda value: isinstance(value, list) and all(is_whole_number(number, 0, _MAX_SAMPLES) for number in value),
        "a list of class numbers",
    ),
    "left_out": (lambda value: is_whole_number(value, 0, _MAX_SAMPLES), "a number of samples"),
    "skipped": (_is_list_of_pairs, "a list of names and reasons"),
    "options": (
        lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
        "options and their texts",
    ),
}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PartSet:
    """One set of a finished part."""

    folder: Path
    columns: Mapping[str, NDArray[Any]]
    description: DatasetDescription
    facts: PartFacts


def load_part_set(folder: Path) -> PartSet:
    """Maps the file of one set of a part. Raises DataError if it is damaged."""
    path = folder / PART_FILE
    columns, description, metadata = load_columns(path)
    try:
        fields = parse_object(metadata[_METADATA_KEY])
        expect_entries(fields, _ENTRIES)
        if fields["index"] > fields["count"]:
            raise JsonError(f"it is part {fields['index']} of {fields['count']}")
        if any(number >= len(description.classes) for number in fields["planned_classes"]):
            raise JsonError("it has more planned_classes than classes")
        fields["planned_classes"] = tuple(fields["planned_classes"])
        fields["skipped"] = tuple((name, reason) for name, reason in fields["skipped"])
        facts = PartFacts(**fields)
    except (JsonError, LookupError, TypeError) as error:
        raise DataError(
            f"the file of a part is damaged ({error})", where=str(path), fix="Pack this part again."
        ) from error
    return PartSet(folder=folder, columns=columns, description=description, facts=facts)
