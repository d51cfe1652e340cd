"""Checkpoints whose manifest is damaged and then signed anew, as a stranger would."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch
from tests.fuzz.damage import damage_bytes, damage_tree, encode

from headway.checkpoint.checkpoints import Checkpoints, read
from headway.checkpoint.manifest import MANIFEST


@contextlib.contextmanager
def target(folder: Path) -> Iterator[Callable[[Random], None]]:
    path = Checkpoints(folder).save(3, {"model/w": torch.ones(3), "optimizer/w/m": torch.ones(3)}, {"position": 30})
    assert isinstance(path, Path)
    good = (path / MANIFEST).read_bytes()

    def one(random: Random) -> None:
        if random.randrange(4):
            tree = json.loads(good)
            tree.pop("sha256")
            tree = damage_tree(random, tree)
            if isinstance(tree, dict):
                tree["sha256"] = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
            (path / MANIFEST).write_bytes(encode(tree))
        else:
            (path / MANIFEST).write_bytes(damage_bytes(random, good))
        read(path)

    yield one
