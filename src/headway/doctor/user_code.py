"""Finds the user's own code on a stack: code outside of Headway, torch, NumPy and the standard library."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

import numpy as np
import torch

from headway.data.batch_transform import BatchTransform
from headway.data.workers.image_transform import ImageTransform
from headway.data.workers.user_failure import is_user_file
from headway.setup.prepare import prepare_batch

Owner = Literal["user", "package", "library", "torch", "headway"]

_HEADWAY = f"{Path(__file__).resolve().parents[1]}/"
_TAPS = f"{_HEADWAY}observe/tensor_taps.py"
_TORCH = f"{Path(torch.__file__).resolve().parent}/"
_NUMPY = f"{Path(np.__file__).resolve().parent}/"
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# The functions of Headway that call the recipe's transforms.
_TRANSFORMING = frozenset(
    {prepare_batch.__name__, ImageTransform.transform_image.__name__, BatchTransform.transform_batch.__name__}
)
TRANSFORM, FORWARD, BACKWARD = "transform", "forward", "backward"


class UserCodeLine(NamedTuple):
    """A line of the user's code. `within` is the part of a step that runs it: transform, forward, backward, or the name
    of the user's function that was called, such as loss and metrics."""

    within: str
    file: str
    line: int


@cache
def find_owner(file: str) -> Owner:
    """Returns the owner of a source file, by its path."""
    if file.startswith("<"):
        # `<frozen ...>` modules, and code that libraries generate.
        return "library"
    path = os.path.realpath(file)
    if path.startswith(_HEADWAY):
        # Taps on torch work for the line that reads a value, as torch does.
        return "library" if path == _TAPS else "headway"
    if path.startswith(_TORCH) or "torchinductor" in path:
        return "torch"
    if path.startswith(_NUMPY):
        return "library"
    if any(folder in path for folder in _PACKAGES):
        return "package"
    return "user" if is_user_file(path) else "library"


def find_user_line(frame: FrameType | None) -> UserCodeLine | None:
    """Finds the innermost user frame that the given frame works for; None: torch or Headway works for itself.

    The standard library and NumPy work for their caller. So do installed packages, unless no file of the user's stands
    behind them, as with a network from a package.
    """
    place: tuple[str, int] | None = None
    of_package = False
    while frame is not None:
        owner = find_owner(frame.f_code.co_filename)
        if owner in ("torch", "headway"):
            break
        if owner == "user":
            place, of_package = (frame.f_code.co_filename, frame.f_lineno), False
            break
        if owner == "package" and not of_package:
            place, of_package = (frame.f_code.co_filename, frame.f_lineno), True
        frame = frame.f_back
    return None if place is None else UserCodeLine(_find_step_part(frame), *place)


def _find_step_part(frame: FrameType | None) -> str:
    """Returns the part of a step that a frame belongs to."""
    entry: FrameType | None = None
    while frame is not None:
        if find_owner(frame.f_code.co_filename) == "headway":
            break
        entry, frame = frame, frame.f_back
    if frame is not None and frame.f_code.co_name in _TRANSFORMING:
        return TRANSFORM
    if entry is None:
        return FORWARD
    file = entry.f_code.co_filename
    if find_owner(file) != "torch":
        return entry.f_code.co_name
    return BACKWARD if "/autograd/" in file or file.endswith("/_tensor.py") else FORWARD
