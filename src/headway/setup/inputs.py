"""Inputs: opens the data sets that a recipe names, keeps their bytes near, and builds loaders over them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch

from headway.core.cpu_count import choose_thread_count, count_usable_cores
from headway.core.errors import DataError, RecipeError
from headway.core.recipe import LoadedRecipe
from headway.core.sample_progress import SampleProgress
from headway.data import dataset as data
from headway.data import opening
from headway.data.augment import measure_mean_std
from headway.data.batch import Batch
from headway.data.batch_plan import BatchPlan
from headway.data.data_recipe import SYNTHETIC, CacheMode, DataRecipe, SyntheticRecipe
from headway.data.decode import resolve_backend
from headway.data.loader import Loader
from headway.data.loader_spec import LoaderSpec
from headway.data.order import Order
from headway.data.resolution import compute_size
from headway.data.synthetic import SyntheticLoader
from headway.data.tiers import Tier, choose_tier
from headway.data.tiers.remote_dataset import RemoteShards
from headway.setup.recipe import TrainRecipe

Say = Callable[[str], object]

# Predicate of a sentence about the data, by the name of its tier.
TIER_PHRASES = {
    "none": "is read in place",
    "memory": "is kept in memory",
    "device": "is kept on the device",
    "disk": "is fetched into the local cache",
}

# Images over which mean and standard deviation are measured; packs store samples in random order.
MEASURED_SAMPLES = 1024

# Most images passed to a network's `init`.
MAX_FIRST_SAMPLES = 2048

# Images that are read if nothing will be trained.
REHEARSAL_SAMPLES = 8


@final
@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A set-up without training: a few images are read, no cache is filled, and a GPU of the recipe may be absent.

    Attributes:
        stated: size and classes of the training set if it is absent.
    """

    stated: SyntheticRecipe | None = None


@final
@dataclass(kw_only=True)
class Inputs:
    """The data of one run. Close it after use.

    Attributes:
        train, eval: the data sets; None if the data is synthetic, or none was opened.
        size: (height, width) of the images at the end of training.
        samples: size of the training set.
        cache: cache mode of the recipe; `auto` stays `auto`.
        synthetic: the random images that replace the training set; None if it was opened, or nothing is trained.
        max_first_samples: most images that are read before the first step.
        loader: loader of the newest training batches; its stats are those of the run.
        batch_source: gives the training batches instead of a loader, for example from memory.
    """

    train: data.Dataset | None
    eval: data.Dataset | None
    device: torch.device
    size: tuple[int, int]
    channels: int
    samples: int
    say: Say
    cache: CacheMode
    synthetic: SyntheticRecipe | None = None
    max_first_samples: int = MAX_FIRST_SAMPLES
    loader: Loader | None = None
    batch_source: Callable[[], Iterable[Batch]] | None = None
    # By the id of the data set: training and evaluation loaders of a set share its tier.
    _tiers: dict[int, Tier] = field(default_factory=dict)

    def build_batches(
        self, recipe: TrainRecipe, plan: BatchPlan, position: int, rank: int = 0, world: int = 1
    ) -> Iterable[Batch]:
        """Builds the endless stream of a rank's training batches from a position on."""
        # The doctor replays kept batches to measure the loop without its input.
        if self.batch_source is not None:
            return self.batch_source()
        if self.train is None:
            return SyntheticLoader(
                self.synthetic or SyntheticRecipe(),
                batch=plan,
                seed=recipe.seed,
                start=position,
                device=self.device,
                rank=rank,
                world=world,
            )
        self.loader = self.build_training_loader(self.train, recipe, batch=plan, start=position, rank=rank, world=world)
        return self.loader

    def build_state(self, recipe: TrainRecipe) -> dict[str, Any]:
        """Returns everything that the samples of a run depend on. A resumed run must match it."""
        train = self.train
        return {
            "seed": recipe.seed,
            "fingerprint": "synthetic" if train is None else train.fingerprint,
            "decoder": "none" if train is None else resolve_backend(recipe.data.decoder),
            "window": recipe.data.window,
            # The fingerprint covers the columns alone; channels and classes stand in the description beside them.
            "channels": self.channels if train is None else train.description.channels,
            "classes": "synthetic" if train is None else _hash_texts(train.description.label_kind, *train.classes),
        }

    def find_smallest_size(self, recipe: TrainRecipe) -> tuple[int, int]:
        """Returns (height, width) of the images at the beginning of training.

        Raises:
            UsageError: progressive resolution begins with no smaller images than it ends with.
        """
        progressive = recipe.data.progressive
        return self.size if progressive is None else compute_size(progressive, self.size, 0)

    def read_first_batch(self, recipe: TrainRecipe) -> Batch:
        """Reads the beginning of the run's first batch, for `init` and the checks."""
        some = min(recipe.batch, self.max_first_samples)
        if self.train is None:
            return next(iter(self.build_batches(recipe, BatchPlan(some), 0)))
        # At full size: a network is initialised for the images that it ends with.
        return next(iter(self.build_training_loader(self.train, recipe, batch=some, stop=some, progressive=None)))

    def build_training_loader(self, dataset: data.Dataset, recipe: TrainRecipe, **changes: Any) -> Loader:
        """Builds a loader of training batches with the recipe's augmentation and `changes`, fields of `LoaderSpec`."""
        host = recipe.augment.select_host_augmentations(self.device.type)
        spec = replace(
            self._make_spec(recipe),
            order=Order(len(dataset), recipe.seed, recipe.data.window),
            stop=math.inf,
            crop=recipe.data.crop,
            flip=(recipe.augment.flip_mode or False) if "flip" in host else False,
            translate=recipe.augment.translate if "translate" in host else 0,
            progressive=recipe.data.progressive,
            on_bad=recipe.data.on_bad,
        )
        return self._build_loader(dataset, recipe, replace(spec, **changes))

    def build_evaluation_loader(
        self, recipe: TrainRecipe, dataset: data.Dataset, rank: int = 0, world: int = 1
    ) -> Loader:
        """Builds a loader that gives a data set once, in index order, centre-cropped: a rank's share of each batch."""
        # A micro-batch on each rank is known to fit into memory, so it is the default.
        micro = recipe.micro_batch if isinstance(recipe.micro_batch, int) else None
        rank_batch = recipe.evaluate.batch or micro
        batch = min(rank_batch * world if rank_batch else recipe.batch, len(dataset))
        spec = replace(self._make_spec(recipe), batch=batch, rank=rank, world=world)
        return self._build_loader(dataset, recipe, spec)

    def build_sample_loader(
        self, recipe: TrainRecipe, dataset: data.Dataset, count: int, batch: int, seed: int
    ) -> Loader:
        """Builds a loader of `count` random samples of a data set, each once and centre-cropped.

        The last batch is full too: its positions from `count` on do not belong to the sample.
        """
        spec = replace(self._make_spec(recipe), batch=batch, order=Order(len(dataset), seed), stop=count)
        return self._build_loader(dataset, recipe, spec)

    def measure_mean_std(self, recipe: TrainRecipe) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Measures (mean, std) of each channel over the first training images."""
        assert self.train is not None
        count = self.measured_samples
        spec = replace(self._make_spec(recipe), batch=count, stop=count, prefetch_batches=1)
        # Damaged images are zeros and would darken the mean.
        batch = next(iter(self._build_loader(self.train, recipe, spec)))
        return measure_mean_std(batch.images[torch.from_numpy(batch.served >= 0)])

    @property
    def measured_samples(self) -> int:
        """Number of images over which mean and standard deviation are measured."""
        return min(MEASURED_SAMPLES, self.max_first_samples, self.samples)

    def close(self) -> None:
        """Closes the tiers and the data sets."""
        # Tiers first: their threads still read from the data sets.
        for tier in self._tiers.values():
            tier.close()
        self._tiers.clear()
        for dataset in (self.train, self.eval):
            if dataset is not None:
                dataset.close()

    def open_tier(self, recipe: TrainRecipe, dataset: data.Dataset) -> Tier:
        """Opens and fills the tier of a data set. All its loaders share it."""
        if dataset is self.train:
            return self.build_training_loader(dataset, recipe).tier
        return self.build_evaluation_loader(recipe, dataset).tier

    def _make_spec(self, recipe: TrainRecipe) -> LoaderSpec:
        """Makes the options that all loaders of a run share: whole set, index order, centre crop."""
        options = recipe.data
        return LoaderSpec(
            batch=recipe.batch,
            size=self.size,
            channels=self.channels,
            crop=options.crop.to_center(),
            scaled=options.scaled,
            threads=options.threads,
            pin=options.pin,
            backend=options.decoder,
            prefetch_batches=options.prefetch_batches,
            device=self.device,
            # Without an order a damaged sample has no substitute.
            on_bad="stop" if options.on_bad == "stop" else "mask",
            verify=options.verify,
        )

    def _build_loader(self, dataset: data.Dataset, recipe: TrainRecipe, spec: LoaderSpec) -> Loader:
        if spec.tier is not None:
            return Loader(dataset, spec)
        tier = self._tiers.get(id(dataset))
        # The first loader of a set decides whether its stored pixels can be served as they are.
        if tier is None:
            is_stored = spec.uses_stored_pixels(dataset.description)
            tier = self._tiers[id(dataset)] = self._choose_tier(dataset, recipe.data, is_stored)
        return Loader(dataset, spec, tier=tier)

    def _choose_tier(self, dataset: data.Dataset, options: DataRecipe, uses_stored_pixels: bool) -> Tier:
        # Any other set is read once, so keeping it gains nothing.
        cache = self.cache if dataset is self.train or dataset is self.eval else "none"
        # Kept pixels are those of a full decode, so a smaller decode needs the records.
        if cache == "auto" and options.scaled:
            cache = "disk" if isinstance(dataset.source, RemoteShards) else "none"
        which = "training" if dataset is self.train else "evaluation"
        with SampleProgress(f"Filling the cache of the {which} data", "images", self.say) as progress:
            return choose_tier(
                dataset,
                cache,
                # Pixels on a GPU can be gathered there, but not resized.
                device=self.device if uses_stored_pixels else "cpu",
                threads=options.threads,
                backend=options.decoder,
                folder=options.cache_folder,
                budget_bytes=int(options.cache_gb * 1e9),
                progress=progress,
            )


def get_tier_reason(tier: Tier) -> str:
    """Returns the reason for which a tier was chosen, without its name."""
    return tier.why.removeprefix(f"{tier.name}, ")


def describe_decoding(backend: str, threads: int, cores: int | None) -> str:
    """Says in a sentence which decoder runs on how many of the usable cores (None: unknown)."""
    name = "the native core" if backend == "native" else "Pillow"
    text = f"Decoding by {name}, {threads} thread{'s'[: threads > 1]}"
    if cores is None:
        return f"{text}."
    others = cores - threads
    rest = f" (the other{'s are' if others > 1 else ' is'} left to training)" if others > 0 else ""
    return f"{text} of {cores} core{'s'[: cores > 1]}{rest}."


def _hash_texts(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def open_dataset(base: Path, uri: str, say: Say) -> data.Dataset:
    """Opens a data set that a recipe names. A scan of foreign data shows its progress."""
    with SampleProgress(f"Scanning {uri}", "images", say) as progress:
        return opening.open(uri if "://" in uri else base / Path(uri).expanduser(), progress=progress)


def open_inputs(
    loaded: LoadedRecipe[TrainRecipe],
    device: torch.device,
    *,
    say: Say,
    opened: bool,
    rehearsal: Rehearsal | None = None,
) -> tuple[LoadedRecipe[TrainRecipe], Inputs]:
    """Opens the data sets and resolves the recipe's open values: size, channels, cache, mean and standard deviation.

    Args:
        opened: False for the resolved recipe of a run whose data may be absent.
        rehearsal: given if nothing will be trained.

    Raises:
        HeadwayError: the data cannot be used, or the recipe does not fit them.
    """
    recipe = loaded.recipe
    train = held_out = synthetic = None
    if recipe.data.train == SYNTHETIC:
        synthetic = recipe.data.synthetic or SyntheticRecipe()
    elif rehearsal is not None and rehearsal.stated is not None:
        loaded, synthetic = _resolve_stated(loaded, rehearsal.stated)
    # The stack closes everything opened so far if a later check refuses the recipe.
    with ExitStack() as on_error:
        if opened and synthetic is None:
            _check_cache(loaded)
            train = on_error.enter_context(closing(open_dataset(loaded.base, recipe.data.train, say)))
            if recipe.data.eval is not None:
                held_out = on_error.enter_context(closing(open_dataset(loaded.base, recipe.data.eval, say)))
            if (largest := recipe.largest_batch) > len(train):
                say(f"The batch of {largest} is larger than the data set of {len(train)}: each step spans epochs.")
        # In this order: sizes decide whether pixels can be kept, and the tier serves the measurement of mean and std.
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
                    max_first_samples=MAX_FIRST_SAMPLES if rehearsal is None else REHEARSAL_SAMPLES,
                )
            )
        )
        _check_sizes(loaded.recipe, inputs)
        loaded = _resolve_places(loaded, inputs, filled=rehearsal is None)
        loaded = _resolve_normalisation(loaded, inputs)
        on_error.pop_all()
    return loaded, inputs


def _check_cache(loaded: LoadedRecipe[TrainRecipe]) -> None:
    """Raises RecipeError if options of the disk cache are set and another cache is used."""
    # A value that `auto` resolved is not the user's, so the disk options of a resumed run are no mistake.
    options, usual = loaded.recipe.data, DataRecipe(train=SYNTHETIC)
    if options.cache in ("auto", "disk") or loaded.origins["data.cache"].startswith("auto: "):
        return
    for key in ("cache_folder", "cache_gb"):
        if getattr(options, key) != getattr(usual, key):
            what = f"cache: {options.cache} does not use it"
            raise RecipeError(what, where=f"data.{key}", fix="Remove it, or set data.cache to disk or auto.")


def _check_sizes(recipe: TrainRecipe, inputs: Inputs) -> None:
    """Raises RecipeError if images are too small for a shift, at the beginning of training or in evaluation."""
    side, translate = min(inputs.find_smallest_size(recipe)), recipe.augment.translate
    if translate >= side:
        what = f"translate {translate} is no less than the image's side of {side}"
        if side < min(inputs.size):
            what += " at the beginning of training"
        raise RecipeError(what, where="augment.translate", fix=f"Set it to at most {side - 1}.")
    # Evaluation always has the full size, so its shift is compared with that.
    side, shift = min(inputs.size), recipe.evaluate.shift
    if shift >= side:
        what = f"a shift of {shift} is no less than the image's side of {side}"
        raise RecipeError(what, where="evaluate.shift", fix=f"Set it to at most {side - 1}.")


def _resolve_places(loaded: LoadedRecipe[TrainRecipe], inputs: Inputs, *, filled: bool) -> LoadedRecipe[TrainRecipe]:
    """Resolves the decoder, the cache, and the place of flip and translate; fills the caches if `filled`."""
    recipe, device = loaded.recipe, inputs.device
    if recipe.data.train != SYNTHETIC:
        backend = resolve_backend(recipe.data.decoder)
        if recipe.data.decoder == "auto":
            reason = "the native core is built" if backend == "native" else "the native core is not built"
            loaded = loaded.resolve("data.decoder", backend, reason)
        if inputs.train is not None and filled:
            tier = inputs.open_tier(loaded.recipe, inputs.train)
            reason = get_tier_reason(tier)
            # Filled now, so that the first evaluation does not wait for it.
            if inputs.eval is not None:
                inputs.open_tier(loaded.recipe, inputs.eval)
            if recipe.data.cache == "auto":
                loaded = loaded.resolve("data.cache", tier.name, reason)
            inputs.say(f"Training data {TIER_PHRASES[tier.name]}: {reason}.")
            cores = count_usable_cores()
            inputs.say(describe_decoding(backend, recipe.data.threads or choose_thread_count(), cores))
    # A rehearsal leaves `auto`: the device here need not be the one that trains.
    if recipe.augment.where == "auto" and filled:
        reason = "the device is a CPU" if device.type == "cpu" else "the device has time for it"
        loaded = loaded.resolve("augment.where", "host" if device.type == "cpu" else "device", reason)
    return loaded


def _resolve_images(
    loaded: LoadedRecipe[TrainRecipe], train: data.Dataset | None, synthetic: SyntheticRecipe | None
) -> tuple[LoadedRecipe[TrainRecipe], tuple[int, int], int, int]:
    """Resolves the images' format. Returns the recipe, (height, width), channels and the number of samples."""
    recipe = loaded.recipe
    if synthetic is not None:
        return loaded, synthetic.size, synthetic.channels, synthetic.samples
    # The recipe of a run is resolved already.
    if train is None:
        assert recipe.data.size is not None
        assert recipe.data.channels is not None
        return loaded, _expand_size(recipe.data.size), recipe.data.channels, 0
    # Each resolved value carries its reason, and the run keeps both.
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
    return loaded, _expand_size(size), channels, len(train)


def _resolve_stated(
    loaded: LoadedRecipe[TrainRecipe], stated: SyntheticRecipe
) -> tuple[LoadedRecipe[TrainRecipe], SyntheticRecipe]:
    """Makes the stand-in for an absent training set: as stated, with the recipe's size and channels."""
    options = loaded.recipe.data
    if options.size is None:
        what = "the data are not there, so the size of their images is unknown"
        raise RecipeError(what, where="data.size", fix="Set it, for example to 224.")
    channels = options.channels or 3
    if options.channels is None:
        loaded = loaded.resolve("data.channels", channels, "images have colour unless the recipe says otherwise")
    return loaded, stated.model_copy(update={"size": _expand_size(options.size), "channels": channels})


def _expand_size(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _resolve_normalisation(loaded: LoadedRecipe[TrainRecipe], inputs: Inputs) -> LoadedRecipe[TrainRecipe]:
    """Resolves `augment.mean` and `augment.std` by a measurement, if they are auto."""
    recipe, channels = loaded.recipe.augment, inputs.channels
    for key in ("mean", "std"):
        value = getattr(recipe, key)
        if value != "auto" and len(value) != channels:
            what = f"{len(value)} numbers for images of {channels} channel{'s'[: channels > 1]}"
            raise RecipeError(what, where=f"augment.{key}", fix="Give one a channel, or auto.")
    if "auto" not in (recipe.mean, recipe.std):
        return loaded
    if inputs.train is None:
        # Of uniformly random bytes.
        mean, std = (127.5,) * channels, (73.6,) * channels
        reason = "of uniformly random bytes"
    else:
        mean, std = inputs.measure_mean_std(loaded.recipe)
        # The mean of no image is NaN.
        if not all(map(math.isfinite, (*mean, *std))):
            what = f"every one of the {inputs.measured_samples:,} images that were read is damaged"
            fix = "Run headway verify on the folder, and pack the data again."
            raise DataError(what, where=str(inputs.train.folder), fix=fix)
        reason = f"over {inputs.measured_samples} training images"
    for key, measured in (("mean", mean), ("std", std)):
        if getattr(recipe, key) == "auto":
            loaded = loaded.resolve(f"augment.{key}", measured, reason)
    return loaded
