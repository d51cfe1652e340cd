"""Records that the store takes and returns: changes, samples, versions, differences and conflicts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

from headway.core.errors import HeadwayError, UsageError
from headway.core.untrusted_json import is_sha256

Operation = Literal["add", "label", "move", "remove"]
KINDS = ("added", "relabelled", "annotated", "moved", "renamed", "removed")
"""Ways in which a sample may differ between two versions."""


@final
@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of one sample. `label`, `move` and `remove` name it by `sample` or by `name`."""

    operation: Operation
    """`add` a sample, set its `label`, `move` it to another split, or `remove` it."""
    name: str = ""
    """Name of the sample, such as `cat/0001.jpg`. Needed by `add`."""
    sample: str = ""
    """ID of the sample: SHA-256 of its stored bytes. `add` without `file` takes bytes that the store has already."""
    label: str | None = None
    """Class; None: not labelled. Used by `add` and `label`."""
    split: str = ""
    """Split. Empty: where the hash of the name says (`add`), or where the sample is (`label`). Of a sample without a
    label: where it goes when it gets one; `unlabelled`: where its name says."""
    file: Path | None = None
    """Image file with the bytes of a sample to add."""
    by: str = ""
    """Who set the label. Empty: who makes the version."""
    annotations: Mapping[str, Any] | None = None
    """More facts about the image, such as its boxes: any JSON object. Used by `add` and `label`. None: nothing
    (`add`), or what is there stays (`label`); an empty object takes it away."""

    def __post_init__(self) -> None:
        if self.operation not in ("add", "label", "move", "remove"):
            raise UsageError(f"{self.operation!r:.40} is no change", fix="Changes are add, label, move and remove.")
        if self.sample and not is_sha256(self.sample):
            what = f"{self.sample!r:.80} is not the ID of a sample"
            raise UsageError(what, fix="Give 64 hexadecimal digits in lower case: the SHA-256 of the stored bytes.")
        if self.operation == "add" and (not self.name or not (self.sample or self.file)):
            raise UsageError("a sample to add needs a name, and a file or an ID", fix="Give both.")
        if self.operation != "add" and not (self.sample or self.name):
            raise UsageError(f"a change ({self.operation}) names no sample", fix="Give its name or its ID.")
        if self.operation == "move" and not self.split:
            raise UsageError("a sample to move needs a split", fix="Name the split.")
        if self.annotations is not None and self.operation not in ("add", "label"):
            raise UsageError(f"a change ({self.operation}) has annotations", fix="Use add or label.")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sample of a version."""

    sample: str
    """SHA-256 of the stored bytes, 64 hexadecimal digits."""
    name: str
    label: str | None
    """None: not labelled."""
    split: str
    annotations: Mapping[str, Any] | None = None
    """More facts about it, such as its boxes: a JSON object. None: nothing."""
    planned_split: str = ""
    """Split that a sample without a label goes to when it gets one. Empty: its name says."""

    @property
    def wanted_split(self) -> str:
        """The split that a change names to put the sample where it is."""
        return self.planned_split or self.split

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        values: dict[str, Any] = {"sample": self.sample, "name": self.name, "label": self.label, "split": self.split}
        values |= {} if self.annotations is None else {"annotations": self.annotations}
        return values | ({"planned_split": self.planned_split} if self.planned_split else {})

    def describe(self) -> str:
        """Returns a line for the user."""
        then = f" (then {self.planned_split})" if self.planned_split else ""
        line = f"{self.sample}  {self.split}{then}  {self.label or '-'}  {self.name}"
        if self.annotations is None:
            return line
        text = json.dumps(self.annotations, ensure_ascii=True)
        return f"{line}  {text if len(text) <= _MAX_SHOWN else f'{text[:_MAX_SHOWN]}... (--json shows all)'}"


@final
@dataclass(frozen=True, kw_only=True)
class Version:
    """One entry of the history of a data set. Equal contents have equal IDs, whatever led to them."""

    dataset: str
    number: int
    """Number in the history of the data set; its address is `store:NAME@v3`."""
    version: str
    """ID: SHA-256 of the manifest, 64 hexadecimal digits."""
    parent: str | None
    """ID of the version that this one changes; None for the first."""
    merged: str | None
    """ID of the version that was merged into it; None for all but merges."""
    time: float
    """Seconds since 1970."""
    by: str
    """Who made it."""
    message: str
    counts: Mapping[str, int]
    """Numbers of samples `added`, `relabelled`, `annotated`, `moved`, `renamed` and `removed`."""
    tags: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Its address, without the folder of the store."""
        return f"store:{self.dataset}@v{self.number}"

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return asdict(self)


@final
@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A sample that was not added, or a file that is not an image."""

    name: str
    reason: str


@final
@dataclass(frozen=True, kw_only=True)
class NearCopy:
    """A new sample that shows the same picture as another one: resized, compressed again, brighter or darker."""

    name: str
    first: str
    """Name of a sample that came before it, or that leads the group of its near copies."""
    is_apart: bool
    """The two lie in different splits, since the split of the new one was asked for."""


@final
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a request for changes."""

    version: Version
    """The newest version now."""
    is_new: bool
    """False if nothing changed, so that there is no new version."""
    duplicates: tuple[tuple[str, str], ...] = ()
    """(name, name of the sample with equal bytes) of each image that the data set has already."""
    near_copies: tuple[NearCopy, ...] = ()
    """New samples, and samples with their first label, that are near copies of others."""
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for the user about files of the source that were left out."""

    def to_note(self) -> str:
        """Returns what `from_note` needs beside the version, as JSON."""
        near_copies, rejected = ([asdict(one) for one in many] for many in (self.near_copies, self.rejected))
        note = {"is_new": self.is_new, "duplicates": self.duplicates, "near_copies": near_copies, "rejected": rejected}
        return json.dumps(note)

    @staticmethod
    def from_note(version: Version, note: str) -> Outcome:
        """Returns the outcome that has written a note."""
        tree = json.loads(note)
        return Outcome(
            version=version,
            is_new=tree["is_new"],
            duplicates=tuple((name, first) for name, first in tree["duplicates"]),
            near_copies=tuple(NearCopy(**one) for one in tree["near_copies"]),
            rejected=tuple(Rejected(**one) for one in tree["rejected"]),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values, as the service answers."""
        return {
            "version": self.version.version,
            "number": self.version.number,
            "parent": self.version.parent,
            "is_new": self.is_new,
            **(self.version.counts if self.is_new else dict.fromkeys(self.version.counts, 0)),
            "duplicates": len(self.duplicates),
            "near_copies": [asdict(one) for one in self.near_copies],
            "rejected": [asdict(one) for one in self.rejected],
            **({"notes": list(self.notes)} if self.notes else {}),
        }


@final
@dataclass(frozen=True, kw_only=True)
class Difference:
    """Samples that differ between two versions, by ID; each list is sorted by ID."""

    added: tuple[Sample, ...]
    removed: tuple[Sample, ...]
    changed: tuple[tuple[Sample, Sample], ...]
    """The sample in the first version and in the second: other labels, annotations, splits or names."""

    @property
    def relabelled(self) -> tuple[tuple[Sample, Sample], ...]:
        """Samples with another label."""
        return tuple(pair for pair in self.changed if pair[0].label != pair[1].label)

    @property
    def annotated(self) -> tuple[tuple[Sample, Sample], ...]:
        """Samples with other annotations."""
        return tuple(pair for pair in self.changed if pair[0].annotations != pair[1].annotations)

    @property
    def moved(self) -> tuple[tuple[Sample, Sample], ...]:
        """Samples in another split, or with another planned one."""
        return tuple(
            (one, other)
            for one, other in self.changed
            if (one.split, one.planned_split) != (other.split, other.planned_split)
        )

    @property
    def renamed(self) -> tuple[tuple[Sample, Sample], ...]:
        """Samples with another name."""
        return tuple(pair for pair in self.changed if pair[0].name != pair[1].name)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of samples by what happened to them; one that was relabelled and moved counts for both."""
        return {kind: len(getattr(self, kind)) for kind in KINDS}

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def invert(self) -> Difference:
        """Returns the difference in the other direction: what undoes this one."""
        changed = tuple((after, before) for before, after in self.changed)
        return Difference(added=self.removed, removed=self.added, changed=changed)

    def to_changes(self) -> list[Change]:
        """Returns the changes that make the second version of the first."""
        return list(self._list_changes())

    def _list_changes(self) -> Iterator[Change]:
        # A name must be free before another sample takes it, so what leaves goes first.
        gone = [*self.removed, *(before for before, after in self.changed if before.name != after.name)]
        yield from (Change(operation="remove", sample=one.sample) for one in gone)
        come = [*self.added, *(after for before, after in self.changed if before.name != after.name)]
        for one in come:
            yield Change(
                operation="add",
                sample=one.sample,
                name=one.name,
                label=one.label,
                split=one.wanted_split,
                annotations=one.annotations,
            )
        for before, after in self.changed:
            if before.name != after.name:
                continue
            if (before.label, before.annotations) == (after.label, after.annotations):
                yield Change(operation="move", sample=after.sample, split=after.wanted_split)
                continue
            yield Change(
                operation="label",
                sample=after.sample,
                label=after.label,
                split=after.wanted_split,
                annotations=None if before.annotations == after.annotations else after.annotations or {},
            )

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {
            "counts": self.counts,
            "added": [one.to_json() for one in self.added],
            "removed": [one.to_json() for one in self.removed],
            "changed": [{"before": before.to_json(), "after": after.to_json()} for before, after in self.changed],
        }


@final
@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A sample that both sides of a merge changed, in different ways. None: the sample is not there."""

    base: Sample | None
    ours: Sample | None
    theirs: Sample | None

    def __str__(self) -> str:
        known = self.ours or self.theirs or self.base
        assert known is not None
        return f"{known.name}: ours {_describe(self.ours)}, theirs {_describe(self.theirs)}"


def _describe(sample: Sample | None) -> str:
    if sample is None:
        return "removed it"
    label = "no label" if sample.label is None else repr(sample.label)
    return f"has {label} in {sample.split} as {sample.name}"


_MAX_LISTED = 20
_MAX_SHOWN = 100


@final
class MergeConflictError(HeadwayError):
    """Two versions cannot be merged, because both changed the same samples in different ways. Nothing was changed.

    Attributes:
        conflicts: all of them, sorted by sample.
    """

    def __init__(self, where: str, conflicts: Sequence[Conflict]) -> None:
        self.conflicts = tuple(conflicts)
        lines = [f"  {one}" for one in self.conflicts[:_MAX_LISTED]]
        if len(self.conflicts) > _MAX_LISTED:
            lines.append(f"  and {len(self.conflicts) - _MAX_LISTED:,} more")
        what = f"{len(self.conflicts):,} sample{'s'[: len(self.conflicts) > 1]} changed on both sides"
        fix = "\n".join(["Make them equal on one side first, or choose a side with --prefer ours or theirs:", *lines])
        super().__init__(what, where=where, fix=fix)


@final
class StaleVersionError(HeadwayError):
    """The data set has moved on since the caller looked: the version that it expects is not the newest one.

    Attributes:
        head: ID of the newest version.
    """

    def __init__(self, dataset: str, expected: str, head: str) -> None:
        self.head = head
        what = f"the newest version is {head[:12]}, not {expected[:12]}: somebody has changed the data set meanwhile"
        super().__init__(what, where=f"store:{dataset}", fix="Look at the newest version, and make the change again.")
