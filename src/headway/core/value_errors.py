"""Says in plain words what a value must be, for every type of error that pydantic raises about a value."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headway.core.errors import suggest_nearest

_KINDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), ("a whole number",)),
    # Python reads no longer texts as a number, by default.
    "int_parsing_size": ("a whole number of at most 4,300 digits",),
    **dict.fromkeys(("float_parsing", "float_type"), ("a number",)),
    "finite_number": ("a finite number",),
    **dict.fromkeys(("bool_parsing", "bool_type"), ("true", "false")),
    **dict.fromkeys(("tuple_type", "list_type"), ("a list",)),
    **dict.fromkeys(
        ("dict_type", "mapping_type", "model_type", "model_attributes_type"), ("a mapping of keys to values",)
    ),
    **dict.fromkeys(("string_type", "string_unicode"), ("a text",)),
    "none_required": ("empty",),
    "recursion_loop": ("a value that does not hold itself",),
}
"""The kinds of value that each of pydantic's error types asks for."""

_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "more than {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "at most {}"),
    "multiple_of": ("multiple_of", "a multiple of {}"),
    "too_short": ("min_length", "a list of {} or more"),
    "too_long": ("max_length", "a list of at most {}"),
    "string_too_short": ("min_length", "a text of {} or more characters"),
    "string_too_long": ("max_length", "a text of at most {} characters"),
    "string_pattern_mismatch": ("pattern", "a text that matches {}"),
}
"""The entry of an error's context that holds the bound, and the words around it."""

_CHOICES = ("literal_error", "enum")
"""Types of errors that list what a value may be."""

VALUE_ERRORS = frozenset((*_KINDS, *_BOUNDS, *_CHOICES))
"""Types of errors that `list_kinds` describes in words of its own."""

SENTENCE_ERRORS = frozenset(("value_error", "assertion_error"))
"""Types of errors whose message a validator of ours wrote."""

_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
_MAX_SHOWN = 80


def list_kinds(entry: Any) -> list[str]:
    """Returns the kinds of value that an error of pydantic asks for, such as `a whole number` or `'auto'`.

    Args:
        entry: one entry of `ValidationError.errors()`.
    """
    kind = entry["type"]
    if kind in _KINDS:
        return list(_KINDS[kind])
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return [words.format(_format_bound(entry["ctx"][name]))]
    if kind in _CHOICES:
        return re.split(r", | or ", entry["ctx"]["expected"])
    # pydantic may get new types of errors: their own words are better than none.
    return [re.sub(r"^Input should be (a valid )?", "", entry["msg"])]


def describe_value(key: str, kinds: Sequence[str], value: Any) -> str:
    """Returns a clause such as `batch must be a whole number, not 'many'`."""
    kinds = list(dict.fromkeys(kinds))
    wanted = " or ".join(part for part in (", ".join(kinds[:-1]), kinds[-1]) if part)
    return f"{key} must be {wanted}, " + ("and it has no value" if value is None else f"not {_show_value(value)}")


def suggest_value(entry: Any, synonyms: Mapping[str, str] | None = None) -> str:
    """Returns a sentence that names the value that was probably meant; empty if none is close.

    Args:
        synonyms: for the key of the error, our name of a value by other libraries' name in lower case.
    """
    value = entry["input"]
    # A number may be meant as a word too: precision=16.
    value = str(value) if isinstance(value, int) and abs(value) < 1000 else value
    if not isinstance(value, str):
        return ""
    if entry["type"].startswith(("float", "int")):
        return f"Write {value.replace(',', '.')}, with a point." if _DECIMAL_COMMA.fullmatch(value) else ""
    if entry["type"] not in ("literal_error", "union_tag_invalid"):
        return ""
    choices = re.findall(r"'([^']*)'", entry["ctx"].get("expected") or entry["ctx"]["expected_tags"])
    word = _simplify(value)
    if hint := (synonyms or {}).get(word):
        return f"Did you mean {hint!r}?" if hint in choices else hint
    # Capitals and hyphens do not count: AdamW is adamw, and bf-16 is bf16.
    if same := next((choice for choice in choices if _simplify(choice) == word), None):
        return f"Did you mean {same!r}?"
    return suggest_nearest(value.lower(), choices, only_close=True)


def describe_error(entry: Any) -> str:
    """Describes one error of a record without a recipe's tree, as a clause without its full stop."""
    key = ".".join(map(str, entry["loc"]))
    if entry["type"] == "missing":
        return f"{key} is missing"
    if entry["type"] == "extra_forbidden":
        return f"there is no key {key!r}"
    if entry["type"] in SENTENCE_ERRORS:
        text = strip_prefix(entry["msg"])
        return f"{key}: {text}" if key else text
    if entry["type"] in ("union_tag_invalid", "union_tag_not_found"):
        name = entry["ctx"]["discriminator"].strip("'")
        return f"{f'{key}.' if key else ''}{name} is missing or not known"
    return describe_value(key or "it", list_kinds(entry), entry["input"])


def strip_prefix(message: str) -> str:
    """Returns the message of a validator of ours, as it was raised."""
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")


def _simplify(text: str) -> str:
    return re.sub(r"[\s_-]", "", text).casefold()


def _format_bound(bound: Any) -> str:
    if isinstance(bound, float):
        return f"{bound:g}"
    return f"{bound:,}" if isinstance(bound, int) else str(bound)


def _show_value(value: Any) -> str:
    try:
        text = str(value) if isinstance(value, datetime.date) else repr(value)
    # Python refuses to write a number of more than 4,300 digits.
    except ValueError:
        return "a number with thousands of digits"
    # YAML and Python differ here.
    text = {"True": "true", "False": "false", "{}": "an empty mapping", "nan": ".nan", "inf": ".inf"}.get(text, text)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
