"""JSON that anybody may have written: a header, a manifest, a profile. Depth and kinds are checked before use."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, final

Check = Callable[[Any], bool]
Checks = Mapping[str, tuple[Check, str]]
"""For each entry of an object its check, and a description of a right one: `{"name": (is_text, "a text")}`."""

# Most levels of lists and objects; files that Headway writes have at most ten.
DEPTH = 32

_KINDS = {
    type(None): "null",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


@final
class JsonError(ValueError):
    """The text is not JSON of the expected form. Its message follows "it is damaged: "."""


def parse_object(text: str | bytes | bytearray, *, depth: int = DEPTH) -> dict[str, Any]:
    """Parses a JSON text that holds an object.

    Args:
        text: JSON; its reader has limited its length.
        depth: most levels of lists and objects.

    Raises:
        JsonError: it is not JSON, not an object, nested too deeply, or has a key twice.
    """
    value = parse_value(text, depth=depth)
    if not isinstance(value, dict):
        raise JsonError(f"it holds {describe_kind(value)}, not an object")
    return value


def parse_value(text: str | bytes | bytearray, *, depth: int = DEPTH) -> Any:
    """Parses a JSON text that holds any kind of value. Raises JsonError, also if `text` is not a text."""
    # A message may hold a number here, and bytes(2147483648) would be 2 GB of zeros.
    if not isinstance(text, str | bytes | bytearray):
        raise JsonError(f"it is {describe_kind(text)}, not a text")
    try:
        # `json.loads` on bytes would also accept UTF-16 and UTF-32.
        whole = text if isinstance(text, str) else bytes(text).decode("utf-8")
        # `json` keeps the last of two equal keys. Readers that keep the first would see another content.
        value = json.loads(whole, object_pairs_hook=_refuse_duplicates)
    except JsonError:
        raise
    except UnicodeDecodeError as error:
        raise JsonError(f"it is not UTF-8 text (byte {error.start:,})") from None
    except RecursionError:
        raise JsonError("it is nested too deeply") from None
    # JSONDecodeError, and Python's limit of 4,300 digits for a number.
    except ValueError as error:
        raise JsonError(f"it is not JSON ({error})") from None
    _expect_shallow(value, depth)
    return value


def expect_entries(tree: Any, checks: Checks, path: str = "") -> None:
    """Checks the entries of an object before they are used. Raises JsonError that names the first missing or wrong one.

    Args:
        path: comes before the names of entries in the message, such as `files[0].`.
    """
    if not is_object(tree):
        raise JsonError(f"it has {describe_kind(tree)} as {path.rstrip('.')}, not an object")
    for name, (is_right, wanted) in checks.items():
        if name not in tree:
            raise JsonError(f"it lacks {path}{name}")
        if not is_right(value := tree[name]):
            # A damaged or hostile entry may be megabytes long, so the message quotes only its beginning.
            shown = repr(value)[:100] if type(value) in (int, float, str) else describe_kind(value)
            raise JsonError(f"it has {shown} as {path}{name}, not {wanted}")


def describe_kind(value: Any) -> str:
    """Returns the JSON kind of a value as words for a message, such as "a number"."""
    return _KINDS.get(type(value), type(value).__name__)


def is_object(value: Any) -> bool:
    """Returns True for a JSON object."""
    return isinstance(value, dict)


def is_text(value: Any) -> bool:
    """Returns True for a text."""
    return isinstance(value, str)


def is_whole_number(value: Any, low: int = 0, high: int = (1 << 63) - 1) -> bool:
    """Returns True for a whole number in [low, high]. Booleans are none, though Python counts them as int."""
    return type(value) is int and low <= value <= high


def is_number(value: Any, low: float = float("-inf"), high: float = float("inf")) -> bool:
    """Returns True for a number in [low, high]. NaN and booleans are none."""
    return type(value) in (int, float) and low <= value <= high


def is_any_number(value: Any) -> bool:
    """Returns True for any number, NaN and the infinities included. Booleans are none."""
    return type(value) in (int, float)


def is_sha256(value: Any) -> bool:
    """Returns True for the text of a SHA-256: 64 hexadecimal digits in lower case."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"it has {twice[:100]!r} twice")
    return values


def _expect_shallow(tree: Any, depth: int) -> None:
    """Raises JsonError beyond `depth` levels; level by level, since recursion would overflow first."""
    level = [tree]
    for _ in range(depth + 1):
        containers = [value for value in level if isinstance(value, dict | list)]
        if not containers:
            return
        level = [inner for value in containers for inner in (value.values() if isinstance(value, Mapping) else value)]
    raise JsonError(f"it is nested more than {depth} levels deep")
