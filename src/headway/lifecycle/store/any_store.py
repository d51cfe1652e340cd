"""AnyStore: what a store in a folder and one behind a data service have in common, for `headway dataset`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from headway.lifecycle.store.ingest import Progress
from headway.lifecycle.store.records import Change, Difference, Sample, Version
from headway.lifecycle.store.summary import Summary


class Changed(Protocol):
    """Result of a request for changes."""

    def to_json(self) -> dict[str, Any]:
        """Returns `version`, `number`, `is_new`, counts, `near_copies` and `rejected`, as the service answers."""
        ...


class AnyStore(Protocol):
    """Data sets with versions, wherever they lie. The methods are those of `Store`."""

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
    ) -> Version:
        """Creates a data set."""
        ...

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
    ) -> Changed:
        """Adds images."""
        ...

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
    ) -> Changed:
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
