"""The decks' rates and times beside what the planner gives: docs/decks.md has the tables, which are computed here.

A change of the planner or its catalog makes this test print the rows that the page has to have.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from bench._plan.scaling import Row, predicted, rows
from bench._plan.single import list_p40

from headway.core.workload import Workload
from headway.plan.cluster import load_clusters
from headway.plan.job_plan import JobPlan
from headway.plan.loading import CORE_MPIXELS_S
from headway.plan.published import compare_published
from headway.plan.request import PlanRequest, plan_job
from headway.plan.wording import format_hours
from headway.plan.workloads import find_workload

PAGE = Path(__file__).parents[2] / "docs/decks.md"
# "Making DL training times shorter": images/s of its input pipeline by the side of an image.
PIPELINE = {352: 9800, 480: 4900}
# Rates of "Data parallel and large batch sizes" in the deck on DGX-1 clusters, by series of bench/_plan/scaling.csv.
SERIES = {"deck-p100-fp32": "P100, fp32", "deck-v100-fp32": "V100, fp32", "deck-v100-fp16": "V100, fp16"}
NODES = (1, 36, 144, 1024)


def read_narrow(name: str) -> Workload:
    return find_workload(name, ("precision=fp16",))


@cache
def plan_network(name: str, cluster: str, nodes: str = "1") -> JobPlan:
    return plan_job(read_narrow(name), PlanRequest(cluster=cluster, nodes=nodes))


def build_input_table() -> list[tuple[str, str, str]]:
    plans = {name: plan_network(name, "dgx-1").predictions[0] for name in ("resnet18", "resnet50", "alexnet")}
    alexnet, devices = plans["alexnet"], plans["alexnet"].batch / plans["alexnet"].step.seconds
    dgx, encoded = load_clusters()["dgx-1"], read_narrow("resnet50").input.encoded_bytes
    assert dgx.storage.node_gb_s is not None
    assert dgx.node.decode_mpixels_s is not None
    assert dgx.node.cores is not None
    assert encoded is not None
    files_s = dgx.storage.node_gb_s * 1e9 / encoded
    (low, high), (fast, slow) = PIPELINE.keys(), PIPELINE.values()
    return [
        (
            "on a DGX-1 the device limits ResNet-50, host and I/O limit AlexNet",
            f"planned in 16 bits: ResNet-50 {plans['resnet50'].images_s:,.0f} images/s, limited by"
            f" {plans['resnet50'].limit}; AlexNet {alexnet.images_s:,.0f}, limited by {alexnet.limit}, as its devices"
            f" would reach {devices:,.0f}",
            "holds" if (plans["resnet50"].limit, alexnet.limit) == ("computing", "loading") else "does not hold",
        ),
        (
            "file I/O: about 10,000 images/s, 1,600 MB/s from LMDB",
            f"the catalog's `dgx-1` reads {dgx.storage.node_gb_s:g} GB/s, {files_s:,.0f} ImageNet files of"
            f" {encoded / 1e3:.1f} kB",
            "taken over: it is the plan's rate until the files are in memory",
        ),
        (
            "decoding: 10,000 to 15,000 images/s of 290 x 550 pixels",
            f"the catalog has the middle, {dgx.node.decode_mpixels_s:,g} million pixels/s:"
            f" {dgx.node.decode_mpixels_s / dgx.node.cores:.0f} on a core. OpenCV in a DataLoader does"
            f" {CORE_MPIXELS_S:g} on a core of Zen 5, Headway 3.9 times that ([claims](claims.md#input))",
            "taken over",
        ),
        (
            "training on synthetic data: more than 6,000 images/s (ResNet-50), 14,000 (ResNet-18)",
            f"planned from the data sheet in 16 bits: {plans['resnet50'].images_s:,.0f}, and"
            f" {plans['resnet18'].batch / plans['resnet18'].step.seconds:,.0f} if loading did not limit; MLPerf v0.6:"
            " 11,105 (ResNet-50). Not run here",
            "not tested: the plans are 1.6 and 2.2 times the deck's",
        ),
        (
            "roofline: the input pipeline gives 9,800 images/s at 352 pixels, 4,900 at 480",
            f"the planner takes images/s as 1 / pixels: {(high / low) ** 2:.2f} times fewer at 480; the deck has"
            f" {fast / slow:.2f}. Measured here: `pixels_gain` 0.955 of 1 / pixels",
            f"holds to {fast / slow / (high / low) ** 2 - 1:.0%}",
        ),
    ]


def build_minutes_table() -> list[tuple[str, str, str]]:
    alexnet, resnet = find_workload("alexnet"), find_workload("resnet50")
    fp32, fp16 = list_p40()
    table = [
        (
            "AlexNet: 62 M parameters, 727 M multiply-adds, top-1 58.8 %; ResNet-50: 25 M, 4 G, 75.3 %",
            f"{alexnet.parameters / 1e6:.2f} M, {alexnet.forward_multiply_adds / 1e6:.0f} M;"
            f" {resnet.parameters / 1e6:.2f} M, {resnet.forward_multiply_adds / 1e9:.2f} G. Nothing was trained on"
            " ImageNet here: accuracies are the sources', which `recipes/tencent-*.yaml` aim at",
            "the networks are the same; the accuracies are open",
        ),
        (
            "ResNet-50 on a P40, 64 images: 172 images/s in fp32, 218 mixed, 1.27 times as many",
            f"from the data sheet: {fp32.estimate:.0f} and {fp16.estimate:.0f},"
            f" {fp16.estimate / fp32.estimate:.2f} times as many, as half the bytes are moved",
            "holds: a P40 has no 16-bit units",
        ),
    ]
    for name, title in (("resnet50", "ResNet-50"), ("alexnet", "AlexNet")):
        plan = plan_network(name, "p40-100gbe")
        for one in compare_published(read_narrow(name), plan.job, plan.cluster, ()):
            assert one.planned is not None
            hours = one.run.minutes / 60
            inside = one.planned.low_hours <= hours <= one.planned.high_hours
            table.append(
                (
                    f"{title}, {one.run.devices:,} P40, batch {one.run.batch:,}: {one.run.minutes:g} min to"
                    f" {one.run.top1:g} %",
                    f"planned from the data sheet: {format_hours(one.planned.hours)}, band"
                    f" {format_hours(one.planned.low_hours)} to {format_hours(one.planned.high_hours)}",
                    f"{'in' if inside else 'not in'} the band of 90 %",
                )
            )
    return table


def find_row(series: str, gpus: int) -> Row:
    return next(one for one in rows() if (one.series, one.gpus) == (series, gpus))


def build_devices_table() -> list[tuple[str, str, str]]:
    table = []
    for series, title in SERIES.items():
        known = [find_row(series, gpus).images_s or 0.0 for gpus in (1, 2, 4, 8)]
        found = [predicted(find_row(series, gpus)) for gpus in (2, 4, 8)]
        held = sum(one.in_band for one in found)
        table.append(
            (
                f"ResNet-50 on 1, 2, 4, 8 {title}: {', '.join(f'{one:,.2f}' for one in known)} images/s",
                f"from the first: {', '.join(f'{one.value:,.0f}' for one in found)}",
                f"{', '.join(f'{one.error:+.1%}' for one in found)}; {held} of 3 in the band of 90 %",
            )
        )
    return table


def build_scale_table() -> list[tuple[str, str, str]]:
    plan = plan_network("resnet50", "dgx-1", ",".join(map(str, NODES)))
    found = {one.nodes: one for one in plan.predictions if one.nodes in NODES}
    rates = ", ".join(f"{found[nodes].images_s:,.0f}" for nodes in NODES)
    hours = ", ".join(format_hours(found[nodes].hours) for nodes in NODES)
    return [
        (
            "images/s grow with the batch without end (Kurth et al. 2018, arXiv 1810.01993: Tiramisu, DeepLabv3+)",
            f"planned: ResNet-50 on {', '.join(map(str, NODES[:-1]))} and {NODES[-1]:,} DGX-1, 64 images a device:"
            f" {rates} images/s; {hours} to 75.9 %",
            f"images/s do; the time pays up to {plan.paying_nodes:,} nodes, as epochs grow with the batch",
        ),
        (
            "steps to a target have limits (Shallue et al. 2018, arXiv 1811.03600): nine workloads",
            "ResNet-8 on CIFAR-10: `cifar_resnet`, depth 8; simple CNN on (Fashion-)MNIST: `small_net`; ResNet-50 and"
            " VGG-11 on ImageNet: planned as `resnet50` and `vgg11`; LSTM and Transformers: not in Headway",
            "one curve was measured, of a small network ([accuracy](accuracy.md))",
        ),
    ]


def list_rows() -> list[str]:
    tables = (build_input_table(), build_minutes_table(), build_devices_table(), build_scale_table())
    return ["| " + " | ".join(row) + " |" for table in tables for row in table]


def test_the_page_has_what_the_planner_gives() -> None:
    missing = [row for row in list_rows() if row not in PAGE.read_text().splitlines()]
    assert not missing, "docs/decks.md lacks these rows:\n" + "\n".join(missing)
