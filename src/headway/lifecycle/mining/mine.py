"""Mining of a pool: near copies out, outputs of networks, the choice, and a folder with what is to be labelled.

OUT/
    picks.csv       list of the picks, which `headway pack` reads; people set its column `label`
    images/         the images of the list
    mine.json       what was asked, every pick with its score, and the near copies that are out
    mine.html       the page
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.files import expect_empty_folder, write_atomically
from headway.core.run_folder import RunFolder
from headway.core.sample_progress import SampleProgress
from headway.data.dataset import Dataset
from headway.data.store_address import TRAIN, UNLABELLED, StoreAddress, is_store_address
from headway.lifecycle.mining.choose import NEEDS_FEATURES, Candidates, Pick, choose, is_mined
from headway.lifecycle.mining.copies_out import take_copies_out
from headway.lifecycle.mining.equal_records import find_equal_records
from headway.lifecycle.mining.known_sets import HELD_OUT, LABELLED, get_role, open_known_sets
from headway.lifecycle.mining.mine_page import write_page
from headway.lifecycle.mining.mine_result import MineOptions, MineResult
from headway.lifecycle.mining.network_outputs import NetworkOutputs, compute_outputs, load_networks
from headway.lifecycle.mining.picture_list import Entry, expect_class_labels, write_list
from headway.lifecycle.mining.review import PICKS, RESULT, Review, review_rows
from headway.lifecycle.store.manifest import load_manifest
from headway.setup.inputs import open_dataset
from headway.setup.train_setup import TrainSetup
from headway.training.ensemble import hash_weights

LOG = logging.getLogger("headway.lifecycle")


@final
class NothingToMineError(UsageError):
    """The pool has no image that is worth a label."""


def mine(pool: str, runs: Sequence[Path], out: Path, options: MineOptions) -> MineResult:
    """Chooses the images of a pool that are worth a label, and writes them into a folder.

    Args:
        pool: anything that `headway.data.opening.open` opens, with one class an image: `unknown` is enough.
        runs: trained runs, or ensembles.
        out: folder to create.

    Raises:
        UsageError: an option is wrong, or `out` exists.
        NothingToMineError: nothing is left to choose from.
        HeadwayError: weights or data are damaged.
    """
    expect_empty_folder(out, "--out")
    with ExitStack() as stack:
        setup = stack.enter_context(load_networks(runs))
        dataset = stack.enter_context(closing(open_dataset(Path(), pool)))
        expect_class_labels(dataset, is_pool=True)
        known = open_known_sets(
            [member.loaded for member in setup.members],
            {LABELLED: options.labelled, HELD_OUT: options.held_out},
            stack,
            # Without them k-centre would begin anew, and near copies of evaluation images would be chosen.
            may_lack=options.keeps_copies and options.strategy != "k-center",
        )
        # Before anything is predicted: a copy would spend a label on a picture that has one.
        copies = None if options.keeps_copies else take_copies_out(dataset, list(known.items()))
        is_out = find_equal_records(dataset, list(known.values())) if copies is None else copies.is_out
        with_features = options.strategy in NEEDS_FEATURES
        with SampleProgress("Predicting", "images", LOG) as progress:
            outputs = compute_outputs(setup, dataset, with_features=with_features, progress=progress)
        candidates = _select_candidates(setup, dataset, outputs, is_out)
        labelled_features = None
        if options.strategy == "k-center":
            labelled_features = _compute_labelled_features(setup, known)
        picks = choose(
            candidates,
            options.strategy,
            options.count,
            random_share=options.random_share,
            weights=options.weights,
            quotas=options.quotas,
            labelled_features=labelled_features,
            seed=options.seed,
        )
        if len(picks) < options.count:
            LOG.warning(f"There are only {len(picks):,} images to choose from, not {options.count:,}.")
        rows = _write_picks(out, dataset, candidates, picks, _find_split(pool))
        result = MineResult(
            folder=out,
            pool=pool,
            fingerprint=dataset.fingerprint,
            images=len(dataset),
            damaged=outputs.damaged,
            candidates=candidates,
            picks=tuple(picks),
            rows=tuple(rows),
            copies=copies,
            equal=int(is_out.sum()) if copies is None else 0,
            review=_judge(rows, candidates.classes),
            about=_describe_request(runs, options, known),
        )
        write_page(result, {**known, "pool": dataset})
    # Last: the folder is complete from the moment this file exists.
    text = json.dumps(result.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(out / RESULT, text + "\n")
    return result


def _compute_labelled_features(setup: TrainSetup, known: dict[str, Dataset]) -> NDArray[np.float32] | None:
    sets = [dataset for name, dataset in known.items() if get_role(name) == LABELLED]
    found = [compute_outputs(setup, dataset, with_features=True).features for dataset in sets]
    parts = [features for features in found if features is not None]
    return np.concatenate(parts) if parts else None


def _find_split(pool: str) -> str | None:
    """Returns the split of a store that mined images go to; None if the pool is not a store's unlabelled images.

    By the hash of their names, some would become evaluation images, and the evaluation set one of hard images that
    this network chose.
    """
    if not is_store_address(pool) or (address := StoreAddress.parse(pool)).split != UNLABELLED:
        return None
    return TRAIN if TRAIN in load_manifest(address.resolve()).schema.splits else None


def _select_candidates(
    setup: TrainSetup, dataset: Dataset, outputs: NetworkOutputs, is_out: NDArray[np.bool_]
) -> Candidates:
    """Returns what the networks say about the images that can be decoded and are not out."""
    keep = np.flatnonzero(~is_out[outputs.samples])
    if not len(keep):
        fix = "Name a pool with new images."
        raise NothingToMineError("every image of the pool is a copy of a known one", where=str(dataset.folder), fix=fix)
    samples = outputs.samples[keep]
    return Candidates(
        samples=samples,
        names=[dataset.name(sample) for sample in samples.tolist()],
        classes=setup.target.classes,
        probabilities=outputs.probabilities[keep],
        mean_entropy=outputs.mean_entropy[keep],
        members=len(setup.members),
        features=None if outputs.features is None else outputs.features[keep],
    )


def _write_picks(
    out: Path, dataset: Dataset, candidates: Candidates, picks: Sequence[Pick], split: str | None
) -> list[dict[str, Any]]:
    """Writes the picks and their images, and returns the rows, with the number of each image as `sample`."""
    entries = []
    for pick in picks:
        p = candidates.probabilities[pick.place]
        best = int(p.argmax())
        cells: dict[str, Any] = {
            "proposed": candidates.classes[best],
            "probability": round(float(p[best]), 6),
            "arm": pick.arm,
            "score": None if pick.score is None else round(pick.score, 6),
        }
        if split is not None:
            cells["split"] = split if is_mined(pick.arm) else ""
        entries.append(Entry(sample=int(candidates.samples[pick.place]), cells=cells))
    rows = write_list(out, PICKS, dataset, entries)
    return [{"sample": entry.sample, **row} for entry, row in zip(entries, rows, strict=True)]


def _judge(rows: Sequence[dict[str, Any]], classes: tuple[str, ...]) -> Review | None:
    """Reviews picks whose pool has their true labels; None if a label is not one of the network's classes."""
    review = review_rows(rows, classes)
    return review if review.is_complete and not review.outside else None


def _describe_request(runs: Sequence[Path], options: MineOptions, known: dict[str, Dataset]) -> dict[str, Any]:
    entries = []
    for folder in runs:
        run = RunFolder.open_trained(folder)
        # An ensemble has no weights of its own; its file names those of the members.
        digest = None if run.ensemble_path.is_file() else hash_weights(run)
        entries.append({"run": str(folder), "sha256": digest})
    return {
        "runs": entries,
        "strategy": options.strategy,
        "count": options.count,
        "random_share": options.random_share,
        "weights": {one.name: one.value for one in options.weights},
        "quotas": {one.name: one.value for one in options.quotas},
        "seed": options.seed,
        "sets": {name: {"folder": str(one.folder), "fingerprint": one.fingerprint} for name, one in known.items()},
    }
