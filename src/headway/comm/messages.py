"""Messages between the launcher and its workers: one JSON object per line, in UTF-8. Over TCP a Channel seals them."""

from __future__ import annotations

import json
from typing import Any, final

from headway.core.untrusted_json import parse_object

Message = dict[str, Any]

# The message that announces a generation has about 100 bytes per rank.
MAX_LINE_BYTES = 1 << 22

# Heartbeats that each side sends within the time after which silence counts as loss.
BEATS_PER_TIMEOUT = 8


def encode(kind: str, **fields: Any) -> bytes:
    """Returns one message as a line, with its newline."""
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"


@final
class LineDecoder:
    """Decodes a stream of bytes into messages, however the stream was cut into pieces.

    Args:
        limit_bytes: a longer line is an error.
    """

    def __init__(self, limit_bytes: int = MAX_LINE_BYTES) -> None:
        self._limit = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """Returns the messages that `data` completes, and keeps the rest.

        Raises ValueError if a line is too long or no message.
        """
        *complete, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) > self._limit for line in (*complete, self._rest)):
            raise ValueError(f"a line of more than {self._limit:,} bytes")
        return [decode(line) for line in complete]


def decode(line: bytes) -> Message:
    """Returns the message of one line. Raises ValueError if it is not a JSON object, or has no `kind`."""
    message = parse_object(line)
    if not isinstance(message.get("kind"), str):
        raise ValueError("a line without a kind of message")
    return message


def read_int(message: Message, name: str) -> int:
    """Returns an integer field of a message. Raises ValueError if it has no such field."""
    # A bool is an int in Python.
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{message['kind']} without a number {name}")
    return value


def read_text(message: Message, name: str) -> str:
    """Returns a text field of a message. Raises ValueError if it has no such field."""
    value = message.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{message['kind']} without a text {name}")
    return value
