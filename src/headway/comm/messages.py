"""Messages between the launcher and its workers: one JSON object a line, in UTF-8. Over TCP a Channel carries them."""

from __future__ import annotations

import json
from typing import Any, final

Message = dict[str, Any]

LIMIT_BYTES = 1 << 22
"""The longest line; the one that announces a generation has about 100 bytes a member."""

BEATS = 8
"""Heartbeats that each side sends within the time after which silence counts as loss."""


def encode(kind: str, **fields: Any) -> bytes:
    """One message as a line."""
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"


@final
class Lines:
    """Cuts a stream of bytes into messages, wherever it was torn.

    Args:
        limit_bytes: a longer line is an error.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes.

        Raises:
            ValueError: a line is too long, or no message.
        """
        *whole, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) > self._limit for line in (*whole, self._rest)):
            raise ValueError(f"a line of more than {self._limit:,} bytes")
        return [decode(line) for line in whole]


def decode(line: bytes) -> Message:
    """The message of one line.

    Raises:
        ValueError: it is no JSON object, or has no `kind`.
    """
    try:
        message = json.loads(line)
    except RecursionError:  # a line of brackets
        raise ValueError("a line that is nested too deeply") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("a line that is no message")
    return message


def whole(message: Message, name: str) -> int:
    """A whole number of a message.

    Raises:
        ValueError: it has none of that name.
    """
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{message['kind']} without a number {name}")
    return value


def text(message: Message, name: str) -> str:
    """A text of a message.

    Raises:
        ValueError: it has none of that name.
    """
    value = message.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{message['kind']} without a text {name}")
    return value
