"""The source of a Croissant description: a pack, or a version of a data set in a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from headway.core.errors import UsageError
from headway.data.columns import COLUMNS_FILE
from headway.data.store_address import TRAIN, StoreAddress


@final
@dataclass(frozen=True, kw_only=True)
class CroissantSource:
    """Packs that are described together.

    Attributes:
        root: folder that they are in.
        splits: folder of each split, by name; a single pack has no name.
        facts: what is known of `CroissantFacts`.
        is_version: they are a version, whose folder never changes.
        activity: what made it; empty: what the pack says.
        derived_from: address of what it was made from; empty: not known.
        setters: who set the label of each sample, by its SHA-256; empty: not known.
    """

    root: Path
    splits: Mapping[str, Path]
    facts: Mapping[str, str] = field(default_factory=dict)
    is_version: bool = False
    activity: str = ""
    derived_from: str = ""
    setters: Mapping[str, str] = field(default_factory=dict)

    @property
    def labellers(self) -> tuple[str, ...]:
        """Who set the labels, the busiest first."""
        return tuple(by for by, _ in Counter(self.setters.values()).most_common())


def open_version(text: str) -> CroissantSource:
    """Finds a version of a data set in a store, and what the store knows of it.

    Raises:
        UsageError: there is no such version, it has no samples, or a split is named.
        DataError: the store is damaged.
    """
    # Imported here: a pack needs no store.
    from headway.lifecycle.store.setters import UNKNOWN
    from headway.lifecycle.store.store import Store

    address = StoreAddress.parse(text)
    if address.split:
        fix = f"Describe the version: {text.rpartition('/')[0]}"
        raise UsageError("a description is of a whole version, not of a split", where=text, fix=fix)
    store, root = Store(address.find_store()), address.resolve()
    made = store.resolve(text)
    found = sorted(path.parent for path in root.glob(f"*/{COLUMNS_FILE}"))
    if not found:
        raise UsageError("this version has no samples", where=text, fix=f"headway dataset add {address.name} IMAGES")
    # The training set first, as in a folder of packs.
    found.sort(key=lambda path: (path.name != TRAIN, path.name))
    setters = {sample: by for sample, by in store.list_setters(text).items() if by != UNKNOWN}
    parent = f"urn:sha256:{made.parent}" if made.parent else ""
    known = store.history.read_about(address.name)
    return CroissantSource(
        root=root,
        splits={path.name: path for path in found},
        facts={"name": address.name, **{key: value for key, value in known.items() if key in _KNOWN}},
        is_version=True,
        activity=f"headway dataset, {address.name} v{made.number} ({made.version}) by {made.by}",
        derived_from=parent,
        setters=setters,
    )


_KNOWN = ("description", "license", "creator", "url")
