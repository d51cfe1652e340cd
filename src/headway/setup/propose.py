"""`headway init`: inspects images and proposes a recipe that works, with the reason for each choice as a comment."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from headway.core.errors import DataError, UsageError
from headway.core.text_format import pluralise
from headway.data import opening
from headway.data.columns import COLUMNS_FILE, LabelKind
from headway.data.dataset import Dataset
from headway.data.formats.pack_source import PackSource
from headway.data.opening import open_split
from headway.data.pack_mode import open_header
from headway.data.reference import GRAY_MODES
from headway.data.set_warnings import NO_EVALUATION, describe_shared_images, list_class_warnings
from headway.setup.few_photographs import FEW_SAMPLES, SCRATCH_SIDE, format_smoothing, propose_for_few

MAX_INSPECTED_IMAGES = 256
"""Largest number of image files whose headers are read; they stand for the sizes of all images."""

MANY_SAMPLES = 40_000
"""Images from which a batch of 2,048 makes about 20 steps an epoch."""

_HOLD_OUT = f"{NO_EVALUATION} Pack the images again with --split 0.1, or set data.eval in the recipe."


@dataclass(frozen=True, kw_only=True)
class SourceFindings:
    """Facts about a source of images.

    Attributes:
        samples: number of training images.
        held_out: an evaluation set is there.
        packed: the images are packed.
        kind: kind of the labels.
        outputs: number of classes, labels or numbers.
        sizes: (width, height) of the images inspected.
        gray: every image inspected is gray.
        warnings: sentences about data that can be trained on, and probably should not be as they are.
    """

    samples: int
    held_out: bool
    packed: bool
    kind: LabelKind
    outputs: int
    sizes: Sequence[tuple[int, int]]
    gray: bool
    warnings: tuple[str, ...] = ()

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
    packed_folder = next((folder for folder in (src, src / "train") if (folder / COLUMNS_FILE).is_file()), None)
    if packed_folder is not None:
        dataset = opening.open(packed_folder)
        description = dataset.description
        held_out = src / "eval" if (src / "eval" / COLUMNS_FILE).is_file() else None
        indices = np.linspace(0, len(dataset) - 1, min(MAX_INSPECTED_IMAGES, len(dataset))).astype(int)
        sizes = (
            [description.common_size]
            if description.common_size
            else list(zip(dataset.width[indices], dataset.height[indices], strict=True))
        )
        return SourceFindings(
            samples=len(dataset),
            held_out=held_out is not None,
            packed=True,
            kind=description.label_kind,
            outputs=len(description.classes) or 1,
            sizes=[(int(width), int(height)) for width, height in sizes],
            gray=description.channels == 1,
            warnings=(
                *list_class_warnings(description.label_kind, description.classes),
                *([_HOLD_OUT] if held_out is None else _list_shared(dataset, held_out)),
            ),
        )
    train, eval_source = open_split(src)
    sizes, modes = _inspect_files(train)
    return SourceFindings(
        samples=len(train),
        held_out=eval_source is not None,
        packed=False,
        kind=train.label_kind,
        outputs=len(train.classes) or 1,
        sizes=sizes,
        gray=all(mode in GRAY_MODES for mode in modes),
        # `headway pack` comes next: it compares the images of the two sets, or splits one off.
        warnings=tuple(list_class_warnings(train.label_kind, train.classes)),
    )


def _list_shared(dataset: Dataset, held_out: Path) -> list[str]:
    with closing(opening.open(held_out)) as evaluation:
        shared = describe_shared_images(dataset, evaluation)
    return [shared] if shared else []


def _inspect_files(source: PackSource) -> tuple[list[tuple[int, int]], Counter[str]]:
    """Returns the (width, height) of up to 256 evenly spaced images, and how often each Pillow mode occurs."""
    sizes = []
    modes = Counter[str]()
    # Evenly spaced, as neighbouring images are often alike.
    indices = np.linspace(0, len(source) - 1, min(MAX_INSPECTED_IMAGES, len(source))).astype(int)
    with warnings.catch_warnings():
        # Pillow warns of images with many pixels, which `headway pack` refuses by name.
        warnings.filterwarnings("ignore", module="PIL")
        for index in np.unique(indices):
            try:
                with open_header(source.images.read(int(index))) as image:
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
    """Inspects images and writes a recipe that fits them.

    Args:
        src: image folder, list of images, or packed folder.
        out: file to write; None: NAME.yaml in the current folder.
        overwrite: replace an existing file.

    Returns:
        The recipe's path, the facts about `src`, and the folder to pack the data into (`src` if it is packed already).

    Raises:
        UsageError: the recipe exists and `overwrite` is off, or its folder does not exist.
        HeadwayError: `src` is none of these, or its images cannot be opened.
    """
    findings = inspect_source(src)
    # Not resolved, so that a link gives its own name to the recipe.
    path = Path(os.path.abspath(src))
    name = (path.name if path.is_dir() else path.stem).removesuffix(".packed").lstrip(".") or "images"
    out = out or Path(f"{name}.yaml")
    if out.exists() and not overwrite:
        raise UsageError("this recipe exists", where=str(out), fix="Name another with --out, or pass --overwrite.")
    packed = src if findings.packed else out.parent / f"{name}.packed"
    if not out.parent.is_dir():
        raise UsageError("there is no such folder", where=str(out.parent), fix="Make it, or name another with --out.")
    # Paths in a recipe are relative to its folder.
    relative = Path(os.path.relpath(packed.resolve(), out.resolve().parent))
    out.write_text(format_recipe(findings, name, relative), encoding="utf-8")
    return out, findings, packed


def format_recipe(findings: SourceFindings, name: str, packed: Path) -> str:
    """Returns a proposed recipe as YAML, with the reason for every choice as a comment.

    Args:
        name: name of the run.
        packed: packed folder of the data, relative to the recipe.
    """
    side, batch = _choose_side(findings), _choose_batch(findings)
    epochs = _choose_epochs(findings, batch)
    why_batch, why_epochs = _explain_batch(findings), "fewer are quicker, more may be better"
    parts = [
        _format_size(findings, side),
        _format_augment(findings, side),
        _format_model(side),
        _format_optimizer(findings, side, batch),
    ]
    if (few := propose_for_few(findings, side)) is not None:
        parts = [few.size, few.augment, few.model, few.optimizer]
        batch, epochs, why_epochs = few.batch, few.epochs, few.explain_epochs
        why_batch = "few photographs: a small batch makes more steps of them"
    elif findings.samples <= FEW_SAMPLES and side < SCRATCH_SIDE:
        parts[2] = [
            f"# {findings.samples:,} images are few. At {side} pixels they do not suit pretrained networks;",
            "# to fine-tune from a run of yours on other images: docs/finetune.md.",
            *parts[2],
        ]
    train_folder = packed if findings.packed and not findings.held_out else packed / "train"
    # `headway pack` splits off an evaluation set, unless the data are packed already.
    eval_line = f"  eval: {_quote_yaml(str(packed / 'eval'))}\n" if findings.held_out or not findings.packed else ""
    colours = "gray" if findings.gray else "colour"
    sizes = f"all {findings.sizes[0][0]} x {findings.sizes[0][1]}" if findings.common_size else "of different sizes"
    lines = [
        f"# Proposed by headway init: {findings.samples:,} images, {_describe_labels(findings)}, {colours}, {sizes}.",
        "# Every line may be changed here, or for one run on the command line: headway train RECIPE key=value",
        f"name: {_quote_yaml(name)}",
        "seed: 1",
        "",
        "data:",
        f"  train: {_quote_yaml(str(train_folder))}",
        *([eval_line.rstrip()] if eval_line else []),
        *(line for part in parts for line in (*part, "")),
        *_format_batch_advice(findings),
        f"batch: {batch}  # {why_batch}",
        f"epochs: {epochs}  # up to {pluralise(findings.samples // batch, 'step')} each; {why_epochs}",
        _format_precision(findings),
        "channels_last: true  # faster for convolutions",
    ]
    return "\n".join(lines) + "\n"


def _format_batch_advice(findings: SourceFindings) -> list[str]:
    # Below, the batch above has no more than 25 steps an epoch already.
    if findings.samples < MANY_SAMPLES or findings.kind == "value":
        return []
    return [
        "# Many GPUs want a larger batch, which costs accuracy in as many epochs; less with Muon or SOAP. How far a",
        "# batch can grow: docs/large-batches.md; the settings: recipes/large-batch.yaml.",
    ]


def _format_precision(findings: SourceFindings) -> str:
    if findings.kind == "value":
        return "precision: fp32  # bf16 keeps 3 digits, too few for numbers"
    return "precision: auto  # bf16 where it is faster: measured at the start"


def _quote_yaml(text: str) -> str:
    """Returns a string as YAML, quoted if needed: a folder may be called 2024, 1e-3 or `no`."""
    # Letters first and slashes are safe as plain YAML; all else is quoted.
    quotes = None if text[:1].isalpha() or "/" in text else "'"
    return yaml.safe_dump(text, default_style=quotes, allow_unicode=True, width=math.inf).removesuffix("...\n").strip()


def _describe_labels(findings: SourceFindings) -> str:
    names = {"class": ("class", "classes"), "multi": ("label", "labels"), "value": ("number", "numbers")}
    return f"{findings.outputs} {names[findings.kind][findings.outputs > 1]}"


def _choose_side(findings: SourceFindings) -> int:
    """Returns the side of the network's input: the shorter side of small images, else 32, 64, 128 or 224 pixels."""
    if findings.common_size and max(findings.common_size) <= 64:
        return min(findings.common_size)
    # The largest side that half of the images have, so that few are enlarged.
    median_side = findings.median_side
    return next((side for side in (224, 128, 64, 32) if median_side >= side), 32)


def _choose_family(side: int) -> str:
    return "small" if side < 24 else "cifar" if side <= 64 else "resnet"


def _choose_batch(findings: SourceFindings) -> int:
    side = _choose_side(findings)
    max_batch = {"small": 512, "cifar": 1024, "resnet": 256}[_choose_family(side)]
    # At least 25 steps per epoch, unless that needs a batch below 32: with fewer steps an epoch trains little.
    return int(max(32, min(max_batch, 2 ** int(np.log2(max(1, findings.samples / 25))))))


def _explain_batch(findings: SourceFindings) -> str:
    return (
        "large enough to keep the device busy, small enough for 25 steps an epoch"
        if findings.samples > 800
        else "few images"
    )


def _choose_epochs(findings: SourceFindings, batch: int) -> int:
    total_steps = {"small": 1200, "cifar": 1000, "resnet": 4000}[_choose_family(_choose_side(findings))]
    return int(np.clip(round(total_steps * batch / findings.samples), 10, 60))


def _format_size(findings: SourceFindings, side: int) -> list[str]:
    if findings.common_size and max(findings.common_size) <= 64:
        return []
    reason = f"half the images have a shorter side of at least {findings.median_side} pixels"
    return [f"  size: {side}  # the largest centred square is resized to this; {reason}"]


def _format_augment(findings: SourceFindings, side: int) -> list[str]:
    # A sixteenth of the side is 2 pixels of 32.
    shift = max(1, side // 16)
    flip = "false  # gray images are often signs or writing, where a mirror image means something else"
    if not findings.gray:
        flip = "true  # a mirrored photograph shows the same thing; set false for text, signs or directions"
    return [
        "augment:",
        f"  flip: {flip}",
        f"  translate: {shift}  # pixels; an object a little to the side is the same object",
    ]


def _format_model(side: int) -> list[str]:
    factory, reason = {
        "small": ("headway.model:small_net", "for images of 8 to 23 pixels"),
        "cifar": (
            "headway.model:cifar_net",
            "for images of 24 to 64 pixels; its first layer is computed from the images",
        ),
        "resnet": ("headway.model:resnet18", "for photographs; resnet50 has 2.25 times the multiply-adds"),
    }[_choose_family(side)]
    lines = ["model:", f"  factory: {factory}  # {reason}"]
    if _choose_family(side) == "resnet":
        lines.append("  zero_init: true  # each residual block begins as the identity, which steadies the first epochs")
    return lines


def _format_optimizer(findings: SourceFindings, side: int, batch: int) -> list[str]:
    is_regression = findings.kind == "value"
    task_lines = format_smoothing(findings)
    # cifar_net trains at a large rate that rises and falls, with larger steps for the biases of batch norm.
    if _choose_family(side) == "cifar" and not is_regression:
        lr = round(1.5 * batch / 1024, 3)
        return [
            *task_lines,
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
    lr = round(min(0.4, 0.1 * batch / 128) * (0.05 if is_regression else 1), 4)
    return [
        *task_lines,
        "optimizer:",
        "  name: nag",
        f"  lr: {lr}  # in proportion to the batch",
        "  momentum: 0.9",
        "  weight_decay: 0.0005",
        *([] if is_regression else ["  clip_norm: 5.0  # a bad batch early on cannot throw the run off"]),
        "  groups:",
        "    - {match: '(bn|norm|downsample\\.1).*|bias$', weight_decay: 0}  # no decay on biases and batch norm",
        "    - {match: '.*'}",
        "schedule: {name: cosine, warmup_epochs: 1}",
    ]
