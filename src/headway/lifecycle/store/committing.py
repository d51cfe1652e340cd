"""Commits changes to a data set: makes versions of the newest one, in groups, and begins anew if that has moved on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from headway.core.errors import DataError
from headway.lifecycle.store.commit_queue import CommitQueue
from headway.lifecycle.store.compaction import compact_rows
from headway.lifecycle.store.differences import compare_rows
from headway.lifecycle.store.history import Answered, Entry, History, NewEntry
from headway.lifecycle.store.publishing import NewVersion, expect_files, prepare_version, publish_versions
from headway.lifecycle.store.records import Change, NearCopy, Outcome, Rejected, StaleVersionError, Version
from headway.lifecycle.store.rows import Rows
from headway.lifecycle.store.rows_cache import RowsCache
from headway.lifecycle.store.shard_objects import lock_name, stage
from headway.lifecycle.store.steps import Step, list_makers
from headway.lifecycle.store.version_files import build_manifest, read_rows

MOST_PROPOSALS = 32
"""Proposals in a group."""
MOST_SAMPLES = 4_000_000
"""Samples that the versions of a group may have together: about 400 MB to write down."""
PATIENCE = 2
"""Times that another process may be faster before this one keeps all others out."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """A change that somebody asks for."""

    change: Callable[[Rows], Step]
    """Returns the step from the samples of the newest version."""
    by: str
    message: str
    expected: str | None = None
    """ID that the newest version must have; None: any."""
    changes: Sequence[Change] = ()
    """The changes of the step, for who set the labels."""
    merged: Entry | None = None
    """The entry that is merged. The step of a merge is about the newest entry in the database."""
    request: str = ""
    """Name under which the outcome is remembered; empty: it is not."""
    rejected: Sequence[Rejected] = ()
    """Samples that the caller has left out, for the outcome."""


@final
@dataclass(frozen=True, kw_only=True)
class _Taken:
    """A proposal with its place in the chain, or its error. Attributes: place: number of its version; -1: the head."""

    place: int = -1
    is_new: bool = False
    duplicates: tuple[tuple[str, str], ...] = ()
    near_copies: tuple[NearCopy, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    error: Exception | None = None

    def build_outcome(self, version: Version) -> Outcome:
        return Outcome(
            version=version,
            is_new=self.is_new,
            duplicates=self.duplicates,
            near_copies=self.near_copies,
            rejected=self.rejected,
        )


@final
@dataclass
class _Chain:
    """New versions, each made of the one before. Attributes: version, rows: of the last one."""

    version: str
    rows: Rows
    entries: list[NewEntry] = field(default_factory=list)
    files: list[NewVersion] = field(default_factory=list)
    taken: list[_Taken] = field(default_factory=list)


@final
class Committer:
    """Makes versions in a store. Any thread, and any process, may commit at the same time."""

    def __init__(self, store: Path, history: History, rows: RowsCache) -> None:
        self._store, self._history, self._rows = store, history, rows
        self._queue = CommitQueue[Proposal, Outcome](self._commit_group)

    def submit(self, name: str, proposal: Proposal) -> Outcome:
        """Makes a version of the newest one of a data set, or none if nothing changes. It is on the disk then.

        Raises:
            UsageError: the change cannot be made.
            StaleVersionError: another version is the newest one.
            DataError: a version or a shard is damaged.
            HeadwayError: the store cannot be written.
        """
        return self._queue.submit(name, proposal)

    def find_outcome(self, name: str, request: str) -> Outcome | None:
        """Returns the outcome of a request that was carried out; None: it was not, or is forgotten."""
        found = self._history.find_request(name, request)
        return None if found is None else Outcome.from_note(*found)

    def _commit_group(self, name: str, proposals: Sequence[Proposal]) -> list[Outcome | Exception]:
        lost = 0
        # A change that takes long to make would lose every race against small ones.
        while (results := self._try_group(name, proposals, is_alone=lost >= PATIENCE)) is None:
            lost += 1
        return results

    def _try_group(
        self, name: str, proposals: Sequence[Proposal], *, is_alone: bool
    ) -> list[Outcome | Exception] | None:
        """Commits the first proposals. Returns None if another process has made a version meanwhile."""
        with stage(self._store) as staging, lock_name(self._store, name) if is_alone else nullcontext():
            head, version = self._history.find(name)
            chain = _Chain(version.version, self._rows.read(version.version))
            group = _choose_group(proposals, len(chain.rows))
            for number, proposal in enumerate(group):
                folder = staging / str(number)
                folder.mkdir()
                chain.taken.append(self._take(name, chain, proposal, folder))
            answered = [
                Answered(request=proposal.request, result=taken.build_outcome(version).to_note(), place=taken.place)
                for proposal, taken in zip(group, chain.taken, strict=True)
                if proposal.request and taken.error is None
            ]
            versions = list[Version]()
            if chain.entries or answered:
                # Nothing is written down for a race that is lost.
                if self._history.find(name)[0] != head:
                    return None
                files = publish_versions(self._store, staging, chain.files)

                def check() -> None:
                    for one in files:
                        expect_files(self._store, one)

                with nullcontext() if is_alone else lock_name(self._store, name):
                    done = self._history.commit(name, head, chain.entries, answered, check)
                if done is None:
                    return None
                versions = done
                # Only of the last one: the next change is most likely made of it.
                if files and files[-1].folder is not None:
                    self._rows.keep(files[-1].version, chain.rows)
        made = [version, *versions]
        return [taken.error or taken.build_outcome(made[taken.place + 1]) for taken in chain.taken]

    def _take(self, name: str, chain: _Chain, proposal: Proposal, staging: Path) -> _Taken:
        """Adds the version of a proposal to the chain, if it changes anything. Raises OSError."""
        try:
            if proposal.expected is not None and proposal.expected != chain.version:
                raise StaleVersionError(name, proposal.expected, chain.version)
            before = chain.rows
            changed = proposal.change(before).take(before, self._read_all())
            after = changed.rows
            place = len(chain.entries) - 1
            taken = _Taken(
                place=place,
                duplicates=tuple(changed.duplicates),
                near_copies=tuple(changed.near_copies),
                rejected=(*proposal.rejected, *changed.rejected),
            )
            manifest = build_manifest(after)
            if manifest.compute_id() == chain.version and proposal.merged is None:
                return taken
            after = compact_rows(self._store, staging, after)
            files = prepare_version(self._store, staging, after, manifest)
            entry = NewEntry(
                version=files.version,
                by=proposal.by,
                message=proposal.message,
                counts=compare_rows(before, after).counts,
                merged=proposal.merged,
                setters=list_makers(before, after, proposal.changes, proposal.by),
            )
        # The store itself cannot be written: nothing of the group can be committed.
        except OSError:
            raise
        except Exception as error:
            return _Taken(error=error)
        chain.entries.append(entry)
        chain.files.append(files)
        chain.version, chain.rows = files.version, after
        return replace(taken, place=place + 1, is_new=True)

    def _read_all(self) -> Iterator[Rows]:
        """Yields the samples of every version that is there, those of the newest versions first."""
        seen = set[str]()
        for name in self._history.list_datasets():
            for version in self._history.list_versions(name):
                if version.version not in seen:
                    seen.add(version.version)
                    # Versions that were collected as garbage have nothing to give.
                    with suppress(DataError):
                        yield read_rows(self._store, version.version)


def _choose_group(proposals: Sequence[Proposal], samples: int) -> Sequence[Proposal]:
    """Returns the first proposals that can be one group; a merge is alone."""
    most = max(1, min(MOST_PROPOSALS, MOST_SAMPLES // max(1, samples)))
    for number, proposal in enumerate(proposals[:most]):
        if proposal.merged is not None:
            return proposals[: max(1, number)]
    return proposals[:most]
