"""The native core's copies of raw samples against the device's augmentation of them, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.data._isas import each_isa

from headway.data import native
from headway.data.decode import Decoder
from headway.data.decode_request import GatherRequest
from headway.data.ops.move import flip_and_translate
from headway.data.records import Records

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native core is not built")

SAMPLES = 5


@pytest.fixture(scope="module")
def isas() -> Iterator[list[Decoder]]:
    with each_isa() as found:
        yield found


def check(
    isas: list[Decoder],
    shape: tuple[int, int, int],
    planar: bool,
    shifts: NDArray[np.int64],
    flips: NDArray[np.bool_],
    vertical_flips: NDArray[np.bool_] | None = None,
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (SAMPLES, *shape), np.uint8)
    expected = flip_and_translate(torch.from_numpy(images), flips, shifts, vertical_flips).numpy()
    records = Records.from_buffers([(image.transpose(2, 0, 1) if planar else image).tobytes() for image in images])
    for by in isas:
        memory = np.full((SAMPLES + 2, *shape), 7, np.uint8)
        request = GatherRequest(records, memory[1:-1], planar, shifts, flips, vertical_flips)
        assert not by.gather(request).any()
        np.testing.assert_array_equal(memory[1:-1], expected)
        assert (memory[[0, -1]] == 7).all()


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70), st.sampled_from([1, 3])),
    planar=st.booleans(),
    flips=st.lists(st.booleans(), min_size=2 * SAMPLES, max_size=2 * SAMPLES),
)
def test_any_shape_moves_as_on_the_device(
    isas: list[Decoder], data: st.DataObject, shape: tuple[int, int, int], planar: bool, flips: list[bool]
) -> None:
    most = min(shape[:2]) - 1
    shift = st.tuples(st.integers(-most, most), st.integers(-most, most))
    shifts = data.draw(st.lists(shift, min_size=SAMPLES, max_size=SAMPLES))
    horizontal, vertical = np.array(flips).reshape(2, SAMPLES)
    check(isas, shape, planar, np.array(shifts, np.int64), horizontal, vertical)


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 1), (5, 42, 3), (5, 43, 3), (2, 128, 1), (2, 129, 1)])
def test_every_shift_of_small_samples(isas: list[Decoder], shape: tuple[int, int, int], planar: bool) -> None:
    """Rows of up to 128 bytes go a way of their own with AVX-512."""
    most = min(4, *(side - 1 for side in shape[:2]))
    for down in range(-most, most + 1):
        for right in range(-most, most + 1):
            shifts = np.array([(down, right)] * SAMPLES, np.int64)
            check(isas, shape, planar, shifts, np.arange(SAMPLES) % 2 == 0)


@pytest.mark.parametrize("planar", [False, True])
def test_without_shift_and_flip_it_is_a_copy(isas: list[Decoder], planar: bool) -> None:
    images = np.random.default_rng(1).integers(0, 256, (SAMPLES, 3, 50, 3), np.uint8)
    records = Records.from_buffers([(image.transpose(2, 0, 1) if planar else image).tobytes() for image in images])
    for by in isas:
        out = np.zeros_like(images)
        assert not by.gather(GatherRequest(records, out, planar=planar)).any()
        np.testing.assert_array_equal(out, images)
