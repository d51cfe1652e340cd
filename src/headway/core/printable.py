"""Text for a terminal: names of files, classes and records come from outside, and may hold what moves its cursor."""

from __future__ import annotations

import re

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what turns the direction of writing
    "\u2028\u2029\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"  # separators, tags, halves of surrogate pairs
)
_OF_A_LINE = re.compile("[\t\n]")


def escape_controls(text: str, *, lines: bool = True) -> str:
    r"""The text with control characters as `\x1b`, so that a terminal shows them and obeys none.

    Args:
        lines: tabs and newlines stay; False: for a name, which is of one line.
    """
    found = _CONTROL.sub(_escape, text)
    return found if lines else _OF_A_LINE.sub(_escape, found)


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    # A byte of a file name that is no UTF-8 is a surrogate in Python; it is shown as the byte that it is.
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
