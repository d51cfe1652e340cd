"""Tensors of which each rank holds a piece: saved piece by piece, and read back whole or by any other division."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from headway.checkpoint.tensors_file import get_dtype_name
from headway.core.errors import CheckpointError
from headway.core.files import is_plain_name
from headway.core.untrusted_json import Checks, JsonError, expect_entries, is_object, is_whole_number

MAX_DIMENSIONS, MAX_SIZE, MAX_PIECES = 64, 1 << 53, 1 << 20


@final
@dataclass(frozen=True)
class Piece:
    """Part of a tensor that this rank holds; other ranks hold the rest.

    A piece can be the whole tensor: one that other ranks do not have. A single number, without dimensions, counts as
    one entry of dimension 0.

    Attributes:
        tensor: entries [start, start + tensor.shape[axis]) of the whole tensor along `axis`.
        shape: shape of the whole tensor.
        axis, start: the dimension that is divided, and where this piece begins.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    axis: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        mine = tuple(self.tensor.shape)
        fits = len(mine) == len(self.shape) and 0 <= self.axis < max(1, len(mine))
        fits = fits and 0 <= self.start <= _count_entries(self.shape, self.axis) - _count_entries(mine, self.axis)
        if not fits or _replace(self.shape, self.axis, _count_entries(mine, self.axis)) != mine:
            what = f"a piece of shape {mine} from {self.start} on does not lie in dimension {self.axis} of {self.shape}"
            raise ValueError(what)

    def describe(self) -> dict[str, Any]:
        """Returns all but the values, as JSON."""
        stop = self.start + _count_entries(self.tensor.shape, self.axis)
        form = {"dtype": get_dtype_name(self.tensor.dtype), "shape": list(self.shape), "axis": self.axis}
        return {**form, "start": self.start, "stop": stop}


@final
@dataclass(frozen=True)
class StoredPiece:
    """A piece in one of a checkpoint's files: entries [start, stop) of the whole tensor."""

    file: str
    start: int
    stop: int


@final
@dataclass(frozen=True)
class SplitTensor:
    """A tensor that several files hold together.

    Attributes:
        dtype: its name in the safetensors format.
        shape: shape of the whole tensor.
        axis: the dimension that is divided.
        pieces: pieces in order; together they are the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    axis: int
    pieces: tuple[StoredPiece, ...]

    def get_piece_shape(self, piece: StoredPiece) -> tuple[int, ...]:
        """Returns the shape of one piece."""
        return _replace(self.shape, self.axis, piece.stop - piece.start)

    def to_json(self) -> dict[str, Any]:
        """Returns the entry of the manifest."""
        pieces = [[piece.file, piece.start, piece.stop] for piece in self.pieces]
        return {"dtype": self.dtype, "shape": list(self.shape), "axis": self.axis, "pieces": pieces}


_ENTRIES: Checks = {
    "dtype": (lambda value: isinstance(value, str) and len(value) < 32, "a name of a type"),
    "shape": (
        lambda value: (
            isinstance(value, list)
            and len(value) <= MAX_DIMENSIONS
            and all(is_whole_number(size, 0, MAX_SIZE) for size in value)
            and math.prod(value) <= MAX_SIZE
        ),
        "a list of sizes",
    ),
    "axis": (lambda value: is_whole_number(value, 0, MAX_DIMENSIONS), "a dimension"),
    "pieces": (
        lambda value: (
            isinstance(value, list)
            and 0 < len(value) <= MAX_PIECES
            and all(
                isinstance(piece, list)
                and len(piece) == 3
                and is_plain_name(piece[0])
                and all(is_whole_number(number, 0, MAX_SIZE) for number in piece[1:])
                for piece in value
            )
        ),
        "a list of [file, start, stop]",
    ),
}


def parse_split_tensors(tree: Mapping[str, Any]) -> dict[str, SplitTensor]:
    """Parses the entry `tensors` of a manifest. Raises JsonError if it is damaged."""
    tensors = {}
    for name, entry in tree.items():
        where = f"tensors[{name!r}]"
        if not is_object(entry):
            raise JsonError(f"it has no object as {where}")
        expect_entries(entry, _ENTRIES, f"{where}.")
        pieces = tuple(StoredPiece(*piece) for piece in entry["pieces"])
        tensors[name] = SplitTensor(entry["dtype"], tuple(entry["shape"]), entry["axis"], pieces)
        if fault := _find_fault(tensors[name]):
            raise JsonError(f"{where}: {fault}")
    return tensors


def join_pieces(described: Sequence[tuple[str, Mapping[str, dict[str, Any]]]]) -> dict[str, SplitTensor]:
    """Joins what the ranks wrote into entries of the manifest.

    Args:
        described: for each rank its file, and `Piece.describe` of each of its pieces by name.

    Raises:
        CheckpointError: pieces of a tensor differ in form, overlap, or leave a gap.
    """
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for file, pieces in described:
        for name, piece in pieces.items():
            found.setdefault(name, []).append((file, piece))
    tensors = {}
    for name, parts in found.items():
        forms = {(part["dtype"], tuple(part["shape"]), part["axis"]) for _, part in parts}
        if len(forms) > 1:
            raise CheckpointError(f"the pieces of {name!r} are of tensors of different shape, type or division")
        ((dtype, shape, axis),) = forms
        ordered = sorted((StoredPiece(file, part["start"], part["stop"]) for file, part in parts), key=_get_range)
        # Ranks without a share of the tensor have an empty piece, and hold nothing of it.
        kept = [piece for piece in ordered if piece.stop > piece.start] or ordered[:1]
        tensors[name] = SplitTensor(dtype, shape, axis, tuple(kept))
        if fault := _find_fault(tensors[name]):
            raise CheckpointError(f"the pieces of {name!r} do not make a whole: {fault}")
    return tensors


def _get_range(piece: StoredPiece) -> tuple[int, int]:
    return piece.start, piece.stop


def _find_fault(tensor: SplitTensor) -> str:
    """Returns what is wrong with the pieces of a tensor, or an empty string."""
    if tensor.axis >= max(1, len(tensor.shape)):
        return f"a tensor of {len(tensor.shape)} dimensions has no dimension {tensor.axis}"
    if len({piece.file for piece in tensor.pieces}) < len(tensor.pieces):
        return "a file holds two of them"
    entries = _count_entries(tensor.shape, tensor.axis)
    ends = [0, *itertools.chain.from_iterable(map(_get_range, tensor.pieces)), entries]
    # Each piece begins where the one before ends, and the last one ends where the tensor does.
    for end, start in zip(ends[::2], ends[1::2], strict=True):
        if start != end:
            return (
                f"entries {min(start, end):,} to {max(start, end):,} are {'missing' if start > end else 'twice there'}"
            )
    return ""


def _count_entries(shape: Sequence[int], axis: int) -> int:
    """Returns the size of a dimension; 1 for a tensor without any."""
    return shape[axis] if shape else 1


def _replace(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    """Returns a shape with another size in one dimension, if it has any."""
    return (*shape[:axis], size, *shape[axis + 1 :]) if shape else ()
