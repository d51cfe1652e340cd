"""Precision of forward and backward: autocast, loss scaling, and the choice behind `precision: auto`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, final

import torch

from headway.core.errors import CheckpointError
from headway.core.tensor_units import has_bf16_units
from headway.core.untrusted_json import is_number
from headway.launch.ranks import Ranks
from headway.model import native
from headway.optim import MasterWeights
from headway.optim.split_parameters import SplitParameters, clip_gradients_
from headway.parallel.owners import Owners
from headway.parallel.parallel_recipe import (
    AsyncRecipe,
    ExpertsRecipe,
    HybridRecipe,
    LocalRecipe,
    TowersRecipe,
    divides_weights,
)
from headway.setup.recipe import TrainRecipe
from headway.setup.trial import measure_seconds_per_sample

PrecisionName = Literal["fp32", "bf16", "fp16"]
DTYPE_BY_NAME = {"bf16": torch.bfloat16, "fp16": torch.float16}

MIN_SPEEDUP = 1.05
"""`auto` takes another precision than fp32 only if it is so many times as fast, as it has fewer digits."""


@final
class Precision:
    """The autocast context, the backward pass with the loss rule, and the optimizer's step.

    Args:
        name: fp32, bf16 or fp16.
        device: the device that trains.
        seconds: seconds per sample in each precision on this rank, if `auto` measured them.
        masters: fp32 copies of 16-bit weights, if the optimizer steps these.
        is_narrow: the network itself has 16-bit weights, and needs no autocast. Always so with `masters`.

    Attributes:
        name: the precision given, or the one that the ranks agreed on.
        reason: why the ranks agreed on it.
        is_narrow: the network itself has 16-bit weights.
        recorded: the precision of the run that this process joins, if known. It counts if no rank has agreed before.
    """

    def __init__(
        self,
        name: PrecisionName,
        device: torch.device,
        *,
        seconds: Mapping[PrecisionName, float] | None = None,
        masters: MasterWeights | None = None,
        is_narrow: bool = False,
    ) -> None:
        self._device = device.type
        self._masters = masters
        self.is_narrow = is_narrow or masters is not None
        self.reason = ""
        self._seconds = seconds
        self._has_agreed = False
        self.recorded: PrecisionName | None = None
        self._set_name(name)

    def _set_name(self, name: PrecisionName) -> None:
        self.name: PrecisionName = name
        # GradScaler keeps scale, growth and found-inf on the device; with torch's fused optimizers, step and update
        # cause no host-device sync.
        self._scaler = torch.amp.GradScaler(self._device) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context of the forward pass."""
        if self.name == "fp32" or self.is_narrow:
            return nullcontext()
        return torch.autocast(self._device, DTYPE_BY_NAME[self.name])

    def autocast_widest(self) -> AbstractContextManager[Any]:
        """Returns the context of a forward pass that keeps as much memory as training may need."""
        # Until the ranks have agreed on a precision, that is fp32, even if another one is faster on this rank.
        return nullcontext() if self.is_auto and not self._has_agreed else self.autocast()

    def backward(self, losses: torch.Tensor, weights: torch.Tensor, auxiliary: torch.Tensor | None = None) -> None:
        """Accumulates the gradient of sum(losses * weights) + auxiliary into `.grad`, times the loss scale in fp16.

        Args:
            losses: [b], loss of each sample.
            weights: [b], 1 / global batch, or 0 for a masked sample.
            auxiliary: a scalar that the network itself adds to the loss.
        """
        # Without a gradient of its own: to check one, torch imports sympy, 0.4 s in every process.
        total = (losses * weights).sum()
        if auxiliary is not None:
            # One pass for both: they share the graph.
            total = total + auxiliary
        if self._scaler is not None:
            total = self._scaler.scale(total)
        total.backward()

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        parameters: list[torch.nn.Parameter],
        *,
        owners: Owners | None = None,
        split: SplitParameters | None = None,
    ) -> None:
        """Clips the gradient of `parameters` to `clip_norm` (None: not at all), and steps.

        In fp16 a step with a non-finite gradient changes nothing but the loss scale.

        Args:
            owners: the owners of the parameters, if each rank steps its own only.
            split: the parameters of which other ranks have a part too, which counts in the norm.
        """
        if self._masters is not None:
            # Before unscaling and clipping, which act on the gradients of the masters.
            self._masters.take_gradients()
        # The norm is that of the unscaled gradient.
        if self._scaler is not None and (clip_norm is not None or owners is not None):
            self._scaler.unscale_(optimizer)
            if owners is not None:
                self._share_found_inf(optimizer, owners)
        if clip_norm is not None and owners is not None:
            owners.clip_norm(parameters, clip_norm)
        elif clip_norm is not None:
            clip_gradients_(parameters, clip_norm, split)
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()
        if self._masters is not None:
            self._masters.write_back()
        if owners is not None:
            owners.share_weights()

    def _share_found_inf(self, optimizer: torch.optim.Optimizer, owners: Owners) -> None:
        """Makes all ranks skip a step if one of them owns a gradient that is not finite."""
        assert self._scaler is not None
        # As torch's own scaler for sharded parameters does; there is no public way.
        state = self._scaler._per_optimizer_states[id(optimizer)]
        found = state["found_inf_per_device"]
        total = sum((value.reshape(1) for value in found.values()), torch.zeros(1, device=self._device))
        owners.add_up(total, "gradients that are not finite")
        found.clear()
        found[total.device] = total.clamp(max=1).reshape(())

    @property
    def is_auto(self) -> bool:
        """True if `auto` chose the precision, so that other ranks may have chosen another one."""
        return self._seconds is not None

    def get_vote(self) -> Any:
        """Returns this rank's vote on the precision, as JSON values: what it agreed on before, and its measurement."""
        return {"agreed": self.name if self._has_agreed else self.recorded, "seconds": self._seconds}

    def agree_on_votes(self, votes: Sequence[Any]) -> str:
        """Sets the precision that all ranks choose from their votes. Returns a message if it changes on this rank.

        A precision that some ranks agreed on before has priority; else the fastest on the slowest rank is taken.

        Args:
            votes: those of all ranks, in the same order on each.
        """
        if not self.is_auto or self._has_agreed:
            return ""
        # All ranks have the same votes, and so make the same choice.
        self._has_agreed = True
        agreed_names = [vote["agreed"] for vote in votes if vote["agreed"]]
        if agreed_names:
            name, self.reason = agreed_names[0], "as the other ranks had agreed"
        else:
            name, self.reason = choose_fastest([vote["seconds"] for vote in votes if vote["seconds"]])
        if name == self.name:
            return ""
        self._set_name(name)
        return f"Precision: {name}, {self.reason}."

    def state_dict(self) -> dict[str, float]:
        """Returns the loss scale and its counters; empty without loss scaling. This is a host-device sync."""
        return dict(self._scaler.state_dict()) if self._scaler is not None else {}

    def load_state_dict(self, state_dict: dict[str, float], where: str = "") -> None:
        """Restores the result of `state_dict`. Raises CheckpointError if a value is missing or out of range.

        Args:
            where: the checkpoint, for the error.
        """
        if self._scaler is None:
            return
        # A scale of 0 or below, or a fractional counter, would make the following steps meaningless.
        for name, current in self._scaler.state_dict().items():
            if (
                name not in state_dict
                or not is_number(state_dict[name], 0, 1e38)
                or not (state_dict[name] or name == GROWTH_TRACKER_KEY)
            ):
                raise CheckpointError(f"its manifest has no good scalars.precision.{name}", where=where)
            if type(current) is int and type(state_dict[name]) is not int:
                raise CheckpointError(f"its manifest has a fraction as scalars.precision.{name}", where=where)
        self._scaler.load_state_dict(state_dict)


GROWTH_TRACKER_KEY = "_growth_tracker"
"""Key of a GradScaler's state_dict: steps since its scale changed, the only number that may be 0."""


def list_candidates(device: torch.device, *, scaled: bool = True) -> tuple[PrecisionName, ...]:
    """Returns the precisions among which `auto` chooses on a device; fp32 is always one of them.

    Args:
        scaled: a loss scale can be used, so that fp16 is allowed.
    """
    # bf16 only with hardware units: a processor without them takes up to a hundred times as long. GPUs
    # without them get fp16 instead, which saves memory at least.
    if device.type == "cuda":
        if has_bf16_units(device):
            return ("fp32", "bf16")
        return ("fp32", "fp16") if scaled else ("fp32",)
    with open("/proc/cpuinfo") as file:
        flags = next((set(line.split()) for line in file if line.startswith(("flags", "Features"))), set())
    return ("fp32", "bf16") if flags & {"amx_bf16", "avx512_bf16", "bf16"} else ("fp32",)


def describe_emulation(name: PrecisionName, device: torch.device) -> str:
    """Returns a warning if the device has no hardware units for a precision; else an empty text."""
    if device.type != "cpu" or name in list_candidates(device):
        return ""
    return f"Precision: {name} is emulated on this processor, which has no units for it, and slower; auto takes fp32."


def explain_unused_winograd(recipe: TrainRecipe, device: torch.device) -> str:
    """Returns why `winograd` changes nothing in this run; an empty text if it is used, or was not asked for."""
    if not recipe.winograd:
        return ""
    reasons = {
        "on a GPU": device.type != "cpu",
        f"in {recipe.precision}": recipe.precision != "fp32",
        "in a compiled network": recipe.compile is not False,
        "without the native core, or with several threads where torch has no GNU OpenMP": (
            device.type == "cpu" and not native.is_available()
        ),
    }
    found = next((reason for reason, holds in reasons.items() if holds), "")
    return f"winograd: true changes nothing {found}." if found else ""


def measure_precisions(
    model: torch.nn.Module, images: torch.Tensor, recipe: TrainRecipe, device: torch.device, ranks: Ranks | None
) -> dict[PrecisionName, float]:
    """Returns the seconds that forward and backward take for a sample, in each precision that `auto` chooses among.

    See `measure_seconds_per_sample`. A process that joins a run measures nothing and returns an empty dict, as it takes
    the precision of the others. If there is only one precision, nothing is measured, and its value is 0.
    """
    if ranks is not None and ranks.is_joining:
        return {}
    # A rank runs its own part of the batch.
    samples = recipe.global_batch // (1 if ranks is None else ranks.launched_size)
    if isinstance(recipe.micro_batch, int):
        samples = min(samples, recipe.micro_batch)
    # Ranks with different parameters, or with steps of their own, cannot agree on the steps that a loss scale skips.
    alone = HybridRecipe | TowersRecipe | ExpertsRecipe | LocalRecipe | AsyncRecipe
    is_divided = isinstance(recipe.parallel, alone)
    is_divided = is_divided or divides_weights(recipe.parallel)
    names = list_candidates(device, scaled=not recipe.observe.noise_scale and not is_divided)
    if len(names) == 1:
        return dict.fromkeys(names, 0.0)
    contexts = {name: Precision(name, device).autocast for name in names}
    return measure_seconds_per_sample(model, images[: max(2, samples)], contexts)


def choose_fastest(seconds_by_rank: Sequence[Mapping[PrecisionName, float]]) -> tuple[PrecisionName, str]:
    """Returns the precision that is fastest on the slowest rank, and the reason.

    Args:
        seconds_by_rank: for each rank, the seconds per sample by precision; inf if the network fails in it.
    """
    if not seconds_by_rank:
        return "fp32", "there was nothing to measure it with"
    # A step takes as long as on the slowest rank.
    names = [name for name in seconds_by_rank[0] if all(name in seconds for seconds in seconds_by_rank)]
    slowest_s = {name: max(seconds[name] for seconds in seconds_by_rank) for name in names}
    location = "here" if len(seconds_by_rank) == 1 else "on the slowest rank"
    fastest = min((name for name in names if name != "fp32"), key=lambda name: slowest_s[name], default=None)
    if fastest is None:
        return "fp32", f"bf16 has no units {'here' if len(seconds_by_rank) == 1 else 'on some rank'}"
    if math.isinf(slowest_s[fastest]):
        return "fp32", f"the network fails in {fastest}"
    ratio = slowest_s["fp32"] / slowest_s[fastest]
    if ratio >= MIN_SPEEDUP:
        return fastest, f"{ratio:.2g} times as fast as fp32 {location}"
    if ratio > 1 / MIN_SPEEDUP:
        return "fp32", f"{fastest} is {ratio:.2f} times as fast {location}, which is not worth its lost digits"
    return "fp32", f"{1 / ratio:.2g} times as fast as {fastest} {location}"
