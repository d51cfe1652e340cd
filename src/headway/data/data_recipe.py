"""The `data` part of a recipe. Imports no torch, which would take seconds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from headway.core.recipe import RecipePart
from headway.data.resolution import ProgressiveRecipe

VerifyMode = Literal["first", "always", "never"]
OnBad = Literal["substitute", "mask", "stop"]
SYNTHETIC = "synthetic"
CacheMode = Literal["auto", "device", "memory", "disk", "none"]
Side = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SyntheticRecipe(RecipePart):
    """Random images that lie on the device already: they show a run's speed if its input were free."""

    samples: int = Field(default=50_000, ge=1)
    """Size of the data set, which sets the length of an epoch."""
    classes: int = Field(default=10, ge=2)
    """Number of classes."""
    size: tuple[Side, Side] = (32, 32)
    """(height, width) of the images in pixels."""
    channels: Literal[1, 3] = 3
    """Number of channels of the images."""


class CropRecipe(RecipePart):
    """The box of an image that is resized to `size`. `crop: random` is short for `crop: {name: random}`."""

    name: Literal["center", "random"] = "center"
    """`center`: the largest centred box with the proportions of `size`. `random`: a box of random area and proportions,
    like torchvision's RandomResizedCrop (Szegedy et al. 2015, arXiv 1409.4842); evaluation still uses the centre."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of each side of the centred box that is kept: 0.875 is the usual 224 pixels of 256."""
    scale: tuple[Share, Share] = (0.08, 1.0)
    """Range of the box's share of the image area. Used by `random`."""
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """Range of width / height. Used by `random`."""

    @property
    def is_random(self) -> bool:
        """True if the box is drawn for each sample."""
        return self.name == "random"

    def to_center(self) -> CropRecipe:
        """Returns the centre crop that evaluation uses."""
        return CropRecipe(share=self.share)

    # `crop: random` instead of `crop: {name: random}`.
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
            # A key that changes nothing is refused, so that a typo in `name` is seen.
            if self.name == "center" and key in self.model_fields_set:
                raise ValueError(f"a centred crop does not use {key!r}: remove it, or set name: random")
        return self

    @model_serializer(mode="wrap")
    def _drop_unused_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A resolved recipe is read again, and `_check_keys` refuses keys that are not used.
        return handler(self) if self.is_random else {"name": self.name, "share": self.share}


class DataRecipe(RecipePart):
    """The data sets and their loading. `data: synthetic` is short for `data: {train: synthetic}`."""

    train: str
    """Training set: a packed folder, relative to the recipe; a version in a store, such as `store:cars@v3`; any other
    path or address that `headway.open` opens; or `synthetic`."""
    eval: str | None = None
    """Evaluation set, with the same classes. `store:cars@v3` is the split `eval` of that version."""
    synthetic: SyntheticRecipe | None = None
    """Sizes of the random data of `train: synthetic`."""
    size: int | tuple[int, int] | None = None
    """Size that images are resized to: one side, or (height, width). Unset: the size of the images, if they share
    one."""
    crop: CropRecipe = CropRecipe()
    """Part of a training image that is resized."""
    progressive: ProgressiveRecipe | None = None
    """Train with smaller images first."""
    scaled: bool = False
    """Decode a JPEG at 1/2, 1/4 or 1/8 if the crop is that much larger than `size`: faster for large photographs, with
    slightly different pixels."""
    decoder: Literal["auto", "native", "pillow"] = "auto"
    """JPEG decoder. auto: the native core if it is built. They differ by at most 1 in a pixel."""
    cache: CacheMode = "auto"
    """Place where samples are kept during training: decoded on the `device` or in `memory`; the bytes of a remote set
    on the local `disk`; or `none`. auto: chosen by size; the log names the choice and the reason."""
    cache_folder: str | None = None
    """Folder of the `disk` cache; unset: headway in the user's cache folder."""
    cache_gb: float = Field(default=50.0, gt=0, allow_inf_nan=False)
    """Largest size of the `disk` cache in GB (10^9 bytes)."""
    channels: Literal[1, 3] | None = None
    """Channels of the images. Unset: 1 if all training images are gray, else 3."""
    threads: int | None = Field(default=None, ge=1)
    """Decoding threads. Unset: one fewer than this rank's share of the usable cores, at least one."""
    pin: bool = False
    """Bind each decoding thread of the native core to one CPU core. Helps on many cores that no other process uses."""
    prefetch_batches: int = Field(default=3, ge=1)
    """Number of batches that are decoded in advance."""
    window: int | None = Field(default=None, ge=1)
    """Number of samples that are shuffled together. Unset: all. Set fewer for disks that seek slowly."""
    partition: Literal["global", "independent"] = "global"
    """How several processes share the training set. `global`: one order for all, so each sample is served once an
    epoch. `independent`: each reads at random from the whole set, by a seed of its own; an epoch then misses some
    samples and repeats others."""
    image_transform: str | None = None
    """Import path of your function make(), which returns a transform of one training image: of torchvision v2 or
    albumentations, or any function of a numpy array. It gets uint8 [H, W, C] images after crop and resize, torchvision
    [C, H, W] tensors, and returns uint8 images of the same size; augmentation and normalisation follow."""
    transform_workers: int | None = Field(default=None, ge=0)
    """Processes that run `image_transform`; 0: none, the training loop runs it. Unset: one fewer than this rank's share
    of the usable cores, at least one, or none if a whole batch takes it less than a millisecond."""
    worker_kind: Literal["process", "thread"] = "process"
    """`thread` runs `image_transform` in threads: for code that releases Python's global lock, and that draws random
    numbers from a parameter `rng` (a numpy Generator)."""
    on_bad: OnBad = "substitute"
    """Reaction to a damaged record: `substitute` the next good one, `mask` it out of loss and metrics, or `stop` the
    run."""
    max_bad_share: float = Field(default=0.01, ge=0, le=1)
    """Largest share of damaged records in a data set. Above it, training stops at the next logging step, and an
    evaluation stops."""
    verify: VerifyMode = "first"
    """When the checksum of a record is verified: at its `first` read by a process, `always`, or `never`."""

    # `data: synthetic` instead of `data: {train: synthetic}`.
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
        # Random images have no files, so every option of files and decoding would be ignored.
        if self.train == SYNTHETIC:
            for key in type(self).model_fields:
                if key in self.model_fields_set - {"train", "synthetic"} and getattr(self, key) is not None:
                    other = ", or set it under data.synthetic" if key in SyntheticRecipe.model_fields else ""
                    raise ValueError(f"synthetic data does not use {key!r}: remove it{other}")
        elif self.image_transform is None:
            for key in ("transform_workers", "worker_kind"):
                if key in self.model_fields_set and getattr(self, key) not in (None, "process"):
                    raise ValueError(f"{key!r} counts only with image_transform: remove it, or set image_transform")
        elif self.cache == "device":
            raise ValueError(
                "cache: device keeps the images where image_transform cannot reach them: set cache to memory or none"
            )
        if self.train != SYNTHETIC and self.synthetic is not None:
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
        # As above: keys that synthetic data refuses must not be written.
        tree: dict[str, Any] = handler(self)
        if self.train != SYNTHETIC:
            return tree
        # `synthetic` is absent from a dump of the given keys alone (exclude_unset).
        return {key: value for key, value in tree.items() if key in ("train", "synthetic")}
