"""States of the random generators of torch, numpy and Python as tensors of a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headway.core.errors import CheckpointError
from headway.optim.state_check import describe_tensor

# Length of the state of a Mersenne Twister.
STATE_WORDS = 624


def read_random_state() -> dict[str, torch.Tensor]:
    """Returns the states of all random generators as tensors of a checkpoint."""
    _, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    # `random.gauss` draws two numbers at a time, and keeps the spare one.
    _, python_words, spare = random.getstate()
    tensors = {
        "random/torch": torch.get_rng_state(),
        "random/numpy": torch.from_numpy(np.asarray(words).astype(np.int64)),
        "random/numpy_scalars": torch.tensor([float(position), float(has_gauss), float(gauss)], dtype=torch.float64),
        "random/python": torch.tensor(python_words, dtype=torch.int64),
        "random/python_spare": torch.tensor([] if spare is None else [spare], dtype=torch.float64),
    }
    # Reading the state would initialise CUDA in a process that does not use it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    return tensors


def check_random_state(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Checks the states before they are restored. Raises CheckpointError if one is missing or not valid."""
    for name, like in read_random_state().items():
        # A run that was on a CPU has no such state; checked below.
        if name == "random/cuda":
            continue
        if name not in tensors:
            raise CheckpointError(f"{name} is missing", where=where)
        value = tensors[name]
        shapes = [(0,), (1,)] if name == "random/python_spare" else [like.shape]
        if value.dtype != like.dtype or value.shape not in shapes:
            actual, expected = (describe_tensor(tensor.shape, tensor.dtype) for tensor in (value, like))
            raise CheckpointError(f"{name} is {actual}, and should be {expected}", where=where)
    # numpy does not check its state: a position above 624 makes it read memory behind the words.
    numpy_position, has_gauss, _ = tensors["random/numpy_scalars"].tolist()
    positions = {"random/numpy_scalars": numpy_position, "random/python": int(tensors["random/python"][-1])}
    for name, position in positions.items():
        if not 0 <= position <= STATE_WORDS or position != int(position):
            what = f"{name} has {position:g} as its place, not a whole number up to {STATE_WORDS}"
            raise CheckpointError(what, where=where)
    for name in ("random/numpy", "random/python"):
        if int(tensors[name].min()) < 0 or int(tensors[name].max()) >= 1 << 32:
            raise CheckpointError(f"{name} has numbers that are not words of 32 bits", where=where)
    if has_gauss not in (0, 1):
        raise CheckpointError("random/numpy_scalars has neither 0 nor 1 as its second number", where=where)
    _expect_accepted(tensors["random/torch"], torch, "random/torch is not a state of torch's generator", where)
    if (cuda := tensors.get("random/cuda")) is None:
        return
    if cuda.dtype != torch.uint8 or cuda.dim() != 1:
        actual = describe_tensor(cuda.shape, cuda.dtype)
        raise CheckpointError(f"random/cuda is {actual}, and should be a row of uint8", where=where)
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
    """Sets the global generators of torch, numpy and Python to saved states. Call `check_random_state` first."""
    torch.set_rng_state(tensors["random/torch"])
    # A run may continue on a CPU, which has no use for this state.
    if "random/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random/cuda"])
    position, has_gauss, gauss = tensors["random/numpy_scalars"].tolist()
    words = tensors["random/numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))
    spare = tensors["random/python_spare"].tolist()
    random.setstate((3, tuple(tensors["random/python"].tolist()), spare[0] if spare else None))
