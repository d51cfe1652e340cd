# The public names. The package loads each of them when it is first used.
# A file must not have the name of a function here: once it is imported, it would hide the function.

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
from headway.model.gates import NoisyTopKGate as NoisyTopKGate
from headway.model.gates import SwitchGate as SwitchGate
from headway.model.graph_breaks import CompileReport as CompileReport
from headway.model.graph_breaks import GraphBreak as GraphBreak
from headway.model.graph_breaks import try_compiling as try_compiling
from headway.model.mixture import MixtureOfExperts as MixtureOfExperts
from headway.model.model_recipe import BatchNormRecipe as BatchNormRecipe
from headway.model.model_recipe import EmaRecipe as EmaRecipe
from headway.model.model_recipe import ModelRecipe as ModelRecipe
from headway.model.model_size import ModelSize as ModelSize
from headway.model.model_size import measure_model_size as measure_model_size
from headway.model.moe_net import cifar_moe as cifar_moe
from headway.model.recurrent import gru as gru
from headway.model.residual_init import zero_init as zero_init
from headway.model.resnet import resnet18 as resnet18
from headway.model.resnet import resnet34 as resnet34
from headway.model.resnet import resnet50 as resnet50
from headway.model.resnet import resnet101 as resnet101
from headway.model.resnet_cifar import cifar_resnet as cifar_resnet
from headway.model.small import small_net as small_net
from headway.model.vgg_net import vgg as vgg
from headway.model.winograd import use_winograd as use_winograd
from headway.model.xavier import init_xavier as init_xavier
