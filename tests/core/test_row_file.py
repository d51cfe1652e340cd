"""Rows of numbers in one file: what was appended is read, whatever a kill has left behind it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import row_file

NAMES, COLUMNS = ("conv \u732b", "fc\nnew line"), ("w", "g", "dw")


def written(path: Path, count: int, names: tuple[str, ...] = NAMES) -> list[np.ndarray]:
    made = np.random.default_rng(0).standard_normal((count, len(names), len(COLUMNS))).astype(np.float32)
    for number, values in enumerate(made, 1):
        row_file.append_row(path, names, COLUMNS, 60 * number, number, values)
    return list(made)


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    made = written(tmp_path / "a.rows", 5)
    made[2][0, 1] = np.nan
    row_file.append_row(tmp_path / "a.rows", NAMES, COLUMNS, 360, 6, made[2])
    table = row_file.read_rows(tmp_path / "a.rows")
    assert table is not None
    assert (table.names, table.columns) == (NAMES, COLUMNS)
    assert table.positions.tolist() == [60, 120, 180, 240, 300, 360]
    assert table.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.array_equal(table.values[-1], made[2], equal_nan=True)
    assert np.array_equal(table.values[:2], made[:2])


@given(st.integers(0, 4 * 40), st.booleans())
def test_a_torn_row_is_passed_over_and_written_over(
    tmp_path_factory: pytest.TempPathFactory, left: int, go_on: bool
) -> None:
    path = tmp_path_factory.mktemp("torn") / "a.rows"
    made = written(path, 4)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - left])
    kept = 4 - -(-left // 40)
    if go_on:
        row_file.append_row(path, NAMES, COLUMNS, 999, 99, made[0])
    table = row_file.read_rows(path)
    assert table is not None
    assert table.steps.tolist() == [1, 2, 3, 4][:kept] + [99] * go_on
    assert np.array_equal(table.values[:kept], np.array(made[:kept]).reshape(kept, 2, 3))


@pytest.mark.parametrize(("position", "kept"), [(0, 0), (59, 0), (60, 1), (200, 3), (10**6, 5)])
def test_rows_after_a_position_are_cut(tmp_path: Path, position: int, kept: int) -> None:
    made = written(tmp_path / "a.rows", 5)
    row_file.truncate_rows(tmp_path / "a.rows", position)
    table = row_file.read_rows(tmp_path / "a.rows")
    assert table is not None
    assert table.names == NAMES
    assert np.array_equal(table.values, np.array(made[:kept]).reshape(kept, 2, 3))


def test_a_file_of_other_things_is_begun_anew(tmp_path: Path) -> None:
    written(tmp_path / "a.rows", 3)
    made = written(tmp_path / "a.rows", 2, ("one",))
    table = row_file.read_rows(tmp_path / "a.rows")
    assert table is not None
    assert table.names == ("one",)
    assert np.array_equal(table.values, made)


@given(st.lists(st.lists(st.integers(0, 6), unique=True, min_size=1), min_size=1, max_size=8), st.integers(0, 8))
def test_rows_of_what_is_there_only_sometimes_stay(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[int]], torn: int
) -> None:
    """Each row has what was given for its own names, and NaN for all others, in an order that fits all rows."""
    path = tmp_path_factory.mktemp("some") / "a.rows"
    # Modules are called in one order.
    given = [sorted(names) for names in steps]
    for step, names in enumerate(given):
        values = np.array([[name, step] for name in names], np.float32)
        row_file.append_row(path, [*map(str, names)], ("a", "b"), step, step, values, keeps_names=True)
        # What a kill in the middle of a write leaves is no row.
        with path.open("ab") as file:
            file.write(b"x" * torn)
    table = row_file.read_rows(path)
    assert table is not None
    assert {*table.names} == {str(name) for names in given for name in names}
    assert table.steps.tolist() == [*range(len(given))]
    for step, names in enumerate(given):
        found = {int(name): row for name, row in zip(table.names, table.values[step], strict=True)}
        for name, row in found.items():
            assert row.tolist() == [name, step] if name in names else np.isnan(row).all()
    assert [int(name) for name in table.names if int(name) in given[0]] == given[0]


@pytest.mark.parametrize("content", [None, b"", b"\n", b"no json\n", b"[1]\n", b'{"names": 3, "columns": []}\n'])
def test_where_there_is_no_such_file_there_is_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.rows"
    if content is not None:
        path.write_bytes(content)
    assert row_file.read_rows(path) is None
    row_file.truncate_rows(path, 5)
    assert path.exists() == (content is not None)
