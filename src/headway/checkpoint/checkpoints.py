"""Checkpoints: safetensors files and a JSON manifest. Written aside, synced, renamed; nothing is ever unpickled.

checkpoints/step-00000120/
    manifest.json           format, step, scalars, for each file its bytes and sha256, and the manifest's own sha256
    tensors-0.safetensors   `model/NAME`, `optimizer/PARAMETER/STATE`, `random/torch`, ...: rank 0's share
    tensors-1.safetensors   rank 1's; the state is one, so any number of ranks can go on from it
checkpoints/latest          name of the newest, moved last
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from headway.checkpoint.agreement import Alone
from headway.checkpoint.compatibility import expect_tensors
from headway.checkpoint.locations import LocalPlace, Location, Place, held
from headway.checkpoint.manifest import MANIFEST, MANIFEST_BYTES, File, Manifest
from headway.checkpoint.random_state import expect_random_state, random_state, set_random_state
from headway.checkpoint.save import Flight, Setting
from headway.core.errors import CheckpointError, UsageError
from headway.core.files import expect_inside, read_regular
from headway.optim import Masters


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint as read back: `step`, `scalars` (what was given to `save`) and `tensors` by name, on the CPU."""

    path: Location
    step: int
    scalars: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@final
class Checkpoints:
    """The checkpoints of one folder.

    Args:
        folder: made at the first save; or an address that fsspec writes to, such as s3://bucket/run.
        keep: how many are kept, the newest.

    Raises:
        UsageError: nothing installed writes to such an address.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        self.place, self.keep = place_of(folder), keep

    @staticmethod
    def of_run(run: Path, keep: int, folder: str | None, base: Path) -> Checkpoints:
        """Those of a run folder: in it, or in the `folder` of its recipe; a relative one begins at `base`."""
        if folder is None:
            return Checkpoints(run / "checkpoints", keep)
        return Checkpoints(folder if "://" in folder else base / folder, keep)

    def expect_none(self) -> None:
        """For a new run. Raises UsageError: checkpoints of another one are here, and it would remove them."""
        if found := self.paths():
            what = f"checkpoints of another run are here already (the newest is {found[0].name})"
            fix = "Name another checkpoint.folder, or go on with that run: headway train --resume RUN."
            raise UsageError(what, where=self.place.shown, fix=fix)

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> Location:
        """Writes a checkpoint, whole or not at all, then removes those beyond `keep`. `Saver` does it beside training.

        Raises:
            HeadwayError: the disk is full, or the like; the checkpoints before it stay.
        """
        setting = Setting(self.place, self.keep, Alone(), 1, True, lambda: None, print)
        flight = Flight(setting, step, tensors, scalars, copy=False)
        flight.run()
        if flight.error is not None:
            raise flight.error
        assert flight.path is not None
        return flight.path

    def paths(self) -> list[Location]:
        """The checkpoints, damaged ones too, the newest first: each has a `name`, and `read` reads it."""
        return self.place.paths()

    def newest(self, warn: Callable[[str], object] = print) -> Checkpoint | None:
        """The newest good checkpoint; None where there is none at all. A save in this process does not remove it
        while it is read; where another process did, a newer one is there.

        Args:
            warn: told, by name, of every damaged one that is passed over.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        damaged: set[str] = set()
        while fresh := [path for path in self.paths() if path.name not in damaged]:
            with held(fresh[0]):
                try:
                    return read(fresh[0])
                except CheckpointError as error:
                    if fresh[0].name in (path.name for path in self.paths()):
                        damaged.add(fresh[0].name)
                        warn(f"{error} The one before it is used.")
        if damaged:
            raise CheckpointError("every checkpoint is damaged", where=self.place.shown, fix="Start the run anew.")
        return None


def place_of(folder: str | os.PathLike[str]) -> Place:
    """A folder, or an address with `://`. Raises UsageError: nothing installed writes to it."""
    scheme, mark, rest = os.fspath(folder).partition("://")
    if not mark:
        return LocalPlace(Path(folder))
    if scheme in ("file", "local"):
        return LocalPlace(Path(rest))
    from headway.checkpoint.remote import RemotePlace  # here, since most programs write no remote files

    return RemotePlace(os.fspath(folder))


def read(path: Location) -> Checkpoint:
    """Reads one checkpoint: a folder as a Path, or what `Checkpoints.paths` gives.

    Raises:
        CheckpointError: it is torn, damaged, or of a later format. DataError: its address cannot be reached.
    """
    where = str(path)
    try:
        manifest = Manifest.from_json(_bytes(path, MANIFEST, where), where)
        tensors: dict[str, torch.Tensor] = {}
        for file in manifest.files:
            data = _bytes(path, file.name, where, file)
            file.check(data, where)
            found = load_tensors(data)
            if twice := sorted(found.keys() & tensors.keys()):
                raise CheckpointError(f"{file.name} holds {twice[0]!r}, which another file holds too", where=where)
            tensors |= found
        return Checkpoint(path, manifest.step, manifest.scalars, tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        of = f"{Path(error.filename).name}: " if isinstance(error, OSError) and error.filename else ""
        raise CheckpointError(f"it is damaged ({of}{what})", where=where) from None


def _bytes(path: Location, name: str, where: str, file: File | None = None) -> bytes:
    """Bytes of one of its files; of a `file` that the manifest names, only where it has the length it should have."""
    if not isinstance(path, Path):
        return path.read(name, MANIFEST_BYTES if file is None else file.length)
    expect_inside(path, name)
    if file is not None and (path / name).is_file():
        file.expect_length((path / name).stat().st_size, where)
    return read_regular(path / name, MANIFEST_BYTES if file is None else None)


def state_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, masters: Masters | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of a network, its optimizer and all random generators, named as the checkpoint format has them.

    Args:
        masters: are saved in the place of 16-bit weights.
    """
    whole = model if masters is None else masters
    tensors = {f"model/{name}": value for name, value in whole.state_dict().items()}
    for name, parameter in whole.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
    return tensors | random_state()


def restore(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, masters: Masters | None = None
) -> None:
    """Puts a checkpoint's tensors back, in place, and the random generators to where they were.

    Args:
        masters: of a network with 16-bit weights.

    Raises:
        CheckpointError: it belongs to another network or optimizer, or is no state of the random generators.
    """
    tensors = checkpoint.tensors
    whole = model if masters is None else masters
    # All of it before anything is changed: what does not fit leaves network, optimizer and generators as they were.
    expect_tensors(tensors, str(checkpoint.path), whole, optimizer)
    expect_random_state(tensors, str(checkpoint.path))
    saved = {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
    whole.load_state_dict(saved)
    for name, parameter in whole.named_parameters():
        prefix = f"optimizer/{name}/"
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if state:
            group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
            # A step count lies on the device only where the optimizer wants it; elsewhere it would be waited for.
            device = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
            # torch's fused kernels walk parameter and state as flat memory, so both need the same memory format.
            optimizer.state[parameter] = {
                key: torch.empty_like(parameter, dtype=value.dtype).copy_(value)
                if value.shape == parameter.shape
                else value.clone().to(device)
                for key, value in state.items()
            }
    set_random_state(tensors)
