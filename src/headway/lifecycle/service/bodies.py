"""Bodies of `POST /datasets/{id}`: JSON, a form, or a tar file, as changes and places of files.

Nothing is decoded here. The body lies in a file, which is read in parts: memory does not grow with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from headway.core.errors import DataError, UsageError
from headway.core.untrusted_json import JsonError, describe_kind, is_object, is_sha256, is_text, parse_value
from headway.data.formats.pack_source import IMAGE_EXTENSIONS
from headway.data.formats.tar import read_members
from headway.http.multipart import parse_boundary, split_multipart
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.settings import ServiceSettings
from headway.lifecycle.store.annotations import encode_annotations
from headway.lifecycle.store.manifest import normalise_name

JSON_TYPE, FORM_TYPE, TAR_TYPE = "application/json", "multipart/form-data", "application/x-tar"
BODY_TYPES = (FORM_TYPE, TAR_TYPE, JSON_TYPE)
OPERATIONS = ("add", "label", "move", "remove")
CHANGES_FIELD = "changes"
"""Name of the part of a form that holds changes as JSON."""

MAX_ERRORS = 100
"""Most errors that one answer lists."""
MAX_LISTED = 1000
"""Most files that one answer lists as left out or as near copies; the others are counted."""
MAX_TEXT = 1024
_FIND_BYTES = 1 << 20
_LABEL_BYTES = 1 << 16
_KEYS = {"op", "name", "sha256", "label", "split", "by", "annotations"}
# As WebDataset: a name is cut at the first dot behind its folders.
_MEMBER = re.compile(r"(?P<key>(?:.*/)?[^./]+)\.(?P<extension>[^/]*)", re.DOTALL)
_NO_BYTES = "It is missing: a list of changes has no file."
_LABEL_EXTENSIONS = ("cls", "txt", "json")


@final
class FileBytes:
    """The bytes of a file, read in parts. It is closed by `with`."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._descriptor).st_size

    def __enter__(self) -> FileBytes:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, where: slice) -> bytes:
        start, stop, _ = where.indices(self._size)
        return os.pread(self._descriptor, max(0, stop - start), start)

    def find(self, needle: bytes, start: int, end: int | None = None) -> int:
        """Returns the first place of `needle` in [start, end), or -1; as that of `bytes`."""
        end = self._size if end is None else min(end, self._size)
        # A needle may lie across two parts, so parts overlap.
        while start + len(needle) <= end:
            data = os.pread(self._descriptor, min(_FIND_BYTES, end - start), start)
            place = data.find(needle)
            if place >= 0:
                return start + place
            # A file that was cut meanwhile reads as nothing.
            if len(data) < len(needle):
                return -1
            start += len(data) - len(needle) + 1
        return -1


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One change as a client asks for it. See `headway.lifecycle.store.Change`.

    Attributes:
        pointer: JSON pointer of it in the body, for messages.
        start, end: bytes of the file in the body; `start` -1: there is none.
    """

    op: str
    pointer: str
    name: str = ""
    sha256: str = ""
    label: str | None = None
    split: str = ""
    by: str = ""
    annotations: Mapping[str, Any] | None = None
    start: int = -1
    end: int = -1

    @property
    def has_file(self) -> bool:
        """True if the body holds the file of the sample."""
        return self.start >= 0


@final
@dataclass(slots=True)
class LeftOut:
    """Files that are left out, of which a body may have a million.

    Attributes:
        listed: (name, reason) of the first ones.
        count: number of all.
    """

    listed: list[tuple[str, str]] = field(default_factory=list)
    count: int = 0

    def add(self, name: str, reason: str) -> None:
        """Adds a file."""
        self.count += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append((name, reason))


@final
@dataclass(slots=True)
class Proposal:
    """All that a body asks for.

    Attributes:
        rows: changes, in order.
        rejected: files that are left out.
    """

    rows: list[Row] = field(default_factory=list)
    rejected: LeftOut = field(default_factory=LeftOut)

    @property
    def files(self) -> int:
        """Number of files."""
        return sum(row.has_file for row in self.rows)


def read_media_type(content_type: str) -> str:
    """Returns the media type of a body. Raises ProblemError (415) if it is not accepted."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in BODY_TYPES:
        known = ", ".join(BODY_TYPES)
        what = f"a body of type {media_type[:80]!r} is not accepted" if media_type else "the body has no Content-Type"
        raise refuse("wrong-type", what, f"Send one of {known}.", headers=[(b"accept-post", known.encode())])
    if media_type == FORM_TYPE:
        parse_boundary(content_type)
    return media_type


def parse_body(path: Path, content_type: str, settings: ServiceSettings) -> Proposal:
    """Reads what a body asks for.

    Args:
        path: file with the body.

    Raises:
        ProblemError: the body is malformed (400), is too large (413), of another type (415), or asks for what cannot be
            (422).
    """
    media_type = read_media_type(content_type)
    with FileBytes(path) as body:
        if media_type == JSON_TYPE:
            return parse_list(body, settings)
        if media_type == FORM_TYPE:
            return _parse_form(body, parse_boundary(content_type), settings)
        return _parse_tar(path, body, settings)


def parse_list(body: FileBytes | bytes, settings: ServiceSettings) -> Proposal:
    """Reads a list of changes as JSON, which brings no files. Raises as `parse_body`."""
    rows = _parse_changes(body, 0, len(body), settings)
    if errors := [(f"{row.pointer}/sha256", _NO_BYTES) for row in rows if row.op == "add" and not row.sha256]:
        what = "a sample to add has neither a file nor the ID of bytes that the store has"
        fix = "Send the file in a form, or give sha256."
        raise refuse("wrong-change", what, fix, errors=errors[:MAX_ERRORS])
    return Proposal(rows)


def _parse_changes(
    body: FileBytes | bytes, start: int, end: int, settings: ServiceSettings, where: str = ""
) -> list[Row]:
    if end - start > settings.json_bytes:
        what = f"the changes have {end - start:,} bytes, more than {settings.json_bytes:,}"
        raise refuse("too-large", what, "Send several requests.")
    try:
        tree = parse_value(body[start:end])
    except JsonError as error:
        raise refuse("malformed", f"the changes cannot be read: {error}", "Send a list of objects.") from error
    if not isinstance(tree, list):
        raise refuse("malformed", f"the changes are {describe_kind(tree)}", "Send a list of objects.")
    rows, errors = list[Row](), list[tuple[str, str]]()
    for place, entry in enumerate(tree):
        pointer = f"{where}/{place}"
        found = list(_check_change(entry))
        errors += [(f"{pointer}/{key}" if key else pointer, text) for key, text in found]
        if not found:
            values = {key: value for key, value in entry.items() if value is not None}
            name = values.pop("name", "")
            rows.append(Row(pointer=pointer, name=normalise_name(name) if name else "", **values))
        if len(errors) >= MAX_ERRORS:
            break
    if errors:
        what = f"{len(errors)} of the changes cannot be made" if len(errors) > 1 else "a change cannot be made"
        raise refuse("wrong-change", what, "Mend them, and send all again.", errors=errors)
    return rows


def _check_change(entry: Any) -> Iterator[tuple[str, str]]:
    """Yields (key, sentence) for each fault of a change."""
    if not isinstance(entry, dict):
        yield "", f"It is {describe_kind(entry)}, not an object."
        return
    for key in entry.keys() - _KEYS:
        yield key[:80].replace("~", "~0").replace("/", "~1"), f"It is unknown. Use {', '.join(sorted(_KEYS))}."
    if entry.get("op") not in OPERATIONS:
        yield "op", f"It is none of {', '.join(OPERATIONS)}."
        return
    for key in ("name", "label", "split", "by"):
        value = entry.get(key)
        if value is None:
            continue
        if not is_text(value) or len(value) > MAX_TEXT:
            yield key, f"It is not a text of at most {MAX_TEXT:,} characters."
        # Unpaired surrogates cannot be stored; other control characters only confuse whoever reads them.
        elif not value.isprintable():
            yield key, "It has a character that cannot be printed."
    if is_text(name := entry.get("name")) and name:
        try:
            normalise_name(name)
        except UsageError as error:
            yield "name", str(error)
    if entry.get("sha256") is not None and not is_sha256(entry["sha256"]):
        yield "sha256", "It is not 64 hexadecimal digits in lower case."
    if not entry.get("name") and (entry["op"] == "add" or not entry.get("sha256")):
        yield "", "It names no sample: give `name`" + ("." if entry["op"] == "add" else " or `sha256`.")
    if entry["op"] == "label" and "label" not in entry:
        yield "", "It has no `label`. Give null to remove a label."
    yield from _check_annotations(entry)
    if entry["op"] == "move" and not entry.get("split"):
        yield "", "It has no `split`."


def _check_annotations(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    annotations = entry.get("annotations")
    if annotations is None:
        return
    if not is_object(annotations) or entry["op"] not in ("add", "label"):
        yield "annotations", "It is not an object in a change that adds or labels."
        return
    try:
        encode_annotations(annotations, "")
    except UsageError as error:
        yield "annotations", str(error)


def _parse_form(body: FileBytes, boundary: bytes, settings: ServiceSettings) -> Proposal:
    """Reads a form: each part with a file name is a file, and the part `changes` says more about them."""
    files, changes = dict[str, tuple[int, int]](), list[Row]()
    for number, part in enumerate(split_multipart(body, boundary, settings.files + 1), 1):
        if part.field == CHANGES_FIELD:
            if changes:
                raise refuse("malformed", f"the form has the part {CHANGES_FIELD!r} twice", "Send one.")
            changes = _parse_changes(body, part.start, part.end, settings, f"/{CHANGES_FIELD}")
            continue
        if not part.name:
            what = f"part {number} of the form has no file name, and is not {CHANGES_FIELD!r}"
            raise refuse("malformed", what, "Give each file its name.")
        name = _expect_name(re.sub(r"\\(.)", r"\1", part.name))
        if name in files:
            raise refuse("wrong-change", f"the form has two files with the name {name!r}", "Give each its own name.")
        files[name] = (part.start, part.end)
    rows = list[Row]()
    for row in changes:
        if row.op == "add" and not row.sha256:
            place = files.pop(row.name, None)
            if place is None:
                error = (f"{row.pointer}/name", "The form has no file with this name.")
                raise refuse("wrong-change", f"the file {row.name!r} is missing", "Send it.", errors=[error])
            row = replace(row, start=place[0], end=place[1])
        rows.append(row)
    rows += [Row("add", f"/{name}", name, start=start, end=end) for name, (start, end) in files.items()]
    return Proposal(rows)


def _parse_tar(path: Path, body: FileBytes, settings: ServiceSettings) -> Proposal:
    """Reads a tar file: images, and WebDataset's labels beside them (KEY.cls, KEY.txt or KEY.json), or NAME.cls."""
    images, labels, rejected = dict[str, tuple[str, int, int]](), dict[str, str | None](), LeftOut()
    # Labels of files named NAME.cls, where NAME is the whole name of an image, which may have dots.
    own_labels, dotted = dict[str, str | None](), list[tuple[str, str]]()
    try:
        for count, member in enumerate(read_members(path, body, only_files=True)):
            if count >= settings.files:
                raise refuse("too-large", f"the archive has more than {settings.files:,} files", "Send several.")
            name = _expect_name(member.name.removeprefix("./"))
            found = _MEMBER.fullmatch(name)
            key, extension = (found["key"], found["extension"].lower()) if found else (name, "")
            if f".{extension.rpartition('.')[2]}" in IMAGE_EXTENSIONS:
                if name in images:
                    raise refuse("wrong-change", f"the archive has {name!r} twice", "Give each file its own name.")
                images[name] = (key, member.offset, member.offset + member.size)
            elif (last := extension.rpartition(".")[2]) in _LABEL_EXTENSIONS and member.size <= _LABEL_BYTES:
                label = _read_label(body[member.offset : member.offset + member.size], last, name)
                if extension == last and labels.setdefault(key, label) != label:
                    raise refuse("wrong-change", f"the archive has two labels for {key!r}", "Leave one out.")
                image = name[: -len(last) - 1]
                own_labels[image] = label
                if extension != last:
                    dotted.append((name, image))
            else:
                rejected.add(name, "is neither an image nor a label")
    # What the reader of archives refuses is damaged, or hostile: nothing of it is stored.
    except DataError as error:
        raise refuse("hostile-archive", f"the archive cannot be stored: {error.what}", error.fix) from error
    for name, image in dotted:
        if image not in images:
            rejected.add(name, "is the label of no image")
    rows = [
        Row("add", f"/{name}", name, label=own_labels.get(name, labels.get(key)), start=start, end=end)
        for name, (key, start, end) in images.items()
    ]
    return Proposal(rows, rejected)


def _read_label(data: bytes, extension: str, name: str) -> str | None:
    text: Any = None
    with suppress(UnicodeDecodeError):
        text = data.decode().strip()
    if extension == "json" and text is not None:
        try:
            tree = parse_value(text)
        except JsonError as error:
            raise refuse("wrong-change", f"the label in {name!r} cannot be read: {error}", "Mend it.") from error
        text = tree.get("label") if isinstance(tree, Mapping) else tree
        if text is None and isinstance(tree, Mapping):
            return None
        # A class number is the text of it.
        text = str(text) if isinstance(text, int) and not isinstance(text, bool) else text
    if not is_text(text) or not text or len(text) > MAX_TEXT or not text.isprintable():
        raise refuse("wrong-change", f"the label in {name!r} is no text", "Write the class in UTF-8.")
    return str(text)


def _expect_name(text: str) -> str:
    try:
        return normalise_name(text)
    except UsageError as error:
        raise refuse("wrong-change", error.what, error.fix) from None
