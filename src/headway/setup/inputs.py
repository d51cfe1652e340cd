"""Inputs: the data sets that a recipe names, where their bytes are kept, and loaders over them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch

from headway.core.cpu_count import choose_thread_count, count_usable_cores
from headway.core.errors import DataError, RecipeError
from headway.core.recipe import LoadedRecipe
from headway.core.sample_progress import SampleProgress
from headway.data import dataset as data
from headway.data.augment import measure
from headway.data.batch import Batch
from headway.data.batch_plan import BatchPlan
from headway.data.decode import chosen
from headway.data.loader import Loader
from headway.data.options import SYNTHETIC, Cache, CropRecipe, DataRecipe, SyntheticRecipe
from headway.data.order import Order
from headway.data.resolution import size_at
from headway.data.synthetic import Synthetic
from headway.data.tiers import Tier, choose
from headway.data.tiers.opened import RemoteShards
from headway.setup.recipe import TrainRecipe

Say = Callable[[str], object]

PLACES = {
    "none": "is read in place",
    "memory": "is kept in memory",
    "device": "is kept on the device",
    "disk": "is fetched into the local cache",
}
"""What a tier is, as a sentence says it."""

MEASURED_SAMPLES = 1024
"""Images over which mean and standard deviation are measured; packs store samples in random order."""

FIRST_SAMPLES = 2048
"""Most images that a network's `init` is shown."""

REHEARSED_SAMPLES = 8
"""Images that are looked at where nothing will be trained."""


@final
@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What is opened and built is not trained: a few images are looked at, no cache is filled, and the recipe may ask
    for a GPU where there is none.

    Attributes:
        stated: size and classes of the training set, where it need not be there.
    """

    stated: SyntheticRecipe | None = None


@final
@dataclass(kw_only=True)
class Inputs:
    """The data of one run. Close it after use.

    Attributes:
        train, eval: None where the data is synthetic, or none was opened.
        synthetic: what random images stand for the training set; None where it was opened, or nothing is trained.
        size: (height, width) of the images at the end of training.
        samples: of the training set.
        cache: as the recipe asks; `auto` stays so here.
        most: images that are looked at before the first step.
        loader: of the newest training batches; its stats are those of the run.
        feed: gives the training batches in the loader's place, where they are there already.
    """

    train: data.Dataset | None
    eval: data.Dataset | None
    device: torch.device
    size: tuple[int, int]
    channels: int
    samples: int
    say: Say
    cache: Cache
    synthetic: SyntheticRecipe | None = None
    most: int = FIRST_SAMPLES
    loader: Loader | None = None
    feed: Callable[[], Iterable[Batch]] | None = None
    _tiers: dict[int, Tier] = field(default_factory=dict)

    def batches(
        self, recipe: TrainRecipe, plan: BatchPlan, position: int, rank: int = 0, world: int = 1
    ) -> Iterable[Batch]:
        """Training batches from a position on, without end: a rank's share of each."""
        if self.feed is not None:
            return self.feed()
        if self.train is None:
            options = self.synthetic or SyntheticRecipe()
            given: dict[str, Any] = {"batch": plan, "seed": recipe.seed, "start": position}
            return Synthetic(options, **given, device=self.device, rank=rank, world=world)
        self.loader = self.training(self.train, recipe, batch=plan, start=position, rank=rank, world=world)
        return self.loader

    def state(self, recipe: TrainRecipe) -> dict[str, Any]:
        """Returns everything that the samples of a run depend on; a resumed run must match it."""
        train = self.train
        return {
            "seed": recipe.seed,
            "fingerprint": "synthetic" if train is None else train.fingerprint,
            "decoder": "none" if train is None else chosen(recipe.data.decoder),
            "window": recipe.data.window,
            # The fingerprint is of the columns alone; these stand in the description beside them.
            "channels": self.channels if train is None else train.description.channels,
            "classes": "synthetic" if train is None else _digest_of(train.description.label_kind, *train.classes),
        }

    def smallest(self, recipe: TrainRecipe) -> tuple[int, int]:
        """(height, width) of the images at the beginning of training. Raises UsageError where that is no less."""
        progressive = recipe.data.progressive
        return self.size if progressive is None else size_at(progressive, self.size, 0)

    def first_batch(self, recipe: TrainRecipe) -> Batch:
        """The beginning of the run's first batch, for `init` and the checks."""
        some = min(recipe.batch, self.most)
        if self.train is None:
            return next(iter(self.batches(recipe, BatchPlan(some), 0)))
        return next(iter(self.training(self.train, recipe, batch=some, stop=some, progressive=None)))

    def evaluation(self, recipe: TrainRecipe, dataset: data.Dataset, rank: int = 0, world: int = 1) -> Loader:
        """A data set once, in index order, each image by its centre: a rank's share of each batch."""
        micro = recipe.micro_batch if isinstance(recipe.micro_batch, int) else None
        of_a_rank = recipe.evaluate.batch or micro
        return self._loader(
            dataset,
            recipe,
            batch=min(of_a_rank * world if of_a_rank else recipe.batch, len(dataset)),
            rank=rank,
            world=world,
            crop=recipe.data.crop.centred,
            on_bad="stop" if recipe.data.on_bad == "stop" else "mask",
        )

    def sample(self, recipe: TrainRecipe, dataset: data.Dataset, count: int, batch: int, seed: int) -> Loader:
        """So many samples of a data set, drawn by a seed, each once and by its centre. The last batch is full too:
        positions from `count` on are none of them."""
        return self._loader(
            dataset,
            recipe,
            batch=batch,
            order=Order(len(dataset), seed),
            stop=count,
            crop=recipe.data.crop.centred,
            on_bad="stop" if recipe.data.on_bad == "stop" else "mask",
        )

    def measured(self, recipe: TrainRecipe) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, std) of each channel over the first training images."""
        assert self.train is not None
        count = self.measurable
        crop = recipe.data.crop.centred
        batch = next(iter(self._loader(self.train, recipe, batch=count, stop=count, ahead=1, crop=crop)))
        return measure(batch.images[torch.from_numpy(batch.served >= 0)])

    @property
    def measurable(self) -> int:
        """Images over which mean and standard deviation are measured."""
        return min(MEASURED_SAMPLES, self.most, self.samples)

    def close(self) -> None:
        """Ends what fetches and keeps bytes, and lets go of the data sets."""
        for tier in self._tiers.values():
            tier.close()
        self._tiers.clear()
        for dataset in (self.train, self.eval):
            if dataset is not None:
                dataset.close()

    def training(self, dataset: data.Dataset, recipe: TrainRecipe, **more: Any) -> Loader:
        """Builds a loader of training batches, as the recipe augments them."""
        options, host = recipe.data, recipe.augment.on_host(self.device.type)
        given: dict[str, Any] = {
            "batch": recipe.batch,
            "order": Order(len(dataset), recipe.seed, options.window),
            "crop": options.crop,
            "flip": (recipe.augment.flip_mode or False) if "flip" in host else False,
            "translate": recipe.augment.translate if "translate" in host else 0,
            "progressive": options.progressive,
            "on_bad": options.on_bad,
        }
        return self._loader(dataset, recipe, **given | more)

    def _loader(self, dataset: data.Dataset, recipe: TrainRecipe, *, crop: CropRecipe, **more: Any) -> Loader:
        options = recipe.data
        given: dict[str, Any] = {
            "size": self.size,
            "channels": self.channels,
            "crop": crop,
            "scaled": options.scaled,
            "threads": options.threads,
            "pin": options.pin,
            "backend": options.decoder,
            "ahead": options.ahead,
            "device": self.device,
            "on_bad": options.on_bad,
            "verify": options.verify,
            **more,
        }
        if "tier" in given:
            return Loader(dataset, **given)
        tier = self._tiers.get(id(dataset))
        if tier is None:  # the first loader of a set says what has to be made of its pixels
            as_they_are = Loader(dataset, **given).takes_pixels_as_they_are()
            tier = self._tiers[id(dataset)] = self._chosen(dataset, options, as_they_are)
        return Loader(dataset, tier=tier, **given)

    def tier(self, recipe: TrainRecipe, dataset: data.Dataset) -> Tier:
        """Where a data set's bytes are kept, filled; all its loaders share it."""
        loader = self.training(dataset, recipe) if dataset is self.train else self.evaluation(recipe, dataset)
        return loader.tier

    def _chosen(self, dataset: data.Dataset, options: DataRecipe, as_they_are: bool) -> Tier:
        """Args: as_they_are: nothing is made of its pixels. On a GPU they can be gathered then; not resized."""
        own = dataset is self.train or dataset is self.eval
        cache = self.cache if own else "none"  # another set is gone through once: nothing is gained by keeping it
        if cache == "auto" and options.scaled:  # what is kept decoded is whole
            cache = "disk" if isinstance(dataset.source, RemoteShards) else "none"
        which = "training" if dataset is self.train else "evaluation"
        with SampleProgress(f"Filling the cache of the {which} data", "images", self.say) as progress:
            return choose(
                dataset,
                cache,
                device=self.device if as_they_are else "cpu",
                threads=options.threads,
                backend=options.decoder,
                folder=options.cache_folder,
                budget_bytes=int(options.cache_gb * 1e9),
                progress=progress,
            )


def reason_of(tier: Tier) -> str:
    """Why a tier was chosen, without its name."""
    return tier.why.removeprefix(f"{tier.name}, ")


def decoding(backend: str, threads: int, cores: int | None) -> str:
    """A sentence: what decodes, on how many of the usable cores (None: not known)."""
    what = f"Decoding by {'the native core' if backend == 'native' else 'Pillow'}, {threads} thread{'s'[: threads > 1]}"
    if cores is None:
        return f"{what}."
    others = cores - threads
    rest = f" (the other{'s are' if others > 1 else ' is'} left to training)" if others > 0 else ""
    return f"{what} of {cores} core{'s'[: cores > 1]}{rest}."


def _digest_of(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def open_relative(base: Path, uri: str, say: Say) -> data.Dataset:
    """Opens a data set that a recipe names; a scan of foreign data shows how far it is."""
    with SampleProgress(f"Scanning {uri}", "images", say) as progress:
        return data.open(uri if "://" in uri else base / Path(uri).expanduser(), progress=progress)


def open_inputs(
    loaded: LoadedRecipe[TrainRecipe],
    device: torch.device,
    *,
    say: Say,
    opened: bool,
    rehearsal: Rehearsal | None = None,
) -> tuple[LoadedRecipe[TrainRecipe], Inputs]:
    """Opens the data sets and resolves what they decide: size, channels, mean and standard deviation.

    Args:
        opened: False: the recipe of a run, resolved, whose data need not be there.
        rehearsal: nothing will be trained.

    Raises:
        HeadwayError: whatever is wrong with them.
    """
    recipe = loaded.recipe
    train = held_out = synthetic = None
    if recipe.data.train == SYNTHETIC:
        synthetic = recipe.data.synthetic or SyntheticRecipe()
    elif rehearsal is not None and rehearsal.stated is not None:
        loaded, synthetic = _resolve_stated(loaded, rehearsal.stated)
    with ExitStack() as on_error:
        if opened and synthetic is None:
            _check_cache(loaded)
            train = on_error.enter_context(closing(open_relative(loaded.base, recipe.data.train, say)))
            if recipe.data.eval is not None:
                held_out = on_error.enter_context(closing(open_relative(loaded.base, recipe.data.eval, say)))
            if (most := recipe.largest_batch) > len(train):
                say(f"The batch of {most} is larger than the data set of {len(train)}: each step spans epochs.")
        loaded, size, channels, samples = _resolve_images(loaded, train, synthetic)
        inputs = on_error.enter_context(
            closing(
                Inputs(
                    train=train,
                    eval=held_out,
                    device=device,
                    size=size,
                    channels=channels,
                    samples=samples,
                    say=say,
                    cache="none" if rehearsal is not None else recipe.data.cache,
                    synthetic=synthetic,
                    most=FIRST_SAMPLES if rehearsal is None else REHEARSED_SAMPLES,
                )
            )
        )
        _check_sizes(loaded.recipe, inputs)
        loaded = _resolve_places(loaded, inputs, filled=rehearsal is None)
        loaded = _resolve_normalisation(loaded, inputs)
        on_error.pop_all()
    return loaded, inputs


def _check_cache(loaded: LoadedRecipe[TrainRecipe]) -> None:
    options, usual = loaded.recipe.data, DataRecipe(train=SYNTHETIC)
    if options.cache in ("auto", "disk") or loaded.origins["data.cache"].startswith("auto: "):
        return
    for key in ("cache_folder", "cache_gb"):
        if getattr(options, key) != getattr(usual, key):
            what = f"cache: {options.cache} does not use it"
            raise RecipeError(what, where=f"data.{key}", fix="Remove it, or set data.cache to disk or auto.")


def _check_sizes(recipe: TrainRecipe, inputs: Inputs) -> None:
    """Raises UsageError where images are at some time too small for what is to be done with them."""
    side, translate = min(inputs.smallest(recipe)), recipe.augment.translate
    if translate >= side:
        what = f"translate {translate} is no less than the image's side of {side}"
        if side < min(inputs.size):
            what += " at the beginning of training"
        raise RecipeError(what, where="augment.translate", fix=f"Set it to at most {side - 1}.")
    side, shift = min(inputs.size), recipe.evaluate.shift
    if shift >= side:
        what = f"a shift of {shift} is no less than the image's side of {side}"
        raise RecipeError(what, where="evaluate.shift", fix=f"Set it to at most {side - 1}.")


def _resolve_places(loaded: LoadedRecipe[TrainRecipe], inputs: Inputs, *, filled: bool) -> LoadedRecipe[TrainRecipe]:
    """What decodes, what is done on the host, and where the bytes are kept."""
    recipe, device = loaded.recipe, inputs.device
    if recipe.data.train != SYNTHETIC:
        backend = chosen(recipe.data.decoder)
        if recipe.data.decoder == "auto":
            reason = "the native core is built" if backend == "native" else "the native core is not built"
            loaded = loaded.resolve("data.decoder", backend, reason)
        if inputs.train is not None and filled:
            tier = inputs.tier(loaded.recipe, inputs.train)
            reason = reason_of(tier)
            if inputs.eval is not None:  # filled now, not in the first evaluation
                inputs.tier(loaded.recipe, inputs.eval)
            if recipe.data.cache == "auto":
                loaded = loaded.resolve("data.cache", tier.name, reason)
            inputs.say(f"Training data {PLACES[tier.name]}: {reason}.")
            cores = count_usable_cores()
            inputs.say(decoding(backend, recipe.data.threads or choose_thread_count(), cores))
    if recipe.augment.where == "auto" and filled:
        reason = "the device is a CPU" if device.type == "cpu" else "the device has time for it"
        loaded = loaded.resolve("augment.where", "host" if device.type == "cpu" else "device", reason)
    return loaded


def _resolve_images(
    loaded: LoadedRecipe[TrainRecipe], train: data.Dataset | None, synthetic: SyntheticRecipe | None
) -> tuple[LoadedRecipe[TrainRecipe], tuple[int, int], int, int]:
    recipe = loaded.recipe
    if synthetic is not None:
        return loaded, synthetic.size, synthetic.channels, synthetic.samples
    if train is None:  # a run's own recipe: resolved
        assert recipe.data.size is not None
        assert recipe.data.channels is not None
        return loaded, _both_sides(recipe.data.size), recipe.data.channels, 0
    if recipe.data.channels is None:
        reason = "every training image is gray" if train.description.channels == 1 else "training images have colour"
        loaded = loaded.resolve("data.channels", train.description.channels, reason)
    size = recipe.data.size
    if size is None:
        common = train.description.common_size
        if common is None:
            fix = "Set data.size, for example 224; headway init proposes one."
            raise RecipeError("the images have different sizes", where="data.size", fix=fix)
        size = (common[1], common[0])
        loaded = loaded.resolve("data.size", size, "all training images have this size")
    channels = loaded.recipe.data.channels
    assert channels is not None
    return loaded, _both_sides(size), channels, len(train)


def _resolve_stated(
    loaded: LoadedRecipe[TrainRecipe], stated: SyntheticRecipe
) -> tuple[LoadedRecipe[TrainRecipe], SyntheticRecipe]:
    """A training set that is not there, as it is stated and as the recipe wants its images."""
    options = loaded.recipe.data
    if options.size is None:
        what = "the data are not there to say how large their images are"
        raise RecipeError(what, where="data.size", fix="Set it, for example to 224.")
    channels = options.channels or 3
    if options.channels is None:
        loaded = loaded.resolve("data.channels", channels, "images have colour, where nothing says otherwise")
    return loaded, stated.model_copy(update={"size": _both_sides(options.size), "channels": channels})


def _both_sides(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _resolve_normalisation(loaded: LoadedRecipe[TrainRecipe], inputs: Inputs) -> LoadedRecipe[TrainRecipe]:
    recipe, channels = loaded.recipe.augment, inputs.channels
    for key in ("mean", "std"):
        value = getattr(recipe, key)
        if value != "auto" and len(value) != channels:
            what = f"{len(value)} numbers for images of {channels} channel{'s'[: channels > 1]}"
            raise RecipeError(what, where=f"augment.{key}", fix="Give one a channel, or auto.")
    if "auto" not in (recipe.mean, recipe.std):
        return loaded
    if inputs.train is None:
        mean, std = (127.5,) * channels, (73.6,) * channels  # of uniform bytes
        reason = "of uniformly random bytes"
    else:
        mean, std = inputs.measured(loaded.recipe)
        if not all(map(math.isfinite, (*mean, *std))):  # the mean of no image
            what = f"every one of the {inputs.measurable:,} images that were looked at is damaged"
            fix = "Run headway verify on the folder, and pack the data again."
            raise DataError(what, where=str(inputs.train.folder), fix=fix)
        reason = f"over {inputs.measurable} training images"
    for key, measured in (("mean", mean), ("std", std)):
        if getattr(recipe, key) == "auto":
            loaded = loaded.resolve(f"augment.{key}", measured, reason)
    return loaded
