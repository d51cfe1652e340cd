"""Headway makes the training of deep networks take less time.

The public names, loaded when they are first used: `import headway` imports neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy_exports import build_lazy_exports

if TYPE_CHECKING:
    from headway import optim as optim
    from headway import watch as watch
    from headway.api.run import Run as Run
    from headway.api.training import resume as resume
    from headway.api.training import train as train
    from headway.checkpoint.checkpoints import Checkpoints as Checkpoints
    from headway.checkpoint.checkpoints import restore as restore
    from headway.checkpoint.checkpoints import state_of as state_of
    from headway.core.random_keys import make_keys as make_keys
    from headway.data.augment import Augment as Augment
    from headway.data.augment_recipe import AugmentRecipe as AugmentRecipe
    from headway.data.batch import Batch as Batch
    from headway.data.collated_batch import CollatedBatch as CollatedBatch
    from headway.data.data_recipe import CropRecipe as CropRecipe
    from headway.data.dataset import Dataset as Dataset
    from headway.data.loader import Loader as Loader
    from headway.data.opening import open as open
    from headway.data.ops.move import flip_and_translate as flip_and_translate
    from headway.data.order import Order as Order
    from headway.data.pack import pack as pack
    from headway.data.resolution import ProgressiveRecipe as ProgressiveRecipe
    from headway.data.verify import verify as verify
    from headway.training.trainer import Trainer as Trainer

_HOMES = {
    "Augment": "data.augment",
    "AugmentRecipe": "data.augment_recipe",
    "Batch": "data.batch",
    "Checkpoints": "checkpoint.checkpoints",
    "CollatedBatch": "data.collated_batch",
    "CropRecipe": "data.data_recipe",
    "Dataset": "data.dataset",
    "Loader": "data.loader",
    "Order": "data.order",
    "ProgressiveRecipe": "data.resolution",
    "Run": "api.run",
    "Trainer": "training.trainer",
    "flip_and_translate": "data.ops.move",
    "make_keys": "core.random_keys",
    "open": "data.opening",
    "pack": "data.pack",
    "restore": "checkpoint.checkpoints",
    "resume": "api.training",
    "state_of": "checkpoint.checkpoints",
    "train": "api.training",
    "verify": "data.verify",
}

_ROOMS = ("optim", "watch")
"""Public as a whole: headway.optim.LARS."""

__version__ = "0.1.0"
__all__ = [*sorted(_HOMES), *_ROOMS, "__version__"]


# A type checker that saw `__getattr__` would accept every name.
if not TYPE_CHECKING:
    __getattr__, _ = build_lazy_exports(__name__, _HOMES, rooms=_ROOMS)


def __dir__() -> list[str]:
    return __all__
