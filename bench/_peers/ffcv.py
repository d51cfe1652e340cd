"""FFCV: original files (or files made for it) in a .beton, or raw pixels in the size of CIFAR."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.fields.rgb_image import IMAGE_MODES
from ffcv.loader import Loader, OrderOption
from ffcv.reader import Reader
from ffcv.transforms import RandomHorizontalFlip, RandomTranslate, Squeeze, ToTensor
from ffcv.writer import DatasetWriter
from PIL import Image

from bench._peers.serve import argument, serve

EPOCH = 1_000_000
"""Samples of one epoch, by repeating their numbers: at an epoch's end FFCV begins with an empty queue."""


class OriginalField(RGBImageField):
    """Stores the bytes of a JPEG as they are; FFCV's own field encodes every image anew."""

    def encode(self, destination: Any, path: Path, malloc: Any) -> None:
        data = np.frombuffer(path.read_bytes(), np.uint8)
        destination["mode"] = IMAGE_MODES["jpg"]
        with Image.open(path) as image:
            destination["width"], destination["height"] = image.size
        destination["data_ptr"], storage = malloc(data.nbytes)
        storage[:] = data


def resized(path: Path, side: int) -> Image.Image:
    """An image whose shorter side is brought to `side` at most, as `headway pack` does."""
    with Image.open(path) as image:
        factor = min(1.0, side / min(image.size))
        size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
        return image.convert("RGB").resize(size, Image.Resampling.BICUBIC)


class Samples:
    """What FFCV's writer reads."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        return self._items[place], place % 10


def write(asked: dict[str, Any], beton: str) -> RGBImageField:
    """Writes what is asked for, and returns the field that it was written with."""
    items: list[Any]
    if "pixels" in asked:
        field, items = RGBImageField(write_mode="raw"), list(np.load(asked["pixels"]))
    else:
        field, items = OriginalField(), sorted(Path(asked["images"]).rglob("*.JPEG"))
        if asked.get("resize"):
            field = RGBImageField(write_mode="jpg", jpeg_quality=asked["quality"])
            items = [np.asarray(resized(path, asked["resize"])) for path in items]
    DatasetWriter(beton, {"image": field, "label": IntField()}, num_workers=1).from_indexed_dataset(Samples(items))
    return field


def batches(asked: dict[str, Any], beton: str, field: RGBImageField) -> Iterator[int]:
    flip = RandomHorizontalFlip()
    if "pixels" in asked:
        pipeline = [SimpleRGBImageDecoder(), flip, RandomTranslate(padding=asked["translate"])]
    else:
        pipeline = [RandomResizedCropRGBImageDecoder((224, 224)), flip]
    samples = len(Reader(beton, {"image": type(field)}).metadata)
    loader = Loader(
        beton,
        batch_size=asked["batch"],
        num_workers=asked["threads"],
        order=OrderOption.RANDOM,
        os_cache=True,
        indices=np.tile(np.arange(samples), -(-EPOCH // samples)),
        pipelines={"image": [*pipeline, ToTensor()], "label": [IntDecoder(), ToTensor(), Squeeze()]},
        custom_fields={"image": type(field)},
    )
    while True:
        for images, _ in loader:
            yield len(images)


if __name__ == "__main__":
    asked = argument()
    beton = str(Path(asked["folder"]) / f"{os.getpid()}.beton")
    field = write(asked, beton)
    size = Reader(beton, {"image": type(field)}).alloc_table["size"].mean()
    kernel = "copy" if "pixels" in asked else "OpenCV INTER_AREA, full decode with TJFLAG_FASTDCT"
    name = f"ffcv {version('ffcv')}, numba {version('numba')}"
    serve(batches(asked, beton, field), version=name, kernel=kernel, facts=lambda: {"kB an image": size / 1000})
