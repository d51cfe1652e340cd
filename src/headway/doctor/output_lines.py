"""Splits the output of a program into lines; of a progress bar drawn in place, only the last state is a line."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from typing import final

# Longest line that is kept; a longer one loses its beginning.
MOST_CHARACTERS = 1 << 16
END = re.compile(r"[\r\n]")
# `12/100` of a progress bar; decimal numbers and dates do not match.
COUNTER = re.compile(r"(?<![\d.])(\d+)\s*/\s*(\d+)(?![\d.])")
OF_EPOCHS = re.compile(r"epoch\W*$", re.IGNORECASE)


@final
class OutputLines:
    """Lines of one stream. A progress bar that is redrawn in place is reported when its counter is full; one without a
    counter when another line begins, or at the end of the output."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._drawn: str | None = None
        self._reported: str | None = None
        self._drawn_s = 0.0

    def feed(self, data: bytes, now: float) -> tuple[str, list[tuple[float, str]]]:
        """Returns the decoded text, and the lines that are complete now with their times."""
        text = self._decoder.decode(data)
        # Some progress bars return by backspaces instead of \r.
        self._rest = (self._rest + text.replace("\b", "\r"))[-MOST_CHARACTERS:]
        out: list[tuple[float, str]] = []
        while (end := END.search(self._rest)) is not None:
            line, self._rest = self._rest[: end.start()], self._rest[end.end() :]
            if end.group() == "\n":
                out += self._end_line(line, now)
            elif line.strip():
                out += self._take_other_bar(line)
                self._drawn, self._drawn_s = line, now
        shown = self._current_line()
        counter = _parse_counter(shown)
        # A full bar is complete even without a newline: scripts print the next line much later.
        if counter is not None and counter[0] >= counter[1] and shown != self._reported:
            out.append((now, shown))
            self._reported = shown
        return text, out

    def _take_other_bar(self, line: str) -> list[tuple[float, str]]:
        """Returns the bar that a line replaces, unless the line redraws the same bar."""
        if self._drawn is None or self._drawn == self._reported or _is_same_bar(self._drawn, line):
            return []
        return [(self._drawn_s, self._drawn)]

    def end(self, now: float) -> list[tuple[float, str]]:
        """Returns the lines that have no newline at the end of the output."""
        self._rest += self._decoder.decode(b"", final=True)
        line, self._rest = self._rest, ""
        return self._end_line(line, now)

    def _end_line(self, line: str, now: float) -> list[tuple[float, str]]:
        """Returns a line, or the bar on it; a full bar was already reported and is left out."""
        if line.strip():
            out = [*self._take_other_bar(line), (now, line)]
        else:
            out = [(self._drawn_s, self._drawn)] if self._drawn is not None else []
        reported, self._reported, self._drawn = self._reported, None, None
        return [one for one in out if one[1] != reported]

    def _current_line(self) -> str:
        """Returns the text on the line that has not ended yet."""
        return self._rest if self._rest.strip() else self._drawn or ""

    def is_unfinished(self) -> bool:
        """Returns True if the current bar is not full: its numbers then cover part of an epoch."""
        counter = _parse_counter(self._current_line())
        return counter is not None and counter[0] < counter[1]


def _parse_counter(line: str) -> tuple[int, int] | None:
    """Returns (done, total) of a bar: the last `n/m` that is not the number of an epoch."""
    matches = [m for m in COUNTER.finditer(line) if not OF_EPOCHS.search(line[: m.start()])]
    return (int(matches[-1][1]), int(matches[-1][2])) if matches else None


def _is_same_bar(one: str, other: str) -> bool:
    before, after = _parse_counter(one), _parse_counter(other)
    if before is None or after is None:
        return False
    return before[1] == after[1] and before[0] <= after[0]
