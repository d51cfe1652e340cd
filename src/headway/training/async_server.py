"""The server's copy of the training state in asynchronous training: weights, optimizer, averages."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from headway.optim import build_optimizer, set_lr
from headway.optim.saved_state import collect_state, read_values, restore_state
from headway.parallel.buffers import SharedBuffers, list_momenta
from headway.parallel.compensate import DelayCompensation
from headway.parallel.parallel_recipe import AsyncRecipe
from headway.parallel.shards import WeightShard, divide_tensors
from headway.setup.train_setup import TrainSetup
from headway.training.averages import WeightAverages

MEAN_SQUARE = "async/mean_square/"
"""Prefix of the mean squares of compensation in a checkpoint."""
WHERE = "the state of the servers"


def divide_weights(setup: TrainSetup, servers: int) -> list[list[str]]:
    """Divides the trained weights of a network over the servers."""
    trained = {name: weight for name, weight in setup.model.named_parameters() if weight.requires_grad}
    return divide_tensors({name: weight.numel() * weight.element_size() for name, weight in trained.items()}, servers)


@final
class ServerState:
    """The state of one server, on the CPU: a copy of the network of which it steps its own weights.

    Args:
        setup: the setup of this process, whose network, and optimizer, have the state of the run.
        averages: averages of the run.
        mean_squares: of compensation, by weight.
        names: the weights of this server.
        leads: this server also has the buffers.
        step: number of updates so far.
    """

    def __init__(
        self,
        setup: TrainSetup,
        averages: WeightAverages,
        mean_squares: Mapping[str, Tensor],
        names: list[str],
        *,
        leads: bool,
        step: int,
    ) -> None:
        recipe = setup.recipe
        options = recipe.parallel
        assert isinstance(options, AsyncRecipe)
        model = copy.deepcopy(setup.model).cpu()
        steps_per_epoch = setup.epoch / recipe.global_batch
        self.optimizer = build_optimizer(recipe.optimizer.resolve_paths(setup.loaded.base), model, steps_per_epoch)
        load_optimizer(self.optimizer, model, collect_state(setup.optimizer, setup.model.named_parameters()))
        self._averages = WeightAverages(replace(setup, model=model, optimizer=self.optimizer))
        self._averages.load_state({name: value.cpu() for name, value in averages.state().items()}, WHERE)
        every = dict(model.named_parameters())
        self._weights = {name: every[name] for name in names}
        # No server steps them. The first one sends them with its part, so that all parts together are a checkpoint.
        frozen = {name: weight for name, weight in every.items() if leads and not weight.requires_grad}
        self._named = self._weights | frozen
        self._others = every.keys() - self._named.keys()
        self._step, self._leads = step, leads
        self.compensation = DelayCompensation(
            options.compensate,
            names,
            list(self._weights.values()),
            strength=options.used_strength,
            decay=options.used_decay,
        )
        self.compensation.load(mean_squares)
        # A proxy, because a reference cycle would keep the copy until the next garbage collection.
        own = weakref.proxy(self)
        self.shard = WeightShard(self._weights, lambda lr: own.step_weights(lr), self.compensation)
        self.buffers = SharedBuffers(dict(model.named_buffers()), list_momenta(model)) if leads else None

    def step_weights(self, lr: float) -> None:
        """Steps the weights that have a gradient."""
        set_lr(self.optimizer, lr)
        self.optimizer.step()

    def count_update(self) -> None:
        """Updates the averages after an update."""
        self._step += 1
        self._averages.update(self._step)

    def collect(self) -> dict[str, Tensor]:
        """Returns the tensors of this server's part of the state, by name."""
        buffers = {} if self.buffers is None else dict(zip(self.buffers.names, self.buffers.tensors, strict=True))
        named = {**self._named, **buffers}
        averages = {
            name: value
            for name, value in self._averages.state().items()
            if (own := name.partition("/")[2]) in named or (self._leads and own not in self._others)
        }
        return {
            **{f"model/{name}": value.detach() for name, value in named.items()},
            **collect_state(self.optimizer, self._weights.items()),
            **{MEAN_SQUARE + name: value for name, value in self.compensation.state().items()},
            **averages,
        }


def load_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Loads the optimizer's part of such tensors."""
    restore_state(optimizer, model.named_parameters(), tensors, read_values(optimizer, tensors, WHERE))


@torch.no_grad()
def load_network(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Loads the network's part of such tensors."""
    own: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in tensors.items():
        if name.startswith("model/"):
            own[name.removeprefix("model/")].copy_(value)
