"""Probabilities of images by networks that have not seen them: k trainings, each without one fold of a pack."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import read_text, write_atomically
from headway.core.random_keys import draw_words, make_keys
from headway.core.recipe_yaml import format_overrides
from headway.core.run_folder import RunFolder
from headway.core.text_format import pluralise
from headway.core.untrusted_json import JsonError, parse_object
from headway.data import opening
from headway.data.columns import COLUMNS_FILE, compute_fingerprint, count_classes, find_common_size, load_columns
from headway.data.dataset import Dataset
from headway.data.version_columns import ANNOTATIONS, ANNOTATIONS_OFFSET
from headway.lifecycle.mining.network_outputs import compute_outputs, load_networks
from headway.training.run_steps import RunResult
from headway.training.runs import find_finished_run, load_recipe, resume, train_recipe

LOG = logging.getLogger("headway.lifecycle")
FOLDS, PLAN = "folds", "plan.json"
_STREAM_FOLDS = 2
"""Stream of the folds' draws, from the key of (seed, image)."""


def divide_folds(
    labels: NDArray[np.int64], folds: int, seed: int, groups: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Returns the fold of each image, int64 [n]: at random, and each class spread evenly over the folds.

    Args:
        groups: number of the group of each image, int64 [n]; images of one group are in one fold. None: each image is
            a group of its own.

    Raises:
        UsageError: there are fewer than two folds, or more than groups; or all images of a class are in one fold.
    """
    words = draw_words(make_keys(seed, 0, np.arange(len(labels))), _STREAM_FOLDS)
    # In the order of class and random word, so that neighbours can go to different folds.
    units = dict[int, list[int]]()
    for place in np.lexsort((words, labels)).tolist():
        units.setdefault(place if groups is None else int(groups[place]), []).append(place)
    if not 2 <= folds <= len(units):
        what = f"{folds} folds of {pluralise(len(units), 'image')}, without copies"
        raise UsageError(what, where="--folds", fix="Set it to 2 or more, and to fewer than images; 5 is usual.")
    out, totals = np.zeros(len(labels), np.int64), [0] * folds
    counts = [[0] * (int(labels.max(initial=0)) + 1) for _ in range(folds)]
    # Large groups first: the images that stand alone then even out what these have left uneven.
    for places in sorted(units.values(), key=lambda places: -len(places)):
        first = int(labels[places[0]])
        fold = min(range(folds), key=lambda fold: (counts[fold][first], totals[fold], fold))
        out[places], totals[fold] = fold, totals[fold] + len(places)
        for label in labels[places].tolist():
            counts[fold][label] += 1
    folds_of_class = np.count_nonzero(np.array(counts), axis=0)
    if (folds_of_class == 1).any():
        number = int(np.flatnonzero(folds_of_class == 1)[0])
        what = f"class number {number} has a single image, or copies of a single one, so no network can learn it"
        raise UsageError(what, where="--folds", fix="Leave the image out, or add others of its class.")
    return out


def expect_pack(pack: Path) -> Path:
    """Returns the columns of a pack. Raises UsageError if the folder is not a pack on this machine."""
    path = pack / COLUMNS_FILE
    if not path.is_file():
        fix = f"Pack the images first: headway pack {pack} {pack}.packed --mode keep"
        raise UsageError("folds are made of a packed folder on this machine", where=str(pack), fix=fix)
    return path


def write_subset(pack: Path, rows: NDArray[np.int64], folder: Path) -> None:
    """Writes a pack of some samples of another pack. Its shards are those of the other pack, and no image is copied.

    Args:
        pack: folder of a local pack.
        rows: numbers of the samples, in any order.
        folder: folder to create.

    Raises:
        UsageError: there is no pack.
    """
    columns, description, _ = load_columns(expect_pack(pack))
    # Annotations of a version are not needed for a training.
    left_out = ("name", "name_offset", ANNOTATIONS, ANNOTATIONS_OFFSET)
    by_sample = {name: one for name, one in columns.items() if name not in left_out}
    chosen = {name: np.ascontiguousarray(one[rows]) for name, one in by_sample.items()}
    if "name" in columns:
        # Names stand end to end, so those that are chosen are joined anew.
        offset = columns["name_offset"]
        names = [columns["name"][offset[row] : offset[row + 1]] for row in rows.tolist()]
        chosen["name"] = np.concatenate(names)
        chosen["name_offset"] = np.cumsum([0, *map(len, names)], dtype=np.uint64)
    root = pack.resolve()
    described = replace(
        description,
        fingerprint=compute_fingerprint(chosen),
        class_counts=count_classes(description.label_kind, chosen["label"], len(description.classes)),
        common_size=find_common_size(chosen),
        shards=tuple(replace(shard, name=str(root / shard.name)) for shard in description.shards),
        source=str(pack),
        sets=(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / COLUMNS_FILE, save(chosen, metadata=described.to_metadata()))


def describe_folds(recipe: Path, dataset: Dataset, folds: int, seed: int) -> dict[str, Any]:
    """Returns what the trainings of the folds depend on, to find out whether those in a folder can go on."""
    text = load_recipe(recipe, ()).to_yaml()
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"set": dataset.fingerprint, "recipe": digest, "folds": folds, "seed": seed}


def are_begun(folder: Path, plan: Mapping[str, Any]) -> bool:
    """Returns True if a folder holds trainings of the same folds, some of them finished."""
    try:
        return parse_object(read_text(folder / FOLDS / PLAN)) == plan
    except (OSError, UnicodeDecodeError, JsonError):
        return False


def predict_by_folds(
    recipe: Path, pack: Path, fold_of: NDArray[np.int64], folder: Path, plan: Mapping[str, Any]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Trains a recipe without each fold in turn, and predicts the fold with the network that has not seen it.

    Runs are kept in FOLDER/folds/K/run; those that are there already go on. The recipe's training and evaluation sets
    are replaced: no fold chooses the weights by which it is predicted.

    Args:
        fold_of: fold of each sample of the pack, int64 [n]; see `divide_folds`.
        plan: see `describe_folds`.

    Returns:
        the samples that can be decoded, and their probabilities, float32 [k, classes].

    Raises:
        UsageError: there is no pack.
        HeadwayError: a training was interrupted or failed.
    """
    folds = int(fold_of.max()) + 1
    (folder / FOLDS).mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FOLDS / PLAN, json.dumps(plan) + "\n")
    samples, probabilities = list[NDArray[np.int64]](), list[NDArray[np.float32]]()
    for fold in range(folds):
        place = folder / FOLDS / str(fold + 1)
        held = np.flatnonzero(fold_of == fold)
        write_subset(pack, np.flatnonzero(fold_of != fold), place / "train")
        write_subset(pack, held, place / "held-out")
        LOG.info(f"Fold {fold + 1} of {folds}: training on {len(fold_of) - len(held):,} images.")
        if _train_fold(recipe, place).was_interrupted:
            fix = f"Run the same command again with --out {folder}: it goes on there."
            raise HeadwayError("the training of a fold was interrupted", where=str(place / "run"), fix=fix)
        with load_networks([place / "run"]) as setup, closing(opening.open(place / "held-out")) as dataset:
            outputs = compute_outputs(setup, dataset)
        samples.append(held[outputs.samples])
        probabilities.append(outputs.probabilities)
    joined = np.concatenate(samples)
    order = np.argsort(joined)
    return joined[order], np.concatenate(probabilities)[order]


def _train_fold(recipe: Path, place: Path) -> RunResult:
    """Trains the run of a fold, or what is left of it."""
    run = place / "run"
    if RunFolder(run).recipe_path.is_file():
        return find_finished_run(run) or resume(run)
    overrides = format_overrides({"data.train": str((place / "train").resolve()), "data.eval": None})
    return train_recipe(load_recipe(recipe, overrides), run)
