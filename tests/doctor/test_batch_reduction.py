"""Steps of seconds are measured with fewer samples, and the profile says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests._support import packed_digits, write_recipe

from headway.core.profile import Profile
from headway.doctor.batch_reduction import open_reduced_job
from headway.doctor.budget import Budget
from headway.doctor.examination import examine_recipe
from headway.training.runs import load_recipe

SLOW = """
import time
import torch

class Slow(torch.nn.Module):
    def __init__(self, num_classes, in_channels=1, *, each=0.0, fixed=0.0):
        super().__init__()
        self.each, self.fixed = each, fixed
        self.inner = torch.nn.Linear(in_channels, num_classes)

    def forward(self, images):
        time.sleep(self.fixed + self.each * len(images))
        return self.inner(images.mean((2, 3)))

def slow(num_classes, in_channels=1, **options):
    return Slow(num_classes, in_channels, **options)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("shorten")
    packed_digits(where, per_class=30, mode="seekable")
    (where / "slow.py").write_text(SLOW)
    write_recipe(where / "plain.yaml", model={"factory": "slow.py:slow"}, batch=64)
    return where


@pytest.fixture
def batch_of(folder: Path) -> Callable[..., tuple[int, str]]:
    """(batch that is measured, what the job says of it) with some of the recipe's values otherwise."""

    def measured(longest_s: float, *overrides: str) -> tuple[int, str]:
        with open_reduced_job(load_recipe(folder / "plain.yaml", overrides), longest_s) as job:
            assert job.batch == job.loaded.recipe.batch == len(job.load_batches()[0].images)
            return job.batch, job.batch_note

    return measured


EACH, FIXED = "model.args={each: 0.01}", "model.args={fixed: 0.3}"
"""A step of 64 samples sleeps 0.64 s, or 0.3 s whatever its samples."""


def test_a_long_step_is_halved_until_it_is_short_enough(batch_of: Callable[..., tuple[int, str]]) -> None:
    batch, said = batch_of(0.4, EACH)
    assert batch <= 32  # a busy machine makes it fewer; a sleep is never shorter
    assert 64 % batch == 0
    assert "A step of 64 samples takes about" in said
    assert f"batch={batch}" in said


def test_a_step_that_is_short_enough_stays(batch_of: Callable[..., tuple[int, str]]) -> None:
    assert batch_of(1e6, EACH) == (64, "")


def test_fewer_samples_are_not_taken_where_they_save_nothing(batch_of: Callable[..., tuple[int, str]]) -> None:
    assert batch_of(0.1, FIXED) == (64, "")


def test_a_micro_batch_is_the_least(batch_of: Callable[..., tuple[int, str]]) -> None:
    assert batch_of(1e-6, EACH, "micro_batch=16")[0] == 16


def test_it_stays_as_large_as_other_values_want_it(batch_of: Callable[..., tuple[int, str]]) -> None:
    """The noise scale needs four samples."""
    assert 4 <= batch_of(1e-6, EACH, "observe.noise_scale=true")[0] < 64


@pytest.mark.check
def test_the_profile_says_which_batch_was_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Budget(each=0.2, passes=0.1, side=0.1, whole=0.2, tries=0.2, step=0.4)
    monkeypatch.setattr("headway.doctor.examination.QUICK", short)
    found: Profile = examine_recipe(folder / "plain.yaml", [EACH, "log_every_steps=50"], quick=True)
    assert found.batch <= 32
    assert any(f"batch={found.batch}" in one for one in found.not_measured)
    assert not any(one.override.startswith("batch=") for one in found.knobs), "it is no larger than the recipe's"
