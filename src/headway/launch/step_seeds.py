"""Seeds of a step, equal whenever it is made again."""

from __future__ import annotations

import random

import numpy as np
import torch

from headway.core.random_keys import GOLDEN, mix_int


def seed_step(seed: int, position: int, rank: int, device: torch.device) -> None:
    """Seeds the global generators of torch, numpy and Python for one step, from seed, position and rank."""
    # A step that is repeated, resumed or made by other ranks then needs no saved state of the generators.
    mixed_seed = mix_int(mix_int(mix_int(seed) + position) + (rank + 1) * GOLDEN)
    # Not torch.manual_seed: without CUDA, torch 2.13 appends a traceback to a list at each call, and leaks.
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    generator.manual_seed(mixed_seed & ((1 << 63) - 1))
    np.random.seed(mixed_seed & 0xFFFFFFFF)
    random.seed(mixed_seed)
