"""Strict parser of multipart/form-data (RFC 7578) for bodies that are complete, in memory or in a file.

Its work and memory are bounded by the length of the body, which the server has limited. Nothing is opened by the file
names in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, final

from headway.http.problems import ProblemError

MAX_PART_HEAD = 4096
"""Most bytes of the headers of one part."""
MAX_NAME = 255
"""Most characters of a file name that are kept."""

# The characters of a boundary (RFC 2046, 5.1.1); it does not end in a space.
_BOUNDARY = re.compile(r"""boundary=(?:"([0-9A-Za-z'()+_,./:=? -]{1,70})"|([0-9A-Za-z'+_./-]{1,70}))\s*(?:;|$)""", re.I)
_FILENAME = re.compile(r';\s*filename="((?:[^"\\\r\n]|\\.)*)"', re.I)
_FIELD = re.compile(r';\s*name="((?:[^"\\\r\n]|\\.)*)"', re.I)
_FIX = "Send it as a client library or `curl -F image=@photo.jpg` does."


@final
@dataclass(frozen=True, slots=True)
class Part:
    """One file of a form.

    Attributes:
        name: its file name as the client gave it, printable; empty if there is none.
        media_type: in lower case, without parameters; empty if there is none.
        data: its bytes.
    """

    name: str
    media_type: str
    data: bytes


@final
@dataclass(frozen=True, slots=True)
class PartPlace:
    """The place of one part of a form in its body.

    Attributes:
        field: name of its field as the client gave it; empty if there is none.
        name: its file name as the client gave it; empty if there is none.
        media_type: in lower case, without parameters; empty if there is none.
        start, end: its bytes.
    """

    field: str
    name: str
    media_type: str
    start: int
    end: int


class Searchable(Protocol):
    """Bytes that can be sliced and searched: `bytes`, or those of a file."""

    def __getitem__(self, where: slice, /) -> bytes:
        """Returns a part of the bytes."""
        ...

    def find(self, needle: bytes, start: int, end: int = ..., /) -> int:
        """Returns the first place of `needle` in [start, end), or -1."""
        ...


def parse_boundary(content_type: str) -> bytes:
    """Returns the boundary that a Content-Type names. Raises ProblemError (400) if it names none."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise ProblemError(400, "the Content-Type multipart/form-data has no valid boundary", _FIX)
    return (found[1] or found[2]).rstrip().encode("ascii")


def parse_multipart(body: bytes, boundary: bytes, limit: int) -> list[Part]:
    """Splits the body of a form into its parts. See `split_multipart` for the arguments and what it raises."""
    places = split_multipart(body, boundary, limit)
    return [Part(_clean_name(one.name), one.media_type, body[one.start : one.end]) for one in places]


def split_multipart(body: Searchable, boundary: bytes, limit: int) -> Iterator[PartPlace]:
    """Finds the parts in the body of a form, in memory or in a file, without reading them as a whole.

    Args:
        boundary: what separates them, without the two leading hyphens.
        limit: most parts.

    Raises:
        ProblemError: the body is not a form that ends with its boundary (400), or has too many parts (413).
    """
    opening, delimiter = b"--" + boundary, b"\r\n--" + boundary
    # A preamble is allowed by the standard, and no client sends one.
    if body[: len(opening)] != opening:
        raise ProblemError(400, "the form does not begin with its boundary", _FIX)
    number, position = 0, len(opening)
    while True:
        after = body[position : position + 2]
        if after == b"--":
            return
        if after != b"\r\n":
            raise ProblemError(400, f"part {number + 1} of the form does not begin on a line of its own", _FIX)
        if number == limit:
            raise ProblemError(413, f"the form has more than {limit:,} parts", "Send several requests.")
        number += 1
        # The empty line after the headers may be the first line: a part needs no header.
        head_end = body.find(b"\r\n\r\n", position, position + MAX_PART_HEAD)
        if head_end < 0:
            raise ProblemError(400, f"the headers of part {number} of the form have no end", _FIX)
        data_start = head_end + 4
        # The delimiter of an empty part may share its line break with the end of the headers.
        data_end = body.find(delimiter, head_end + 2)
        if data_end < 0:
            raise ProblemError(400, "the form does not end with its boundary", _FIX)
        yield _build_place(body[position + 2 : head_end], data_start, max(data_start, data_end), number)
        position = data_end + len(delimiter)


def _build_place(head: bytes, start: int, end: int, number: int) -> PartPlace:
    field, name, media_type = "", "", ""
    for line in head.split(b"\r\n"):
        key, colon, value = line.decode("utf-8", "replace").partition(":")
        if not colon:
            if line:
                raise ProblemError(400, f"part {number} of the form has a header line without a colon", _FIX)
            continue
        key = key.strip().lower()
        if key == "content-disposition":
            name = found[1] if (found := _FILENAME.search(value)) is not None else ""
            field = found[1] if (found := _FIELD.search(value)) is not None else ""
        elif key == "content-type":
            media_type = value.partition(";")[0].strip().lower()
        elif key == "content-transfer-encoding" and value.strip().lower() not in ("binary", "8bit", "7bit"):
            what = f"part {number} of the form is encoded as {value.strip()[:40]!r}"
            raise ProblemError(415, what, "Send the bytes of the file as they are.")
    return PartPlace(field, name, media_type, start, end)


def _clean_name(text: str) -> str:
    # Control characters would reach logs and terminals of whoever reads the answer.
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_NAME])
