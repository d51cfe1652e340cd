"""The random generators of torch, numpy and Python as tensors of a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headway.core.errors import CheckpointError
from headway.optim.states import describe

WORDS = 624
"""Of the state of a Mersenne twister."""


def random_state() -> dict[str, torch.Tensor]:
    """Returns the states of all random generators as tensors of a checkpoint."""
    _, words, place, has_gauss, gauss = np.random.get_state(legacy=True)
    _, state, spare = random.getstate()
    out = {
        "random/torch": torch.get_rng_state(),
        "random/numpy": torch.from_numpy(np.asarray(words).astype(np.int64)),
        "random/numpy_scalars": torch.tensor([float(place), float(has_gauss), float(gauss)], dtype=torch.float64),
        "random/python": torch.tensor(state, dtype=torch.int64),
        "random/python_spare": torch.tensor([] if spare is None else [spare], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out["random/cuda"] = torch.cuda.get_rng_state()
    return out


def expect_random_state(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Raises CheckpointError: there is no state of the generators, or one that they would read beyond the end of."""
    mine = random_state()
    for name, like in mine.items():
        if name == "random/cuda":  # not every checkpoint has it, see below
            continue
        if name not in tensors:
            raise CheckpointError(f"{name} is missing", where=where)
        value, spare = tensors[name], name == "random/python_spare"
        if value.dtype != like.dtype or (value.shape not in ((0,), (1,)) if spare else value.shape != like.shape):
            said, wanted = (describe(one.shape, one.dtype) for one in (value, like))
            raise CheckpointError(f"{name} is {said}, and should be {wanted}", where=where)
    # numpy looks at none of its numbers, and with a place above 624 reads what lies behind its words.
    place, has_gauss, _ = tensors["random/numpy_scalars"].tolist()
    places = {"random/numpy_scalars": place, "random/python": int(tensors["random/python"][-1])}
    for name, at in places.items():
        if not 0 <= at <= WORDS or at != int(at):
            raise CheckpointError(f"{name} has {at:g} as its place, not a whole number up to {WORDS}", where=where)
    words = {"random/numpy": tensors["random/numpy"], "random/python": tensors["random/python"]}
    for name, value in words.items():
        if int(value.min()) < 0 or int(value.max()) >= 1 << 32:
            raise CheckpointError(f"{name} has numbers that are no words of 32 bits", where=where)
    if has_gauss not in (0, 1):
        raise CheckpointError("random/numpy_scalars has neither 0 nor 1 as its second number", where=where)
    _expect_accepted(tensors["random/torch"], torch, "random/torch is no state of torch's generator", where)
    if (cuda := tensors.get("random/cuda")) is None:  # of a run that was on a CPU
        return
    if cuda.dtype != torch.uint8 or cuda.dim() != 1:
        said = describe(cuda.shape, cuda.dtype)
        raise CheckpointError(f"random/cuda is {said}, and should be a row of uint8", where=where)
    # Which lengths and numbers are right is known to the device alone.
    if torch.cuda.is_available():
        _expect_accepted(cuda, torch.cuda, "random/cuda is no state of a CUDA device's generator", where)


def _expect_accepted(state: torch.Tensor, module: Any, what: str, where: str) -> None:
    """Lets a generator take a state and puts its own back. Raises CheckpointError: it takes no such state."""
    before = module.get_rng_state()
    try:
        module.set_rng_state(state)
    except RuntimeError:
        raise CheckpointError(what, where=where) from None
    finally:
        module.set_rng_state(before)


def set_random_state(tensors: Mapping[str, torch.Tensor]) -> None:
    """Puts all random generators into saved states; call `expect_random_state` first."""
    torch.set_rng_state(tensors["random/torch"])
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])
    place, has_gauss, gauss = tensors["random/numpy_scalars"].tolist()
    words = tensors["random/numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(place), int(has_gauss), gauss))
    spare = tensors["random/python_spare"].tolist()
    random.setstate((3, tuple(tensors["random/python"].tolist()), spare[0] if spare else None))
