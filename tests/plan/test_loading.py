"""Loading of a node that nobody measured: published or assumed, and lifted by runs that exceed it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests._support import headway
from tests.plan._workload import workload

from headway.core.workload import Workload
from headway.plan.cluster import Cluster, find_cluster, load_clusters
from headway.plan.job_plan import JobPlan
from headway.plan.loading import ASSUMED_ERROR, CORE_MPIXELS_S, PUBLISHED_ERROR, complete_loading
from headway.plan.request import PlanRequest, plan_job
from headway.plan.workloads import find_workload

# "Making DL training times shorter": images/s of a DGX-1, and their pixels.
DECK_DECODED, DECK_PIXELS = (10_000, 15_000), 290 * 550


def change_input(known: Workload, **changes: Any) -> Workload:
    return known.model_copy(update={"input": known.input.model_copy(update=changes)})


def change_node(cluster: Cluster, **changes: Any) -> Cluster:
    return cluster.model_copy(update={"node": cluster.node.model_copy(update=changes)})


def plan_on_node(name: str, cluster: str, *overrides: str, **options: Any) -> JobPlan:
    return plan_job(find_workload(name, overrides), PlanRequest(cluster=cluster, nodes="1", **options))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_on_a_dgx_1_alexnet_waits_for_its_input_and_resnet_50_computes(precision: str) -> None:
    alexnet = plan_on_node("alexnet", "dgx-1", f"precision={precision}").predictions[0]
    resnet = plan_on_node("resnet50", "dgx-1", f"precision={precision}").predictions[0]
    assert alexnet.limit == "loading"
    assert alexnet.images_s == pytest.approx(alexnet.input_images_s)
    assert DECK_DECODED[0] < alexnet.images_s < DECK_DECODED[1]
    assert resnet.limit == "computing"
    assert resnet.images_s < resnet.input_images_s


def test_the_catalog_has_the_decks_loading() -> None:
    for name in ("dgx-1", "dgx-1-p100"):
        cluster, source = complete_loading(
            change_input(workload(), source_pixels=float(DECK_PIXELS)), load_clusters()[name]
        )
        assert cluster.node.images_s == pytest.approx(sum(DECK_DECODED) / 2, rel=1e-3)
        assert source == "loading as published for such a node"
        for end in DECK_DECODED:
            assert abs(math.log(end / sum(DECK_DECODED) * 2)) <= 1.01 * 1.645 * PUBLISHED_ERROR
        # 1.6 GB/s are 10,000 of its images, of 160 kB.
        assert cluster.storage.node_gb_s == pytest.approx(10_000 * 160e3 / 1e9)


def test_cores_and_pixels_give_what_is_assumed() -> None:
    cluster = load_clusters()["dgx-h100"]
    known, source = complete_loading(workload(), cluster)
    assert known.node.images_s == pytest.approx(112 * CORE_MPIXELS_S * 1e6 / 2e5)
    assert source == "loading assumed: 154 million pixels/s on each of 112 cores"
    assert known.node.loading_error == ASSUMED_ERROR
    half, _ = complete_loading(change_input(workload(), source_pixels=4e5), cluster)
    assert half.node.images_s == pytest.approx((known.node.images_s or 0) / 2)
    fewer, _ = complete_loading(workload(), change_node(cluster, cores=56))
    assert fewer.node.images_s == pytest.approx((known.node.images_s or 0) / 2)


@pytest.mark.parametrize(
    ("known", "cluster"),
    [
        (workload(), change_node(load_clusters()["dgx-1"], images_s=7.0)),
        (change_input(workload(), source_pixels=None), load_clusters()["dgx-1"]),
        (change_input(workload(), on_device=("random crop",)), load_clusters()["dgx-1"]),
        (workload(), load_clusters()["box-8x-l40s"]),
        (find_workload("bert-large"), load_clusters()["dgx-h100"]),
    ],
    ids=["given", "no-images", "crops-on-device", "no-cores", "tokens"],
)
def test_nothing_is_assumed_beside_what_is_known_or_cannot_be(known: Workload, cluster: Cluster) -> None:
    assert complete_loading(known, cluster) == (cluster, "")


def test_runs_that_exceed_it_lift_it() -> None:
    fast = plan_on_node("resnet50", "dgx-1", "precision=fp16", runs="8x208:11105", per_device=208.0)
    assert fast.predictions[0].images_s == pytest.approx(11_105, rel=1e-4)
    assert fast.loading_from == "loading is taken not to limit, as the runs exceed what it would allow"
    faster = plan_on_node("alexnet", "dgx-1", "precision=fp16", runs="8x128:60000", image_kb=3000.0)
    assert faster.loading_from.startswith("loading and storage are taken not to limit")
    assert faster.predictions[0].first_images_s == pytest.approx(60_000, rel=1e-4)
    # A run of one device says nothing against the loading of eight.
    one = plan_on_node("alexnet", "dgx-1", "precision=fp16", runs="1x128:8000")
    assert (one.predictions[0].limit, one.loading_from) == ("loading", "loading as published for such a node")


def test_an_assumed_loading_makes_a_wide_band_and_is_named(tmp_path: Path) -> None:
    sure = tmp_path / "mine.yaml"
    values = find_cluster("dgx-h100").model_dump(mode="json")
    assumed = plan_on_node("alexnet", "dgx-h100", "precision=fp16").predictions[0]
    values["node"]["images_s"] = assumed.input_images_s
    sure.write_text(json.dumps(values))
    given = plan_on_node("alexnet", str(sure), "precision=fp16").predictions[0]
    assert given.images_s == assumed.images_s
    assert assumed.high_hours / assumed.low_hours > 1.5 * given.high_hours / given.low_hours
    said = headway("plan", "alexnet", "precision=fp16", "--cluster", "dgx-h100", "--nodes", "1").out
    assert "loading assumed: 154 million pixels/s on each of 112 cores" in said
