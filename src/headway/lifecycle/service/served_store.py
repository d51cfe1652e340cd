"""ServedStore: a store behind a data service, with the methods of `Store` that the service has requests for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Unpack, final

from headway.core.errors import HeadwayError, UsageError, suggest_nearest
from headway.data.store_address import PREFIX, STORE_VARIABLE, StoreAddress, is_service_url
from headway.lifecycle.service.client import ANY_VERSION, Client
from headway.lifecycle.store.additions import list_file_changes
from headway.lifecycle.store.any_store import AnyStore, ChangeOptions, NewFacts
from headway.lifecycle.store.records import KINDS, Change, Difference, Sample, Version
from headway.lifecycle.store.store import Store
from headway.lifecycle.store.summary import Summary

_OUTCOME = ("version", "number", "is_new", *KINDS, "duplicates", "near_copies", "rejected")
PATIENCE_S = 10.0
"""Seconds for which a service that cannot be reached is tried again: a person waits."""


def open_store(named: str | None, *, create: bool = False, shards: str | None = None) -> AnyStore:
    """Opens the store in a folder, or behind the URL of a data service.

    Args:
        named: folder or URL; None: $HEADWAY_STORE.
        create: make a store in a folder that has none.
        shards: address at which a new store keeps its shards; see `Store.make`.

    Raises:
        UsageError: there is no store, or its shards lie elsewhere.
    """
    url = os.environ.get(STORE_VARIABLE, "") if named is None else named
    if is_service_url(url):
        if shards is not None:
            fix = "Create the store on the machine of the service, before it is served."
            raise UsageError("--shards is for the folder of a new store, and a service is named", where=url, fix=fix)
        return ServedStore(url)
    return Store.make(named, shards=shards) if create else Store(named)


def split_service(address: str) -> tuple[str, str]:
    """Returns the URL of the data service that an address names, empty if none, and the rest of the address.

    Raises UsageError if it names a data service and no data set.
    """
    rest = address.removeprefix(PREFIX)
    url, _, place = rest.rpartition("//")
    if is_service_url(rest) and not (is_service_url(url) and place):
        what = "this is the URL of a data service, without a data set"
        raise UsageError(what, where=address, fix="Write store:http://127.0.0.1:8080//NAME, or NAME --store URL.")
    return (url, place) if is_service_url(url) else ("", address)


@final
@dataclass(frozen=True)
class Answered:
    """Answer of a service to a request for changes."""

    tree: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    """Sentences about files that were left out on this machine."""

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return dict(self.tree) | ({"notes": list(self.notes)} if self.notes else {})


@final
class ServedStore:
    """The store of a data service.

    Args:
        url: of the service. The token is that of $HEADWAY_TOKEN.

    Raises:
        UsageError: the URL is none of HTTP.
    """

    def __init__(self, url: str) -> None:
        self._url, self._client = url, Client(url, patience_s=PATIENCE_S)

    def create(self, name: str, **facts: Unpack[NewFacts]) -> Version:
        """Creates a data set; see `Store.create`. Needs the scope admin."""
        _expect_nobody(facts.get("by"))
        given = {key: value for key, value in facts.items() if value is not None}
        with _explain_answer(self._url):
            return _build_version(self._client.create(name, **given))

    def add(
        self,
        name: str,
        source: str | os.PathLike[str],
        *,
        prefix: str = "",
        split: str = "",
        unlabelled: bool = False,
        **options: Unpack[ChangeOptions],
    ) -> Answered:
        """Adds the image files of a folder or a list; see `Store.add`. `progress` counts bytes."""
        # A token without the scope read can still add images without labels.
        splits = tuple(self.summarise(name).counts) if split or not unlabelled else ()
        # Before anything is sent, which may take long.
        if split and split not in splits:
            raise UsageError(f"the data set has no split {split!r:.80}", fix=suggest_nearest(split, splits))
        changes, notes = list_file_changes(
            source, () if unlabelled else splits, prefix=prefix, split=split, unlabelled=unlabelled
        )
        options["message"] = options.get("message") or f"add {os.fspath(source)}"
        return replace(self.apply(name, changes, **options), notes=notes)

    def apply(self, name: str, changes: Sequence[Change], **options: Unpack[ChangeOptions]) -> Answered:
        """Makes one new version by all of these changes; see `Store.apply`.

        `by` has set the labels for which the changes name nobody. `progress` is called with (bytes sent, bytes in all).

        Raises:
            UsageError: the service has no request for it, or a file cannot be read.
            ServiceError: the service has refused it.
        """
        if options.get("ignore_near_copies"):
            what = "a data service always looks for near copies"
            raise UsageError(what, where="--ignore-near-copies", fix="Leave it out.")
        by = options.get("by")
        if not any(change.label is not None for change in changes):
            _expect_nobody(by)
        with _explain_answer(self._url):
            answer = self._client.change(
                name,
                [_describe_change(change, by or "") for change in changes],
                {change.name: change.file for change in changes if change.file is not None},
                if_match=options.get("expected") or ANY_VERSION,
                message=options.get("message", ""),
                progress=options.get("progress"),
            )
            # Whoever reads the answer counts on these.
            return Answered(answer | {key: answer[key] for key in _OUTCOME})

    def resolve(self, address: str) -> Version:
        """Returns the version of an address such as `cars@v3`."""
        place = self._parse(address)
        with _explain_answer(self._url):
            return _build_version(self._client.describe(place.name, place.version))

    def log(self, name: str) -> list[Version]:
        """Returns the versions of a data set, the newest first."""
        with _explain_answer(self._url):
            return [_build_version(one) for one in self._client.list_versions(self._parse(name).name)]

    def list_datasets(self) -> dict[str, Version]:
        """Returns the newest version of each data set, by name."""
        with _explain_answer(self._url):
            found = [_build_version(one) for one in self._client.list_datasets()]
        return {one.dataset: one for one in found}

    def diff(self, first: str, second: str) -> Difference:
        """Returns what differs between two versions of a data set."""
        places = [self._parse(address) for address in (first, second)]
        if places[0].name != places[1].name:
            what = f"a data service compares versions of one data set, not {places[0].name} and {places[1].name}"
            raise UsageError(what, where=self._url, fix="Compare them on the machine where the store lies.")
        versions = [place.version or self.resolve(place.name).version for place in places]
        with _explain_answer(self._url):
            tree = self._client.diff(places[0].name, *versions)
            return Difference(
                added=tuple(map(_build_sample, tree["added"])),
                removed=tuple(map(_build_sample, tree["removed"])),
                changed=tuple((_build_sample(one["before"]), _build_sample(one["after"])) for one in tree["changed"]),
            )

    def summarise(self, address: str) -> Summary:
        """Returns counts by split and class, the bytes, and what was said about the data set."""
        place = self._parse(address)
        with _explain_answer(self._url):
            tree = self._client.describe(place.name, place.version)
            return Summary(
                version=_build_version(tree),
                mode=tree["mode"],
                shares=tree["shares"],
                fixed_classes=tree["fixed_classes"],
                classes=tuple(tree["classes"]),
                counts={split: tuple(counts) for split, counts in tree["by_split"].items()},
                annotated=tree["annotated"],
                bytes=tree["bytes"],
                shards=tree["shards"],
                about=tree["about"],
            )

    def list_samples(self, address: str) -> Iterator[Sample]:
        """Yields the samples of a version, or of one split of it, sorted by ID."""
        place = self._parse(address)
        for one in self._client.list_samples(place.name, place.version, split=place.split or None):
            with _explain_answer(self._url):
                sample = _build_sample(one | {"sample": one["sha256"]})
            yield sample

    def _parse(self, address: str) -> StoreAddress:
        url, rest = split_service(address)
        place = StoreAddress.parse(rest)
        if place.folder or (url and url.rstrip("/") != self._url.rstrip("/")):
            raise UsageError("this address is in another store", where=address, fix=f"Leave {self._url} out.")
        return place


def _expect_nobody(by: str | None) -> None:
    if by is not None:
        what = "a data service names the owner of the token in its log; only who has set a label can be named beside it"
        raise UsageError(what, where="--by", fix="Leave it out.")


def _describe_change(change: Change, by: str) -> dict[str, Any]:
    """Returns a change as the service reads it."""
    facts = {"name": change.name, "sha256": change.sample, "split": change.split}
    tree: dict[str, Any] = {"op": change.operation} | {key: text for key, text in facts.items() if text}
    if change.operation == "label" or change.label is not None:
        tree["label"] = change.label
    if change.label is not None and (change.by or by):
        tree["by"] = change.by or by
    return tree if change.annotations is None else tree | {"annotations": change.annotations}


def _build_version(tree: Mapping[str, Any]) -> Version:
    facts = {name: tree[name] for name in Version.__dataclass_fields__}
    return Version(**facts | {"tags": tuple(facts["tags"])})


def _build_sample(tree: Mapping[str, Any]) -> Sample:
    return Sample(**{name: tree[name] for name in Sample.__dataclass_fields__ if name in tree})


@contextmanager
def _explain_answer(url: str) -> Iterator[None]:
    """Turns an answer that lacks what is read of it into a HeadwayError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        what = f"the service has answered something else than this version of Headway expects ({error!r:.100})"
        raise HeadwayError(what, where=url, fix="Use the same version of Headway on both sides.") from error
