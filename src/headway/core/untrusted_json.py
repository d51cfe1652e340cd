"""JSON from outside: a header, a manifest, a profile that may have been written by anybody."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, final

DEPTH = 32
"""Most levels of lists and objects; what Headway writes has at most ten."""

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
    """A text that is no JSON object of ours; its message goes on after `it is damaged: `."""


def parse_object(text: str | bytes | bytearray, *, depth: int = DEPTH) -> dict[str, Any]:
    """The object that a JSON text holds.

    Args:
        text: whose length is bounded by whoever has read it.
        depth: most levels of lists and objects.

    Raises:
        JsonError: it is no JSON, no object, nested too deeply, or has a key twice.
    """
    found = parse_value(text, depth=depth)
    if not isinstance(found, dict):
        raise JsonError(f"it holds {describe_kind(found)}, not an object")
    return found


def parse_value(text: str | bytes | bytearray, *, depth: int = DEPTH) -> Any:
    """The same for JSON of any kind. What stands in place of a text may be of any kind too."""
    if not isinstance(text, str | bytes | bytearray):  # bytes(2147483648) is 2 GB of zeros
        raise JsonError(f"it is {describe_kind(text)}, not a text")
    try:
        # Not `json.loads` on bytes, which would also take UTF-16 and UTF-32.
        whole = text if isinstance(text, str) else bytes(text).decode("utf-8")
        found = json.loads(whole, object_pairs_hook=_refuse_duplicates)
    except JsonError:
        raise
    except UnicodeDecodeError as error:
        raise JsonError(f"it is no UTF-8 text (byte {error.start:,})") from None
    except RecursionError:
        raise JsonError("it is nested too deeply") from None
    except ValueError as error:  # also of a number with more than 4,300 digits
        raise JsonError(f"it is no JSON ({error})") from None
    _expect_shallow(found, depth)
    return found


def describe_kind(value: Any) -> str:
    """What kind of JSON a value is, for a sentence."""
    return _KINDS.get(type(value), type(value).__name__)


def is_whole_number(value: Any, low: int = 0, high: int = (1 << 63) - 1) -> bool:
    """Whether it is a whole number in [low, high]: true is none, though Python takes it for 1."""
    return type(value) is int and low <= value <= high


def is_number(value: Any, low: float = float("-inf"), high: float = float("inf")) -> bool:
    """Whether it is a number in [low, high]; NaN is none, and true neither."""
    return type(value) in (int, float) and low <= value <= high


def is_any_number(value: Any) -> bool:
    """Whether it is a number of any kind, NaN and the infinities too; true is none."""
    return type(value) in (int, float)


def is_sha256(value: Any) -> bool:
    """Whether it is a SHA-256 as text: 64 hexadecimal digits in lower case."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"it has {twice[:100]!r} twice")
    return found


def _expect_shallow(found: Any, depth: int) -> None:
    """Level by level, without recursion."""
    level = [found]
    for _ in range(depth + 1):
        containers = [value for value in level if isinstance(value, dict | list)]
        if not containers:
            return
        level = [inner for value in containers for inner in (value.values() if isinstance(value, Mapping) else value)]
    raise JsonError(f"it is nested more than {depth} levels deep")
