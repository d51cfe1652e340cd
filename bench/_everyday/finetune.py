"""Fine-tuning against training from scratch, on 360 images of two classes of CIFAR-10.

A network is trained on the other eight classes, on a part of their images. Then each seed is a pair on the same 360
images, 180 of each class, and the same 2,000 test images: `recipes/finetune.yaml` from those weights, and the same
network from random numbers by `recipes/cifar10.yaml`, which suits it, with batches of 32 and more epochs.

finetune_vs_scratch_points   accuracy of fine-tuning less that of scratch, in points; mean of the pairs
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bench._accuracy.cifar import _source
from bench._arms import ROOT
from bench._common import Claim, parser, report
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.data.pack import pack
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.train.progress import SilentDisplay
from headway.train.runs import compute_interval
from headway.train.trainer import Trainer

TWO = ("deer", "horse")
"""Classes that the first network never sees."""


@dataclass(frozen=True)
class Sizes:
    """How much is trained: what a figure is quoted of, or just enough to show that it works."""

    pretraining: int = 1500
    held_out: int = 1000
    few: int = 180
    widths: str = "[24, 64, 64]"
    pretraining_epochs: float = 5
    finetuning_epochs: float = 20
    scratch_epochs: float = 40
    seeds: int = 3
