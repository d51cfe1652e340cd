"""What share of a GPU's peak a training reaches, where that peak is known."""

from __future__ import annotations

import re

PEAKS = (
    # name as the driver tells it, TFLOP/s in fp16, bf16 and fp32 (as TF32, where there is that)
    (r"V100S", 130.0, None, 16.4),
    (r"V100-SXM", 125.0, None, 15.7),
    (r"V100-PCIE", 112.0, None, 14.0),
    (r"\bA100\b", 312.0, 312.0, 156.0),
    (r"\bH100 PCIe", 756.5, 756.5, 378.0),
    (r"\bH[12]00 NVL", 835.5, 835.5, 417.5),
    (r"\bH[12]00\b", 989.5, 989.5, 494.5),
)
"""Dense, of the tensor cores where there are some: NVIDIA's data sheets of the V100 (2020), A100 (2022), H100 (2023)
and H200 (2024). Those of the H100 and H200 are for half of the numbers zero, and are halved here. In fp32, PyTorch
computes convolutions in TF32 where the GPU can; in bf16 a V100 has no units."""

PASSES_PER_STEP = 3
"""A backward pass computes twice what a forward pass does: gradients of the layer's input and of its weights."""


def find_peak_flops(device: str, precision: str) -> float | None:
    """FLOP/s that a GPU of this name can reach at most, dense, in fp32, bf16 or fp16; None where that is not known: of
    other GPUs, and of parts of one."""
    for name, fp16, bf16, fp32 in PEAKS:
        if re.search(name, device) and "MIG" not in device:
            found = {"fp16": fp16, "bf16": bf16, "fp32": fp32}[precision]
            return None if found is None else found * 1e12
    return None


def compute_model_flops_utilisation(images_s: float, multiply_adds: int, peak: float, devices: int = 1) -> float:
    """What the network itself computes in training, over what its devices could (model FLOPs utilisation).

    What is computed twice, to save memory, counts once.

    Args:
        images_s: of all devices. multiply_adds: of one image, forward. peak: FLOP/s of one device.

    Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
    """
    return images_s * 2 * PASSES_PER_STEP * multiply_adds / (peak * devices)
