"""Three-way merge: what two versions have changed since the one that both come from. Pure; nothing is guessed."""

from __future__ import annotations

from typing import Any, Literal

from headway.data.store_address import UNLABELLED
from headway.lifecycle.store.differences import build_difference
from headway.lifecycle.store.records import Change, Conflict, Difference, Sample
from headway.lifecycle.store.rows import Rows

Side = Literal["ours", "theirs"]


def merge_rows(base: Rows, ours: Rows, theirs: Rows, prefer: Side | None) -> tuple[list[Change], list[Conflict]]:
    """Merges the changes of `theirs` into `ours`.

    Args:
        base: the newest version that both come from.
        prefer: the side that wins where both changed a sample in different ways; None: neither.

    Returns:
        the changes to make to `ours`, and the conflicts that `prefer` does not settle, sorted by sample.
    """
    our_changes = _index(build_difference(base, ours))
    conflicts: list[Conflict] = []
    # By sample: what ours has, and what the merge is to have.
    wanted: dict[str, tuple[Sample | None, Sample | None]] = {}
    for sample, (before, their) in _index(build_difference(base, theirs)).items():
        if sample not in our_changes:
            wanted[sample] = (before, their)
            continue
        our = our_changes[sample][1]
        merged = _merge_sample(before, our, their)
        if isinstance(merged, Conflict):
            if prefer is None:
                conflicts.append(merged)
                continue
            merged = our if prefer == "ours" else their
        wanted[sample] = (our, merged)
    wanted = {sample: pair for sample, pair in wanted.items() if pair[0] != pair[1]}
    conflicts += _settle_names(ours, wanted, prefer)
    difference = Difference(
        added=tuple(after for before, after in wanted.values() if before is None and after is not None),
        removed=tuple(before for before, after in wanted.values() if before is not None and after is None),
        changed=tuple((before, after) for before, after in wanted.values() if before is not None and after is not None),
    )
    conflicts.sort(key=lambda one: next(side.sample for side in (one.ours, one.theirs, one.base) if side))
    return difference.to_changes(), conflicts


def _index(difference: Difference) -> dict[str, tuple[Sample | None, Sample | None]]:
    return {
        **{one.sample: (None, one) for one in difference.added},
        **{one.sample: (one, None) for one in difference.removed},
        **{before.sample: (before, after) for before, after in difference.changed},
    }


def _merge_sample(base: Sample | None, ours: Sample | None, theirs: Sample | None) -> Sample | Conflict | None:
    """Merges one sample that both sides changed."""
    if ours == theirs:
        return ours
    conflict = Conflict(base=base, ours=ours, theirs=theirs)
    # One side removed what the other one changed, or both added the same bytes in different ways.
    if base is None or ours is None or theirs is None:
        return conflict
    fields: dict[str, Any] = {}
    for field in ("name", "label", "split", "annotations", "planned_split"):
        before, our, their = (getattr(side, field) for side in (base, ours, theirs))
        if our != before and their != before and our != their:
            return conflict
        fields[field] = our if our != before else their
    # One side took the label away or set it, and the other one moved the sample.
    is_labelled = fields["label"] is not None
    if is_labelled == (fields["split"] == UNLABELLED) or (is_labelled and fields["planned_split"]):
        return conflict
    return Sample(sample=base.sample, **fields)


def _settle_names(
    ours: Rows, wanted: dict[str, tuple[Sample | None, Sample | None]], prefer: Side | None
) -> list[Conflict]:
    """Finds samples that would have the name of another one. Settles them in `wanted` as `prefer` says."""
    by_name = {
        after.name: sample
        for sample, (before, after) in wanted.items()
        if after is not None and (before is None or before.name != after.name)
    }
    if not by_name:
        return []
    conflicts = []
    for row, name in enumerate(ours.names):
        if name not in by_name:
            continue
        our = ours.get_sample(row)
        # It gives the name up itself.
        if our.sample in wanted and ((after := wanted[our.sample][1]) is None or after.name != name):
            continue
        if our.sample == by_name[name]:
            continue
        their = wanted[by_name[name]][1]
        if prefer is None:
            conflicts.append(Conflict(base=None, ours=our, theirs=their))
        elif prefer == "theirs":
            wanted[our.sample] = (our, None)
        if prefer != "theirs":
            del wanted[by_name[name]]
    return conflicts
