"""The requested facility: the options of `headway plan --facility` in SI units, completed from a workload."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

from headway.core.errors import UsageError
from headway.core.workload import Workload
from headway.plan.cluster import Cluster
from headway.plan.compute import estimate_from_data_sheet
from headway.plan.facility.catalog import NodeSpec, find_node_cluster
from headway.plan.job import build_job
from headway.plan.loading import complete_loading
from headway.plan.workloads import find_workload

RACK_WATTS = 19_200
# Mean size of an encoded ImageNet image (MLPerf Storage, its ResNet-50 workload).
IMAGE_BYTES = 114_660


@final
@dataclass(frozen=True, kw_only=True)
class FacilityRequest:
    """Requested facility, in SI units."""

    nodes: int
    node: str = "dgx-1"
    # Maximum power of a node; None: as in the catalog.
    node_watts: float | None = None
    rack_watts: float = RACK_WATTS
    ports: int | None = None
    oversubscription: float = 2.0
    # Ports of the switches; None: `design_fabric` chooses.
    leaf: int | None = None
    core: int | None = None
    # Training rate of a node; None: ResNet-50's.
    images_s: float | None = None
    # What that rate is of and where it comes from, as the text has it behind the rate.
    images_from: str = "as requested"
    # Noun for the samples.
    unit: str = "images"
    image_bytes: float = IMAGE_BYTES
    # Size of the training set; None: unknown.
    data_bytes: float | None = None
    samples: int | None = None
    # Power of the building over that of the machines.
    pue: float = 1.4
    # Kelvin by which air may warm up in a rack.
    air_rise_k: float = 15.0


def build_facility_request(workload: Workload | None, **values: Any) -> FacilityRequest:
    """Builds a request from the given values, completed from a workload.

    A workload gives size and number of its samples; the training rate of a node then follows from the data sheet.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if workload is not None:
        # Explicit values win over those of the workload.
        samples, encoded = workload.run.samples, workload.input.encoded_bytes
        given |= {"samples": samples, "unit": workload.sample_name}
        if encoded:
            given.setdefault("image_bytes", encoded)
            given.setdefault("data_bytes", samples * encoded)
        if "images_s" not in given and workload.operations:
            rate, limit = _estimate_rate(workload, find_node_cluster(given["node"]))
            given |= {"images_s": rate, "images_from": f"of {workload.name}, {limit}"}
    return FacilityRequest(**given)


def choose_training_rate(request: FacilityRequest, machine: NodeSpec) -> tuple[float, str]:
    """Chooses the images/s that a node trains: the requested rate, else ResNet-50's. Returns it and its source."""
    if request.images_s is not None:
        return request.images_s, request.images_from
    if machine.images_s is not None:
        return machine.images_s, f"of ResNet-50 by {machine.images_from}"
    known = find_workload("resnet50", ("precision=fp16",))
    rate, limit = _estimate_rate(known, find_node_cluster(request.node))
    return rate, f"of ResNet-50 in 16 bits, {limit}"


def _estimate_rate(workload: Workload, cluster: Cluster) -> tuple[float, str]:
    """Estimates the images/s of a node. Returns them and what limits them: its devices, or its CPUs."""
    job = build_job(workload, estimate_from_data_sheet(workload, cluster.device_spec), workload.run.epochs)
    each = job.split_batch(cluster.devices)
    computed = cluster.devices * each / job.compute.seconds(each)
    rate = complete_loading(workload, cluster)[0].node.images_s
    loaded = math.inf if rate is None else rate
    return min(computed, loaded), "by the data sheet" if computed <= loaded else "as its CPUs load"


def check_ranges(request: FacilityRequest, watts: float) -> None:
    """Raises UsageError if a number is out of range.

    Args:
        watts: power of a node.
    """
    limits: list[tuple[str, float | None, float, float, str]] = [
        ("--node-kw", watts / 1000, 0.1, 200, "kW"),
        ("--rack-kw", request.rack_watts / 1000, 1, 300, "kW"),
        ("--pue", request.pue, 1, 3, ""),
        ("--air-rise", request.air_rise_k, 1, 60, "kelvin"),
        ("--images-s", request.images_s, 1, 1e8, "images/s"),
        ("--image-kb", request.image_bytes / 1000, 0.01, 1e6, "kB"),
        ("--data-gb", None if request.data_bytes is None else request.data_bytes / 1e9, 1e-9, 1e9, "GB"),
    ]
    for name, value, low, high, unit in limits:
        if value is not None and not low <= value <= high:
            bounds = f"{low:g} to {high:,g}{' ' + unit if unit else ''}"
            raise UsageError(f"{value:g} is out of range: the option takes {bounds}", where=name)
