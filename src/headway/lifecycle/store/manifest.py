"""Schema and manifest: what a version is, in one canonical text, whose SHA-256 is the ID of the version.

The text is JSON with sorted keys, without floats, and ASCII only, so that equal versions have equal bytes on every
machine. Parents, time and message are not part of it.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError, suggest_nearest
from headway.core.files import describe_os_error, read_text
from headway.core.untrusted_json import (
    JsonError,
    expect_entries,
    is_object,
    is_sha256,
    is_text,
    is_whole_number,
    parse_object,
)
from headway.data.pack_mode import PackMode
from headway.data.store_address import MANIFEST_FILE, UNLABELLED, check_name, is_name

FORMAT = 1
"""Version of the manifest; another one is refused."""
MILLION = 1_000_000
"""Shares of splits are whole millionths: floats have no canonical text."""
MAX_SPLITS = 100


@final
@dataclass(frozen=True, kw_only=True)
class Schema:
    """Facts about a data set that its creation fixes for all of its versions."""

    mode: str
    """How images are stored; see `headway.data.pack_mode`."""
    shares: tuple[tuple[str, int], ...]
    """(split, share in millionths), sorted by name; they add up to a million."""
    classes: tuple[str, ...] | None
    """The only classes that labels may have, sorted. None: the classes of a version are those that its labels have."""

    @staticmethod
    def build(mode: str, splits: Mapping[str, float], classes: Sequence[str] | None) -> Schema:
        """Checks the facts of a new data set. Raises UsageError if they are impossible."""
        if PackMode.parse(mode).kind == "raw":
            fix = "Choose keep, seekable, or a mode such as resize=256,quality=90."
            raise UsageError("a store keeps image files, and raw are pixels", where="mode", fix=fix)
        for name in splits:
            check_name(name, "split")
        if UNLABELLED in splits or not 1 <= len(splits) <= MAX_SPLITS:
            what = f"{UNLABELLED!r} is the split of samples without a label" if splits else "there is no split"
            raise UsageError(what, where="splits", fix="Name others, such as train=0.9,eval=0.1.")
        millionths = {name: round(share * MILLION) if 0 < share <= 1 else 0 for name, share in splits.items()}
        if sum(millionths.values()) != MILLION or min(millionths.values()) <= 0:
            shown = ", ".join(f"{name} {share:g}" for name, share in splits.items())
            fix = "Give each split a share above 0, such as train=0.9,eval=0.1."
            raise UsageError(f"the shares of the splits do not add up to 1: {shown}", where="splits", fix=fix)
        names = None if classes is None else tuple(sorted(normalise_label(name) for name in classes))
        if names is not None and (not names or len(set(names)) != len(names)):
            what = "a class is named twice" if names else "no class is named"
            raise UsageError(what, where="classes", fix="Name each class once, or leave classes out.")
        return Schema(mode=str(PackMode.parse(mode)), shares=tuple(sorted(millionths.items())), classes=names)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of all splits, that of the unlabelled samples last; a sample's split is a number in this list."""
        return (*(name for name, _ in self.shares), UNLABELLED)

    def find_split(self, name: str) -> int:
        """Returns the number of a split. Raises UsageError if there is none of this name."""
        if name not in self.splits:
            raise UsageError(f"the data set has no split {name!r:.80}", fix=suggest_nearest(name, self.splits))
        return self.splits.index(name)

    def choose_splits(self, names: Iterable[str]) -> NDArray[np.uint8]:
        """Returns the number of the split of each name: a function of the name's SHA-256, and of nothing else."""
        # 64 bits of the digest as a fraction of a million: the split in whose share it lies.
        digests = b"".join(hashlib.sha256(name.encode()).digest()[:8] for name in names)
        high = np.frombuffer(digests, ">u8") >> np.uint64(32)
        places = high * np.uint64(MILLION) >> np.uint64(32)
        ends = np.cumsum([share for _, share in self.shares])
        return np.searchsorted(ends, places, side="right").astype(np.uint8)

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        classes = None if self.classes is None else list(self.classes)
        return {"mode": self.mode, "shares": dict(self.shares), "classes": classes}

    @staticmethod
    def from_json(tree: Any) -> Schema:
        """Reads what `to_json` wrote. Raises JsonError if it is damaged."""
        checks = {
            "mode": (is_text, "a text"),
            "shares": (_are_shares, "shares of splits in millionths"),
            "classes": (lambda value: value is None or _is_list_of_texts(value), "a list of texts, or null"),
        }
        expect_entries(tree, checks, "schema.")
        classes = None if tree["classes"] is None else tuple(tree["classes"])
        return Schema(mode=tree["mode"], shares=tuple(sorted(tree["shares"].items())), classes=classes)


@final
@dataclass(frozen=True, kw_only=True)
class SplitContent:
    """One split of a version that has samples."""

    samples: int
    fingerprint: str
    """SHA-256 of IDs, names and labels; see `headway.data.version_columns`."""


@final
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Facts that a version consists of."""

    schema: Schema
    classes: tuple[str, ...]
    """Names of the classes, in the order of their numbers: sorted."""
    splits: Mapping[str, SplitContent]

    @property
    def samples(self) -> int:
        """Number of samples in all splits."""
        return sum(split.samples for split in self.splits.values())

    def to_bytes(self) -> bytes:
        """Returns the canonical text."""
        return self._text

    @cached_property
    def _text(self) -> bytes:
        # A commit asks for it three times.
        tree = {
            "format": FORMAT,
            "schema": self.schema.to_json(),
            "classes": list(self.classes),
            "splits": {
                name: {"samples": split.samples, "fingerprint": split.fingerprint}
                for name, split in self.splits.items()
            },
        }
        return json.dumps(tree, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()

    def compute_id(self) -> str:
        """Returns the ID of the version: SHA-256 of the canonical text."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def load_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a version's folder, and compares it with the ID. Raises DataError if it is damaged."""
    path = folder / MANIFEST_FILE
    fix = "Restore the store from a copy: headway dataset verify lists what is damaged."
    try:
        text = read_text(path)
        tree = parse_object(text)
        expect_entries(tree, _ENTRIES)
        splits = {}
        for name, split in tree["splits"].items():
            expect_entries(split, _SPLIT_ENTRIES, f"splits.{name}.")
            splits[name] = SplitContent(samples=split["samples"], fingerprint=split["fingerprint"])
        schema = Schema.from_json(tree["schema"])
        manifest = Manifest(schema=schema, classes=tuple(tree["classes"]), splits=splits)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"it cannot be read ({describe_os_error(error)})", where=str(path), fix=fix) from error
    except JsonError as error:
        raise DataError(f"the manifest is damaged: {error}", where=str(path), fix=fix) from None
    if manifest.compute_id() != folder.name:
        raise DataError("the manifest does not have the ID of its version", where=str(path), fix=fix)
    return manifest


def normalise_label(label: str) -> str:
    """Returns a label in Unicode's composed form without blanks at its ends. Raises UsageError if nothing is left."""
    text = unicodedata.normalize("NFC", label).strip()
    if not text or not text.isprintable():
        raise UsageError(f"{label!r:.80} is not the name of a class", fix="Give every label a name that can be read.")
    return text


def normalise_name(name: str) -> str:
    """Returns a sample's name in Unicode's composed form.

    Raises UsageError if it leads out of its folder or cannot be written: absolute, `..`, control characters.
    """
    text = unicodedata.normalize("NFC", name)
    parts = text.split("/")
    if not text.isprintable() or "\\" in text or len(text.encode()) > 1024 or {"", ".", ".."} & set(parts):
        fix = "Use a relative path of at most 1,024 bytes, such as cat/0001.jpg."
        raise UsageError(f"{name!r:.120} cannot be the name of a sample", fix=fix)
    return text


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _are_shares(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and 1 <= len(value) <= MAX_SPLITS
        # Splits are folders, and the manifest may come from anywhere.
        and all(is_name(name) and is_whole_number(share, 1, MILLION) for name, share in value.items())
        and sum(value.values()) == MILLION
    )


_ENTRIES = {
    "format": (lambda value: value == FORMAT, f"{FORMAT}, the format that this version of Headway reads"),
    "schema": (is_object, "an object"),
    "classes": (_is_list_of_texts, "a list of texts"),
    "splits": (is_object, "an object"),
}
_SPLIT_ENTRIES = {
    "samples": (lambda value: is_whole_number(value, 1), "a number of samples"),
    "fingerprint": (is_sha256, "64 hexadecimal digits"),
}
