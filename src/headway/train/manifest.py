"""The manifest of a checkpoint: what there is in its files, and how to tell that it is whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class File:
    """One file of tensors: its name in the checkpoint, its length in bytes, and their sha256."""

    name: str
    length: int
    sha256: str

    def check(self, data: bytes, where: str) -> None:
        """Raises CheckpointError: these bytes are not the file's."""
        if len(data) != self.length:
            raise CheckpointError(f"{self.name} is torn: {len(data)} of {self.length} bytes", where=where)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise CheckpointError(f"{self.name} is damaged: its sha256 is another", where=where)


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds: the step, the scalars given to `save`, and the files of tensors."""

    step: int
    scalars: dict[str, Any]
    files: tuple[File, ...]

    def to_json(self) -> bytes:
        tree: dict[str, Any] = {"format": FORMAT, "step": self.step, "scalars": self.scalars}
        tree["files"] = [{"name": file.name, "bytes": file.length, "sha256": file.sha256} for file in self.files]
        tree["sha256"] = _digest(tree)
        return json.dumps(tree, indent=1).encode()

    @staticmethod
    def from_json(data: bytes, where: str) -> Manifest:
        """Raises CheckpointError: it is damaged, or of a later format. ValueError, KeyError, TypeError: no manifest."""
        tree = json.loads(data.decode("utf-8"))
        if tree["format"] != FORMAT:
            raise CheckpointError(f"its format is {tree['format']}, this version reads {FORMAT}", where=where)
        if tree.pop("sha256") != _digest(tree):
            raise CheckpointError(f"{MANIFEST} is damaged: its sha256 is another", where=where)
        names = [file["name"] for file in tree["files"]]
        if not all(isinstance(name, str) and name == os.path.basename(name) and "\0" not in name for name in names):
            raise CheckpointError(f"{MANIFEST} names files outside of the checkpoint", where=where)
        files = tuple(File(file["name"], file["bytes"], file["sha256"]) for file in tree["files"])
        return Manifest(tree["step"], tree["scalars"], files)


def _digest(tree: Mapping[str, Any]) -> str:
    """sha256 of a manifest, of all but its own `sha256`; a flipped digit would leave it good JSON."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
