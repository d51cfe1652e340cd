"""Plans a pack: its sets, the samples of each, and their order."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.data.formats.pack_source import PackSource
from headway.data.pack_mode import ImageEncoder
from headway.data.store_address import is_store_address

MAX_PARTS = 10_000


@final
@dataclass(frozen=True, kw_only=True)
class PackPart:
    """One of `count` parts of a pack, `index` of 1 to `count`; `str` of it is the text that `parse` reads."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count <= MAX_PARTS:
            what = f"there is no part {self.index} of {self.count}"
            raise UsageError(what, fix=f"Number the parts from 1, as in 1/16 to 16/16; at most {MAX_PARTS:,}.")

    @staticmethod
    def parse(text: str) -> PackPart:
        """Parses a part such as `3/16`. Raises UsageError if the text is none."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and max(len(index), len(count)) < 10):
            raise UsageError(f"{text!r} is not a part", fix="Write its number and how many there are, as in 3/16.")
        return PackPart(index=int(index), count=int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def number(self) -> str:
        """The index, with as many digits as `count` has, so that names sort as numbers do."""
        return f"{self.index:0{len(str(self.count))}d}"

    @property
    def folder_name(self) -> str:
        """Name of the folder of this part."""
        return f"part-{self.number}-of-{self.count}"

    def take(self, length: int) -> slice:
        """Returns the entries of this part in a list of `length`; those of all parts make up the list, in order."""
        return slice((self.index - 1) * length // self.count, self.index * length // self.count)


@final
@dataclass(frozen=True, kw_only=True)
class PackJob:
    """Settings that all sets of one pack share."""

    source: str
    """The source, as the user named it."""
    format: str
    encoder: ImageEncoder
    transform: str
    """Name of the user's transform; empty if there is none."""
    threads: int
    shard_bytes: int
    skip_bad: bool
    sets: tuple[str, ...]
    """Names of the sets if there are two, else empty."""
    part: PackPart | None
    """The part of each set that is packed; None is all of it."""
    options: Mapping[str, str]
    """Options of `headway pack` that shape the data and are not the default ones, such as `--split`, and the text of
    each; a flag has an empty one."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SetPlan:
    """One data set to be written: `ids` are the samples of `source` in it, in the order in which they are stored."""

    name: str
    source: PackSource
    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    """Size of each image in its source in bytes, in the order of `ids`; 0 if it cannot be read. int64 [n]."""
    name_prefix: str = ""
    """Prefix of a sample's name in lists of bad images."""
    first: int = 0
    """Number of the first of `ids` in the whole set."""
    whole: SetPlan | None = None
    """The whole set; None if this is it."""

    @property
    def names(self) -> list[str]:
        """Names of the samples, in the order of `ids`."""
        return [self.source.names[sample] for sample in self.ids]

    @functools.cached_property
    def labels(self) -> NDArray[Any]:
        """Labels of the samples, in the order of `ids`."""
        return self.source.labels[self.ids]

    def take_part(self, part: PackPart) -> SetPlan:
        """Returns the plan of one part of this set."""
        entries = part.take(len(self.ids))
        return replace(self, ids=self.ids[entries], sizes=self.sizes[entries], first=entries.start, whole=self)

    def compute_pack_id(self, job: PackJob) -> int:
        """Returns a 64-bit hash of the names, labels and sizes of the whole set's samples, and of the settings."""
        # All parts of a set have the number of the whole, which tells apart those that do not belong together.
        if self.whole:
            return self.whole.compute_pack_id(job)
        settings = [str(job.encoder.mode), job.format, job.transform, job.encoder.orient]
        digest = hashlib.sha256(json.dumps([settings, self.source.classes, self.names]).encode())
        # Labels and sizes tell packs of the same names apart.
        digest.update(self.labels.tobytes())
        digest.update(self.sizes.tobytes())
        return int.from_bytes(digest.digest()[:8])


def plan_sets(
    src: str, train: PackSource, evaluation: PackSource | None, eval_fraction: float, seed: int
) -> list[SetPlan]:
    """Returns the sets of a pack: all samples as one set, the given train and eval, or a fraction split off for eval.

    Args:
        src: name of the source, for messages.
        train: the source, or its training set.
        evaluation: the evaluation set of the source; None if it has none.
        eval_fraction: fraction of the samples of each class that is split off; 0 splits off nothing.
        seed: of the order in which the samples are stored.

    Raises:
        UsageError: the source has an evaluation set already, or the fraction leaves a class without training images.
        DataError: the two sets have different classes.
    """
    order = _order_by_hash(train, seed)
    if evaluation is None and eval_fraction == 0:
        return [_build_plan("", train, order)]
    if evaluation is None:
        # Both sets keep the hashed order, so each stretch of a shard is a fair mixture.
        is_evaluation = _choose_evaluation(train, order, eval_fraction, src)
        return [_build_plan("train", train, order[~is_evaluation]), _build_plan("eval", train, order[is_evaluation])]
    names = [os.path.basename(one.root) for one in (train, evaluation)]
    if eval_fraction > 0:
        first = f"{src}/{names[0]}" if is_store_address(src) else train.root
        fix = f"Leave --split out, or pack {first} alone."
        raise UsageError(f"the source already has an evaluation set, {names[1]}", where=src, fix=fix)
    # If classes are numbers, one of the sets may lack the last ones, so the longer list holds for both.
    if _is_numbered(train.classes) and _is_numbered(evaluation.classes):
        classes = max(train.classes, evaluation.classes, key=len)
        train, evaluation = replace(train, classes=classes), replace(evaluation, classes=classes)
    if train.classes != evaluation.classes:
        differences = [
            f"only in {name}: {', '.join(sorted(set(first.classes) - set(second.classes)))}"
            for name, first, second in ((names[0], train, evaluation), (names[1], evaluation, train))
            if set(first.classes) - set(second.classes)
        ]
        raise DataError(
            f"the classes of eval and train differ ({'; '.join(differences)})",
            where=src,
            fix="Give both the same class folders.",
        )
    return [
        _build_plan("train", train, order, f"{names[0]}/"),
        _build_plan("eval", evaluation, _order_by_hash(evaluation, seed), f"{names[1]}/"),
    ]


def _is_numbered(classes: tuple[str, ...]) -> bool:
    return classes == tuple(map(str, range(len(classes))))


def _build_plan(name: str, source: PackSource, ids: NDArray[np.int64], name_prefix: str = "") -> SetPlan:
    return SetPlan(name=name, source=source, ids=ids, sizes=source.images.measure_sizes()[ids], name_prefix=name_prefix)


def _order_by_hash(source: PackSource, seed: int) -> NDArray[np.int64]:
    """Returns all samples, sorted by a hash of seed and name."""
    # A hash of the name, not a shuffle of numbers: adding a file leaves the order of the others.
    hashes = b"".join(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest() for name in source.names)
    return np.argsort(np.frombuffer(hashes, "<u8"), kind="stable").astype(np.int64)


def _choose_evaluation(
    source: PackSource, order: NDArray[np.int64], eval_fraction: float, src: str
) -> NDArray[np.bool_]:
    """Returns a mask of the entries of `order` that go to the evaluation set; bool [n].

    These are the first round(eval_fraction x n) samples of each class, and at least 1 of a class of 2 or more.
    """
    has_classes = source.label_kind == "class"
    groups = source.labels[order] if has_classes else np.zeros(len(order), np.int64)
    counts = np.bincount(groups, minlength=len(source.classes) if has_classes else 1)
    # Halves are rounded up; numpy's rint would round them to even numbers.
    num_evaluation = np.maximum(np.floor(eval_fraction * counts + 0.5).astype(np.int64), counts >= 2)
    if (emptied := np.flatnonzero((num_evaluation >= counts) & (counts > 0))).size:
        name = f"class {source.classes[emptied[0]]!r}, of {counts[emptied[0]]} images," if has_classes else "the set"
        raise UsageError(
            f"a split of {eval_fraction:g} would leave {name} without a training image",
            where=src,
            fix="Split off less.",
        )
    # A class of one image stays in the training set.
    if not num_evaluation.any():
        raise UsageError("no class has two images, so none can be split off", where=src, fix="Leave --split out.")
    by_group = np.argsort(groups, kind="stable")
    # Index of a sample within its class, in hashed order.
    rank_in_class = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_evaluation = np.zeros(len(order), np.bool_)
    is_evaluation[by_group] = rank_in_class < np.repeat(num_evaluation, counts)
    return is_evaluation
