"""Published training runs of a plan's network, beside what the plan gives for their devices and batch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import final

from headway.core.errors import UsageError
from headway.core.text_format import align_table
from headway.core.workload import Workload
from headway.plan.catalogs import read_catalog
from headway.plan.cluster import Cluster, load_devices
from headway.plan.job import IMAGENET_SAMPLES, TrainingJob, is_named
from headway.plan.prediction import Prediction
from headway.plan.scaling import predict_scaling
from headway.plan.wording import format_hours, format_hours_range

# Most runs that a plan shows.
MOST_RUNS = 6
PUBLISHED_TITLE = "Published runs of this network, and this plan at their devices and batch"


@final
@dataclass(frozen=True)
class PublishedRun:
    """A published run on ImageNet. `device` is a name in the catalog, or another one as published."""

    device: str
    devices: int
    batch: int
    minutes: float
    # Percent.
    top1: float
    precision: str
    source: str


@final
@dataclass(frozen=True)
class ComparedRun:
    """A published run and a plan's prediction for it, or the reason why there is none."""

    run: PublishedRun
    planned: Prediction | None
    reason: str = ""


def list_published(network: str) -> list[PublishedRun]:
    """Lists the published runs of a network, `resnet50` or `alexnet`; none of others."""
    return [PublishedRun(**entry) for entry in read_catalog("published").get(network, ())]


def find_network(workload: Workload) -> str:
    """Finds the name under which runs of a workload are published; empty if it is not trained on ImageNet."""
    if workload.run.samples not in IMAGENET_SAMPLES:
        return ""
    return next((known for known in read_catalog("published") if is_named(workload, known)), "")


def compare_published(
    workload: Workload, job: TrainingJob, cluster: Cluster, devices: Collection[int]
) -> list[ComparedRun]:
    """Compares a plan with the published runs of its network on its device, or on as many devices.

    Args:
        devices: planned numbers of devices.
    """
    mine = cluster.device if isinstance(cluster.device, str) else ""
    found = [one for one in list_published(find_network(workload)) if one.device == mine or one.devices in devices]
    # Those of the same device come first.
    chosen = sorted(found, key=lambda one: one.device != mine)[:MOST_RUNS]
    return [_compare_run(workload, job, cluster, run) for run in chosen]


def _compare_run(workload: Workload, job: TrainingJob, cluster: Cluster, run: PublishedRun) -> ComparedRun:
    """Compares a run with the plan of a job, if both are on the same device in the same precision."""
    precision, emulated = workload.step.precision, not cluster.device_spec.has_bf16
    planned_as = "fp32" if precision == "fp32" else "emulated" if precision == "bf16" and emulated else "mixed"
    reason = ""
    if run.device != cluster.device:
        reason = "other device"
    elif run.precision != planned_as:
        reason = f"not in {precision}"
    elif run.devices % cluster.devices:
        reason = f"not nodes of {cluster.devices}"
    if reason:
        return ComparedRun(run, None, reason)
    planned = _predict_run(job, cluster, run)
    return ComparedRun(run, planned, "" if planned is not None else "too many nodes")


def _predict_run(job: TrainingJob, cluster: Cluster, run: PublishedRun) -> Prediction | None:
    """Predicts the job at the devices and the batch of a run; None if the cluster cannot have it."""
    each = run.batch / run.devices
    try:
        # Samples that the run gave to a device at once, as far as is known.
        whole = replace(job, per_device=each, batch=None, accumulate=1)
        return predict_scaling(whole, cluster, [run.devices // cluster.devices])[0]
    except UsageError:
        return None


def list_published_rows(compared: Collection[ComparedRun]) -> list[tuple[str, ...]]:
    """Lists published runs beside the plan: a heading, then a row for each."""
    devices = load_devices()
    table: list[tuple[str, ...]] = [("devices", "batch", "published", "to", "precision", "planned", "90 %", "source")]
    for one in compared:
        run, planned = one.run, one.planned
        title = devices[run.device].title if run.device in devices else run.device
        hours = (one.reason, "-")
        if planned is not None:
            hours = (format_hours(planned.hours), format_hours_range(planned.low_hours, planned.high_hours))
        table.append(
            (f"{run.devices:,} {title}", f"{run.batch:,}", format_hours(run.minutes / 60), f"{run.top1:g} %",
             run.precision, *hours, run.source)
        )  # fmt: skip
    return table


def tabulate_published(compared: Collection[ComparedRun]) -> list[str]:
    """Tabulates published runs beside the plan; no lines if there are none."""
    return [f"{PUBLISHED_TITLE}:", *align_table(list_published_rows(compared), left=-1), ""] if compared else []
