"""What is written is read again, equal; and so is what went through every other format on the way."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lifecycle.interchange._annotations import FORMATS, TEXTS, annotations

from headway.core.errors import DataError
from headway.lifecycle.interchange.annotations import AnnotatedImage, Annotations, Box, convert_box
from headway.lifecycle.interchange.convert import read_annotations, write_annotations


def go_through(found: Annotations, form: str, name: str = "") -> Annotations:
    """Writes annotations in a format and reads them again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / (name or FORMATS[form])
        write_annotations(path, found, form)
        return read_annotations(path, form)


@given(annotations())
@pytest.mark.parametrize("form", FORMATS)
def test_a_format_gives_back_what_it_got(form: str, given_ones: Annotations) -> None:
    again = go_through(given_ones, form)
    # Boxes of another form have become those of the format, so that they agree to a millionth of a pixel.
    assert [image.labels for image in again.images] == [image.labels for image in given_ones.images]
    for before, after in zip(given_ones.images, again.images, strict=True):
        assert replace(after, boxes=(), more={}) == replace(before, boxes=())
        for old, new in zip(before.boxes, after.boxes, strict=True):
            assert old.label == new.label
            assert form != "list" or new.form == old.form
            if new.form == old.form:
                assert new.numbers == old.numbers
            assert new.to_pixels(before.size) == pytest.approx(old.to_pixels(before.size), abs=1e-6, rel=1e-12)
    # And what was read is written as it came: equal in every detail.
    assert go_through(again, form) == again
    assert set(again.classes) <= set(given_ones.classes)
    if form in ("coco", "cvat"):
        assert set(again.classes) == set(given_ones.classes)


@given(annotations(is_round=True), st.permutations(sorted(FORMATS)))
def test_the_way_through_all_formats_changes_nothing(given_ones: Annotations, order: list[str]) -> None:
    found = given_ones
    for form in (*order, order[0]):
        found = go_through(found, form)
        assert found.to_plain().images == given_ones.to_plain().images, form


@given(annotations(is_round=True))
def test_csv_gives_back_what_it_got(given_ones: Annotations) -> None:
    has_several = any(len(image.labels) > 1 for image in given_ones.images)
    if has_several and any(";" in label for image in given_ones.images for label in image.labels):
        with pytest.raises(DataError, match="semicolon"):
            go_through(given_ones, "list", "a.csv")
        return
    assert go_through(given_ones, "list", "a.csv").to_plain().images == given_ones.to_plain().images


ROUND = st.integers(-10_000_000, 10_000_000).map(lambda number: number / 1000)
LENGTH = st.integers(0, 10_000_000).map(lambda number: number / 1000)


@given(ROUND, ROUND, LENGTH, LENGTH, st.integers(1, 30_000), st.integers(1, 30_000))
def test_a_box_comes_back_from_any_form(
    left: float, top: float, width: float, height: float, columns: int, rows: int
) -> None:
    box, size = Box(label="a", form="xywh", numbers=(left, top, width, height)), (columns, rows)
    for form in ("xywh", "corners", "percent"):
        other = Box(label="a", form=form, numbers=convert_box(box, form, size))
        assert other.to_pixels(size) == box.numbers
        assert convert_box(other, form, size) == other.numbers


def test_percentages_need_a_size() -> None:
    box = Box(label="a", form="percent", numbers=(0, 0, 50, 50))
    with pytest.raises(ValueError, match="size"):
        box.to_pixels(None)
    with pytest.raises(ValueError, match="size"):
        convert_box(Box(label="a", form="xywh", numbers=(0, 0, 1, 1)), "percent", None)
    assert box.to_pixels((200, 100)) == (0, 0, 100, 50)


@given(TEXTS)
def test_any_class_name_survives_all_formats(name: str) -> None:
    one = Annotations(images=(AnnotatedImage(name="a.jpg", labels=(name,), size=(1, 1)),), classes=(name,))
    for form in FORMATS:
        assert go_through(one, form).to_plain() == one
    assert go_through(one, "list", "a.csv").to_plain() == one
