# The public names. The package loads each of them when it is first used.

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
from headway.data.pack_join import join_pack as join_pack
from headway.data.resolution import ProgressiveRecipe as ProgressiveRecipe
from headway.data.verify import verify as verify
from headway.training.trainer import Trainer as Trainer

__version__: str
