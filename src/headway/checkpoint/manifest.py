"""The manifest of a checkpoint: its scalars, the length and sha256 of its files, and the tensors in pieces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.checkpoint.pieces import SplitTensor, parse_split_tensors
from headway.core.errors import CheckpointError
from headway.core.files import is_plain_name
from headway.core.untrusted_json import (
    DEPTH,
    Checks,
    JsonError,
    expect_entries,
    is_object,
    is_sha256,
    is_whole_number,
    parse_object,
)

# Format 2 has `tensors`: those of which several files hold pieces.
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
MANIFEST = "manifest.json"
# Limits for a file that may be damaged or hostile. A usual manifest has 2 kB, and one file for each rank.
MAX_MANIFEST_BYTES = 64 << 20
MAX_FILES = 1 << 20
MAX_STEP = 1 << 53
MAX_FILE_BYTES = 1 << 60


_SHA256 = (is_sha256, "64 hexadecimal digits")
_ENTRIES: Checks = {
    "sha256": _SHA256,
    "files": (lambda value: isinstance(value, list) and len(value) <= MAX_FILES, f"a list of at most {MAX_FILES:,}"),
    "step": (lambda value: is_whole_number(value, 0, MAX_STEP), f"a whole number from 0 to {MAX_STEP:,}"),
    "scalars": (is_object, "an object"),
}
_PIECES_ENTRY: Checks = {"tensors": (is_object, "an object")}
_FILE_ENTRIES: Checks = {
    # A name with a slash would let a manifest read files outside its folder.
    "name": (lambda value: is_plain_name(value) and value != MANIFEST, "a plain name of a file"),
    "bytes": (lambda value: is_whole_number(value, 0, MAX_FILE_BYTES), f"a whole number from 0 to {MAX_FILE_BYTES:,}"),
    "sha256": _SHA256,
}


@dataclass(frozen=True)
class FileEntry:
    """One file of tensors.

    Attributes:
        name: name in the checkpoint's folder.
        length: length in bytes.
        sha256: hexadecimal sha256 of its bytes.
    """

    name: str
    length: int
    sha256: str

    def expect_length(self, length: int, where: str) -> None:
        """Raises CheckpointError if `length` is another. Call it before the bytes are read."""
        if length != self.length:
            raise CheckpointError(f"{self.name} is torn: {length} of {self.length} bytes", where=where)

    def expect_sha256(self, sha256: str, where: str) -> None:
        """Raises CheckpointError if the sha256 of the file's bytes is another."""
        if sha256 != self.sha256:
            raise CheckpointError(f"{self.name} is damaged: its sha256 is another", where=where)


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`: the step, the scalars given to `save`, the files, and tensors in pieces by name."""

    step: int
    scalars: dict[str, Any]
    files: tuple[FileEntry, ...]
    split_tensors: Mapping[str, SplitTensor] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Returns the bytes of `manifest.json`, with its checksum."""
        tree: dict[str, Any] = {"format": FORMAT_VERSION, "step": self.step, "scalars": self.scalars}
        tree["files"] = [{"name": file.name, "bytes": file.length, "sha256": file.sha256} for file in self.files]
        tree["tensors"] = {name: tensor.to_json() for name, tensor in self.split_tensors.items()}
        # Last, since it covers all other entries.
        tree["sha256"] = _compute_digest(tree)
        return json.dumps(tree, indent=1).encode()

    @staticmethod
    def from_json(data: bytes, where: str) -> Manifest:
        """Parses `manifest.json`. Raises CheckpointError if an entry is damaged or the format is a later one."""
        try:
            tree = parse_object(data)
            # The format is looked at before the checksum, so that a later version is named as such.
            expect_entries(tree, {"format": (is_whole_number, "a whole number")})
            if tree["format"] not in READABLE_VERSIONS:
                what = f"its format is {tree['format']}, this version reads {READABLE_VERSIONS[-1]}"
                raise CheckpointError(what, where=where)
            # Format 1 had whole tensors alone.
            has_pieces = tree["format"] > 1
            expect_entries(tree, {**_ENTRIES, **(_PIECES_ENTRY if has_pieces else {})})
            if tree["sha256"] != _compute_digest({name: value for name, value in tree.items() if name != "sha256"}):
                raise JsonError("its sha256 is another")
            for number, entry in enumerate(tree["files"]):
                expect_entries(entry, _FILE_ENTRIES, f"files[{number}].")
            split_tensors = parse_split_tensors(tree["tensors"]) if has_pieces else {}
        except JsonError as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {error}", where=where) from None
        files = tuple(FileEntry(entry["name"], entry["bytes"], entry["sha256"]) for entry in tree["files"])
        # Two entries for one file could differ in length and sha256.
        if len({file.name for file in files}) < len(files):
            raise CheckpointError(f"{MANIFEST} names a file twice", where=where)
        names = {file.name for file in files}
        for name, tensor in split_tensors.items():
            if lacking := [piece.file for piece in tensor.pieces if piece.file not in names]:
                raise CheckpointError(f"{MANIFEST} lacks the file {lacking[0]} of {name!r}", where=where)
        return Manifest(tree["step"], tree["scalars"], files, split_tensors)


def copy_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the scalars that went through JSON, equal to what a manifest with them will give.

    Raises:
        CheckpointError: a manifest with them could not be read.
        TypeError: they are not JSON.
    """
    text = json.dumps(dict(scalars))
    try:
        # The manifest that will hold them is one level deeper.
        copied = parse_object(text, depth=DEPTH - 1)
    except JsonError as error:
        raise CheckpointError(f"the scalars cannot be saved: {error}", fix="Save them otherwise.") from None
    if len(text) > MAX_MANIFEST_BYTES // 4:
        raise CheckpointError(f"the scalars cannot be saved: they have {len(text):,} characters", fix="Save tensors.")
    return copied


def _compute_digest(tree: Mapping[str, Any]) -> str:
    """Returns the sha256 of a manifest without its own `sha256`."""
    # A flipped digit leaves valid JSON, so the manifest needs a checksum of its own.
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
