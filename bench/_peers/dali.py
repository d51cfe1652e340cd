"""DALI: reads files, decodes only the crop, resizes, flips; on the CPU, or on the GPU from the decoder on."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nvidia.dali import fn, pipeline_def

from bench._peers.serve import argument, serve


@pipeline_def
def crops(files: list[str], decoder: str) -> Any:
    encoded, labels = fn.readers.file(files=files, random_shuffle=True, initial_fill=len(files), name="files")
    shape = {"random_area": [0.08, 1.0], "random_aspect_ratio": [3 / 4, 4 / 3]}
    images = fn.decoders.image_random_crop(encoded, device=decoder, **shape)
    images = fn.resize(images, resize_x=224, resize_y=224)
    return fn.flip(images, horizontal=fn.random.coin_flip()), labels


def batches(asked: dict[str, Any]) -> Iterator[int]:
    files = sorted(map(str, Path(asked["images"]).rglob("*.JPEG")))
    # "mixed" takes bytes of the host and leaves pixels on the GPU.
    decoder, device = ("mixed", 0) if asked.get("gpu") else ("cpu", None)
    pipeline = crops(files, decoder, batch_size=asked["batch"], num_threads=asked["threads"], device_id=device)
    pipeline.build()
    while True:
        images, _ = pipeline.run()
        yield len(images)


if __name__ == "__main__":
    serve(batches(argument()), version=f"DALI {version('nvidia-dali-cuda120')}", kernel="antialiased triangle")
