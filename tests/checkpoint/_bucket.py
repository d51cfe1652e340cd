"""bucket:///FOLDER: an object store for fsspec, kept in a folder, with the manners of the real ones.

There are no folders, only objects whose names have slashes in them; an object is there whole or not at all; uploading
takes time, and may fail in the middle. Importing this file makes fsspec know it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

PIECE_BYTES = 1000


class Bucket(AbstractFileSystem):
    """`fault` is called before every call with its name and path, and in an upload before every piece ("piece")."""

    protocol = "bucket"
    cachable = False
    fault: Callable[[str, str], None] = staticmethod(lambda method, path: None)
    calls: list[tuple[str, str]] = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("bucket://").rstrip("/") or "/"

    def _begin(self, method: str, path: str) -> Path:
        path = self._strip_protocol(path)
        type(self).calls.append((method, path))
        type(self).fault(method, path)
        return Path(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        folder = self._begin("ls", path)
        inside = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []
        found = [one for one in inside if one.is_file() or any(inner.is_file() for inner in one.rglob("*"))]
        found = [one for one in found if not one.name.startswith("upload.")]
        if not found:
            raise FileNotFoundError(path)
        entries = [
            {"name": str(inner), "size": inner.stat().st_size, "type": "file" if inner.is_file() else "directory"}
            for inner in found
        ]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        file = self._begin("info", path)
        if not file.is_file():
            raise FileNotFoundError(path)
        found = file.stat()
        return {"name": str(file), "size": found.st_size, "type": "file", "ETag": f"{found.st_mtime_ns}"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._begin("cat_file", path).read_bytes()[start:end]

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self._store(self._begin("pipe_file", path), value)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self._store(self._begin("put_file", rpath), Path(lpath).read_bytes())

    def rm_file(self, path: str) -> None:
        self._begin("rm_file", path).unlink()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._begin("makedirs", path)

    def _store(self, file: Path, data: bytes) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"upload.{secrets.token_hex(8)}")  # which no listing shows
        try:
            with part.open("wb") as out:
                for start in range(0, len(data), PIECE_BYTES):
                    type(self).fault("piece", str(file))
                    out.write(data[start : start + PIECE_BYTES])
            os.replace(part, file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


fsspec.register_implementation("bucket", Bucket, clobber=True)
