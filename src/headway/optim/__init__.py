"""Optimizers, learning-rate schedules and parameter groups; all of it works in your own PyTorch script.

In: the `optimizer` and `schedule` parts of a recipe, and a network. Out: a torch optimizer, and a factor on its
learning rate for each step. Open `optimizer_recipe.py` first: it has one class for each optimizer.

Names are loaded when they are first used, so that a recipe is validated without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy_exports import build_lazy_exports

if TYPE_CHECKING:
    from headway.optim.builder import build_optimizer as build_optimizer
    from headway.optim.builder import set_lr as set_lr
    from headway.optim.ftml import FTML as FTML
    from headway.optim.groups import GroupRecipe as GroupRecipe
    from headway.optim.groups import split_decay as split_decay
    from headway.optim.lamb import LAMB as LAMB
    from headway.optim.lars import LARS as LARS
    from headway.optim.layer_decay import split_layers as split_layers
    from headway.optim.lbsgd import LBSGD as LBSGD
    from headway.optim.lookahead import Lookahead as Lookahead
    from headway.optim.master_weights import MasterWeights as MasterWeights
    from headway.optim.muon import Muon as Muon
    from headway.optim.noise import draw_gradient_noise as draw_gradient_noise
    from headway.optim.novograd import NovoGrad as NovoGrad
    from headway.optim.optimizer_recipe import read_optimizer as read_optimizer
    from headway.optim.recipe_base import OptimizerRecipe as OptimizerRecipe
    from headway.optim.rmsprop_sgd import RMSpropSGD as RMSpropSGD
    from headway.optim.schedule import Schedule as Schedule
    from headway.optim.schedule import ScheduleRecipe as ScheduleRecipe
    from headway.optim.schedule import read_schedule as read_schedule
    from headway.optim.signum import Signum as Signum

_HOMES = {
    "FTML": "ftml",
    "LAMB": "lamb",
    "LARS": "lars",
    "LBSGD": "lbsgd",
    "Lookahead": "lookahead",
    "MasterWeights": "master_weights",
    "Muon": "muon",
    "NovoGrad": "novograd",
    "RMSpropSGD": "rmsprop_sgd",
    "Signum": "signum",
    "GroupRecipe": "groups",
    "OptimizerRecipe": "recipe_base",
    "Schedule": "schedule",
    "ScheduleRecipe": "schedule",
    "build_optimizer": "builder",
    "draw_gradient_noise": "noise",
    "read_optimizer": "optimizer_recipe",
    "read_schedule": "schedule",
    "set_lr": "builder",
    "split_decay": "groups",
    "split_layers": "layer_decay",
}


# A type checker that saw `__getattr__` would accept every name.
if not TYPE_CHECKING:
    __getattr__, __dir__ = build_lazy_exports(__name__, _HOMES)
