"""Columns of a version in a store: those of a pack, and the ID of each sample.

Versions share shards, so the place of a sample is not part of what a version is. Its content are the IDs (digests of
the stored bytes), names and labels; and their annotations and planned splits, if there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from headway.data.columns import compute_fingerprint

SAMPLE_ID = "sample_id"
"""U8 [n, 32]: SHA-256 of each record's bytes; only in versions of a store."""
GRAY = "gray"
"""U8 [n]: 1 if the image is gray; only in versions of a store."""

ANNOTATIONS, ANNOTATIONS_OFFSET = "annotations", "annotations_offset"
"""U8 and U64 [n + 1]: JSON of each sample, end to end as the names are; only in versions with annotations."""
PLANNED_SPLIT = "planned_split"
"""U8 [n]: number of the split that a sample without a label goes to when it gets one; only in some versions."""

_CONTENT = (SAMPLE_ID, "name", "name_offset", "label")
# Part of the content only where they are, so that versions without them have the IDs that they always had.
_OPTIONAL_CONTENT = (ANNOTATIONS, ANNOTATIONS_OFFSET, PLANNED_SPLIT)


def has_sample_ids(columns: Mapping[str, NDArray[Any]]) -> bool:
    """Returns True for the columns of a version, and False for those of a pack."""
    return SAMPLE_ID in columns


def compute_content_fingerprint(columns: Mapping[str, NDArray[Any]]) -> str:
    """Returns the SHA-256 of what the columns describe: for a version without the places of the records."""
    if not has_sample_ids(columns):
        return compute_fingerprint(columns)
    present = [name for name in _OPTIONAL_CONTENT if name in columns]
    return compute_fingerprint({name: columns[name] for name in (*_CONTENT, *present)})
