"""Checks of workloads and measured runs against what is possible, before anything is planned from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.core.errors import UsageError
from headway.core.workload import Workload, WorkloadLayer
from headway.plan.calibration import MeasuredRun
from headway.plan.cluster import Device
from headway.plan.job import compute_mean_work

# Multiplications that Winograd's algorithm saves in a 3x3 convolution: tiles of 4x4 with 16 products in place of 36
# (Lavin and Gray 2015, arXiv 1509.09308). cuDNN uses it, so that fp32 may exceed the peak by that much.
WINOGRAD = 2.25
# Multiply-adds of the layers and of the last phase come from the same dry run, and differ by rounding at most.
SAME_WORK = 0.01
# Largest deviation of a calibration from one of its runs, as a factor.
LARGEST_MISFIT = 1.25


def check_phases(workload: Workload, where: str) -> None:
    """Raises UsageError if the layers of a workload do other work than its last phase.

    Args:
        where: name of the workload's file, or of the option.
    """
    phases, layers = workload.run.phases, workload.forward_multiply_adds
    if not phases or math.isclose(phases[-1].forward_multiply_adds, layers, rel_tol=SAME_WORK):
        return
    problem = (
        f"its layers have {layers:,} multiply-adds per image, and its last phase has"
        f" {phases[-1].forward_multiply_adds:,}"
    )
    raise UsageError(problem, where=where, fix="Write it anew: headway train RECIPE --dry-run.")


def check_rates(runs: Sequence[MeasuredRun], workload: Workload, device: Device) -> None:
    """Raises UsageError if a run is faster than the device can be with this workload."""
    # A run is of the whole recipe: where its images grow, most of them are smaller than the last ones.
    sheet, work = device.tflops, count_least_operations(workload) * compute_mean_work(workload)
    full = max(sheet.fp32, sheet.tf32 or 0.0)
    most = max(full, sheet.mixed or 0.0)
    for run in runs:
        text = f"{run.ranks}x{run.samples_per_rank:g}:{run.images_s:g}"
        reached = run.images_s / run.ranks * work / 1e12
        if reached > most:
            problem = f"{text} is {reached:,.0f} TFLOPS a device, and the peak of {device.title} is {most:g}"
            fix = f"Check the devices, the {workload.sample_name}/s of all of them together, and the network."
            raise UsageError(problem, where="--runs", fix=fix)
        if workload.step.precision == "fp32" and reached > full:
            problem = (
                f"{text} is {reached:,.0f} TFLOPS a device, the workload computes in fp32, and the peak of"
                f" {device.title} in fp32 is {full:g}"
            )
            fix = "Plan in the precision of the runs: add precision=fp16 after the recipe, or after the network's name."
            raise UsageError(problem, where="--runs", fix=fix)


def check_agreement(runs: Sequence[MeasuredRun], predicted_s: Sequence[float], unit: str = "images") -> None:
    """Raises UsageError if a calibration is far from one of its runs.

    Args:
        predicted_s: seconds of a step of each run, by the calibration to all of them.
        unit: noun for the samples.
    """
    for run, seconds in zip(runs, predicted_s, strict=True):
        if abs(math.log(seconds / run.seconds)) > math.log(LARGEST_MISFIT):
            problem = (
                f"no device explains all of these runs: {run.ranks}x{run.samples_per_rank:g} gave"
                f" {run.images_s:,.0f} {unit}/s, and the others imply {run.images_s * run.seconds / seconds:,.0f}"
            )
            fix = f"Give runs of one network, precision and kind of device, with the {unit}/s of all devices together."
            raise UsageError(problem, where="--runs", fix=fix)


def count_least_operations(workload: Workload) -> float:
    """Counts the operations per sample, forward and backward, that the fastest algorithms need."""
    return sum(
        2 * (layer.forward_multiply_adds + layer.backward_multiply_adds) / (WINOGRAD if takes_winograd(layer) else 1)
        for layer in workload.layers
    )


def takes_winograd(layer: WorkloadLayer) -> bool:
    """Returns True for a 3x3 convolution of stride 1: nine weights for each pair of channels, and maps of one size."""
    if layer.input_shape is None or layer.output_shape is None or len(layer.input_shape) != 3:
        return False
    if layer.input_shape[1:] != layer.output_shape[1:]:
        return False
    pairs, outputs = layer.input_shape[0] * layer.output_shape[0], layer.output_shape[0]
    return layer.parameters in (9 * pairs, 9 * pairs + outputs)
