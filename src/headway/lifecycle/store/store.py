"""Store: data sets with versions. Every method that changes one makes a new version; none changes an old one."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from headway.core.errors import DataError, HeadwayError, UsageError
from headway.core.files import sync_folder
from headway.core.mounts import is_on_network
from headway.data.columns import FLAG_SPLIT
from headway.data.store_address import DATABASE, STORE_VARIABLE, StoreAddress, expect_folder, find_store
from headway.lifecycle.store.additions import Additions, prepare_changes, prepare_source
from headway.lifecycle.store.change_rows import change_rows, find_targets
from headway.lifecycle.store.committing import Committer, Proposal
from headway.lifecycle.store.copy_splits import FindCopies
from headway.lifecycle.store.differences import build_difference
from headway.lifecycle.store.garbage import GarbageResult, collect_garbage
from headway.lifecycle.store.hash_rows import find_copies, hash_rows
from headway.lifecycle.store.history import Entry, History, NewEntry, create_database
from headway.lifecycle.store.ingest import Progress
from headway.lifecycle.store.manifest import Schema
from headway.lifecycle.store.merging import Side, merge_rows
from headway.lifecycle.store.objects import read_stored_image
from headway.lifecycle.store.open_objects import open_objects
from headway.lifecycle.store.publishing import expect_version, write_version
from headway.lifecycle.store.records import (
    KINDS,
    Change,
    Difference,
    MergeConflictError,
    Outcome,
    Rejected,
    Sample,
    StaleVersionError,
    Version,
)
from headway.lifecycle.store.remote_objects import claim_address, expect_address
from headway.lifecycle.store.rows import Rows, build_empty
from headway.lifecycle.store.rows_cache import RowsCache
from headway.lifecycle.store.setters import count_setters, list_setters
from headway.lifecycle.store.shard_objects import make_folders, stage
from headway.lifecycle.store.steps import Step, label_sample, name_user, remove_sample
from headway.lifecycle.store.summary import Summary, summarise
from headway.lifecycle.store.verify_store import StoreDamage, verify_store
from headway.lifecycle.store.version_files import build_manifest

DEFAULT_SPLITS: Mapping[str, float] = {"train": 0.9, "eval": 0.1}
GRACE_S = 86400.0
"""Seconds for which the garbage collection leaves what nothing leads to: a day."""


@final
class Store:
    """A folder of data sets with versions.

    Several processes may use it at once, on one machine. A process that is killed leaves the previous version.

    Args:
        folder: of an existing store; None: $HEADWAY_STORE.

    Raises:
        UsageError: there is no store.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = find_store(folder).resolve()
        self.history = History(self.folder)
        self.rows = RowsCache(self.folder)
        self._committer = Committer(self.folder, self.history, self.rows)
        # By data set: who decodes images that have no hashes yet.
        self._hashing = dict[str, threading.Lock]()

    @staticmethod
    def make(folder: str | os.PathLike[str] | None = None, *, shards: str | None = None) -> Store:
        """Opens the store in a folder, or creates one in an empty or missing folder.

        Args:
            shards: address at which a new store keeps its shards, such as `s3://bucket/cars`; None: in its folder.

        Raises:
            UsageError: the folder holds other files, or lies on a network file system; or the store is there and has
                its shards elsewhere, or another store has its shards at the address.
            HeadwayError: the folder or the address cannot be written.
        """
        named = os.fspath(folder) if folder is not None else os.environ.get(STORE_VARIABLE, "")
        if not named:
            fix = f"Name its folder with --store FOLDER, or set {STORE_VARIABLE}."
            raise UsageError("no store is named", fix=fix)
        expect_folder(named)
        path = Path(named).expanduser().resolve()
        if not (path / DATABASE).is_file():
            if is_on_network(path):
                what = "a store cannot lie on a network file system, where SQLite's locks do not work"
                raise UsageError(what, where=str(path), fix="Choose a folder on a local disk.")
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise UsageError("this is not a store, and not empty", where=str(path), fix="Choose another folder.")
            try:
                path.mkdir(parents=True, exist_ok=True)
                if shards is not None:
                    claim_address(path, shards)
                # Last: without it, there is no store.
                create_database(path)
                sync_folder(path.parent)
            except OSError as error:
                what = f"the store cannot be created ({error.strerror})"
                raise HeadwayError(what, where=str(path), fix="Choose another folder.") from error
        elif shards is not None:
            expect_address(path, shards)
        return Store(path)

    def create(
        self,
        name: str,
        *,
        mode: str = "keep",
        splits: Mapping[str, float] | None = None,
        classes: Sequence[str] | None = None,
        start: str | None = None,
        about: Mapping[str, str] | None = None,
        by: str | None = None,
        message: str = "",
        request: str = "",
    ) -> Version:
        """Creates a data set.

        Args:
            name: its name in addresses.
            mode: how images are stored (see `headway.data.pack_mode`), fixed for all versions. With `keep`, the ID of a
                sample is the SHA-256 of its file.
            splits: share of each split, fixed for all versions; None: train 0.9, eval 0.1.
            classes: the only classes that labels may have; None: any.
            start: version of this store, such as `cars@v3`, whose samples and facts the new data set begins with.
            about: description, license, creator and url, for exports.
            by: who makes it; None: the user of this process.
            request: name under which `find_created` finds the version for a week; empty: none.

        Raises:
            UsageError: the name is taken, or a fact is impossible.
        """
        by = name_user(by)
        entry: Entry | None = None
        if start is not None:
            if mode != "keep" or splits is not None or classes is not None:
                what = "a data set that starts from another one has its mode, splits and classes"
                raise UsageError(what, where="start", fix="Leave the others out.")
            entry, version = self._find(start)
            version_id = version.version
        else:
            rows = build_empty(Schema.build(mode, DEFAULT_SPLITS if splits is None else splits, classes))
            with stage(self.folder) as staging:
                make_folders(self.folder)
                version_id = write_version(self.folder, staging, rows, build_manifest(rows))
        new = NewEntry(version=version_id, by=by, message=message, counts=dict.fromkeys(KINDS, 0))
        # Nothing can begin with a version that was collected as garbage.
        return self.history.create(
            name, about or {}, entry, new, lambda: expect_version(self.folder, version_id), request=request
        )

    def find_created(self, name: str, request: str) -> Version | None:
        """Returns the first version of a data set, if the request to `create` with this name has made it; else None."""
        found = self.history.find_request(name, request)
        return None if found is None else found[0]

    def add(
        self,
        name: str,
        source: str | os.PathLike[str],
        *,
        prefix: str = "",
        split: str = "",
        unlabelled: bool = False,
        ignore_near_copies: bool = False,
        by: str | None = None,
        message: str = "",
        expected: str | None = None,
        progress: Progress | None = None,
    ) -> Outcome:
        """Adds images: a folder CLASS/NAME.ext, a CSV or JSONL list, a pack, or other data that `headway.open` opens.

        Images whose bytes are there already are not added again, so a copy never lies in another split than the first.
        Sets of the source (train and eval, or all splits of a version) go to the splits of these names; otherwise the
        hash of each name says, and near copies go to the split of the first one.

        Args:
            prefix: put before each name, for images whose names are taken, such as `monday/`.
            split: split for all images; for those without a label, where they go when they get one.
            unlabelled: takes all image files of a folder, without labels.
            ignore_near_copies: does not look for near copies, for which every image is decoded once.
            expected: ID that the newest version must have; None: any.
            progress: called with (images done, images in all).

        Raises:
            UsageError: the source does not fit the data set.
            DataError: the source is damaged.
            StaleVersionError: another version is the newest one.
        """
        _, head = self.history.find(name)
        head_rows = self.rows.read(head.version)
        self._expect(name, head, expected)
        with stage(self.folder) as staging:
            additions = prepare_source(
                self.folder,
                staging,
                head_rows.schema,
                source,
                prefix=prefix,
                split=split,
                unlabelled=unlabelled,
                progress=progress,
            )
            hashed = [head_rows, *additions.rows]
            find_copies = None if ignore_near_copies else self._hash(name, hashed, progress, staging)
        message = message or f"add {os.fspath(source)}"
        step = Step(additions=additions, find_copies=find_copies)
        return replace(self._submit(name, lambda _: step, by, message, expected=expected), notes=additions.notes)

    def apply(
        self,
        name: str,
        changes: Sequence[Change],
        *,
        ignore_near_copies: bool = False,
        by: str | None = None,
        message: str = "",
        expected: str | None = None,
        progress: Progress | None = None,
        request: str = "",
        rejected: Sequence[Rejected] = (),
    ) -> Outcome:
        """Makes one new version by all of these changes: removals, labels and moves in their order, then additions.

        Args:
            ignore_near_copies: does not look for near copies of additions and of samples that get their first label.
            expected: ID that the newest version must have; None: any.
            request: name under which `find_outcome` finds the outcome for a week, even if this process is killed.
            rejected: samples that the caller has left out, for the outcome.

        Raises:
            UsageError: a sample, class or split does not exist; nothing was changed.
            StaleVersionError: another version is the newest one; nothing was changed.
        """
        others = [change for change in changes if change.operation != "add"]
        additions = Additions()
        # Labels alone are compared by the hashes that are there: nothing is decoded for them.
        find_copies = None if ignore_near_copies else self._hash(name, [], progress)
        if len(others) < len(changes):
            _, head = self.history.find(name)
            head_rows = self.rows.read(head.version)
            self._expect(name, head, expected)
            # Errors come before images are packed.
            change_rows(head_rows, others)
            with stage(self.folder) as staging:
                additions = prepare_changes(self.folder, staging, head_rows.schema, changes, progress)
                if find_copies is not None:
                    find_copies = self._hash(name, [head_rows, *additions.rows], progress, staging)
        stored = [change for change in changes if change.operation == "add" and change.file is None]
        step = Step(changes=others, additions=additions, stored=stored, find_copies=find_copies)
        return self._submit(
            name,
            lambda _: step,
            by,
            message or "change",
            expected=expected,
            changes=changes,
            request=request,
            rejected=rejected,
        )

    def find_outcome(self, name: str, request: str) -> Outcome | None:
        """Returns the outcome of a request to `apply`, by its name; None: it was not carried out, or is forgotten."""
        return self._committer.find_outcome(name, request)

    def label(self, name: str, labels: Mapping[str, str | None], **options: Any) -> Outcome:
        """Sets labels by the name or the ID of each sample; None takes a label away. Options: as `apply`."""
        changes = [label_sample(sample, label) for sample, label in labels.items()]
        return self.apply(name, changes, **{"message": "label", **options})

    def remove(self, name: str, samples: Sequence[str], **options: Any) -> Outcome:
        """Removes samples by name or ID; old versions keep them. Options: as `apply`."""
        changes = [remove_sample(sample) for sample in samples]
        return self.apply(name, changes, **{"message": "remove", **options})

    def merge(
        self,
        name: str,
        other: str,
        *,
        prefer: Side | None = None,
        by: str | None = None,
        message: str = "",
        expected: str | None = None,
    ) -> Outcome:
        """Merges what another version has changed since the newest version that both come from.

        Args:
            other: address of a version in this store, such as `cars-by-anna` or `cars@v3`.
            prefer: `ours` or `theirs` wins where both changed a sample in different ways; None: refuse.

        Raises:
            MergeConflictError: both changed the same samples in different ways; it lists all of them.
            UsageError: the versions have no common one, or other modes, splits or classes.
        """
        their_entry, their_version = self._find(other)
        head, version = self.history.find(name)
        common = self.history.find_common_entry(head, their_entry)
        if common is not None and common[0] == their_entry:
            self._expect(name, version, expected)
            return Outcome(version=version, is_new=False)
        theirs = self.rows.read(their_version.version)

        def merge(rows: Rows) -> Step:
            head, _ = self.history.find(name)
            common = self.history.find_common_entry(head, their_entry)
            if common is None or theirs.schema != rows.schema:
                what = f"{name} and {other} have no version in common"
                if common is not None:
                    what = f"{name} and {other} have other modes, splits or classes"
                fix = f"Data sets can be merged if one began as a version of the other: create NAME --from {name}."
                raise UsageError(what, fix=fix)
            base = self.rows.read(common[1].version)
            changes, conflicts = merge_rows(base, rows, theirs, prefer)
            if conflicts:
                raise MergeConflictError(f"{other} into {name}", conflicts)
            others = [change for change in changes if change.operation != "add"]
            stored = [change for change in changes if change.operation == "add"]
            return Step(changes=others, stored=stored, source=theirs)

        message = message or f"merge {other}"
        return self._submit(name, merge, by, message, expected=expected, merged=their_entry)

    def resolve(self, address: str) -> Version:
        """Returns the version of an address such as `cars@v3`. Raises UsageError if there is none."""
        return self._find(address)[1]

    def log(self, name: str, *, below: int | None = None, count: int | None = None) -> list[Version]:
        """Returns versions of a data set, the newest first.

        Args:
            below: only those with smaller numbers; None: all.
            count: most versions; None: all.
        """
        return self.history.list_versions(name, below, count)

    def list_datasets(self) -> dict[str, Version]:
        """Returns the newest version of each data set, by name."""
        return self.history.list_datasets()

    def diff(self, first: str, second: str) -> Difference:
        """Returns what differs between two versions, such as `cars@v1` and `cars@v2`."""
        rows = [self.read_rows(address) for address in (first, second)]
        return build_difference(rows[0], rows[1])

    def summarise(self, address: str) -> Summary:
        """Returns counts by split and class, the bytes, and what was said about the data set."""
        _, version = self._find(address)
        rows = self.rows.read(version.version)
        return summarise(version, rows, self.history.read_about(version.dataset))

    def count_setters(self, address: str) -> dict[str, int]:
        """Returns how many labels of a version each person or program has set, by name."""
        entry, _ = self._find(address)
        return count_setters(self.folder, self.history, entry)

    def list_setters(self, address: str) -> dict[str, str]:
        """Returns who set the label of each sample that has one, by its ID. Raises as `count_setters`."""
        entry, _ = self._find(address)
        found = list_setters(self.folder, self.history, entry)
        return {key.hex(): by for key, by in found.items()}

    def list_samples(self, address: str) -> Iterator[Sample]:
        """Yields the samples of a version, or of one split of it, sorted by ID."""
        place = StoreAddress.parse(address)
        rows = self.read_rows(address)
        number = rows.schema.find_split(place.split) if place.split else None
        for row in range(len(rows)) if number is None else np.flatnonzero(rows.split == number).tolist():
            yield rows.get_sample(row)

    def read_rows(self, address: str) -> Rows:
        """Returns all samples of a version as arrays."""
        return self.rows.read(self.resolve(address).version)

    def read_image(self, address: str, sample: str) -> bytes:
        """Returns the stored bytes of a sample of a version, by its ID or name.

        Raises:
            UsageError: the version has no such sample.
            DataError: its shard is missing or damaged.
        """
        rows = self.read_rows(address)
        (row,) = find_targets(rows, [remove_sample(sample)]).tolist()
        offset, length, flags = (int(rows.places[column][row]) for column in ("offset", "length", "flags"))
        shard = rows.shards[rows.shard[row]].digest
        is_split = bool(flags & FLAG_SPLIT)
        data = read_stored_image(open_objects(self.folder), shard, offset, length, is_split=is_split)
        if hashlib.sha256(data).digest() != rows.sample_id[row].tobytes():
            what = "the stored bytes are not those of the sample's ID"
            raise DataError(what, where=f"{address}, {rows.names[row]}", fix="Run headway dataset verify.")
        return data

    def tag(self, address: str, tag: str, *, replace: bool = False) -> Version:
        """Gives a version, such as `cars@v3`, a name of its own; `replace` moves a tag that is there."""
        place = self._parse(address)
        return self.history.tag(place.name, tag, place.version, replace=replace)

    def collect_garbage(
        self, *, keep: int | None = None, grace_s: float = GRACE_S, dry_run: bool = False, is_moved: bool = False
    ) -> GarbageResult:
        """Removes files that no version needs, once they are older than a grace.

        Args:
            keep: also removes all versions but the newest so many of each data set, those with tags, and those that
                runs were trained on whose folders are there.
            grace_s: seconds for which everything stays: a running job may be about to use it.
            dry_run: only counts.
            is_moved: this folder is a copy of the store that owned the shards at an address, and that is no more.

        Raises:
            UsageError: another store may need the shards; nothing was removed.
            DataError: a version is damaged, so what it needs is unknown; nothing was removed.
            HeadwayError: the address of the shards cannot be reached; the next call goes on.
        """
        return collect_garbage(
            self.folder, self.history, keep=keep, grace_s=grace_s, dry_run=dry_run, is_moved=is_moved
        )

    def verify(self, progress: Progress | None = None) -> list[StoreDamage]:
        """Reads every byte of the store, and returns what is damaged or missing."""
        return verify_store(self.folder, self.history, progress)

    def _parse(self, address: str) -> StoreAddress:
        place = StoreAddress.parse(address)
        if place.folder and Path(place.folder).resolve() != self.folder:
            raise UsageError("this address is in another store", where=address, fix="Leave its folder out.")
        return place

    def _find(self, address: str) -> tuple[Entry, Version]:
        place = self._parse(address)
        return self.history.find(place.name, place.version)

    def _expect(self, name: str, head: Version, expected: str | None) -> None:
        if expected is not None and expected != head.version:
            raise StaleVersionError(name, expected, head.version)

    def _hash(
        self, name: str, parts: Sequence[Rows], progress: Progress | None, staging: Path | None = None
    ) -> FindCopies:
        """Keeps the hashes of all these samples, and returns what finds near copies by them.

        Args:
            parts: first those of the newest version.
            staging: folder in which the shards of new ones may still lie.
        """
        for place, rows in enumerate(parts):
            # An earlier Headway kept no hashes. Additions at the same time must not each decode all of these images.
            with nullcontext() if place else self._hashing.setdefault(name, threading.Lock()):
                hash_rows(self.folder, rows, staging=staging, progress=progress)
        return partial(find_copies, self.folder)

    def _submit(self, name: str, change: Callable[[Rows], Step], by: str | None, message: str, **more: Any) -> Outcome:
        proposal = Proposal(change=change, by=name_user(by), message=message, **more)
        return self._committer.submit(name, proposal)
