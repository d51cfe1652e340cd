"""Damage to JSON trees and to bytes, the same for the same random generator."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 10**30, 10**400, 0.5, -1e308),
    *(float("nan"), float("inf"), "", "x", "\0", "../../etc/passwd", "/dev/zero", "\x1b[2J", "\ud800", "a" * 5000),
    *([], {}, [[]], [1], ["x"], {"x": 1}, [[1, 2], [3]], [None] * 50),
)
"""Values that checks forget."""


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += _places(value, (*path, key))
    return found


def damage_tree(random: Random, tree: Any) -> Any:
    """A copy of a JSON tree in which one to three entries are odd, gone, doubled, nested or swapped with another."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 2, 3))):
        places = _places(tree)
        if not places:
            return random.choice(ODD)
        *way, key = random.choice(places)
        holder = tree
        for step in way:
            holder = holder[step]
        how = random.randrange(6)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif how == 2 and isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
            holder[key] += random.choice((-1, 1, 7, -(2**32), 2**40))
        elif how == 3:
            holder[key] = [holder[key]]
        elif how == 4 and isinstance(holder, dict):
            holder[random.choice(list(holder))] = copy.deepcopy(holder[key])
        else:
            holder[key] = copy.deepcopy(random.choice(ODD))
    return tree


def damage_bytes(random: Random, data: bytes) -> bytes:
    """Some bytes with bits flipped, cut out, doubled, or in the place of others."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        at, size = random.randrange(len(out) + 1), random.choice((1, 2, 8, 64))
        how = random.randrange(5)
        if how == 0 and at < len(out):
            out[at] ^= 1 << random.randrange(8)
        elif how == 1:
            del out[at : at + size]
        elif how == 2:
            out[at:at] = out[at : at + size]
        elif how == 3:
            out[at : at + size] = random.randbytes(size)
        else:
            out[at:at] = random.choice((b"[" * 3000, b'{"a":' * 3000, b"9" * 6000, b"\xff\xfe", b"\n", b'"'))
    return bytes(out)


def encode(tree: Any) -> bytes:
    """JSON as a stranger may write it: with NaN, and characters that are none."""
    return json.dumps(tree).encode("utf-8", "surrogatepass")
