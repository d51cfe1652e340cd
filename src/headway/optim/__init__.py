"""Optimizers, schedules and parameter groups. Loaded when first asked for: a recipe is checked without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy_exports import build_lazy_exports

if TYPE_CHECKING:
    from headway.optim.builder import build as build
    from headway.optim.builder import set_lr as set_lr
    from headway.optim.ftml import FTML as FTML
    from headway.optim.groups import GroupRecipe as GroupRecipe
    from headway.optim.groups import split_decay as split_decay
    from headway.optim.lamb import LAMB as LAMB
    from headway.optim.lars import LARS as LARS
    from headway.optim.lbsgd import LBSGD as LBSGD
    from headway.optim.lookahead import Lookahead as Lookahead
    from headway.optim.masters import Masters as Masters
    from headway.optim.muon import Muon as Muon
    from headway.optim.noise import gradient_noise as gradient_noise
    from headway.optim.novograd import NovoGrad as NovoGrad
    from headway.optim.optimizer import OptimizerRecipe as OptimizerRecipe
    from headway.optim.rmsprop_sgd import RMSpropSGD as RMSpropSGD
    from headway.optim.schedule import Schedule as Schedule
    from headway.optim.schedule import ScheduleRecipe as ScheduleRecipe
    from headway.optim.signum import Signum as Signum

_HOMES = {
    "FTML": "ftml",
    "LAMB": "lamb",
    "LARS": "lars",
    "LBSGD": "lbsgd",
    "Lookahead": "lookahead",
    "Masters": "masters",
    "Muon": "muon",
    "NovoGrad": "novograd",
    "RMSpropSGD": "rmsprop_sgd",
    "Signum": "signum",
    "GroupRecipe": "groups",
    "OptimizerRecipe": "optimizer",
    "Schedule": "schedule",
    "ScheduleRecipe": "schedule",
    "build": "builder",
    "gradient_noise": "noise",
    "set_lr": "builder",
    "split_decay": "groups",
}


__getattr__, __dir__ = build_lazy_exports(__name__, _HOMES)
