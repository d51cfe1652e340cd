"""Percentiles of module outputs, from a sample of one forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from headway.core.errors import RecipeError, list_similar

# 15, 50 and 85 are those of Ioffe and Szegedy 2015 (arXiv 1502.03167), figure 1; the others show the tails.
PERCENTILES = (2, 15, 50, 85, 98)
COLUMNS = tuple(f"p{percent}" for percent in PERCENTILES)
# Values drawn from a tensor; the share of values below p15 is then off by 0.4 points (one standard error).
MAX_SAMPLED_VALUES = 8192
# A report with more modules would be unreadable.
MAX_MODULES = 32
# Marks the input of a batch norm, behind its name.
INPUT_SUFFIX = " (before)"
RECIPE_KEY = "observe.activations"


@final
class ActivationPercentiles:
    """Measures the outputs of modules whose names match, and the inputs of batch norms among them.

    `arm` registers forward hooks that remove themselves after one call. They draw MAX_SAMPLED_VALUES values at indices
    that depend on the tensor's shape alone. There is no host-device sync before `read`.

    Args:
        model: The network.
        patterns: Regular expressions (re.fullmatch) on module names.

    Attributes:
        names: Names of the measured outputs and inputs.

    Raises:
        RecipeError: A pattern matches no module, or together they match too many.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        modules = {name: module for name, module in model.named_modules() if name}
        chosen: dict[str, nn.Module] = {}
        for pattern in patterns:
            matched = {name: module for name, module in modules.items() if re.fullmatch(pattern, name)}
            if not matched:
                similar_names = list_similar(pattern, modules)
                fix = f"For example: {similar_names}." if modules else "The network has no modules: remove it."
                raise RecipeError(f"{pattern!r} matches no module of the network", where=RECIPE_KEY, fix=fix)
            chosen |= matched
        if len(chosen) > MAX_MODULES:
            what = f"the patterns match {len(chosen)} modules; the most is {MAX_MODULES}"
            raise RecipeError(what, where=RECIPE_KEY, fix="Name fewer, for example the batch norms of the first block.")
        # Order of the network, whatever the order of the patterns.
        self._modules = [(name, module) for name, module in modules.items() if name in chosen]
        names: list[str] = []
        for name, module in self._modules:
            names += [name + INPUT_SUFFIX, name] if isinstance(module, _BatchNorm) else [name]
        self.names = tuple(names)
        self._sample_indices: dict[tuple[torch.Size, torch.device], list[Tensor]] = {}
        self._percentiles: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    def arm(self) -> None:
        """Prepares to measure the next forward pass."""
        self.disarm()
        self._percentiles = {}
        self._handles = [
            module.register_forward_hook(self._build_hook(index)) for index, (_, module) in enumerate(self._modules)
        ]

    def disarm(self) -> None:
        """Removes the hooks of modules that were not called."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def read(self) -> NDArray[np.float32] | None:
        """Returns the percentiles of the measured pass, [names, PERCENTILES]; None if there was no pass.

        They are NaN for a module that was not called, or whose output is not a floating-point tensor. A second call
        returns None. This is a host-device sync.
        """
        self.disarm()
        percentiles, self._percentiles = self._percentiles, {}
        if not percentiles:
            return None
        # One copy, and so one sync, for all modules.
        values = torch.stack(list(percentiles.values())).cpu().numpy()
        table = np.full((len(self.names), len(PERCENTILES)), np.nan, np.float32)
        table[[self.names.index(name) for name in percentiles]] = values
        return table

    def _build_hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        name, module = self._modules[index]

        def measure(_: nn.Module, inputs: Any, output: Any) -> None:
            # A module that is called several times is measured at its first call.
            self._handles[index].remove()
            if isinstance(module, _BatchNorm):
                self._measure(name + INPUT_SUFFIX, inputs[0])
            self._measure(name, output)

        return measure

    @torch.no_grad()
    def _measure(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return
        sample = (
            value.detach()[tuple(self._draw_indices(value))].float() if value.ndim else value.detach().float().view(1)
        )
        sample = sample.sort().values
        last_index = len(sample) - 1
        self._percentiles[name] = sample[[round(percent / 100 * last_index) for percent in PERCENTILES]]

    def _draw_indices(self, value: Tensor) -> list[Tensor]:
        """Returns an index tensor per dimension, drawn once per shape, so later passes copy nothing to the device."""
        key = (value.shape, value.device)
        if key not in self._sample_indices:
            generator = torch.Generator().manual_seed(0)
            if value.numel() <= MAX_SAMPLED_VALUES:
                flat_indices = torch.arange(value.numel())
            else:
                flat_indices = torch.randint(value.numel(), (MAX_SAMPLED_VALUES,), generator=generator)
            indices = torch.unravel_index(flat_indices, value.shape)
            self._sample_indices[key] = [index.to(value.device) for index in indices]
        return self._sample_indices[key]
