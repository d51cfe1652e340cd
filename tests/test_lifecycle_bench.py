"""bench.lifecycle: labels needed from curves, pools, and planted copies, on a small scale."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import pytest
from bench._lifecycle import labels, near_copies
from bench._lifecycle.label_errors import measure_one
from hypothesis import given
from hypothesis import strategies as st
from tests.lifecycle.mining._hashes import draw_photograph


@given(st.lists(st.floats(0, 1), min_size=8, max_size=8), st.floats(0, 1))
def test_labels_needed_are_where_the_curve_first_reaches_the_target(values: list[float], target: float) -> None:
    curve = np.array(values)
    found = labels.interpolate(curve, target)
    if curve.max() < target:
        assert math.isinf(found)
        return
    assert 40 <= found <= 320
    assert np.interp(found, list(labels.SIZES), curve) == pytest.approx(target, abs=1e-6) or found == 40
    before = [value for size, value in zip(labels.SIZES, values, strict=True) if size < found - 1e-9]
    assert all(value < target for value in before)


def test_the_interval_holds_the_value_of_equal_seeds() -> None:
    curves = np.tile(np.linspace(0.5, 0.9, 8), (8, 1))
    random = np.tile(np.linspace(0.5, 0.8, 8), (8, 1))
    low, high = labels.bootstrap(curves, random)
    assert low == pytest.approx(high) == pytest.approx(labels.interpolate(curves[0], 0.8))


@pytest.mark.check
def test_pools_are_as_they_are_described(tmp_path: Path) -> None:
    plain, rare = (labels.build_pool(name, 1, tmp_path) for name in ("plain", "rare"))
    assert len(plain.y) == 1297
    assert len(plain.test_y) == len(rare.test_y) == 500
    counts = [int((rare.y == one).sum()) / int((plain.y == one).sum()) for one in labels.RARE]
    assert all(0.03 < share < 0.2 for share in counts)
    others = [one for one in range(10) if one not in labels.RARE]
    assert all((rare.y == one).sum() == (plain.y == one).sum() for one in others)
    assert plain.kept.all()


@pytest.mark.check
def test_most_copies_of_the_pool_are_found(tmp_path: Path) -> None:
    pool = labels.build_pool("copies", 1, tmp_path)
    assert len(pool.y) == 1297
    assert pool.kept.mean() < 0.45
    # Images of one group have one label, but for the few digits that look alike.
    wrong = sum(int(pool.y[place] != pool.y[group]) for place, group in enumerate(pool.group.tolist()))
    assert wrong / 1297 < 0.02


@pytest.mark.check
def test_a_seed_of_wrong_labels() -> None:
    precision, recall, first, estimate, true = measure_one(0.05, 0)
    assert min(precision, first) > 0.8
    assert recall > 0.5
    assert estimate == pytest.approx(true, rel=0.5)


def test_planted_copies_are_found(tmp_path: Path) -> None:
    source = tmp_path / "photographs"
    source.mkdir()
    for number in range(4):
        draw_photograph(number).save(source / f"n0{number}_1.JPEG", "JPEG", quality=95)
    found, false = near_copies.find_planted(source, tmp_path)
    assert (found.value, false.value) == (1, 0)
    assert "0 of 10 pairs" in false.how, "those of two photographs, which did not choose the threshold"
    cost = near_copies.time_additions(tmp_path, 1)
    assert "24 photographs" in cost.how


@pytest.mark.check
def test_a_round_of_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes, one seed, a tenth of 50 steps."""
    monkeypatch.setattr(labels, "STEPS", 50)
    monkeypatch.setattr(labels, "SIZES", range(40, 81, 40))
    monkeypatch.setattr(labels, "END", 80)
    pools = {"plain": (labels.RANDOM, labels.MARGIN), "rare": (labels.RANDOM, labels.MARGIN)}
    monkeypatch.setattr(labels, "POOLS", pools)
    claims = labels.count_labels(tmp_path, argparse.Namespace(quick=True))
    assert [claim.name for claim in claims] == ["labels_to_random_320_plain", "labels_to_random_320_rare"]
