"""Data sets of a lineage: what a run was trained on, whether it is still there and the same, and who set its labels."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

from headway.core.errors import HeadwayError
from headway.core.text_format import pluralise
from headway.core.untrusted_json import is_object, is_sha256, is_whole_number
from headway.data.columns import COLUMNS_FILE, load_columns
from headway.data.data_recipe import SYNTHETIC
from headway.data.store_address import EVAL, TRAIN, StoreAddress, is_store_address
from headway.storage.addresses import is_url, redact_url

# Linux' limit for a path with its end.
_MOST_PATH = 4096
DataState = Literal["unchanged", "changed", "missing", "unknown"]
"""`unknown`: the address is remote or not a pack, so it was not opened."""


@final
@dataclass(frozen=True, kw_only=True)
class LabelCredit:
    """Labels that one person or program has set.

    Attributes:
        by: who.
        labels: number of samples whose present label is theirs.
    """

    by: str
    labels: int

    def describe(self) -> str:
        """Returns a phrase for the terminal."""
        return f"{self.labels:,} by {self.by}"


@final
@dataclass(frozen=True, kw_only=True)
class DataOrigin:
    """One data set of a run.

    Attributes:
        role: `train` or `eval`.
        address: absolute path or address, without passwords.
        fingerprint: as the run has recorded it; empty: it has not.
        samples: number of samples as the run has recorded it; None: it has not.
        state: what became of it since.
        source: what it was packed from, as its description says; empty: not known.
        version: ID of its version in a store; empty: it is in none.
        version_name: number and maker of the version, such as `v3 by ann: new photographs`; empty: not known.
        labels: who set the labels of the whole version; empty: not known. A pack does not record it, a store does.
    """

    role: str
    address: str
    fingerprint: str = ""
    samples: int | None = None
    state: DataState = "unknown"
    source: str = ""
    version: str = ""
    version_name: str = ""
    labels: tuple[LabelCredit, ...] = ()

    def describe(self) -> str:
        """Returns a line for the terminal."""
        parts = [self.address]
        if self.samples is not None:
            parts.append(pluralise(self.samples, "sample"))
        # The ID stands in the address.
        if self.version_name:
            parts.append(self.version_name)
        if self.fingerprint:
            parts.append(f"fingerprint {self.fingerprint}")
        if self.state != "unknown":
            parts.append("not there any more" if self.state == "missing" else self.state)
        if self.source:
            parts.append(f"packed from {self.source}")
        return ", ".join(parts)


Credits = dict[str, tuple[LabelCredit, ...]]
"""Who set the labels, by the store and the ID of a version."""


def trace_data(data: Any, base: Path, about: Mapping[str, Any], credits: Credits) -> Iterator[DataOrigin]:
    """Yields the data sets of a run.

    Args:
        data: the part `data` of its recipe.
        base: folder that the paths of the recipe are relative to.
        about: its provenance.
        credits: versions that were counted before, since that reads their whole history; more are added.
    """
    if not is_object(data):
        return
    for role in ("train", "eval"):
        address = data.get(role)
        if not isinstance(address, str) or not address or address == SYNTHETIC:
            continue
        # Provenance has facts of the training set alone.
        told = about.get("fingerprint") if role == "train" else None
        samples = about.get("samples") if role == "train" else None
        fingerprint = told if isinstance(told, str) and is_sha256(told) else ""
        origin = DataOrigin(
            role=role,
            address=address,
            fingerprint=fingerprint,
            samples=samples if is_whole_number(samples) else None,
        )
        yield _trace_version(origin, base, credits) if is_store_address(address) else _trace_set(origin, base)


def _trace_set(origin: DataOrigin, base: Path) -> DataOrigin:
    if is_url(origin.address):
        return replace(origin, address=redact_url(origin.address))
    path = join_path(base, origin.address.removeprefix("file://"))
    if path is None:
        return replace(origin, state="missing")
    state, source = _compare(path, origin.fingerprint)
    return replace(origin, address=str(path), state=state, source=source)


def _trace_version(origin: DataOrigin, base: Path, credits: Credits) -> DataOrigin:
    """Returns the origin with the ID of its version in a store, its state, and who set the version's labels."""
    # Imported here: most lineages have no store.
    from headway.lifecycle.store.store import Store

    try:
        address = StoreAddress.parse(origin.address, base=base)
        store = Store(address.find_store())
        pinned = replace(address, folder=str(store.folder)).pin(TRAIN if origin.role == "train" else EVAL)
        state, _ = _compare(pinned.resolve_split(), origin.fingerprint)
        made = store.resolve(str(pinned))
    # The store was moved, or the version was collected as garbage. A run has recorded the ID in its recipe.
    except HeadwayError:
        return replace(origin, state="missing", version=_find_version_id(origin.address))
    told = f"v{made.number} by {made.by}" + (f": {made.message}" if made.message else "")
    origin = replace(origin, address=str(pinned), state=state, version=pinned.version, version_name=told)
    key = f"{store.folder}@{pinned.version}"
    if key not in credits:
        try:
            counts = store.count_setters(str(pinned))
        # A version that it comes from was collected as garbage.
        except HeadwayError:
            counts = {}
        credits[key] = tuple(LabelCredit(by=by, labels=count) for by, count in counts.items())
    return replace(origin, labels=credits[key])


def _find_version_id(address: str) -> str:
    found = re.search(r"@([0-9a-f]{64})(/|$)", address)
    return found[1] if found else ""


def join_path(base: Path, text: str) -> Path | None:
    """Returns the absolute path of a text in a recipe or a provenance; None if no file can have this name."""
    try:
        path = os.path.abspath(base / Path(text).expanduser())
        os.fsencode(path)
    # A surrogate, and a home folder of nobody.
    except (ValueError, RuntimeError):
        return None
    return Path(path) if "\0" not in path and len(path) < _MOST_PATH else None


def _compare(path: Path, fingerprint: str) -> tuple[DataState, str]:
    """Returns what became of a data set, and what it was packed from if it is the same."""
    try:
        if not path.exists():
            return "missing", ""
    # A folder that may not be read, or a name that is too long.
    except OSError:
        return "unknown", ""
    columns = path / COLUMNS_FILE
    # Foreign data would have to be scanned as a whole.
    if not columns.is_file():
        return "unknown", ""
    try:
        _, description, _ = load_columns(columns)
    except HeadwayError:
        return "changed", ""
    if not fingerprint:
        return "unknown", description.source
    same = description.fingerprint == fingerprint
    return ("unchanged" if same else "changed"), (description.source if same else "")
