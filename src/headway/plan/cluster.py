"""Cluster: what machines there are, and what joins them; from the catalog, or a user's YAML of the same form."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import final

from pydantic import Field

from headway.core.collectives import Link, Network, Sum
from headway.core.errors import UsageError, nearest
from headway.core.recipe import Part, load
from headway.plan.catalogs import read_catalog
from headway.plan.step import GPU_ALGORITHMS

REDUCE_BANDWIDTH_SHARE = 1 / 3
"""Of a device's memory bandwidth, with which it sums up arrays: two are read, one is written."""


class ClusterPart(Part, allow_inf_nan=False):
    """Base of what a user may write in YAML."""


@final
class PeakTflops(ClusterPart):
    """Tera-operations a second of dense matrix products."""

    fp32: float = Field(gt=0)
    tf32: float | None = Field(default=None, gt=0)
    """In which PyTorch computes fp32's convolutions; None: it has no such units."""
    mixed: float | None = Field(default=None, gt=0)
    """16 bit in, fp32 sums; None: no faster than fp32."""


@final
class Device(ClusterPart):
    """Attributes as in catalog/devices.yaml."""

    title: str
    tflops: PeakTflops
    memory_gb: float = Field(gt=0)
    memory_gb_s: float = Field(gt=0)

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9


@final
class IntraNodeLink(ClusterPart):
    """From one device of a node to another, while all of them send."""

    gb_s: float = Field(gt=0)
    latency_us: float = Field(ge=0)


@final
class InterNodeLink(ClusterPart):
    """From a node to others."""

    ports: int = Field(ge=1)
    gbit_s: float = Field(gt=0)
    """Of one port."""
    latency_us: float = Field(ge=0)
    efficiency: float = Field(gt=0, le=1)
    """Bytes of messages over the line's rate."""
    oversubscription: float = Field(default=1.0, ge=1)
    """Between groups of nodes that share a leaf switch."""
    group: int | None = Field(default=None, ge=1)
    """Nodes of such a group; None: all nodes are one."""

    @property
    def bytes_s(self) -> float:
        """Of a node."""
        return self.ports * self.gbit_s * 1e9 / 8 * self.efficiency


@final
class ClusterStorage(ClusterPart):
    """Where the data lie. What is left out does not limit."""

    node_gb_s: float | None = Field(default=None, gt=0)
    """From it to one node."""
    shared_gb_s: float | None = Field(default=None, gt=0)
    """To all nodes together."""
    opens_s: float | None = Field(default=None, gt=0)
    """Files that it opens a second for all nodes together."""
    cache_gb: float = Field(default=0.0, ge=0)
    """Of each node's memory and disks, that keep what was read once."""
    shards: bool = True
    """Many samples lie in one file; else each is one."""


@final
class ClusterNode(ClusterPart):
    """One machine."""

    cores: int | None = Field(default=None, ge=1)
    """By which what one core loads, of a profile, becomes what the machine does."""
    images_s: float | None = Field(default=None, gt=0)
    """That its processors can load, decode and augment; None: as a profile says, else they do not limit."""
    watts: float | None = Field(default=None, gt=0)
    """While it trains."""
    cost_per_hour: float | None = Field(default=None, ge=0)


@final
class Cluster(ClusterPart):
    """Nodes that are alike."""

    title: str
    device: str | Device
    """Name in catalog/devices.yaml; or its data, for one that is not there."""
    devices: int = Field(ge=1)
    """Of a node."""
    nodes: int | None = Field(default=None, ge=1)
    """That there are; None: as many as are asked for."""
    inside: IntraNodeLink
    between: InterNodeLink
    node: ClusterNode = ClusterNode()
    storage: ClusterStorage = ClusterStorage()
    jitter: float = Field(default=0.005, ge=0, lt=1)
    """By how much a device's step varies: standard deviation over mean."""
    pue: float = Field(default=1.4, ge=1, le=3)
    """Power of the building over that of the machines."""
    algorithms: tuple[Sum, ...] = Field(default=GPU_ALGORITHMS, min_length=1)
    """That its library of collectives has; the cheapest is taken for each bucket."""
    overlap: bool = True
    """Whether gradients are exchanged while the backward pass makes others."""

    @property
    def device_spec(self) -> Device:
        """Raises UsageError: there is none of this name."""
        if isinstance(self.device, Device):
            return self.device
        found = load_devices()
        if self.device not in found:
            what = f"there is no device {self.device!r} in the catalog"
            raise UsageError(what, where=f"{self.title}: device", fix=nearest(self.device, found))
        return found[self.device]

    def build_network(self, nodes: int, *, spread: bool = False) -> Network:
        """Of so many nodes.

        Args:
            spread: nodes of other groups lie between those of a job, so that all of its traffic has the narrow links
                to itself only in part; else a ring goes through group after group and crosses each border once.
        """
        far = self.between
        share = far.oversubscription if spread and far.group is not None and nodes > far.group else 1.0
        between = Link(far.latency_us * 1e-6, far.bytes_s / share)
        inside = Link(self.inside.latency_us * 1e-6, self.inside.gb_s * 1e9)
        return Network(
            nodes, self.devices, inside, between, self.device_spec.memory_gb_s * 1e9 * REDUCE_BANDWIDTH_SHARE
        )


@cache
def load_devices() -> dict[str, Device]:
    """name -> device of the catalog."""
    return {name: Device(**values) for name, values in read_catalog("devices").items()}


@cache
def load_clusters() -> dict[str, Cluster]:
    """name -> cluster of the catalog."""
    return {name: Cluster(**values) for name, values in read_catalog("clusters").items()}


def find_cluster(name: str) -> Cluster:
    """By its name in the catalog, or of a YAML file.

    Raises UsageError: there is neither, or the file is none.
    """
    if name in load_clusters():
        return load_clusters()[name]
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        fix = nearest(name, load_clusters())
        raise UsageError("there is no such cluster in the catalog, and it is no YAML file", where=name, fix=fix)
    found = load(path, (), Cluster, kind="cluster", fix="docs/plan.md shows one.")
    try:
        _ = found.recipe.device_spec
    except UsageError as error:
        raise UsageError(error.what, where=found.origins["device"], fix=error.fix) from None
    return found.recipe
