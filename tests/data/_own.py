"""A data set as a user writes one, and Loaders of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import torch
from tests.data._loaders import SEED, N

from headway.data.collated_batch import CollatedBatch
from headway.data.loader import Loader


class Photos(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples as dicts, with a choice from each of the three generators."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "image": torch.full((2,), float(index)) + torch.rand(1),
            "crop": (random.random(), np.random.rand(2)),
            "label": index,
            "name": f"photo {index}",
        }


@contextmanager
def opened(dataset: Any = None, **options: Any) -> Iterator[Loader[CollatedBatch]]:
    options = {"batch": 7, "seed": SEED, "workers": 0, **options}
    with closing(Loader(Photos() if dataset is None else dataset, **options)) as found:
        yield found
