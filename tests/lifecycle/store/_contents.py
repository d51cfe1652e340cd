"""Contents of data sets for property tests: the label of each image by its number, and the changes between two."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st
from tests.lifecycle.store._pictures import addition

from headway.lifecycle.store.records import Change

Content = dict[int, str | None]
COUNT = 5
contents = st.dictionaries(st.sampled_from(range(COUNT)), st.sampled_from(["ant", "bee", "cat", None]), max_size=COUNT)


def name_of(number: int) -> str:
    return f"image-{number}.png"


def reach(place: Path, now: Content, wanted: Content) -> list[Change]:
    """The changes that make one content of another."""
    gone = [Change(operation="remove", name=name_of(number)) for number in now if number not in wanted]
    labels = [
        Change(operation="label", name=name_of(number), label=label)
        for number, label in wanted.items()
        if number in now and now[number] != label
    ]
    # Half of the images are placed in a split; their labels come and go without a word about it.
    new = [
        addition(place, name_of(number), number, label, split="eval" if number % 2 else "")
        for number, label in wanted.items()
        if number not in now
    ]
    return [*gone, *labels, *new]
