"""Recipe options that only some choices of a part use: an unused one that is set is refused, and not written out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.core.recipe import RecipePart


def refuse_unused(part: RecipePart, name: str, users: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ValueError for a field that was set though `name` does not use it.

    Args:
        users: of each field that not every choice uses, the choices that do.
    """
    for field, choices in users.items():
        if field in part.model_fields_set and name not in choices:
            one_of = " or ".join(choices)
            raise ValueError(f"{name!r} does not use {field!r}. Remove {field!r}, or set name: {one_of}")


def without_unused(values: dict[str, Any], name: str, users: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """A part's values as a resolved recipe shows them: only what counts, so that it can be read in again."""
    return {field: value for field, value in values.items() if name in users.get(field, (name,))}
