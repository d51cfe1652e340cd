"""Seeds the global random generators of Python, NumPy and torch for one sample."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_generators(key: int) -> None:
    """Seeds the generators that the user's code draws from, so that it draws the same numbers for the same key.

    Args:
        key: 64 bits, a sample's key.
    """
    random.seed(key)
    # NumPy takes 32 bits. The upper half is unrelated to the lower one, from which torch's numbers begin.
    np.random.seed(key >> 32)
    # `torch.manual_seed` also seeds every GPU, which takes 100 us in a process that uses none.
    torch.default_generator.manual_seed(key)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restores the generators at the end of its block: for samples that are loaded inside the training process."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def read_states() -> tuple[object, ...]:
    """Returns the states of the generators, to compare them."""
    return random.getstate(), pickle.dumps(np.random.get_state()), bytes(torch.get_rng_state().numpy())
