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
VALUES_PER_TENSOR = 8192
# A report with more modules would be unreadable.
MAX_MODULES = 32
# Marks the input of a batch norm, behind its name.
INPUT_SUFFIX = " (before)"
RECIPE_KEY = "observe.activations"


@final
class ActivationPercentiles:
    """Measures the outputs of modules whose names match, and the inputs of batch norms among them.

    `arm` registers forward hooks that remove themselves after one call. They draw VALUES_PER_TENSOR values at places
    that depend on the tensor's shape alone. There is no host-device sync before `read`.

    Args:
        patterns: Regular expressions (re.fullmatch) on module names.

    Attributes:
        names: Names of the measured outputs and inputs.

    Raises:
        RecipeError: A pattern matches no module, or together they match too many.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        modules = {name: one for name, one in model.named_modules() if name}
        chosen: dict[str, nn.Module] = {}
        for pattern in patterns:
            found = {name: one for name, one in modules.items() if re.fullmatch(pattern, name)}
            if not found:
                near = list_similar(pattern, modules)
                fix = f"For example: {near}." if near else "The network has no modules: remove it."
                raise RecipeError(f"{pattern!r} matches no module of the network", where=RECIPE_KEY, fix=fix)
            chosen |= found
        if len(chosen) > MAX_MODULES:
            what = f"the patterns match {len(chosen)} modules; the most is {MAX_MODULES}"
            raise RecipeError(what, where=RECIPE_KEY, fix="Name fewer, for example the batch norms of the first block.")
        # Order of the network, whatever the order of the patterns.
        self._modules = [(name, one) for name, one in modules.items() if name in chosen]
        names: list[str] = []
        for name, one in self._modules:
            names += [name + INPUT_SUFFIX, name] if isinstance(one, _BatchNorm) else [name]
        self.names = tuple(names)
        self._places: dict[tuple[torch.Size, torch.device], list[Tensor]] = {}
        self._found: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    def arm(self) -> None:
        """Prepares to measure the next forward pass."""
        self.disarm()
        self._found = {}
        self._handles = [
            one.register_forward_hook(self._build_hook(place)) for place, (_, one) in enumerate(self._modules)
        ]

    def disarm(self) -> None:
        """Removes the hooks of modules that were not called."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def read(self) -> NDArray[np.float32] | None:
        """Returns [names, percentiles] of the measured pass, once; None if there was no pass. Waits for the device.

        NaN for a module that was not called, or whose output is not a floating-point tensor.
        """
        self.disarm()
        found, self._found = self._found, {}
        if not found:
            return None
        # One copy for all modules: one host-device sync.
        values = torch.stack(list(found.values())).cpu().numpy()
        out = np.full((len(self.names), len(PERCENTILES)), np.nan, np.float32)
        out[[self.names.index(name) for name in found]] = values
        return out

    def _build_hook(self, place: int) -> Callable[[nn.Module, Any, Any], None]:
        name, module = self._modules[place]

        def look(_: nn.Module, given: Any, gave: Any) -> None:
            # A module that is called several times is measured at its first call.
            self._handles[place].remove()
            if isinstance(module, _BatchNorm):
                self._take(name + INPUT_SUFFIX, given[0])
            self._take(name, gave)

        return look

    @torch.no_grad()
    def _take(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return
        drawn = (
            value.detach()[tuple(self._draw_indices(value))].float() if value.ndim else value.detach().float().view(1)
        )
        drawn = drawn.sort().values
        last = len(drawn) - 1
        self._found[name] = drawn[[round(percent / 100 * last) for percent in PERCENTILES]]

    def _draw_indices(self, value: Tensor) -> list[Tensor]:
        """Draws an index tensor per dimension; once per shape, so that later passes cost no copy to the device."""
        key = (value.shape, value.device)
        if key not in self._places:
            make = torch.Generator().manual_seed(0)
            if value.numel() <= VALUES_PER_TENSOR:
                flat = torch.arange(value.numel())
            else:
                flat = torch.randint(value.numel(), (VALUES_PER_TENSOR,), generator=make)
            along = torch.unravel_index(flat, value.shape)
            self._places[key] = [one.to(value.device) for one in along]
        return self._places[key]
