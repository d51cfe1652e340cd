"""Networks against the input of a node: which of them, at which image sizes, wait for loading or for the storage.

The picture is that of "Making DL training times shorter" (deck 000, "Roofline analysis"): a line for each network over
the image size, and horizontal lines for the input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, final

from headway.core.workload import Workload
from headway.plan.cluster import Cluster
from headway.plan.compute import estimate_from_data_sheet
from headway.plan.image_sizes import resize_workload
from headway.plan.job import TrainingJob, build_job
from headway.plan.prediction import estimate_loader_rate, estimate_storage_rates, predict
from headway.plan.roofline import estimate_sample_time
from headway.plan.workloads import convert_precision, find_workload, list_workloads

# Sides of images, in pixels.
SIDES = (128, 160, 192, 224, 256, 320, 384, 448, 512)
# Sides of encoded images that the deck draws lines for.
LOADED_SIDES = (352, 480)


@final
@dataclass(frozen=True)
class NetworkRates:
    """Images/s of a node's devices, without the limits of its input; None: the network does not take that size."""

    name: str
    images_s: tuple[float | None, ...]


@final
@dataclass(frozen=True)
class InputLimit:
    """A part of a node's input, and the images/s that it lets through."""

    name: str
    images_s: float


@final
@dataclass(frozen=True)
class InputRoofline:
    """Rates of networks by image side, and the rates of the input. The planned network is the first, if it can be
    counted at other sizes."""

    sides: tuple[int, ...]
    networks: tuple[NetworkRates, ...]
    limits: tuple[InputLimit, ...]

    def find_limited(self, limit: InputLimit) -> dict[str, int]:
        """Finds the networks that wait for a part of the input, each with the largest side at which it does."""
        found = {}
        for network in self.networks:
            pairs = zip(self.sides, network.images_s, strict=True)
            if waiting := [side for side, rate in pairs if rate is not None and rate > limit.images_s]:
                found[network.name] = waiting[-1]
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain values for JSON. `limits_up_to`: the largest side at which a network waits."""
        return {
            "sides": list(self.sides),
            "networks": [{"name": one.name, "images_s": list(one.images_s)} for one in self.networks],
            "limits": [
                {"name": one.name, "images_s": one.images_s, "limits_up_to": self.find_limited(one)}
                for one in self.limits
            ],
        }


def compute_input_roofline(workload: Workload, job: TrainingJob, cluster: Cluster) -> InputRoofline | None:
    """Computes the rates of the planned network, of the catalog's convolution networks, and of the input, on one node.

    A network's rate is the planner's, whose time of a sample is scaled by the roofline of the layers at each size. The
    catalog's networks compute in the planned precision, with the catalog's own samples per device.

    Returns None for sequences, and where nothing is known of the input.
    """
    limits = tuple(_list_limits(workload, job, cluster))
    if workload.sample_name != "images" or not limits:
        return None
    known = [(f"{workload.name}, planned", workload, job)]
    for name in list_workloads():
        network = convert_precision(find_workload(name), workload.step.precision)
        if name != workload.name and network.sample_name == "images":
            estimate = estimate_from_data_sheet(network, cluster.device_spec)
            known.append((name, network, build_job(network, estimate, network.run.epochs)))
    networks = [NetworkRates(name, _predict_rates(network, its_job, cluster)) for name, network, its_job in known]
    # A network that was made for one size alone tells nothing.
    counted = [one for one in networks if any(one.images_s)]
    return InputRoofline(SIDES, tuple(counted), limits)


def _predict_rates(workload: Workload, job: TrainingJob, cluster: Cluster) -> tuple[float | None, ...]:
    """Predicts the images/s of a node's devices for each image size."""
    device, rates = cluster.device_spec, list[float | None]()
    native_s = estimate_sample_time(workload, device).seconds
    for side in SIDES:
        resized = resize_workload(workload, side)
        if resized is None:
            rates.append(None)
            continue
        times = estimate_sample_time(resized, device).seconds / native_s
        compute = replace(job.compute, sample_s=times * job.compute.sample_s)
        found = predict(replace(job, compute=compute), cluster, 1)
        rates.append(found.batch / found.step.seconds)
    return tuple(rates)


def _list_limits(workload: Workload, job: TrainingJob, cluster: Cluster) -> Iterator[InputLimit]:
    """Lists the known parts of a node's input: loading encoded images of several sizes, and the storage."""
    loaded, pixels = estimate_loader_rate(cluster, 1), workload.input.source_pixels
    if math.isfinite(loaded):
        yield InputLimit("this set" + (f", {math.sqrt(pixels):,.0f} px" if pixels else ""), loaded)
        # Taken to grow as the pixels: the one published figure is 0.61 of this line (docs/plan.md).
        if pixels:
            yield from (InputLimit(f"loading {side} px", loaded * pixels / side**2) for side in LOADED_SIDES)
    # Caches are cold in the first epoch.
    cold, _ = estimate_storage_rates(job, cluster, 1)
    if math.isfinite(cold):
        yield InputLimit("storage", cold)
