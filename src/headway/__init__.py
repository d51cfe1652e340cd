"""Headway makes the training of deep networks take less time.

The public names, loaded when they are first used: `import headway` imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway import optim as optim
    from headway.core.keys import keys as keys
    from headway.data.augment import Augment as Augment
    from headway.data.augment_options import AugmentRecipe as AugmentRecipe
    from headway.data.batch import Batch as Batch
    from headway.data.dataset import Dataset as Dataset
    from headway.data.dataset import open as open
    from headway.data.loader import Loader as Loader
    from headway.data.ops.move import flip_and_translate as flip_and_translate
    from headway.data.options import CropRecipe as CropRecipe
    from headway.data.order import Order as Order
    from headway.data.pack import pack as pack
    from headway.data.resolution import ProgressiveRecipe as ProgressiveRecipe
    from headway.data.verify import verify as verify
    from headway.train.checkpoint import Checkpoints as Checkpoints
    from headway.train.checkpoint import restore as restore
    from headway.train.checkpoint import state_of as state_of
    from headway.train.trainer import Trainer as Trainer

_HOMES = {
    "Augment": "headway.data.augment",
    "AugmentRecipe": "headway.data.augment_options",
    "Batch": "headway.data.batch",
    "Checkpoints": "headway.train.checkpoint",
    "CropRecipe": "headway.data.options",
    "Dataset": "headway.data.dataset",
    "Loader": "headway.data.loader",
    "Order": "headway.data.order",
    "ProgressiveRecipe": "headway.data.resolution",
    "Trainer": "headway.train.trainer",
    "flip_and_translate": "headway.data.ops.move",
    "keys": "headway.core.keys",
    "open": "headway.data.dataset",
    "pack": "headway.data.pack",
    "restore": "headway.train.checkpoint",
    "state_of": "headway.train.checkpoint",
    "verify": "headway.data.verify",
}

_ROOMS = ("optim",)
"""Public as a whole: headway.optim.LARS."""

__version__ = "0.1.0"
__all__ = [*sorted(_HOMES), *_ROOMS, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"headway.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
