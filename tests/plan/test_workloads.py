"""Workloads of the catalog: their totals as published, and what is refused by name."""

from __future__ import annotations

import pytest
from bench._plan.scaling import models
from bench._plan.workloads import NETWORKS, build_workload

from headway.core.errors import UsageError
from headway.plan.plausibility import check_phases
from headway.plan.workloads import find_workload, list_workloads

# Millions of parameters and billions of multiply-adds of a forward pass, with the relative difference that is allowed.
# VGG, ResNet: torchvision. AlexNet: 61 million in the paper, 727 M in deck 001. GoogLeNet: 1.5 G, about 7 M.
# BERT-large: 340 M in the paper; multiply-adds of a sequence of 512 by 12 n d^2 a block and attention.
PUBLISHED = {
    "vgg11": (132.9, 7.6, 0.01),
    "vgg16": (138.4, 15.5, 0.01),
    "resnet18": (11.7, 1.82, 0.01),
    "resnet50": (25.6, 4.1, 0.01),
    "alexnet": (61.0, 0.727, 0.01),
    "googlenet": (7.0, 1.5, 0.06),
    "bert-large": (336.2, 167.5, 0.02),
}


def test_the_catalog_has_the_networks_that_the_script_writes() -> None:
    assert list_workloads() == sorted(NETWORKS) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_as_published(name: str) -> None:
    workload, (parameters, adds, off) = find_workload(name), PUBLISHED[name]
    assert workload.parameters / 1e6 == pytest.approx(parameters, rel=0.01)
    assert workload.forward_multiply_adds / 1e9 == pytest.approx(adds, rel=off)
    # Two matrix products backward for one forward, but for the first layer, whose input needs no gradient.
    assert 1.8 < workload.backward_multiply_adds / workload.forward_multiply_adds <= 2
    assert workload.step.exchange.gradient_bytes == 4 * workload.parameters
    check_phases(workload, name)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("vgg16", "VGG-16"), ("resnet50", "ResNet-50"), ("bert-large", "BERT-large 512")]
)
def test_the_bench_counts_the_same(ours: str, theirs: str) -> None:
    assert find_workload(ours).parameters == models()[theirs]["parameters"]


def test_a_file_is_what_the_script_writes() -> None:
    assert find_workload("alexnet") == build_workload("alexnet")


@pytest.mark.check
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_all_files_are_what_the_script_writes(name: str) -> None:
    assert find_workload(name) == build_workload(name)


def test_16_bits_halve_activations_and_no_gradient() -> None:
    wide, narrow = find_workload("vgg11"), find_workload("vgg11", ("precision=bf16",))
    assert narrow.step.precision == "bf16"
    assert sum(one.activation_bytes for one in narrow.layers) * 2 == sum(one.activation_bytes for one in wide.layers)
    assert narrow.step.exchange == wide.step.exchange
    assert find_workload("vgg11", ("precision=fp32",)) == wide


def test_other_names_and_values_are_refused() -> None:
    with pytest.raises(UsageError, match="vgg61: there is no such file, and no such workload") as caught:
        find_workload("vgg61")
    assert "Did you mean 'vgg16'?" in caught.value.fix


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("batch=512", "Write --batch 512 for all devices together, or --per-device N for each of them."),
        ("batch_size=", "Write --batch 512 for"),
        ("precision=bf61", "Did you mean 'bf16'?"),
        ("precision=int8", "Known here: bf16, fp16, fp32."),
        ("precison=bf16", "Did you mean 'precision'? It takes precision=fp32|bf16|fp16 alone;"),
        ("-", "It takes precision=fp32|bf16|fp16 alone; a recipe takes every value."),
    ],
)
def test_an_override_that_a_network_does_not_take_is_refused_with_what_to_write(override: str, fix: str) -> None:
    with pytest.raises(UsageError, match=f"'{override}' cannot be overridden in a network of the catalog") as caught:
        find_workload("vgg16", (override,))
    assert caught.value.fix.startswith(fix)
