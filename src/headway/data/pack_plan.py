"""What a pack is to make: its sets, which samples each has, and in which order."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError, UsageError
from headway.data.formats.pack_source import PackSource
from headway.data.pack_mode import ImageEncoder


@final
@dataclass(frozen=True, kw_only=True)
class PackJob:
    """What all sets of one pack share."""

    source: str
    """What is packed, as the user named it."""
    format: str
    encoder: ImageEncoder
    transform: str
    """The name of the user's function, or empty."""
    threads: int
    shard_bytes: int
    skip_bad: bool
    parts: tuple[str, ...]
    """Names of the sets, where there are two."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SetPlan:
    """One data set to be: `ids` are the samples of `source` in it, in the order in which they are stored."""

    name: str
    source: PackSource
    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    """Size of each image in bytes as it is now, in the order of `ids`; 0 where it cannot be read."""
    shown: str = ""
    """Put before a sample's name in lists of bad images."""

    @property
    def names(self) -> list[str]:
        return [self.source.names[sample] for sample in self.ids]

    @functools.cached_property
    def labels(self) -> NDArray[Any]:
        return self.source.labels[self.ids]

    def pack_id(self, job: PackJob) -> int:
        """64 bits of a hash of what is packed and how, known before any image is read."""
        how = [str(job.encoder.mode), job.format, job.transform, job.encoder.orient]
        digest = hashlib.sha256(json.dumps([how, self.source.classes, self.names]).encode())
        digest.update(self.labels.tobytes())
        digest.update(self.sizes.tobytes())
        return int.from_bytes(digest.digest()[:8])


def plan_sets(src: str, train: PackSource, evaluation: PackSource | None, share: float, seed: int) -> list[SetPlan]:
    """The sets that a pack makes: all as one, train and eval as they are, or train and a share of it split off.

    Raises:
        UsageError: a share that cannot be split off. DataError: the two sets have different classes.
    """
    order = _order_by_hash(train, seed)
    if evaluation is None and share == 0:
        return [_build_plan("", train, order)]
    if evaluation is None:
        chosen = _choose_evaluation(train, order, share, src)
        return [_build_plan("train", train, order[~chosen]), _build_plan("eval", train, order[chosen])]
    names = [os.path.basename(part.root) for part in (train, evaluation)]
    if share > 0:
        fix = f"Leave --split out, or pack {train.root} alone."
        raise UsageError(f"this has an evaluation set already, {names[1]}", where=src, fix=fix)
    if _is_numbered(train.classes) and _is_numbered(evaluation.classes):  # one of them may lack the last ones
        both = max(train.classes, evaluation.classes, key=len)
        train, evaluation = replace(train, classes=both), replace(evaluation, classes=both)
    if train.classes != evaluation.classes:
        differences = [
            f"only in {name}: {', '.join(sorted(set(one.classes) - set(other.classes)))}"
            for name, one, other in ((names[0], train, evaluation), (names[1], evaluation, train))
            if set(one.classes) - set(other.classes)
        ]
        raise DataError(
            f"eval classes unlike train classes ({'; '.join(differences)})",
            where=src,
            fix="Give both the same class folders.",
        )
    return [
        _build_plan("train", train, order, f"{names[0]}/"),
        _build_plan("eval", evaluation, _order_by_hash(evaluation, seed), f"{names[1]}/"),
    ]


def _is_numbered(classes: tuple[str, ...]) -> bool:
    return classes == tuple(map(str, range(len(classes))))


def _build_plan(name: str, source: PackSource, ids: NDArray[np.int64], shown: str = "") -> SetPlan:
    return SetPlan(name=name, source=source, ids=ids, sizes=source.images.measure_sizes()[ids], shown=shown)


def _order_by_hash(source: PackSource, seed: int) -> NDArray[np.int64]:
    """All samples, by a hash of seed and name."""
    hashes = b"".join(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest() for name in source.names)
    return np.argsort(np.frombuffer(hashes, "<u8"), kind="stable").astype(np.int64)


def _choose_evaluation(source: PackSource, order: NDArray[np.int64], share: float, src: str) -> NDArray[np.bool_]:
    """Which places of `order` go to the evaluation set: the first round(share x n) of each class, at least 1 of 2."""
    of_class = source.label_kind == "class"
    groups = source.labels[order] if of_class else np.zeros(len(order), np.int64)
    counts = np.bincount(groups, minlength=len(source.classes) if of_class else 1)
    wanted = np.maximum(np.floor(share * counts + 0.5).astype(np.int64), counts >= 2)
    if (whole := np.flatnonzero((wanted >= counts) & (counts > 0))).size:
        name = f"class {source.classes[whole[0]]!r}, of {counts[whole[0]]} images," if of_class else "the set"
        raise UsageError(
            f"a split of {share:g} would leave {name} without a training image", where=src, fix="Split off less."
        )
    if not wanted.any():
        raise UsageError("no class has two images, so none can be split off", where=src, fix="Leave --split out.")
    by_group = np.argsort(groups, kind="stable")
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = np.zeros(len(order), np.bool_)
    chosen[by_group] = rank < np.repeat(wanted, counts)
    return chosen
