"""Job: a recipe set up so that its parts can be measured one by one; no run of the user's is touched."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from headway.core.recipe import Loaded
from headway.core.run import Run
from headway.data.batch import Batch
from headway.setup.build import Setup, set_up
from headway.setup.recipe import TrainRecipe
from headway.train.progress import Silent
from headway.train.trainer import Display, Trainer

NEVER = 1e6
"""Epochs: no measurement comes to their end."""
MEASURED: dict[str, Any] = {
    "epochs": NEVER,
    "evaluate.every_epochs": NEVER,
    "checkpoint.every_epochs": NEVER,
    "checkpoint.every_steps": None,
    "checkpoint.folder": None,
    "stop_at": None,
    "log_ids": False,
    "sinks": [],
}
"""What a recipe has otherwise while its steps are measured. What is done between steps is measured apart."""
REPLAYED_BYTES, REPLAYED = 256 * 2**20, 8
"""Batches that are kept to be replayed: at most so many, and so much."""


@final
class MeasurementJob:
    """One process's part of a recipe. Close it after use.

    Attributes:
        loaded: as the user has it, with what `auto` stands for.
        setup: of the measured recipe.
        batch: samples of a step.
        shortened: why these are fewer than the user's recipe has; empty: they are not.
    """

    def __init__(self, loaded: Loaded[TrainRecipe], setup: Setup) -> None:
        self.loaded, self.setup = loaded, setup
        self.batch = setup.plan.batch_at(0)
        self.batch_note = ""
        self._kept: list[Batch] = []

    @staticmethod
    def from_recipe(loaded: Loaded[TrainRecipe], say: Any, **changes: Any) -> MeasurementJob:
        """Sets up a recipe, with some of its values otherwise (`a__b=1` is a.b: 1).

        Raises:
            HeadwayError: whatever is wrong with recipe, data, network or task.
        """
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        loaded = with_values(loaded, changed, "as it is tried")
        setup = set_up(with_values(loaded, MEASURED, "as it is measured"), say=say)
        chosen = {key: value for key, value in setup.loaded.leaves() if key not in MEASURED}
        origins = setup.loaded.origins
        resolved = {
            key: (value, origins[key].removeprefix("auto: "))
            for key, value in chosen.items()
            if origins.get(key, "").startswith("auto: ") and not loaded.origins.get(key, "").startswith("auto: ")
        }
        return MeasurementJob(loaded.resolve_all(resolved), setup)

    def close(self) -> None:
        self._kept.clear()
        self.setup.inputs.close()

    @property
    def is_synthetic(self) -> bool:
        """Whether there is no loader to measure."""
        return self.setup.inputs.train is None

    def build_variant(self, say: Any, **changes: Any) -> MeasurementJob:
        """The same with some values otherwise, for its loop alone: its data are read in place, not from a cache. It
        replays this job's batches."""
        if not self.is_synthetic:
            changes = {"data__cache": "none", **changes}
        other = MeasurementJob.from_recipe(self.loaded, say, **changes)
        other.replace_batches([resize_batch(batch, other.batch, other.setup.device) for batch in self.load_batches()])
        return other

    def load_batches(self) -> list[Batch]:
        """The first batches of the run, which stay."""
        if not self._kept:
            self.setup.inputs.feed = None
            stream = iter(self.setup.batches(0))
            try:
                for batch in itertools.islice(stream, REPLAYED):
                    self._kept.append(replace(batch, images=batch.images.clone(), labels=batch.labels.clone()))
                    if (len(self._kept) + 1) * batch.images.nbytes > REPLAYED_BYTES:
                        break
            finally:
                close_stream(stream)
        return self._kept

    def make_noise(self) -> list[Batch]:
        """The same images of noise with other labels each time: what could be learnt would end in gradients of next to
        nothing, with which a processor computes slowly."""
        first = self.load_batches()[0]
        images = torch.randint(0, 256, first.images.shape, dtype=torch.uint8).to(first.images)
        return [replace(one, images=images) for one in self.load_batches()]

    def replace_batches(self, batches: list[Batch]) -> None:
        """Replays these."""
        self._kept = batches

    @contextmanager
    def open_trainer(
        self,
        *,
        batches: Sequence[Batch] = (),
        feed: Callable[[], Iterable[Batch]] | None = None,
        display: Display | None = None,
    ) -> Iterator[Trainer]:
        """A Trainer of the measured recipe, in a folder that goes with it.

        Args:
            batches: that it is given again and again; none: the loader's. feed: gives others in their place.
        """
        self.setup.inputs.feed = (lambda: itertools.cycle(batches)) if batches else feed
        try:
            with tempfile.TemporaryDirectory(prefix=".headway-doctor-", dir=_find_runs_folder()) as folder:
                run = Run.create(Path(folder) / "run")
                with closing(Trainer(self.setup, run, display or Silent())) as trainer:
                    trainer.say = say_nothing  # what is replayed may well diverge
                    yield trainer
        finally:
            self.setup.inputs.feed = None


def _find_runs_folder() -> Path | None:
    """Where runs are kept, if that is another file system than that of temporary files: checkpoints go there."""
    where = Path("runs") if Path("runs").is_dir() else Path.cwd()
    other = where.stat().st_dev != Path(tempfile.gettempdir()).stat().st_dev
    return where if other and os.access(where, os.W_OK) else None


def with_values(loaded: Loaded[TrainRecipe], values: Mapping[str, Any], reason: str) -> Loaded[TrainRecipe]:
    """A recipe with other values; paths of keys that it does not have are left out."""
    return loaded.resolve_all({key: (value, reason) for key, value in values.items()}) if values else loaded


def format_override(changes: Mapping[str, Any]) -> str:
    """As the command line takes changes: `data.threads=2 precision=bf16`."""

    def text(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else f"{value}"

    return " ".join(f"{key.replace('__', '.')}={text(value)}" for key, value in changes.items())


def resize_batch(batch: Batch, samples: int, device: torch.device) -> Batch:
    """A batch of another size, of the same samples; some may be in it several times."""
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


def say_nothing(text: str) -> None:
    """Says nothing."""
