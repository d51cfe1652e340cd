"""Common facts of all parts of one pack, and the difference between the packs of two parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from headway.core.printable import escape_controls
from headway.data.pack_part import PartSet
from headway.data.pack_plan import PackJob, SetPlan


@final
@dataclass(frozen=True, kw_only=True)
class SetIdentity:
    """Facts that all parts of one set share."""

    mode: str
    format: str
    label_kind: str
    classes: tuple[str, ...]
    planned: int
    """Samples of the whole set, bad ones included."""
    pack_id: int
    """A hash of names, labels and sizes in their order, and of all options."""


@final
@dataclass(frozen=True, kw_only=True)
class PackIdentity:
    """Facts that all parts of one pack share."""

    count: int
    """Number of parts."""
    options: Mapping[str, str]
    """Options of the pack, as in `PackJob`."""
    sets: Mapping[str, SetIdentity]
    """The sets by name: train and eval, or one without a name."""


def identify_finished(sets: Mapping[str, PartSet]) -> PackIdentity:
    """Returns the identity of the pack that a finished part belongs to."""
    facts = next(iter(sets.values())).facts
    identities = {
        name: SetIdentity(
            mode=one.description.mode,
            format=one.description.format,
            label_kind=one.description.label_kind,
            classes=one.description.classes,
            planned=one.facts.planned,
            pack_id=one.description.pack_id,
        )
        for name, one in sets.items()
    }
    return PackIdentity(count=facts.count, options=facts.options, sets=identities)


def identify_planned(plans: Sequence[SetPlan], job: PackJob) -> PackIdentity:
    """Returns the identity of the pack that a job packs a part of; `plans` are those of the whole sets."""
    identities = {
        plan.name: SetIdentity(
            mode=job.encoder.mode.follow(plan.source.images.mode),
            format=job.format,
            label_kind=plan.source.label_kind,
            classes=plan.source.classes,
            planned=len(plan.ids),
            pack_id=plan.compute_pack_id(job),
        )
        for plan in plans
    }
    return PackIdentity(count=job.part.count if job.part else 1, options=job.options, sets=identities)


def find_difference(one_name: str, one: PackIdentity, other_name: str, other: PackIdentity) -> str:
    """Describes the first difference of two parts' packs; empty if they are of one."""

    def tell_apart(what: str, value: str, other_value: str) -> str:
        return f"{what} {value} in {one_name}, and {other_value} in {other_name}"

    if one.count != other.count:
        return f"{one_name} is one of {one.count}, and {other_name} is one of {other.count}"
    # Options first: most other differences follow from them.
    for option in sorted(one.options.keys() | other.options.keys()):
        if one.options.get(option) != other.options.get(option):
            return tell_apart(f"{option} is", *(_show(pack.options.get(option)) for pack in (one, other)))
    if one.sets.keys() != other.sets.keys():
        return "only one of them has an evaluation set"
    counts = [sum(identity.planned for identity in pack.sets.values()) for pack in (one, other)]
    if counts[0] != counts[1]:
        return tell_apart("there are", f"{counts[0]:,} images", f"{counts[1]:,}")
    for name, a in one.sets.items():
        b = other.sets[name]
        if a.classes != b.classes:
            return "their classes differ"
        for what, first, second in (
            ("the labels are of kind", a.label_kind, b.label_kind),
            ("the format is", a.format, b.format),
            ("the mode is", a.mode, b.mode),
        ):
            if first != second:
                # Without the native core, JPEGs are kept as they are.
                reason = "; does a machine lack the native core?" if {first, second} == {"keep", "seekable"} else ""
                return tell_apart(what, first, second) + reason
        if a.pack_id != b.pack_id:
            return "the names, labels or sizes of their images differ"
    return ""


def _show(text: str | None) -> str:
    if text is None:
        return "not given"
    return escape_controls(text, lines=False) or "given"
