"""What `headway plan` gives beside the decks' rates, times and clusters.

Each function takes the part of a figure's `ours` behind the colon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from bench._decks.figure import Ours
from bench._plan.scaling import Row, basis_of, predicted, rows, step_of
from bench._plan.single import build_single, list_p40
from headway.core.collectives import Link, Network, count_bytes_out_of_host, predict_cost
from headway.core.workload import Workload
from headway.plan.cluster import Cluster, load_clusters
from headway.plan.job_plan import JobPlan
from headway.plan.losses import load_priors
from headway.plan.published import ComparedRun, compare_published
from headway.plan.request import PlanRequest, plan_job
from headway.plan.scaling import predict_within_node
from headway.plan.strategies import compare_strategies
from headway.plan.wording import format_hours, format_hours_range
from headway.plan.workloads import find_workload

# Images/s of the deck's input pipeline by the side of an image.
PIPELINE = {352: 9800, 480: 4900}
# Cluster of the catalog on which a published run on so many devices of a kind is planned.
CLUSTERS = {("p40", 512): "p40-100gbe", ("p40", 1024): "p40-100gbe", ("p40", 2048): "p40-100gbe",
            ("p100", 8): "dgx-1-p100", ("p100", 256): "p100-50gbe", ("p100", 1024): "p100-50gbe"}  # fmt: skip
# Device and 16-bit activations of the decks' series in bench/_plan/scaling.csv.
SERIES = {"p100-fp32": ("p100", False), "v100-fp32": ("v100", False), "v100-fp16": ("v100", True)}
# Bytes/s of one NVLink of a P100, as a ring gets them (NCCL's tuner).
NVLINK_GB_S = 20
NODES = (1, 36, 144, 1024)
# Cluster of the catalog whose nodes have 16 GPUs.
SHARED = "dgx-2"


def read_narrow(name: str) -> Workload:
    """Reads a workload of the catalog with 16-bit activations."""
    return find_workload(name, ("precision=fp16",))


@cache
def plan_network(name: str, cluster: str, nodes: str = "1", narrow: bool = True, each: float | None = None) -> JobPlan:
    """Plans a network on a cluster from the data sheet."""
    workload = read_narrow(name) if narrow else find_workload(name)
    return plan_job(workload, PlanRequest(cluster=cluster, nodes=nodes, per_device=each))


def find_plan(asked: str) -> Ours:
    """Finds a plan; names are those of figures.csv."""
    kind, *rest = asked.split("/")
    return _PLANS[kind](*rest)


def _find_limit(name: str) -> Ours:
    plan = plan_network(name, "dgx-1").predictions[0]
    devices = plan.batch / plan.step.seconds
    reach = "" if plan.limit == "computing" else f"; its devices would reach {devices:,.0f}"
    wanted = {"resnet50": "computing", "alexnet": "loading"}[name]
    more = f"{plan.images_s:,.0f} images/s in 16 bits, limited by {plan.limit}{reach}"
    return Ours("planned", more=more, holds=plan.limit == wanted)


def _get_dgx() -> Cluster:
    return load_clusters()["dgx-1"]


def _read_storage_images() -> Ours:
    encoded, rate = read_narrow("resnet50").input.encoded_bytes, _get_dgx().storage.node_gb_s
    assert encoded is not None
    assert rate is not None
    return Ours("taken over", rate * 1e9 / encoded, f"{rate:g} GB/s of ImageNet files of {encoded / 1e3:.1f} kB")


def _read_storage_bytes() -> Ours:
    rate = _get_dgx().storage.node_gb_s
    assert rate is not None
    return Ours("taken over", 1e3 * rate, "the catalog's `dgx-1`")


def _plan_rate(name: str) -> Ours:
    plan = plan_network(name, "dgx-1").predictions[0]
    more = "16 bits" if plan.limit == "computing" else "16 bits, if loading did not limit"
    return Ours("planned", plan.batch / plan.step.seconds, more)


def _plan_loading() -> Ours:
    roofline = plan_network("resnet50", "dgx-1").compute_input_roofline()
    assert roofline is not None
    rate = next(one.images_s for one in roofline.limits if one.name == "loading 352 px")
    return Ours("planned", rate, "a DGX-1, from 12,500 images/s of 290 x 550 pixels")


def _plan_roof() -> Ours:
    (low, high), fast = PIPELINE, PIPELINE[352]
    return Ours("planned", fast * (low / high) ** 2, f"{fast:,} at {low} pixels, as 1 / pixels")


@cache
def _compare_runs(name: str, cluster: str) -> list[ComparedRun]:
    narrow = cluster == "p40-100gbe"
    plan = plan_network(name, cluster, narrow=narrow)
    return compare_published(plan_workload(name, narrow), plan.job, plan.cluster, ())


def plan_workload(name: str, narrow: bool) -> Workload:
    """Returns a workload of the catalog in 16 bits, or in fp32."""
    return read_narrow(name) if narrow else find_workload(name)


def _plan_run(name: str, device: str, devices: str, minutes: str) -> Ours:
    cluster = CLUSTERS[device, int(devices)]
    for one in _compare_runs(name, cluster):
        run = one.run
        if (run.device, run.devices, run.minutes) == (device, int(devices), float(minutes)):
            assert one.planned is not None, one.reason
            low, high = one.planned.low_hours, one.planned.high_hours
            more = f"`{cluster}`, {one.planned.epochs:.0f} epochs, band {format_hours_range(low, high)}"
            return Ours("planned", 60 * one.planned.hours, more, holds=low <= run.minutes / 60 <= high)
    raise KeyError((name, device, devices, minutes))


def _plan_p40(which: str) -> Ours:
    fp32, mixed = list_p40()
    if which == "gain":
        return Ours("planned", mixed.estimate / fp32.estimate, "half the bytes are moved; it has no 16-bit units")
    return Ours("planned", {"fp32": fp32, "mixed": mixed}[which].estimate, "data sheet")


def find_row(series: str, devices: int) -> Row:
    """Finds a run of a deck's series in bench/_plan/scaling.csv."""
    return next(one for one in rows() if (one.series, one.gpus) == (series, devices))


def _plan_scaling(series: str) -> Ours:
    row = next(one for one in rows() if one.series == series and one.gpus > 1)
    known = basis_of(row, load_priors("field")).parameters
    together, alone = (row.batch / step_of(known, row, ranks).seconds for ranks in (row.gpus, 1))
    return Ours("planned", 100 * together / alone, "from one device")


def _plan_sheet(series: str) -> Ours:
    device, narrow = SERIES[series]
    row = find_row(f"deck-{series}", 1)
    found = build_single("resnet50", device, narrow, row.batch, row.run.images_s, row.source)
    return Ours("planned", found.estimate, "data sheet")


def _plan_devices(series: str, devices: str) -> Ours:
    found = predicted(find_row(f"deck-{series}", int(devices)))
    return Ours("planned", found.value, "from one device", holds=found.in_band)


def _plan_from_one(series: str, devices: str) -> Ours:
    found = predicted(find_row(series, int(devices)))
    return Ours("planned", found.value, "from one device with 64 images", holds=found.in_band)


def _plan_figure_13() -> Ours:
    plan = plan_network("alexnet", "p40-100gbe", "1,64,128", each=128.0)
    said = ", ".join(
        f"{one.images_s:,.0f} on {8 * one.nodes:,}" for one in plan.predictions if one.nodes in (1, 64, 128)
    )
    return Ours("planned", more=f"images/s: {said} P40")


@cache
def _plan_shared(name: str, *, same_batch: bool) -> tuple[float, str]:
    """Plans 16 GPUs of a DGX-2 that share each image. Returns (images/s over those of one GPU, images of that one).

    Loading is taken not to limit: the figure is of the devices.

    Args:
        same_batch: the 16 have as many images together as the one has; else each of them has as many.
    """
    plan = plan_network(name, SHARED)
    node = plan.cluster.node.model_copy(update={"images_s": None})
    cluster, each = plan.cluster.model_copy(update={"node": node}), plan.job.split_batch(plan.cluster.devices)
    alone = predict_within_node(plan.job, cluster)[0]
    job = replace(plan.job, per_device=each / cluster.devices) if same_batch else plan.job
    menu = compare_strategies(plan.workload, job, cluster, 1)
    (shared,) = (one for one in menu if "spatial" in one.recipe and f"ranks: {cluster.devices}" in one.recipe)
    return shared.images_s / alone.images_s, f"{each:.0f}"


def _plan_sixteen(which: str) -> Ours:
    """Plans ResNet-50 and AlexNet; the value is that of ResNet-50. Args: which: `each` or `same` batch."""
    resnet, alexnet = (_plan_shared(name, same_batch=which == "same") for name in ("resnet50", "alexnet"))
    many = "together" if which == "same" else "each"
    more = (
        f"ResNet-50 in 16 bits: images/s of the 16 V100 of a DGX-2 that share each image over those of one, {resnet[1]}"
        f" images {many}; AlexNet, {alexnet[1]} {many}: {alexnet[0]:.3g}"
    )
    # Half of what they reach with as much work for each.
    few = resnet[0] < _plan_shared("resnet50", same_batch=False)[0] / 2 if which == "same" else None
    return Ours("planned", resnet[0], more, holds=few)


def _count_parameters(name: str) -> Ours:
    return Ours("counted", find_workload(name).parameters / 1e6)


def _count_operations(name: str, unit: float) -> Ours:
    return Ours("counted", find_workload(name).forward_multiply_adds / unit)


def _plan_limit_nodes(_wanted: str) -> Ours:
    plan = plan_network("resnet50", "dgx-1", "1,64,128", each=128.0)
    nodes = plan.useful_nodes
    assert nodes is not None
    return Ours("planned", nodes, f"a batch of {nodes * 8 * 128:,}: beyond it no run of MLPerf with LARS is known")


def _count_rings() -> Ours:
    inside = load_clusters()["dgx-1-p100"].inside
    assert inside is not None
    return Ours("planned", inside.gb_s / NVLINK_GB_S, f"{inside.gb_s:g} GB/s inside a node, {NVLINK_GB_S} a link")


def _compare_tree() -> Ours:
    counts, ratios = (2, 4, 8), []
    for count in counts:
        network = Network(1, count, Link(1e-6, 10e9), Link(1e-6, 10e9), math.inf)
        tree, ring = (predict_cost(name, network).s_per_byte for name in ("tree", "ring"))
        ratios.append(tree / ring)
    said = f"{', '.join(f'{one:.2f}' for one in ratios)} times a ring's time on {', '.join(map(str, counts))} devices"
    return Ours("planned", more=f"{said}, large messages", holds=ratios == sorted(ratios))


def _compare_server() -> Ours:
    counts, ratios = (2, 4, 8), []
    for count in counts:
        network = Network(count, 1, Link(1e-6, 10e9), Link(1e-6, 10e9), math.inf)
        # The process with the server sends the weights to each of the others, once for each of their batches.
        ratios.append((count - 1) / count_bytes_out_of_host("ring", 1.0, network))
    said = (
        f"{', '.join(f'{one:.2g}' for one in ratios)} times a ring's bytes with {', '.join(map(str, counts))} processes"
    )
    return Ours("planned", more=f"{said} and one server", holds=min(ratios) < 0.5)


@cache
def _plan_growth() -> JobPlan:
    return plan_network("resnet50", "dgx-1", ",".join(map(str, NODES)))


def _plan_images() -> Ours:
    found = {one.nodes: one for one in _plan_growth().predictions if one.nodes in NODES}
    rates = [found[nodes].images_s for nodes in NODES]
    said = ", ".join(f"{rate:,.0f}" for rate in rates)
    times = ", ".join(format_hours(found[nodes].hours) for nodes in NODES)
    more = f"ResNet-50 on {', '.join(f'{nodes:,}' for nodes in NODES)} DGX-1: {said} images/s; {times} to 75.9 %"
    return Ours("planned", more=more, holds=rates == sorted(rates))


def _plan_paying() -> Ours:
    plan = _plan_growth()
    more = f"{plan.paying_nodes:,} DGX-1 pay for ResNet-50, 64 images a device; more do not"
    return Ours("planned", more=more, holds=plan.paying_nodes < NODES[-1])


_PLANS: Mapping[str, Callable[..., Ours]] = {
    "limit": _find_limit,
    "io-images": _read_storage_images,
    "io-bytes": _read_storage_bytes,
    "rate": _plan_rate,
    "roof-352": _plan_loading,
    "roof-480": _plan_roof,
    "run": _plan_run,
    "p40": _plan_p40,
    "scaling": _plan_scaling,
    "sheet": _plan_sheet,
    "devices": _plan_devices,
    "rate-from-one": _plan_from_one,
    "figure-13": _plan_figure_13,
    "parameters": _count_parameters,
    "multiply-adds": lambda name: _count_operations(name, 1e6),
    "giga-multiply-adds": lambda name: _count_operations(name, 1e9),
    "sixteen": _plan_sixteen,
    "limit-nodes": _plan_limit_nodes,
    "rings": _count_rings,
    "tree": _compare_tree,
    "server": _compare_server,
    "images-grow": _plan_images,
    "paying-nodes": _plan_paying,
}
