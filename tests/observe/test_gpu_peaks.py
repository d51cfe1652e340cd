"""Peaks of GPUs by the names that PyTorch tells, and the share of them."""

from __future__ import annotations

import pytest

from headway.observe.gpu_peaks import compute_model_flops_utilisation, find_peak_flops


@pytest.mark.parametrize(
    ("device", "precision", "tera"),
    [
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-32GB", "fp32", 15.7),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Tesla V100S-PCIE-32GB", "fp16", 130),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H200", "fp32", 494.5),
        ("NVIDIA H200 NVL", "fp16", 835.5),
    ],
)
def test_peaks_that_are_known(device: str, precision: str, tera: float) -> None:
    assert find_peak_flops(device, precision) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("Tesla V100-SXM2-16GB", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("NVIDIA GH200 480GB", "bf16"),
        ("NVIDIA GeForce RTX 4090", "fp16"),
        ("cpu", "fp32"),
    ],
)
def test_peaks_that_are_not_known_are_not_guessed(device: str, precision: str) -> None:
    assert find_peak_flops(device, precision) is None


def test_the_share_of_a_peak() -> None:
    """ResNet-50 in bf16 on one A100 at 2,470 images/s, as NVIDIA published."""
    resnet50 = 4_089_184_256
    one = compute_model_flops_utilisation(2470, resnet50, 312e12)
    assert one == pytest.approx(2470 * 6 * resnet50 / 312e12)
    assert 0.19 < one < 0.20
    assert compute_model_flops_utilisation(8 * 2470, resnet50, 312e12, devices=8) == pytest.approx(one)
