"""Roofline of a data sheet: the time of a sample if each layer is limited by arithmetic or by memory bandwidth.

Layers run one after the other. The time of a layer is the longer one of its operations at a share of the peak and its
memory traffic at a share of the bandwidth (Williams, Waterman and Patterson 2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

from headway.core.workload import Workload, WorkloadLayer
from headway.plan.cluster import Device
from headway.plan.plausibility import WINOGRAD, takes_winograd

# Shares of the peak and of the bandwidth that layers reach in training. Chosen on 35 published rates of one device in
# bench/_plan/scaling.csv: ResNet-50 on K80, P100, V100, A100 and H100, AlexNet and VGG-16 on K80 and P100, BERT-large
# on A100 (python -m bench._plan.single prints them). The root mean square of ln(estimate / published) is 0.341 over 14
# groups of device, network and precision, and 0.327 at the best of all shares, with tensor cores at their full peak,
# which no product reaches. Shares of the peak alone, 0.5 and 0.2, left 0.66. The rates of the P40 were kept out.
PEAK_SHARE = {"fp32": 0.65, "tensor cores": 0.8}
MEMORY_SHARE = 0.65
Precision = Literal["fp32", "bf16", "fp16"]
# A layer reads its input and writes its output. In the backward pass it does so once for the gradient of its input, and
# once for those of its weights.
PASSES = 3


@final
@dataclass(frozen=True)
class SampleTime:
    """Time of one sample on one device, forward and backward."""

    seconds: float
    # Share of this time in layers that memory bandwidth limits.
    memory_share: float


def choose_peak(precision: Precision, device: Device) -> tuple[str, float]:
    """Chooses the peak that a device computes with. Returns (fp32, TF32 or mixed; tera-operations per second)."""
    sheet = device.tflops
    has_units = sheet.mixed is not None and (precision == "fp16" or (precision == "bf16" and device.has_bf16))
    if sheet.mixed is not None and has_units:
        return "mixed", sheet.mixed
    # A device without units for a precision stores 16 bits and computes in fp32.
    if sheet.tf32 is not None:
        return "TF32", sheet.tf32
    return "fp32", sheet.fp32


def get_peak_share(kind: str) -> float:
    """Returns the share of a peak that layers reach, by the kind of `choose_peak`."""
    return PEAK_SHARE["fp32" if kind == "fp32" else "tensor cores"]


def compute_rate(precision: Precision, device: Device) -> float:
    """Computes the operations/s that layers reach on a device."""
    kind, peak = choose_peak(precision, device)
    return peak * 1e12 * get_peak_share(kind)


def estimate_update_s(workload: Workload, device: Device) -> float:
    """Estimates the seconds of the matrix products that the optimizer makes in a step; 0 for most optimizers."""
    operations = 2 * sum(layer.update_multiply_adds for layer in workload.layers)
    return operations / compute_rate(workload.step.update.product_precision, device)


def estimate_sample_time(workload: Workload, device: Device) -> SampleTime:
    """Estimates the time of one sample by the roofline of a device."""
    kind, _ = choose_peak(workload.step.precision, device)
    operations_s, bytes_s = compute_rate(workload.step.precision, device), device.memory_gb_s * 1e9 * MEMORY_SHARE
    total = in_memory = 0.0
    for layer in workload.layers:
        computing = count_operations(layer, kind) / operations_s
        moving = count_traffic_bytes(layer, workload.step.value_bytes) / bytes_s
        total += max(computing, moving)
        in_memory += moving if moving > computing else 0.0
    return SampleTime(total, in_memory / total if total else 0.0)


def count_operations(layer: WorkloadLayer, kind: str) -> float:
    """Counts the operations of a layer for one sample, forward and backward.

    Without tensor cores, 3x3 convolutions of stride 1 take Winograd's algorithm: VGG-16 trains on a P100 at 154
    images/s, 1.5 times the operations of its peak.
    """
    operations = 2 * (layer.forward_multiply_adds + layer.backward_multiply_adds)
    return operations / WINOGRAD if kind == "fp32" and takes_winograd(layer) else operations


def count_traffic_bytes(layer: WorkloadLayer, value_bytes: int) -> int:
    """Counts the bytes that a layer reads and writes for one sample, forward and backward, without its weights.

    Args:
        value_bytes: bytes of one activation.
    """
    inputs = math.prod(layer.input_shape) if layer.input_shape else 0
    return PASSES * (inputs * value_bytes + layer.activation_bytes)


def count_weight_bytes(workload: Workload) -> float:
    """Counts the bytes that the weights of a step move, whatever its batch: three passes, and the optimizer's."""
    weights = sum(layer.weight_bytes for layer in workload.layers)
    return PASSES * weights + workload.step.update.passes * workload.step.exchange.gradient_bytes
