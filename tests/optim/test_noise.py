"""Multiplicative gradient noise: from keys alone, and with the moments that it says."""

from __future__ import annotations

import numpy as np
import pytest

from headway.core.random_keys import make_keys
from headway.optim import draw_gradient_noise


def test_factors_are_normal_around_1() -> None:
    z = draw_gradient_noise(make_keys(3, 0, np.arange(200_000)), 2.0)
    assert z.dtype == np.float32
    assert z.mean() == pytest.approx(1, abs=0.02)  # 4 standard errors
    assert z.std() == pytest.approx(2, abs=0.015)
    centred = (z - z.mean()) / z.std()
    assert (centred**3).mean() == pytest.approx(0, abs=0.03)
    assert (centred**4).mean() == pytest.approx(3, abs=0.06)
    assert np.isfinite(z).all()


def test_they_depend_on_the_sample_and_the_epoch_and_on_nothing_else() -> None:
    one, other = (draw_gradient_noise(make_keys(3, epoch, np.arange(5000)), 1.0) for epoch in (0, 1))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.06
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.06
    assert np.array_equal(one[100:200], draw_gradient_noise(make_keys(3, 0, np.arange(100, 200)), 1.0))
    assert np.array_equal(draw_gradient_noise(make_keys(3, 0, np.arange(9)), 0.0), np.ones(9, np.float32))
