"""Precision of forward and backward: autocast, loss scaling, and the choice behind `precision: auto`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, final

import torch

from headway.core.errors import CheckpointError
from headway.core.untrusted_json import is_number
from headway.launch.ranks import Ranks
from headway.optim import MasterWeights
from headway.setup.recipe import TrainRecipe
from headway.setup.trial import measure_seconds_per_sample

PrecisionName = Literal["fp32", "bf16", "fp16"]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

MIN_SPEEDUP = 1.05
"""`auto` takes another precision than fp32 only if it is so many times as fast, as it has fewer digits."""


@final
class Precision:
    """The autocast context, the backward pass with the loss rule, and the optimizer's step.

    Args:
        name: fp32, bf16 or fp16.
        seconds: seconds per sample in each precision on this rank, if `auto` measured them.
        masters: fp32 weights of a network with 16-bit weights, which needs no autocast.

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
    ) -> None:
        self._device, self._masters = device.type, masters
        self.is_narrow = masters is not None
        self.reason = ""
        self._seconds, self._agreed = seconds, False
        self.recorded: PrecisionName | None = None
        self._set_name(name)

    def _set_name(self, name: PrecisionName) -> None:
        self.name: PrecisionName = name
        # GradScaler keeps scale, growth and found-inf on the device; with torch's fused optimizers, step and update do
        # not wait for it.
        self._scaler = torch.amp.GradScaler(self._device) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context of the forward pass."""
        if self.name == "fp32" or self.is_narrow:
            return nullcontext()
        return torch.autocast(self._device, TYPES[self.name])

    def autocast_widest(self) -> AbstractContextManager[Any]:
        """Returns the context of a forward pass that keeps as much memory as training may need."""
        # Until the ranks have agreed on a precision, that is fp32, even if another one is faster on this rank.
        return nullcontext() if self.is_auto and not self._agreed else self.autocast()

    def backward(self, losses: torch.Tensor, weights: torch.Tensor) -> None:
        """Adds the gradient of sum(losses * weights); both of shape [b], weights = 1 / global batch (0 for masked)."""
        if self._scaler is not None:
            weights = self._scaler.scale(weights)
        losses.backward(weights)

    def step(
        self, optimizer: torch.optim.Optimizer, clip_norm: float | None, parameters: list[torch.nn.Parameter]
    ) -> None:
        """Clips the gradient if asked, and steps. In fp16 a step with a non-finite gradient changes nothing."""
        if self._masters is not None:
            self._masters.take_gradients()
        # The norm is that of the unscaled gradient.
        if self._scaler is not None and clip_norm is not None:
            self._scaler.unscale_(optimizer)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()
        if self._masters is not None:
            self._masters.write_back()

    @property
    def is_auto(self) -> bool:
        """True if `auto` chose the precision, so that other ranks may have chosen another one."""
        return self._seconds is not None

    def get_finding(self) -> Any:
        """Returns the facts of this rank from which all ranks choose a precision, for JSON."""
        return {"agreed": self.name if self._agreed else self.recorded, "seconds": self._seconds}

    def agree(self, findings: Sequence[Any]) -> str:
        """Chooses the same precision on all ranks, and returns a message if it differs from this rank's own.

        The precision that some ranks agreed on before has priority; else the fastest on the slowest rank is taken.

        Args:
            findings: those of all ranks, in one order.
        """
        if not self.is_auto or self._agreed:
            return ""
        self._agreed = True
        before = [finding["agreed"] for finding in findings if finding["agreed"]]
        if before:
            name, self.reason = before[0], "as the other ranks had agreed"
        else:
            name, self.reason = choose_fastest([finding["seconds"] for finding in findings if finding["seconds"]])
        if name == self.name:
            return ""
        self._set_name(name)
        return f"Precision: {name}, {self.reason}."

    def state(self) -> dict[str, float]:
        """Returns the loss scale and its counters; empty without loss scaling. This waits for the device."""
        return dict(self._scaler.state_dict()) if self._scaler is not None else {}

    def load(self, state: dict[str, float], where: str = "") -> None:
        """Restores such a state. Raises CheckpointError: it is damaged."""
        if self._scaler is None:
            return
        # A scale of 0 or below, or a fractional counter, would make the following steps meaningless.
        for name, mine in self._scaler.state_dict().items():
            if name not in state or not is_number(state[name], 0, 1e38) or not (state[name] or name == GROWTH_TRACKER):
                raise CheckpointError(f"its manifest has no good scalars.precision.{name}", where=where)
            if type(mine) is int and type(state[name]) is not int:
                raise CheckpointError(f"its manifest has a fraction as scalars.precision.{name}", where=where)
        self._scaler.load_state_dict(state)


GROWTH_TRACKER = "_growth_tracker"
"""Key of a GradScaler's state: steps since its scale changed, the only number that may be 0."""


def list_candidates(device: torch.device, *, scaled: bool = True) -> tuple[PrecisionName, ...]:
    """Lists the precisions among which `auto` chooses on a device.

    Args:
        scaled: fp16 is allowed, which needs a loss scale.
    """
    # bf16 only with hardware units: a processor without them takes up to a hundred times as long. GPUs before compute
    # capability 8.0 get fp16 instead, which saves memory at least.
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
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


def measure_precisions(
    model: torch.nn.Module, images: torch.Tensor, recipe: TrainRecipe, device: torch.device, ranks: Ranks | None
) -> dict[PrecisionName, float]:
    """Measures the seconds that forward and backward take for a sample, in each precision that `auto` chooses among.

    See `measure_seconds_per_sample`. A process that joins a run measures nothing and returns an empty dict, as it takes
    the precision of the others. With one precision to choose from nothing is measured either.
    """
    if ranks is not None and ranks.joins:
        return {}
    samples = recipe.batch // (1 if ranks is None else ranks.launched_size)
    if isinstance(recipe.micro_batch, int):
        samples = min(samples, recipe.micro_batch)
    names = list_candidates(device, scaled=not recipe.observe.noise_scale)
    if len(names) == 1:
        return dict.fromkeys(names, 0.0)
    contexts = {name: Precision(name, device).autocast for name in names}
    return measure_seconds_per_sample(model, images[: max(2, samples)], contexts)


def choose_fastest(times: Sequence[Mapping[PrecisionName, float]]) -> tuple[PrecisionName, str]:
    """Returns the precision that is fastest on the slowest rank, and the reason.

    Args:
        found: for each rank, the seconds per sample by precision; inf if the network fails in it.
    """
    if not times:
        return "fp32", "there was nothing to measure it with"
    # A step takes as long as on the slowest rank.
    names = [name for name in times[0] if all(name in one for one in times)]
    slowest = {name: max(one[name] for one in times) for name in names}
    where = "here" if len(times) == 1 else "on the slowest rank"
    best = min((name for name in names if name != "fp32"), key=lambda name: slowest[name], default=None)
    if best is None:
        return "fp32", f"bf16 has no units {'here' if len(times) == 1 else 'on some rank'}"
    if math.isinf(slowest[best]):
        return "fp32", f"the network fails in {best}"
    ratio = slowest["fp32"] / slowest[best]
    if ratio >= MIN_SPEEDUP:
        return best, f"{ratio:.2g} times as fast as fp32 {where}"
    if ratio > 1 / MIN_SPEEDUP:
        return "fp32", f"{best} is {ratio:.2f} times as fast {where}, which is not worth its lost digits"
    return "fp32", f"{1 / ratio:.2g} times as fast as {best} {where}"
