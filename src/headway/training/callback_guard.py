"""TrainingGuard: a callback cannot change the training unnoticed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from headway.core.random_keys import GOLDEN, mix_int
from headway.setup.seeding import GeneratorStates
from headway.setup.train_setup import TrainSetup


@final
@dataclass(slots=True)
class Snapshot:
    """The parts of the training that a callback could change.

    Attributes:
        versions: version of each parameter, buffer and state of the optimizer, which counts changes in place, except
            those through `.data`.
        gradients: address and version of each gradient; None without one.
        trained: `requires_grad` of each parameter.
        modes: `training` of each module.
        options: options of the parameter groups.
        addresses: address of each parameter, buffer and state; empty without `deep`.
        sums: sum of the bits of each parameter and buffer; empty without `deep`.
    """

    versions: list[int]
    gradients: list[Any]
    trained: list[bool]
    modes: list[bool]
    options: list[Any]
    addresses: list[int]
    sums: list[int]


@final
class TrainingGuard:
    """Compares the training before and after a hook, and keeps the random generators of the run apart.

    Versions of tensors are compared at every call, which reads no device and takes 0.1 to 0.3 ms of a ResNet-50. A
    change through `.data` leaves no version: it is found by the sums of the weights' bits, which the caller asks for at
    some calls only, because they wait for the device.
    """

    def __init__(self, setup: TrainSetup) -> None:
        self._setup = setup
        named = [*setup.held.named_parameters(), *setup.model.named_buffers()]
        self._names = [name for name, _ in named]
        self._weights = [value for _, value in named]
        self._parameters = list(setup.model.parameters())
        self._modules = list(setup.model.modules())
        # With 16-bit weights the optimizer has fp32 copies, the masters.
        self._stepped = [value for group in setup.optimizer.param_groups for value in group["params"]]
        self._before: Snapshot | None = None
        self._tensors: list[torch.Tensor] = []

    def begin(self, *, deep: bool) -> None:
        """Takes a snapshot before a hook. Args: deep: also read the values of the weights, a host-device sync."""
        # The list is made anew at deep calls only: that takes ten times as long as reading the versions.
        if deep or not self._tensors:
            self._tensors = self._list_tensors()
        self._before = self._take(deep)

    def renew(self) -> None:
        """Takes the snapshot anew inside a hook, after a change by Headway itself that was undone."""
        if self._before is not None:
            sums, addresses, self._before = self._before.sums, self._before.addresses, self._take(deep=False)
            self._before.sums, self._before.addresses = sums, addresses

    def find_change(self, *, allows_weights: bool) -> tuple[str, str] | None:
        """Returns what the hook has changed and how to do that instead; None if it changed nothing.

        Args:
            allows_weights: weights, buffers and the optimizer's state may change: a checkpoint holds them.
        """
        before, self._before = self._before, None
        assert before is not None
        after = self._take(bool(before.sums))
        # The first four are refused with `changes_training` too, because no checkpoint would hold them.
        if after.modes != before.modes:
            return "switches modules between training and evaluation mode", "Write with run.evaluation_mode() as model:"
        if after.options != before.options:
            fix = "Write a schedule of your own: schedule: {factory: my_file.py:make}"
            return "changes lr or another option of the optimizer, which the next step or a resume would undo", fix
        if after.gradients != before.gradients:
            return "sets gradients, which no checkpoint holds", "Clear them, or use torch.autograd.grad"
        if after.trained != before.trained:
            return "freezes or unfreezes parameters", "Use model.freeze_after or model.unfreeze_at"
        if allows_weights:
            return None
        fix = "Set changes_training = True in its class if you mean it, and it runs on every rank"
        pairs = ((after.sums, before.sums), (after.versions, before.versions), (after.addresses, before.addresses))
        for mine, theirs in pairs:
            if mine != theirs:
                # The names are fewer than the tensors: masters and the optimizer's states follow the weights and have
                # none.
                changed = [name for name, new, old in zip(self._names, mine, theirs, strict=False) if new != old]
                what = f"{changed[0]!r} of the network" if changed else "the optimizer's state"
                return f"changes {what}", fix
        return None

    def _list_tensors(self) -> list[torch.Tensor]:
        """Lists the parameters and buffers, in the order of their names, then masters and the optimizer's states."""
        # By identity: without masters, the optimizer steps the weights themselves, and each tensor is to be listed
        # once.
        tensors, state = {id(value): value for value in self._weights}, self._setup.optimizer.state
        for parameter in self._stepped:
            tensors[id(parameter)] = parameter
            # `state` is a defaultdict: a look-up alone would give the optimizer an empty state for the parameter.
            states = state[parameter].values() if parameter in state else ()
            tensors |= {id(value): value for value in states if isinstance(value, torch.Tensor)}
        return list(tensors.values())

    def _take(self, deep: bool) -> Snapshot:
        optimizer = self._setup.optimizer
        return Snapshot(
            versions=[value._version for value in self._tensors],
            gradients=[None if (grad := one.grad) is None else _identify(grad) for one in self._stepped],
            trained=[one.requires_grad for one in self._parameters],
            modes=[module.training for module in self._modules],
            options=[
                {name: _identify(value) for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ],
            addresses=[value.data_ptr() for value in self._list_tensors()] if deep else [],
            sums=_sum_bits(self._weights) if deep else [],
        )


def _identify(value: Any) -> Any:
    """Returns a value that differs when a tensor is replaced or changed in place; other values as they are."""
    return (value.data_ptr(), value._version) if isinstance(value, torch.Tensor) else value


def _sum_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Returns the sum of each tensor's bits as whole numbers: exact, and the same in any order of summation."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        value.detach().view(whole[value.element_size()]).sum(dtype=torch.int64)
        for value in tensors
        if value.element_size() in whole and not value.is_complex()
    ]
    # Read at once: a read for each of a network's hundreds of tensors would be as many syncs.
    found: list[int] = torch.stack(sums).tolist() if sums else []
    return found


@contextmanager
def separate_generators(device: torch.device, seed: int, position: int, number: int) -> Iterator[None]:
    """Gives the block random generators of its own, seeded by its arguments, and restores those of the run after it.

    So the draws of a callback do not shift those of the training, and are the same in a resumed run.

    Args:
        number: number of the callback.
    """
    before = GeneratorStates.read(device)
    mixed = mix_int(mix_int(mix_int(seed) + position) - (number + 1) * GOLDEN)
    try:
        for generator, _ in before.of_torch:
            generator.manual_seed(mixed & ((1 << 63) - 1))
        # NumPy's global generator takes 32 bits at most.
        np.random.seed(mixed & 0xFFFFFFFF)
        random.seed(mixed)
        yield
    finally:
        before.restore()
