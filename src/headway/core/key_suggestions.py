"""Names the key that was probably meant by an unknown key of a recipe."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from headway.core.errors import suggest_nearest
from headway.core.recipe_types import walk_keys

_CLOSE = 0.8
"""Similarity (difflib) from which a key of the same part beats a key of that very name elsewhere in the recipe."""


class KeySynonym(NamedTuple):
    """The meaning of a key of another library.

    Attributes:
        keys: our dotted keys; the first one that the recipe has is meant. Empty: no key of ours.
        note: a sentence about the difference, or the reason why there is no such key.
    """

    keys: tuple[str, ...] = ()
    note: str = ""


class ErrorPlace(NamedTuple):
    """The place of one error in the user's own terms.

    Attributes:
        keys: the user's keys, without the elements that pydantic adds.
        part: the part that should have the last key; None: unknown.
        members: if that part was picked from a tagged union, all its members by tag.
        value_type: the type of the last key's value; None: unknown.
    """

    keys: list[str]
    part: type[BaseModel] | None
    members: Mapping[str, type[BaseModel]]
    value_type: Any = None

    @property
    def dotted(self) -> str:
        """The keys as the user writes them on the command line."""
        return ".".join(self.keys)


def refuse_key(place: ErrorPlace, model: type[BaseModel]) -> str:
    """Returns the sentence for an unknown key, with the key that was probably meant."""
    *above, key = place.keys
    prefix = "".join(f"{one}." for one in above)
    # A key of another member is not a typo: the message names the members that have it.
    owners = [tag for tag, member in place.members.items() if key in member.model_fields]
    if owners and place.part is not None:
        tag = next(tag for tag, member in place.members.items() if member is place.part)
        tag_key = next(name for name, field in place.part.model_fields.items() if tag in get_args(field.annotation))
        own = ", ".join(name for name in _list_own_first(place.part) if name != tag_key) or "no keys of its own"
        belongs = f"{prefix + key!r} belongs to {', '.join(owners)}; {tag} has {own}."
        if hint := _explain_synonym(key, prefix, model):
            return f"{belongs} {hint}"
        elsewhere = _find_elsewhere(key, prefix, model)
        return f"{belongs} Remove it, or change {prefix}{tag_key}{f', or write {elsewhere!r}' if elsewhere else ''}."
    return f"there is no key {prefix + key!r}. {_suggest_key(key, prefix, place.part, model)}".rstrip()


def _suggest_key(key: str, prefix: str, part: type[BaseModel] | None, model: type[BaseModel]) -> str:
    """Returns a similar key of the part, else the meaning in other libraries, else a similar key anywhere."""
    own = list(part.model_fields) if part is not None else []
    word = _to_snake_case(key)
    # A close typo of an own key first; then the same name elsewhere, or in other libraries; then vaguer matches.
    if close := difflib.get_close_matches(word, own, n=1, cutoff=_CLOSE):
        return f"Did you mean {prefix + close[0]!r}?"
    # `lr` of a group is its lr_scale.
    if len(longer := [name for name in own if name.startswith(f"{word}_")]) == 1:
        return f"Did you mean {prefix + longer[0]!r}?"
    if hint := _explain_synonym(word, prefix, model):
        return hint
    elsewhere: dict[str, list[str]] = {}
    for dotted in dict.fromkeys(walk_keys(model)):
        if not dotted.startswith(prefix) or not prefix:
            elsewhere.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    if word not in elsewhere:
        if part is not None and difflib.get_close_matches(word, own, n=1):
            return suggest_nearest(word, own, prefix=prefix)
        close = difflib.get_close_matches(word, elsewhere, n=1, cutoff=_CLOSE)
        if not close:
            return suggest_nearest(word, own, prefix=prefix) if own else ""
        word = close[0]
    found = elsewhere[word]
    # The key nearest to the top is the likeliest: `batch` before `evaluate.batch`.
    level = min(dotted.count(".") for dotted in found)
    return f"Did you mean {' or '.join(repr(one) for one in found if one.count('.') == level)}?"


def _explain_synonym(word: str, prefix: str, model: type[BaseModel]) -> str:
    """Returns the sentences about a key of another library; empty if it is not known."""
    synonyms: Mapping[str, KeySynonym] = getattr(model, "key_synonyms", {})
    # `parallel.steps` means something else than `steps`.
    if (synonym := synonyms.get(prefix + word, synonyms.get(word))) is None:
        return ""
    known = set(walk_keys(model))
    # `task.args.label_smoothing` is not a key of ours: everything below a free mapping exists.
    meant = next((key for key in synonym.keys if key in known or f"{key.partition('.args.')[0]}.args" in known), None)
    return " ".join(part for part in (f"Did you mean {meant!r}?" if meant else "", synonym.note) if part)


def _find_elsewhere(key: str, prefix: str, model: type[BaseModel]) -> str:
    """Returns the key of that very name in another part, if there is exactly one at the highest level."""
    found = [dotted for dotted in dict.fromkeys(walk_keys(model)) if dotted.rpartition(".")[2] == key]
    found = [dotted for dotted in found if not dotted.startswith(prefix)]
    level = min((dotted.count(".") for dotted in found), default=0)
    nearest = [dotted for dotted in found if dotted.count(".") == level]
    return nearest[0] if len(nearest) == 1 else ""


def _to_snake_case(key: str) -> str:
    """Returns `batch_size` for `batchSize`, `batch-size` and `BATCH_SIZE`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace("-", "_").lower()


def _list_own_first(part: type[BaseModel]) -> list[str]:
    own = inspect.get_annotations(part)
    return sorted(part.model_fields, key=lambda name: name not in own)
