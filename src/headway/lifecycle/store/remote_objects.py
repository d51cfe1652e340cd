"""Objects of a store at an address, such as s3://bucket/cars: metadata stay on this machine, and shards do not.

    STORE/objects.json                        the address
    STORE/objects/sha256/ab/abcd....remote    note: the shard is there, whole; its text is the size in bytes
    STORE/objects/sha256/ab/abcd....left      the shard may be there, and has no note: an upload was killed, or the
                                              garbage collection has removed the note
    s3://bucket/cars/sha256/ab/abcd....rec    the shard
    s3://bucket/cars/headway-store.json       claim: names the only store that may upload and delete here

Addresses differ in whether a file that is being uploaded can be seen, and in the times that they give. So nothing is
concluded from a listing: an object is there when its note is, which is written after the upload. For one object, only
one process at a time uploads or deletes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, final

from headway.core.errors import DataError, HeadwayError, UsageError
from headway.core.files import describe_os_error, read_text, sync_folder, write_atomically
from headway.core.untrusted_json import parse_object
from headway.data.store_address import OBJECTS
from headway.data.store_objects import OBJECTS_FILE, ObjectsAddress, build_object_name, read_objects_address
from headway.lifecycle.store.objects import Objects, get_object_path
from headway.lifecycle.store.shard_objects import STAGING, lock_name
from headway.storage.addresses import is_url, redact_url
from headway.storage.remote_folder import RemoteFolder
from headway.storage.writable_folder import WritableFolder

NOTE, LEFT = ".remote", ".left"
CLAIM_FILE = "headway-store.json"
_CONTENT = "shards of the store"
_PIECE_BYTES = 8 << 20
_MAX_NOTE_BYTES = 100
_MAX_CLAIM_BYTES = 1 << 16


def claim_address(store: Path, address: str) -> None:
    """Makes an address, or another folder, the place of a new store's shards.

    Raises:
        UsageError: another store has its shards there, or no installed package writes there.
        HeadwayError: it cannot be written.
        OSError: the store cannot be written.
    """
    address = _normalise(address)
    if address.startswith("memory:"):
        what = f"{address} is memory of the process, which ends with it"
        raise UsageError(what, fix="Name a folder, or an address such as s3://bucket/cars.")
    files = WritableFolder(address, _CONTENT)
    if _read_owner(files) is not None:
        fix = f"Choose another address. If that store is no more, delete {CLAIM_FILE} there first."
        raise UsageError("another store has its shards at this address", where=files.display_uri, fix=fix)
    files.make_folder()
    _take_shards(store, files)


def _take_shards(store: Path, files: WritableFolder) -> None:
    """Makes a folder the owner of the shards at an address. Raises HeadwayError, or OSError."""
    owner = secrets.token_hex(16)
    # First at the address: at no time do two folders own the shards.
    files.write(CLAIM_FILE, json.dumps({"store": str(store), "owner": owner}).encode())
    _write_objects_address(store, files.uri, owner)


def _read_owner(files: WritableFolder) -> str | None:
    """Returns the owner of the shards at an address; None: nobody has claimed them. Raises HeadwayError."""
    try:
        data = files.read(CLAIM_FILE, _MAX_CLAIM_BYTES)
    except FileNotFoundError:
        return None
    try:
        return str(parse_object(data)["owner"])
    # It was cut or overwritten.
    except (ValueError, KeyError):
        return ""


def expect_address(store: Path, address: str) -> None:
    """Raises UsageError unless an existing store has its shards at an address."""
    place = read_objects_address(store)
    if place is None or place.address != _normalise(address):
        at = "in its folder" if place is None else f"at {redact_url(place.address)}"
        what = f"this store has its shards {at}, and where they lie is fixed when a store is created"
        raise UsageError(what, where=str(store), fix="Leave --shards out, or create another store.")


def _normalise(address: str) -> str:
    # A folder of another disk is an address as any other: its files are copied into the cache.
    if not is_url(address):
        address = f"local://{Path(address.removeprefix('file://')).expanduser().absolute()}"
    return address.rstrip("/")


def _write_objects_address(store: Path, address: str, owner: str) -> None:
    path = store / OBJECTS_FILE
    # Only the user of the store may read a password.
    mode = 0o666 if redact_url(address) == address else 0o600
    # In place, since its number in the file system is part of it.
    with open(os.open(path, os.O_RDWR | os.O_CREAT, mode), "wb") as file:
        # Also that of a copy, which may have been made without the rights of the file.
        if mode == 0o600:
            os.fchmod(file.fileno(), mode)
        facts = ObjectsAddress(address, os.fstat(file.fileno()).st_ino, owner)
        file.write(json.dumps(facts._asdict()).encode())
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    sync_folder(store)


@final
class RemoteStoreObjects(Objects):
    """Objects at an address: each entry is a note."""

    def __init__(self, store: Path, place: ObjectsAddress) -> None:
        self._store, self._place = store, place

    @cached_property
    def _remote(self) -> RemoteFolder:
        # Opened late: some addresses connect then, and labels change without.
        return RemoteFolder(self._place.address)

    def keep(self, path: Path, digest: str) -> None:
        """Uploads the file, and leaves it in its folder by the name of the object; see `Objects.keep`."""
        note = self._find_file(digest, NOTE)
        note.parent.mkdir(parents=True, exist_ok=True)
        size = path.stat().st_size
        with lock_name(self._store, _name_lock(digest)):
            # One that is there is read and not replaced: a training may be using it.
            if not self._renew(note, digest):
                # A copy of the store must not: the store would not know of the shard, or delete it.
                self.expect_owner(is_moved=False)
                left = self._find_file(digest, LEFT)
                left.touch()
                sync_folder(note.parent)
                self._upload(path, digest, size)
                write_atomically(note, str(size))
                sync_folder(note.parent)
                left.unlink(missing_ok=True)
        sync_folder(note.parent.parent)
        os.replace(path, path.with_name(get_object_path(self._store, digest).name))

    def measure(self, digest: str) -> int | None:
        """Reads the note; see `Objects.measure`."""
        try:
            return int(read_text(self._find_file(digest, NOTE), _MAX_NOTE_BYTES))
        except (OSError, ValueError):
            return None

    def list_entries(self) -> Iterator[Path]:
        """Yields the notes; see `Objects.list_entries`."""
        yield from sorted((self._store / OBJECTS).glob(f"??/*{NOTE}"))

    def remove_entry(self, entry: Path, trash: Path) -> None:
        """Marks the shard as left; see `Objects.remove_entry`."""
        os.rename(entry, entry.with_suffix(LEFT))

    def sweep(self) -> None:
        """Deletes shards without a note from the address; see `Objects.sweep`."""
        files: WritableFolder | None = None
        for left in sorted((self._store / OBJECTS).glob(f"??/*{LEFT}")):
            # Who uploads it holds the lock until its note is there.
            with lock_name(self._store, _name_lock(left.stem), wait=False) as is_locked:
                if not is_locked:
                    continue
                if not left.with_suffix(NOTE).exists():
                    files = files or WritableFolder(self._place.address, _CONTENT)
                    files.delete(build_object_name(left.stem))
                left.unlink(missing_ok=True)

    def expect_owner(self, *, is_moved: bool) -> None:
        """Raises UsageError if another folder owns the shards, and HeadwayError if the address cannot be reached."""
        files = WritableFolder(self._place.address, _CONTENT)
        if is_moved:
            _take_shards(self._store, files)
            return
        moved = "run headway dataset gc --moved on this one."
        fix = f"Use the store that has them. If that is no more, {moved}"
        if (self._store / OBJECTS_FILE).stat().st_ino != self._place.inode:
            what = f"this folder is a copy of a store, and both have their shards at {files.display_uri}"
            raise UsageError(what, where=str(self._store), fix=fix)
        if (owner := _read_owner(files)) is None:
            what = f"{CLAIM_FILE}, which names the store that has the shards, is missing at {files.display_uri}"
            fix = f"Check that the disk is mounted, or the bucket the right one. If the file was deleted, {moved}"
            raise UsageError(what, where=str(self._store), fix=fix)
        # Two stores were created at once, or a copy has taken them.
        if owner != self._place.owner:
            what = f"another store has taken the shards at {files.display_uri}"
            raise UsageError(what, where=str(self._store), fix=fix)

    def read(self, digest: str, start: int, length: int) -> bytes:
        """Fetches bytes of the shard; see `Objects.read`."""
        size = self._expect_size(digest)
        return self._remote.read(build_object_name(digest), start, max(0, min(length, size - start))).tobytes()

    @contextmanager
    def open(self, digest: str) -> Iterator[memoryview]:
        """Fetches the shard into a file without a name, and maps it; see `Objects.open`."""
        size = self._expect_size(digest)
        folder = self._store / STAGING
        with ExitStack() as opened:
            with _explain_write_errors(folder, size):
                # Some copies lack empty folders.
                folder.mkdir(exist_ok=True)
                file = opened.enter_context(tempfile.TemporaryFile(dir=folder))
            for piece in self._fetch(digest, size):
                with _explain_write_errors(folder, size):
                    file.write(piece)
                    # A full disk is noticed here, and not when the file is closed.
                    file.flush()
            yield opened.enter_context(_map(file, size))

    def _expect_size(self, digest: str) -> int:
        if (size := self.measure(digest)) is None:
            what = f"the shard {digest} is missing: the store has no note of it"
            raise DataError(what, where=self._remote.display_uri, fix="Restore the store from a copy.")
        return size

    def _fetch(self, digest: str, size: int) -> Iterator[memoryview]:
        """Yields the bytes of a shard. Raises DataError if it is missing, or has another size."""
        name = build_object_name(digest)
        remote = self._remote.reopen({name: size})
        try:
            for start in range(0, size, _PIECE_BYTES):
                yield remote.read(name, start, min(_PIECE_BYTES, size - start)).data
        finally:
            remote.close()

    def _renew(self, note: Path, digest: str) -> bool:
        """Returns True if the shard is there and sound; its note says then that somebody is about to use it."""
        try:
            # Before the shard is read, which takes long, so that the garbage collection leaves it.
            os.utime(note)
        except FileNotFoundError:
            return False
        # A collection may have chosen it just before.
        return self._is_sound(digest) and note.exists()

    def _is_sound(self, digest: str) -> bool:
        """Returns True if the shard at the address has the bytes of its name."""
        found = hashlib.sha256()
        try:
            for piece in self._fetch(digest, self._expect_size(digest)):
                found.update(piece)
        # Missing, or of another size.
        except DataError:
            return False
        return found.hexdigest() == digest

    def _upload(self, path: Path, digest: str, size: int) -> None:
        name = build_object_name(digest)
        files = WritableFolder(self._place.address, _CONTENT)
        files.make_folder(name.rpartition("/")[0])
        files.upload(path, name)
        # A fresh folder: an earlier version of the file may be known to this one.
        remote = RemoteFolder(self._place.address)
        try:
            found = remote.read_version(name).size
        except FileNotFoundError:
            found = 0
        finally:
            remote.close()
        if found != size:
            what = f"the uploaded shard has {found:,} bytes there, and {size:,} here"
            raise HeadwayError(what, where=f"{files.display_uri}/{name}", fix="Make the change again.")

    def _find_file(self, digest: str, extension: str) -> Path:
        return get_object_path(self._store, digest).with_suffix(extension)


def _name_lock(digest: str) -> str:
    # No data set has such a name. 256 locks are enough: who waits only does so for an upload.
    return f".objects-{digest[:2]}"


@contextmanager
def _explain_write_errors(folder: Path, size: int) -> Iterator[None]:
    """Raises HeadwayError where a shard cannot be written into a folder of the store."""
    try:
        yield
    except OSError as error:
        what = f"a shard cannot be kept while it is read ({describe_os_error(error)})"
        fix = f"Make room for {size:,} bytes, and check that you may write there."
        raise HeadwayError(what, where=str(folder), fix=fix) from error


@contextmanager
def _map(file: IO[bytes], size: int) -> Iterator[memoryview]:
    """Maps a file that nobody else has."""
    if not size:
        yield memoryview(b"")
        return
    mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    with memoryview(mapped) as view:
        yield view
