"""Checkpoints as safetensors files and a JSON manifest: written aside, synced, renamed, and never unpickled.

checkpoints/step-00000120/
    manifest.json           format, step, scalars, for each file its bytes and sha256, and the manifest's own sha256
    tensors-0.safetensors   `model/NAME`, `optimizer/PARAMETER/STATE`, `random/torch`, ...: rank 0's share
    tensors-1.safetensors   rank 1's; any number of ranks can resume from all files together
                            A tensor of which each rank holds a piece is in several files; the manifest says which part.
checkpoints/latest          name of the newest, moved last
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError

from headway.checkpoint.agreement import SingleRankExchange
from headway.checkpoint.compatibility import expect_tensors, select_by_prefix
from headway.checkpoint.locations import CheckpointFolder, LocalCheckpointFolder, Location, hold
from headway.checkpoint.manifest import Manifest
from headway.checkpoint.pieces import Piece
from headway.checkpoint.random_state import check_random_state, read_random_state, restore_random_state
from headway.checkpoint.save import LOG, SaveJob, SaveSetting
from headway.checkpoint.stored_tensors import StoredTensors, open_file, read_manifest
from headway.core.errors import CheckpointError, UsageError
from headway.core.weight_copies import HasWeights
from headway.optim import MasterWeights
from headway.optim.saved_state import collect_state, read_values, restore_state


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its step, the scalars given to `save`, and its tensors by name, on the CPU.

    The tensors of one on a disk are read when they are asked for.
    """

    path: Location
    step: int
    scalars: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]


@final
class Checkpoints:
    """The checkpoints of one folder.

    Args:
        folder: folder, created by the first save; or a URL that fsspec can write to, such as s3://bucket/run.
        keep: number of checkpoints to keep, the newest ones.

    Raises:
        UsageError: no installed package writes to such a URL.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        self.folder, self.keep = open_folder(folder), keep

    @staticmethod
    def locate(run: Path, keep: int, folder: str | None, base: Path) -> Checkpoints:
        """Returns the checkpoints of a run: in its folder, or in the recipe's `folder`, which is relative to `base`."""
        if folder is None:
            return Checkpoints(run / "checkpoints", keep)
        return Checkpoints(folder if "://" in folder else base / folder, keep)

    def expect_none(self) -> None:
        """Raises UsageError if there are checkpoints: a new run would remove those of another run."""
        if paths := self.paths():
            what = f"checkpoints of another run are here already (the newest is {paths[0].name})"
            fix = "Name another checkpoint.folder, or go on with that run: headway train --resume RUN."
            raise UsageError(what, where=self.folder.shown, fix=fix)

    def save(self, step: int, tensors: Mapping[str, torch.Tensor | Piece], scalars: Mapping[str, Any]) -> Location:
        """Writes a checkpoint, whole or not at all, then removes those beyond `keep`.

        `BackgroundSaver` does the same beside the training.

        Args:
            step: number of steps done; names the checkpoint.
            tensors: tensors by name.
            scalars: further state, as JSON.

        Returns:
            the new checkpoint; `read` reads it.

        Raises:
            HeadwayError: for example, the disk is full; the earlier checkpoints stay.
        """
        # A single rank writes all, and nothing changes the tensors while it does, so no copy is needed.
        setting = SaveSetting(self.folder, self.keep, SingleRankExchange(), 1, True, lambda: None)
        job = SaveJob(setting, step, tensors, scalars, copy=False)
        job.run()
        if job.error is not None:
            raise job.error
        assert job.path is not None
        return job.path

    def paths(self) -> list[Location]:
        """Returns the checkpoints, damaged ones too, the newest first. Each has a `name`; `read` reads it."""
        return self.folder.paths()

    def newest(self, warnings: list[str] | None = None) -> Checkpoint | None:
        """Returns the newest intact checkpoint; None if there is no checkpoint at all.

        Args:
            warnings: gets a sentence for each damaged checkpoint that is skipped; None: the log gets it.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        damaged: dict[str, CheckpointError] = {}
        while candidates := [path for path in self.paths() if path.name not in damaged]:
            newest = candidates[0]
            # A save in this process keeps what is being read. If another process removes it, a newer one exists.
            with hold(newest):
                try:
                    return read(newest)
                except CheckpointError as error:
                    # A checkpoint that another process has just removed is not damaged.
                    if newest.name in (path.name for path in self.paths()):
                        damaged[newest.name] = error
                        # The error below names them all if none is left.
                        if len(candidates) > 1:
                            tell = LOG.warning if warnings is None else warnings.append
                            tell(f"{error} The one before it is used.")
        if damaged:
            reasons = "; ".join(f"{name}: {error.what}" for name, error in damaged.items())
            fix = "Copy one of them here again if you have it elsewhere, or start the run anew."
            raise CheckpointError(f"every checkpoint is damaged ({reasons})", where=self.folder.shown, fix=fix)
        return None


def open_folder(folder: str | os.PathLike[str]) -> CheckpointFolder:
    """Opens a folder, or a URL. Raises UsageError if no installed package writes to it."""
    scheme, separator, path = os.fspath(folder).partition("://")
    if not separator:
        return LocalCheckpointFolder(Path(folder))
    if scheme in ("file", "local"):
        return LocalCheckpointFolder(Path(path))
    # Imported here: fsspec takes time to import, and most runs write local files.
    from headway.checkpoint.remote import RemoteCheckpointFolder

    return RemoteCheckpointFolder(os.fspath(folder))


def read(path: Location) -> Checkpoint:
    """Reads one checkpoint.

    Args:
        path: a folder, or an entry of `Checkpoints.paths`.

    Returns:
        the checkpoint, with its tensors on the CPU.

    Raises:
        CheckpointError: it is torn, damaged, or of a later format.
        DataError: its URL cannot be reached.
    """
    where = str(path)
    try:
        manifest = Manifest.from_json(read_manifest(path), where)
        # Length and sha256 are checked before safetensors parses the bytes.
        files = {file.name: open_file(path, file) for file in manifest.files}
        return Checkpoint(path, manifest.step, manifest.scalars, StoredTensors(files, manifest.split_tensors, where))
    # A damaged file can raise any of these from json, safetensors or the file system.
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        file_name = f"{Path(error.filename).name}: " if isinstance(error, OSError) and error.filename else ""
        raise CheckpointError(f"it is damaged ({file_name}{what})", where=where) from None


def state_of(
    model: HasWeights, optimizer: torch.optim.Optimizer, masters: MasterWeights | None = None
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a network, its optimizer and all random generators, named as in the checkpoint format.

    They are the tensors themselves, not copies.

    Args:
        masters: float32 copies of 16-bit weights, saved in their place.
    """
    weights: HasWeights = model if masters is None else masters
    tensors = {f"model/{name}": value for name, value in weights.state_dict().items()}
    return tensors | collect_state(optimizer, weights.named_parameters()) | read_random_state()


def restore(
    checkpoint: Checkpoint,
    model: HasWeights,
    optimizer: torch.optim.Optimizer,
    masters: MasterWeights | None = None,
) -> None:
    """Restores a network, its optimizer and all random generators from a checkpoint, in place.

    Args:
        masters: float32 copies of the network's 16-bit weights, if it has any.

    Raises:
        CheckpointError: it belongs to another network or optimizer, or its random states are not valid.
    """
    tensors = checkpoint.tensors
    weights: HasWeights = model if masters is None else masters
    # Check everything before changing anything: a checkpoint that does not fit leaves all objects as they were.
    expect_tensors(tensors, str(checkpoint.path), weights, optimizer)
    check_random_state(tensors, str(checkpoint.path))
    values = read_values(optimizer, tensors, str(checkpoint.path))
    weights.load_state_dict(select_by_prefix(tensors, "model/"))
    restore_state(optimizer, weights.named_parameters(), tensors, values)
    restore_random_state(tensors)
