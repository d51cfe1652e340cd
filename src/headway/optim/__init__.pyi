# The public names. The package loads each of them when it is first used.

from headway.optim.builder import build_optimizer as build_optimizer
from headway.optim.builder import set_lr as set_lr
from headway.optim.ftml import FTML as FTML
from headway.optim.groups import GroupRecipe as GroupRecipe
from headway.optim.groups import split_decay as split_decay
from headway.optim.half_network import convert_to_bf16 as convert_to_bf16
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
from headway.optim.soap import SOAP as SOAP
