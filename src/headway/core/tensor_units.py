"""Tells which number formats the units of a GPU multiply natively, by its compute capability."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BF16_CAPABILITY = (8, 0)
"""Compute capability of NVIDIA's first units for bf16 (A100). GPUs before it compute bf16 in fp32, and slower."""


def has_bf16_units(device: torch.device) -> bool:
    """Returns True if a CUDA device multiplies bf16 natively."""
    import torch

    return torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
