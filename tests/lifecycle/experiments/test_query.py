"""Conditions, orders and columns of a list of runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.core.errors import UsageError
from headway.lifecycle.experiments.listing import (
    choose_columns,
    format_keys,
    format_list,
    format_started,
    format_value_of,
    name_runs,
)
from headway.lifecycle.experiments.query import (
    Condition,
    Selection,
    Value,
    find_key,
    has_key,
    list_keys,
    read_column,
    read_series,
    select_runs,
)
from headway.lifecycle.experiments.run_index import RunIndex, open_index

from ._runs import updated, write_ensemble, write_run


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunIndex]:
    """Four runs and an ensemble. Tests only read it."""
    folder = tmp_path_factory.mktemp("runs")
    end = {"finished": True, "seconds": 100.0}
    write_run(
        folder / "vit-1", lr=0.1, summary=end | {"accuracy": 0.7, "epochs": 5}, started="2026-11-01T10:00:00+0000"
    )
    write_run(
        folder / "vit-2",
        lr=0.001,
        optimizer="adamw",
        summary=end | {"accuracy": 0.9, "epochs": 7},
        started="2026-11-03T10:00:00+0000",
        epochs=10,
    )
    write_run(
        folder / "net-3", lr=1.0, summary={"finished": False, "accuracy": None}, started="2026-11-02T10:00:00+0000"
    )
    write_run(folder / "net-4", lr=0.01, summary={}, started="no time", losses=[3.0])
    write_ensemble(folder / "both")
    with open_index(folder / "index.sqlite") as opened:
        yield updated(opened, folder)


def names(index: RunIndex, *conditions: str, **selection: object) -> list[str]:
    wanted = Selection(conditions=tuple(map(Condition.parse, conditions)), **selection)  # type: ignore[arg-type]
    return [run.name for run in select_runs(index, wanted)]


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("optimizer.lr=0.001", ["vit-2"]),
        ("optimizer.lr=1e-3", ["vit-2"]),
        ("optimizer.lr<0.1", ["net-4", "vit-2"]),
        ("optimizer.lr<=0.1", ["net-4", "vit-1", "vit-2"]),
        ("optimizer.lr>0.1", ["net-3"]),
        ("recipe.optimizer.lr>=0.1", ["net-3", "vit-1"]),
        # A run that lacks the key differs.
        ("optimizer.lr!=0.1", ["both", "net-3", "net-4", "vit-2"]),
        ("optimizer.name=adamw", ["vit-2"]),
        ("optimizer.name!=adamw", ["both", "net-3", "net-4", "vit-1"]),
        ("optimizer.name~ADAM", ["vit-2"]),
        ("optimizer.name = sgd", ["net-3", "net-4", "vit-1"]),
        ("augment.flip=true", ["net-3", "net-4", "vit-1", "vit-2"]),
        ("model.ema=null", ["net-3", "net-4", "vit-1", "vit-2"]),
        ("accuracy>0.8", ["vit-2"]),
        # Not finite: it is not a number, and no number is compared with it.
        ("summary.accuracy<1", ["vit-1", "vit-2"]),
        ("summary.accuracy=null", ["net-3"]),
        # The recipe comes before the summary.
        ("epochs=10", ["vit-2"]),
        ("summary.epochs<6", ["vit-1"]),
        ("train/loss>1", ["net-4"]),
        ("metric.train/loss=0.5", ["net-3", "vit-1", "vit-2"]),
        ("git=abc", ["net-3", "net-4", "vit-1", "vit-2"]),
        ("members=2", ["both"]),
        ("state=finished", ["both", "vit-1", "vit-2"]),
        ("state!=finished", ["net-3", "net-4"]),
        ("kind=ensemble", ["both"]),
        ("name~VIT", ["vit-1", "vit-2"]),
        ("path~net-", ["net-3", "net-4"]),
        ("started>2026-11-02", ["both", "net-3", "vit-2"]),
        ("started<2026-11-01T11:00:00+00:00", ["vit-1"]),
        # One whose start is not known differs from every date.
        ("started!=2026-11-01T10:00:00+00:00", ["both", "net-3", "net-4", "vit-2"]),
        # Nothing of a value is SQL.
        ("name=' OR 1=1 --", []),
        ("optimizer.name=%", []),
    ],
)
def test_conditions(index: RunIndex, condition: str, wanted: list[str]) -> None:
    assert sorted(names(index, condition)) == wanted


def test_capitals_do_not_matter_in_any_alphabet(tmp_path: Path) -> None:
    for name in ("\u00dcbung-\u0416", "stra\u00dfe"):
        write_run(tmp_path / name, optimizer=name)
    with open_index(tmp_path / "index.sqlite") as opened:
        index = updated(opened, tmp_path)
        for field in ("name", "path", "optimizer.name"):
            for text in ("\u00dcbung-\u0416", "\u00fcBUNG-\u0436", "\u0436"):
                assert names(index, f"{field}~{text}") == ["\u00dcbung-\u0416"]
            assert names(index, f"{field}~STRASSE") == ["stra\u00dfe"]
            assert names(index, f"{field}~\udcff") == []


def test_all_conditions_hold(index: RunIndex) -> None:
    assert names(index, "optimizer.name=sgd", "optimizer.lr>=0.1", "state=finished") == ["vit-1"]


@pytest.mark.parametrize(
    ("selection", "wanted"),
    [
        # The newest first; a run without a time comes last.
        ({}, ["both", "vit-2", "net-3", "vit-1", "net-4"]),
        ({"limit": 2}, ["both", "vit-2"]),
        ({"sort": "started"}, ["vit-1", "net-3", "vit-2", "both", "net-4"]),
        ({"sort": "name"}, ["both", "net-3", "net-4", "vit-1", "vit-2"]),
        ({"sort": "name", "descending": True}, ["vit-2", "vit-1", "net-4", "net-3", "both"]),
        ({"sort": "optimizer.lr"}, ["vit-2", "net-4", "vit-1", "net-3", "both"]),
        ({"sort": "optimizer.lr", "descending": True}, ["net-3", "vit-1", "net-4", "vit-2", "both"]),
        # Numbers, then what is none, then runs without the key.
        ({"sort": "accuracy", "descending": True}, ["vit-2", "vit-1", "net-3", "both", "net-4"]),
        ({"sort": "optimizer.name", "limit": 1}, ["vit-2"]),
    ],
)
def test_orders(index: RunIndex, selection: dict[str, object], wanted: list[str]) -> None:
    assert names(index, **selection) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer.lr", "'optimizer.lr' is not a condition. Write KEY, one of"),
        ("=3", "is not a condition"),
        ("optimiser.lr<1", "no run has the key 'optimiser.lr'. Did you mean 'optimizer.lr'?"),
        ("summary.acuracy<1", "Did you mean 'accuracy'?"),
        ("zzzzzz=1", "headway runs --keys lists all keys"),
        ("optimizer.lr<fast", "'fast' is not a number, and optimizer.lr is compared with one by <"),
        ("optimizer.lr>nan", "'nan' is not a number"),
        ("name>3", "name is a text, and > compares numbers"),
        ("started>soon", "'soon' is not a date"),
        ("started~2026", "started is a time"),
    ],
)
def test_conditions_that_mean_nothing(index: RunIndex, text: str, message: str) -> None:
    with pytest.raises(UsageError) as found:
        names(index, text)
    assert message in str(found.value)


def test_other_wrong_selections(index: RunIndex) -> None:
    with pytest.raises(UsageError, match="--descending sorts by a key"):
        names(index, descending=True)
    with pytest.raises(UsageError, match="no run has the key 'speed'"):
        names(index, sort="speed")
    with pytest.raises(UsageError, match="name is in every list"):
        names(index, columns=("name",))
    with pytest.raises(UsageError, match=r"no run has the key 'metric.train/los'. Did you mean 'train/loss'"):
        read_series(index, [1], "train/los")


def test_keys_tell_where_they_come_from(index: RunIndex) -> None:
    assert find_key(index, "epochs") == find_key(index, "recipe.epochs") != find_key(index, "summary.epochs")
    assert has_key(index, "train/loss")
    assert not has_key(index, "recipe.train/loss")
    uses = {use.key: use for use in list_keys(index)}
    assert (uses["recipe.optimizer.lr"].runs, uses["recipe.optimizer.lr"].different) == (4, 4)
    assert (uses["summary.accuracy"].runs, uses["summary.accuracy"].numbers) == (3, 2)
    assert list(uses) == sorted(
        uses, key=lambda key: (["recipe", "summary", "metric", "about"].index(key.split(".")[0]), key)
    )
    text = format_keys(list(uses.values()))
    assert "recipe.optimizer.lr" in text
    assert read_column(index, "recipe.epochs").values().__len__() == 1


def test_the_list_as_text(index: RunIndex) -> None:
    columns = choose_columns(index)
    assert columns == ["summary.accuracy", "summary.seconds"]
    listed = select_runs(index, Selection(sort="name", columns=tuple(columns)))
    assert name_runs(listed) == ["both", "net-3", "net-4", "vit-1", "vit-2"]
    head, *lines, damaged = format_list(listed, columns, 1, is_filtered=False).splitlines()
    assert head.split() == ["run", "state", "started", "accuracy", "seconds"]
    assert [line.split()[-2:] for line in lines] == [
        ["-", "-"],
        ["null", "-"],
        ["-", "-"],
        ["0.7", "1m40s"],
        ["0.9", "1m40s"],
    ]
    assert damaged == "Left out 1 damaged run: headway index names them."
    assert format_list([], columns, 0, is_filtered=True) == "No run fulfils these conditions."
    assert format_list([], columns, 0, is_filtered=False) == "There are no runs here."
    assert listed[3].to_json()["values"] == {"summary.accuracy": 0.7, "summary.seconds": 100.0}


def test_cells() -> None:
    assert format_value_of("seed", Value(1234567.0, "1234567")) == "1234567"
    assert format_value_of("lr", Value(0.123456, "0.123456")) == "0.1235"
    assert format_value_of("lr", None) == "-"
    assert format_started(None) == format_started(1e300) == "-"
