"""The measurement before a sweep ends when it has to."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests._support import packed_digits, write_recipe

from headway.core.recipe import LoadedRecipe, read_recipe
from headway.setup.recipe import TrainRecipe
from headway.sweep import costs
from headway.sweep.cohort import Assignment
from headway.sweep.costs import MeasurementStoppedError, measure_costs
from headway.sweep.sweep_folder import SweepFolder
from headway.sweep.worker import Worker


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedRecipe[TrainRecipe]:
    folder = tmp_path_factory.mktemp("costs")
    packed_digits(folder)
    return read_recipe(write_recipe(folder / "recipe.yaml", device="cpu"), (), TrainRecipe)


def test_without_any_time_each_part_is_still_measured_once(
    loaded: LoadedRecipe[TrainRecipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = [0], costs._step
    monkeypatch.setattr(costs, "_step", lambda *args: (steps.append(1), step(*args)))
    found = measure_costs(loaded, limit_s=0.0)
    assert all(math.isfinite(seconds) and seconds >= 0 for seconds in vars(found).values())
    assert min(found.step_s, found.decode_s, found.build_s, found.evaluate_s) > 0
    # The first step of the network, one on a batch that is kept, and one on a batch that is read.
    assert sum(steps) == 3


@pytest.mark.parametrize("asked", [1, 4, 40])
def test_it_ends_as_soon_as_it_is_told_to(
    asked: int, loaded: LoadedRecipe[TrainRecipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked, stepped or left in the folder of temporary files after the answer."""
    monkeypatch.setattr(costs.tempfile, "tempdir", str(tmp_path))
    answers = iter([False] * (asked - 1) + [True])
    with pytest.raises(MeasurementStoppedError):
        measure_costs(loaded, lambda: next(answers))
    assert next(answers, None) is None
    assert not list(tmp_path.iterdir())


def test_a_worker_that_is_told_to_stop_while_it_measures_takes_no_further_step(
    loaded: LoadedRecipe[TrainRecipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, steps, step = Worker(SweepFolder(Path("nowhere")), -1), [0], costs._step

    def step_and_stop(*args: object) -> None:
        steps.append(1)
        step(*args)  # type: ignore[arg-type]
        if sum(steps) == 5:
            worker.stop()

    monkeypatch.setattr(costs, "_step", step_and_stop)
    assert worker._measure(Assignment(trial=0, folder=Path("nowhere"), loaded=loaded, until=1)) is None
    assert sum(steps) == 5
