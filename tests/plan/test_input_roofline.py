"""Networks at other image sizes, beside the input of a node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from bench._plan.networks import build_googlenet
from tests.plan._workload import workload
from torch import nn

from headway.core.workload import WorkloadLayer
from headway.model import alexnet
from headway.model.layer_profile import profile_layers
from headway.plan.image_sizes import resize_workload
from headway.plan.input_roofline import LOADED_SIDES, SIDES
from headway.plan.job_plan import JobPlan
from headway.plan.request import PlanRequest, plan_job
from headway.plan.workloads import find_workload


def list_counts(layer: WorkloadLayer) -> dict[str, object]:
    """What a roofline, and a plan of shared images, take of a layer."""
    return layer.model_dump(exclude={"saved_bytes", "saved_bytes_fixed"})


@pytest.mark.parametrize(("name", "build", "side"), [("alexnet", alexnet, 128), ("googlenet", build_googlenet, 320)])
def test_a_network_is_counted_at_another_size_as_it_runs_there(
    name: str, build: Callable[[], nn.Module], side: int
) -> None:
    """Multiply-adds, shapes, outputs and windows of every layer; poolings that round up, and an average to 6 x 6."""
    with torch.device("meta"):
        layers = profile_layers(build(), torch.zeros(3, 3, side, side), nullcontext)
    resized = resize_workload(find_workload(name), side)
    assert resized is not None
    assert list(map(list_counts, resized.layers)) == list(map(list_counts, layers))


def test_what_a_network_cannot_tell_is_not_guessed() -> None:
    # Its maps of 28 rows come from nowhere.
    assert resize_workload(workload(), 128) is None
    # Nothing is left of 16 pixels before the third pooling; and sequences have no pixels.
    assert resize_workload(find_workload("alexnet"), 16) is None
    assert resize_workload(find_workload("bert-large"), 128) is None


def plan(network: str, *overrides: str, cluster: str = "dgx-1", **options: float) -> JobPlan:
    return plan_job(find_workload(network, overrides), PlanRequest(cluster=cluster, nodes="1", **options))


def test_lines_are_the_planners_own_and_the_input_is_that_of_a_node() -> None:
    planned = plan("resnet50", "precision=fp16")
    found = planned.compute_input_roofline()
    assert found is not None
    rates = {one.name: dict(zip(found.sides, one.images_s, strict=True)) for one in found.networks}
    assert next(iter(rates)) == "resnet50, planned"
    assert set(rates) > {"alexnet", "resnet18", "vgg16", "googlenet"}
    (one,) = planned.predictions
    assert rates["resnet50, planned"][224] == pytest.approx(one.batch / one.step.seconds)
    assert all(list(line.values()) == sorted(line.values(), reverse=True) for line in rates.values())
    # Another network's line is its own plan, in the same precision.
    (alone,) = plan("resnet18", "precision=fp16").predictions
    assert rates["resnet18"][224] == pytest.approx(alone.batch / alone.step.seconds)
    # The set's own images have 469 x 387 pixels; the storage gives 1.6 GB/s.
    own, *others, storage = found.limits
    assert own.name == "this set, 426 px"
    assert own.images_s == planned.cluster.node.images_s
    for limit, side in zip(others, LOADED_SIDES, strict=True):
        assert limit.images_s == pytest.approx(1994e6 / side**2)
    assert storage.images_s == pytest.approx(1.6e9 / 114_660)
    for limit in found.limits:
        for name, side in found.find_limited(limit).items():
            above = [at for at in SIDES if (rates[name][at] or 0.0) > limit.images_s]
            assert side == above[-1], name
    # AlexNet waits for its input, as the deck says; ResNet-50 does not.
    assert found.find_limited(storage)["alexnet"] >= 224
    assert "vgg16" not in found.find_limited(storage)


def test_without_a_known_input_or_images_there_is_no_picture() -> None:
    assert plan("resnet50", cluster="box-8x-l40s").compute_input_roofline() is None
    assert plan("bert-large").compute_input_roofline() is None
