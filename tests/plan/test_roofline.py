"""The data sheet's roofline: identities, and the published rates of one device that its shares come from."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from bench._plan.single import list_p40, list_singles, measure_spread

from headway.core.workload import Workload
from headway.plan.cluster import Device, PeakTflops, load_devices
from headway.plan.compute import estimate_from_data_sheet
from headway.plan.roofline import MEMORY_SHARE, PEAK_SHARE, count_traffic_bytes, estimate_sample_time
from headway.plan.workloads import find_workload

VGG = find_workload("vgg16")


def build_device(fp32: float, memory_gb_s: float, mixed: float | None = None, *, bf16: bool | None = None) -> Device:
    tflops = PeakTflops(fp32=fp32, mixed=mixed)
    return Device(title="x", tflops=tflops, memory_gb=16, memory_gb_s=memory_gb_s, bf16=bf16)


def estimate_s(workload: Workload, device: Device) -> float:
    return estimate_sample_time(workload, device).seconds


def test_the_limits_are_arithmetic_alone_and_memory_alone() -> None:
    mixed = find_workload("resnet50", ("precision=fp16",))
    computing = estimate_sample_time(mixed, build_device(1, 1e9, mixed=100))
    assert computing.seconds == pytest.approx(mixed.operations / (100e12 * PEAK_SHARE["tensor cores"]), rel=1e-4)
    assert computing.memory_share < 1e-3
    moving = estimate_sample_time(mixed, build_device(1, 100, mixed=1e9))
    traffic = sum(count_traffic_bytes(layer, 2) for layer in mixed.layers)
    assert moving.seconds == pytest.approx(traffic / (100e9 * MEMORY_SHARE))
    assert moving.memory_share == pytest.approx(1)


def test_a_device_without_units_for_bf16_computes_it_at_its_rate_in_fp32() -> None:
    """Tensor cores of a V100 take fp16 alone; memory moves 16 bits in both."""
    bf16, fp16 = (find_workload("resnet50", (f"precision={name}",)) for name in ("bf16", "fp16"))
    old, new = build_device(1, 1e9, mixed=100), build_device(1, 1e9, mixed=100, bf16=True)
    assert estimate_s(bf16, old) == pytest.approx(estimate_s(bf16, build_device(1, 1e9)))
    assert estimate_s(bf16, new) == pytest.approx(estimate_s(fp16, new)) == pytest.approx(estimate_s(fp16, old))
    warned = estimate_from_data_sheet(bf16, load_devices()["v100"]).warnings[1]
    assert warned == (
        "V100 SXM2 has no units for bf16, so this plan computes at its rate in fp32. Plan with precision=fp16, in which"
        " it has 125 TFLOPS."
    )
    assert "If it has them, write bf16: true in your file." in estimate_from_data_sheet(bf16, old).warnings[1]
    for workload, name in ((bf16, "a100"), (fp16, "v100")):
        assert estimate_from_data_sheet(workload, load_devices()[name]).warnings[1:] == ()


def test_more_of_either_never_takes_longer_and_twice_both_takes_half() -> None:
    base = estimate_s(VGG, build_device(10, 500))
    assert estimate_s(VGG, build_device(20, 1000)) == pytest.approx(base / 2)
    assert base / 2 < estimate_s(VGG, build_device(20, 500)) < base
    assert base / 2 < estimate_s(VGG, build_device(10, 1000)) < base


def test_half_the_bytes_help_a_device_without_16_bit_units_by_as_much_as_memory_limits() -> None:
    fp32, fp16 = find_workload("resnet50"), find_workload("resnet50", ("precision=fp16",))
    for device in (build_device(1e9, 346), build_device(12, 1e9)):
        gain = estimate_s(fp32, device) / estimate_s(fp16, device)
        assert gain == pytest.approx(2 if device.memory_gb_s == 346 else 1, rel=1e-3)


def test_winograd_saves_what_it_saves_and_only_in_fp32() -> None:
    fast = build_device(10, 1e9)
    convolutions = [layer for layer in VGG.layers if layer.kind == "Conv2d"]
    rest = sum(layer.forward_multiply_adds + layer.backward_multiply_adds for layer in VGG.layers) - sum(
        layer.forward_multiply_adds + layer.backward_multiply_adds for layer in convolutions
    )
    convolved = VGG.operations - 2 * rest
    assert estimate_s(VGG, fast) == pytest.approx(
        (convolved / 2.25 + 2 * rest) / (10e12 * PEAK_SHARE["fp32"]), rel=1e-3
    )


def test_the_weights_move_once_a_step() -> None:
    device = load_devices()["v100"]
    none = VGG.step.update.model_copy(update={"passes": 0.0})
    still = VGG.model_copy(update={"step": VGG.step.model_copy(update={"update": none})})
    both = [estimate_from_data_sheet(one, device).compute for one in (VGG, still)]
    moved_s = VGG.step.update.passes * 4 * VGG.parameters / (device.memory_gb_s * 1e9 * MEMORY_SHARE)
    assert both[0].fixed_s - both[1].fixed_s == pytest.approx(moved_s)
    assert replace(both[0], fixed_s=0) == replace(both[1], fixed_s=0)


def test_published_rates_lie_around_it() -> None:
    singles = list_singles()
    assert len(singles) == 35
    assert len({one.group for one in singles}) == 14
    assert measure_spread(singles) == pytest.approx(0.341, abs=0.001)


def test_16_bit_storage_speeds_a_p40_up_as_published() -> None:
    # Table 9 of the deck: 172 and 218 images/s, which no share was chosen by.
    fp32, fp16 = list_p40()
    assert fp16.images_s / fp32.images_s == pytest.approx(1.267, abs=0.001)
    assert fp16.estimate / fp32.estimate == pytest.approx(1.267, rel=0.05)
    for one in (fp32, fp16):
        assert abs(math.log(one.estimate / one.images_s)) < 0.4
