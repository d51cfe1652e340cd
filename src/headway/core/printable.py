"""Text made safe for a terminal: names of files, classes and records from outside may hold escape sequences."""

from __future__ import annotations

import re
import string

_CONTROL = re.compile(
    # C0 except tab and newline, DEL, C1
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    # characters that change the direction of writing
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    # separators, tags, halves of surrogate pairs
    "\u2028\u2029\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)
_LINE_CONTROL = re.compile("[\t\n]")
_SCHEME = frozenset(string.ascii_letters + string.digits + "+.-")
_SPACE = re.compile(r"\s")


def escape_controls(text: str, *, lines: bool = True) -> str:
    r"""Returns the text with each control character as `\x1b`, so that a terminal shows it and does not obey it.

    Args:
        lines: keep tabs and newlines; False for a name, which has to stay on one line.
    """
    escaped = _CONTROL.sub(_escape, text)
    return escaped if lines else _LINE_CONTROL.sub(_escape, escaped)


def hide_credentials(text: str) -> str:
    """Returns the text with `***` in place of all that stands between `://` and the last `@` of a URL.

    A password may hold characters that end the name of a host elsewhere, such as an unescaped `/`. A URL ends at a
    space, and one in quotation marks at the next such mark of its line. Paths (`file://`) have no password.
    """
    return "\n".join(map(_hide_in_line, text.split("\n"))) if "://" in text and "@" in text else text


def _hide_in_line(line: str) -> str:
    shown, position = [], 0
    while (at := line.find("://", position)) >= 0:
        begin, start = at, at + len("://")
        while begin > position and line[begin - 1] in _SCHEME:
            begin -= 1
        end = start
        if line[begin:at] not in ("", "file"):
            space = _SPACE.search(line, start)
            end = len(line) if space is None else space.start()
            if begin > 0 and (mark := line[begin - 1]) in "'\"":
                # The password may have this mark too.
                end = max(end, line.find(mark, start))
        # No part of the line is searched twice: a message may be long.
        if (last := line.rfind("@", start, end)) >= 0:
            shown += [line[position:start], "***"]
            position = last
        else:
            shown.append(line[position:end])
            position = end
    return "".join(shown) + line[position:]


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    # Python decodes a byte of a file name that is not UTF-8 as a surrogate; it is shown as that byte.
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
