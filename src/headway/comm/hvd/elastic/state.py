"""State that survives the loss of a worker: saved at each commit, and sent to all workers when they connect again."""

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

# Attributes of these types are saved by their state_dict.
STATEFUL_TYPES = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)


class State(ABC):
    """The common state of the workers of an elastic job.

    Args:
        bcast_object: returns rank 0's object on all ranks.
        get_rank: returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Registers functions to call when the workers have changed, before the state is synchronised.

        For example, to set a learning rate for another number of workers.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Resets the state and calls the callbacks. `run` calls it when the workers have changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state, and then checks for new workers: see check_host_updates."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Returns True if new workers wait. All ranks call it at the same place.

        Raises:
            HostsUpdatedInterrupt: on all ranks, if new workers wait.
        """
        # Rank 0's view counts: the ranks hear of newcomers at different times.
        if self._bcast_object(lifecycle.has_newcomers()):
            raise HostsUpdatedInterrupt(skip_sync=False)

    @abstractmethod
    def save(self) -> None:
        """Saves the state."""

    @abstractmethod
    def restore(self) -> None:
        """Restores the saved state."""

    @abstractmethod
    def sync(self) -> None:
        """Sends rank 0's state to all ranks, and saves it."""

    # Not abstract: most states do not need it.
    def reset(self) -> None:  # noqa: B027
        """Reacts to a change of the workers."""


@final
class _SavedAttributes:
    """Saved values of some attributes of an object, which are set to them at once."""

    def __init__(self, owner: object, values: dict[str, Any]) -> None:
        self._owner, self._saved = owner, values
        self.restore()

    def save(self) -> None:
        self._saved = {name: getattr(self._owner, name) for name in self._saved}

    def restore(self) -> None:
        for name, value in self._saved.items():
            setattr(self._owner, name, value)

    def sync(self, bcast_object: Callable[[Any], Any]) -> None:
        """Sets the attributes on all ranks to rank 0's present values."""
        if self._saved:
            # What was received is the state to go back to if a worker is lost before the next commit.
            self.save()
            # All of them in one message.
            self._saved = bcast_object(self._saved)
            self.restore()


@final
class ObjectState(State):
    """A state of Python objects, each an attribute under its keyword.

    Args:
        bcast_object, get_rank: see State.
        kwargs: the initial values.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._values = _SavedAttributes(self, kwargs)

    def save(self) -> None:
        self._values.save()

    def restore(self) -> None:
        self._values.restore()

    def sync(self) -> None:
        self._values.sync(self._bcast_object)


@final
class TorchState(State):
    """A state of networks, optimizers, samplers and Python objects, each an attribute under its keyword.

    Args:
        model, optimizer: may be None; the keywords may have more of either, and ElasticSamplers.
        kwargs: anything else that can be pickled.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        super().__init__(objects.broadcast_object, context.rank)
        # Values with a state_dict are saved by `__setattr__`; the others are plain attributes.
        attributes = {**kwargs, "model": model, "optimizer": optimizer}
        # Before the first attribute is assigned, because `__setattr__` writes into it.
        self._saved_states: dict[str, Any] = {}
        for name, value in attributes.items():
            if isinstance(value, STATEFUL_TYPES):
                setattr(self, name, value)
        plain_values = {name: value for name, value in attributes.items() if name not in self._saved_states}
        self._values = _SavedAttributes(self, plain_values)

    def __setattr__(self, name: str, value: Any) -> None:
        """Saves a network, optimizer or sampler that is assigned, from now on under its name."""
        super().__setattr__(name, value)
        if isinstance(value, STATEFUL_TYPES):
            self._saved_states[name] = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        for name in self._saved_states:
            self._saved_states[name] = copy.deepcopy(getattr(self, name).state_dict())
        self._values.save()

    def restore(self) -> None:
        for name, saved in self._saved_states.items():
            # A copy: what is saved must not change with the training that follows.
            getattr(self, name).load_state_dict(copy.deepcopy(saved))
        self._values.restore()

    def sync(self) -> None:
        for name in self._saved_states:
            value = getattr(self, name)
            # Tensors are broadcast in place; a sampler's few numbers are pickled.
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            else:
                value.load_state_dict(self._bcast_object(value.state_dict()))
        self._values.sync(self._bcast_object)
        self.save()
