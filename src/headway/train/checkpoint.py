"""Checkpoints: safetensors files and a JSON manifest. Written aside, synced, renamed; nothing is ever unpickled.

checkpoints/step-00000120/
    manifest.json           format, step, scalars, for each file its bytes and sha256, and the manifest's own sha256
    tensors-0.safetensors   `model/NAME`, `optimizer/PARAMETER/STATE`, `random/torch`, ... (rank 0's share)
checkpoints/latest          name of the newest, moved last
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from headway.core.errors import CheckpointError, HeadwayError
from headway.core.files import sync_folder, write_synced, write_whole

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint as read back: `step`, `scalars` (what was given to `save`) and `tensors` by name, on the CPU."""

    path: Path
    step: int
    scalars: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one folder.

    Args:
        folder: made at the first save.
        keep: how many are kept, the newest.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        self.folder, self._keep = Path(folder), keep

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, whole or not at all, then removes those beyond `keep`.

        Raises:
            HeadwayError: the disk is full; the checkpoints before it stay.
        """
        final = self.folder / f"step-{step:08d}"
        aside = self.folder / f".{final.name}.{os.getpid()}"
        try:
            self._clear_aside()
            aside.mkdir(parents=True)
            # A tensor's memory format is not stored: it is put back into whatever format the network has.
            data = save_tensors({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
            file = {"name": "tensors-0.safetensors", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            write_synced(aside / str(file["name"]), data)
            manifest = {"format": FORMAT, "step": step, "scalars": dict(scalars), "files": [file]}
            manifest["sha256"] = _digest(manifest)
            write_synced(aside / MANIFEST, json.dumps(manifest, indent=1).encode())
            sync_folder(aside)
            if final.exists():
                shutil.rmtree(final)
            os.replace(aside, final)
            sync_folder(self.folder)
            write_whole(self.folder / "latest", final.name + "\n")
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise HeadwayError(
                f"the disk is full, the checkpoint of step {step} could not be written",
                where=str(self.folder),
                fix="Nothing before it is lost: make room, then go on with headway train --resume.",
            ) from error
        # Later ones are of a run that was cut back to before them: damaged, or soon to be made again.
        earlier = [path for path in self.paths() if _step_of(path) < step]
        for old in set(self.paths()) - {final, *earlier[: self._keep - 1]}:
            shutil.rmtree(old)
        return final

    def paths(self) -> list[Path]:
        """Folders of the checkpoints, the newest first."""
        found = [path for path in self.folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
        return sorted(found, key=_step_of, reverse=True)

    def newest(self, warn: Callable[[str], object] = print) -> Checkpoint | None:
        """The newest good checkpoint; None where there is none at all.

        Args:
            warn: told, by name, of every damaged one that is passed over.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        paths = self.paths()
        for path in paths:
            try:
                return read(path)
            except CheckpointError as error:
                warn(f"{error} The one before it is used.")
        if paths:
            raise CheckpointError("every checkpoint is damaged", where=str(self.folder), fix="Start the run anew.")
        return None

    def _clear_aside(self) -> None:
        for left in self.folder.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def read(path: Path) -> Checkpoint:
    """Reads one checkpoint.

    Raises:
        CheckpointError: it is torn, damaged, or of a later format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"its format is {manifest['format']}, this version reads {FORMAT}", where=str(path))
        if manifest.pop("sha256") != _digest(manifest):
            raise CheckpointError(f"{MANIFEST} is damaged: its sha256 is another", where=str(path))
        tensors: dict[str, torch.Tensor] = {}
        for file in manifest["files"]:
            data = (path / file["name"]).read_bytes()
            if len(data) != file["bytes"]:
                raise CheckpointError(f"{file['name']} is torn: {len(data)} of {file['bytes']} bytes", where=str(path))
            if hashlib.sha256(data).hexdigest() != file["sha256"]:
                raise CheckpointError(f"{file['name']} is damaged: its sha256 is another", where=str(path))
            tensors |= load_tensors(data)
        return Checkpoint(path, manifest["step"], manifest["scalars"], tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"it is damaged ({type(error).__name__}: {error})", where=str(path)) from None


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Tensors of a network, its optimizer and all random generators, named as the checkpoint format has them."""
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
    return tensors | _random_state()


def restore(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Puts a checkpoint's tensors back, in place, and the random generators to where they were.

    Raises:
        CheckpointError: it belongs to another network.
    """
    tensors = checkpoint.tensors
    mine = model.state_dict()
    saved = {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}
    if saved.keys() != mine.keys() or any(saved[name].shape != mine[name].shape for name in mine):
        raise CheckpointError("this checkpoint belongs to another network", where=str(checkpoint.path))
    model.load_state_dict(saved)
    for name, parameter in model.named_parameters():
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
    _set_random_state(tensors)


def _random_state() -> dict[str, torch.Tensor]:
    _, words, place, has_gauss, gauss = np.random.get_state(legacy=True)
    _, state, spare = random.getstate()
    out = {
        "random/torch": torch.get_rng_state(),
        "random/numpy": torch.from_numpy(np.asarray(words).astype(np.int64)),
        "random/numpy_scalars": torch.tensor([float(place), float(has_gauss), float(gauss)], dtype=torch.float64),
        "random/python": torch.tensor(state, dtype=torch.int64),
        "random/python_spare": torch.tensor([] if spare is None else [spare], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out["random/cuda"] = torch.cuda.get_rng_state()
    return out


def _set_random_state(tensors: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(tensors["random/torch"])
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])
    place, has_gauss, gauss = tensors["random/numpy_scalars"].tolist()
    words = tensors["random/numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(place), int(has_gauss), gauss))
    spare = tensors["random/python_spare"].tolist()
    random.setstate((3, tuple(tensors["random/python"].tolist()), spare[0] if spare else None))


def _digest(manifest: Mapping[str, Any]) -> str:
    """sha256 of a manifest, of all but its own `sha256`; a flipped digit would leave it good JSON."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
