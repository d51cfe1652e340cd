"""Optimizers, learning-rate schedules and parameter groups; all of it works in your own PyTorch script.

In: the `optimizer` and `schedule` parts of a recipe, and a network. Out: a torch optimizer, and a factor on its
learning rate for each step. Open `optimizer_recipe.py` first: it has one class for each optimizer.

Names are loaded when they are first used, so that a recipe is validated without importing torch.
"""

from __future__ import annotations

from headway.core.lazy_exports import build_lazy_exports

__getattr__, __dir__ = build_lazy_exports(__name__, __file__)
