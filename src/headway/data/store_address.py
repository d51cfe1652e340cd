"""Addresses of data sets in a store: `store:NAME`, `store:NAME@VERSION`, `store:NAME@VERSION/SPLIT`.

A store is a folder of shards that all versions of its data sets share. `headway.lifecycle.store` writes it; this file
finds a version, so that everything that opens data sets can read one:

    objects/sha256/ab/abcd....rec        a shard, named by the SHA-256 of its bytes
    versions/ID/manifest.json            what the version is; ID is the SHA-256 of this file
    versions/ID/SPLIT/columns.safetensors  an ordinary columns file, whose shards lie in objects/
    store.db                             SQLite: names, histories and tags
"""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from headway.core.errors import DataError, UsageError, suggest_nearest
from headway.core.mounts import is_on_network
from headway.data.columns import COLUMNS_FILE

PREFIX = "store:"
DATABASE = "store.db"
VERSIONS = "versions"
OBJECTS = "objects/sha256"
MANIFEST_FILE = "manifest.json"
TRAIN, EVAL = "train", "eval"
UNLABELLED = "unlabelled"
"""The split of samples that have no label yet."""
STORE_VARIABLE = "HEADWAY_STORE"
"""Environment variable with the folder of the store, for addresses that name none."""
BUSY_S = 30.0
"""Seconds to wait for another process that writes. A commit takes milliseconds; a busy disk takes longer."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NUMBER = re.compile(r"v(0|[1-9][0-9]{0,8})")
_FULL_ID = re.compile(r"[0-9a-f]{64}")
_PART_OF_ID = re.compile(r"[0-9a-f]{6,64}")


def is_store_address(uri: str | os.PathLike[str]) -> bool:
    """Returns True for an address in a store, such as `store:cars@v3`."""
    return os.fspath(uri).startswith(PREFIX)


def is_service_url(text: str | os.PathLike[str]) -> bool:
    """Returns True for the address of a data service, such as `http://127.0.0.1:8080`."""
    return os.fspath(text).lower().startswith(("http://", "https://"))


def is_name(text: object) -> bool:
    """Returns True for a text that can be the name of a data set, a split or a tag; it is a safe name of a folder."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def check_name(name: str, what: str) -> None:
    """Raises UsageError unless a text can be the name of a data set, a split or a tag.

    Args:
        what: what it names, for the message.
    """
    if not is_name(name):
        fix = "Use at most 100 letters, digits, dots, dashes and underscores, with a letter or digit first."
        raise UsageError(f"{name!r:.120} cannot be the name of a {what}", fix=fix)


def is_version_text(text: str) -> bool:
    """Returns True for a text that stands for a version by itself, so that it cannot be a tag: `v3`, `1a2b3c`."""
    return bool(_NUMBER.fullmatch(text) or _PART_OF_ID.fullmatch(text))


@final
@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """A data set, a version or a split in a store; `str` of it is the text that `parse` reads."""

    name: str
    version: str = ""
    """`v3` (a number of the history), a tag, or the first 6 to 64 digits of an ID. Empty: the newest version."""
    split: str = ""
    """Empty: the split `train`."""
    folder: str = ""
    """Folder of the store. Empty: $HEADWAY_STORE."""

    @staticmethod
    def parse(text: str, *, base: Path | None = None) -> StoreAddress:
        """Parses an address, with or without `store:`.

        Args:
            base: folder that a relative folder of a store starts from; None: the current one.

        Raises:
            UsageError: it is not an address of a store on this machine.
        """
        rest = text.removeprefix(PREFIX)
        fix = "Write store:NAME, store:NAME@VERSION/SPLIT or store:FOLDER//NAME@VERSION/SPLIT."
        folder, slashes, place = rest.rpartition("//")
        if "://" in rest:
            what = "a store lies in a folder of this machine, and this is a URL"
            raise UsageError(what, where=text, fix="Copy the store here, or pack a version for other machines.")
        if slashes and not folder:
            raise UsageError("the folder of the store is missing", where=text, fix=fix)
        head, slash, split = place.partition("/")
        name, at, version = head.partition("@")
        if (at and not version) or (slash and not split):
            raise UsageError("this address ends too early", where=text, fix=fix)
        try:
            check_name(name, "data set")
            for part, what in ((version, "version"), (split, "split")):
                if part:
                    check_name(part, what)
        except UsageError as error:
            raise UsageError(error.what, where=text, fix=fix) from None
        if folder and base is not None:
            folder = str(base / Path(folder).expanduser())
        return StoreAddress(name=name, version=version, split=split, folder=folder)

    def __str__(self) -> str:
        folder = f"{self.folder}//" if self.folder else ""
        version = f"@{self.version}" if self.version else ""
        return f"{PREFIX}{folder}{self.name}{version}{f'/{self.split}' if self.split else ''}"

    def find_store(self) -> Path:
        """Returns the folder of the store. Raises UsageError if there is none."""
        return find_store(self.folder or None, str(self))

    def resolve(self) -> Path:
        """Returns the folder of the version. Raises UsageError if there is none, DataError if it is damaged."""
        store = self.find_store()
        # An ID needs no database, so it also works where SQLite does not: on a network file system.
        version = self.version if _FULL_ID.fullmatch(self.version) else find_version(store, self.name, self.version)
        folder = store / VERSIONS / version
        if not (folder / MANIFEST_FILE).is_file():
            what = "the store has no version with this ID"
            raise UsageError(what, where=str(self), fix=f"headway dataset log {self.name} lists the versions.")
        return folder

    def resolve_split(self) -> Path:
        """Returns the folder of the split, which is an ordinary packed folder. Raises as `resolve`."""
        version = self.resolve()
        split = self.split or TRAIN
        if not (version / split / COLUMNS_FILE).is_file():
            names = sorted(path.parent.name for path in version.glob(f"*/{COLUMNS_FILE}"))
            what = f"this version has no samples in the split {split!r}"
            fix = f"It has samples in: {', '.join(names)}." if names else "It has no samples at all."
            raise UsageError(what, where=str(self), fix=fix)
        return version / split

    def pin(self, default_split: str = TRAIN) -> StoreAddress:
        """Returns the same address with the ID of the version and the name of the split. Raises as `resolve`."""
        return replace(self, version=self.resolve().name, split=self.split or default_split)


def expect_folder(named: str) -> None:
    """Raises UsageError if a data service is named in place of the folder of a store."""
    if is_service_url(named):
        what = "this needs the folder of a store, and a data service is named"
        fix = "Run it on the machine of the service, with the folder that it serves; or copy the store here."
        raise UsageError(what, where=named, fix=fix)


def find_store(folder: str | os.PathLike[str] | None, where: str = "") -> Path:
    """Returns the folder of a store; None: $HEADWAY_STORE. Raises UsageError if there is none."""
    named = os.fspath(folder) if folder is not None else os.environ.get(STORE_VARIABLE, "")
    if not named:
        fix = f"Set {STORE_VARIABLE} to its folder, or write store:FOLDER//NAME."
        raise UsageError("no store is named", where=where, fix=fix)
    expect_folder(named)
    path = Path(named).expanduser()
    if not (path / DATABASE).is_file():
        fix = f"Create one with headway dataset create NAME --store {named}"
        raise UsageError("there is no store in this folder", where=str(path), fix=fix)
    return path


def connect(store: Path) -> sqlite3.Connection:
    """Opens the database of a store.

    Raises:
        UsageError: it lies on a network file system.
        DataError: it cannot be opened.
    """
    if is_on_network(store):
        what = "SQLite's locks do not work on a network file system, so names and tags cannot be read or moved there"
        fix = "Keep the store on a local disk of one machine. To only read, name a version by its full ID."
        raise UsageError(what, where=str(store), fix=fix)
    try:
        return sqlite3.connect(store / DATABASE, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise build_database_error(store, error) from error


def build_database_error(store: Path, error: sqlite3.Error) -> DataError:
    """Builds the error for a database that SQLite cannot use."""
    fix = "Check the disk and the rights of this file. headway dataset verify checks the shards and versions."
    return DataError(f"the database cannot be used ({error})", where=str(store / DATABASE), fix=fix)


def find_version(store: Path, name: str, version: str = "") -> str:
    """Returns the ID of a version of a data set.

    Args:
        version: as in `StoreAddress`.

    Raises:
        UsageError: there is no such data set or version, or an ID's first digits fit several.
        DataError: the database is damaged.
    """
    try:
        with closing(connect(store)) as database:
            return _look_up(database, name, version)
    except sqlite3.Error as error:
        raise build_database_error(store, error) from error


def _look_up(database: sqlite3.Connection, name: str, version: str) -> str:
    found = find_entry(database, name, version)
    (text,) = database.execute("SELECT version FROM entries WHERE id = ?", (found,)).fetchone()
    return str(text)


def find_entry(database: sqlite3.Connection, name: str, version: str = "") -> int:
    """Returns the number, in the table `entries`, of a version of a data set. Raises as `find_version`."""
    head = database.execute("SELECT head FROM datasets WHERE name = ?", (name,)).fetchone()
    if head is None:
        names = [row[0] for row in database.execute("SELECT name FROM datasets")]
        fix = suggest_nearest(name, names) or "Create it with headway dataset create."
        raise UsageError(f"the store has no data set {name!r}", fix=fix)
    if not version:
        return int(head[0])
    if number := _NUMBER.fullmatch(version):
        rows = database.execute(
            "SELECT id FROM entries WHERE dataset = ? AND number = ?", (name, int(number[1]))
        ).fetchall()
    else:
        rows = database.execute("SELECT entry FROM tags WHERE dataset = ? AND tag = ?", (name, version)).fetchall()
        if not rows and _PART_OF_ID.fullmatch(version):
            # Contents that came back have several entries; the newest one counts.
            rows = database.execute(
                # "g" comes after all digits. Unlike a pattern, a range is found by the index.
                "SELECT max(id) FROM entries WHERE dataset = ? AND version >= ? AND version < ? GROUP BY version",
                (name, version, f"{version}g"),
            ).fetchall()
    if len(rows) == 1:
        return int(rows[0][0])
    fix = f"headway dataset log {name} lists the versions and tags."
    what = f"several versions of {name} begin with" if rows else f"{name} has no version or tag"
    raise UsageError(f"{what} {version!r}", fix=fix)
