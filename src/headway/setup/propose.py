"""`headway init`: inspects images and proposes a recipe that works, with the reason for each choice as a comment."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from headway.core.errors import DataError, UsageError
from headway.data import opening
from headway.data.columns import COLUMNS_FILE, LabelKind
from headway.data.formats.pack_source import PackSource
from headway.data.opening import open_split
from headway.data.pack_mode import open_header
from headway.data.reference import GRAY_MODES
from headway.setup.few_photographs import propose_for_few

MAX_INSPECTED = 256
"""Largest number of image files whose headers are read; they stand for the sizes of all images."""


@dataclass(frozen=True, kw_only=True)
class SourceFindings:
    """Facts about a source of images."""

    samples: int
    held_out: bool
    packed: bool
    kind: LabelKind
    outputs: int
    sizes: Sequence[tuple[int, int]]
    """(width, height) of the images inspected."""
    gray: bool

    @property
    def common_size(self) -> tuple[int, int] | None:
        """The size of all images inspected; None if they differ."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else None

    @property
    def median_side(self) -> int:
        """Median of the shorter sides, in pixels."""
        return int(np.median([min(size) for size in self.sizes]))


def inspect_source(src: Path) -> SourceFindings:
    """Inspects an image folder, a list of images, or a packed folder.

    Raises:
        HeadwayError: the source is none of these, or its images cannot be opened.
    """
    # A packed folder has its columns at hand, so no image needs to be opened.
    part = next((p for p in (src, src / "train") if (p / COLUMNS_FILE).is_file()), None)
    if part is not None:
        packed = opening.open(part)
        about = packed.description
        ids = np.linspace(0, len(packed) - 1, min(MAX_INSPECTED, len(packed))).astype(int)
        sizes = (
            [about.common_size] if about.common_size else list(zip(packed.width[ids], packed.height[ids], strict=True))
        )
        return SourceFindings(
            samples=len(packed),
            held_out=(src / "eval" / COLUMNS_FILE).is_file(),
            packed=True,
            kind=about.label_kind,
            outputs=len(about.classes) or 1,
            sizes=[(int(w), int(h)) for w, h in sizes],
            gray=about.channels == 1,
        )
    train, held_out = open_split(src)
    sizes, modes = _inspect_files(train)
    return SourceFindings(
        samples=len(train),
        held_out=held_out is not None,
        packed=False,
        kind=train.label_kind,
        outputs=len(train.classes) or 1,
        sizes=sizes,
        gray=all(mode in GRAY_MODES for mode in modes),
    )


def _inspect_files(source: PackSource) -> tuple[list[tuple[int, int]], Counter[str]]:
    sizes, modes = [], Counter[str]()
    ids = np.linspace(0, len(source) - 1, min(MAX_INSPECTED, len(source))).astype(int)
    for place in np.unique(ids):
        try:
            with open_header(source.images.read(int(place))) as image:
                sizes.append(image.size)
                modes[image.mode] += 1
        # `headway pack` names every bad file; here the others are enough.
        except (OSError, DataError):
            continue
    if not sizes:
        raise DataError(
            "none of the images looked at can be opened", where=source.root, fix="Look at them: are they images?"
        )
    return sizes, modes


def propose(src: Path, out: Path | None = None, *, overwrite: bool = False) -> tuple[Path, SourceFindings, Path]:
    """Writes a recipe for `src`.

    Args:
        out: the recipe's file; None: NAME.yaml in the current folder.

    Returns:
        the recipe's path, the facts about `src`, and the folder to pack the data into (`src` if it is packed already).

    Raises:
        UsageError: the recipe exists and `overwrite` is off. HeadwayError: see `look`.
    """
    found = inspect_source(src)
    # Not resolved, so that a link gives its own name to the recipe.
    path = Path(os.path.abspath(src))
    name = (path.name if path.is_dir() else path.stem).removesuffix(".packed").lstrip(".") or "images"
    out = out or Path(f"{name}.yaml")
    if out.exists() and not overwrite:
        raise UsageError("this recipe exists", where=str(out), fix="Name another with --out, or pass --overwrite.")
    packed = src if found.packed else out.parent / f"{name}.packed"
    if not out.parent.is_dir():
        raise UsageError("there is no such folder", where=str(out.parent))
    # Paths in a recipe are relative to its folder.
    relative = Path(os.path.relpath(packed.resolve(), out.resolve().parent))
    out.write_text(format_recipe(found, name, relative), encoding="utf-8")
    return out, found, packed


def format_recipe(found: SourceFindings, name: str, packed: Path) -> str:
    """Formats a proposal as YAML; every choice has its reason as a comment."""
    side, batch = _choose_side(found), _choose_batch(found)
    epochs = _choose_epochs(found, batch)
    why_batch, why_epochs = _explain_batch(found), "fewer are quicker, more may be better"
    parts = [
        _format_size(found, side),
        _format_augment(found, side),
        _format_model(found, side),
        _format_optimizer(found, side, batch),
    ]
    if (few := propose_for_few(found, side)) is not None:
        parts = [few.size, few.augment, few.model, few.optimizer]
        batch, epochs, why_epochs = few.batch, few.epochs, few.explain_epochs
        why_batch = "few photographs: a small batch makes more steps of them"
    split = packed if found.packed and not found.held_out else packed / "train"
    # `headway pack` splits off an evaluation set, unless the data are packed already.
    held_out = f"  eval: {_quote_yaml(str(packed / 'eval'))}\n" if found.held_out or not found.packed else ""
    colour = "gray" if found.gray else "colour"
    sizes = f"all {found.sizes[0][0]} x {found.sizes[0][1]}" if found.common_size else "of different sizes"
    lines = [
        f"# Proposed by headway init: {found.samples:,} images, {_describe_labels(found)}, {colour}, {sizes}.",
        "# Every line may be changed here, or for one run on the command line: headway train RECIPE key=value",
        f"name: {_quote_yaml(name)}",
        "seed: 1",
        "",
        "data:",
        f"  train: {_quote_yaml(str(split))}",
        *([held_out.rstrip()] if held_out else []),
        *(line for part in parts for line in (*part, "")),
        f"batch: {batch}  # {why_batch}",
        f"epochs: {epochs}  # up to {found.samples // batch} steps each; {why_epochs}",
        _format_precision(found),
        "channels_last: true  # faster for convolutions",
    ]
    return "\n".join(lines) + "\n"


def _format_precision(found: SourceFindings) -> str:
    if found.kind == "value":
        return "precision: fp32  # bf16 keeps 3 digits, too few for numbers"
    return "precision: auto  # bf16 where it is faster: measured at the start"


def _quote_yaml(text: str) -> str:
    """Formats a text as YAML, quoted if needed: a folder may be called 2024, 1e-3 or `no`."""
    # Letters first and slashes are safe as plain YAML; all else is quoted.
    quotes = None if text[:1].isalpha() or "/" in text else "'"
    return yaml.safe_dump(text, default_style=quotes, allow_unicode=True, width=math.inf).removesuffix("...\n").strip()


def _describe_labels(found: SourceFindings) -> str:
    names = {"class": ("class", "classes"), "multi": ("label", "labels"), "value": ("number", "numbers")}
    return f"{found.outputs} {names[found.kind][found.outputs > 1]}"


def _choose_side(found: SourceFindings) -> int:
    """Chooses the shorter side that the network sees: that of small images themselves, else 32, 64, 128 or 224."""
    if found.common_size and max(found.common_size) <= 64:
        return min(found.common_size)
    # The largest side that half of the images have, so that few are enlarged.
    median = found.median_side
    return next((side for side in (224, 128, 64, 32) if median >= side), 32)


def _choose_family(side: int) -> str:
    return "small" if side < 24 else "cifar" if side <= 64 else "resnet"


def _choose_batch(found: SourceFindings) -> int:
    side = _choose_side(found)
    largest = {"small": 512, "cifar": 1024, "resnet": 256}[_choose_family(side)]
    # At least 25 steps per epoch, unless that needs a batch below 32: with fewer steps an epoch trains little.
    return int(max(32, min(largest, 2 ** int(np.log2(max(1, found.samples / 25))))))


def _explain_batch(found: SourceFindings) -> str:
    return (
        "large enough to keep the device busy, small enough for 25 steps an epoch"
        if found.samples > 800
        else "few images"
    )


def _choose_epochs(found: SourceFindings, batch: int) -> int:
    steps = {"small": 1200, "cifar": 1000, "resnet": 4000}[_choose_family(_choose_side(found))]
    return int(np.clip(round(steps * batch / found.samples), 10, 60))


def _format_size(found: SourceFindings, side: int) -> list[str]:
    if found.common_size and max(found.common_size) <= 64:
        return []
    why = f"half the images have a shorter side of at least {found.median_side} pixels"
    return [f"  size: {side}  # the largest centred square is resized to this; {why}"]


def _format_augment(found: SourceFindings, side: int) -> list[str]:
    # A sixteenth of the side is 2 pixels of 32.
    shift = max(1, side // 16)
    flip = "false  # gray images are often signs or writing, where a mirror image means something else"
    if not found.gray:
        flip = "true  # a mirrored photograph shows the same thing; set false for text, signs or directions"
    return [
        "augment:",
        f"  flip: {flip}",
        f"  translate: {shift}  # pixels; an object a little to the side is the same object",
    ]


def _format_model(found: SourceFindings, side: int) -> list[str]:
    factory, why = {
        "small": ("headway.model:small_net", "for images of 8 to 23 pixels"),
        "cifar": (
            "headway.model:cifar_net",
            "for images of 24 to 64 pixels; its first layer is computed from the images",
        ),
        "resnet": ("headway.model:resnet18", "for photographs; resnet50 is better and three times as slow"),
    }[_choose_family(side)]
    lines = ["model:", f"  factory: {factory}  # {why}"]
    if _choose_family(side) == "resnet":
        lines.append("  zero_init: true  # each residual block begins as the identity, which steadies the first epochs")
    return lines


def _format_optimizer(found: SourceFindings, side: int, batch: int) -> list[str]:
    regression = found.kind == "value"
    smoothing = ["task:", "  args: {label_smoothing: 0.1}  # keeps the network from being too sure", ""]
    head = smoothing if found.kind == "class" else []
    # cifar_net trains at a large rate that rises and falls, with larger steps for the biases of batch norm.
    if _choose_family(side) == "cifar" and not regression:
        lr = round(1.5 * batch / 1024, 3)
        return [
            *head,
            "optimizer:",
            "  name: nag",
            f"  lr: {lr}  # 1.5 for a batch of 1,024, in proportion to the batch",
            "  momentum: 0.85",
            "  weight_decay: 0.0013",
            "  groups:",
            "    - {match: 'norm.*bias', lr_scale: 64, weight_decay: 0.00002}  # biases of batch norm want large steps",
            "    - {match: '.*'}",
            "schedule: {name: triangular, start: 0.2, peak: 0.23, end: 0.07}",
        ]
    # 0.1 for a batch of 128, as usual for residual networks; for numbers a twentieth of it.
    lr = round(min(0.4, 0.1 * batch / 128) * (0.05 if regression else 1), 4)
    return [
        *head,
        "optimizer:",
        "  name: nag",
        f"  lr: {lr}  # in proportion to the batch",
        "  momentum: 0.9",
        "  weight_decay: 0.0005",
        *([] if regression else ["  clip_norm: 5.0  # a bad batch early on cannot throw the run off"]),
        "  groups:",
        "    - {match: '(bn|norm|downsample\\.1).*|bias$', weight_decay: 0}  # no decay on biases and batch norm",
        "    - {match: '.*'}",
        "schedule: {name: cosine, warmup_epochs: 1}",
    ]
