"""Seeds the global random generators of a run."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seeds the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    # numpy takes seeds of 32 bits.
    np.random.seed(seed % 2**32)
    random.seed(seed)
