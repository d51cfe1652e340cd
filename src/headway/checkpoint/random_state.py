"""States of the random generators of torch, numpy and Python as tensors of a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headway.core.errors import CheckpointError
from headway.optim.state_check import describe_tensor

# Words in the state of a Mersenne Twister.
WORDS = 624


def read_random_state() -> dict[str, torch.Tensor]:
    """Returns the states of all random generators as tensors of a checkpoint."""
    _, words, place, has_gauss, gauss = np.random.get_state(legacy=True)
    # `random.gauss` draws two numbers at a time, and keeps the spare one.
    _, state, spare = random.getstate()
    out = {
        "random/torch": torch.get_rng_state(),
        "random/numpy": torch.from_numpy(np.asarray(words).astype(np.int64)),
        "random/numpy_scalars": torch.tensor([float(place), float(has_gauss), float(gauss)], dtype=torch.float64),
        "random/python": torch.tensor(state, dtype=torch.int64),
        "random/python_spare": torch.tensor([] if spare is None else [spare], dtype=torch.float64),
    }
    # Reading the state would initialise CUDA in a process that does not use it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out["random/cuda"] = torch.cuda.get_rng_state()
    return out


def check_random_state(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Checks the states before they are restored. Raises CheckpointError if one is missing or not valid."""
    mine = read_random_state()
    for name, like in mine.items():
        # A run that was on a CPU has no such state; checked below.
        if name == "random/cuda":
            continue
        if name not in tensors:
            raise CheckpointError(f"{name} is missing", where=where)
        value, spare = tensors[name], name == "random/python_spare"
        if value.dtype != like.dtype or (value.shape not in ((0,), (1,)) if spare else value.shape != like.shape):
            said, wanted = (describe_tensor(one.shape, one.dtype) for one in (value, like))
            raise CheckpointError(f"{name} is {said}, and should be {wanted}", where=where)
    # numpy does not check its state: a position above 624 makes it read memory behind the words.
    place, has_gauss, _ = tensors["random/numpy_scalars"].tolist()
    places = {"random/numpy_scalars": place, "random/python": int(tensors["random/python"][-1])}
    for name, at in places.items():
        if not 0 <= at <= WORDS or at != int(at):
            raise CheckpointError(f"{name} has {at:g} as its place, not a whole number up to {WORDS}", where=where)
    words = {"random/numpy": tensors["random/numpy"], "random/python": tensors["random/python"]}
    for name, value in words.items():
        if int(value.min()) < 0 or int(value.max()) >= 1 << 32:
            raise CheckpointError(f"{name} has numbers that are not words of 32 bits", where=where)
    if has_gauss not in (0, 1):
        raise CheckpointError("random/numpy_scalars has neither 0 nor 1 as its second number", where=where)
    _expect_accepted(tensors["random/torch"], torch, "random/torch is not a state of torch's generator", where)
    if (cuda := tensors.get("random/cuda")) is None:
        return
    if cuda.dtype != torch.uint8 or cuda.dim() != 1:
        said = describe_tensor(cuda.shape, cuda.dtype)
        raise CheckpointError(f"random/cuda is {said}, and should be a row of uint8", where=where)
    # Only the device knows which lengths and numbers are valid.
    if torch.cuda.is_available():
        _expect_accepted(cuda, torch.cuda, "random/cuda is not a state of a CUDA device's generator", where)


def _expect_accepted(state: torch.Tensor, module: Any, what: str, where: str) -> None:
    """Sets a generator to a state and back again. Raises CheckpointError if the generator refuses the state."""
    before = module.get_rng_state()
    try:
        module.set_rng_state(state)
    except RuntimeError:
        raise CheckpointError(what, where=where) from None
    finally:
        module.set_rng_state(before)


def restore_random_state(tensors: Mapping[str, torch.Tensor]) -> None:
    """Sets all random generators to saved states. Call `check_random_state` first."""
    torch.set_rng_state(tensors["random/torch"])
    # A run may continue on a CPU, which has no use for this state.
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])
    place, has_gauss, gauss = tensors["random/numpy_scalars"].tolist()
    words = tensors["random/numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(place), int(has_gauss), gauss))
    spare = tensors["random/python_spare"].tolist()
    random.setstate((3, tuple(tensors["random/python"].tolist()), spare[0] if spare else None))
