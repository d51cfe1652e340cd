"""The `augment` part of a recipe. Imports no torch, which would take seconds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from headway.core.recipe import RecipePart
from headway.data.augment_tables import PolicyTable

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Byte = Annotated[float, Field(ge=0, le=255)]
FlipMode = Literal["random", "alternating", "vertical", "both"]

Factor = Annotated[float, Field(ge=0, allow_inf_nan=False)]

AugmentPlace = Literal["host", "device", "device_crops"]
# Augmentations that a loader can do on the host.
HOST_AUGMENTATIONS = frozenset({"flip", "translate"})
# Keys of an AugmentRecipe that are no augmentations.
SETTINGS = frozenset({"where", "normalise", "mean", "std"})


# Keys of a PolicyRecipe that each policy uses.
POLICY_KEYS = {"trivial": frozenset[str](), "rand": frozenset({"n", "m"}), "auto": frozenset({"table"})}


class ErasingRecipe(RecipePart):
    """Random erasing: fills a rectangle of some samples (Zhong et al. 2017, arXiv 1708.04896)."""

    p: Share = 0.25
    """Probability that a sample is erased."""
    scale: tuple[Share, Share] = (0.02, 0.33)
    """Range of the rectangle's share of the image area."""
    ratio: tuple[Positive, Positive] = (0.3, 3.3)
    """Range of height / width."""
    fill: Literal["mean", "random"] | Byte = "mean"
    """Fill value: the channels' `mean`, `random` bytes (as in the paper), or a number in 0..255."""

    @field_validator("scale", "ratio")
    @classmethod
    def _check_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] > value[1]:
            raise ValueError(f"{list(value)} is an empty range: write the smallest first")
        return value


class RotationRecipe(RecipePart):
    """Bilinear rotation by a uniform angle. `rotation: 15` is short for `rotation: {degrees: 15}`."""

    degrees: float = Field(gt=0, le=180)
    """Largest angle, in both directions."""
    p: Share = 1.0
    """Probability that a sample is rotated."""
    border: Literal["mean", "reflect"] = "mean"
    """Filling of the corners: the channels' `mean`, or the image, `reflect`ed at its border."""

    # `rotation: 15` instead of `rotation: {degrees: 15}`.
    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        return {"degrees": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


class JitterRecipe(RecipePart):
    """Colour jitter: factors uniform in [1 - x, 1 + x] and a shift of the hue, applied in this order (Howard 2013,
    arXiv 1312.5402)."""

    brightness: Factor = 0.0
    """Spread x of the brightness. A factor of 0 is black, 2 is twice as bright."""
    contrast: Factor = 0.0
    """Spread x of the contrast. A factor of 0 is the image's mean gray."""
    saturation: Factor = 0.0
    """Spread x of the saturation. A factor of 0 is gray. Does nothing to images of one channel."""
    hue: float = Field(default=0.0, ge=0, le=0.5)
    """Largest shift of the hue in both directions, in turns of the colour wheel: 0.5 gives every hue. Does nothing to
    images of one channel."""

    @model_validator(mode="after")
    def _check_not_empty(self) -> JitterRecipe:
        if not (self.brightness or self.contrast or self.saturation or self.hue):
            raise ValueError("this jitter changes nothing: set brightness, contrast, saturation or hue, or remove it")
        return self


class MixupRecipe(RecipePart):
    """Mixup: blends each sample and its label with another of its batch (Zhang et al. 2017, arXiv 1710.09412)."""

    alpha: Positive = 0.2
    """The share of the sample itself is drawn from Beta(alpha, alpha). 1 is uniform; a small alpha mostly keeps one of
    the two samples."""


class CutmixRecipe(RecipePart):
    """Cutmix: pastes a box of another sample of the batch (Yun et al. 2019, arXiv 1905.04899)."""

    alpha: Positive = 1.0
    """The share of the area that the sample keeps is drawn from Beta(alpha, alpha). 1 is uniform."""


class PolicyRecipe(RecipePart):
    """Random operations for each sample. `policy: trivial` is short for `policy: {name: trivial}`."""

    name: Literal["trivial", "rand", "auto"]
    """`trivial`: one operation of a random strength (Müller and Hutter 2021, arXiv 2103.10158; the wide space).
    `rand`: n operations of one strength (Cubuk et al. 2019, arXiv 1909.13719). `auto`: one of 25 pairs of operations
    that a search found (AutoAugment, Cubuk et al. 2018, arXiv 1805.09501)."""
    n: int = Field(default=2, ge=1, le=99)
    """Number of operations for each sample. Used by `rand`."""
    m: int = Field(default=9, ge=0, le=30)
    """Strength of the operations, 0 to 30. Used by `rand`."""
    table: PolicyTable = "imagenet"
    """Data set of the search: `imagenet`, `cifar10` or `svhn`. Used by `auto`."""

    # `policy: trivial` instead of `policy: {name: trivial}`.
    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_keys(self) -> PolicyRecipe:
        # `trivial` draws its strength, for example, so n and m would be ignored.
        unused = sorted(self.model_fields_set - {"name"} - POLICY_KEYS[self.name])
        if unused:
            other = next(name for name, keys in POLICY_KEYS.items() if unused[0] in keys)
            raise ValueError(f"{self.name!r} does not use {unused[0]!r}. Remove {unused[0]!r}, or set name: {other}")
        return self

    @model_serializer(mode="wrap")
    def _drop_unused_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A resolved recipe is read again, and `_check_keys` refuses keys that are not used.
        tree: dict[str, Any] = handler(self)
        return {key: value for key, value in tree.items() if key == "name" or key in POLICY_KEYS[self.name]}


class AugmentRecipe(RecipePart):
    """Augmentation of training batches, in the order of these keys, and normalisation of all batches."""

    where: Literal["auto"] | AugmentPlace = "auto"
    """Place of flip and translate: on the `host`, by the loader, or on the `device`. `device_crops`: a GPU that keeps
    the decoded set also crops and resizes. auto: the faster place, if the doctor's profile lies beside the recipe; else
    the host for a CPU, the device for a GPU. The pixels are the same. All other augmentations run on the device."""
    flip: bool | FlipMode = False
    """Mirror images. `random` (or true): half of the samples, left to right, drawn anew in each epoch. `alternating`:
    half of them in the first epoch and the others in the next, so that two epochs show each sample both ways (Jordan
    2024, arXiv 2404.00498). `vertical`: half of the samples, top to bottom. `both`: left to right and top to bottom,
    drawn independently, for images that have no upper side, as from a microscope or a satellite."""
    translate: int = Field(default=0, ge=0)
    """Largest shift of a sample in pixels, horizontal and vertical; reflection fills the border."""
    rotation: RotationRecipe | None = None
    """Rotate by a random angle."""
    policy: PolicyRecipe | None = None
    """TrivialAugment, RandAugment or AutoAugment."""
    jitter: JitterRecipe | None = None
    """Brightness, contrast, saturation and hue."""
    cutout: int | None = Field(default=None, ge=1)
    """Side in pixels of a square that is filled with the mean in each sample. Its centre is a random pixel, so a part
    of it may lie outside (DeVries and Taylor 2017, arXiv 1708.04552)."""
    random_erasing: ErasingRecipe | None = None
    """Fill a random rectangle of some samples."""
    cutmix: CutmixRecipe | None = None
    """Paste a box of another sample. With cutmix and mixup, each sample gets one of them, with probability 1/2."""
    mixup: MixupRecipe | None = None
    """Blend with another sample."""
    normalise: bool = True
    """Pass (pixel - mean) / std to the network. False: pass the uint8 bytes to a network that normalises them itself,
    so that torch.compile can fuse this with its first layer."""
    mean: Literal["auto"] | tuple[Finite, ...] = "auto"
    """Mean of each channel, in 0..255; auto: measured over the training images."""
    std: Literal["auto"] | tuple[Positive, ...] = "auto"
    """Standard deviation of each channel, in 0..255."""

    @model_validator(mode="after")
    def _check_keys(self) -> AugmentRecipe:
        # Bytes that are blended are fractions, and rounding them would change the mix.
        if not self.normalise and self.mixup is not None:
            raise ValueError("mixup gives no whole numbers: set normalise: true, or remove mixup")
        return self

    @property
    def flip_mode(self) -> FlipMode | None:
        """Kind of flip; None if no sample is mirrored."""
        if isinstance(self.flip, bool):
            return "random" if self.flip else None
        return self.flip

    def list_augmentations(self) -> frozenset[str]:
        """Returns the keys of the augmentations that this recipe asks for."""
        # Every key that is no setting is an augmentation, off by its default: a new key cannot be forgotten here.
        fields = type(self).model_fields
        return frozenset(
            name for name in fields if name not in SETTINGS and getattr(self, name) != fields[name].default
        )

    def build_host_options(self) -> dict[str, Any]:
        """Returns the options of a loader that flips and shifts on the host."""
        return {"flip": self.flip_mode or False, "translate": self.translate}

    def find_other_place(self, device_type: str) -> tuple[AugmentPlace, dict[str, Any]] | None:
        """Returns the place that flip and translate do not have, and the loader's options there.

        None if the recipe asks for neither.
        """
        if self.where == "device_crops" or not self.list_augmentations() & HOST_AUGMENTATIONS:
            return None
        if self.select_host_augmentations(device_type):
            return "device", {"flip": False, "translate": 0}
        return "host", self.build_host_options()

    def select_host_augmentations(self, device_type: str) -> frozenset[str]:
        """Selects the augmentations that the loader does on the host, for batches on a device of this type."""
        # On a CPU the loader flips and shifts in the pass that decodes; a GPU has time to spare.
        is_on_host = self.where == "host" or (self.where == "auto" and device_type == "cpu")
        return self.list_augmentations() & HOST_AUGMENTATIONS if is_on_host else frozenset()
