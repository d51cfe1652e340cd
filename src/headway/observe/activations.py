"""Percentiles of what modules give, from a sample of one forward pass."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from headway.core.errors import RecipeError

PERCENTILES = (2, 15, 50, 85, 98)
"""15, 50 and 85 are those of Ioffe and Szegedy 2015 (arXiv 1502.03167), figure 1; the others show the tails."""
COLUMNS = tuple(f"p{percent}" for percent in PERCENTILES)
VALUES_PER_TENSOR = 8192
"""Numbers that are drawn of a tensor; the fraction below its p-th percentile is then off by 0.4 points at p = 15."""
MAX_MODULES = 32
"""Modules: more make no picture."""
INPUT_SUFFIX = " (before)"
"""After the name of a batch norm: what it is given."""
RECIPE_KEY = "observe.activations"


@final
class ActivationPercentiles:
    """Of the modules whose names match; of a batch norm what it is given, too.

    `arm` hangs hooks on the modules, which look at the next call of each and take themselves off. They draw SAMPLES
    numbers at places that depend on the tensor's shape alone. Nothing waits for the device before `read`.

    Args:
        patterns: regular expressions (re.fullmatch).

    Attributes:
        names: of what is watched.

    Raises:
        RecipeError: a pattern matches no module, or all match too many.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        modules = {name: one for name, one in model.named_modules() if name}
        chosen: dict[str, nn.Module] = {}
        for pattern in patterns:
            found = {name: one for name, one in modules.items() if re.fullmatch(pattern, name)}
            if not found:
                near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.3) or list(modules)[:3]
                fix = f"Modules are for example: {', '.join(near)}." if near else "The network has none: remove it."
                raise RecipeError(f"{pattern!r} matches no module of the network", where=RECIPE_KEY, fix=fix)
            chosen |= found
        if len(chosen) > MAX_MODULES:
            what = f"the patterns match {len(chosen)} modules, and {MAX_MODULES} at most can be looked at"
            raise RecipeError(what, where=RECIPE_KEY, fix="Name fewer, for example the batch norms of the first block.")
        self._modules = [(name, one) for name, one in modules.items() if name in chosen]
        names: list[str] = []
        for name, one in self._modules:
            names += [name + INPUT_SUFFIX, name] if isinstance(one, _BatchNorm) else [name]
        self.names = tuple(names)
        self._places: dict[tuple[torch.Size, torch.device], list[Tensor]] = {}
        self._found: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    def arm(self) -> None:
        """The next forward pass is the one to look at."""
        self.disarm()
        self._found = {}
        self._handles = [
            one.register_forward_hook(self._build_hook(place)) for place, (_, one) in enumerate(self._modules)
        ]

    def disarm(self) -> None:
        """Takes the hooks off modules that were not called."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def read(self) -> NDArray[np.float32] | None:
        """[names, percentiles] of the pass that was looked at, once; waits for the device. NaN for a module that was
        not called, or gave no tensor of numbers. None where there was no pass."""
        self.disarm()
        found, self._found = self._found, {}
        if not found:
            return None
        values = torch.stack(list(found.values())).cpu().numpy()
        out = np.full((len(self.names), len(PERCENTILES)), np.nan, np.float32)
        out[[self.names.index(name) for name in found]] = values
        return out

    def _build_hook(self, place: int) -> Callable[[nn.Module, Any, Any], None]:
        name, module = self._modules[place]

        def look(_: nn.Module, given: Any, gave: Any) -> None:
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
        """Indices along each dimension; made once for a shape."""
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
