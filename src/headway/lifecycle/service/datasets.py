"""Datasets: what the service asks of the store, with the store's errors as answers of HTTP."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, final

import numpy as np

from headway.core.errors import UsageError
from headway.data.store_address import is_name
from headway.http.problems import ProblemError
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.blobs import Blob, BlobIndex
from headway.lifecycle.service.bodies import MAX_LISTED, LeftOut
from headway.lifecycle.service.croissant import Descriptions
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.store.differences import RowDifference, compare_rows
from headway.lifecycle.store.ingest import Progress
from headway.lifecycle.store.records import Change, Outcome, Rejected, StaleVersionError, Version
from headway.lifecycle.store.rows import NO_LABEL, Rows
from headway.lifecycle.store.store import Store
from headway.lifecycle.store.summary import summarise
from headway.lifecycle.store.version_files import get_version_folder

PAGE_SAMPLES = 200
"""Most samples in one answer."""
_CACHED_DIFFERENCES = 4
_SUMMARY = ("mode", "shares", "fixed_classes", "annotated", "bytes", "shards", "about")


@final
class Datasets:
    """The data sets of a store. All methods may be called by several threads.

    Args:
        folder: for what is the service's own.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self._store = store
        self._differences = OrderedDict[tuple[str, str], RowDifference]()
        self._lock = Lock()
        self._blobs = BlobIndex(store, folder / "removed.db", self._read_rows)
        self._descriptions = Descriptions(store, folder / "croissant")

    @property
    def folder(self) -> Path:
        """Folder of the store."""
        return self._store.folder

    def list_heads(self) -> dict[str, Version]:
        """Returns the newest version of each data set."""
        return self._store.list_datasets()

    def find_head(self, name: str) -> str:
        """Returns the ID of the newest version. Raises ProblemError (404)."""
        return self.find_version(name).version

    def find_version(self, name: str, version: str = "") -> Version:
        """Returns a version of a data set.

        Args:
            version: `v3`, a tag, or an ID; empty: the newest.

        Raises:
            ProblemError: there is none (404).
        """
        # Checked here: an address has characters with a meaning.
        if not is_name(name) or (version and not is_name(version)):
            raise refuse("not-found", "there is no such data set or version", "GET /datasets lists all.")
        try:
            return self._store.resolve(f"{name}@{version}" if version else name)
        except UsageError as error:
            path, verb = ("/datasets", "log")
            if version and name in self._store.list_datasets():
                path, verb = f"/datasets/{name}/versions", f"log {name}"
            raise refuse("not-found", error.what, f"GET {path}, or headway dataset {verb}, lists all.") from None

    def read_rows(self, name: str, version: str = "") -> tuple[Version, Rows]:
        """Returns a version with all its samples. Raises ProblemError (404, 410)."""
        found = self.find_version(name, version)
        return found, self._read_rows(found.version)

    def list_history(self, name: str) -> list[Version]:
        """Returns all versions, the newest first. Raises ProblemError (404)."""
        self.find_version(name)
        return self._store.log(name)

    def list_versions(self, name: str, below: int | None, count: int) -> dict[str, Any]:
        """Returns a page of versions, the newest first.

        Args:
            below: number of the last version of the page before; None: the first page.

        Raises:
            ProblemError: there is no such data set (404).
        """
        self.find_version(name)
        versions = self._store.log(name, below=below, count=count + 1)
        after = versions[count - 1].number if len(versions) > count else None
        return {"versions": [one.to_json() for one in versions[:count]], "next": after}

    def create(self, name: str, facts: Mapping[str, Any], by: str, request: str = "") -> Version:
        """Creates a data set, or returns the first version of the one that the same request has created.

        Args:
            request: its name; empty: each request is another one.

        Raises:
            ProblemError: there is such a data set (409), or a fact is impossible (422).
        """
        with explain_errors():
            try:
                if name not in self.list_heads():
                    return self._store.create(name, by=by, request=request, **facts)
            except UsageError:
                # The first request may have run at the same time.
                if name not in self.list_heads():
                    raise
        if request and (created := self._store.find_created(name, request)) is not None:
            return created
        raise refuse("exists", f"there is a data set {name!r} already", "Choose another name.")

    def compare(self, name: str, first: str, second: str, *, after: str, count: int) -> dict[str, Any]:
        """Returns a page of what differs between two versions, sorted by ID.

        Args:
            after: ID of the last sample of the page before; empty: the first page.
            count: most samples in it.

        Raises:
            ProblemError: there is no such version (404), or it was collected as garbage (410).
        """
        ids = [self.find_version(name, version).version for version in (first, second)]
        old, new = (self._read_rows(one) for one in ids)
        found = self._find_difference(ids[0], ids[1], old, new)
        keys = np.concatenate([new.keys[found.added], old.keys[found.removed], new.keys[found.after]])
        order = np.argsort(keys, kind="stable")
        start = np.searchsorted(keys[order], np.bytes_(bytes.fromhex(after)), side="right") if after else 0
        shown = order[start : start + count]
        added, removed = len(found.added), len(found.added) + len(found.removed)
        changed = shown[shown >= removed] - removed
        last = keys[shown[-1]] if len(shown) else b""
        return {
            "counts": found.counts,
            "added": [new.get_sample(int(row)).to_json() for row in found.added[shown[shown < added]]],
            "removed": [
                old.get_sample(int(row)).to_json()
                for row in found.removed[shown[(shown >= added) & (shown < removed)] - added]
            ],
            "changed": [
                {
                    "before": old.get_sample(int(found.before[place])).to_json(),
                    "after": new.get_sample(int(found.after[place])).to_json(),
                }
                for place in changed
            ],
            # numpy leaves out zeros at the end.
            "next": last.ljust(32, b"\0").hex() if start + count < len(order) else None,
        }

    def describe(self, name: str, version: str = "") -> dict[str, Any]:
        """Returns facts and counts of a version. Raises ProblemError (404)."""
        found = self.find_version(name, version)
        rows = self._read_rows(found.version)
        summary = summarise(found, rows, self._store.history.read_about(name))
        labelled = rows.label[rows.label != NO_LABEL]
        per_class = np.bincount(labelled, minlength=len(rows.classes)).tolist()
        return found.to_json() | {
            "samples": len(rows),
            "unlabelled": len(rows) - len(labelled),
            "classes": dict(zip(rows.classes, per_class, strict=True)),
            "splits": {split: sum(counts) for split, counts in summary.counts.items()},
            # Of each class, in the order of the classes.
            "by_split": summary.counts,
            **{key: getattr(summary, key) for key in _SUMMARY},
        }

    def list_samples(
        self, name: str, version: str, *, label: str | None, split: str | None, after: str, count: int
    ) -> dict[str, Any]:
        """Returns a page of samples, sorted by ID.

        Args:
            label: only of this class; empty: only those without a label; None: all.
            split: only of this split; None: all.
            after: ID of the last sample of the page before; empty: the first page.

        Raises:
            ProblemError: there is no such version, class or split (404).
        """
        found = self.find_version(name, version)
        rows = self._read_rows(found.version)
        places = np.arange(len(rows))
        if after:
            places = places[np.searchsorted(rows.keys, np.bytes_(bytes.fromhex(after)), side="right") :]
        if label is not None:
            places = places[rows.label[places] == find_class(rows, label)]
        if split is not None:
            places = places[rows.split[places] == find_split(rows, split)]
        samples = [rows.get_sample(int(place)) for place in places[:count]]
        listed = []
        for one in samples:
            tree = one.to_json()
            listed.append({"sha256": tree.pop("sample"), **tree, "href": f"/blobs/{one.sample}"})
        after = samples[-1].sample if len(places) > count else ""
        return {"version": found.version, "samples": listed, "next": after or None}

    def describe_for_others(self, name: str, version: str, file: str) -> bytes:
        """Returns the Croissant description of a version, or the table of its samples.

        Raises:
            ProblemError: there is no such version (404, 410), or a fact about it is missing (409).
        """
        found = self.find_version(name, version)
        self._read_rows(found.version)
        return self._descriptions.find(found, file)

    def find_blob(self, sha256: str) -> Blob:
        """Returns where the bytes of a sample lie, in any version. Raises ProblemError (404)."""
        return self._blobs.find(sha256)

    def find_request(self, name: str, request: str, age_s: float) -> Answer | None:
        """Returns the answer to a request that was carried out; None: it was not.

        Args:
            age_s: seconds after which it counts as another request.
        """
        outcome = self._store.find_outcome(name, request)
        if outcome is None or outcome.version.time < time.time() - age_s:
            return None
        return build_answer(outcome)

    def commit(
        self,
        name: str,
        changes: Sequence[Change],
        *,
        by: str,
        message: str,
        request: str,
        expected: str | None,
        rejected: LeftOut,
        progress: Progress | None = None,
    ) -> Answer:
        """Makes a version of the newest one, or none if nothing changes.

        Args:
            by: who asks for it.
            message: what the client says about it.
            request: its name.
            expected: ID that the newest version must have; None: any.
            rejected: files that were left out, for the answer.
            progress: called with (images done, images in all); what it raises ends the work, and nothing is changed.

        Raises:
            ProblemError: another version is the newest one (412), or a change cannot be made (422).
        """
        for change in changes:
            # The store would read each of its versions before it says that none has the bytes.
            if change.operation == "add" and change.file is None and not self._has_blob(change.sample):
                what = f"the store has no bytes with the ID {change.sample}"
                raise refuse("wrong-change", what, "Send the file itself.")
        with explain_errors():
            outcome = self._store.apply(
                name,
                changes,
                by=by,
                message=message,
                expected=expected,
                progress=progress,
                request=request,
                rejected=[Rejected(name=name, reason=reason) for name, reason in rejected.listed],
            )
        return build_answer(outcome, rejected.count - len(rejected.listed))

    def _has_blob(self, sha256: str) -> bool:
        try:
            self._blobs.find(sha256)
        except ProblemError:
            return False
        return True

    def _find_difference(self, first: str, second: str, old: Rows, new: Rows) -> RowDifference:
        """Compares two versions; those of the last pages are kept."""
        with self._lock:
            known = self._differences.get((first, second))
        if known is not None:
            return known
        found = compare_rows(old, new)
        with self._lock:
            self._differences[first, second] = found
            while len(self._differences) > _CACHED_DIFFERENCES:
                self._differences.popitem(last=False)
        return found

    def _read_rows(self, version: str) -> Rows:
        """Reads a version. Raises ProblemError (410) if it was collected as garbage."""
        if not get_version_folder(self._store.folder, version).is_dir():
            raise refuse("gone", "the version was collected as garbage", "Use a newer one.")
        return self._store.rows.read(version)


def build_answer(outcome: Outcome, unlisted: int = 0) -> Answer:
    """Returns the answer to a request: 201 with the new version, or 200 if nothing has changed.

    Args:
        unlisted: files that were left out beside those of the outcome.
    """
    tree = outcome.to_json()
    tree |= {"rejected_count": unlisted + len(outcome.rejected), "near_copies_count": len(outcome.near_copies)}
    for kind in ("rejected", "near_copies"):
        tree[kind] = tree[kind][:MAX_LISTED]
    version = outcome.version
    location = f"/datasets/{version.dataset}/versions/{version.version}"
    headers = {"etag": f'"{version.version}"', "location": location}
    return Answer(201 if outcome.is_new else 200, tree, headers)


def find_class(rows: Rows, label: str) -> int:
    """Returns the number of a class; empty: of no label. Raises ProblemError (404)."""
    if label and label not in rows.classes:
        raise refuse("not-found", f"the version has no class {label[:100]!r}", "Name one that it has.")
    return rows.classes.index(label) if label else NO_LABEL


def find_split(rows: Rows, split: str) -> int:
    """Returns the number of a split. Raises ProblemError (404)."""
    if split not in rows.schema.splits:
        raise refuse("not-found", f"the version has no split {split[:100]!r}", "Name one that it has.")
    return rows.schema.splits.index(split)


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turns refusals of the store into problems."""
    try:
        yield
    except StaleVersionError as error:
        headers = [(b"etag", f'"{error.head}"'.encode())]
        raise refuse("head-moved", error.what, error.fix, headers=headers) from None
    except UsageError as error:
        raise refuse("wrong-change", error.what, error.fix or "Mend it, and send all again.") from None
