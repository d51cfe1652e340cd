"""Which positions each step takes, against a walk from step to step."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests._support import packed_digits

from headway.core.errors import UsageError
from headway.data import opening
from headway.data.batch_plan import BatchGrowthRecipe, BatchPlan
from headway.data.data_recipe import SyntheticRecipe
from headway.data.loader import Loader
from headway.data.order import Order
from headway.data.synthetic import SyntheticLoader

plans = st.builds(
    lambda batch, milestones, factor, epoch: (
        batch,
        BatchGrowthRecipe(milestones_epochs=tuple(sorted(milestones)), factor=factor),
        epoch,
    ),
    st.integers(1, 40),
    st.sets(st.integers(1, 80).map(lambda tenths: tenths / 10), min_size=1, max_size=4),
    st.integers(2, 5),
    st.integers(1, 200),
)


def walked(batch: int, growth: BatchGrowthRecipe, epoch: int, steps: int) -> list[tuple[int, int]]:
    """(position, samples) of each step, by the rule as it is stated: a step that begins at a milestone or later has
    the new size."""
    out, position = [], 0
    for _ in range(steps):
        reached = sum(position >= round(milestone * epoch) for milestone in growth.milestones_epochs)
        out.append((position, batch * growth.factor**reached))
        position += out[-1][1]
    return out


@settings(deadline=None)
@given(plans)
def test_every_question_has_the_answer_of_a_walk(given_plan: tuple[int, BatchGrowthRecipe, int]) -> None:
    batch, growth, epoch = given_plan
    plan, steps = BatchPlan(batch, growth, epoch=epoch), walked(batch, growth, epoch, 300)
    for number, (position, size) in enumerate(steps):
        assert plan.get_batch_size(position) == size
        assert plan.find_position(number) == position
        assert plan.count_steps(0, position) == number
        assert plan.count_steps(position, position + 1) == 1
        assert plan.round_to_steps(position) == max(1, number)
    slots, sizes = plan.locate_slots(np.arange(steps[-1][0]))
    assert np.array_equal(sizes, np.repeat([size for _, size in steps[:-1]], [size for _, size in steps[:-1]]))
    assert np.array_equal(slots, np.concatenate([np.arange(size) for _, size in steps[:-1]] or [slots]))
    assert plan.largest_batch == growth.compute_largest_batch(batch)


@given(st.integers(1, 500), st.integers(0, 5000), st.integers(0, 5000), st.floats(0, 1e5))
def test_without_growth_all_steps_are_alike(batch: int, start: int, more: int, positions: float) -> None:
    plan = BatchPlan(batch)
    assert plan.count_steps(start, start + more) == -(-more // batch)
    assert plan.round_to_steps(positions) == max(1, round(positions / batch))
    assert (plan.get_batch_size(start), plan.find_position(start)) == (batch, start * batch)
    assert not plan.grows
    assert repr(plan) == str(batch)


@given(plans, st.integers(0, 900), st.integers(0, 900))
def test_steps_from_anywhere_are_counted(given_plan: tuple[int, BatchGrowthRecipe, int], start: int, more: int) -> None:
    batch, growth, epoch = given_plan
    plan, position, count = BatchPlan(batch, growth, epoch=epoch), start, 0
    while position < start + more:
        position += plan.get_batch_size(position)
        count += 1
    assert plan.count_steps(start, start + more) == count


def test_a_step_past_two_milestones_grows_by_both() -> None:
    plan = BatchPlan(100, BatchGrowthRecipe(milestones_epochs=(1, 1.5, 30), factor=2), epoch=60)
    assert (plan.starts.tolist(), plan.sizes.tolist()) == ([0, 100, 2100], [100, 400, 800])
    assert repr(plan) == "100 then 400 then 800"
    assert plan.grows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"milestones_epochs": (), "factor": 2}, "at least 1 item"),
        ({"milestones_epochs": (2, 1), "factor": 2}, "milestones_epochs [2.0, 1.0] do not rise. Write each once"),
        ({"milestones_epochs": (0,), "factor": 2}, "greater than 0"),
        ({"milestones_epochs": (1,), "factor": 1}, "greater than or equal to 2"),
        ({"milestones_epochs": (1,), "factor": 1.5}, "valid integer"),
        ({"milestones_epochs": (1,)}, "Field required"),
    ],
)
def test_impossible_growth(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        BatchGrowthRecipe.model_validate(options)
    assert message in str(caught.value)


def test_no_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="a batch of 0 samples"):
        BatchPlan(0)


PLAN = BatchPlan(7, BatchGrowthRecipe(milestones_epochs=(0.5, 1.2), factor=3), epoch=60)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_the_loader_serves_every_position_once_whatever_the_world(tmp_path: Path, world: int) -> None:
    """And goes on from any step of the plan as if it had never stopped."""
    pack = opening.open(packed_digits(tmp_path, per_class=6, split=0.0))
    steps = PLAN.count_steps(0, 300)
    stop = PLAN.find_position(steps)
    order = Order(60, 3)
    served: list[list[tuple[int, int]]] = []
    for rank in range(world):
        loader = Loader(pack, batch=PLAN, order=order, stop=stop, rank=rank, world=world, threads=1)
        assert len(loader) == steps
        batches = [(batch.positions.copy(), batch.samples.copy(), batch.images.numpy().copy()) for batch in loader]
        served += [list(zip(*map(list, batch[:2]), strict=True)) for batch in batches]
        again = Loader(
            pack, batch=PLAN, order=order, start=PLAN.find_position(4), stop=stop, rank=rank, world=world, threads=1
        )
        for (_, _, images), later in zip(batches[4:], again, strict=True):
            assert np.array_equal(images, later.images.numpy())
    rows = sorted(row for batch in served for row in batch)
    assert [position for position, _ in rows] == list(range(stop))
    assert [sample for _, sample in rows] == order(np.arange(stop))[1].tolist()
    for step in range(steps):
        sizes = [len(served[rank * steps + step]) for rank in range(world)]
        assert sum(sizes) == PLAN.get_batch_size(PLAN.find_position(step))
        assert max(sizes) - min(sizes) <= 1
    pack.close()


def test_synthetic_batches_grow_too() -> None:
    recipe = SyntheticRecipe(samples=60, classes=4, size=(5, 6), channels=1)
    whole = list(islice(SyntheticLoader(recipe, batch=PLAN, seed=1, start=0, device=torch.device("cpu")), 12))
    assert [len(batch.images) for batch in whole[:7]] == [7, 7, 7, 7, 7, 21, 21]
    assert np.array_equal(np.concatenate([b.positions for b in whole]), np.arange(PLAN.find_position(12)))
    for rank in range(2):
        ranks = SyntheticLoader(recipe, batch=PLAN, seed=1, start=0, device=torch.device("cpu"), rank=rank, world=2)
        for one, part in zip(whole, islice(ranks, 12), strict=True):
            inside = np.isin(one.positions, part.positions)
            assert np.array_equal(one.positions[inside], part.positions)
            assert torch.equal(one.images[torch.from_numpy(inside)], part.images)
            assert torch.equal(one.labels[torch.from_numpy(inside)], part.labels)
