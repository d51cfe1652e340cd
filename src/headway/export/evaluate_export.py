"""Evaluation of an export: its outputs over a packed folder, read by the Loader as in the run's evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import HeadwayError, UsageError
from headway.core.run_folder import RunFolder
from headway.core.untrusted_json import is_number
from headway.data.columns import LabelKind
from headway.data.data_recipe import CropRecipe, DataRecipe
from headway.data.dataset import Dataset
from headway.data.loader import Loader
from headway.export.decoding import choose_backend
from headway.export.manifest import Manifest
from headway.export.task_metrics import check_metrics, compute_metrics
from headway.setup.checks import check_labels
from headway.setup.inputs import open_dataset
from headway.setup.prediction_columns import name_numbers
from headway.setup.task import TargetSpec
from headway.training.ensemble import list_members
from headway.training.evaluate import expect_few_damaged
from headway.training.runs import reload_recipe

LOG = logging.getLogger("headway.export")

# Images at once: enough for every target, and small enough for any network of 224 pixels.
BATCH = 32


def evaluate_export(
    folder: Path, manifest: Manifest, run: Callable[[NDArray[np.uint8]], NDArray[np.float32]], data: str | None
) -> dict[str, float]:
    """Returns the mean of each metric, and `samples`; with damaged ones also `damaged_samples`.

    Args:
        folder: of the export, for messages.
        run: computes the outputs of pixels; see `Session.run`.
        data: a packed folder; None: the evaluation set of the run that was exported.

    Raises:
        UsageError: there is nothing to evaluate on, or the task is the user's own. DataError: the labels are others
            than those of the training data, or too many samples are damaged.
    """
    # Before any image is read.
    check_metrics(manifest)
    kept: dict[str, list[NDArray[np.float64]]] = {}
    served: list[NDArray[np.int64]] = []
    with closing(_open_set(folder, manifest, data)) as dataset:
        check_labels(_describe_target(manifest, dataset), dataset)
        for pixels, labels, samples in read_batches(manifest, dataset):
            served.append(samples)
            # Damaged samples are zeros, which have no meaning.
            good = samples >= 0
            if good.any():
                for name, values in compute_metrics(manifest, run(pixels[good]), labels[good]).items():
                    kept.setdefault(name, []).append(values)
        damaged = expect_few_damaged(np.concatenate(served), _find_bad_share(manifest), dataset)
        if damaged:
            LOG.warning(f"{dataset.folder}: {damaged:,} of {len(dataset):,} samples are damaged and left out.")
        result = {name: float(np.concatenate(values).mean()) for name, values in kept.items()}
        result["samples"] = float(len(dataset) - damaged)
    return result | ({"damaged_samples": float(damaged)} if damaged else {})


def _find_bad_share(manifest: Manifest) -> float:
    """Returns the `data.max_bad_share` of the run that was exported."""
    # Exports of an earlier version do not have it.
    found: Any = manifest.data.get("max_bad_share")
    default: float = DataRecipe.model_fields["max_bad_share"].default
    return float(found) if is_number(found, 0, 1) else default


def read_batches(
    manifest: Manifest, dataset: Dataset, batch: int = BATCH
) -> Iterator[tuple[NDArray[np.uint8], NDArray[Any], NDArray[np.int64]]]:
    """Yields (pixels [b, H, W, C], labels, samples [b]) in index order; damaged samples are zeros and have number -1.

    Crop, resize and decoder are those of the run's evaluation.
    """
    loader = Loader(
        dataset,
        batch=min(batch, len(dataset)),
        size=manifest.size,
        channels=manifest.channels,
        crop=CropRecipe(share=manifest.crop_share),
        scaled=manifest.scaled,
        backend=choose_backend(manifest),
        on_bad="mask",
    )
    for served in loader:
        yield served.images.numpy(), served.labels.numpy(), np.asarray(served.served)


def _describe_target(manifest: Manifest, dataset: Dataset) -> TargetSpec:
    """Returns the labels that the export was trained for."""
    kinds: dict[str, LabelKind] = {"class": "class", "multi": "multi"}
    if manifest.task in kinds:
        return TargetSpec(kind=kinds[manifest.task], classes=manifest.names, numbers=1)
    # Numbers without names got them for the columns of predictions.
    has_names = name_numbers(dataset.classes, manifest.outputs) != manifest.names
    return TargetSpec(kind="value", classes=manifest.names if has_names else dataset.classes, numbers=manifest.outputs)


def _open_set(export: Path, manifest: Manifest, data: str | None) -> Dataset:
    """Opens a packed folder, or the evaluation set of the run that was exported."""
    if data is not None:
        return open_dataset(Path(), data)
    where, fix = str(export), "Name a packed folder as --data or data=."
    folder = manifest.run.get("folder")
    try:
        run = RunFolder.open_trained(Path(folder) if isinstance(folder, str) else Path())
        loaded = reload_recipe(list_members(run)[0] if run.ensemble_path.exists() else run)
    except HeadwayError as error:
        what = f"the run that this export was made of cannot be opened ({error.what})"
        raise UsageError(what, where=where, fix=fix) from None
    if loaded.recipe.data.eval is None:
        raise UsageError("the run that was exported has no evaluation set", where=where, fix=fix)
    dataset = open_dataset(loaded.base, loaded.recipe.data.eval)
    # The run may have been exported with another set, or its own one may have been packed again.
    if manifest.data.get("evaluation") not in (None, dataset.fingerprint):
        LOG.warning(f"{dataset.folder}: these are other samples than those on which this export was judged.")
    return dataset
