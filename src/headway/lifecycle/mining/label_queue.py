"""A queue of doubtful labels for people: found by confident learning, written as a list with its images, never changed.

OUT/
    suspects.csv        list of the images, the most doubtful label first; people correct its column `label`
    images/             the images of the list
    label-errors.json   estimated noise, thresholds, and every image of the list
    label-errors.html   the page
    folds/K/            with --recipe: the runs that have not seen fold K
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.files import expect_empty_folder, write_atomically
from headway.core.sample_progress import SampleProgress
from headway.core.text_format import pluralise
from headway.data.dataset import Dataset
from headway.lifecycle.copies.hash_images import hash_sets
from headway.lifecycle.copies.near_copies import group_near_copies
from headway.lifecycle.mining.folds import (
    FOLDS,
    are_begun,
    describe_folds,
    divide_folds,
    expect_pack,
    predict_by_folds,
)
from headway.lifecycle.mining.known_sets import find_seen, list_ancestors
from headway.lifecycle.mining.label_errors import LabelErrors, find_label_errors
from headway.lifecycle.mining.network_outputs import compute_outputs, load_networks
from headway.lifecycle.mining.picture_list import Entry, expect_class_labels, write_list
from headway.page import panel, renderer
from headway.page.panel import Panel
from headway.setup.checks import check_labels
from headway.setup.inputs import open_dataset
from headway.training.evaluation_panels import encode_thumbnail
from headway.training.runs import load_recipe

LOG = logging.getLogger("headway.lifecycle")
SUSPECTS, RESULT, PAGE = "suspects.csv", "label-errors.json", "label-errors.html"
SHOWN = 48
"""Images on the page."""


@final
@dataclass(frozen=True, kw_only=True)
class LabelQueue:
    """The result of `queue_label_errors`.

    Attributes:
        folder: the folder written.
        source: the set, and `samples` the numbers of the images that were judged, int64 [n].
        errors: the ranked labels.
        listed: places of the images that are listed, in their order.
        rows: what is listed of each of them.
    """

    folder: Path
    source: str
    samples: NDArray[np.int64]
    errors: LabelErrors
    listed: tuple[int, ...]
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Returns estimates and rows."""
        return {
            "set": self.source,
            "images": len(self.samples),
            "suspects": int(self.errors.is_suspect.sum()),
            "estimated_noise": self.errors.noise,
            "listed": list(self.rows),
        }

    def describe(self) -> str:
        """Returns what was found, for the terminal."""
        suspects = int(self.errors.is_suspect.sum())
        return (
            f"{self.source}: {pluralise(len(self.samples), 'image')}, {pluralise(suspects, 'suspect label')}; about "
            f"{self.errors.noise:.1%} of the labels are estimated to be wrong.\n"
            f"{pluralise(len(self.rows), 'image')} to look at: {self.folder / SUSPECTS}. No label was changed."
        )


def queue_label_errors(
    source: str,
    out: Path,
    *,
    runs: Sequence[Path] = (),
    recipe: Path | None = None,
    folds: int = 5,
    count: int | None = None,
    seed: int = 0,
) -> LabelQueue:
    """Ranks the labels of a set by how wrong they look, and writes the most doubtful ones for people to look at.

    Args:
        source: the set whose labels are doubted.
        out: folder to create.
        runs: runs that have **not** been trained on these images. Images that they have seen are left out.
        recipe: in place of runs: a recipe that is trained `folds` times, each time without one fold of the set.
        count: number of images to list; None: all suspects.
        seed: seed of the folds.

    Raises:
        UsageError: neither or both of runs and recipe are given, the runs were trained on all of the set, or `out`
            exists and is not this work, interrupted.
        HeadwayError: weights or data are damaged.
    """
    if recipe is None or not (out / FOLDS).is_dir():
        expect_empty_folder(out, "--out")
    if bool(runs) == (recipe is not None):
        fix = "Name runs that have not seen these images with --runs, or a recipe to train on folds with --recipe."
        raise UsageError("label errors need networks that have not seen the labels", fix=fix)
    with closing(open_dataset(Path(), source)) as dataset:
        expect_class_labels(dataset)
        labels = np.asarray(dataset.label, np.int64)
        if recipe is not None:
            samples, probabilities = _predict_by_recipe(recipe, dataset, labels, out, folds, seed)
        else:
            samples, probabilities = _predict_by_runs(runs, dataset)
        errors = find_label_errors(labels[samples], probabilities)
        total = int(errors.is_suspect.sum()) if count is None else min(count, len(samples))
        listed = errors.ranking[:total].tolist()
        rows = [_describe_label(dataset, samples, probabilities, errors, place) for place in listed]
        queue = LabelQueue(
            folder=out, source=source, samples=samples, errors=errors, listed=tuple(listed), rows=tuple(rows)
        )
        entries = [
            Entry(sample=row["sample"], cells={k: row[k] for k in ("suggested", "probability", "score", "suspect")})
            for row in rows
        ]
        write_list(out, SUSPECTS, dataset, entries)
        write_atomically(out / PAGE, _render(queue, dataset))
    # Last: the folder is complete from the moment this file exists.
    text = json.dumps(queue.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(out / RESULT, text + "\n")
    return queue


def _predict_by_recipe(
    recipe: Path, dataset: Dataset, labels: NDArray[np.int64], out: Path, folds: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    expect_pack(dataset.folder)
    plan = describe_folds(recipe, dataset, folds, seed)
    # Without a result the folder is not complete: its process was killed, and the trainings go on.
    if (out / RESULT).exists() or not are_begun(out, plan):
        expect_empty_folder(out, "--out")
    # The recipe's own sets are replaced, but weights that it starts from may know these images.
    if find_seen(list(list_ancestors(load_recipe(recipe, ())))[1:], dataset).any():
        what = "the recipe starts from weights that were trained on these images, so they know the wrong labels too"
        raise UsageError(what, where=f"{recipe}: model.weights", fix="Leave model.weights out.")
    # A copy with the same wrong label, in another fold, would teach it to the network that judges the image.
    with SampleProgress("Hashing", "images", LOG) as progress:
        (hashes,) = hash_sets([dataset], progress)
    folds_of = divide_folds(labels, folds, seed, group_near_copies(hashes))
    return predict_by_folds(recipe, dataset.folder, folds_of, out, plan)


def _predict_by_runs(runs: Sequence[Path], dataset: Dataset) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    with load_networks(runs) as setup:
        check_labels(setup.target, dataset)
        recipes = [recipe for member in setup.members for recipe in list_ancestors(member.loaded)]
        if (seen := find_seen(recipes, dataset)).all():
            fix = "Train on folds instead: --recipe RECIPE --folds 5."
            what = "this run was trained on these images, so it has learned their wrong labels too"
            raise UsageError(what, where=", ".join(map(str, runs)), fix=fix)
        if seen.any():
            count = f"{int(seen.sum()):,} of {len(dataset):,} images"
            LOG.warning(f"{count} are left out, because the networks were trained on them.")
        outputs = compute_outputs(setup, dataset)
    is_new = ~seen[outputs.samples]
    return outputs.samples[is_new], outputs.probabilities[is_new]


def _describe_label(
    dataset: Dataset, samples: NDArray[np.int64], p: NDArray[np.float32], errors: LabelErrors, place: int
) -> dict[str, Any]:
    sample, suggested = int(samples[place]), int(errors.suggested[place])
    label = int(dataset.label[sample])
    return {
        "sample": sample,
        "name": dataset.name(sample),
        "label": dataset.classes[label],
        "suggested": dataset.classes[suggested],
        "probability": round(float(p[place, suggested]), 6),
        "label_probability": round(float(p[place, label]), 6),
        "score": round(float(errors.score[place]), 6),
        "suspect": "yes" if errors.is_suspect[place] else "no",
    }


def _render(queue: LabelQueue, dataset: Dataset) -> str:
    return renderer.render(
        build_panels(queue, dataset),
        title=f"Labels of {Path(queue.source).name or queue.source}",
        subtitle=f"Headway: {pluralise(len(queue.rows), 'label')} to look at, the most doubtful first",
        sections=("Labels",),
    )


def build_panels(queue: LabelQueue, dataset: Dataset) -> list[Panel]:
    """Builds the panels of the page."""
    errors, total = queue.errors, len(queue.samples)
    suspects = int(errors.is_suspect.sum())
    cards = [
        ("images", f"{total:,}", ""),
        ("suspect labels", f"{suspects:,}", "a network that has not seen them is sure of another class"),
        ("estimated noise", f"{errors.noise:.1%}", "share of wrong labels, by confident learning"),
    ]
    note = (
        "A queue for people, who confirmed about half of such suspects in well-known data sets. No label was changed."
    )
    panels = [panel.cards("noise", "Labels", cards, section="Labels", order=100, note=note)]
    pictures = [
        (
            encode_thumbnail(dataset, row["sample"]),
            f"{row['label']}? rather {row['suggested']}",
            f"{row['probability']:.0%} against {row['label_probability']:.0%}, {row['name']}",
        )
        for row in queue.rows[:SHOWN]
    ]
    note = f"The first {len(pictures)} of {len(queue.rows):,}; {SUSPECTS} has all."
    options: dict[str, Any] = {"section": "Labels", "width": "full"}
    panels.append(panel.images("suspects", "Doubtful labels", pictures, order=110, note=note, **options))
    # Large tables do not help: the pairs with the most expected errors come first.
    cells = [
        (float(errors.joint[i, j]) * total, i, j) for i, j in zip(*np.nonzero(errors.joint), strict=True) if i != j
    ]
    cells.sort(key=lambda cell: (-cell[0], cell[1], cell[2]))
    rows = [(dataset.classes[i], dataset.classes[j], f"{number:.1f}") for number, i, j in cells[:20]]
    columns = ("label", "rather", "images, estimated")
    note = "How many images of each label are estimated to be of another class."
    panels.append(panel.table("pairs", "Confused classes", columns, rows, order=120, note=note, **options))
    return panels
