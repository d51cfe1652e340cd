"""Labelling: hands grids of samples out to people, and takes their labels back as versions of the data set."""

from __future__ import annotations

import glob
import heapq
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.text_format import pluralise
from headway.data.store_address import StoreAddress
from headway.http.problems import ProblemError
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.bodies import LeftOut
from headway.lifecycle.service.checks import choose_author
from headway.lifecycle.service.datasets import Datasets, find_class, find_split
from headway.lifecycle.service.labelling.database import FILE, LabelDatabase
from headway.lifecycle.service.labelling.parsing import MOST_PATTERN, GivenLabels, ProposedQueue, name_queue
from headway.lifecycle.service.labelling.records import EVERYTHING, Mark, Pick, Queue, Role, Wish
from headway.lifecycle.service.labelling.selection import (
    Order,
    build_keys,
    choose_mined_split,
    describe_sample,
    select_samples,
)
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.tokens import Principal
from headway.lifecycle.store.records import Change, Version
from headway.lifecycle.store.rows import NO_LABEL, Names, Rows

LEASE_S = 600.0
"""Seconds for which a grid belongs to one person: others get other samples. The page renews it while it is open."""
KEY_AGE_S = 7 * 86400.0
"""Seconds for which a request that a killed server has carried out is found: as long as the store remembers it."""
MOST_SLICES = 200
"""Most slices that are listed: those with the most samples."""
KEPT_SLICES = 8
"""Slices of each version that stay in memory: one byte a sample."""
_MOST_ERRORS = 20


@final
class Labelling:
    """Queues, grids and labels of a store. All methods may be called by several threads.

    Args:
        folder: of the service in the store.
        datasets: the data sets of the store.
        runs: folders of runs, for the accuracy of versions.

    Attributes:
        folder, datasets, runs: as given.
        database: queues, leases and marks.
    """

    def __init__(self, folder: Path, datasets: Datasets, runs: Sequence[Path] = ()) -> None:
        self.folder, self.datasets, self.runs = folder, datasets, tuple(runs)
        self.database = LabelDatabase(folder / FILE)
        # A new label leaves the names of a version as they are.
        self._folders = WeakKeyDictionary[Names, dict[str, Any]]()
        self._slices = WeakKeyDictionary[Names, dict[str, NDArray[np.bool_]]]()
        # Queues never change. Marks do, by this process alone: a store has one server.
        self._orders = dict[str, Order]()
        self._marks = dict[tuple[str, str], dict[bytes, list[Mark]]]()

    def close(self) -> None:
        """Closes the database."""
        self.database.close()

    def add_queue(self, dataset: str, proposed: ProposedQueue, principal: Principal) -> Answer:
        """Adds a queue; the same content again is the same queue.

        Raises:
            ProblemError: there is no such data set (404), or a sample of the queue is not in its newest version (422).
        """
        head, rows = self.datasets.read_rows(dataset)
        picks = find_picks(proposed, rows)
        queue = Queue(
            queue=name_queue(dataset, proposed.kind, picks),
            dataset=dataset,
            name=proposed.name,
            kind=proposed.kind,
            version=self._find_source(dataset, proposed, head).version,
            by=principal.name,
            created_s=time.time(),
            size=len(picks),
            about=proposed.about,
        )
        is_new = self.database.add_queue(queue, picks)
        return Answer(201 if is_new else 200, asdict(queue), {"location": f"/datasets/{dataset}/queues"})

    def list_queues(self, dataset: str) -> list[dict[str, Any]]:
        """Returns the queues of a data set, the newest first, with how far they are. Raises ProblemError (404)."""
        self.datasets.find_version(dataset)
        listed = []
        for queue in self.database.list_queues(dataset):
            marks = self.read_marks(dataset, queue.queue)
            listed.append(asdict(queue) | {"marked": len(marks)})
        return listed

    def list_by_score(
        self, dataset: str, version: str, queue: str, label: str | None, split: str | None, after: str, count: int
    ) -> dict[str, Any]:
        """Returns a page of the samples of a queue in its order; `queue` empty: of the newest one.

        Args:
            label, split, after, count: as `Datasets.list_samples`.

        Raises:
            ProblemError: there is no such data set, version, queue, class or split (404).
        """
        found, rows = self.datasets.read_rows(dataset, version)
        queues = self.database.list_queues(dataset)
        chosen = next((one.queue for one in queues if one.queue == queue or not queue), None)
        order = self.read_order(dataset, chosen if chosen is not None else queue or "none")
        places = rows.find(order.keys)
        kept = np.flatnonzero(places >= 0)
        if label is not None:
            kept = kept[rows.label[places[kept]] == find_class(rows, label)]
        if split is not None:
            kept = kept[rows.split[places[kept]] == find_split(rows, split)]
        if after:
            kept = kept[kept > order.places.get(bytes.fromhex(after), len(order.keys))]
        samples = [describe_sample(order, p, rows, int(places[p]), (), "", True) for p in kept[:count].tolist()]
        listed = [one | {"href": f"/blobs/{one['sha256']}"} for one in samples]
        more = samples[-1]["sha256"] if len(kept) > count else None
        return {"version": found.version, "queue": chosen, "samples": listed, "next": more}

    def list_slices(self, dataset: str) -> dict[str, Any]:
        """Returns the folders of the samples' names as patterns, each with its samples. Raises ProblemError (404)."""
        version, rows = self.datasets.read_rows(dataset)
        found = self._folders.get(rows.names)
        if found is None:
            folders = rows.names.count_folders()
            largest = heapq.nlargest(MOST_SLICES, folders, key=lambda folder: folders[folder])
            patterns = {folder: f"{glob.escape(folder)}/*" for folder in sorted(largest)}
            slices = [
                {"slice": pattern, "samples": folders[folder]}
                for folder, pattern in patterns.items()
                # A longer one could not be asked for.
                if len(pattern) <= MOST_PATTERN
            ]
            found = self._folders[rows.names] = {"slices": slices, "folders": len(folders)}
        return {"version": version.version, **found}

    def _find_slice(self, names: Names, pattern: str) -> NDArray[np.bool_]:
        """Returns True for the samples of a slice, bool [n]; the last slices are kept, since each grid asks for one."""
        known = self._slices.setdefault(names, {})
        found = known.get(pattern)
        if found is None:
            for oldest in list(known)[: max(0, len(known) + 1 - KEPT_SLICES)]:
                known.pop(oldest, None)
            found = known[pattern] = names.match(pattern)
        return found

    def lease_grid(self, dataset: str, grid: str, wish: Wish, by: str, principal: Principal) -> dict[str, Any]:
        """Returns the samples of a grid, which belong to one person for a while; the same grid again is renewed.

        Raises:
            ProblemError: there is no such data set or queue (404).
        """
        author = choose_author(by, principal)
        version, rows = self.datasets.read_rows(dataset)
        order = Order(rows.keys) if wish.queue == EVERYTHING else self.read_order(dataset, wish.queue)
        # Before the lock: it may take a second for a million samples.
        in_slice = self._find_slice(rows.names, wish.slice) if wish.slice else None
        # Two people must not choose the same samples.
        with self.database.lock():
            marks = self.read_marks(dataset, wish.queue)
            leased = self.database.list_leased(dataset)
            places, found = select_samples(order, rows, wish, author, marks, leased, in_slice)
            samples = self.database.read_grid(dataset, grid)
            left = len(places)
            if not samples:
                keys = rows.keys
                samples = [keys[row].ljust(32, b"\0") for row in found[: wish.count].tolist()]
                left -= len(samples)
            self.database.lease(dataset, grid, samples, LEASE_S)
        shown = self._describe(order, rows, samples, marks, author, wish.again > 0)
        return {
            "grid": grid,
            "version": version.version,
            "by": author,
            "lease_s": LEASE_S,
            "classes": sorted({*rows.classes, *order.proposed}) if rows.schema.classes is None else rows.classes,
            "fixed_classes": rows.schema.classes is not None,
            "samples": shown,
            "left": left,
            # Its clock may differ from the browser's.
            "now_s": time.time(),
        }

    def end_grid(self, dataset: str, grid: str) -> None:
        """Gives the samples of a grid back, so that others can get them. Raises ProblemError (404)."""
        self.datasets.find_version(dataset)
        self.database.end_lease(dataset, grid)

    def set_labels(self, dataset: str, given: GivenLabels, principal: Principal, request: str) -> Answer:
        """Makes one version of the labels of a grid, and keeps who has set them and how long it took.

        The first label stands. If another person labels the same sample of the same queue, that counts for the
        agreement alone, unless it was asked for `again`. A label that was accepted without a touch replaces none.

        Args:
            request: its name. A server that was killed may have carried it out.

        Raises:
            ProblemError: a label does not fit the data set (422), and nothing was changed.
        """
        author = choose_author(given.by, principal)
        self._expect_queue(dataset, given.queue)
        _, rows = self.datasets.read_rows(dataset)
        marks, order = self.read_marks(dataset, given.queue), self.read_order(dataset, given.queue)
        now = time.time()
        news, changes, missing = list[Mark](), list[Change](), list[str]()
        kept = 0
        places = rows.find(build_keys([one.sample for one in given.labels]))
        for one, row in zip(given.labels, places.tolist(), strict=True):
            if row < 0:
                # Somebody has removed it meanwhile.
                missing.append(one.sample.hex())
                continue
            known = marks.get(one.sample, ())
            role: Role = "again" if given.again else "first"
            # Who was not sure has set no label, so the next person's is the first one.
            labelled = (mark for mark in known if mark.label is not None and mark.role != "second")
            if not given.again and any(mark.by != author for mark in labelled):
                role = "second"
            present = int(rows.label[row])
            is_other = present != NO_LABEL and rows.classes[present] != one.label
            if one.is_accepted and is_other and role != "second":
                # It came by another way since the grid was shown. The sample comes again, with this label.
                kept += 1
                continue
            news.append(Mark(one.sample, author, one.label, role, one.seconds, now, ""))
            if one.label is not None and role != "second":
                split = choose_mined_split(order, rows, row, one.sample)
                sample = one.sample.hex()
                changes.append(Change(operation="label", sample=sample, label=one.label, by=author, split=split))
        answer = self.datasets.find_request(dataset, request, KEY_AGE_S)
        if answer is None:
            answer = self.datasets.commit(
                dataset,
                changes,
                by=author,
                message=f"{pluralise(len(changes), 'label')} from the label page",
                request=request,
                expected=None,
                rejected=LeftOut(),
            )
        news = [mark._replace(version=str(answer.body["version"])) for mark in news]
        with self.database.lock():
            self.database.set_marks(dataset, given.queue, given.grid, news)
            self._marks[dataset, given.queue] = _replace_marks(self.read_marks(dataset, given.queue), news)
        counts = {
            "labelled": len(changes),
            "unsure": sum(mark.label is None for mark in news),
            "second": sum(mark.role == "second" for mark in news),
            "kept": kept,
            "missing": missing,
        }
        return Answer(answer.status, dict(answer.body) | counts, answer.headers)

    def read_marks(self, dataset: str, queue: str) -> dict[bytes, list[Mark]]:
        """Returns what people said about the samples of a queue, by ID."""
        with self.database.lock():
            found = self._marks.get((dataset, queue))
            if found is None:
                found = self._marks[dataset, queue] = self.database.read_marks(dataset, queue)
            return found

    def _describe(
        self, order: Order, rows: Rows, samples: Sequence[bytes], marks: dict[bytes, list[Mark]], by: str, is_open: bool
    ) -> list[dict[str, Any]]:
        found, places = rows.find(build_keys(samples)), order.find(samples, rows)
        return [
            describe_sample(order, place, rows, row, marks.get(sample, ()), by, is_open)
            for sample, place, row in zip(samples, places.tolist(), found.tolist(), strict=True)
            # Somebody may have removed it meanwhile.
            if row >= 0 and place >= 0
        ]

    def read_order(self, dataset: str, queue: str) -> Order:
        """Returns the order of a queue. Raises ProblemError (404)."""
        self._expect_queue(dataset, queue)
        with self.database.lock():
            if queue not in self._orders:
                self._orders[queue] = Order.build(self.database.read_picks(queue))
            return self._orders[queue]

    def _expect_queue(self, dataset: str, queue: str) -> None:
        self.datasets.find_version(dataset)
        if queue != EVERYTHING and all(one.queue != queue for one in self.database.list_queues(dataset)):
            raise refuse("not-found", "there is no such queue", "GET /datasets/{id}/queues lists all.")

    def _find_source(self, dataset: str, proposed: ProposedQueue, head: Version) -> Version:
        """Returns the version that a queue says it was mined from; the newest one if it does not say."""
        text = str(proposed.about.get("pool") or proposed.about.get("set") or "")
        try:
            address = StoreAddress.parse(text)
            return self.datasets.find_version(dataset, address.version) if address.name == dataset else head
        # It was mined from a folder, or from a version that is gone.
        except (UsageError, ProblemError):
            return head


def _replace_marks(marks: dict[bytes, list[Mark]], news: Sequence[Mark]) -> dict[bytes, list[Mark]]:
    """Returns the marks with newer ones. A copy: other threads may be looking at the old ones."""
    found = dict(marks)
    for new in news:
        kept = [one for one in found.get(new.sample, ()) if (one.by, one.role) != (new.by, new.role)]
        found[new.sample] = [*kept, new]
    return found


def find_picks(proposed: ProposedQueue, rows: Rows) -> list[Pick]:
    """Returns the picks of a queue with the samples of a version. Raises ProblemError (422)."""
    wanted = {row["name"] for row in proposed.rows if not row["sha256"]}
    by_name = {name: row for row, name in enumerate(rows.names) if name in wanted} if wanted else {}
    ids = [bytes.fromhex(row["sha256"]) if row["sha256"] else b"" for row in proposed.rows]
    found = rows.find(np.array(ids, "S32"))
    keys, picks, faults = rows.keys, list[Pick](), list[tuple[str, str]]()
    for place, (pick, row) in enumerate(zip(proposed.rows, found.tolist(), strict=True)):
        own = row if pick["sha256"] else by_name.get(pick["name"], -1)
        if own < 0:
            faults.append((f"/{place}", f"the newest version has no sample {pick['sha256'] or pick['name']:.120}"))
            continue
        label = int(rows.label[own])
        given = None if label == NO_LABEL else rows.classes[label]
        shown = (pick["proposed"], pick["probability"], pick["score"], pick["arm"], pick["copies"])
        picks.append(Pick(keys[own].ljust(32, b"\0"), given, *shown))
    if faults:
        what = f"the data set does not have the samples of {pluralise(len(faults), 'pick')}"
        fix = "Mine a version of this data set, for example store:NAME@v3/unlabelled."
        raise refuse("wrong-change", what, fix, errors=faults[:_MOST_ERRORS])
    if len({pick.sample for pick in picks}) < len(picks):
        raise refuse("wrong-change", "a sample is in the queue twice", "Send each once.")
    return picks
