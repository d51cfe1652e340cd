"""Inputs: the data sets that a recipe names, where their bytes are kept, and loaders over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch

from headway.core.errors import RecipeError
from headway.core.recipe import Loaded
from headway.data import dataset as data
from headway.data.augment import measure
from headway.data.batch import Batch
from headway.data.decode import chosen
from headway.data.loader import Loader
from headway.data.options import SYNTHETIC, Cache, CropRecipe, SyntheticRecipe
from headway.data.order import Order
from headway.data.synthetic import Synthetic
from headway.data.tiers import Tier, choose
from headway.train.recipe import TrainRecipe

Say = Callable[[str], object]

MEASURED_SAMPLES = 1024
"""Images over which mean and standard deviation are measured; packs store samples in random order."""

FIRST_SAMPLES = 2048
"""Most images that a network's `init` is shown."""


@final
@dataclass(kw_only=True)
class Inputs:
    """The data of one run. Close it after use.

    Attributes:
        train, eval: None where the data is synthetic, or none was opened.
        size: (height, width) of the images at the end of training.
        samples: of the training set.
        loader: of the newest training batches; its stats are those of the run.
    """

    train: data.Dataset | None
    eval: data.Dataset | None
    device: torch.device
    size: tuple[int, int]
    channels: int
    samples: int
    say: Say
    cache: Cache
    loader: Loader | None = None
    _tiers: dict[int, Tier] = field(default_factory=dict)

    def batches(self, recipe: TrainRecipe, position: int) -> Iterable[Batch]:
        """Training batches from a position on, without end."""
        if self.train is None:
            synthetic = recipe.data.synthetic or SyntheticRecipe()
            return Synthetic(synthetic, batch=recipe.batch, seed=recipe.seed, start=position, device=self.device)
        self.loader = self._training(self.train, recipe, start=position)
        return self.loader

    def first_batch(self, recipe: TrainRecipe) -> Batch:
        """The beginning of the run's first batch, for `init` and the checks."""
        some = recipe.model_copy(update={"batch": min(recipe.batch, FIRST_SAMPLES)})
        if self.train is None:
            return next(iter(self.batches(some, 0)))
        return next(iter(self._training(self.train, some, stop=some.batch, progressive=None)))

    def evaluation(self, recipe: TrainRecipe, dataset: data.Dataset) -> Loader:
        """A data set once, in index order, each image by its centre."""
        at_once = recipe.micro_batch if isinstance(recipe.micro_batch, int) else recipe.batch
        return self._loader(
            dataset,
            recipe,
            batch=recipe.evaluate.batch or min(at_once, len(dataset)),
            crop=recipe.data.crop.centred,
            on_bad="stop" if recipe.data.on_bad == "stop" else "mask",
        )

    def measured(self, recipe: TrainRecipe) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, std) of each channel over the first training images."""
        assert self.train is not None
        count = min(MEASURED_SAMPLES, len(self.train))
        crop = recipe.data.crop.centred
        batch = next(iter(self._loader(self.train, recipe, batch=count, stop=count, ahead=1, crop=crop)))
        return measure(batch.images[torch.from_numpy(batch.served >= 0)])

    def close(self) -> None:
        """Ends what fetches and keeps bytes."""
        for tier in self._tiers.values():
            tier.close()
        self._tiers.clear()

    def _training(self, dataset: data.Dataset, recipe: TrainRecipe, **more: Any) -> Loader:
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
        given = {"ahead": options.ahead, "on_bad": options.on_bad}
        return Loader(
            dataset,
            size=self.size,
            channels=self.channels,
            crop=crop,
            scaled=options.scaled,
            threads=options.threads,
            backend=options.decoder,
            device=self.device,
            tier=self.tier(dataset, recipe),
            verify=options.verify,
            **given | more,
        )

    def tier(self, dataset: data.Dataset, recipe: TrainRecipe) -> Tier:
        """Where a data set's bytes are kept; one of the run's own sets is kept for all its loaders."""
        options, own = recipe.data, dataset is self.train or dataset is self.eval
        tier = self._tiers.get(id(dataset))
        if tier is None:
            # Pixels on a GPU can be gathered there, not resized. Another set than the run's own is gone through once:
            # nothing is gained by keeping it.
            common, (height, width) = dataset.description.common_size, self.size
            alike = common == (width, height) and dataset.description.channels == self.channels
            as_it_is = alike and options.crop == CropRecipe() and options.progressive is None
            tier = choose(
                dataset,
                self.cache if own else "none",
                device=self.device if as_it_is else "cpu",
                threads=options.threads,
                backend=options.decoder,
                folder=options.cache_folder,
                budget_bytes=int(options.cache_gb * 1e9),
            )
            self._tiers[id(dataset)] = tier
            if dataset is self.train:
                self.say(f"Training data: {tier.why}.")
        return tier


def open_relative(base: Path, uri: str) -> data.Dataset:
    """Opens a data set that a recipe names."""
    return data.open(uri if "://" in uri else base / Path(uri).expanduser())


def open_inputs(
    loaded: Loaded[TrainRecipe], device: torch.device, *, say: Say, opened: bool
) -> tuple[Loaded[TrainRecipe], Inputs]:
    """Opens the data sets and resolves what they decide: size, channels, mean and standard deviation.

    Args:
        opened: False: the recipe of a run, resolved, whose data need not be there.

    Raises:
        HeadwayError: whatever is wrong with them.
    """
    recipe = loaded.recipe
    train = held_out = None
    if opened and recipe.data.train != SYNTHETIC:
        train = open_relative(loaded.base, recipe.data.train)
        held_out = open_relative(loaded.base, recipe.data.eval) if recipe.data.eval is not None else None
        if recipe.batch > len(train):
            say(f"The batch of {recipe.batch} is larger than the data set of {len(train)}: each step spans epochs.")
    loaded, size, channels, samples = _resolve_images(loaded, train)
    inputs = Inputs(
        train=train,
        eval=held_out,
        device=device,
        size=size,
        channels=channels,
        samples=samples,
        say=say,
        cache=recipe.data.cache,
    )
    loaded = _resolve_places(loaded, inputs)
    return _resolve_normalisation(loaded, inputs), inputs


def _resolve_places(loaded: Loaded[TrainRecipe], inputs: Inputs) -> Loaded[TrainRecipe]:
    """What decodes, what is done on the host, and where the bytes are kept."""
    recipe, device = loaded.recipe, inputs.device
    if recipe.data.decoder == "auto":
        backend = chosen()
        reason = "the native core is built" if backend == "native" else "the native core is not built"
        loaded = loaded.resolve("data.decoder", backend, reason)
    if recipe.data.cache == "auto" and inputs.train is not None:
        tier = inputs.tier(inputs.train, loaded.recipe)
        loaded = loaded.resolve("data.cache", tier.name, tier.why)
    elif recipe.data.cache == "auto":
        loaded = loaded.resolve("data.cache", "none", "synthetic data is on the device")
    if loaded.recipe.augment.where == "auto":
        reason = "the device is a CPU" if device.type == "cpu" else "the device has time for it"
        loaded = loaded.resolve("augment.where", "host" if device.type == "cpu" else "device", reason)
    return loaded


def _resolve_images(
    loaded: Loaded[TrainRecipe], train: data.Dataset | None
) -> tuple[Loaded[TrainRecipe], tuple[int, int], int, int]:
    recipe = loaded.recipe
    if recipe.data.train == SYNTHETIC:
        synthetic = recipe.data.synthetic or SyntheticRecipe()
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


def _both_sides(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _resolve_normalisation(loaded: Loaded[TrainRecipe], inputs: Inputs) -> Loaded[TrainRecipe]:
    recipe, channels = loaded.recipe.augment, inputs.channels
    if recipe.translate >= min(inputs.size):
        what = f"translate {recipe.translate} is no less than the image's side of {min(inputs.size)}"
        raise RecipeError(what, where="augment.translate", fix=f"Set it to at most {max(0, min(inputs.size) - 1)}.")
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
        reason = f"over {min(MEASURED_SAMPLES, len(inputs.train))} training images"
    for key, measured in (("mean", mean), ("std", std)):
        if getattr(recipe, key) == "auto":
            loaded = loaded.resolve(f"augment.{key}", measured, reason)
    return loaded
