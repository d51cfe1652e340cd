"""Counts of a version, for people."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from headway.core.text_format import align_table, format_bytes, pluralise
from headway.lifecycle.store.records import Version
from headway.lifecycle.store.rows import Rows


@final
@dataclass(frozen=True, kw_only=True)
class Summary:
    """Content of a version, counted."""

    version: Version
    mode: str
    shares: Mapping[str, float]
    """Share of each split that new samples go to."""
    fixed_classes: bool
    """True if labels may have no other classes."""
    classes: tuple[str, ...]
    counts: Mapping[str, tuple[int, ...]]
    """Samples of each class, by split; for `unlabelled` a single number."""
    annotated: int
    """Samples with annotations."""
    bytes: int
    """Size of all samples."""
    shards: int
    about: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return asdict(self)

    def describe(self) -> str:
        """Returns a table of samples by class and split."""
        version = self.version
        total = sum(sum(counts) for counts in self.counts.values())
        head = [
            f"{version.address} ({version.version[:12]}): {pluralise(total, 'sample')}, {format_bytes(self.bytes)} in "
            f"{pluralise(self.shards, 'shard')}, mode {self.mode}"
        ]
        head += [f"{name}: {text}" for name, text in self.about.items()]
        labelled = [
            name for name, counts in self.counts.items() if len(counts) == len(self.classes) and name in self.shares
        ]
        if labelled and self.classes:
            rows = [["class", *labelled]]
            for number, name in enumerate(self.classes):
                rows.append([name, *(f"{self.counts[split][number]:,}" for split in labelled)])
            head += align_table(rows)
        others = {name: sum(counts) for name, counts in self.counts.items() if name not in self.shares}
        head += [f"{name}: {count:,}" for name, count in others.items() if count]
        head += [f"with annotations: {self.annotated:,}"] if self.annotated else []
        return "\n".join(head)


def summarise(version: Version, rows: Rows, about: Mapping[str, str]) -> Summary:
    """Counts the samples of a version."""
    counts = {}
    for number, (name, _) in enumerate(rows.schema.shares):
        counts[name] = tuple(np.bincount(rows.label[rows.split == number], minlength=len(rows.classes)).tolist())
    name = rows.schema.splits[-1]
    counts[name] = (int(np.count_nonzero(rows.split == len(rows.schema.shares))),)
    return Summary(
        version=version,
        mode=rows.schema.mode,
        shares={name: share / 1_000_000 for name, share in rows.schema.shares},
        fixed_classes=rows.schema.classes is not None,
        classes=rows.classes,
        counts=counts,
        annotated=int(np.count_nonzero(np.diff(rows.get_annotations().offset))),
        bytes=int(rows.places["length"].sum(dtype=np.int64)),
        shards=len(rows.shards),
        about=about,
    )


def describe_log(versions: list[Version]) -> str:
    """Returns a line for each version, the newest first."""
    lines = []
    for one in versions:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.time))
        changes = ", ".join(f"{count:,} {kind}" for kind, count in one.counts.items() if count)
        changes = changes or ("no change" if one.number else "created")
        tags = f" [{', '.join(one.tags)}]" if one.tags else ""
        message = f": {one.message}" if one.message else ""
        lines.append(f"v{one.number}{tags}  {one.version[:12]}  {when}  {one.by}  {changes}{message}")
    return "\n".join(lines)
