"""What a run of several ranks writes about them: the slowest in its records, all of them in its rows and its report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests._support import Said, finished, headway, packed_digits, records, write_recipe

from headway.core import row_file
from headway.observe.stragglers import COLUMNS, COMPUTE_STAGES, describe_stragglers, find_slowest_rank
from headway.page.panel import Panel

SLEEP_S = 0.03
SLOW = f"""
import os, time

def slow(images, labels, keys):
    time.sleep({SLEEP_S} if os.environ.get("RANK") == "1" else 0)
    return images, labels
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ledger")
    packed_digits(folder)
    (folder / "slow.py").write_text(SLOW)
    write_recipe(folder / "recipe.yaml", epochs=8, log_every_steps=3, transform="slow.py:slow")
    return folder


@pytest.fixture(scope="module")
def said(folder: Path) -> Said:
    return finished("train", folder / "recipe.yaml", "--procs", "2", "--run", folder / "run")


@pytest.mark.check
def test_records_name_a_slowest_rank(folder: Path, said: Said) -> None:
    """Of the interval that all ranks had told of by then, each once."""
    assert said.status == 0, said.err
    train = records(folder / "run", "train")
    # Data parallel ranks exchange gradients alone.
    assert not any("exchange" in record or "exchange_share" in record for record in train)
    found = [record["slowest"] for record in train if "slowest" in record]
    assert found
    assert all(one.keys() == {"rank", "stage", "seconds", "share", "step"} for one in found)
    assert {one["rank"] for one in found} <= {0, 1}
    told = [one["step"] for one in found]
    assert told == sorted(set(told))
    for record in train:
        if "slowest" in record:
            assert record["slowest"]["step"] in (record["step"], record["step"] - 3)
    assert "slowest" not in said.err + said.out  # a line of the log has room for numbers


@pytest.mark.check
def test_rows_hold_what_all_ranks_told(folder: Path, said: Said) -> None:
    table = row_file.read_rows(folder / "run/ranks.rows")
    assert table is not None
    assert (table.names, table.columns) == (("0", "1"), COLUMNS)
    assert np.isfinite(table.values).all()
    assert (table.values >= 0).all()
    assert (table.positions == 30 * table.steps).all()
    found = [record["slowest"] for record in records(folder / "run", "train") if "slowest" in record]
    told = {one["step"]: one for one in found}
    assert table.steps.tolist() == list(told)
    for step, values in zip(table.steps.tolist(), table.values, strict=True):
        again = find_slowest_rank(values.astype(np.float64))
        assert again is not None
        assert again.rank == told[step]["rank"]
        assert again.seconds == pytest.approx(told[step]["seconds"], rel=1e-4, abs=1e-7)
    augment, forward, loss = (table.values[:, :, COLUMNS.index(stage)] for stage in ("augment", "forward", "loss"))
    assert (augment[:, 1] >= SLEEP_S).all()  # who slept is rank 1, and in its transform
    assert (forward > 0).all()
    assert (loss > 0).all()


@pytest.mark.check
def test_the_report_shows_them(folder: Path, said: Said) -> None:
    headway("report", folder / "run")
    bars, grid = (Panel.from_json((folder / f"run/panels/{name}.json").read_text()) for name in ("ranks", "ranks-own"))
    assert bars.data["names"] == grid.data["names"] == ["rank 0", "rank 1"]
    assert {stack["name"] for stack in bars.data["stacks"]} >= {*COMPUTE_STAGES, "reduce"}
    table = row_file.read_rows(folder / "run/ranks.rows")
    assert table is not None
    assert bars.note.startswith(describe_stragglers(table.values.astype(np.float64)))
    assert "curve-slowest" not in {path.stem for path in (folder / "run/panels").iterdir()}
    anatomy = Panel.from_json((folder / "run/panels/anatomy.json").read_text())
    assert "all-reduce" in {stack["name"] for stack in anatomy.data["stacks"]}


def test_a_run_alone_tells_of_no_ranks(folder: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", folder / "alone", "epochs=1")
    assert not any("slowest" in record for record in records(folder / "alone"))
    assert not (folder / "alone/ranks.rows").exists()
    headway("report", folder / "alone")
    assert not list((folder / "alone/panels").glob("ranks*"))


def test_rates_and_shares_add_up(folder: Path) -> None:
    """Images over all of the time between two records; and the clock of the last one is not behind the run's."""
    headway("train", folder / "recipe.yaml", "--run", folder / "rates", "data.eval=null", "checkpoint.every_epochs=8")
    train = records(folder / "rates", "train")
    before = 0.0
    for record in train[:-1]:  # at the last step a checkpoint is saved
        images_s = 3 * 30 / (record["seconds"] - before)
        assert record["images_s"] == pytest.approx(images_s, rel=1e-6)
        before = record["seconds"]
    assert train[-1]["seconds"] <= json.loads((folder / "rates/summary.json").read_text())["seconds"]
