"""The part of `headway init` for a few hundred photographs: fine-tuning where pretrained networks can be had."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

if TYPE_CHECKING:
    from headway.setup.propose import SourceFindings

FEW_SAMPLES = 2000
"""Most photographs that count as few: a network that begins at random learns so many by heart."""

# On 360 images of CIFAR-10, 220 steps of fine-tuning gave 84.6 % and 110 gave 83.4 %. From random numbers, 880 steps
# gave 79.7 % and 440 gave 78.1 % (docs/finetune.md).
FINE_TUNING_STEPS = 250
SCRATCH_STEPS = 800

# An epoch takes a third of the time of one with 224 pixels.
SCRATCH_SIDE = 128


@final
@dataclass(frozen=True, kw_only=True)
class FewPhotographs:
    """Lines of a proposed recipe, by part, and the length of the run."""

    size: list[str]
    augment: list[str]
    model: list[str]
    optimizer: list[str]
    batch: int
    epochs: int
    explain_epochs: str


def propose_for_few(found: SourceFindings, side: int) -> FewPhotographs | None:
    """Proposes parts of a recipe for a few photographs; None if there are many, or the images are small.

    Args:
        side: shorter side that a network sees if there are many of them.
    """
    if found.samples > FEW_SAMPLES or side < SCRATCH_SIDE:
        return None
    library = find_library()
    return _propose_fine_tuning(found, library) if library else _propose_scratch(found)


def find_library() -> str:
    """Returns the name of an installed library with pretrained networks; empty if there is none."""
    # Found, not imported: an import takes seconds. timm needs torchvision.
    for name in ("timm", "torchvision"):
        if all(importlib.util.find_spec(one) is not None for one in {name, "torchvision"}):
            return name
    return ""


def _propose_fine_tuning(found: SourceFindings, library: str) -> FewPhotographs:
    count = f"{found.samples:,} photographs"
    factory, args, source = {
        "timm": ("timm:create_model", "{model_name: resnet18, pretrained: true}", "timm.list_models(pretrained=True)"),
        "torchvision": ("torchvision.models:resnet18", "{weights: IMAGENET1K_V1}", "torchvision's page of models"),
    }[library]
    batch, epochs = 32, _choose_epochs(found, 32, FINE_TUNING_STEPS, 10, 30)
    return FewPhotographs(
        size=[
            "  size: 224  # that of the pretrained network",
            "  crop: {name: random, scale: [0.35, 1.0]}  # another part of each photograph in every epoch",
        ],
        augment=_format_flip(),
        model=[
            f"# {count} are too few to learn from what photographs look like, so a network that has seen ImageNet's",
            f"# 1.3 million is fine-tuned. {library} fetches the weights (45 MB) when training begins, and keeps them.",
            "# Mean, std and centre crop are those of the weights, as the run says.",
            "model:",
            f"  factory: {factory}",
            f"  args: {args}  # others: {source}",
        ],
        optimizer=[
            *format_smoothing(found),
            "optimizer:",
            "  name: adamw",
            f"  lr: {0.0001 if found.kind == 'value' else 0.0005}  # small: the weights are good already",
            "  weight_decay: 0.05",
            "  no_decay: true  # no decay on biases and batch norm",
            "  layer_decay: 0.75  # the first layers hold what all photographs have in common, and change least",
            "  clip_norm: 5.0  # the new last layer begins with large gradients",
            "schedule: {name: cosine, warmup_epochs: 1}",
        ],
        batch=batch,
        epochs=epochs,
        explain_epochs="a pretrained network needs few; more of them learn the photographs by heart",
    )


def _propose_scratch(found: SourceFindings) -> FewPhotographs:
    batch, epochs = 32, _choose_epochs(found, 32, SCRATCH_STEPS, 20, 60)
    lr = 0.025 * (0.05 if found.kind == "value" else 1)
    return FewPhotographs(
        size=[
            f"  size: {SCRATCH_SIDE}  # an epoch takes a third of the time that one of 224 pixels takes",
            "  crop: {name: random, scale: [0.35, 1.0]}  # another part of each photograph in every epoch",
        ],
        augment=_format_flip(),
        model=[
            f"# {found.samples:,} photographs are few for a network that begins at random. Fine-tuning would be far",
            "# better: install timm and torchvision beside your torch (docs/tutorial.md, Fine-tune, says how), and run",
            "# headway init again; or set model.weights to the weights of a run on more photographs.",
            "model:",
            "  factory: headway.model:resnet18  # the smallest for photographs; a larger one needs more of them",
            "  zero_init: true  # each residual block begins as the identity, which steadies the first epochs",
        ],
        optimizer=[
            *format_smoothing(found),
            "optimizer:",
            "  name: nag",
            f"  lr: {lr:g}  # 0.1 for a batch of 128, in proportion to the batch",
            "  momentum: 0.9",
            "  weight_decay: 0.0005",
            *([] if found.kind == "value" else ["  clip_norm: 5.0  # a bad batch early on cannot throw the run off"]),
            "  groups:",
            "    - {match: '(bn|norm|downsample\\.1).*|bias$', weight_decay: 0}  # no decay on biases and batch norm",
            "    - {match: '.*'}",
            "schedule: {name: cosine, warmup_epochs: 2}",
        ],
        batch=batch,
        epochs=epochs,
        explain_epochs="random crops show new parts of few photographs for longer than the photographs themselves",
    )


def _format_flip() -> list[str]:
    why = "a mirrored photograph shows the same thing; set false for text, signs or directions"
    return ["augment:", f"  flip: true  # {why}"]


def format_smoothing(found: SourceFindings) -> list[str]:
    """Returns the part `task` with label smoothing; nothing if the labels are not classes."""
    if found.kind != "class":
        return []
    return ["task:", "  args: {label_smoothing: 0.1}  # keeps the network from being too sure", ""]


def _choose_epochs(found: SourceFindings, batch: int, steps: int, fewest: int, most: int) -> int:
    # Steps decide how far a network gets. The bounds keep sets of a few dozen, or nearly 2,000, images reasonable.
    return int(np.clip(round(steps * batch / found.samples), fewest, most))
