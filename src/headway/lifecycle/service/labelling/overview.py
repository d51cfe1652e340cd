"""The loop of a data set: its versions on a line, the runs that pinned them, what was mined, and what labels cost."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError, UsageError
from headway.data.store_address import StoreAddress
from headway.export.drop_bound import compute_share_bound
from headway.http.problems import ProblemError
from headway.lifecycle.experiments.query import Selection, has_key, select_runs
from headway.lifecycle.experiments.run_index import open_index
from headway.lifecycle.experiments.scan import find_index, scan_folders
from headway.lifecycle.service.labelling.agreement import compare_people
from headway.lifecycle.service.labelling.labelling import Labelling
from headway.lifecycle.service.labelling.records import Mark, Queue, find_standing
from headway.lifecycle.service.labelling.selection import Order, build_keys
from headway.lifecycle.store.records import Version

LOG = logging.getLogger("headway.lifecycle")
MOST_NODES = 40
"""Versions that are shown one by one; those between them are counted."""
MOST_RUNS = 200
MOST_DISAGREEMENTS = 48
_COLUMNS = ("recipe.data.train", "recipe.data.eval", "summary.accuracy", "summary.seconds")


def build_overview(labelling: Labelling, dataset: str) -> dict[str, Any]:
    """Returns everything that the page shows above the grid. Raises ProblemError (404)."""
    versions = labelling.datasets.list_history(dataset)
    queues = labelling.database.list_queues(dataset)
    runs = list_runs(labelling, dataset)
    marks = {name: labelling.read_marks(dataset, name) for name in labelling.database.list_marked_queues(dataset)}
    labelled = {name: find_labelled_version(of.values()) for name, of in marks.items()}
    pinned = {run["version"] for run in runs} | {queue.version for queue in queues} | set(labelled.values())
    return {
        "dataset": dataset,
        "versions": group_versions(versions, pinned),
        "runs": runs,
        "queues": [
            _describe_queue(labelling, queue, marks.get(queue.queue, {}))
            | {"labelled_version": labelled.get(queue.queue)}
            for queue in queues
        ],
        "labellers": count_labellers(marks.values()),
        "agreement": [one.to_json() for one in compare_people(group for of in marks.values() for group in of.values())],
        "disagreements": _list_disagreements(labelling, dataset, marks),
    }


def group_versions(versions: Sequence[Version], pinned: set[str]) -> list[dict[str, Any]]:
    """Returns the versions to show, the oldest first, each with what has changed since the one before it.

    Args:
        versions: the newest first.
        pinned: IDs of versions that a run or a queue is about.
    """
    oldest_first = versions[::-1]
    shown = [
        index
        for index, one in enumerate(oldest_first)
        if index in (0, len(oldest_first) - 1) or one.tags or one.merged or one.version in pinned
    ]
    # The first one stays: it says where the data set comes from.
    shown = shown[:1] + shown[1:][-(MOST_NODES - 1) :] if len(shown) > MOST_NODES else shown
    nodes, before = list[dict[str, Any]](), -1
    for index in shown:
        since = oldest_first[before + 1 : index + 1]
        one, counts, people = oldest_first[index], defaultdict[str, int](int), defaultdict[str, int](int)
        for version in since:
            people[version.by] += 1
            for kind, count in version.counts.items():
                counts[kind] += count
        facts = {"since": len(since), "counts": dict(counts), "people": dict(people)}
        nodes.append(one.to_json() | facts)
        before = index
    return nodes


def find_labelled_version(marks: Iterable[Sequence[Mark]]) -> str:
    """Returns the version that the newest label of a queue came into."""
    return max((mark for group in marks for mark in group), key=lambda mark: mark.time_s).version


def list_runs(labelling: Labelling, dataset: str) -> list[dict[str, Any]]:
    """Returns the runs that were trained on versions of a data set, the oldest first."""
    folders = [folder for folder in labelling.runs if folder.is_dir()]
    if not folders:
        return []
    try:
        with open_index(find_index(folders)) as index:
            index.update(scan_folders(folders))
            columns = tuple(column for column in _COLUMNS if has_key(index, column))
            listed = select_runs(index, Selection(sort="started", columns=columns))
    except HeadwayError as error:
        # The page is about labels, and shows them without the runs.
        LOG.warning(f"The runs cannot be listed: {error}")
        return []
    found = list[dict[str, Any]]()
    for run in listed:
        values = run.to_json()["values"]
        version = _find_version(labelling, dataset, values.get("recipe.data.train"))
        if version is not None:
            evaluated = _find_version(labelling, dataset, values.get("recipe.data.eval"))
            found.append(
                {
                    "name": run.name,
                    # A path in another encoding has surrogates, which JSON in UTF-8 cannot hold.
                    "path": str(run.path).encode("utf-8", "replace").decode(),
                    "state": run.state,
                    "started": run.started,
                    "version": version,
                    "eval_version": evaluated,
                    "accuracy": _to_number(values.get("summary.accuracy")),
                    "seconds": _to_number(values.get("summary.seconds")),
                }
            )
    return found[-MOST_RUNS:]


def count_labellers(marks: Iterable[Mapping[bytes, Sequence[Mark]]]) -> list[dict[str, Any]]:
    """Returns how many samples each person has looked at, and how many seconds it took, the busiest first."""
    seconds, samples, unsure = defaultdict[str, float](float), defaultdict[str, int](int), defaultdict[str, int](int)
    for of in marks:
        for group in of.values():
            for mark in group:
                seconds[mark.by] += mark.seconds
                samples[mark.by] += 1
                unsure[mark.by] += mark.label is None
    rows = [
        {"by": by, "samples": count, "unsure": unsure[by], "seconds": round(seconds[by], 3)}
        for by, count in samples.items()
    ]
    return sorted(rows, key=lambda row: (-int(str(row["samples"])), str(row["by"])))


def _describe_queue(labelling: Labelling, queue: Queue, marks: Mapping[bytes, Sequence[Mark]]) -> dict[str, Any]:
    standing = [find_standing(group) for group in marks.values()]
    return {
        "queue": queue.queue,
        "name": queue.name,
        "kind": queue.kind,
        "version": queue.version,
        "by": queue.by,
        "created_s": queue.created_s,
        "size": queue.size,
        "about": dict(queue.about),
        "marked": len(standing),
        "unsure": sum(mark.label is None for mark in standing),
        "seconds": round(sum(mark.seconds for group in marks.values() for mark in group), 3),
        "arms": count_arms(labelling.read_order(queue.dataset, queue.queue), queue.kind, marks),
    }


def count_arms(order: Order, kind: str, marks: Mapping[bytes, Sequence[Mark]]) -> list[dict[str, Any]]:
    """Returns how many proposals of each arm were wrong, with a 95 % interval, as far as people have looked."""
    picks, labelled, wrong = Counter[str](), Counter[str](), Counter[str]()
    for pick in order.picks:
        arm = pick.arm or kind
        picks[arm] += 1
        known = marks.get(pick.sample)
        if known and (label := find_standing(known).label) is not None:
            labelled[arm] += 1
            wrong[arm] += label != pick.proposed
    rows = list[dict[str, Any]]()
    for arm, total in picks.items():
        done, failed = labelled[arm], wrong[arm]
        # Two bounds of 97.5 % are an interval of 95 %: Clopper and Pearson, as `headway mine --review` has it.
        low = max(1 - compute_share_bound(done - failed, done, 0.975), 0.0) if done else 0.0
        high = compute_share_bound(failed, done, 0.975) if done else 1.0
        share = failed / done if done else 0.0
        rows.append(
            {"name": arm, "picks": total, "labelled": done, "wrong": failed, "share": share, "low": low, "high": high}
        )
    return rows


def _list_disagreements(
    labelling: Labelling, dataset: str, marks: Mapping[str, Mapping[bytes, Sequence[Mark]]]
) -> list[dict[str, Any]]:
    """Returns samples that people have labelled differently, with the names of the first ones."""
    _, rows = labelling.datasets.read_rows(dataset)
    found = list[dict[str, Any]]()
    for queue, of in marks.items():
        for sample, group in of.items():
            sure = [mark for mark in group if mark.label is not None]
            is_settled = any(mark.role == "again" for mark in group)
            if len({mark.label for mark in sure}) > 1 and not is_settled and len(found) < MOST_DISAGREEMENTS:
                row = int(rows.find(build_keys([sample]))[0])
                labels = [{"by": mark.by, "label": mark.label} for mark in sure]
                if row >= 0:
                    found.append(
                        {
                            "sha256": sample.hex(),
                            "name": rows.names[row],
                            "now": rows.get_sample(row).label,
                            "queue": queue,
                            "labels": labels,
                        }
                    )
    return found


def _find_version(labelling: Labelling, dataset: str, address: Any) -> str | None:
    """Returns the ID of the version that a run's recipe names; None if it is not one of this data set."""
    try:
        place = StoreAddress.parse(address) if isinstance(address, str) and address.startswith("store:") else None
        if place is None or place.name != dataset:
            return None
        if place.folder and Path(place.folder).resolve() != labelling.datasets.folder:
            return None
        return labelling.datasets.find_version(dataset, place.version).version
    except (UsageError, ProblemError):
        return None


def _to_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
