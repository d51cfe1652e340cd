"""The networks of the recipes, and the way from a recipe, or from your own code, to a network.

In: the `model` part of a recipe, and the shape of the data. Out: a torch module on the CPU. Open `builder.py` first: it
calls the factory, loads weights and freezes parameters. Files for one network each: `resnet.py`, `cifar.py` and others.
The rest works on any network: batch norm, averaged weights, graph breaks, a profile of its layers.

Names are loaded when they are first used, so that a recipe is validated without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy_exports import build_lazy_exports

if TYPE_CHECKING:
    from headway.model.alex_net import alexnet as alexnet
    from headway.model.alex_net import join_towers as join_towers
    from headway.model.batch_norm import GhostBatchNorm as GhostBatchNorm
    from headway.model.batch_norm import convert_to_ghost as convert_to_ghost
    from headway.model.batch_norm import recompute_statistics as recompute_statistics
    from headway.model.blur_pool import add_blur_pool as add_blur_pool
    from headway.model.builder import build_model as build_model
    from headway.model.builder import find_initialiser as find_initialiser
    from headway.model.cifar import cifar_net as cifar_net
    from headway.model.ema import Ema as Ema
    from headway.model.graph_breaks import CompileReport as CompileReport
    from headway.model.graph_breaks import GraphBreak as GraphBreak
    from headway.model.graph_breaks import try_compiling as try_compiling
    from headway.model.model_recipe import BatchNormRecipe as BatchNormRecipe
    from headway.model.model_recipe import EmaRecipe as EmaRecipe
    from headway.model.model_recipe import ModelRecipe as ModelRecipe
    from headway.model.model_size import ModelSize as ModelSize
    from headway.model.model_size import measure_model_size as measure_model_size
    from headway.model.residual_init import zero_init as zero_init
    from headway.model.resnet import resnet18 as resnet18
    from headway.model.resnet import resnet34 as resnet34
    from headway.model.resnet import resnet50 as resnet50
    from headway.model.resnet import resnet101 as resnet101
    from headway.model.resnet_cifar import cifar_resnet as cifar_resnet
    from headway.model.small import small_net as small_net

# A file must not have the name of a function in this table: once it is imported, it would hide the function.
_HOMES = {
    "alexnet": "alex_net",
    "join_towers": "alex_net",
    "GhostBatchNorm": "batch_norm",
    "convert_to_ghost": "batch_norm",
    "recompute_statistics": "batch_norm",
    "add_blur_pool": "blur_pool",
    "build_model": "builder",
    "find_initialiser": "builder",
    "cifar_net": "cifar",
    "Ema": "ema",
    "CompileReport": "graph_breaks",
    "GraphBreak": "graph_breaks",
    "try_compiling": "graph_breaks",
    "BatchNormRecipe": "model_recipe",
    "EmaRecipe": "model_recipe",
    "ModelRecipe": "model_recipe",
    "ModelSize": "model_size",
    "measure_model_size": "model_size",
    "zero_init": "residual_init",
    "resnet18": "resnet",
    "resnet34": "resnet",
    "resnet50": "resnet",
    "resnet101": "resnet",
    "cifar_resnet": "resnet_cifar",
    "small_net": "small",
}


# A type checker that saw `__getattr__` would accept every name.
if not TYPE_CHECKING:
    __getattr__, __dir__ = build_lazy_exports(__name__, _HOMES)
