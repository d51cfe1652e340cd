"""The picks of a round as a queue of the label page: how they get there, and what people said about them."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from headway.core.errors import DataError
from headway.core.files import read_text
from headway.core.untrusted_json import JsonError, parse_object
from headway.lifecycle.mining.review import RESULT
from headway.lifecycle.service.labelling.database import FILE, LabelDatabase
from headway.lifecycle.service.labelling.labelling import find_picks
from headway.lifecycle.service.labelling.parsing import name_queue, parse_queue
from headway.lifecycle.service.labelling.records import Queue, find_standing
from headway.lifecycle.service.server import FOLDER
from headway.lifecycle.store.steps import name_user
from headway.lifecycle.store.store import Store


def offer_picks(store: Store, dataset: str, version: str, mined: Path, name: str) -> str:
    """Adds the picks of a folder of `headway mine` as a queue, and returns its ID. A second call changes nothing.

    A server of the store may run meanwhile; it shows the queue at once.

    Args:
        version: ID of the version that was mined.
        name: of the queue, for people.
    """
    try:
        proposed = parse_queue(parse_object(read_text(mined / RESULT)) | {"name": name})
    except (OSError, JsonError) as error:
        fix = "Remove this folder, and the loop mines again."
        raise DataError(f"the picks cannot be read ({error})", where=str(mined / RESULT), fix=fix) from error
    picks = find_picks(proposed, store.read_rows(f"{dataset}@{version}"))
    queue = Queue(
        queue=name_queue(dataset, proposed.kind, picks),
        dataset=dataset,
        name=proposed.name,
        kind=proposed.kind,
        version=version,
        by=name_user(None),
        created_s=time.time(),
        size=len(picks),
        about=proposed.about,
    )
    place = store.folder / FOLDER
    place.mkdir(exist_ok=True)
    with closing(LabelDatabase(place / FILE)) as database:
        database.add_queue(queue, picks)
    return queue.queue


class QueueMarks(NamedTuple):
    """Answers of people about a queue in the label page."""

    unsure: frozenset[str]
    """IDs of the samples about which they are not sure, so that they have no label."""
    seconds: float
    """Time that all their answers took."""


def read_marks(store: Store, dataset: str, queue: str) -> QueueMarks:
    """Returns what people have said about a queue so far."""
    with closing(LabelDatabase(store.folder / FOLDER / FILE)) as database:
        marks = database.read_marks(dataset, queue)
    return QueueMarks(
        unsure=frozenset(sample.hex() for sample, own in marks.items() if find_standing(own).label is None),
        seconds=sum(mark.seconds for own in marks.values() for mark in own),
    )
