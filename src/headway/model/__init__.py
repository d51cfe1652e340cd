"""The networks that the recipes need, and the way from a recipe to a network. Loaded when first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy_exports import build_lazy_exports

if TYPE_CHECKING:
    from headway.model.alex import alexnet as alexnet
    from headway.model.alex import joined_towers as joined_towers
    from headway.model.blurpool import add_blur_pool as add_blur_pool
    from headway.model.cifar import cifar_net as cifar_net
    from headway.model.compilable import Break as Break
    from headway.model.compilable import Compilable as Compilable
    from headway.model.compilable import try_compiling as try_compiling
    from headway.model.counts import Counts as Counts
    from headway.model.counts import count as count
    from headway.model.ema import Ema as Ema
    from headway.model.norm import GhostBatchNorm as GhostBatchNorm
    from headway.model.norm import convert_ghost as convert_ghost
    from headway.model.norm import recomputing as recomputing
    from headway.model.options import BatchNormRecipe as BatchNormRecipe
    from headway.model.options import EmaRecipe as EmaRecipe
    from headway.model.resnet import resnet18 as resnet18
    from headway.model.resnet import resnet34 as resnet34
    from headway.model.resnet import resnet50 as resnet50
    from headway.model.resnet import resnet101 as resnet101
    from headway.model.resnet_cifar import cifar_resnet as cifar_resnet
    from headway.model.resolve import ModelRecipe as ModelRecipe
    from headway.model.resolve import build as build
    from headway.model.resolve import initialiser as initialiser
    from headway.model.small import small_net as small_net
    from headway.model.zero import zero_init as zero_init

_HOMES = {
    "alexnet": "alex",
    "joined_towers": "alex",
    "add_blur_pool": "blurpool",
    "cifar_net": "cifar",
    "cifar_resnet": "resnet_cifar",
    "Break": "compilable",
    "Compilable": "compilable",
    "try_compiling": "compilable",
    "Counts": "counts",
    "count": "counts",
    "Ema": "ema",
    "GhostBatchNorm": "norm",
    "convert_ghost": "norm",
    "recomputing": "norm",
    "BatchNormRecipe": "options",
    "EmaRecipe": "options",
    "resnet18": "resnet",
    "resnet34": "resnet",
    "resnet50": "resnet",
    "resnet101": "resnet",
    "ModelRecipe": "resolve",
    "build": "resolve",
    "initialiser": "resolve",
    "small_net": "small",
    "zero_init": "zero",
}


__getattr__, __dir__ = build_lazy_exports(__name__, _HOMES)
