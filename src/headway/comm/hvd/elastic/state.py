"""State that survives the loss of a worker: kept as it was at the last commit, and given to all at a new beginning."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, final

import torch

from headway.comm.hvd import context, lifecycle, objects
from headway.comm.hvd.elastic.sampler import ElasticSampler
from headway.comm.hvd.errors import HostsUpdatedInterrupt
from headway.comm.hvd.parameters import broadcast_optimizer_state, broadcast_parameters


class State(ABC):
    """What the workers of an elastic job have in common.

    Args:
        bcast_object: gives all ranks rank 0's object.
        get_rank: this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Functions to call when the workers have changed, before the state is synchronised: to set a learning rate
        for another number of them, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """What `run` calls when the workers have changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keeps the state as it is now, and then looks for new workers: see check_host_updates."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """All ranks call it at the same place.

        Raises:
            HostsUpdatedInterrupt: on all of them, where new workers wait.
        """
        if self._bcast_object(lifecycle.has_newcomers()):
            raise HostsUpdatedInterrupt(skip_sync=False)

    @abstractmethod
    def save(self) -> None:
        """Keeps the state as it is now."""

    @abstractmethod
    def restore(self) -> None:
        """Goes back to what was kept last."""

    @abstractmethod
    def sync(self) -> None:
        """Gives all ranks rank 0's state, and keeps it."""

    def reset(self) -> None:  # noqa: B027 - a hook that most states do not need
        """Called when the workers have changed."""


@final
class _Values:
    """Python objects that are attributes of an owner."""

    def __init__(self, owner: object, values: dict[str, Any]) -> None:
        self._owner, self._saved = owner, values
        self.restore()

    def save(self) -> None:
        self._saved = {name: getattr(self._owner, name) for name in self._saved}

    def restore(self) -> None:
        for name, value in self._saved.items():
            setattr(self._owner, name, value)

    def sync(self, bcast_object: Callable[[Any], Any]) -> None:
        """What is common is what they are now on rank 0."""
        if self._saved:
            self.save()
            self._saved = bcast_object(self._saved)
            self.restore()


@final
class ObjectState(State):
    """Python objects, each an attribute under its keyword.

    Args:
        bcast_object, get_rank: see State.
        kwargs: the first values.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._values = _Values(self, kwargs)

    def save(self) -> None:
        self._values.save()

    def restore(self) -> None:
        self._values.restore()

    def sync(self) -> None:
        self._values.sync(self._bcast_object)


@final
class TorchState(State):
    """Networks, optimizers, samplers, and Python objects, each an attribute under its keyword.

    Args:
        model, optimizer: may be None; more of either, and of ElasticSampler, may be among the keywords.
        kwargs: anything else that can be pickled.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        super().__init__(objects.broadcast_object, context.rank)
        given = {**kwargs, "model": model, "optimizer": optimizer}
        self._kept: dict[str, Any] = {}
        for name, value in given.items():
            if isinstance(value, KEPT):
                setattr(self, name, value)
        self._values = _Values(self, {name: value for name, value in given.items() if name not in self._kept})

    def __setattr__(self, name: str, value: Any) -> None:
        """Another network, optimizer or sampler under the same name is kept from now on."""
        super().__setattr__(name, value)
        if isinstance(value, KEPT):
            self._kept[name] = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        for name in self._kept:
            self._kept[name] = copy.deepcopy(getattr(self, name).state_dict())
        self._values.save()

    def restore(self) -> None:
        for name, saved in self._kept.items():
            getattr(self, name).load_state_dict(copy.deepcopy(saved))
        self._values.restore()

    def sync(self) -> None:
        for name in self._kept:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            else:
                value.load_state_dict(self._bcast_object(value.state_dict()))
        self._values.sync(self._bcast_object)
        self.save()


KEPT = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
"""Kinds of attributes that are kept by their state_dict."""
