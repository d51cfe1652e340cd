"""The place of a store's shards: its own folder, or an address such as s3://bucket/cars.

A store whose shards lie at an address has a file `objects.json` with it. Columns name shards as those of other stores
do, so a version is the same wherever its shards lie:

    STORE/versions/ID/train/columns.safetensors   names ../../../objects/sha256/ab/abcd....rec
    s3://bucket/cars/sha256/ab/abcd....rec        has its bytes
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple, final

from headway.core.errors import DataError
from headway.core.files import describe_os_error, read_text
from headway.core.untrusted_json import JsonError, is_sha256, parse_object
from headway.data.columns import Shard
from headway.data.store_address import OBJECTS
from headway.storage.addresses import is_url

OBJECTS_FILE = "objects.json"
OBJECTS_FOLDER, DIGESTS_FOLDER = OBJECTS.split("/")
EXTENSION = ".rec"


@final
class ObjectsAddress(NamedTuple):
    """Facts in `objects.json`."""

    address: str
    """URL, with the folder `sha256` in it."""
    inode: int
    """Number of the file in its file system: a copy of the store has another one."""
    owner: str
    """Random text that the address has too, as long as no other folder has taken the shards."""


def read_objects_address(store: Path) -> ObjectsAddress | None:
    """Returns the address of a store's shards; None: they lie in its folder. Raises DataError if it cannot be read."""
    path = store / OBJECTS_FILE
    try:
        facts = parse_object(read_text(path))
        place = ObjectsAddress(facts["address"], facts["inode"], facts["owner"])
        if not isinstance(place.address, str) or not is_url(place.address):
            raise JsonError("it has no address")
        if not isinstance(place.inode, int) or not isinstance(place.owner, str):
            raise JsonError("it has no owner")
        return place
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else "its address is missing"
        what = f"the address of the shards cannot be read ({reason})"
        raise DataError(what, where=str(path), fix="Restore it from a copy of the store.") from error


@final
class RemoteObjects(NamedTuple):
    """Shards of a version that lie at an address."""

    address: str
    home: Path
    """The folder `objects` of the store, which has what is known of them."""
    shards: tuple[Shard, ...]
    """The shards, with their names at the address."""


def find_remote_objects(folder: Path, shards: tuple[Shard, ...]) -> RemoteObjects | None:
    """Returns the place of a version's shards if they lie at an address; otherwise None.

    Args:
        folder: names of shards are relative to it.
        shards: as the columns name them.

    Raises:
        DataError: the address cannot be read.
    """
    # Only shards of a store have numbers of their own.
    if not shards or shards[0].pack_id is None:
        return None
    # Links first: what is above a link is not what is above its target.
    root = os.path.realpath(folder)
    home = Path(os.path.normpath(os.path.join(root, shards[0].name))).parent.parent.parent
    if home.name != OBJECTS_FOLDER or (place := read_objects_address(home.parent)) is None:
        return None
    return RemoteObjects(place.address, home, tuple(map(name_remotely, shards)))


def name_remotely(shard: Shard) -> Shard:
    """Returns a shard with its name at the address of the shards. Raises DataError if its name is no SHA-256."""
    name = PurePosixPath(shard.name).name
    # The cache folder has files with these names, which must stay inside it.
    if not is_sha256(name.removesuffix(EXTENSION)):
        raise DataError(f"{shard.name!r:.200} is not the name of a shard", fix="Restore the store from a copy.")
    return replace(shard, name=build_object_name(name.removesuffix(EXTENSION)))


def build_object_name(digest: str) -> str:
    """Returns the name of a shard at the address, by the SHA-256 of its bytes."""
    return f"{DIGESTS_FOLDER}/{digest[:2]}/{digest}{EXTENSION}"
