"""AnyStore: what a store in a folder and one behind a data service have in common, for `headway dataset`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypedDict, Unpack

from headway.lifecycle.store.ingest import Progress
from headway.lifecycle.store.records import Change, Difference, Sample, Version
from headway.lifecycle.store.summary import Summary


class Changed(Protocol):
    """Result of a request for changes."""

    def to_json(self) -> dict[str, Any]:
        """Returns `version`, `number`, `is_new`, counts, `near_copies` and `rejected`, as the service answers."""
        ...


class ChangeOptions(TypedDict, total=False):
    """Options of a request for changes; see `Store.apply`."""

    ignore_near_copies: bool
    by: str | None
    message: str
    expected: str | None
    progress: Progress | None


class AddOptions(ChangeOptions, total=False):
    """Options of an addition; see `Store.add`."""

    prefix: str
    split: str
    unlabelled: bool


class NewFacts(TypedDict, total=False):
    """Facts about a new data set; see `Store.create`."""

    mode: str
    splits: Mapping[str, float] | None
    classes: Sequence[str] | None
    start: str | None
    about: Mapping[str, str] | None
    by: str | None
    message: str


class AnyStore(Protocol):
    """Data sets with versions, wherever they lie. The methods are those of `Store`."""

    def create(self, name: str, **facts: Unpack[NewFacts]) -> Version:
        """Creates a data set."""
        ...

    def add(self, name: str, source: str | os.PathLike[str], **options: Unpack[AddOptions]) -> Changed:
        """Adds images."""
        ...

    def apply(self, name: str, changes: Sequence[Change], **options: Unpack[ChangeOptions]) -> Changed:
        """Makes one new version by all of these changes."""
        ...

    def resolve(self, address: str) -> Version:
        """Returns the version of an address such as `cars@v3`."""
        ...

    def log(self, name: str) -> list[Version]:
        """Returns the versions of a data set, the newest first."""
        ...

    def list_datasets(self) -> dict[str, Version]:
        """Returns the newest version of each data set, by name."""
        ...

    def diff(self, first: str, second: str) -> Difference:
        """Returns what differs between two versions."""
        ...

    def summarise(self, address: str) -> Summary:
        """Returns counts by split and class, the bytes, and what was said about the data set."""
        ...

    def list_samples(self, address: str) -> Iterator[Sample]:
        """Yields the samples of a version, or of one split of it."""
        ...
