"""The input's part of a recipe; read without torch, whose import takes seconds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from headway.core.recipe import Part
from headway.data.resolution import ProgressiveRecipe

VerifyMode = Literal["first", "always", "never"]
OnBad = Literal["substitute", "mask", "stop"]
SYNTHETIC = "synthetic"
CacheMode = Literal["auto", "device", "memory", "disk", "none"]
Side = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SyntheticRecipe(Part):
    """Random images that lie on the device already: what a run would do if its input were free."""

    samples: int = Field(default=50_000, ge=1)
    """Size of the pretended data set: makes the length of an epoch."""
    classes: int = Field(default=10, ge=2)
    size: tuple[Side, Side] = (32, 32)
    """(height, width)"""
    channels: Literal[1, 3] = 3


class CropRecipe(Part):
    """Which box of an image is resized to `size`. `crop: random` is short for `crop: {name: random}`."""

    name: Literal["center", "random"] = "center"
    """`center`: the largest centred box of the size's shape. `random`: a box of random area and shape, as torchvision's
    RandomResizedCrop (Szegedy et al. 2015, arXiv 1409.4842); evaluation takes the centre then too."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Of the centred box that is taken, each side: 0.875 is the usual 224 pixels of 256."""
    scale: tuple[Share, Share] = (0.08, 1.0)
    """Of `random`: smallest and largest share of the image's area."""
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """Of `random`: smallest and largest width / height."""

    @property
    def is_random(self) -> bool:
        return self.name == "random"

    def to_center(self) -> CropRecipe:
        """What evaluation takes."""
        return CropRecipe(share=self.share)

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_keys(self) -> CropRecipe:
        for key in ("scale", "ratio"):
            low, high = getattr(self, key)
            if low > high:
                raise ValueError(f"{key} is (smallest, largest), and {low:g} is more than {high:g}")
            if self.name == "center" and key in self.model_fields_set:
                raise ValueError(f"a centred crop does not use {key!r}: remove it, or set name: random")
        return self

    @model_serializer(mode="wrap")
    def _drop_unused_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return handler(self) if self.is_random else {"name": self.name, "share": self.share}


class DataRecipe(Part):
    """Where samples come from. `data: synthetic` is short for `data: {train: synthetic}`."""

    train: str
    """A packed folder, relative to the recipe, or whatever else `headway.open` opens, also at a remote address; or
    `synthetic`."""
    eval: str | None = None
    """The same, with the same classes."""
    synthetic: SyntheticRecipe | None = None
    """Of `train: synthetic`."""
    size: int | tuple[int, int] | None = None
    """Side of the square, or (height, width), that images are brought to. Unset: their own size, where they share
    one."""
    crop: CropRecipe = CropRecipe()
    """Which part of a training image is resized."""
    progressive: ProgressiveRecipe | None = None
    """Train with smaller images first."""
    scaled: bool = False
    """Decode a JPEG at 1/2, 1/4 or 1/8 where the crop is that much larger than `size`: faster for large photographs,
    with pixels that differ a little."""
    decoder: Literal["auto", "native", "pillow"] = "auto"
    """What decodes JPEGs; auto: the native core where it is built. They differ by 1 in a pixel at most."""
    cache: CacheMode = "auto"
    """Where the samples are kept while training: decoded on the `device` or in `memory`; bytes that lie elsewhere on
    the local `disk`; or nowhere. auto: by size; the run says which and why."""
    cache_folder: str | None = None
    """Of `disk`; unset: headway in the user's cache folder."""
    cache_gb: float = Field(default=50.0, gt=0, allow_inf_nan=False)
    """Most that `disk` keeps, in units of 10^9 bytes."""
    channels: Literal[1, 3] | None = None
    """Unset: 1 where all training images are gray, else 3."""
    threads: int | None = Field(default=None, ge=1)
    """Decoding threads; unset: one fewer than this rank's share of the usable cores, at least one."""
    pin: bool = False
    """Each decoding thread keeps to one CPU; for many cores that are this process's alone. Of the native core."""
    prefetch_batches: int = Field(default=3, ge=1)
    """Batches decoded ahead of need."""
    window: int | None = Field(default=None, ge=1)
    """Samples that are shuffled together; unset: all. Smaller suits disks that cannot seek."""
    on_bad: OnBad = "substitute"
    """A damaged record is `substitute`d by the next good one, `mask`ed out of loss and metrics, or `stop`s the run."""
    max_bad_share: float = Field(default=0.01, ge=0, le=1)
    """The run stops at a logging step once more than this share of the data set was found damaged; an evaluation, once
    more than this share of its set was."""
    verify: VerifyMode = "first"
    """When a record's checksum is looked at: at its `first` touch by a process, `always`, or `never`."""

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        return {"train": value} if isinstance(value, str) else value

    @field_validator("size")
    @classmethod
    def _check_sides(cls, size: int | tuple[int, int] | None) -> int | tuple[int, int] | None:
        if size is not None and min(size if isinstance(size, tuple) else (size,)) < 1:
            raise ValueError("a side of an image has 1 pixel or more")
        return size

    @model_validator(mode="after")
    def _check_keys(self) -> DataRecipe:
        if self.train == SYNTHETIC:
            for key in type(self).model_fields:
                if key in self.model_fields_set - {"train", "synthetic"} and getattr(self, key) is not None:
                    other = ", or set it under data.synthetic" if key in SyntheticRecipe.model_fields else ""
                    raise ValueError(f"synthetic data does not use {key!r}: remove it{other}")
        elif self.synthetic is not None:
            raise ValueError("data.synthetic counts only with train: synthetic: remove it, or set train: synthetic")
        if self.scaled and self.cache in ("device", "memory"):
            raise ValueError(
                f"cache: {self.cache} keeps whole images, and scaled decodes them smaller: remove scaled, or set cache "
                "to auto, disk or none"
            )
        if self.pin and self.decoder == "pillow":
            raise ValueError("Pillow's threads cannot be pinned: remove pin, or set decoder to native or auto")
        return self

    @model_serializer(mode="wrap")
    def _drop_unused_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tree: dict[str, Any] = handler(self)
        return {key: tree[key] for key in ("train", "synthetic")} if self.train == SYNTHETIC else tree
