"""DALI on the CPU: file reader, decoding of the crop alone, resize, flip."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nvidia.dali import fn, pipeline_def

from bench._peers.serve import argument, serve


@pipeline_def(device_id=None)
def crops(files: list[str]) -> Any:
    encoded, labels = fn.readers.file(files=files, random_shuffle=True, initial_fill=len(files), name="files")
    images = fn.decoders.image_random_crop(encoded, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3])
    images = fn.resize(images, resize_x=224, resize_y=224)
    return fn.flip(images, horizontal=fn.random.coin_flip()), labels


def batches(asked: dict[str, Any]) -> Iterator[int]:
    files = sorted(map(str, Path(asked["images"]).rglob("*.JPEG")))
    pipeline = crops(files, batch_size=asked["batch"], num_threads=asked["threads"])
    pipeline.build()
    while True:
        images, _ = pipeline.run()
        yield len(images)


if __name__ == "__main__":
    serve(batches(argument()), version=f"DALI {version('nvidia-dali-cuda120')}", kernel="antialiased triangle")
