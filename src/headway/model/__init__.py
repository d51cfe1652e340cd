"""The networks of the recipes, and the way from a recipe, or from your own code, to a network.

In: the `model` part of a recipe, and the shape of the data. Out: a torch module on the CPU. Open `builder.py` first: it
calls the factory, loads weights and freezes parameters. Files for one network each: `resnet.py`, `cifar.py` and others.
The rest works on any network: batch norm, averaged weights, graph breaks, a profile of its layers.

Names are loaded when they are first used, so that a recipe is validated without importing torch.
"""

from __future__ import annotations

from headway.core.lazy_exports import build_lazy_exports

__getattr__, __dir__ = build_lazy_exports(__name__, __file__)
