"""InputFormat: how images must look to pretrained weights, and its record in the metadata of a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from headway.core.files import open_regular, read_text
from headway.core.untrusted_json import JsonError, is_number, is_whole_number, parse_object

METADATA_KEY = "headway"
"""Key of the metadata of a safetensors file under which a run keeps its InputFormat, as JSON."""

# The safetensors format limits its header to this; ours has a few kilobytes.
HEADER_BYTES = 100_000_000

# 255 and a margin for a mean that is outside of the range of bytes; a file with more is damaged.
LARGEST_LEVEL = 1e4
LARGEST_SIDE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class InputFormat:
    """How images must look to weights: as they did in the training that made these.

    Attributes:
        origin: words for a message, such as "timm's resnet18.a1_in1k" or a file's name.
        mean, std: of each channel, in 0..255.
        size: (height, width); None: unknown.
        share: share of each side of the centred box that evaluation takes; None: unknown.
    """

    origin: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] | None = None
    share: float | None = None

    @property
    def channels(self) -> int:
        """Number of channels of the images."""
        return len(self.mean)


def format_metadata(found: InputFormat) -> dict[str, str]:
    """Returns the metadata of a safetensors file that records an InputFormat."""
    fields = {"mean": found.mean, "std": found.std, "size": found.size, "share": found.share}
    # One key only: safetensors writes several in a random order, and the same run must give the same bytes.
    return {METADATA_KEY: json.dumps(fields)}


def read_input_format(path: Path, origin: str) -> InputFormat | None:
    """Reads the InputFormat of a file of weights: of its metadata, or of timm's `config.json` beside it.

    Returns:
        None if there is none, or the file cannot be read; `load_weights` reports a file that is missing or damaged.
    """
    try:
        header = parse_object(_read_header(path))
        entry = header.get("__metadata__", {}).get(METADATA_KEY)
        if entry is not None:
            return _check_fields(parse_object(entry), origin)
    except (OSError, JsonError, AttributeError):
        pass
    # `model.safetensors` or `pytorch_model.bin` of the Hugging Face Hub lie beside it.
    beside = path.parent / "config.json"
    try:
        config = parse_object(read_text(beside)).get("pretrained_cfg")
    except (OSError, UnicodeDecodeError, JsonError):
        return None
    return read_timm_config(config, f"{beside}") if isinstance(config, dict) else None


def read_timm_config(config: Mapping[str, Any], origin: str) -> InputFormat | None:
    """Reads the InputFormat of timm's `pretrained_cfg`, whose mean and std are in 0..1; None if it has none."""
    mean, std, size = config.get("mean"), config.get("std"), config.get("input_size")
    if not _is_list(mean) or not _is_list(std):
        return None
    scaled = {"mean": [_scale(one) for one in mean], "std": [_scale(one) for one in std]}
    # (channels, height, width)
    sides = list(size)[1:] if _is_list(size) and len(size) == 3 else None
    return _check_fields({**scaled, "size": sides, "share": config.get("crop_pct")}, origin)


def _scale(value: Any) -> Any:
    # Rounded, so that 0.485 gives 123.675 and not 123.67499999999999.
    return round(value * 255, 6) if is_number(value) else value


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _read_header(path: Path) -> bytes:
    """Returns the JSON header of a safetensors file, without its tensors; empty if it has none."""
    with open_regular(path) as file:
        size = int.from_bytes(file.read(8), "little")
        return file.read(size) if size <= HEADER_BYTES else b""


def _check_fields(fields: Mapping[str, Any], origin: str) -> InputFormat | None:
    """Returns the InputFormat of fields that anybody may have written; None if mean or std is not usable."""
    mean, std, size, share = (fields.get(name) for name in ("mean", "std", "size", "share"))
    if not _is_list(mean) or not _is_list(std) or len(mean) != len(std) or len(mean) not in (1, 3):
        return None
    if not all(is_number(one, -LARGEST_LEVEL, LARGEST_LEVEL) for one in mean):
        return None
    if not all(is_number(one, 1e-6, LARGEST_LEVEL) for one in std):
        return None
    sides = tuple(size) if _is_list(size) and len(size) == 2 else ()
    known = len(sides) == 2 and all(is_whole_number(side, 1, LARGEST_SIDE) for side in sides)
    return InputFormat(
        origin=origin,
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
        size=(sides[0], sides[1]) if known else None,
        share=float(share) if share is not None and is_number(share, 0.01, 1) else None,
    )
