"""Model FLOPs utilisation: the share of a GPU's peak that training reaches."""

from __future__ import annotations

import re

# Dense rates of the tensor cores, if there are any, from NVIDIA's data sheets of the V100 (2020), A100 (2022), H100
# (2023) and H200 (2024). The sheets of H100 and H200 give rates with sparsity, which are halved here. In fp32 PyTorch
# computes convolutions in TF32 if the GPU can; a V100 has no units for bf16.
PEAK_TFLOPS = (
    # Name as the driver reports it; TFLOP/s in fp16, bf16 and fp32 (TF32 if the GPU has it).
    (r"V100S", 130.0, None, 16.4),
    (r"V100-SXM", 125.0, None, 15.7),
    (r"V100-PCIE", 112.0, None, 14.0),
    (r"\bA100\b", 312.0, 312.0, 156.0),
    (r"\bH100 PCIe", 756.5, 756.5, 378.0),
    (r"\bH[12]00 NVL", 835.5, 835.5, 417.5),
    (r"\bH[12]00\b", 989.5, 989.5, 494.5),
)

# The backward pass computes twice as much as the forward pass: gradients of a layer's input and of its weights.
PASSES_PER_STEP = 3


def find_peak_flops(device: str, precision: str) -> float | None:
    """Returns the dense peak in FLOP/s of a GPU by its name; None for unknown GPUs and for MIG slices.

    Args:
        device: Name as the driver reports it.
        precision: fp16, bf16 or fp32.
    """
    for pattern, fp16, bf16, fp32 in PEAK_TFLOPS:
        # The first match counts, so PEAK_TFLOPS lists special names before general ones.
        if re.search(pattern, device) and "MIG" not in device:
            tflops = {"fp16": fp16, "bf16": bf16, "fp32": fp32}[precision]
            return None if tflops is None else tflops * 1e12
    return None


def compute_model_flops_utilisation(images_s: float, multiply_adds: int, peak: float, devices: int = 1) -> float:
    """Returns the FLOP/s that training needs over the peak of its devices, 0 to 1.

    Activations that are recomputed to save memory count once.

    Args:
        images_s: Images/s of all devices together.
        multiply_adds: Multiply-adds of the forward pass per image.
        peak: FLOP/s of one device.
        devices: Number of devices.

    Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
    """
    return images_s * 2 * PASSES_PER_STEP * multiply_adds / (peak * devices)
