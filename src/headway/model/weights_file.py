"""Reads a file of weights: safetensors, or a file of torch.save, by PyTorch's loader that runs no code of the file."""

from __future__ import annotations

import argparse
import io
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from headway.core.errors import UsageError
from headway.core.files import describe_os_error, read_regular

AVERAGED_KEYS = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")
"""Keys of averaged weights in a checkpoint: of timm, torchvision's references, and others."""

PLAIN_KEYS = ("state_dict", "model_state_dict", "model", "net", "network", "module")
"""Keys of the newest weights in a checkpoint: of Lightning and timm, and those usual in scripts."""

# A checkpoint nests its weights twice at most: {"ema": {"module": {...}}}.
DEPTH = 3


@dataclass(frozen=True, kw_only=True)
class WeightsFile:
    """The tensors of a file by their names, and the key they stood under; empty if the file holds nothing else."""

    tensors: dict[str, Tensor]
    key: str = ""
    passed_over: str = ""
    """Key of other weights of the same network in the file; empty if there are none."""

    def describe_choice(self) -> str:
        """Says which weights of the file are used; empty if it holds only these."""
        if not self.key:
            return ""
        if self.passed_over:
            return f"the averaged weights in {self.key!r} are used, which are usually better than {self.passed_over!r}"
        return f"the weights in {self.key!r} are used"


def read_weights(path: Path) -> WeightsFile:
    """Reads a safetensors file, or a file of torch.save (.pth, .pt, .bin); its first bytes tell which it is.

    A file of torch.save may nest its weights, as the checkpoints of many libraries do. Averaged weights
    (`AVERAGED_KEYS`) are preferred to the newest ones.

    Raises:
        UsageError: the file cannot be read, is damaged, holds no tensors, or needs code to be loaded.
    """
    try:
        # Read, not mapped: if another process truncates a mapped file, this one dies of a bus error.
        data = read_regular(path)
    except OSError as error:
        fix = ""
        if path.is_dir() and (path / "weights.safetensors").is_file():
            fix = f"It is the folder of a run: name {path / 'weights.safetensors'}."
        raise UsageError(f"the weights cannot be read: {describe_os_error(error)}", where=str(path), fix=fix) from None
    # safetensors first: its first bytes are a length, which may look like the beginning of a pickle.
    try:
        return WeightsFile(tensors=load_tensors(data))
    except SafetensorError as error:
        # A zip archive of torch.save begins with PK, its older form is a bare pickle, which begins with 0x80.
        if data[:2] != b"PK" and data[:1] != b"\x80":
            what = f"no safetensors file and none of torch.save, or a damaged one: {error}"
            raise UsageError(what, where=str(path)) from None
    return _choose_state(_load_torch(data, path), path)


def _load_torch(data: bytes, path: Path) -> Any:
    _expect_stored(data, path)
    try:
        # Checkpoints of timm and of torchvision's references hold the arguments of their command line. A Namespace
        # only keeps values, which the loader checks as all others.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # torch raises errors of many types for a damaged file.
    except Exception as error:
        raise _explain_load_error(error, path) from None


def _explain_load_error(error: Exception, path: Path) -> UsageError:
    # A page of advice for other users of torch.load comes first.
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    if isinstance(error, pickle.UnpicklingError) and "nsupported" in text:
        found = re.search(r"(?:GLOBAL|class) ([\w.]+)", text)
        named = f" ({found[1]})" if found else ""
        what = f"the file holds Python objects besides tensors{named}, and loading them could run any code"
        fix = (
            "If you trust the file, save its tensors once yourself: "
            f"found = torch.load({path.name!r}, weights_only=False); torch.save(STATE_DICT, 'weights.pth'), where "
            "STATE_DICT is found.state_dict() of a network, or the part of found that holds the tensors."
        )
        return UsageError(what, where=str(path), fix=fix)
    if "TorchScript" in text:
        fix = "Save its tensors once yourself: torch.save(torch.jit.load(FILE).state_dict(), 'weights.pth')."
        return UsageError("this is a TorchScript program, no file of weights", where=str(path), fix=fix)
    reason = text.partition("\n")[0] or type(error).__name__
    return UsageError(f"a damaged file of torch.save: {reason}", where=str(path))


def _expect_stored(data: bytes, path: Path) -> None:
    """Raises UsageError if a zip archive holds more than its own bytes: torch.save never compresses."""
    if data[:2] != b"PK":
        return
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise UsageError(f"a damaged file of torch.save: {error}", where=str(path)) from None
    # A few kilobytes of zeros would otherwise fill the memory.
    if size > len(data):
        raise UsageError("a compressed zip archive, which torch.save does not write", where=str(path))


def _choose_state(found: Any, path: Path) -> WeightsFile:
    averaged = _find_state(found, AVERAGED_KEYS, path, DEPTH)
    plain = _find_state(found, PLAIN_KEYS, path, DEPTH)
    if averaged is not None:
        return WeightsFile(tensors=averaged[1], key=averaged[0], passed_over=plain[0] if plain else "")
    if plain is not None:
        return WeightsFile(tensors=plain[1], key=plain[0])
    if (tensors := _list_tensors(found)) is not None:
        return WeightsFile(tensors=tensors)
    if isinstance(found, Mapping):
        named = ", ".join(repr(str(key)) for key in list(found)[:5])
        what = f"the file holds no weights that Headway knows: its keys are {named or 'none'}"
    else:
        what = f"the file holds a {type(found).__name__}, no tensors by their names"
    fix = "Save the state dict of the network: torch.save(model.state_dict(), 'weights.pth')."
    raise UsageError(what, where=str(path), fix=fix)


def _find_state(found: Any, keys: tuple[str, ...], path: Path, depth: int) -> tuple[str, dict[str, Tensor]] | None:
    """Returns (dotted key, tensors) of the first of the keys that holds weights, itself or below."""
    if not isinstance(found, Mapping) or depth == 0:
        return None
    for key in keys:
        inner = found.get(key)
        if not isinstance(inner, Mapping):
            continue
        # Below averaged weights the keys are the usual ones: {"ema": {"module": {...}}}.
        nested = _find_state(inner, PLAIN_KEYS, path, depth - 1)
        if nested is not None:
            return f"{key}.{nested[0]}", nested[1]
        if (tensors := _list_tensors(inner)) is not None:
            return key, tensors
    return None


def _list_tensors(found: Any) -> dict[str, Tensor] | None:
    """Returns the tensors of a state dict, without its other entries; None if it is none."""
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        return None
    tensors = {name: value.detach() for name, value in found.items() if isinstance(value, Tensor)}
    return tensors or None
