"""Maps of other sizes have the rows of PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from headway.core.world import World
from headway.parallel.maps import cut
from headway.parallel.place import Place
from headway.parallel.strips import make_strip


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearest_rows_are_those_of_torch(mode: str, dtype: torch.dtype) -> None:
    """Its places are rounded to fp32, so that some rows are not the ones of exact arithmetic: 23 of 46 from 14."""
    place = Place.create(World.create_single(torch.device("cpu")), (1, 1))
    for length in (4, 6, 14, 26, 30):
        x = torch.randn(1, 2, length, 5, dtype=dtype)
        for rows in (1, 3, 44, 46, 52, 94, 98):
            expected = F.interpolate(x, size=(rows, 7), mode=mode)
            found = F.interpolate(make_strip(cut(x, place)), size=(rows, 7), mode=mode)
            assert torch.equal(found.as_subclass(torch.Tensor), expected), (length, rows)
        for factor in (0.7, 1.3, 2.0, 3.3):
            expected = F.interpolate(x, scale_factor=factor, mode=mode)
            found = F.interpolate(make_strip(cut(x, place)), scale_factor=factor, mode=mode)
            assert torch.equal(found.as_subclass(torch.Tensor), expected), (length, factor)
