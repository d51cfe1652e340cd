"""Bodies of the label page's requests: results of mining, what a person wants to see, and the labels of a grid."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headway.core.untrusted_json import (
    Checks,
    JsonError,
    describe_kind,
    expect_entries,
    is_object,
    is_sha256,
    is_text,
    is_whole_number,
)
from headway.core.untrusted_json import is_number as is_number_in
from headway.lifecycle.service.labelling.records import GivenLabel, Pick, QueueKind, Wish
from headway.lifecycle.service.problems import refuse

MOST_PICKS = 100_000
MOST_LABELS = 1_000
"""Most labels of one request."""
MOST_GRID = 200
MOST_TEXT = 1_024
MOST_NAME = 80
MOST_PATTERN = 200
MOST_SECONDS = 86_400.0
_ABOUT_KEYS = ("strategy", "count", "seed", "images", "estimated_noise", "suspects", "pool", "set")


class ProposedQueue(NamedTuple):
    """A queue as a client sends it, before its samples are looked for."""

    kind: QueueKind
    name: str
    about: dict[str, Any]
    rows: list[dict[str, Any]]
    """`sha256` or `name`, `proposed`, `probability`, `score`, `arm` and `copies` of each pick."""


class GivenLabels(NamedTuple):
    """The labels of a grid."""

    grid: str
    """Its name, whose leases end; empty: none."""
    queue: str
    by: str
    again: bool
    labels: list[GivenLabel]


def parse_queue(tree: Mapping[str, Any]) -> ProposedQueue:
    """Reads the `mine.json` or `label-errors.json` of `headway mine`, or a list of picks. Raises JsonError."""
    kind: QueueKind = "label-errors" if "listed" in tree else "mine"
    field = "listed" if kind == "label-errors" else "picks"
    expect_entries(tree, {field: (lambda value: isinstance(value, list), "a list")})
    rows: list[Any] = tree[field]
    if not 0 < len(rows) <= MOST_PICKS:
        raise JsonError(f"it has {len(rows):,} {field}, not 1 to {MOST_PICKS:,}")
    copies = _count_copies(tree.get("near_copies"))
    parsed = [_parse_pick(row, f"{field}[{place}].", copies) for place, row in enumerate(rows)]
    about = {key: tree[key] for key in _ABOUT_KEYS if key in tree and _is_plain(tree[key])}
    runs = tree.get("runs")
    if isinstance(runs, list) and all(is_object(run) and _is_short(run.get("run")) for run in runs[:100]):
        about["runs"] = [run["run"] for run in runs[:100]]
    name = tree.get("name", "")
    if not is_person(name):
        raise JsonError(f"its name is not a plain text of at most {MOST_NAME} characters")
    fallback = "doubtful labels" if kind == "label-errors" else str(about.get("strategy", "picks"))[:MOST_NAME]
    return ProposedQueue(kind, name or fallback, about, parsed)


def parse_wish(tree: Mapping[str, Any]) -> tuple[Wish, str]:
    """Reads what a person wants to see, and the name of the person. Raises JsonError."""
    return Wish(
        queue=_take(tree, "queue", "", _is_id, "the ID of a queue"),
        label=_take(tree, "class", "", _is_short, "a text"),
        split=_take(tree, "split", "", _is_short, "a text"),
        slice=_take(tree, "slice", "", _is_pattern, f"a pattern of at most {MOST_PATTERN} characters"),
        differs=_take(tree, "differs", False, _is_truth, "true or false"),
        has_copies=_take(tree, "copies", False, _is_truth, "true or false"),
        again=_take(tree, "again", 0, lambda value: is_number_in(value, 0, 1e12), "seconds since 1970, or 0"),
        count=_take(tree, "count", 24, lambda value: is_whole_number(value, 0, MOST_GRID), f"0 to {MOST_GRID}"),
    ), _take(tree, "by", "", is_person, "a short name")


def parse_labels(tree: Mapping[str, Any]) -> GivenLabels:
    """Reads the labels of a grid. Raises JsonError."""
    expect_entries(tree, {"labels": (lambda value: isinstance(value, list), "a list")})
    rows: list[Any] = tree["labels"]
    if not 0 < len(rows) <= MOST_LABELS:
        raise JsonError(f"it has {len(rows):,} labels, not 1 to {MOST_LABELS:,}")
    labels = list[GivenLabel]()
    for place, row in enumerate(rows):
        expect_entries(row, _LABEL, f"labels[{place}].")
        accepted = _take(row, "accepted", False, _is_truth, "true or false")
        labels.append(GivenLabel(bytes.fromhex(row["sha256"]), row["label"], float(row["seconds"]), accepted))
    counts = Counter(one.sample for one in labels)
    if len(counts) < len(labels):
        raise JsonError(f"it has {counts.most_common(1)[0][0].hex()} twice")
    return GivenLabels(
        grid=_take(tree, "grid", "", _is_id, "the name of a grid"),
        queue=_take(tree, "queue", "", _is_id, "the ID of a queue"),
        by=_take(tree, "by", "", is_person, "a short name"),
        again=_take(tree, "again", False, _is_truth, "true or false"),
        labels=labels,
    )


def name_queue(dataset: str, kind: QueueKind, picks: Sequence[Pick]) -> str:
    """Returns the ID of a queue, which is the same for the same content."""
    rows = [[pick.sample.hex(), *pick[1:]] for pick in picks]
    return hashlib.sha256(json.dumps([dataset, kind, rows], ensure_ascii=False).encode()).hexdigest()[:32]


def refuse_body(error: JsonError) -> Exception:
    """Returns the problem of a body that cannot be read."""
    return refuse("malformed", f"the body cannot be read: {error}", "Mend it.")


def is_person(value: Any) -> bool:
    """Returns True for a text that can be the name of a person."""
    return is_text(value) and len(value) <= MOST_NAME and value.isprintable() and value == value.strip()


def _parse_pick(row: Any, path: str, copies: Mapping[int, int]) -> dict[str, Any]:
    if not is_object(row):
        raise JsonError(f"it has {describe_kind(row)} as {path.rstrip('.')}, not an object")
    expect_entries(row, {name: check for name, check in _PICK.items() if name in row}, path)
    if not row.get("sha256") and not row.get("name"):
        raise JsonError(f"it lacks {path}name or {path}sha256")
    own = copies.get(row["sample"], 0) if is_whole_number(row.get("sample")) else 0
    arm = row.get("arm") or ("suspect" if row.get("suspect") == "yes" else "")
    return {
        "sha256": row.get("sha256") or "",
        "name": row.get("name") or "",
        "proposed": row.get("proposed") or row.get("suggested") or "",
        "probability": row.get("probability"),
        "score": row.get("score"),
        "arm": arm,
        "copies": row.get("copies", own),
    }


def _count_copies(tree: Any) -> dict[int, int]:
    """Returns the number of near copies that are out of each image of the pool, as `mine.json` has them."""
    counts = dict[int, int]()
    clusters = tree.get("clusters") if is_object(tree) else None
    for cluster in clusters if isinstance(clusters, list) else ():
        if is_object(cluster) and isinstance(kept := cluster.get("kept"), list) and len(kept) == 2:
            out = cluster.get("out")
            if kept[0] == "pool" and is_whole_number(kept[1]) and isinstance(out, list):
                counts[kept[1]] = len(out)
    return counts


def _take(tree: Mapping[str, Any], name: str, fallback: Any, check: Callable[[Any], bool], wanted: str) -> Any:
    expect_entries(tree if name in tree else {name: fallback}, {name: (check, wanted)})
    return tree.get(name, fallback)


def _is_short(value: Any) -> bool:
    # JSON may hold half of a surrogate pair, which neither UTF-8 nor SQLite takes.
    return is_text(value) and len(value) <= MOST_TEXT and value == value.encode("utf-8", "ignore").decode()


def _is_pattern(value: Any) -> bool:
    return _is_short(value) and len(value) <= MOST_PATTERN


def _is_plain(value: Any) -> bool:
    return _is_short(value) or is_number_in(value, -1e15, 1e15)


def _is_id(value: Any) -> bool:
    return is_text(value) and (not value or (len(value) == 32 and set(value) <= set("0123456789abcdef")))


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number_or_none(value: Any) -> bool:
    return value is None or is_number_in(value, -1e15, 1e15)


_PICK: Checks = {
    "sha256": (is_sha256, "a SHA-256"),
    "name": (_is_short, "a text"),
    "proposed": (_is_short, "a text"),
    "suggested": (_is_short, "a text"),
    "probability": (_is_number_or_none, "a number"),
    "score": (_is_number_or_none, "a number"),
    "arm": (_is_short, "a text"),
    "suspect": (_is_short, "a text"),
    "copies": (lambda value: is_whole_number(value, 0, 1_000_000_000), "a number of images"),
}
_LABEL: Checks = {
    "sha256": (is_sha256, "a SHA-256"),
    "label": (lambda value: value is None or (_is_short(value) and bool(value.strip())), "a class, or null"),
    "seconds": (lambda value: is_number_in(value, 0, MOST_SECONDS), f"0 to {MOST_SECONDS:.0f}"),
}
