"""Published runs on one to thousands of devices: rows of role `calibrate` give the speed of a device, and rows of role
`predict` are predicted and compared with the measurement.

A row holds only what its publication gives: device, devices per node, link between nodes, precision. Everything else
comes from the catalog: one rule for each kind of link, none for a single row or series. A run on several nodes is
predicted from the runs of its series that calibrate, and from the one on a single whole node where there is one.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, final

import numpy as np
import yaml

from bench._plan.buckets import make_even_buckets
from headway.plan.calibration import RUN_ERROR, Calibration, MeasuredRun, StepParameters, calibrate, compute_root
from headway.plan.catalogs import read_catalog
from headway.plan.cluster import Cluster, InterNodeLink, IntraNodeLink, load_clusters
from headway.plan.compute import estimate_fixed_s
from headway.plan.losses import LossPriors, load_priors
from headway.plan.sensitivity import Z_90
from headway.plan.step import NCCL_ALGORITHMS, StepTime, predict_step

FILE = Path(__file__).with_name("scaling.csv")
SMALL_EFFICIENCY = 0.95
"""On one node, rows below it are scored too."""
UNKNOWN_BATCH = 64
"""Of a device, where a publication does not say it."""
LINES = [(r"NDR|HDR|EDR|FDR", "infiniband"), (r"RoCE", "roce"), (r"GbE|Ethernet", "tcp")]
"""(what a link is called, its kind in the catalog), the first that fits."""
DEVICES = {
    "H100": "h100", "A100-SXM 80GB": "a100-80gb", "A100": "a100", "V100-SXM3": "v100-32gb", "V100": "v100",
    "P100": "p100", "P40": "p40", "K80": "k80",
}  # fmt: skip
INSIDE = {"h100": "dgx-h100", "a100-80gb": "dgx-a100", "a100": "dgx-a100", "v100-32gb": "dgx-2h", "v100": "dgx-1",
          "p100": "dgx-1-p100"}  # fmt: skip
"""Clusters of the catalog whose NVLink a device with it has, in nodes of 8 or more; others have PCIe."""


@final
@dataclass(frozen=True)
class Row:
    """One published run; as in the file. Attributes: images_s, efficiency: one of them is there. group: runs of one
    publication on one machine, which no fit and its test share; set: the first rows, and those that came later."""

    series: str
    model: str
    device: str
    per_node: int
    link: str
    precision: str
    gpus: int
    samples: int | None
    images_s: float | None
    efficiency: float | None
    role: str
    clock: str
    source: str
    note: str
    group: str
    set: str

    @property
    def batch(self) -> int:
        """Of a device."""
        return self.samples or UNKNOWN_BATCH

    @property
    def nodes(self) -> int:
        return max(1, -(-self.gpus // self.per_node))

    @property
    def run(self) -> MeasuredRun:
        assert self.images_s is not None
        return MeasuredRun(self.gpus, self.batch, self.images_s)


@cache
def rows() -> tuple[Row, ...]:
    """All of the file."""
    found = []
    with FILE.open(encoding="utf-8", newline="") as file:
        for one in csv.DictReader(file):
            found.append(
                Row(
                    one["series"], one["model"], one["device"], int(one["gpus_per_node"]), one["link_between_nodes"],
                    one["precision"], int(one["gpus"]), _number(one["batch_per_gpu"], int),
                    _number(one["images_per_s"], float), _number(one["efficiency_pct"], float), one["role"],
                    one["clock"], one["source"], one["note"], one["group"], one["set"],
                )
            )  # fmt: skip
    return tuple(found)


def _number(text: str, kind: Any) -> Any:
    return kind(text) if text else None


@cache
def models() -> dict[str, dict[str, float]]:
    text = FILE.with_name("models.yaml").read_text(encoding="utf-8")
    return {name: {key: float(value) for key, value in one.items()} for name, one in yaml.safe_load(text).items()}


def device_of(row: Row) -> str:
    """Its name in the catalog."""
    return next(name for said, name in DEVICES.items() if said in row.device)


def cluster_of(row: Row) -> Cluster:
    """As the row describes it."""
    device = device_of(row)
    linked = device in INSIDE and row.per_node >= 8
    inside = load_clusters()[INSIDE[device]].inside if linked else IntraNodeLink(**read_catalog("links")["pcie"])
    served = "parameter servers" in row.link  # which hide nothing: weights are fetched before a step begins
    return Cluster(
        title=row.device,
        device=device,
        devices=row.per_node,
        inside=inside,
        between=between_of(row.link),
        algorithms=("shared_server",) if served else None,
        overlap=not served,
    )


def between_of(link: str) -> InterNodeLink:
    """Of the words in which a publication has it; nothing is said of a single node, and InfiniBand is taken."""
    text = link or "EDR100"
    kind = read_catalog("links")[next(kind for pattern, kind in LINES if re.search(pattern, text))]
    latency, efficiency = kind["latency_us"], kind["efficiency"]
    if found := re.search(r"([\d.]+) GB/s", text):  # measured, not the line's rate
        return InterNodeLink(ports=1, gbit_s=8 * float(found[1]), latency_us=latency, efficiency=1.0)
    ports = int(found[1]) if (found := re.match(r"(\d+)x ", text)) else 1
    rate = re.search(r"(?:NDR|HDR|EDR|FDR)(\d+)|(\d+) GbE", text)
    assert rate is not None
    return InterNodeLink(ports=ports, gbit_s=float(rate[1] or rate[2]), latency_us=latency, efficiency=efficiency)


def gradient_bytes(row: Row) -> float:
    """In the type of the weights: automatic mixed precision keeps both in 32 bits."""
    return models()[row.model]["parameters"] * (2 if row.precision in ("mixed", "FP16") else 4)


def step_of(parameters: StepParameters, row: Row, ranks: int) -> StepTime:
    """On so many devices of the row's kind, with its batch."""
    cluster = cluster_of(row)
    network = cluster.build_network(max(1, -(-ranks // row.per_node)))
    if ranks < row.per_node:
        network = replace(network, ranks_per_host=ranks)
    losses = parameters.losses if cluster.overlap else replace(parameters.losses, hidden=0.0)
    return predict_step(
        parameters.compute,
        row.batch,
        make_even_buckets(gradient_bytes(row)),
        network,
        losses=losses,
        among=cluster.algorithms or NCCL_ALGORITHMS,
    )


@final
@dataclass(frozen=True)
class Predicted:
    """Attributes: value, linear: of the row's quantity, images/s or efficiency; linear is from the largest run that
    calibrates. scored: whether it counts. spread: standard deviation of the logarithm of `value`. basis: what the
    device's step comes from."""

    row: Row
    value: float
    linear: float
    scored: bool
    spread: float
    basis: str
    step: StepTime

    @property
    def published(self) -> float:
        found = self.row.images_s if self.row.images_s is not None else self.row.efficiency
        assert found is not None
        return found

    @property
    def error(self) -> float:
        return self.value / self.published - 1

    @property
    def linear_error(self) -> float:
        return self.linear / self.published - 1

    @property
    def surprise(self) -> float:
        """|ln(predicted / published)| in standard deviations."""
        return abs(math.log(self.value / self.published)) / self.spread

    @property
    def in_band(self) -> bool:
        """In that of 90 %."""
        return self.surprise <= Z_90


@final
@dataclass(frozen=True)
class Basis:
    """What a row is predicted from: runs, and the calibration by them for the row's network."""

    runs: Sequence[Row]
    calibration: Calibration
    how: str

    @property
    def parameters(self) -> StepParameters:
        return self.calibration.parameters


def basis_of(row: Row, priors: LossPriors) -> Basis:
    """Of a row with the role `predict`."""
    own = [one for one in rows() if one.series == row.series and one.role == "calibrate"]
    how = f"{len(own)} of its series"
    if not own:
        own = _like(row)
        how = f"the device, by {own[0].series}"
    elif row.nodes > 1:
        own += [
            one for one in rows() if one.series == row.series and one.role == "predict" and one.gpus == one.per_node
        ]
        how = f"{len(own)} of its series"
    if found := re.search(r"(?:t0 from|second point of) (\S+)", own[0].note):
        priors = _narrow_fixed(priors, [one for one in rows() if one.series == found[1] and one.role == "calibrate"])
    calibration = calibrate_rows(own, priors)
    compute = calibration.parameters.compute
    there = replace(compute, sample_s=compute.sample_s / _ratio(own[0], row))
    return Basis(own, replace(calibration, parameters=replace(calibration.parameters, compute=there)), how)


def calibrate_rows(known: Sequence[Row], priors: LossPriors) -> Calibration:
    """By runs of one series."""
    by_run = {one.run: one for one in known}
    return calibrate(
        list(by_run),
        lambda parameters, run: step_of(parameters, by_run[run], run.ranks).seconds,
        priors,
        likely_fixed_s(known[0]),
    )


def likely_fixed_s(row: Row) -> float:
    """Fixed time of a step before anything is measured."""
    return estimate_fixed_s(models()[row.model]["parameters"], cluster_of(row).device_spec)


def _narrow_fixed(priors: LossPriors, others: Sequence[Row]) -> LossPriors:
    """Priors whose fixed time is the one of another series on such a device."""
    found = calibrate_rows(others, priors)
    spread = float(np.sqrt(found.covariance[1, 1]))
    fixed = found.parameters.compute.fixed_s / likely_fixed_s(others[0])
    return replace(priors, fixed=fixed, spreads=(spread, *priors.spreads[1:]))


def predicted(row: Row, priors: LossPriors | None = None) -> Predicted:
    """Of a row with the role `predict`. priors: of the catalog, if none are given."""
    priors = priors or load_priors("field")
    basis = basis_of(row, priors)
    known = basis.parameters
    value, step = _value_of(known, row), step_of(known, row, row.gpus)
    columns = compute_root(basis.calibration.covariance).T
    moved = [math.log(_value_of(known.move(column), row) / value) for column in columns]
    spread = math.hypot(RUN_ERROR, priors.band * math.hypot(*moved))
    if row.images_s is None:
        return Predicted(row, value, 100.0, True, spread, basis.how, step)
    largest, smallest = (of(basis.runs, key=lambda one: one.gpus) for of in (max, min))
    linear, from_smallest = (one.run.images_s / one.gpus * row.gpus * _ratio(one, row) for one in (largest, smallest))
    scored = row.nodes > 1 or row.images_s < SMALL_EFFICIENCY * from_smallest
    return Predicted(row, value, linear, scored, spread, basis.how, step)


def _value_of(parameters: StepParameters, row: Row) -> float:
    """Images/s, or the efficiency in percent where that was published."""
    images_s = row.gpus * row.batch / step_of(parameters, row, row.gpus).seconds
    if row.images_s is not None:
        return images_s
    than = _reference(row)
    alone = than * row.batch / step_of(parameters, row, than).seconds
    return 100 * (images_s / row.gpus) / (alone / than)


def _reference(row: Row) -> int:
    """Devices of which the published efficiency is relative to; one, if nothing is said."""
    found = re.search(r"relative to (\d+) devices", row.note)
    return int(found[1]) if found else 1


def _ratio(known: Row, row: Row) -> float:
    """Images/s of a device on the row's network, over those on another's."""
    return models()[known.model]["multiply_adds"] / models()[row.model]["multiply_adds"]


def _like(row: Row) -> list[Row]:
    """Runs of the smallest scale on the same device and in its precision, with the nearest batch."""
    precise = row.precision == "FP32"
    known = [
        one
        for one in rows()
        if one.role == "calibrate"
        and device_of(one) == device_of(row)
        and (one.precision == "FP32") == precise
        and one.set == row.set
    ]
    nearest = min(known, key=lambda one: (abs(one.batch - row.batch), one.gpus))
    return [one for one in known if one.series == nearest.series]
