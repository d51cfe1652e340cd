"""Plans a pack: its sets, the samples of each, and their order."""

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
    """Settings that all sets of one pack share."""

    source: str
    """The source, as the user named it."""
    format: str
    encoder: ImageEncoder
    transform: str
    """Name of the user's function, or empty."""
    threads: int
    shard_bytes: int
    skip_bad: bool
    parts: tuple[str, ...]
    """Names of the sets, if there are two."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SetPlan:
    """One data set to be written: `ids` are the samples of `source` in it, in the order in which they are stored."""

    name: str
    source: PackSource
    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    """Present size of each image in bytes, in the order of `ids`; 0 if it cannot be read."""
    name_prefix: str = ""
    """Prefix of a sample's name in lists of bad images."""

    @property
    def names(self) -> list[str]:
        return [self.source.names[sample] for sample in self.ids]

    @functools.cached_property
    def labels(self) -> NDArray[Any]:
        return self.source.labels[self.ids]

    def compute_pack_id(self, job: PackJob) -> int:
        """Returns 64 bits of a hash of the samples and settings, known before any image is read."""
        how = [str(job.encoder.mode), job.format, job.transform, job.encoder.orient]
        digest = hashlib.sha256(json.dumps([how, self.source.classes, self.names]).encode())
        # Labels and sizes tell packs of the same names apart.
        digest.update(self.labels.tobytes())
        digest.update(self.sizes.tobytes())
        return int.from_bytes(digest.digest()[:8])


def plan_sets(src: str, train: PackSource, evaluation: PackSource | None, share: float, seed: int) -> list[SetPlan]:
    """Returns the sets of a pack: all samples as one set, the given train and eval, or a share split off for eval.

    Raises:
        UsageError: the share cannot be split off.
        DataError: the two sets have different classes.
    """
    order = _order_by_hash(train, seed)
    if evaluation is None and share == 0:
        return [_build_plan("", train, order)]
    if evaluation is None:
        # Both parts keep the hashed order, so each stretch of a shard is a fair mixture.
        chosen = _choose_evaluation(train, order, share, src)
        return [_build_plan("train", train, order[~chosen]), _build_plan("eval", train, order[chosen])]
    names = [os.path.basename(part.root) for part in (train, evaluation)]
    if share > 0:
        fix = f"Leave --split out, or pack {train.root} alone."
        raise UsageError(f"the source already has an evaluation set, {names[1]}", where=src, fix=fix)
    # Numbered classes: one of the sets may lack the last ones.
    # The larger number of classes holds for both.
    if _is_numbered(train.classes) and _is_numbered(evaluation.classes):
        both = max(train.classes, evaluation.classes, key=len)
        train, evaluation = replace(train, classes=both), replace(evaluation, classes=both)
    if train.classes != evaluation.classes:
        differences = [
            f"only in {name}: {', '.join(sorted(set(one.classes) - set(other.classes)))}"
            for name, one, other in ((names[0], train, evaluation), (names[1], evaluation, train))
            if set(one.classes) - set(other.classes)
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


def _choose_evaluation(source: PackSource, order: NDArray[np.int64], share: float, src: str) -> NDArray[np.bool_]:
    """Returns a mask of the places of `order` that go to the evaluation set.

    These are the first round(share x n) samples of each class, and at least 1 of a class of 2 or more.
    """
    of_class = source.label_kind == "class"
    groups = source.labels[order] if of_class else np.zeros(len(order), np.int64)
    counts = np.bincount(groups, minlength=len(source.classes) if of_class else 1)
    wanted = np.maximum(np.floor(share * counts + 0.5).astype(np.int64), counts >= 2)
    if (whole := np.flatnonzero((wanted >= counts) & (counts > 0))).size:
        name = f"class {source.classes[whole[0]]!r}, of {counts[whole[0]]} images," if of_class else "the set"
        raise UsageError(
            f"a split of {share:g} would leave {name} without a training image", where=src, fix="Split off less."
        )
    # A class of one image stays in the training set.
    if not wanted.any():
        raise UsageError("no class has two images, so none can be split off", where=src, fix="Leave --split out.")
    by_group = np.argsort(groups, kind="stable")
    # The rank of a sample within its class, in hashed order.
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = np.zeros(len(order), np.bool_)
    chosen[by_group] = rank < np.repeat(wanted, counts)
    return chosen
