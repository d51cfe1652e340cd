"""Text made safe for a terminal: names of files, classes and records from outside may hold escape sequences."""

from __future__ import annotations

import re

_CONTROL = re.compile(
    # C0 except tab and newline, DEL, C1
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    # characters that change the direction of writing
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    # separators, tags, halves of surrogate pairs
    "\u2028\u2029\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)
_LINE_CONTROL = re.compile("[\t\n]")
# One character of the scheme is enough: all of it would be searched for anew from each letter of a long text.
_CREDENTIALS = re.compile(r"(?<=[A-Za-z0-9+.-])://\S*@")


def escape_controls(text: str, *, lines: bool = True) -> str:
    r"""Returns the text with each control character as `\x1b`, so that a terminal shows it and does not obey it.

    Args:
        lines: keep tabs and newlines; False for a name, which has to stay on one line.
    """
    escaped = _CONTROL.sub(_escape, text)
    return escaped if lines else _LINE_CONTROL.sub(_escape, escaped)


def hide_credentials(text: str) -> str:
    """Returns the text with `***` in place of all that stands between `://` and the last `@` of a URL.

    A password may hold characters that end the name of a host elsewhere, such as an unescaped `/`.
    """
    return _CREDENTIALS.sub("://***@", text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    # Python decodes a byte of a file name that is not UTF-8 as a surrogate; it is shown as that byte.
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
