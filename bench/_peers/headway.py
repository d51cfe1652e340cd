"""Headway: the Loader as the README uses it, over a packed folder or raw pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator

import headway
from bench._peers.serve import argument, serve
from headway.data import native


def batches(loader: headway.Loader) -> Iterator[int]:
    for images, _ in loader:
        yield len(images)


if __name__ == "__main__":
    asked = argument()
    train = headway.open(asked["pack"])
    how = {"seed": 1, "stop": math.inf, "threads": asked["threads"], **asked["how"]}
    loader = headway.Loader(train, batch=asked["batch"], **how)
    core = native.describe_features() if native.is_available() else "no native core"
    serve(
        batches(loader),
        version=f"headway {headway.__version__}, {core}",
        kernel=asked["kernel"],
        facts=lambda: {"kB an image": float(train.length.mean()) / 1000, "kept": loader.tier.why},
    )
