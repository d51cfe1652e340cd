"""Inputs: opens the data sets that a recipe names, keeps their bytes near, and builds loaders over them."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch

from headway.core.cpu_count import choose_thread_count, count_usable_cores
from headway.core.errors import DataError, RecipeError, UsageError
from headway.core.recipe import LoadedRecipe
from headway.core.sample_progress import SampleProgress
from headway.core.text_format import pluralise
from headway.data import dataset as data
from headway.data import opening
from headway.data.augment import measure_mean_std
from headway.data.batch import Batch
from headway.data.batch_plan import BatchPlan
from headway.data.batch_transform import BatchTransform
from headway.data.data_recipe import SYNTHETIC, CacheMode, DataRecipe, SyntheticRecipe
from headway.data.decode import resolve_backend
from headway.data.loader import Loader
from headway.data.loader_spec import LoaderSpec
from headway.data.order import Order
from headway.data.resolution import compute_progressive_size, expand_size
from headway.data.set_warnings import describe_large_batch
from headway.data.store_address import StoreAddress, is_store_address
from headway.data.synthetic import SyntheticLoader
from headway.data.tiers import Tier, choose_tier
from headway.data.tiers.remote_dataset import RemoteShards
from headway.data.workers.image_transform import ImageTransform
from headway.setup import checks
from headway.setup.augment_place import KEY, choose_augment_place, warn_about_crops
from headway.setup.input_wording import TIER_PHRASES, describe_decoding, get_tier_reason
from headway.setup.recipe import TrainRecipe
from headway.setup.stand_in import build_stand_in
from headway.setup.user_transforms import build_image_transform
from headway.setup.versions import pin_versions

LOG = logging.getLogger("headway.setup")

# Images over which mean and standard deviation are measured; packs store samples in random order.
MAX_NORMALISATION_SAMPLES = 1024

# Most images passed to a network's `init`.
MAX_FIRST_SAMPLES = 2048

# Images that are read if nothing will be trained.
DRY_RUN_SAMPLES = 8


@final
@dataclass(frozen=True, kw_only=True)
class DryRunOptions:
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
        train: training set; None if the data is synthetic, or none was opened.
        eval: evaluation set; None if the recipe names none, the data is synthetic, or none was opened.
        device: the device that trains.
        size: (height, width) of the images at the end of training.
        channels: channels of the images.
        samples: number of samples of the training set.
        cache: cache mode of the recipe; `auto` stays `auto`.
        synthetic: the random images that replace the training set; None if it was opened, or nothing is trained.
        max_first_samples: most images that are read before the first step.
        loader: loader of the newest training batches; its stats are those of the run.
        batch_source: gives the training batches from a position on instead of a loader, for example from memory.
        is_lent: another owner closes the data and the loader.
        fed_batches: training batches that another process has decoded.
        image_transform, batch_transform: the recipe's transforms of uint8 training images, and of batches of them.
    """

    train: data.Dataset | None
    eval: data.Dataset | None
    device: torch.device
    size: tuple[int, int]
    channels: int
    samples: int
    cache: CacheMode
    synthetic: SyntheticRecipe | None = None
    max_first_samples: int = MAX_FIRST_SAMPLES
    loader: Loader | None = None
    batch_source: Callable[[BatchPlan, int], Iterable[Batch]] | None = None
    is_lent: bool = False
    fed_batches: int = 0
    image_transform: ImageTransform | None = None
    batch_transform: BatchTransform | None = None
    _tiers: dict[int, Tier] = field(default_factory=dict)
    """Tier by the id of its data set: the training and evaluation loaders of a set share one."""

    def build_batches(
        self, recipe: TrainRecipe, plan: BatchPlan, position: int, rank: int = 0, world: int = 1
    ) -> Iterable[Batch]:
        """Builds the endless stream of a rank's training batches, and sets `loader` if a data set is read.

        Args:
            plan: number of samples in each step.
            position: samples served before the first batch, over all ranks.
        """
        # The doctor replays kept batches to measure the loop without its input, and runs may share one loader.
        if self.batch_source is not None:
            return self.batch_source(plan, position)
        if self.train is None:
            batches: Iterable[Batch] = SyntheticLoader(
                self.synthetic or SyntheticRecipe(),
                batch=plan,
                seed=recipe.seed,
                start=position,
                device=self.device,
                rank=rank,
                world=world,
            )
            return batches if self.batch_transform is None else map(self.batch_transform.transform_batch, batches)
        self.loader = self.build_training_loader(self.train, recipe, batch=plan, start=position, rank=rank, world=world)
        return self.loader

    def build_step_reader(self, recipe: TrainRecipe, plan: BatchPlan) -> Callable[[int], Batch]:
        """Builds a function that reads the batch of the step at any position, and sets `loader` as `build_batches`."""
        if self.batch_source is not None:
            # Replayed batches follow each other, whatever the step.
            replayed = iter(self.batch_source(plan, 0))
            return lambda position: next(replayed)
        if self.train is not None:
            # The caller reads the next step in a thread of its own: nothing else is made ahead of need.
            self.loader = self.build_training_loader(self.train, recipe, batch=plan, start=0, prefetch_batches=1)
            return self.loader.read_step
        batches = self.build_batches(recipe, plan, 0)
        if isinstance(batches, SyntheticLoader):
            return batches.read_step
        # Synthetic data with a transform of whole batches.
        transform = self.batch_transform
        assert transform is not None
        synthetic = SyntheticLoader(
            self.synthetic or SyntheticRecipe(), batch=plan, seed=recipe.seed, start=0, device=self.device
        )
        return lambda position: transform.transform_batch(synthetic.read_step(position))

    def build_state(self, recipe: TrainRecipe) -> dict[str, Any]:
        """Returns everything that the samples of a run depend on, as JSON values. A resumed run must match it."""
        train = self.train
        return {
            "seed": recipe.seed,
            "fingerprint": "synthetic" if train is None else train.fingerprint,
            "decoder": "none" if train is None else resolve_backend(recipe.data.decoder),
            "window": recipe.data.window,
            "partition": recipe.data.partition,
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
        return self.size if progressive is None else compute_progressive_size(progressive, self.size, 0)

    def read_first_batch(self, recipe: TrainRecipe) -> Batch:
        """Reads the first batch of the run, or its first `max_first_samples` samples, for `init` and the checks."""
        num_samples = min(recipe.global_batch, self.max_first_samples)
        if self.train is None:
            return next(iter(self.build_batches(recipe, BatchPlan(num_samples), 0)))
        # At full size: a network is initialised for the images that it ends with.
        return next(
            iter(self.build_training_loader(self.train, recipe, batch=num_samples, stop=num_samples, progressive=None))
        )

    def build_training_loader(self, dataset: data.Dataset, recipe: TrainRecipe, **changes: Any) -> Loader:
        """Builds a loader of training batches with the recipe's host augmentations.

        Args:
            changes: fields of `LoaderSpec` that replace those of the recipe.
        """
        host_augmentations = recipe.augment.select_host_augmentations(self.device.type)
        order = Order(len(dataset), recipe.seed, recipe.data.window)
        if recipe.data.partition == "independent":
            order = order.for_worker(changes.get("rank", 0))
        spec = replace(
            self._make_spec(recipe),
            order=order,
            stop=math.inf,
            crop=recipe.data.crop,
            **(recipe.augment.build_host_options() if host_augmentations else {}),
            progressive=recipe.data.progressive,
            on_bad=recipe.data.on_bad,
            batch_transform=self.batch_transform,
        )
        if self.image_transform is not None:
            workers, kind = recipe.data.transform_workers, recipe.data.worker_kind
            spec = replace(spec, transform=self.image_transform, workers=workers, worker_kind=kind)
        return self._build_loader(dataset, recipe, replace(spec, **changes))

    def build_evaluation_loader(
        self, recipe: TrainRecipe, dataset: data.Dataset, rank: int = 0, world: int = 1
    ) -> Loader:
        """Builds a loader that gives a data set once, in index order and centre-cropped.

        Each rank gets its part of each batch; the last batch may be shorter.
        """
        # A micro-batch on each rank is known to fit into memory, so it is the default.
        micro = recipe.micro_batch if isinstance(recipe.micro_batch, int) else None
        rank_batch = recipe.evaluate.batch or micro
        batch = min(rank_batch * world if rank_batch else recipe.global_batch, len(dataset))
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
        """Measures (mean, std) over the first training images: a value from 0 to 255 for each channel."""
        assert self.train is not None
        count = self.measured_samples
        spec = replace(self._make_spec(recipe), batch=count, stop=count, prefetch_batches=1)
        # Damaged images are zeros and would darken the mean.
        batch = next(iter(self._build_loader(self.train, recipe, spec)))
        return measure_mean_std(batch.images[torch.from_numpy(batch.served >= 0)])

    @property
    def measured_samples(self) -> int:
        """Number of images over which mean and standard deviation are measured."""
        return min(MAX_NORMALISATION_SAMPLES, self.max_first_samples, self.samples)

    def close(self) -> None:
        """Closes the tiers and the data sets."""
        if self.is_lent:
            return
        if self.loader is not None:
            self.loader.close()
        # Tiers first: their threads still read from the data sets.
        for tier in self._tiers.values():
            tier.close()
        self._tiers.clear()
        for dataset in (self.train, self.eval):
            if dataset is not None:
                dataset.close()

    def open_tier(self, recipe: TrainRecipe, dataset: data.Dataset) -> Tier:
        """Returns the tier that all loaders of a data set share. The first call opens and fills it."""
        if dataset is self.train:
            return self.build_training_loader(dataset, recipe).tier
        return self.build_evaluation_loader(recipe, dataset).tier

    def _make_spec(self, recipe: TrainRecipe) -> LoaderSpec:
        """Builds the options that all loaders of a run share: all samples, in index order, centre-cropped."""
        data_recipe = recipe.data
        return LoaderSpec(
            batch=recipe.global_batch,
            size=self.size,
            channels=self.channels,
            crop=data_recipe.crop.to_center(),
            crop_on="device" if recipe.augment.where == "device_crops" else "host",
            scaled=data_recipe.scaled,
            threads=data_recipe.threads,
            pin=data_recipe.pin,
            backend=data_recipe.decoder,
            prefetch_batches=data_recipe.prefetch_batches,
            device=self.device,
            # Without an order a damaged sample has no substitute.
            on_bad="stop" if data_recipe.on_bad == "stop" else "mask",
            verify=data_recipe.verify,
        )

    def _build_loader(self, dataset: data.Dataset, recipe: TrainRecipe, spec: LoaderSpec) -> Loader:
        if spec.tier is not None:
            return Loader(dataset, spec)
        tier = self._tiers.get(id(dataset))
        # The first loader of a set decides whether batches can be made of pixels on the device.
        if tier is None:
            backend = resolve_backend(recipe.data.decoder)
            fits_device = spec.transform is None and spec.fits_device_tier(dataset.description, backend)
            tier = self._tiers[id(dataset)] = self._choose_tier(dataset, recipe.data, fits_device)
        return Loader(dataset, spec, tier=tier)

    def _choose_tier(self, dataset: data.Dataset, data_recipe: DataRecipe, fits_device: bool) -> Tier:
        # Any other set is read once, so keeping it gains nothing.
        cache = self.cache if dataset is self.train or dataset is self.eval else "none"
        # Kept pixels are those of a full decode, so a smaller decode needs the records.
        if cache == "auto" and data_recipe.scaled:
            cache = "disk" if isinstance(dataset.source, RemoteShards) else "none"
        set_name = "training" if dataset is self.train else "evaluation"
        with SampleProgress(f"Filling the cache of the {set_name} data", "images", LOG) as progress:
            return choose_tier(
                dataset,
                cache,
                device=self.device if fits_device else "cpu",
                threads=data_recipe.threads,
                backend=data_recipe.decoder,
                folder=data_recipe.cache_folder,
                budget_bytes=int(data_recipe.cache_gb * 1e9),
                progress=progress,
            )


def _hash_texts(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def open_dataset(base: Path, uri: str) -> data.Dataset:
    """Opens a data set that a recipe names; close it after use. A scan of foreign data shows its progress.

    Args:
        base: folder of the recipe, to which a relative path refers.
        uri: path, URL or address in a store.
    """
    with SampleProgress(f"Scanning {uri}", "images", LOG) as progress:
        if is_store_address(uri):
            return opening.open(str(StoreAddress.parse(uri, base=base)))
        return opening.open(uri if "://" in uri else base / Path(uri).expanduser(), progress=progress)


def _open_set(loaded: LoadedRecipe[TrainRecipe], key: str, uri: str) -> data.Dataset:
    """Opens the data set of a key of the recipe. An error names the key, and where its value came from."""
    try:
        return open_dataset(loaded.base, uri)
    except (UsageError, DataError) as error:
        origin = loaded.origins.get(key, "default")
        fix, here = error.fix, Path(uri).expanduser()
        # The usual mistake of the command line: paths start from the recipe, not from the current folder.
        if isinstance(error, UsageError) and not here.is_absolute() and "://" not in uri and here.exists():
            fix = f"Paths in a recipe start from its folder. For the one in the current folder: {key}={here.absolute()}"
        place = f"{key} ({origin})" if origin != "default" else key
        raise type(error)(error.what, where=f"{place}: {error.where}" if error.where else place, fix=fix) from error


def open_inputs(
    loaded: LoadedRecipe[TrainRecipe], device: torch.device, *, opens_data: bool, dry_run: DryRunOptions | None = None
) -> tuple[LoadedRecipe[TrainRecipe], Inputs]:
    """Opens the data sets, and resolves what the recipe leaves to the data: size, channels, cache, mean and std.

    Args:
        device: the device that trains.
        opens_data: False for the resolved recipe of a run whose data may be absent.
        dry_run: given if nothing will be trained.

    Returns:
        The resolved recipe, and the inputs, which the caller closes.

    Raises:
        HeadwayError: the data cannot be used, or the recipe does not fit them.
    """
    if opens_data:
        loaded = pin_versions(loaded)
    recipe = loaded.recipe
    train = eval_set = synthetic = None
    if recipe.data.train == SYNTHETIC:
        synthetic = recipe.data.synthetic or SyntheticRecipe()
    elif dry_run is not None and dry_run.stated is not None:
        loaded, synthetic = build_stand_in(loaded, dry_run.stated)
    # The stack closes everything opened so far if a later check refuses the recipe.
    with ExitStack() as on_error:
        if opens_data and synthetic is None:
            checks.check_cache_options(loaded)
            train = on_error.enter_context(closing(_open_set(loaded, "data.train", recipe.data.train)))
            if recipe.data.eval is not None:
                eval_set = on_error.enter_context(closing(_open_set(loaded, "data.eval", recipe.data.eval)))
            if (largest := recipe.largest_batch) > len(train):
                LOG.warning(describe_large_batch(largest, len(train)))
        # In this order: sizes decide whether pixels can be kept, and the tier serves the measurement of mean and std.
        loaded, size, channels, samples = _resolve_images(loaded, train, synthetic)
        inputs = on_error.enter_context(
            closing(
                Inputs(
                    train=train,
                    eval=eval_set,
                    device=device,
                    size=size,
                    channels=channels,
                    samples=samples,
                    cache="none" if dry_run is not None else recipe.data.cache,
                    synthetic=synthetic,
                    max_first_samples=MAX_FIRST_SAMPLES if dry_run is None else DRY_RUN_SAMPLES,
                )
            )
        )
        checks.check_shifts(loaded.recipe, inputs.find_smallest_size(loaded.recipe), inputs.size)
        if inputs.train is not None and recipe.data.image_transform is not None:
            shape = (*inputs.size, inputs.channels)
            inputs.image_transform = build_image_transform(recipe.data.image_transform, loaded.base, shape)
        loaded = _resolve_execution(loaded, inputs, fills_caches=dry_run is None)
        loaded = _resolve_normalisation(loaded, inputs)
        on_error.pop_all()
    return loaded, inputs


def _resolve_execution(
    loaded: LoadedRecipe[TrainRecipe], inputs: Inputs, *, fills_caches: bool
) -> LoadedRecipe[TrainRecipe]:
    """Resolves the decoder, the cache, and the device of flip and translate. Fills the caches if `fills_caches`."""
    recipe = loaded.recipe
    # Before the tier, which may keep pixels on a device that crops. A dry run leaves `auto`: the device here need not
    # be the one that trains.
    if recipe.augment.where == "auto" and fills_caches:
        loaded = loaded.resolve(KEY, *choose_augment_place(loaded, inputs.device.type, inputs.train))
    if recipe.data.train != SYNTHETIC:
        backend = resolve_backend(recipe.data.decoder)
        if recipe.data.decoder == "auto":
            reason = "the native core is built" if backend == "native" else "the native core is not built"
            loaded = loaded.resolve("data.decoder", backend, reason)
        if inputs.train is not None and fills_caches:
            tier = inputs.open_tier(loaded.recipe, inputs.train)
            reason = get_tier_reason(tier)
            warn_about_crops(recipe, tier)
            # Filled now, so that the first evaluation does not wait for it.
            if inputs.eval is not None:
                inputs.open_tier(loaded.recipe, inputs.eval)
            if recipe.data.cache == "auto":
                loaded = loaded.resolve("data.cache", tier.name, reason)
            LOG.info(f"Training data {TIER_PHRASES[tier.name]}: {reason}.")
            cores = count_usable_cores()
            LOG.info(describe_decoding(backend, recipe.data.threads or choose_thread_count(), cores))
    return loaded


def _resolve_images(
    loaded: LoadedRecipe[TrainRecipe], train: data.Dataset | None, synthetic: SyntheticRecipe | None
) -> tuple[LoadedRecipe[TrainRecipe], tuple[int, int], int, int]:
    """Resolves the images' format. Returns the recipe, (height, width), channels and number of training samples."""
    recipe = loaded.recipe
    if synthetic is not None:
        return loaded, synthetic.size, synthetic.channels, synthetic.samples
    # The recipe of a run is resolved already.
    if train is None:
        assert recipe.data.size is not None
        assert recipe.data.channels is not None
        return loaded, expand_size(recipe.data.size), recipe.data.channels, 0
    # Each resolved value carries its reason, and the run keeps both.
    if recipe.data.channels is None:
        reason = "every training image is gray" if train.description.channels == 1 else "training images have colour"
        loaded = loaded.resolve("data.channels", train.description.channels, reason)
    size = recipe.data.size
    if size is None:
        common_size = train.description.common_size
        if common_size is None:
            fix = "Set data.size, for example 224; headway init proposes one."
            raise RecipeError("the images have different sizes", where="data.size", fix=fix)
        size = (common_size[1], common_size[0])
        loaded = loaded.resolve("data.size", size, "all training images have this size")
    channels = loaded.recipe.data.channels
    assert channels is not None
    return loaded, expand_size(size), channels, len(train)


def _resolve_normalisation(loaded: LoadedRecipe[TrainRecipe], inputs: Inputs) -> LoadedRecipe[TrainRecipe]:
    """Resolves `augment.mean` and `augment.std` by a measurement, if they are auto."""
    recipe, channels = loaded.recipe.augment, inputs.channels
    for key in ("mean", "std"):
        value = getattr(recipe, key)
        if value != "auto" and len(value) != channels:
            what = f"{len(value)} numbers for images of {pluralise(channels, 'channel')}"
            raise RecipeError(what, where=f"augment.{key}", fix="Give one a channel, or auto.")
    if "auto" not in (recipe.mean, recipe.std):
        return loaded
    if inputs.train is None:
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
