"""The input's part of a recipe; read without torch, whose import takes seconds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from headway.core.recipe import Part

Verify = Literal["first", "always", "never"]
OnBad = Literal["substitute", "mask", "stop"]
SYNTHETIC = "synthetic"
Side = Annotated[int, Field(ge=1)]
Spread = Annotated[float, Field(gt=0)]


class SyntheticRecipe(Part):
    """Random images that lie on the device already: what a run would do if its input were free."""

    samples: int = Field(default=50_000, ge=1)
    """Size of the pretended data set: makes the length of an epoch."""
    classes: int = Field(default=10, ge=2)
    size: tuple[Side, Side] = (32, 32)
    """(height, width)"""
    channels: Literal[1, 3] = 3


class DataRecipe(Part):
    """Where samples come from. `data: synthetic` is short for `data: {train: synthetic}`."""

    train: str
    """A packed folder, relative to the recipe; or `synthetic`."""
    eval: str | None = None
    """A packed folder with the same classes."""
    synthetic: SyntheticRecipe | None = None
    """Of `train: synthetic`."""
    size: int | tuple[int, int] | None = None
    """Side of the square, or (height, width), that images are brought to: the largest centred box of that shape is
    resized. Unset: their own size, where they share one."""
    channels: Literal[1, 3] | None = None
    """Unset: 1 where all training images are gray, else 3."""
    threads: int | None = Field(default=None, ge=1)
    """Decoding threads; unset: one fewer than the usable cores, at least one."""
    ahead: int = Field(default=3, ge=1)
    """Batches decoded ahead of need."""
    window: int | None = Field(default=None, ge=1)
    """Samples that are shuffled together; unset: all. Smaller suits disks that cannot seek."""
    on_bad: OnBad = "substitute"
    """A damaged record is `substitute`d by the next good one, `mask`ed out of loss and metrics, or `stop`s the run."""
    max_bad_share: float = Field(default=0.01, ge=0, le=1)
    """The run stops at a logging step once more than this share of the data set was found damaged; an evaluation, once
    more than this share of its set was."""
    verify: Verify = "first"
    """When a record's checksum is looked at: at its `first` touch by a process, `always`, or `never`."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"train": value} if isinstance(value, str) else value

    @field_validator("size")
    @classmethod
    def _positive(cls, size: int | tuple[int, int] | None) -> int | tuple[int, int] | None:
        if size is not None and min(size if isinstance(size, tuple) else (size,)) < 1:
            raise ValueError("a side of an image has 1 pixel or more")
        return size

    @model_validator(mode="after")
    def _fits(self) -> DataRecipe:
        if self.train == SYNTHETIC:
            unused = [key for key in ("eval", "size", "channels", "window") if getattr(self, key) is not None]
            if unused:
                raise ValueError(
                    f"synthetic data does not use {unused[0]!r}: remove it, or set it under data.synthetic"
                )
        elif self.synthetic is not None:
            raise ValueError("data.synthetic counts only with train: synthetic: remove it, or set train: synthetic")
        return self


class AugmentRecipe(Part):
    """Augmentation of training batches, and the normalisation of all batches."""

    flip: bool = False
    """Mirror half of the samples, left to right."""
    translate: int = Field(default=0, ge=0)
    """Move each sample by up to so many pixels both ways; the border is filled by reflection."""
    mean: Literal["auto"] | tuple[float, ...] = "auto"
    """Mean of each channel, in 0..255; auto: measured over the training images."""
    std: Literal["auto"] | tuple[Spread, ...] = "auto"
    """Standard deviation of each channel, in 0..255."""
