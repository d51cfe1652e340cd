"""Tensors in a checkpoint's files, read when they are asked for: whole, or a range of them.

A file is read once to check its sha256, a few megabytes at a time, and then mapped: no more of it is in memory than the
tensors that are in use. A file at a URL goes to a temporary file first.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, final

import torch
from safetensors import safe_open

from headway.checkpoint.locations import Location
from headway.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, FileEntry
from headway.checkpoint.pieces import SplitTensor
from headway.checkpoint.tensors_file import get_dtype
from headway.core.errors import CheckpointError
from headway.core.files import expect_inside, open_regular, read_regular
from headway.core.free_memory import read_free_memory_bytes

_CHUNK_BYTES = 4 << 20


def read_manifest(path: Location) -> bytes:
    """Returns the bytes of a checkpoint's manifest. Raises OSError, or DataError if its URL cannot be reached."""
    if not isinstance(path, Path):
        return path.read(MANIFEST, MAX_MANIFEST_BYTES)
    # A file of a foreign checkpoint may be a link that leads out of its folder.
    expect_inside(path, MANIFEST)
    return read_regular(path / MANIFEST, MAX_MANIFEST_BYTES)


def open_file(path: Location, file: FileEntry) -> Any:
    """Opens a file of tensors of the right length and sha256, as safetensors does.

    It stays readable if the checkpoint is removed meanwhile.

    Raises:
        CheckpointError: it is torn or damaged.
        OSError: it cannot be read. SafetensorError: it is no safetensors file.
        DataError: its URL cannot be reached.
    """
    where = str(path)
    if isinstance(path, Path):
        expect_inside(path, file.name)
        # A damaged checkpoint may hold a file of any size: its length is checked before it is read.
        if (path / file.name).is_file():
            file.expect_length((path / file.name).stat().st_size, where)
        with open_regular(path / file.name) as opened:
            _expect_stored(opened, file, where)
            return _map(opened, file, where)
    # A temporary file without a name disappears with the process, even with kill -9.
    with tempfile.TemporaryFile(prefix="headway-") as copy:
        for chunk in path.read_in_chunks(file.name, file.length, _CHUNK_BYTES * 16):
            copy.write(chunk)
        copy.flush()
        copy.seek(0)
        return _map(copy, file, where)


def _expect_stored(opened: BinaryIO, file: FileEntry, where: str) -> None:
    # A sparse file can have any length: its sha256 would take hours. A file system that compresses may store little of
    # a good file too, so only what exceeds the memory is refused.
    stored_bytes = os.fstat(opened.fileno()).st_blocks * 512
    if stored_bytes < file.length > read_free_memory_bytes():
        what = f"{file.name} is sparse: of its {file.length:,} bytes {stored_bytes:,} are on the disk"
        raise CheckpointError(what, where=where)


def _map(opened: BinaryIO, file: FileEntry, where: str) -> Any:
    digest, length = hashlib.sha256(), 0
    while chunk := opened.read(_CHUNK_BYTES):
        digest.update(chunk)
        length += len(chunk)
        if length > file.length:
            break
    file.expect_length(length, where)
    file.expect_sha256(digest.hexdigest(), where)
    # By its descriptor: the name could lead to another file by now.
    return safe_open(f"/proc/self/fd/{opened.fileno()}", framework="pt")


@final
class StoredTensors(Mapping[str, torch.Tensor]):
    """Tensors of several files by name. Each access reads them anew: keep what you need.

    Args:
        files: opened safetensors files by name.
        split_tensors: tensors of which several files hold pieces.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: two files hold the same tensor, or a piece has another shape or type than the manifest says.
    """

    def __init__(self, files: Mapping[str, Any], split_tensors: Mapping[str, SplitTensor], where: str) -> None:
        self._split, self._files = dict(split_tensors), dict(files)
        self._whole: dict[str, Any] = {}
        holders: dict[str, set[str]] = {
            name: {piece.file for piece in tensor.pieces} for name, tensor in self._split.items()
        }
        for file_name, file in self._files.items():
            for name in file.keys():  # noqa: SIM118, a safetensors file is no mapping
                if name in self._split:
                    holders[name].discard(file_name)
                # Ranks write disjoint tensors. One that is in two files would be taken from the last, unnoticed.
                elif name in self._whole:
                    raise CheckpointError(f"{file_name} holds {name!r}, which another file holds too", where=where)
                else:
                    self._whole[name] = file
        for name, tensor in self._split.items():
            if holders[name]:
                raise CheckpointError(f"{min(holders[name])} lacks its piece of {name!r}", where=where)
            for piece in tensor.pieces:
                held = self._files[piece.file].get_slice(name)
                if tuple(held.get_shape()) != tensor.get_piece_shape(piece) or held.get_dtype() != tensor.dtype:
                    what = f"{piece.file} holds another piece of {name!r} than the manifest says"
                    raise CheckpointError(what, where=where)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._whole, *self._split))

    def __len__(self) -> int:
        return len(self._whole) + len(self._split)

    def __contains__(self, name: object) -> bool:
        return name in self._whole or name in self._split

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._split:
            whole: torch.Tensor = self._whole[name].get_tensor(name)
            return whole
        tensor = self._split[name]
        if len(tensor.pieces) == 1:
            only: torch.Tensor = self._files[tensor.pieces[0].file].get_tensor(name)
            return only
        return self.read_range(name, tensor.axis, 0, tensor.shape[tensor.axis])

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a whole tensor without reading it. Raises KeyError if there is none."""
        if name in self._split:
            return self._split[name].shape
        return tuple(self._whole[name].get_slice(name).get_shape())

    def read_range(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        """Reads entries [start, stop) of a tensor along `axis`, and nothing else of it.

        Raises:
            KeyError: there is no such tensor. ValueError: it has no such entries.
        """
        shape = self.get_shape(name)
        if not (0 <= axis < len(shape) and 0 <= start <= stop <= shape[axis]):
            raise ValueError(f"{name!r} of shape {shape} has no entries {start} to {stop} in dimension {axis}")
        if name not in self._split:
            part: torch.Tensor = self._whole[name].get_slice(name)[(slice(None),) * axis + (slice(start, stop),)]
            return part
        tensor = self._split[name]
        lengths = list(tensor.shape)
        lengths[axis] = stop - start
        out = torch.empty(lengths, dtype=get_dtype(tensor.dtype))
        for piece in tensor.pieces:
            held = self._files[piece.file].get_slice(name)
            index, target = [slice(None)] * len(lengths), [slice(None)] * len(lengths)
            index[axis] = slice(start, stop)
            if axis == tensor.axis:
                low, high = max(start, piece.start), min(stop, piece.stop)
                if low >= high:
                    continue
                index[axis], target[axis] = (
                    slice(low - piece.start, high - piece.start),
                    slice(low - start, high - start),
                )
            else:
                target[tensor.axis] = slice(piece.start, piece.stop)
            out[tuple(target)] = held[tuple(index)]
        return out
