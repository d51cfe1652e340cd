"""Cluster: nodes, devices, links and storage, from the catalog or from a YAML file of the same form."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, final

from pydantic import Field, model_validator

from headway.core.collectives import Algorithm, Link, Network
from headway.core.errors import UsageError, suggest_nearest
from headway.core.recipe import RecipePart, read_recipe
from headway.plan.catalogs import read_catalog

# Share of a device's memory bandwidth at which it sums arrays: two are read, one is written.
REDUCE_BANDWIDTH_SHARE = 1 / 3

# Stands for a link that nothing crosses: PCIe 3 x16, as in catalog/links.yaml.
NO_LINK = Link(5.7e-6, 12e9)


class ClusterPart(RecipePart, allow_inf_nan=False):
    """Base of everything in a cluster's YAML. Refuses infinity and NaN."""


@final
class PeakTflops(ClusterPart):
    """Peak rates of dense matrix products, in tera-operations per second."""

    fp32: float = Field(gt=0)
    # Rate of TF32, in which PyTorch computes fp32 convolutions. None: the device has no TF32.
    tf32: float | None = Field(default=None, gt=0)
    # Rate of 16-bit inputs with fp32 sums. None: no faster than fp32.
    mixed: float | None = Field(default=None, gt=0)


@final
class Device(ClusterPart):
    """One accelerator, with the keys of catalog/devices.yaml."""

    title: str
    tflops: PeakTflops
    memory_gb: float = Field(gt=0)
    memory_gb_s: float = Field(gt=0)
    bf16: bool | None = None
    """Units for bf16; None: those with TF32 have them, as both came with the A100."""

    @property
    def has_bf16(self) -> bool:
        """True if the device computes in bf16."""
        return self.tflops.tf32 is not None if self.bf16 is None else self.bf16

    @property
    def memory_bytes(self) -> float:
        """Memory in bytes."""
        return self.memory_gb * 1e9


def _fill_link(values: Any, key: str) -> Any:
    """Fills the values of a link from the catalog's link of this name. Given values win.

    Args:
        key: value that tells links inside a node from those between nodes.
    """
    if not isinstance(values, dict) or not isinstance(name := values.get("link"), str):
        return values
    links = {known: link for known, link in read_catalog("links").items() if key in link}
    if name not in links:
        raise ValueError(f"there is no link {name!r} in the catalog. {suggest_nearest(name, links)}")
    return {**links[name], **values}


@final
class IntraNodeLink(ClusterPart):
    """Link from one device of a node to another, while all of them send."""

    # Name in catalog/links.yaml, whose values hold where none are given.
    link: str | None = None
    gb_s: float = Field(gt=0)
    latency_us: float = Field(ge=0)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        return _fill_link(values, "gb_s")


@final
class InterNodeLink(ClusterPart):
    """Link from a node to the other nodes."""

    # As above.
    link: str | None = None
    ports: int = Field(default=1, ge=1)
    # Rate of one port.
    gbit_s: float = Field(gt=0)
    latency_us: float = Field(ge=0)
    # Payload rate over line rate.
    efficiency: float = Field(gt=0, le=1)
    # Ratio between groups of nodes that share a leaf switch.
    oversubscription: float = Field(default=1.0, ge=1)
    # Nodes per group. None: all nodes are one group.
    group: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        return _fill_link(values, "efficiency")

    @property
    def bytes_s(self) -> float:
        """Payload rate of a node over all ports."""
        return self.ports * self.gbit_s * 1e9 / 8 * self.efficiency


@final
class ClusterStorage(ClusterPart):
    """Storage of the training set. A rate that is left out does not limit."""

    # Rate from the storage to one node.
    node_gb_s: float | None = Field(default=None, gt=0)
    # Rate from the storage to all nodes together.
    shared_gb_s: float | None = Field(default=None, gt=0)
    # Files opened per second for all nodes together.
    opens_s: float | None = Field(default=None, gt=0)
    # Memory and local disks of each node that keep samples once read.
    cache_gb: float = Field(default=0.0, ge=0)
    # True: a file holds many samples. False: each sample is a file.
    shards: bool = True


@final
class ClusterNode(ClusterPart):
    """One machine of the cluster."""

    # CPU cores; a profile's loading rate per core is scaled to them.
    cores: int | None = Field(default=None, ge=1)
    # Images/s that the CPUs load, decode and augment. None: from a profile, else from the next key, else assumed from
    # the cores.
    images_s: float | None = Field(default=None, gt=0)
    # Million pixels of encoded images that the CPUs load, decode and augment per second.
    decode_mpixels_s: float | None = Field(default=None, gt=0)
    # Standard deviation of the logarithm of the loading speed.
    loading_error: float = Field(default=0.1, ge=0)
    # Power during training.
    watts: float | None = Field(default=None, gt=0)
    cost_per_hour: float | None = Field(default=None, ge=0)


@final
class NodeRoom(ClusterPart):
    """Needs of a node in a facility: its share of a rack, ports for storage, and the rate that the storage feeds."""

    # The most that it draws, and its height in units of a rack.
    watts: float = Field(gt=0)
    units: int = Field(ge=1, le=42)
    # Ethernet ports for storage, and the fastest rate that they run.
    storage_ports: int = Field(default=2, ge=1)
    storage_gbit_s: float = Field(default=25, ge=10)
    # Disks of its own, which cache what it reads.
    local_tb: float = Field(default=0.0, ge=0)
    # Dense matrix products in 16 bits of all devices. None: from the device.
    tflops: float | None = Field(default=None, gt=0)
    # Images/s of ResNet-50, which the storage has to feed if nothing else is said, and their source. None: by the data
    # sheet of the device.
    images_s: float | None = Field(default=None, gt=0)
    images_from: str = "the cluster's file"


@final
class Cluster(ClusterPart):
    """Identical nodes, their links and their storage."""

    title: str
    # Name in catalog/devices.yaml, or the data of a device that is not there.
    device: str | Device
    # Devices per node.
    devices: int = Field(ge=1)
    # Available nodes. None: as many as requested, or 1 without a link between nodes.
    nodes: int | None = Field(default=None, ge=1)
    # May be left out if a node has one device.
    inside: IntraNodeLink | None = None
    # May be left out if there is one node.
    between: InterNodeLink | None = None
    node: ClusterNode = ClusterNode()
    storage: ClusterStorage = ClusterStorage()
    # Needed for a facility. None: unknown, or the node is rented.
    room: NodeRoom | None = None
    # Standard deviation of a device's compute time over its mean. None: from catalog/losses.yaml.
    jitter: float | None = Field(default=None, ge=0, lt=1)
    # Power of the building over that of the machines.
    pue: float = Field(default=1.4, ge=1, le=3)
    # All-reduce algorithms of the collectives library, of which each bucket takes the cheapest. None: Headway's; NCCL's
    # where runs of any software calibrate.
    algorithms: tuple[Algorithm, ...] | None = Field(default=None, min_length=1)
    # True: the all-reduce of a bucket runs while backward computes other gradients.
    overlap: bool = True

    @model_validator(mode="after")
    def _check_links(self) -> Cluster:
        if self.inside is None and self.devices > 1:
            fix = "write for example inside: {gb_s: 24, latency_us: 5.7}"
            raise ValueError(f"inside is missing, the link between the {self.devices} devices of a node: {fix}")
        if self.between is None and (self.nodes or 1) > 1:
            fix = "write for example between: {ports: 1, gbit_s: 100, latency_us: 25, efficiency: 0.8}"
            raise ValueError(f"between is missing, the link from each of the {self.nodes} nodes to the others: {fix}")
        return self

    @property
    def most_nodes(self) -> int | None:
        """Available nodes. None: as many as requested."""
        return 1 if self.between is None else self.nodes

    @property
    def device_spec(self) -> Device:
        """Device of the cluster. Raises UsageError if its name is not in the catalog."""
        if isinstance(self.device, Device):
            return self.device
        devices = load_devices()
        if self.device not in devices:
            problem = f"there is no device {self.device!r} in the catalog"
            raise UsageError(problem, where=f"{self.title}: device", fix=suggest_nearest(self.device, devices))
        return devices[self.device]

    def build_network(self, nodes: int, *, spread: bool = False) -> Network:
        """Builds the network between the devices of this many nodes.

        Args:
            spread: the job's nodes lie between those of other jobs, so that all traffic crosses the oversubscribed
                links. Otherwise a ring passes group after group and crosses each border once.
        """
        # One device alone sends nothing, and so does one node to others; they get a link all the same.
        inside = between = NO_LINK
        if (near := self.inside) is not None:
            inside = between = Link(near.latency_us * 1e-6, near.gb_s * 1e9)
        if (far := self.between) is not None:
            # Placed together, one ring flow leaves each group: the links upwards are not shared, and oversubscription
            # costs nothing. Spread out, every node's flow competes for them.
            share = far.oversubscription if spread and far.group is not None and nodes > far.group else 1.0
            between = Link(far.latency_us * 1e-6, far.bytes_s / share)
        return Network(
            nodes, self.devices, inside, between, self.device_spec.memory_gb_s * 1e9 * REDUCE_BANDWIDTH_SHARE
        )


@cache
def load_devices() -> dict[str, Device]:
    """Loads the devices of the catalog, by name."""
    return {name: Device(**values) for name, values in read_catalog("devices").items()}


@cache
def load_clusters() -> dict[str, Cluster]:
    """Loads the clusters of the catalog, by name."""
    return {name: Cluster(**values) for name, values in read_catalog("clusters").items()}


def find_cluster(name: str, *, kind: str = "cluster") -> Cluster:
    """Finds a cluster by its name in the catalog, or reads a YAML file.

    Args:
        kind: noun for it in an error.

    Raises UsageError if the name is neither, or the file holds no cluster.
    """
    if name in load_clusters():
        return load_clusters()[name]
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        fix = suggest_nearest(name, load_clusters())
        raise UsageError(f"there is no such {kind} in the catalog, and it is not a YAML file", where=name, fix=fix)
    cluster = read_recipe(path, (), Cluster, kind="cluster", fix="docs/plan.md shows one.")
    # A device that the file names must be in the catalog: the error points at that line of the file.
    try:
        _ = cluster.recipe.device_spec
    except UsageError as error:
        raise UsageError(error.what, where=cluster.origins["device"], fix=error.fix) from None
    return cluster.recipe
