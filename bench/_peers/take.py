"""A lower bound for raw pixels in NumPy: one `take` per batch into a reused buffer, on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bench._peers.serve import argument, serve


def batches(asked: dict[str, Any]) -> Iterator[int]:
    images, batch = np.load(asked["pixels"]), asked["batch"]
    out = np.empty((batch, *images.shape[1:]), images.dtype)
    generator = np.random.default_rng(1)
    while True:
        ids = generator.permutation(len(images))
        for low in range(0, len(ids) - batch + 1, batch):
            # mode: with the default, numpy fills a buffer of its own first, which takes longer
            np.take(images, ids[low : low + batch], axis=0, out=out, mode="clip")
            yield batch


if __name__ == "__main__":
    serve(batches(argument()), version=f"numpy {np.__version__}", kernel="copy")
