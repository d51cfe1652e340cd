"""Annotations: what else is known about an image, such as its boxes, as a JSON object that is kept as it came.

Equal objects have equal texts, since the text is part of what a version is: keys are sorted, and only ASCII is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headway.core.errors import DataError, UsageError
from headway.core.text_format import format_bytes
from headway.core.untrusted_json import JsonError, parse_object

MAX_BYTES = 1 << 20
"""Most bytes of one image's annotations: a million of them must fit into memory where a version is changed."""


def encode_annotations(annotations: Mapping[str, Any] | None, where: str) -> str:
    """Returns the canonical text of a JSON object; empty if there is nothing in it.

    Args:
        where: name of the sample, for the message.

    Raises:
        UsageError: it is not JSON, nested too deeply, or too long.
    """
    if not annotations:
        return ""
    fix = 'Give a JSON object, such as {"boxes": [...]}.'
    try:
        text = json.dumps(annotations, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        # Depth, and keys that are equal only as texts, such as 1 and "1".
        parse_object(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"its annotations cannot be kept: {error}", where=where, fix=fix) from None
    if len(text) > MAX_BYTES:
        what = f"its annotations have {format_bytes(len(text))}, more than {format_bytes(MAX_BYTES)}"
        raise UsageError(what, where=where, fix="Keep what is larger beside the data set.")
    return text


def decode_annotations(text: str) -> dict[str, Any] | None:
    """Returns the JSON object of a canonical text; None if there is none. Raises DataError if it is damaged."""
    try:
        return parse_object(text) if text else None
    except JsonError as error:
        fix = "headway dataset verify lists what is damaged."
        raise DataError(f"the annotations of a sample are damaged: {error}", fix=fix) from None
