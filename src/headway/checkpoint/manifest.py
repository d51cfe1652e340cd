"""The manifest of a checkpoint: its scalars, and the length and sha256 of each of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from headway.core.errors import CheckpointError
from headway.core.files import is_plain_name
from headway.core.untrusted_json import DEPTH, JsonError, describe_kind, is_sha256, is_whole_number, parse_object

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
# Limits for a file that may be damaged or hostile. A usual manifest has 2 kB, and one file for each rank.
MAX_MANIFEST_BYTES = 64 << 20
MAX_FILES = 1 << 20
MAX_STEP = 1 << 53
MAX_FILE_BYTES = 1 << 60


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

    def check(self, data: bytes, where: str) -> None:
        """Raises CheckpointError if the file's bytes have another length or sha256."""
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
        tree: dict[str, Any] = {"format": FORMAT_VERSION, "step": self.step, "scalars": self.scalars}
        tree["files"] = [{"name": file.name, "bytes": file.length, "sha256": file.sha256} for file in self.files]
        # Last, since it covers all other entries.
        tree["sha256"] = _compute_digest(tree)
        return json.dumps(tree, indent=1).encode()

    @staticmethod
    def from_json(data: bytes, where: str) -> Manifest:
        """Parses `manifest.json`. Raises CheckpointError if an entry is damaged or the format is a later one."""
        try:
            tree = parse_object(data)
        except JsonError as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {error}", where=where) from None
        entries = _Entries(tree, "", where)
        # The format is checked before the checksum, so that a later version is named as such.
        version = entries.get_whole("format", 0, MAX_STEP)
        if version != FORMAT_VERSION:
            raise CheckpointError(f"its format is {version}, this version reads {FORMAT_VERSION}", where=where)
        sha256 = entries.get_digest("sha256")
        if sha256 != _compute_digest({name: value for name, value in tree.items() if name != "sha256"}):
            raise CheckpointError(f"{MANIFEST} is damaged: its sha256 is another", where=where)
        trees = enumerate(entries.get_list("files"))
        files = tuple(_parse_file(tree, f"files[{index}]", where) for index, tree in trees)
        # Two entries for one file could differ in length and sha256.
        if len({file.name for file in files}) < len(files):
            raise CheckpointError(f"{MANIFEST} names a file twice", where=where)
        return Manifest(entries.get_whole("step", 0, MAX_STEP), entries.get_object("scalars"), files)


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


def _parse_file(tree: Any, path: str, where: str) -> FileEntry:
    if not isinstance(tree, dict):
        raise CheckpointError(f"{MANIFEST} has {describe_kind(tree)} as {path}, not an object", where=where)
    entries = _Entries(tree, f"{path}.", where)
    name = entries.get("name")
    # A name with a slash would let a manifest read files outside its folder.
    if not is_plain_name(name) or name == MANIFEST:
        what = f"{MANIFEST} has {name!r:.100} as {path}.name, which is no plain name of a file"
        raise CheckpointError(what, where=where)
    return FileEntry(name, entries.get_whole("bytes", 0, MAX_FILE_BYTES), entries.get_digest("sha256"))


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
        description = f"a whole number from {low:,} to {high:,}"
        number: int = self._get_valid(name, description, lambda value: is_whole_number(value, low, high))
        return number

    def get_digest(self, name: str) -> str:
        digest: str = self._get_valid(name, "64 hexadecimal digits", is_sha256)
        return digest

    def get_object(self, name: str) -> dict[str, Any]:
        tree: dict[str, Any] = self._get_valid(name, "an object", lambda value: isinstance(value, dict))
        return tree

    def get_list(self, name: str) -> list[Any]:
        description = f"a list of at most {MAX_FILES:,}"
        entries: list[Any] = self._get_valid(
            name, description, lambda value: isinstance(value, list) and len(value) <= MAX_FILES
        )
        return entries

    def _get_valid(self, name: str, description: str, is_valid: Callable[[Any], bool]) -> Any:
        """Returns an entry. Raises CheckpointError if it is missing or not valid."""
        value = self.get(name)
        if not is_valid(value):
            # A damaged or hostile entry may be megabytes long, so the message quotes only its beginning.
            shown = repr(value)[:100] if type(value) in (int, float, str) else describe_kind(value)
            what = f"{MANIFEST} has {shown} as {self._path}{name}, not {description}"
            raise CheckpointError(what, where=self._where)
        return value


def _compute_digest(tree: Mapping[str, Any]) -> str:
    """Returns the sha256 of a manifest without its own `sha256`."""
    # A flipped digit leaves valid JSON, so the manifest needs a checksum of its own.
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
