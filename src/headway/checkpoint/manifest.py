"""The manifest of a checkpoint: its scalars, and the length and sha256 of each of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, final

from headway.core.errors import CheckpointError
from headway.core.files import is_plain_name
from headway.core.untrusted_json import DEPTH, JsonError, describe_kind, is_sha256, is_whole_number, parse_object

FORMAT = 1
MANIFEST = "manifest.json"
# Limits for a file that may be damaged or hostile. A usual manifest has 2 kB, and one file for each rank.
MANIFEST_BYTES = 64 << 20
MOST_FILES = 1 << 20
MOST_STEPS = 1 << 53
MOST_BYTES = 1 << 60


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
        except JsonError as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {error}", where=where) from None
        entries = _Entries(tree, "", where)
        # The format is looked at before the checksum, so that a later version is named as such.
        form = entries.get_whole("format", 0, MOST_STEPS)
        if form != FORMAT:
            raise CheckpointError(f"its format is {form}, this version reads {FORMAT}", where=where)
        sha256 = entries.get_digest("sha256")
        if sha256 != _digest({name: value for name, value in tree.items() if name != "sha256"}):
            raise CheckpointError(f"{MANIFEST} is damaged: its sha256 is another", where=where)
        files = tuple(_file(one, f"files[{number}]", where) for number, one in enumerate(entries.get_list("files")))
        if len({file.name for file in files}) < len(files):
            raise CheckpointError(f"{MANIFEST} names a file twice", where=where)
        return Manifest(entries.get_whole("step", 0, MOST_STEPS), entries.get_object("scalars"), files)


def copy_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Copies scalars through JSON, so that they come back from a manifest as they are here.

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
    if len(text) > MANIFEST_BYTES // 4:
        raise CheckpointError(f"the scalars cannot be saved: they have {len(text):,} characters", fix="Save tensors.")
    return copied


def _file(entry: Any, path: str, where: str) -> FileEntry:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{MANIFEST} has {describe_kind(entry)} as {path}, not an object", where=where)
    entries = _Entries(entry, f"{path}.", where)
    name = entries.get("name")
    # A name with a slash would let a manifest read files outside its folder.
    if not is_plain_name(name) or name == MANIFEST:
        what = f"{MANIFEST} has {name!r:.100} as {path}.name, which is no plain name of a file"
        raise CheckpointError(what, where=where)
    return FileEntry(name, entries.get_whole("bytes", 0, MOST_BYTES), entries.get_digest("sha256"))


@final
class _Entries:
    """Entries of one object in a manifest, each checked when it is read."""

    def __init__(self, tree: Mapping[str, Any], path: str, where: str) -> None:
        self._tree, self._path, self._where = tree, path, where

    def get(self, name: str) -> Any:
        if name not in self._tree:
            raise CheckpointError(f"{MANIFEST} lacks {self._path}{name}", where=self._where)
        return self._tree[name]

    def get_whole(self, name: str, low: int, high: int) -> int:
        value = self.get(name)
        if not is_whole_number(value, low, high):
            self._refuse(name, value, f"a whole number from {low:,} to {high:,}")
        number: int = value
        return number

    def get_digest(self, name: str) -> str:
        value = self.get(name)
        if not is_sha256(value):
            self._refuse(name, value, "64 hexadecimal digits")
        digest: str = value
        return digest

    def get_object(self, name: str) -> dict[str, Any]:
        value = self.get(name)
        if not isinstance(value, dict):
            self._refuse(name, value, "an object")
        entries: dict[str, Any] = value
        return entries

    def get_list(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list) or len(value) > MOST_FILES:
            self._refuse(name, value, f"a list of at most {MOST_FILES:,}")
        items: list[Any] = value
        return items

    def _refuse(self, name: str, value: Any, wanted: str) -> NoReturn:
        # A damaged or hostile entry may be megabytes long, so the message quotes only its beginning.
        shown = repr(value)[:100] if type(value) in (int, float, str) else describe_kind(value)
        raise CheckpointError(f"{MANIFEST} has {shown} as {self._path}{name}, not {wanted}", where=self._where)


def _digest(tree: Mapping[str, Any]) -> str:
    """Computes the sha256 of a manifest without its own `sha256`."""
    # A flipped digit leaves valid JSON, so the manifest needs a checksum of its own.
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
