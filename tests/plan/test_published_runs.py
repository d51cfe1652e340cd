"""Published runs beside a plan: they agree with the bench's files, and the plan's bands hold them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from bench._plan import times
from bench._plan.scaling import device_of, rows
from tests._support import headway
from tests.plan._workload import workload

from headway.plan.cluster import load_clusters, load_devices
from headway.plan.published import MOST_RUNS, PublishedRun, compare_published, find_network, list_published
from headway.plan.request import PlanRequest, plan_job
from headway.plan.workloads import find_workload, list_workloads

# Clusters of the catalog whose devices were trained in 16 bits.
CLUSTERS = ("dgx-1", "dgx-2h", "dgx-a100", "dgx-a100-80gb", "dgx-h100", "p40-100gbe")


def test_runs_are_those_of_the_bench() -> None:
    with Path(times.FILE).open(encoding="utf-8", newline="") as file:
        published = {(one["series"], int(one["gpus"])): float(one["minutes"]) for one in csv.DictReader(file)}
    for (series, gpus), minutes in published.items():
        row = next(one for one in rows() if (one.series, one.gpus) == (series, gpus))
        wanted = (device_of(row), gpus, row.batch * gpus, minutes)
        assert wanted in {(one.device, one.devices, one.batch, one.minutes) for one in list_published("resnet50")}


def test_only_networks_trained_on_imagenet_have_any() -> None:
    assert {name for name in list_workloads() if find_network(find_workload(name))} == {"resnet50", "alexnet"}
    assert find_network(workload(name="imagenet-resnet50")) == ""
    assert list_published("") == list_published("vgg16") == []


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_band_from_the_data_sheet_holds_what_was_published(cluster: str) -> None:
    found = 0
    for name in ("resnet50", "alexnet"):
        known = find_workload(name, ("precision=fp16",))
        plan = plan_job(known, PlanRequest(cluster=cluster, nodes="1"))
        for one in compare_published(known, plan.job, plan.cluster, ()):
            assert one.run.device == load_clusters()[cluster].device
            assert one.planned is not None
            assert one.planned.batch == pytest.approx(one.run.batch)
            assert one.planned.low_hours <= one.run.minutes / 60 <= one.planned.high_hours, one.run
            found += 1
    assert found >= 1


def test_runs_of_the_device_come_first_and_others_of_as_many_devices_follow() -> None:
    known = find_workload("resnet50")
    plan = plan_job(known, PlanRequest(cluster="dgx-1-p100", nodes="1,128"))
    assert len(plan.published) == MOST_RUNS
    own = [one for one in plan.published if one.run.device == "p100"]
    assert [one.run.devices for one in own] == [8, 256, 256, 1024]
    assert list(plan.published[: len(own)]) == own
    assert all(one.planned is None and one.run.devices in (8, 1024) for one in plan.published[len(own) :])
    said = headway("plan", "resnet50", "--cluster", "dgx-1-p100", "--nodes", "1,128").out
    assert "Published runs of this network, and this plan at their devices and batch:" in said
    assert re.search(r"1,024 P40 .* mixed +other device +- +Jia", said)
    assert "Published" not in headway("plan", "vgg16", "--cluster", "dgx-1-p100", "--nodes", "1").out


@pytest.mark.parametrize(
    ("cluster", "precision", "reason"),
    [
        ("dgx-1", "fp32", "not in fp32"), ("dgx-1", "bf16", "not in bf16"), ("dgx-1-p100", "fp16", "not in fp16"),
        ("dgx-1", "fp16", ""), ("dgx-a100", "bf16", ""),
    ],
)  # fmt: skip
def test_a_run_that_is_not_planned_has_its_reason(cluster: str, precision: str, reason: str) -> None:
    """bf16 on a V100 is emulated, and no run in fp16 compares with that."""
    known = find_workload("resnet50", (f"precision={precision}",))
    plan = plan_job(known, PlanRequest(cluster=cluster, nodes="1"))
    mine = [one for one in plan.published if one.run.device == load_clusters()[cluster].device]
    assert {one.reason for one in mine} == {reason}
    assert all((one.planned is None) == bool(one.reason) for one in plan.published)


def test_a_cluster_that_cannot_have_a_run_plans_none_of_it() -> None:
    known = find_workload("resnet50")
    small = load_clusters()["dgx-1-p100"].model_copy(update={"nodes": 4, "devices": 3})
    plan = plan_job(known, PlanRequest(cluster="dgx-1-p100", nodes="1"))
    found = compare_published(known, plan.job, small, ())
    assert [one.planned for one in found] == [None] * 4
    assert {one.reason for one in found} == {"not nodes of 3"}
    few = load_clusters()["dgx-1-p100"].model_copy(update={"nodes": 4})
    reasons = [one.reason for one in compare_published(known, plan.job, few, ())]
    assert reasons == ["", "too many nodes", "too many nodes", "too many nodes"]
    assert all(isinstance(one, PublishedRun) and one.minutes > 0 for one in list_published("alexnet"))
    assert {"p40", "p100", "v100", "h100"} < {one.device for one in list_published("resnet50")} & set(load_devices())
