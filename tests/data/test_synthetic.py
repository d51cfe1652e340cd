from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from headway.core.random_keys import make_keys
from headway.data.data_recipe import SyntheticRecipe
from headway.data.loader import Batch
from headway.data.synthetic import SyntheticLoader

RECIPE = SyntheticRecipe(samples=10, classes=4, size=(5, 6), channels=1)


def some(count: int, *, batch: int = 7, seed: int = 0, start: int = 0, recipe: SyntheticRecipe = RECIPE) -> list[Batch]:
    device = torch.device("cpu")
    return list(islice(SyntheticLoader(recipe, batch=batch, seed=seed, start=start, device=device), count))


def test_a_batch_has_the_shape_and_classes_of_the_recipe() -> None:
    images, labels = some(1, batch=500)[0]
    assert images.shape == (500, 5, 6, 1)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert sorted(set(labels.tolist())) == [0, 1, 2, 3]
    assert sorted(set(images.unique().tolist())) == list(range(256))


def test_positions_run_through_epochs_without_a_gap() -> None:
    batches = some(5, start=3)
    positions = np.concatenate([batch.positions for batch in batches])
    assert positions.tolist() == list(range(3, 3 + 5 * 7))
    assert np.concatenate([batch.epochs for batch in batches]).tolist() == (positions // 10).tolist()
    assert np.concatenate([batch.samples for batch in batches]).tolist() == (positions % 10).tolist()
    for batch in batches:
        assert (batch.served == batch.samples).all()
        assert batch.bad == ()
        assert (batch.keys() == make_keys(0, batch.epochs, batch.samples)).all()


def test_every_batch_is_the_same_and_made_once() -> None:
    first, second = some(2)
    assert first.images is second.images
    assert first.labels is second.labels


def test_the_seed_makes_pixels_labels_and_keys() -> None:
    (one,), (again,), (other,) = (some(1, seed=seed, batch=200) for seed in (1, 1, 2))
    assert (one.images == again.images).all()
    assert (one.labels == again.labels).all()
    assert (one.keys() == again.keys()).all()
    assert (one.images != other.images).any()
    assert (one.labels != other.labels).any()
    assert (one.keys() != other.keys()).all()


def test_torchs_own_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    some(1)
    assert (torch.get_rng_state() == before).all()


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"classes": 1}, {"size": (0, 3)}, {"size": (3, -1)}, {"channels": 2}, {"sizes": 3}]
)
def test_impossible_sizes_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SyntheticRecipe.model_validate(wrong)
