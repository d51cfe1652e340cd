"""Searches for learning rates that are killed, or of which a row fails."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests._support import headway, packed_digits, refused, running, write_recipe
from tests.sweep._rates import Work, fake_search

from headway.core.errors import HeadwayError, TrainingError, UsageError
from headway.sweep.best import list_best
from headway.sweep.learning_rate import RateOptions, find_rates, resume_rates
from headway.sweep.rate_curve import RateCurve
from headway.sweep.rate_table import Candidate, RateRow, RatesResult
from headway.sweep.rates_folder import RatesFolder
from headway.sweep.sweep import SweepStoppedError
from headway.sweep.sweep_folder import SweepFolder

OPTIONS = RateOptions(batches=(30, 90), optimizers=("sgd", "adamw"), slots=1)
WHOLE: list[Work] = [
    (what, name, batch) for batch in (30, 90) for what in ("test", "train") for name in ("sgd", "adamw")
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rates")
    packed_digits(folder)
    return write_recipe(folder / "recipe.yaml", device="cpu", epochs=15)


def describe(result: RatesResult) -> dict[str, Any]:
    """All but the time and the folder."""
    return {key: value for key, value in result.to_json().items() if key not in ("seconds", "folder", "recipe")}


class KilledError(BaseException):
    pass


def test_a_search_that_is_killed_anywhere_goes_on_and_repeats_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Work] = []
    fake_search(monkeypatch, done.append)
    whole = find_rates(path, (), OPTIONS, tmp_path / "whole")
    assert done == WHOLE
    for place, fatal in enumerate(WHOLE):
        done.clear()

        def die(work: Work, fatal: Work = fatal) -> None:
            if work == fatal:
                raise KilledError
            done.append(work)

        fake_search(monkeypatch, die)
        with pytest.raises(KilledError):
            find_rates(path, (), OPTIONS, tmp_path / str(place))
        fake_search(monkeypatch, done.append)
        result = resume_rates(tmp_path / str(place))
        assert describe(result) == describe(whole)
        # The tests of a batch go in turns, so all of them begin again.
        repeated = [("test", "sgd", fatal[2])] if fatal[:2] == ("test", "adamw") else []
        assert sorted(done) == sorted([*WHOLE, *repeated])
    # What is finished is read, and no more.
    done.clear()
    assert describe(resume_rates(tmp_path / "whole")) == describe(whole)
    assert not done


def test_a_row_that_fails_says_why_and_the_others_go_on(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {("train", "adamw", 30)}

    def fail(work: Work) -> None:
        if work in broken:
            raise HeadwayError("every trial failed", fix="Change the recipe.")

    fake_search(monkeypatch, fail)
    arguments = ("--optimizers", "sgd,adamw,lamb", "--batches", "30,100000", "--out", str(tmp_path / "out"), "--json")
    result = headway("sweep", "--lr", path, *arguments, status=1).json()
    rows = {(row["optimizer"], row["batch"]): row for row in result["rows"]}
    assert len(rows) == 6
    assert rows["adamw", 30]["failure"] == "every trial failed. Change the recipe."
    assert rows["adamw", 30]["proposal"] is not None
    assert "falls at no learning rate" in rows["lamb", 30]["failure"]
    assert all("too short for a range test" in rows[name, 100000]["failure"] for name in ("sgd", "adamw", "lamb"))
    assert "failure" not in rows["sgd", 30]
    assert result["chosen"]["optimizer"] == "sgd"
    # Failed rows are tried again.
    broken.clear()
    result = headway("sweep", "--lr", "--resume", tmp_path / "out", "--json", status=1).json()
    assert [row["optimizer"] for row in result["rows"] if "failure" not in row] == ["sgd", "adamw"]


def test_a_search_whose_rows_all_fail_has_a_table_and_a_file_too(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(work: Work) -> None:
        raise TrainingError(f"{work[0]} of {work[1]}")

    fake_search(monkeypatch, lambda work: fail(work) if work[0] == "train" else None)
    arguments = ("--optimizers", "sgd,adamw", "--batches", "30", "--out", tmp_path / "out")
    told = headway("sweep", "--lr", path, *arguments, status=1)
    assert "sgd at 30: train of sgd" in told.out
    assert "No rate was found" in told.out
    kept = json.loads((tmp_path / "out/lr.json").read_text())
    assert (kept["chosen"], kept["recipe"]) == (None, None)
    assert all(row["failure"] and row["proposal"] for row in kept["rows"])


def test_ctrl_c_in_a_range_test_says_how_to_go_on(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(work: Work) -> None:
        raise KeyboardInterrupt

    fake_search(monkeypatch, stop)
    with pytest.raises(HeadwayError, match=f"headway sweep --lr --resume {tmp_path}/out"):
        find_rates(path, (), OPTIONS, tmp_path / "out")
    # Other verbs name the right command for this folder.
    with pytest.raises(UsageError, match=f"headway sweep --lr --resume {tmp_path}/out"):
        SweepFolder.open(tmp_path / "out")
    with pytest.raises(UsageError, match="folder of headway sweep --lr"):
        list_best(tmp_path / "out", 4)


def test_a_stopped_search_is_not_taken_for_a_failed_row(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(work: Work) -> None:
        if work == ("train", "adamw", 30):
            raise SweepStoppedError("the sweep was stopped")

    fake_search(monkeypatch, stop)
    with pytest.raises(HeadwayError, match=f"headway sweep --lr --resume {tmp_path}/out"):
        find_rates(path, (), OPTIONS, tmp_path / "out")


def test_two_searches_in_one_folder_are_refused(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_search(monkeypatch)
    find_rates(path, (), OPTIONS, tmp_path / "out")
    with RatesFolder(tmp_path / "out").search.lock(), pytest.raises(UsageError, match="another process"):
        resume_rates(tmp_path / "out")
    with pytest.raises(UsageError, match=f"headway sweep --lr --resume {tmp_path}/out"):
        find_rates(path, (), OPTIONS, tmp_path / "out")
    (tmp_path / "out/rows/sgd-30.json").write_text("{}")
    with pytest.raises(HeadwayError, match=r"sgd-30\.json: this row cannot be read"):
        resume_rates(tmp_path / "out")


def test_resume_has_no_other_settings(path: Path, tmp_path: Path) -> None:
    assert "has not begun here" in refused("sweep", "--lr", "--resume", tmp_path, status=2)
    for more in (("--batches", "64"), ("--slots", "1"), ("--out", tmp_path / "other")):
        assert "headway sweep --lr --resume FOLDER, without other settings" in refused(
            "sweep", "--lr", "--resume", tmp_path, *more, status=2
        )
    assert "headway sweep --lr --resume FOLDER, without other settings" in refused(
        "sweep", "--lr", path, "--resume", tmp_path, status=2
    )
    assert "either a recipe, or --resume" in refused("sweep", "--lr", status=2)


def build_curve(pairs: list[tuple[float, float]]) -> RateCurve:
    return RateCurve(tuple(rate for rate, _ in pairs), tuple(loss for _, loss in pairs))


finite = st.floats(allow_nan=False, allow_infinity=False)
rows = st.builds(
    RateRow,
    optimizer=st.sampled_from(["sgd", "lars"]),
    batch=st.integers(1, 10**6),
    recipe_lr=st.none() | finite,
    curve=st.none() | st.lists(st.tuples(finite, finite), min_size=1).map(build_curve),
    minimum=st.none() | finite,
    proposal=st.none() | finite,
    candidates=st.lists(st.builds(Candidate, lr=finite, score=st.none() | finite)).map(tuple),
    lr=st.none() | finite,
    score=st.none() | finite,
    work=finite,
    failure=st.text(),
)


@given(rows)
def test_a_row_is_read_as_it_was_written(row: RateRow) -> None:
    assert RateRow.from_json(json.loads(json.dumps(row.to_json()))) == row


@pytest.mark.check
def test_a_killed_command_goes_on(path: Path, tmp_path: Path) -> None:
    whole = find_rates(path, (), RateOptions(slots=1), tmp_path / "whole")
    journal = tmp_path / "out/sweeps/sgd-30/decisions.jsonl"
    with running("sweep", "--lr", path, "--slots", "1", "--out", tmp_path / "out") as process:
        # The plan, the three trials, and the score of the first.
        while process.poll() is None and not (journal.exists() and '"result"' in journal.read_text()):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert describe(resume_rates(tmp_path / "out")) == describe(whole)
