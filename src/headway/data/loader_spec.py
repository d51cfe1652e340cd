"""LoaderSpec: everything a Loader is told apart from its data set, checked once when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, final, get_args

from headway.core.errors import UsageError, suggest_nearest
from headway.data.augment_recipe import FlipMode
from headway.data.batch_plan import BatchPlan
from headway.data.columns import DatasetDescription
from headway.data.crops import MOST_DEVICE_SCALE
from headway.data.data_recipe import CacheMode, CropRecipe, OnBad, VerifyMode
from headway.data.host_transform import HostTransform
from headway.data.order import Order
from headway.data.resolution import ProgressiveRecipe

if TYPE_CHECKING:
    import torch

    from headway.data.batch_transform import BatchTransform
    from headway.data.decode import Backend
    from headway.data.tiers import Tier
    from headway.data.workers.image_transform import ImageTransform

FLIPS = get_args(FlipMode)
CROPS = ("center", "random")
BACKENDS = ("auto", "native", "pillow")
WORKER_KINDS = ("process", "thread")

# Options that only data sets of Headway use, and only data sets of the user's own.
IMAGE_OPTIONS = (
    *("size", "channels", "crop", "crop_on", "flip", "translate", "progressive", "scaled", "threads", "backend", "pin"),
    *("cache", "tier", "on_bad", "verify", "transform", "worker_kind", "batch_transform"),
)
SAMPLE_OPTIONS = ("collate",)


OPTIONS_OF_DATALOADER = {
    "batch_size": "batch=",
    "shuffle": "seed=1",
    "sampler": "order=",
    "batch_sampler": "batch= and order=",
    "generator": "seed=",
    "num_workers": "workers= for a data set of your own, or threads=",
    "collate_fn": "collate=",
    "prefetch_factor": "prefetch_batches=",
    "drop_last": "seed=1, with which every batch is full",
    "pin_memory": 'device="cuda"',
}
"""Options of PyTorch's DataLoader, and the option here that takes their place."""


def check_options(spec: object, options: Mapping[str, Any]) -> None:
    """Raises UsageError if a Loader is called with an option that it does not have, or without names."""
    if not (spec is None or isinstance(spec, LoaderSpec)):
        raise UsageError(f"options of a Loader are given by name, and {spec!r} has none", fix="Write batch=64, seed=1.")
    known = [entry.name for entry in fields(LoaderSpec)]
    for name in options:
        if name not in known:
            twin = OPTIONS_OF_DATALOADER.get(name)
            fix = f"Use {twin}." if twin else suggest_nearest(name, known)
            raise UsageError(f"a Loader has no option {name!r}", fix=fix)
    if spec is None and "batch" not in options:
        raise UsageError("a Loader needs the number of samples of a batch", fix="Write batch=64.")


@final
@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """Options of a Loader.

    Crop, flip and translate are drawn from the samples' keys, so they need an order.

    Args:
        batch: the global batch: a step takes the next `batch` positions, across an epoch's end too. Or a plan of
            batches that grow.
        order: the order of training; None: every sample once in index order, the last batch short (evaluation).
        seed: instead of `order`: `Order(len(dataset), seed)`.
        start: first position of the first iteration.
        stop: end of its positions; later iterations continue behind it and are as long. None: one pass through the
            data set. `math.inf`: without end.
        rank: this rank takes its share of every step.
        world: number of ranks.
        size: side or (height, width) of the images; None: the size that all of them share.
        channels: 1 or 3; None: as the data set has them.
        crop: "center", "random" or a `CropRecipe`: the box of each image that is resized.
        crop_on: place of crop and resize for a set that is kept decoded on the device: the `host`, where no such set is
            kept, or the `device`. The pixels are the same.
        flip: mirror while decoding: True or "random", "alternating": left to right; "vertical": top to bottom; "both";
            False. See `AugmentRecipe`.
        translate: shift each image by up to so many pixels both ways; reflection fills the border.
        progressive: smaller images in the first epochs.
        scaled: decode large JPEGs smaller; see `DataRecipe`.
        threads: decoding threads; None: see `choose_thread_count`.
        backend: the decoder: "auto", "native" or "pillow".
        prefetch_batches: so many batches are made ahead of need; by worker processes, at least two each.
        device: device that receives the batches.
        pin: bind each decoding thread to one CPU; see `build_decoder`.
        cache: storage of the samples while this loader lives: "auto", "device", "memory", "disk" or "none"; see
            `headway.data.tiers`. A set that is kept decoded is decoded before the first batch.
        tier: an open tier instead of `cache`, for several loaders that share one. Its maker closes it.
        on_bad: a damaged sample is `substitute`d by the first good one after it in the Order, `mask`ed (zeros, served
            -1), or it `stop`s the iteration with DataError.
        verify: when checksums are compared; see `Dataset.select_unchecked`.
        transform: a function of your own on each image, after decoding, crop, resize and flip; see
            `headway.data.workers.image_transform.ImageTransform` for what it is given. It returns an array or tensor,
            always of one shape and type, and the batch's `images` are these, stacked.
        workers: processes that run `transform`, or load the samples of a data set of your own; 0: none, the loop does
            it itself. None: one fewer than this rank's share of the usable cores, at least one; and none if `transform`
            takes less than a millisecond for a batch.
        worker_kind: "thread" runs `transform` in threads, for code that releases the GIL and draws no numbers from
            global generators.
        batch_transform: a function of your own on each batch of uint8 images; runs in the loader's thread unless the
            images are kept on the device.
        collate: makes a batch of the samples of a data set of your own; None: torch's `default_collate`.

    Raises:
        UsageError: a value is impossible, or values contradict each other.
    """

    batch: int | BatchPlan
    order: Order | None = None
    seed: int | None = None
    start: int = 0
    stop: int | float | None = None
    rank: int = 0
    world: int = 1
    size: int | tuple[int, int] | None = None
    channels: int | None = None
    crop: Literal["center", "random"] | CropRecipe = "center"
    crop_on: Literal["host", "device"] = "host"
    flip: bool | FlipMode = False
    translate: int = 0
    progressive: ProgressiveRecipe | None = None
    scaled: bool = False
    threads: int | None = None
    backend: Backend = "auto"
    prefetch_batches: int = 3
    device: torch.device | str = "cpu"
    pin: bool = False
    cache: CacheMode = "none"
    tier: Tier | None = None
    on_bad: OnBad = "substitute"
    verify: VerifyMode = "first"
    transform: Callable[..., Any] | ImageTransform | None = None
    workers: int | None = None
    worker_kind: Literal["process", "thread"] = "process"
    batch_transform: BatchTransform | None = None
    collate: Callable[[list[Any]], Any] | None = None

    # Checks that need the data set are made by `Loader` and `build_transform`.
    def __post_init__(self) -> None:
        # A batch below 1 is refused by the plan, which is made here and kept.
        _ = self.plan
        if self.start < 0 or (self.stop is not None and self.stop < self.start):
            raise UsageError(
                f"positions from {self.start} to {self.stop}", fix="Start at 0 or later, and stop at start or later."
            )
        # Without an order there is no next pass to go on with.
        if isinstance(self.stop, float) and not (math.isinf(self.stop) and self.draws_order):
            fix = "Give a number of positions, or math.inf and a seed for a loader without end."
            raise UsageError(f"a stop at {self.stop}", where="stop", fix=fix)
        if self.order is not None and self.seed is not None:
            raise UsageError("an order and a seed", fix="Leave one out: an order has its own seed.")
        if not 0 <= self.rank < self.world:
            raise UsageError(f"rank {self.rank} of a world of {self.world}", fix="Ranks count from 0.")
        if self.prefetch_batches < 1:
            what = f"{self.prefetch_batches} batches to prefetch"
            raise UsageError(what, where="prefetch_batches", fix="Set 1 or more.")
        if self.workers is not None and self.workers < 0:
            raise UsageError(f"{self.workers} workers", where="workers", fix="Set 0 or more.")
        self._check_size()
        self._check_words()
        # An alternating or random choice needs a seed, and the seed is the order's.
        is_random = self.crop_recipe.is_random or bool(self.flip) or self.translate > 0
        if not self.draws_order and (is_random or self.progressive is not None):
            raise UsageError(
                "random crops, flips and shifts are drawn from a seed, and there is none",
                fix="Give seed=1 or an order, or leave them out.",
            )

    def refuse_sample_options(self) -> None:
        """Raises UsageError if an option is set that only data sets of the user's own use."""
        for name in self._find_changed(SAMPLE_OPTIONS):
            what = "it is for a data set of your own, and this one is Headway's"
            raise UsageError(what, where=name, fix="Remove it.")
        # A transform of the user's own runs in workers, whatever the data set.
        for name in self._find_changed(("workers", "worker_kind")) if self.transform is None else ():
            what = "it is for a transform or a data set of your own, and there is neither"
            raise UsageError(what, where=name, fix="Remove it. Decoding has threads=.")

    def refuse_image_options(self) -> None:
        """Raises UsageError if an option is set that only data sets of Headway use."""
        for name in self._find_changed(IMAGE_OPTIONS):
            what = "it is for images that Headway decodes, and this data set is your own"
            raise UsageError(what, where=name, fix="Remove it, and let your data set do it.")

    def _find_changed(self, names: tuple[str, ...]) -> list[str]:
        usual = {field.name: field.default for field in fields(self)}
        return [name for name in names if getattr(self, name) != usual[name]]

    @property
    def draws_order(self) -> bool:
        """True if samples are served in a random order."""
        return self.order is not None or self.seed is not None

    def resolve_order(self, samples: int) -> LoaderSpec:
        """Returns the spec with the order that its seed gives over so many samples.

        Raises:
            UsageError: the order is over another number of samples, or the stop lies behind the set.
        """
        # The seed goes into the order, because a spec with both is refused.
        spec = self if self.seed is None else replace(self, order=Order(samples, self.seed), seed=None)
        if spec.order is None and spec.stop is not None and spec.stop > samples:
            raise UsageError(f"a stop at {spec.stop} of {samples} samples", fix="Give a seed to go through them again.")
        if spec.order is not None and spec.order.samples != samples:
            what = f"an order of {spec.order.samples} samples over a data set of {samples}"
            raise UsageError(what, fix="Make it with Order(len(dataset), seed), or give seed= instead.")
        return spec

    def _check_size(self) -> None:
        sides = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        if self.size is not None and (
            len(sides) != 2 or not all(isinstance(side, int) and side >= 1 for side in sides)
        ):
            raise UsageError(f"{self.size!r} is not a size", fix="Give one side, or (height, width), in pixels.")

    def _check_words(self) -> None:
        if isinstance(self.flip, str) and self.flip not in FLIPS:
            fix = f"{suggest_nearest(self.flip, FLIPS)} Or give True or False.".strip()
            raise UsageError(f"unknown flip {self.flip!r}", fix=fix)
        if isinstance(self.crop, str) and self.crop not in CROPS:
            raise UsageError(f"unknown crop {self.crop!r}", fix=suggest_nearest(self.crop, CROPS))
        if self.crop_on not in ("host", "device"):
            raise UsageError(f"unknown place {self.crop_on!r}", where="crop_on", fix="Give host or device.")
        if self.backend not in BACKENDS:
            raise UsageError(f"unknown decoder {self.backend!r}", fix=suggest_nearest(self.backend, BACKENDS))
        if self.worker_kind not in WORKER_KINDS:
            what = f"unknown kind of worker {self.worker_kind!r}"
            raise UsageError(what, fix=suggest_nearest(self.worker_kind, WORKER_KINDS))

    # Cached in the instance: a frozen dataclass without slots still has a __dict__.
    @cached_property
    def plan(self) -> BatchPlan:
        """Batch size of each step."""
        return self.batch if isinstance(self.batch, BatchPlan) else BatchPlan(self.batch)

    @cached_property
    def crop_recipe(self) -> CropRecipe:
        """`crop` as a recipe."""
        return self.crop if isinstance(self.crop, CropRecipe) else CropRecipe(name=self.crop)

    def build_transform(self, description: DatasetDescription) -> HostTransform:
        """Builds the host's transform of a data set's images.

        Raises:
            UsageError: the images have different sizes and the spec gives none, or an image is too small.
        """
        size = (self.size, self.size) if isinstance(self.size, int) else self.size
        if size is None:
            if description.common_size is None:
                raise UsageError("the images have different sizes", fix="Give the loader a size=(height, width).")
            # Columns say (width, height), images are (height, width).
            size = (description.common_size[1], description.common_size[0])
        flip: FlipMode | None = self.flip if isinstance(self.flip, str) else None
        return HostTransform(
            size=size,
            channels=self.channels or description.channels,
            crop=self.crop_recipe,
            flip="random" if self.flip is True else flip,
            translate=self.translate,
            progressive=self.progressive,
            scaled=self.scaled,
        )

    def fits_device_tier(self, description: DatasetDescription, backend: str) -> bool:
        """Returns True if batches can be made of pixels that are kept on the device: stored whole, or cropped there.

        Args:
            backend: the decoder in use. Only the native core's arithmetic is known on the device.
        """
        if self.uses_stored_pixels(description):
            return True
        transform, common_size = self.build_transform(description), description.common_size
        if self.crop_on == "host" or self.scaled or backend != "native" or common_size is None:
            return False
        # The first images are the smallest ones.
        height, width = transform.compute_size(0)
        scale = max(common_size[0] / width, common_size[1] / height)
        return scale <= MOST_DEVICE_SCALE and description.channels == transform.channels

    def uses_stored_pixels(self, description: DatasetDescription) -> bool:
        """Returns True if every image has the size and the channels of the batch already."""
        transform = self.build_transform(description)
        height, width = transform.size
        is_alike = description.common_size == (width, height) and description.channels == transform.channels
        # A centre crop of share 1 is the whole image only if the shapes agree.
        return transform.takes_whole_images and is_alike
