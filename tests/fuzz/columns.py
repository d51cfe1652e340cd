"""Packs whose columns file is damaged: its header, its description, its columns."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
from tests.data import _packs as packs
from tests.fuzz.damage import damage_bytes, damage_tree, encode

from headway.data import opening
from headway.data.columns import COLUMNS_FILE
from headway.data.pack import pack


@contextlib.contextmanager
def target(folder: Path) -> Iterator[Callable[[Random], None]]:
    pack(packs.folder(folder / "images", {"a": 5, "b": 4}), folder / "packed", threads=1)
    path = folder / "packed" / COLUMNS_FILE
    good = path.read_bytes()
    (length,) = struct.unpack_from("<Q", good)
    header, rest = json.loads(good[8 : 8 + length]), good[8 + length :]

    def one(random: Random) -> None:
        how = random.randrange(4)
        if how == 0:
            tree, data = damage_tree(random, header), rest
        elif how == 1:
            described = damage_tree(random, json.loads(header["__metadata__"]["headway"]))
            tree, data = (
                header | {"__metadata__": {"headway": encode(described).decode("utf-8", "surrogatepass")}},
                rest,
            )
        else:
            tree, data = header, damage_bytes(random, rest) if how == 2 else rest
        text = encode(tree)
        whole = struct.pack("<Q", len(text)) + text + data
        path.unlink(missing_ok=True)  # the one before may still be mapped
        path.write_bytes(damage_bytes(random, whole) if how == 3 else whole)
        found = opening.open(folder / "packed")
        repr(found)
        n = min(len(found), 20)
        records = found.read(np.arange(n))
        _ = [len(record) for record in records], [found.name(sample) for sample in range(n)], found.pixel_bytes
        found.close()

    yield one
