"""Reviews a folder of picks whose labels people have set, and writes what came back beside them.

FOLDER/
    labelled.csv    the picks that have got a label, as a list for the next data set
    review.json     what each arm gave
    review.html     the page, with the images on which the network was wrong
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from headway.core.errors import DataError, HeadwayError, UsageError
from headway.core.files import describe_os_error, read_text, write_atomically
from headway.core.text_format import pluralise
from headway.core.untrusted_json import Checks, JsonError, expect_entries, is_sha256, is_text, parse_object
from headway.data.store_address import StoreAddress, is_store_address
from headway.lifecycle.interchange.lists import read_list
from headway.lifecycle.mining.picture_list import write_rows
from headway.lifecycle.mining.review import PICKS, RESULT, Review, is_labelled, review_rows
from headway.lifecycle.mining.review_page import write_review_page
from headway.lifecycle.store.store import Store

LOG = logging.getLogger("headway.lifecycle")
LABELLED, REVIEW, PAGE = "labelled.csv", "review.json", "review.html"
COPIED = ("path", "label", "name", "sha256", "split", "by")
"""Columns of the picks that the list of labelled ones has too, as far as they are filled."""
_TEXT = (is_text, "a text")
_TEXTS = (lambda value: isinstance(value, list) and all(map(is_text, value)), "a list of texts")
_OBJECTS = (lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value), "a list of objects")
_ENTRIES: Checks = {"pool": _TEXT, "classes": _TEXTS, "picks": _OBJECTS}


@final
@dataclass(frozen=True, kw_only=True)
class ReviewedFolder:
    """The result of `review_folder`.

    Attributes:
        folder: folder of the picks.
        pool: the pool that they are of.
        review: what each arm gave.
        rows: labels that `picks.csv` has got, as rows of `labelled.csv`.
    """

    folder: Path
    pool: str
    review: Review
    rows: tuple[dict[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the review, and the number of new labels."""
        return self.review.to_json() | {"pool": self.pool, "labels": len(self.rows)}

    def describe(self) -> str:
        """Returns the review and the next command, for the terminal."""
        lines = [self.review.describe(), f"Page: {self.folder / PAGE}"]
        if self.review.arms and not any(arm.labelled for arm in self.review.arms):
            lines.append(f"No pick has a label yet. Set the column label in {self.folder / PICKS}, and review again.")
        if self.rows:
            lines.append(f"{pluralise(len(self.rows), 'label')} in {self.folder / LABELLED}. Next: {self.next_command}")
        return "\n".join(lines)

    @property
    def next_command(self) -> str:
        """The command that takes the labels on: into the store of the pool, or into a pack."""
        path = shlex.quote(str(self.folder / LABELLED))
        if not is_store_address(self.pool):
            return f"headway pack {path} {shlex.quote(f'{self.folder}.packed')}"
        address = StoreAddress.parse(self.pool)
        store = f" --store {shlex.quote(address.folder)}" if address.folder else ""
        return f"headway dataset label {address.name} --list {path}{store}"


def review_folder(folder: Path) -> ReviewedFolder:
    """Reviews FOLDER/picks.csv, and writes list, review and page.

    Picks of a store that have no label in the list have the one of the newest version, if it has one.

    Raises:
        UsageError: this is not a folder of `headway mine`. DataError: the list or mine.json is damaged.
    """
    about = _read_result(folder / RESULT)
    # A label that is still the one of the pool, such as `unknown`, was not set by anyone.
    before = {pick["name"]: pick["label"] for pick in about["picks"]}
    rows, classes = _read_picks(folder / PICKS), set(about["classes"])
    own = [row for row in rows if is_labelled(row, classes, before)]
    columns = [name for name in COPIED if name in ("path", "label") or any(row[name] for row in own)]
    # Labels of the list are new to the store; those of the store need not go there again.
    stored = _read_store_labels(about["pool"], [row["sha256"] for row in rows if not row["label"]])
    rows = [row if row["label"] else row | {"label": stored.get(row["sha256"], "")} for row in rows]
    reviewed = ReviewedFolder(
        folder=folder,
        pool=about["pool"],
        review=review_rows(rows, about["classes"], before),
        rows=tuple({name: row[name] for name in columns} for row in own),
    )
    # Packed as it is, the list of picks would make a class of its skipped rows.
    write_rows(folder / LABELLED, reviewed.rows)
    wrong = [row for row in rows if is_labelled(row, classes, before) and row["label"] != row["proposed"]]
    write_review_page(folder / PAGE, reviewed.review, wrong)
    text = json.dumps(reviewed.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / REVIEW, text + "\n")
    return reviewed


def _read_result(path: Path) -> dict[str, Any]:
    try:
        tree = parse_object(read_text(path))
        expect_entries(tree, _ENTRIES)
        for number, pick in enumerate(tree["picks"]):
            expect_entries(pick, {"name": _TEXT, "label": _TEXT}, f"picks[{number}].")
    except (OSError, UnicodeDecodeError) as error:
        fix = "Name a folder that headway mine has written."
        raise UsageError(f"it cannot be read ({describe_os_error(error)})", where=str(path), fix=fix) from error
    except JsonError as error:
        raise DataError(f"it is damaged: {error}", where=str(path), fix="Mine again.") from None
    return tree


def _read_picks(path: Path) -> list[dict[str, str]]:
    """Returns the rows of the list, with every column of `COPIED`, and those that the review needs."""
    rows = []
    for image in read_list(path).images:
        where = f"{path}, image {image.name}"
        fix = "Mine again, and edit the column label only."
        for name in ("name", "proposed", "arm"):
            if not image.more.get(name):
                raise DataError(f"column {name!r} is missing or empty", where=where, fix=fix)
        if len(image.labels) > 1:
            raise DataError("the image has several labels", where=where, fix="Give it one.")
        texts = {name: str(image.more[name]) for name in ("name", "proposed", "arm")}
        label = image.labels[0] if image.labels else ""
        given = {"label": label, "sha256": image.sha256, "split": image.split, "by": image.by}
        rows.append({"path": image.name, **given, **texts})
    return rows


def _read_store_labels(pool: str, digests: list[str]) -> Mapping[str, str]:
    """Returns the labels of samples in the newest version of the pool's data set, by ID; none for other pools."""
    samples = sorted({digest for digest in digests if is_sha256(digest)})
    if not samples or not is_store_address(pool):
        return {}
    address = replace(StoreAddress.parse(pool), version="", split="")
    try:
        rows = Store(address.find_store()).read_rows(str(address))
    except HeadwayError as error:
        LOG.warning(f"Labels of the store cannot be read, so those of {PICKS} count alone ({error.what}).")
        return {}
    found = rows.find(np.array([bytes.fromhex(sample) for sample in samples], "S32"))
    labels = {
        sample: rows.get_sample(row).label for sample, row in zip(samples, found.tolist(), strict=True) if row >= 0
    }
    return {sample: label for sample, label in labels.items() if label is not None}
