"""Published training rates of one device beside the roofline of its data sheet: `python -m bench._plan.single`.

The rates are those of scaling.csv on the fewest devices of a series, per device, and two of a P40 that choose nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import final

from bench._common import table
from bench._plan.scaling import device_of, rows
from headway.plan.cluster import load_devices
from headway.plan.compute import estimate_from_data_sheet
from headway.plan.workloads import find_workload

# Names in scaling.csv of the networks that the catalog has. Its other sequences and networks are not in the catalog.
NETWORKS = {
    "ResNet-50": "resnet50", "ResNet-50 v1.5": "resnet50", "AlexNet": "alexnet", "VGG-16": "vgg16",
    "BERT-large 512": "bert-large",
}  # fmt: skip
# Whether activations have 16 bits.
NARROW = {"FP32": False, "TF32": False, "AMP": True, "FP16": True, "mixed": True}


@final
@dataclass(frozen=True)
class Single:
    """Attributes: images_s: published, of one device; estimate: by the data sheet, with the same samples in a step."""

    workload: str
    device: str
    narrow: bool
    samples: float
    images_s: float
    estimate: float
    source: str

    @property
    def group(self) -> tuple[str, str, bool]:
        return self.workload, self.device, self.narrow


def list_singles() -> list[Single]:
    """Lists the rates of scaling.csv on the fewest devices of each series, without the P40's."""
    found = []
    for row in rows():
        network = NETWORKS.get(row.model)
        if network is None or row.images_s is None or device_of(row) == "p40":
            continue
        if row.gpus == min(one.gpus for one in rows() if one.series == row.series and one.images_s is not None):
            samples, each = row.batch, row.images_s / row.gpus
            found.append(build_single(network, device_of(row), NARROW[row.precision], samples, each, row.source))
    return found


def list_p40() -> list[Single]:
    """Lists the two rates of ResNet-50 on a P40, 64 samples in a step: table 9 of the deck on four minutes."""
    source = "ImageNet in four minutes, table 9"
    return [
        build_single("resnet50", "p40", narrow, 64, images_s, source)
        for narrow, images_s in ((False, 172.0), (True, 218.0))
    ]


def build_single(network: str, device: str, narrow: bool, samples: float, images_s: float, source: str) -> Single:
    workload = find_workload(network, ("precision=fp16",) if narrow else ())
    compute = estimate_from_data_sheet(workload, load_devices()[device]).compute
    return Single(network, device, narrow, samples, images_s, samples / compute.seconds(samples), source)


def measure_spread(singles: list[Single]) -> float:
    """Root mean square of ln(estimate / published) over the groups, each by its mean."""
    groups = defaultdict[tuple[str, str, bool], list[float]](list)
    for one in singles:
        groups[one.group].append(math.log(one.estimate / one.images_s))
    return math.sqrt(sum((sum(logs) / len(logs)) ** 2 for logs in groups.values()) / len(groups))


def main() -> None:
    found = list_singles()
    cells = [
        (one.workload, one.device, "16 bits" if one.narrow else "fp32", f"{one.samples:g}", f"{one.images_s:,.1f}",
         f"{one.estimate:,.1f}", f"{one.estimate / one.images_s:.2f}", one.source)
        for one in (*found, *list_p40())
    ]  # fmt: skip
    table([("network", "device", "activations", "samples", "published", "estimate", "ratio", "source"), *cells])
    fp32, fp16 = list_p40()
    print(f"Spread over {len({one.group for one in found})} groups of {len(found)} rates: {measure_spread(found):.3f}.")
    print(f"P40, fp16 / fp32: {fp16.images_s / fp32.images_s:.3f} published, {fp16.estimate / fp32.estimate:.3f} here.")


if __name__ == "__main__":
    main()
