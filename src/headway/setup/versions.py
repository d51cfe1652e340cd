"""Versions: a recipe may name the newest version of a data set, and a run keeps the one that this was when it began."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from headway.core.errors import UsageError
from headway.core.recipe import LoadedRecipe
from headway.data.store_address import EVAL, TRAIN, UNLABELLED, StoreAddress, is_store_address
from headway.data.store_pins import write_pin
from headway.setup.recipe import TrainRecipe


def pin_versions(loaded: LoadedRecipe[TrainRecipe]) -> LoadedRecipe[TrainRecipe]:
    """Replaces addresses in a store by those of the versions that they stand for now, so that a run keeps its data.

    Raises UsageError if there is no such version.
    """
    for key, default_split in (("data.train", TRAIN), ("data.eval", EVAL)):
        uri = loaded.recipe.data.train if default_split == TRAIN else loaded.recipe.data.eval
        if uri is None or not is_store_address(uri):
            continue
        written = StoreAddress.parse(uri)
        try:
            found = StoreAddress.parse(uri, base=loaded.base).pin(default_split)
        except UsageError as error:
            raise UsageError(error.what, where=f"{key}: {error.where or uri}", fix=error.fix) from error
        if found.split == UNLABELLED:
            what = f"the samples of the split {UNLABELLED!r} have no labels"
            raise UsageError(what, where=f"{key}: {uri}", fix="Label them first: their names then say the split.")
        # The time of a version says to the garbage collection that somebody is about to use it: the run pins it later.
        with suppress(OSError):
            os.utime(found.resolve())
        # The folder stays as it is written: a relative one starts from the recipe.
        pinned = str(replace(found, folder=written.folder))
        if pinned != uri:
            loaded = loaded.resolve(key, pinned, f"{uri} when the run began")
    return loaded


def keep_versions(loaded: LoadedRecipe[TrainRecipe], run: Path) -> None:
    """Makes stores keep the versions that a resolved recipe names, as long as the run folder is there.

    Raises UsageError if a store is gone.
    """
    versions = defaultdict[Path, list[str]](list)
    for uri in (loaded.recipe.data.train, loaded.recipe.data.eval):
        if uri is not None and is_store_address(uri):
            address = StoreAddress.parse(uri, base=loaded.base)
            versions[address.find_store().resolve()].append(address.version)
    for store, needed in versions.items():
        write_pin(store, run, needed)
