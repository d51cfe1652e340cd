"""Precision of forward and backward, and fp16's loss scale, which lives on the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

Name = Literal["fp32", "bf16", "fp16"]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def fast_precision(device: torch.device) -> tuple[Name, str]:
    """What a device computes fast in, and why: bf16 with units for it, else fp16 with units for it, else fp32."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 0):
            return "bf16", f"compute capability {capability[0]}.{capability[1]} has bf16 tensor cores"
        if capability >= (7, 0):
            return "fp16", f"compute capability {capability[0]}.{capability[1]} has fp16 tensor cores and no bf16"
        return "fp32", f"compute capability {capability[0]}.{capability[1]} has no tensor cores"
    with open("/proc/cpuinfo") as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
    for flag in ("amx_bf16", "avx512_bf16"):
        if flag in flags:
            return "bf16", f"this processor has {flag}"
    return "fp32", "this processor has no bf16 instructions"


class Precision:
    """The autocast context, backward with the loss rule, and the optimizer's step.

    Attributes:
        name: `fp32`, `bf16` or `fp16`.
    """

    def __init__(self, name: Name, device: torch.device) -> None:
        self.name = name
        self._device = device.type
        # GradScaler keeps scale, growth and found-inf on the device; with torch's fused optimizers its step and update
        # do not wait for it.
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of the forward pass."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self._device, TYPES[self.name])

    def backward(self, losses: torch.Tensor, weights: torch.Tensor) -> None:
        """Adds the gradient of sum(losses * weights); both of shape [b], weights = 1 / global batch (0 for masked)."""
        if self._scaler is not None:
            weights = self._scaler.scale(weights)
        losses.backward(weights)

    def step(
        self, optimizer: torch.optim.Optimizer, clip_norm: float | None, parameters: list[torch.nn.Parameter]
    ) -> None:
        """Clips where asked, and steps; with fp16 a step with a non-finite gradient changes nothing."""
        if self._scaler is None:
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
            optimizer.step()
            return
        if clip_norm is not None:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state(self) -> dict[str, float]:
        """Loss scale and its counters; waits for the device. Empty without loss scaling."""
        return dict(self._scaler.state_dict()) if self._scaler is not None else {}

    def load(self, state: dict[str, float]) -> None:
        if self._scaler is not None:
            self._scaler.load_state_dict(state)
