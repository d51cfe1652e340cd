"""Sets up a recipe so that its parts can be measured one by one, without touching any run of the user's."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from headway.core.errors import RecipeError
from headway.core.messages import mute_messages
from headway.core.recipe import LoadedRecipe
from headway.core.run_folder import RunFolder
from headway.data.batch import Batch
from headway.data.batch_plan import BatchPlan
from headway.parallel.parallel_recipe import LocalRecipe
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.setup.train_setup import TrainSetup
from headway.training.display import Display
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer

LOG = logging.getLogger("headway.doctor")

# Epochs: no measurement lasts that long.
NEVER = 1e6
# Values of the recipe while its steps are measured. Work between steps is measured separately.
MEASURED: dict[str, Any] = {
    "epochs": NEVER,
    "evaluate.every_epochs": NEVER,
    "evaluate.at_steps": [],
    "checkpoint.every_epochs": NEVER,
    "checkpoint.every_steps": None,
    "checkpoint.folder": None,
    "stop_at": None,
    "log_ids": False,
    "sinks": [],
}
# Limits of the batches that are kept for replay.
REPLAYED_BYTES, REPLAYED = 256 * 2**20, 8


@final
class MeasurementJob:
    """One process's part of a recipe. Close it after use.

    Attributes:
        loaded: the user's recipe, with `auto` resolved.
        setup: the objects of the measured recipe.
        batch: samples of a step.
        batch_note: why the batch is smaller than in the user's recipe; empty: it is not.
    """

    def __init__(self, loaded: LoadedRecipe[TrainRecipe], setup: TrainSetup) -> None:
        self.loaded, self.setup = loaded, setup
        self.batch = setup.plan.get_batch_size(0)
        self.batch_note = ""
        self._kept: list[Batch] = []

    @staticmethod
    def from_recipe(loaded: LoadedRecipe[TrainRecipe], changes: Mapping[str, Any] = {}) -> MeasurementJob:
        """Sets up a recipe with some values changed.

        Raises:
            HeadwayError: recipe, data, network or task are wrong.
        """
        loaded = with_values(loaded, changes, "as it is tried")
        # Evaluations, checkpoints and sinks would disturb the steps, and write into the user's folders.
        measured = list_measured_values(loaded.recipe)
        setup = build_setup(with_values(loaded, measured, "as it is measured"))
        # Values that replace `auto` are shown to the user with the reason for the choice.
        # A batch per device stays one, for the advice about it.
        chosen = {key: value for key, value in setup.loaded.list_leaves() if key not in (*measured, "batch")}
        origins = setup.loaded.origins
        resolved = {
            key: (value, origins[key].removeprefix("auto: "))
            for key, value in chosen.items()
            if origins.get(key, "").startswith("auto: ") and not loaded.origins.get(key, "").startswith("auto: ")
        }
        return MeasurementJob(loaded.resolve_all(resolved), setup)

    def close(self) -> None:
        """Releases the batches and the inputs."""
        self._kept.clear()
        self.setup.inputs.close()

    @property
    def is_synthetic(self) -> bool:
        """True if the images are synthetic, so there is no loader to measure."""
        return self.setup.inputs.train is None

    def refuses(self, changes: Mapping[str, Any]) -> bool:
        """Returns True if the recipe refuses these values, so that they are no setting for it."""
        try:
            with_values(self.loaded, changes, "as it is tried")
        except RecipeError:
            return True
        return False

    def build_variant(self, changes: Mapping[str, Any]) -> MeasurementJob:
        """Builds the same job with some values changed, for its loop alone: it replays this job's batches, and its data
        are read in place instead of from a cache."""
        if not self.is_synthetic:
            changes = {"data.cache": "none", **changes}
        other = MeasurementJob.from_recipe(self.loaded, changes)
        other.replace_batches([resize_batch(batch, other.batch, other.setup.device) for batch in self.load_batches()])
        return other

    def load_batches(self) -> list[Batch]:
        """Returns the first batches of the run, which stay in memory."""
        if not self._kept:
            self.setup.inputs.batch_source = None
            stream = iter(self.setup.batches(0))
            try:
                # The loader reuses its buffers, so each batch is copied.
                for batch in itertools.islice(stream, REPLAYED):
                    self._kept.append(replace(batch, images=batch.images.clone(), labels=batch.labels.clone()))
                    # Before one more would exceed the limit. One batch is kept however large it is.
                    if (len(self._kept) + 1) * batch.images.nbytes > REPLAYED_BYTES:
                        break
            finally:
                close_stream(stream)
        return self._kept

    def make_noise(self) -> list[Batch]:
        """Returns batches with the same noise images and different labels: a network that learns them would reach
        gradients near zero, which a processor computes slowly (denormal numbers)."""
        first = self.load_batches()[0]
        images = torch.randint(0, 256, first.images.shape, dtype=torch.uint8).to(first.images)
        return [replace(one, images=images) for one in self.load_batches()]

    def replace_batches(self, batches: list[Batch]) -> None:
        """Replays these batches from now on."""
        self._kept = batches

    @contextmanager
    def open_trainer(
        self,
        *,
        batches: Sequence[Batch] = (),
        feed: Callable[[BatchPlan, int], Iterable[Batch]] | None = None,
        display: Display | None = None,
    ) -> Iterator[Trainer]:
        """Opens a Trainer of the measured recipe, in a temporary folder.

        Args:
            batches: repeated; empty: the loader's. feed: gives others instead.
        """
        self.setup.inputs.batch_source = (lambda *_: itertools.cycle(batches)) if batches else feed
        try:
            with tempfile.TemporaryDirectory(prefix=".headway-doctor-", dir=_find_runs_folder()) as folder:
                run = RunFolder.create(Path(folder) / "run")
                # Training again and again on a few batches may diverge; the message would mislead.
                with (
                    closing(Trainer(self.setup, run, display or SilentDisplay())) as trainer,
                    mute_messages(["training"]),
                ):
                    yield trainer
        finally:
            self.setup.inputs.batch_source = None


def _find_runs_folder() -> Path | None:
    """Returns the folder of runs if it is on another file system than temporary files: checkpoints are written
    there."""
    where = Path("runs") if Path("runs").is_dir() else Path.cwd()
    other = where.stat().st_dev != Path(tempfile.gettempdir()).stat().st_dev
    return where if other and os.access(where, os.W_OK) else None


def list_measured_values(recipe: TrainRecipe) -> dict[str, Any]:
    """Returns the values, by key, that replace a recipe's own while its steps are measured."""
    # Rounds from the beginning: half of an endless run would pass before the first one.
    return MEASURED | ({"parallel.from_epoch": 0} if isinstance(recipe.parallel, LocalRecipe) else {})


def with_values(loaded: LoadedRecipe[TrainRecipe], values: Mapping[str, Any], reason: str) -> LoadedRecipe[TrainRecipe]:
    """Returns the recipe with other values."""
    return loaded.resolve_all({key: (value, reason) for key, value in values.items()}) if values else loaded


def format_override(changes: Mapping[str, Any]) -> str:
    """Formats changes as the command line takes them: `data.threads=2 precision=bf16`."""

    def format_value(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else f"{value}"

    return " ".join(f"{key.replace('__', '.')}={format_value(value)}" for key, value in changes.items())


def resize_batch(batch: Batch, samples: int, device: torch.device) -> Batch:
    """Returns a batch of another size with the same samples, some of them repeated."""
    place = np.arange(samples) % len(batch.images)
    there = torch.from_numpy(place).to(batch.images.device)
    changed: dict[str, Any] = {
        "images": batch.images[there].to(device),
        "labels": batch.labels[there].to(device),
        "bad": (),
    }
    for one in fields(batch):
        if isinstance(value := getattr(batch, one.name), np.ndarray):
            changed[one.name] = value[place]
    return replace(batch, **changed)


def close_stream(stream: object) -> None:
    """Ends the threads behind an iterator of batches."""
    if hasattr(stream, "close"):
        stream.close()
