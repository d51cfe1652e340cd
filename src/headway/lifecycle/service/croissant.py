"""Croissant descriptions of versions (JSON-LD), and the table of samples that they name.

Both are made of what the version says, without reading an image, and a few of them are kept on the disk.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import final

from headway.core.errors import UsageError
from headway.core.files import open_atomically, write_atomically
from headway.data.store_address import TRAIN
from headway.lifecycle.interchange.croissant import (
    LABELLED_BY,
    CroissantFacts,
    DescribedFile,
    DescribedSet,
    build_croissant,
)
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.store.records import Version
from headway.lifecycle.store.rows import NO_LABEL, Rows
from headway.lifecycle.store.setters import UNKNOWN
from headway.lifecycle.store.store import Store

MEDIA_TYPE = "application/ld+json"
KEPT = 8
"""Descriptions that are kept; the table of a version has about 150 bytes a sample."""
DESCRIPTION, TABLE = "croissant.json", "samples.csv"


@final
class Descriptions:
    """Croissant descriptions of a store's versions. Any thread may call.

    Args:
        folder: where they are kept; it is made if it does not exist.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        # One at a time: each reads the history for who has set the labels.
        self._lock = threading.Lock()

    def find(self, version: Version, file: str) -> bytes:
        """Returns the description of a version, or its table.

        Raises:
            ProblemError: a fact that Croissant needs is not known (409).
        """
        with self._lock:
            place = self._folder / f"{version.dataset}@{version.number}-{version.version}"
            if not (place / DESCRIPTION).exists():
                self._write(version, place)
            # Its time says when it was asked for last.
            os.utime(place)
            data = (place / file).read_bytes()
            kept = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime)
            for old in kept[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)
            return data

    def _write(self, version: Version, place: Path) -> None:
        facts = self._build_facts(version)
        address = f"{version.dataset}@v{version.number}"
        rows, found = self._store.read_rows(address), self._store.list_setters(address)
        setters = {sample: by for sample, by in found.items() if by != UNKNOWN}
        splits = [name for name in rows.schema.splits if (rows.split == rows.schema.find_split(name)).any()]
        splits.sort(key=lambda name: (name != TRAIN, name))
        place.mkdir(parents=True, exist_ok=True)
        about = "Names, labels and sizes of the samples. The bytes of a sample are at /blobs/SHA256 of this server."
        with open_atomically(place / TABLE) as file:
            digest, size = hashlib.sha256(), 0
            for data in _render_table(rows, splits, setters):
                digest.update(data)
                size += len(data)
                file.write(data)
        table = DescribedFile(
            id=TABLE,
            path=f"/datasets/{version.dataset}/versions/{version.version}/{TABLE}",
            size=size,
            sha256=digest.hexdigest(),
            media_type="text/csv",
            about=about,
        )
        described = DescribedSet(
            label_kind="class",
            classes=rows.classes,
            splits=tuple(splits),
            archives=(),
            image_types=(),
            activity=f"headway dataset, {version.dataset} v{version.number} ({version.version}) by {version.by}",
            derived_from=f"urn:sha256:{version.parent}" if version.parent else "",
            labellers=tuple(sorted(set(setters.values()))),
        )
        text = json.dumps(build_croissant(facts, described, [table]), indent=1, ensure_ascii=False)
        # Last: it says that the folder is complete.
        write_atomically(place / DESCRIPTION, f"{text}\n")

    def _build_facts(self, version: Version) -> CroissantFacts:
        known = self._store.history.read_about(version.dataset)
        facts = CroissantFacts(
            name=version.dataset,
            description=known.get("description", ""),
            license=known.get("license", ""),
            creator=known.get("creator", ""),
            url=known.get("url", ""),
            published=time.strftime("%Y-%m-%d", time.gmtime(version.time)),
            # Any change may be one that needs a new first number.
            version=f"{version.number}.0.0",
        )
        try:
            facts.check()
        except UsageError as error:
            fix = "Give description, license, creator and url as `about` when the data set is created."
            raise refuse("conflict", error.what, fix) from None
        return facts


def _render_table(rows: Rows, splits: list[str], setters: dict[str, str]) -> list[bytes]:
    """Returns the parts of the table: its head, and the samples of each split, sorted by ID."""
    by = [LABELLED_BY] if setters else []
    split = ["split"] if splits else []
    found = [_join([["sha256", "name", "label", *split, *by, "width", "height"]])]
    for name in splits:
        numbers = (rows.split == rows.schema.find_split(name)).nonzero()[0].tolist()
        lines = list[list[str]]()
        for row in numbers:
            sample, label = rows.sample_id[row].tobytes().hex(), int(rows.label[row])
            cells = [sample, rows.names[row], "" if label == NO_LABEL else rows.classes[label], name]
            cells += [setters.get(sample, "")] if by else []
            lines.append([*cells, str(rows.places["width"][row]), str(rows.places["height"][row])])
        found.append(_join(lines))
    return found


def _join(lines: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
