"""Sets of images that are known already: those that networks have seen, and those that the user names."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import HeadwayError, UsageError
from headway.core.recipe import LoadedRecipe
from headway.core.run_folder import RunFolder
from headway.data.data_recipe import SYNTHETIC
from headway.data.dataset import Dataset
from headway.data.store_address import EVAL, TRAIN, StoreAddress, is_store_address
from headway.lifecycle.mining.equal_records import find_equal_records
from headway.setup.inputs import open_dataset
from headway.setup.recipe import TrainRecipe
from headway.training.runs import reload_recipe

LOG = logging.getLogger("headway.lifecycle")
LABELLED, HELD_OUT = "labelled", "held-out"
_SPLITS = {LABELLED: TRAIN, HELD_OUT: EVAL}
"""The split that an address in a store means where it names none, as in a recipe."""


def get_role(name: str) -> str:
    """Returns the role of a set by its name: `labelled` for the set `labelled 2`."""
    return name.partition(" ")[0]


def list_own_sets(loaded: LoadedRecipe[TrainRecipe], role: str) -> list[tuple[Path, str]]:
    """Returns the training set, or the evaluation set, of a run as (folder that a path starts from, address)."""
    recipe = loaded.recipe.data
    uri = (None if recipe.train == SYNTHETIC else recipe.train) if role == LABELLED else recipe.eval
    return [] if uri is None else [(loaded.base, uri)]


def open_known_sets(
    recipes: Sequence[LoadedRecipe[TrainRecipe]], given: dict[str, Sequence[str]], stack: ExitStack, *, may_lack: bool
) -> dict[str, Dataset]:
    """Opens the labelled and the held-out sets; the stack closes them. A set that is named twice is opened once.

    Args:
        recipes: those of the networks, whose own sets are opened where none is given.
        given: addresses of the user, by role.
        may_lack: warn if a set of a run cannot be opened.

    Returns:
        the sets by name: `labelled`, `held-out`, and further ones as `labelled 2`.

    Raises:
        UsageError: a set cannot be opened.
    """
    found, fingerprints = dict[str, Dataset](), set[str]()
    for role in (LABELLED, HELD_OUT):
        own = [place for loaded in recipes for place in list_own_sets(loaded, role)]
        places = [(Path(), uri) for uri in given[role]] or own
        count = 0
        for base, uri in dict.fromkeys(places):
            try:
                dataset = stack.enter_context(closing(open_known_set(base, uri, role)))
            except HeadwayError as error:
                if given[role]:
                    raise
                what = f"the {role} set of the run cannot be opened ({error.what})"
                if not may_lack:
                    raise UsageError(what, where=error.where, fix=f"Name the set with --{role} SET.") from error
                LOG.warning(f"{error.where}: {what}, so its images may be chosen.")
                continue
            # Members of an ensemble often share their sets.
            if dataset.fingerprint not in fingerprints:
                fingerprints.add(dataset.fingerprint)
                count += 1
                found[role if count == 1 else f"{role} {count}"] = dataset
    return found


def open_known_set(base: Path, uri: str, role: str) -> Dataset:
    """Opens a set as a recipe does: an address in a store without a split means `train`, or `eval` if held out."""
    if is_store_address(uri):
        address = StoreAddress.parse(uri)
        uri = str(replace(address, split=address.split or _SPLITS[role]))
    return open_dataset(base, uri)


def find_seen(recipes: Sequence[LoadedRecipe[TrainRecipe]], dataset: Dataset) -> NDArray[np.bool_]:
    """Returns True for each image of a set that networks were trained on, under whatever name or label, bool [n].

    Warns if the set chose the weights of a network, and if a training set cannot be opened.

    Args:
        recipes: those of the networks, with the recipes that their first weights came from.
    """
    seen = np.zeros(len(dataset), np.bool_)
    for role in (LABELLED, HELD_OUT):
        places = [place for loaded in recipes for place in list_own_sets(loaded, role)]
        for base, uri in dict.fromkeys(places):
            try:
                with closing(open_known_set(base, uri, role)) as other:
                    found = find_equal_records(dataset, [other])
            except HeadwayError as error:
                unknown = "so it is not known whether the networks have seen these images"
                LOG.warning(f"{uri}: the {role} set of a run cannot be opened ({error.what}), {unknown}.")
                continue
            # Choosing the best of some checkpoints teaches a network little of single labels; training does.
            if role == LABELLED:
                seen |= found
            elif found.any():
                count = f"{int(found.sum()):,} of {len(dataset):,} images"
                LOG.warning(f"{count} are in the evaluation set {uri}, by which a run chose its best weights.")
    return seen


def list_ancestors(loaded: LoadedRecipe[TrainRecipe]) -> Iterator[LoadedRecipe[TrainRecipe]]:
    """Yields a recipe, then that of the run whose weights it starts from, and so on.

    Weights that do not lie in a run folder end the list: nothing tells what they were trained on.
    """
    seen = set[Path]()
    while True:
        yield loaded
        if loaded.recipe.model.weights is None:
            return
        run = RunFolder((loaded.base / Path(loaded.recipe.model.weights).expanduser()).resolve().parent)
        is_run = run.recipe_path.is_file() and (run.folder / "provenance.json").is_file()
        # A run that goes on from its own weights would be its own ancestor for ever.
        if not is_run or run.folder in seen:
            return
        seen.add(run.folder)
        loaded = reload_recipe(run)
