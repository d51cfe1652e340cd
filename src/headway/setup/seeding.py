"""Seeds, saves and restores the global random generators of a run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seeds the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    # numpy takes seeds of 32 bits.
    np.random.seed(seed % 2**32)
    random.seed(seed)


@final
@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The states of the global generators of torch, numpy and Python, so that runs in one process draw their own."""

    of_torch: list[tuple[torch.Generator, torch.Tensor]]
    of_numpy: Any
    of_python: Any

    @staticmethod
    def read(device: torch.device) -> GeneratorStates:
        """Reads the states now. Args: device: its generator is read too, if it is a GPU."""
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        states = [(generator, generator.get_state()) for generator in generators]
        return GeneratorStates(states, np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Sets the generators to these states."""
        for generator, state in self.of_torch:
            generator.set_state(state)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_python)
