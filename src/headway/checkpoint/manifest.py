"""The manifest of a checkpoint: its scalars, and the length and sha256 of each of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

FORMAT = 1
MANIFEST = "manifest.json"
# Limits for a file that may be damaged or hostile. A usual manifest has 2 kB, and one file for each rank.
MANIFEST_BYTES = 64 << 20
MOST_FILES = 1 << 20
MOST_STEPS = 1 << 53
MOST_BYTES = 1 << 60


_SHA256 = (is_sha256, "64 hexadecimal digits")
_ENTRIES: Checks = {
    "sha256": _SHA256,
    "files": (lambda value: isinstance(value, list) and len(value) <= MOST_FILES, f"a list of at most {MOST_FILES:,}"),
    "step": (lambda value: is_whole_number(value, 0, MOST_STEPS), f"a whole number from 0 to {MOST_STEPS:,}"),
    "scalars": (is_object, "an object"),
}
_FILE_ENTRIES: Checks = {
    # A name with a slash would let a manifest read files outside its folder.
    "name": (lambda value: is_plain_name(value) and value != MANIFEST, "a plain name of a file"),
    "bytes": (lambda value: is_whole_number(value, 0, MOST_BYTES), f"a whole number from 0 to {MOST_BYTES:,}"),
    "sha256": _SHA256,
}


@dataclass(frozen=True)
class FileEntry:
    """One file of tensors: its name in the checkpoint, its length in bytes, and its sha256."""

    name: str
    length: int
    sha256: str

    def expect_length(self, length: int, where: str) -> None:
        """Checks the file's length before its bytes are read. Raises CheckpointError."""
        if length != self.length:
            raise CheckpointError(f"{self.name} is torn: {length} of {self.length} bytes", where=where)

    def check(self, data: bytes, where: str) -> None:
        """Checks the file's bytes against length and sha256. Raises CheckpointError."""
        self.expect_length(len(data), where)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise CheckpointError(f"{self.name} is damaged: its sha256 is another", where=where)


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`: the step, the scalars given to `save`, and the files of tensors."""

    step: int
    scalars: dict[str, Any]
    files: tuple[FileEntry, ...]

    def to_json(self) -> bytes:
        """Returns the bytes of `manifest.json`, with its checksum."""
        tree: dict[str, Any] = {"format": FORMAT, "step": self.step, "scalars": self.scalars}
        tree["files"] = [{"name": file.name, "bytes": file.length, "sha256": file.sha256} for file in self.files]
        # Last, since it covers all other entries.
        tree["sha256"] = _digest(tree)
        return json.dumps(tree, indent=1).encode()

    @staticmethod
    def from_json(data: bytes, where: str) -> Manifest:
        """Parses `manifest.json`. Raises CheckpointError that names the damaged entry, or the later format."""
        try:
            tree = parse_object(data)
            # The format is looked at before the checksum, so that a later version is named as such.
            expect_entries(tree, {"format": (is_whole_number, "a whole number")})
            if tree["format"] != FORMAT:
                raise CheckpointError(f"its format is {tree['format']}, this version reads {FORMAT}", where=where)
            expect_entries(tree, _ENTRIES)
            if tree["sha256"] != _digest({name: value for name, value in tree.items() if name != "sha256"}):
                raise JsonError("its sha256 is another")
            for number, entry in enumerate(tree["files"]):
                expect_entries(entry, _FILE_ENTRIES, f"files[{number}].")
        except JsonError as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {error}", where=where) from None
        files = tuple(FileEntry(one["name"], one["bytes"], one["sha256"]) for one in tree["files"])
        if len({file.name for file in files}) < len(files):
            raise CheckpointError(f"{MANIFEST} names a file twice", where=where)
        return Manifest(tree["step"], tree["scalars"], files)


def copy_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Copies scalars through JSON, so that they come back from a manifest as they are here.

    Raises:
        CheckpointError: a manifest with them could not be read.
        TypeError: they are not JSON.
    """
    text = json.dumps(dict(scalars))
    try:
        # The manifest that will hold them is one level deeper.
        found = parse_object(text, depth=DEPTH - 1)
    except JsonError as error:
        raise CheckpointError(f"the scalars cannot be saved: {error}", fix="Save them otherwise.") from None
    if len(text) > MANIFEST_BYTES // 4:
        raise CheckpointError(f"the scalars cannot be saved: they have {len(text):,} characters", fix="Save tensors.")
    return found


def _digest(tree: Mapping[str, Any]) -> str:
    """Computes the sha256 of a manifest without its own `sha256`."""
    # A flipped digit leaves valid JSON, so the manifest needs a checksum of its own.
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
