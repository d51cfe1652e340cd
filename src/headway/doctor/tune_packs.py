"""Makes packs beside the recipe to try them in `tune`, and removes those that are not kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, final

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.text_format import format_bytes
from headway.data.dataset import Dataset
from headway.data.pack import pack
from headway.doctor.measurement_job import LOG
from headway.doctor.pack_estimate import GROWTH, PackCommand, format_path, read_free_disk_bytes

# Largest share of the free disk that a pack may take: a full disk also stops other programs.
FREE = 0.9


@final
class TrialPacks:
    """Context manager of trial packs. Attributes: notes: which packs were not made, and why."""

    def __init__(self) -> None:
        self._made = dict[str, Path]()
        self._kept = ""
        self.notes = list[str]()

    def __enter__(self) -> TrialPacks:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        # A pack that was kept is removed too if the block ends by an error: no recipe names it then.
        for name in list(self._made):
            if name != self._kept or kind is not None:
                self.remove(name)

    def make(self, packing: PackCommand, dataset: Dataset) -> dict[str, Any] | None:
        """Packs a set; returns the recipe values to train on it, or None with a note."""
        folder, what = packing.folder, f"headway pack --mode {packing.mode} was not tried"
        if folder.exists():
            self.notes.append(f"{what}: {format_path(folder)} exists already. Remove it, or set data.train to it.")
            return None
        needed, free = GROWTH * int(dataset.length.sum(dtype=np.int64)), read_free_disk_bytes(folder.parent)
        if needed > FREE * free:
            sizes = f"the pack takes about {format_bytes(needed)}, and {format_bytes(free)} are free"
            self.notes.append(f"{what}: {sizes} in {format_path(folder.parent)}.")
            return None
        LOG.info(f"Packing {len(dataset):,} images into {format_path(folder)}.")
        try:
            pack(packing.source, folder, mode=str(packing.mode))
        except HeadwayError as error:
            self.notes.append(f"{what}: {error}")
            return None
        self._made[folder.name] = folder
        return {"data.train": folder.name}

    def remove(self, name: object) -> None:
        """Removes the pack of this name, if there is one."""
        if (folder := self._made.pop(str(name), None)) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, name: object) -> None:
        """Keeps the pack of this name, and no other, if the block ends without an error."""
        self._kept = str(name)
