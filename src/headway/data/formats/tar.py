"""Reads tar: finds the members of an archive. It must be uncompressed, so that each is contiguous in the file.

An archive is blocks of 512 bytes: for each member a header and its bytes, padded with zeros; two blocks of zeros end
it. Supported are ustar (POSIX.1-1988), pax (POSIX.1-2001: `path` and `size` from extended headers) and GNU (long names,
sizes in base 256). Links, folders and devices are skipped; sparse files, whose bytes are in parts, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from headway.core.errors import DataError
from headway.data.formats.byte_ranges import ByteRange, map_path

_BLOCK = 512
_ZERO_BLOCK = bytes(_BLOCK)
_MAX_HEADER_BYTES = 1 << 20
"""Limit of a long name or an extended header."""
_FILE, _LONG_NAME, _EXTENDED, _SPARSE = b"07\x00", b"L", b"x", b"S"
_KINDS_WITHOUT_DATA = b"123456"
_HARMLESS = b"5gK"
"""Folders, and headers of the archive itself."""
_USTAR = b"ustar\0"


class ArchiveBytes(Protocol):
    """Bytes of an archive that are read instead of mapped, for a process whose resident memory is limited."""

    def __len__(self) -> int:
        """Returns their number."""
        ...

    def __getitem__(self, where: slice, /) -> bytes:
        """Returns a part of them."""
        ...


class ArchiveMember(NamedTuple):
    """A file in an archive: its name, offset and size."""

    name: str
    offset: int
    size: int


def read_members(
    path: Path, content: ArchiveBytes | None = None, *, only_files: bool = False
) -> Iterator[ArchiveMember]:
    """Yields the files of an archive in order, with names as UTF-8 (other bytes as surrogates).

    Args:
        content: its bytes; None: the file is mapped.
        only_files: refuse links and devices instead of skipping them, for an archive from strangers.

    Raises:
        DataError: the archive is damaged or truncated, or contains sparse files, or others that are refused.
    """
    view: ArchiveBytes | memoryview = map_path(path) if content is None else content
    offset = 0
    name = ""
    pax_fields: dict[str, str] = {}
    while True:
        where = f"{path}, byte {offset}"
        header = bytes(view[offset : offset + _BLOCK])
        # One block of zeros ends the archive here, since some tools leave out the second.
        if header == _ZERO_BLOCK:
            return
        if len(header) < _BLOCK:
            fix = "Copy it again: it is cut, or its writer left out the two blocks of zeros at its end."
            raise DataError("the archive ends without an end mark", where=where, fix=fix)
        _check_header(header, where)
        type_flag = header[156:157] or b"\0"
        size = _parse_number(header[124:136], where)
        # A pax header overrides the octal field, which ends at 8 GiB.
        if "size" in pax_fields and type_flag in _FILE:
            size = _parse_decimal(pax_fields["size"], where)
        data_begin = offset + _BLOCK
        # Links and folders may state a size but have no bytes.
        data_end = data_begin if type_flag in _KINDS_WITHOUT_DATA else data_begin + size
        if data_end > len(view):
            raise DataError(f"the archive ends inside {_read_name(header)!r}", where=where, fix="Copy it again.")
        if type_flag == _LONG_NAME:
            name = _decode_text(
                bytes(view[data_begin : min(data_end, data_begin + _MAX_HEADER_BYTES)]).partition(b"\0")[0]
            )
        elif type_flag == _EXTENDED:
            if size > _MAX_HEADER_BYTES:
                raise DataError(f"an extended header of {size:,} bytes", where=where)
            pax_fields = _parse_extended_header(bytes(view[data_begin:data_end]), where)
        elif type_flag in _FILE or type_flag == _SPARSE:
            if type_flag == _SPARSE or any(key.startswith("GNU.sparse.") for key in pax_fields):
                raise DataError("sparse files cannot be mapped", where=where, fix="Make the archive without --sparse.")
            yield ArchiveMember(pax_fields.get("path") or name or _read_name(header), data_begin, size)
        elif only_files and type_flag not in _HARMLESS:
            what = f"{_read_name(header)!r:.200} is a link, a device or of an unknown kind"
            raise DataError(what, where=where, fix="Make the archive of regular files alone.")
        # A long name or an extended header applies to the next member only.
        if type_flag not in (_LONG_NAME, b"K", _EXTENDED, b"g"):
            name, pax_fields = "", {}
        # Bytes are padded to whole blocks.
        offset = data_end + -(data_end - data_begin) % _BLOCK


def read_ranges(path: Path) -> Iterator[ByteRange]:
    """Yields the files of an archive as byte ranges. Raises as `read_members`."""
    return (ByteRange(path, offset, size, name) for name, offset, size in read_members(path))


def _check_header(header: bytes, where: str) -> None:
    """Raises DataError unless the header's checksum is right: the sum of its bytes, with its own field as spaces."""
    stored = header[148:156].strip(b" \0")
    if not stored.isdigit() or _parse_octal(stored, where) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise DataError("this is not a tar header", where=where, fix="Copy the archive again.")


def _parse_number(field: bytes, where: str) -> int:
    # GNU tar stores sizes that octal cannot hold in base 256; 0xff begins a negative number.
    if field[0] & 0x80:
        if field[0] != 0x80:
            raise DataError("a negative size", where=where)
        return int.from_bytes(field[1:])
    return _parse_octal(field.strip(b" \0") or b"0", where)


def _parse_octal(digits: bytes, where: str) -> int:
    try:
        return int(digits, 8)
    except ValueError:
        raise DataError(f"{digits!r} is not an octal number", where=where) from None


def _parse_decimal(text: str, where: str) -> int:
    if not (text.isdecimal() and text.isascii() and len(text) < 20):
        raise DataError(f"{text!r} is not a size", where=where)
    return int(text)


def _read_name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    # ustar stores the first part of a long path in a separate field.
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == _USTAR else b""
    return _decode_text(prefix + b"/" + name if prefix else name)


def _parse_extended_header(data: bytes, where: str) -> dict[str, str]:
    r"""Returns the values by key of an extended header, whose records are `LENGTH KEY=VALUE\n`."""
    fields: dict[str, str] = {}
    start = 0
    # By position: a copy of the rest for each record would make many short ones cost the square of their number.
    while start < len(data) and data[start]:
        digits, _, _ = data[start : start + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        end = start + length
        key, equals, value = data[start + len(digits) + 1 : max(end - 1, start)].partition(b"=")
        if not len(digits) < length <= len(data) - start or not equals or data[end - 1 : end] != b"\n":
            raise DataError("a damaged extended header", where=where)
        fields[_decode_text(key)] = _decode_text(value)
        start = end
    return fields


def _decode_text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
