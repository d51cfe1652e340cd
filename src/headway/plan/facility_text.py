"""A facility plan as text for a terminal."""

from __future__ import annotations

from headway.plan.facility import RACK_WATTS, STORAGE_NAMES, FacilityPlan, name_link
from headway.plan.placement import Placement
from headway.plan.wording import pluralise

LABEL_WIDTH = 11


def format_facility(found: FacilityPlan, placed: Placement | None = None) -> str:
    """Format the plan: a title, then labelled lines."""
    wanted, machine = found.wanted, found.machine
    gpus = wanted.nodes * machine.gpus
    lines = [f"{wanted.nodes:,} x {machine.title}: {gpus:,} GPUs, {wanted.nodes * machine.tflops / 1e3:,.1f} PFLOPS"]
    for name, parts in {
        "racks": [describe_racks(found), describe_floor(found)],
        "power": [describe_power(found), describe_heat(found)],
        "fabric": describe_fabric(found),
        "cables": [describe_cables(found), describe_ethernet(found)],
        "storage": describe_storage(found),
        "jobs": describe_jobs(placed) if placed else [],
    }.items():
        for first, part in enumerate(parts):
            lines.append(f"  {'' if first else name:<{LABEL_WIDTH}}{part}")
    return "\n".join(lines)


def describe_racks(found: FacilityPlan) -> str:
    """Describe the number of racks and their fill."""
    headroom = found.headroom_watts
    left = f"{headroom / 1000:.1f} kW left" if headroom >= 1 else "none left"
    kw = found.wanted.rack_watts / 1000
    many = f"{pluralise(found.racks, 'rack')} of up to {pluralise(found.nodes_per_rack, 'node')}"
    return f"{many}, {kw:g} kW each; a full one has {left}"


def describe_floor(found: FacilityPlan) -> str:
    """Describe floor space and efficiency, and compare with racks of half the power."""
    spread = f"{found.floor_m2:,.1f} m2 with its share of the aisles"
    half = found.count_racks(found.wanted.rack_watts / 2)
    other = "" if half is None else f"; racks of half the power would be {half:,}"
    return f"{spread}{other}; {found.gflops_per_watt:,.0f} GFLOPS per watt"


def describe_power(found: FacilityPlan) -> str:
    """Describe the power of the nodes and of the building."""
    building = f"{found.building_watts / 1000:,.1f} kW for the building (PUE {found.wanted.pue:g})"
    return f"{found.watts / 1000:,.1f} kW for the nodes, switches apart; {building}"


def describe_heat(found: FacilityPlan) -> str:
    """Describe heat and energy."""
    # Only for racks at least as dense as in NVIDIA's designs, 19.2 kW.
    warning = "; training keeps it there for days: size the cooling for the maximum, not for a mean"
    energy = f"{found.kwh_a_year / 1000:,.0f} MWh a year of training"
    return f"{found.heat_btu_h:,.0f} BTU/h of heat, {energy}{warning if found.wanted.rack_watts >= RACK_WATTS else ''}"


def describe_fabric(found: FacilityPlan) -> list[str]:
    """Describe the switches, their links, and the oversubscription between leaves."""
    net = found.fabric
    kinds = [f"{many} x {ports} ports" for ports, many in net.switches.items()]
    if net.core_ports == net.leaf_ports:
        kinds = [f"({net.leaves} + {net.cores}) x {net.leaf_ports} ports"]
    lines = [f"{' + '.join(kinds)}; {net.ports_per_node} {name_link(found.machine)} ports of each node"]
    if net.leaves == 1:
        lines.append(f"full bisection between all nodes; {pluralise(net.links_left, 'link')} left for more")
        return lines
    top = "to each other" if net.leaves == 2 else f"to {pluralise(net.cores, 'core switch')}"
    lines.append(
        f"full bisection inside {net.nodes_per_leaf:.3g} nodes, {net.oversubscription:.3g}:1 between them:"
        f" {net.up} links of each {top}"
    )
    if net.leaves > 2:
        lines.append(f"{pluralise(net.links_left, 'port')} left at the top")
    return lines


def describe_cables(found: FacilityPlan) -> str:
    """List the cables."""
    net = found.fabric
    parts = [f"{many:,} {kind}" for kind, many in found.cables.items()]
    parts[0] += f" ({net.node_cables:,} of nodes, {net.switch_cables:,} between switches)"
    return ", ".join(parts)


def describe_ethernet(found: FacilityPlan) -> str:
    """Describe the switches of the storage and management networks."""
    ten, one = found.ethernet[10], found.ethernet[1]
    return f"{pluralise(ten, 'switch')} of 24 ports for storage (10 GbE), {one} for management (1 GbE)"


def describe_storage(found: FacilityPlan) -> list[str]:
    """Describe the type of storage, the rates it must deliver, and whether the network to it is fast enough."""
    feed, wanted = found.feed, found.wanted
    lines = [
        STORAGE_NAMES[feed.storage],
        f"{feed.bytes_s / 1e9:,.1f} GB/s of reads in the first epoch, {feed.node_bytes_s / 1e9:.2f} a node"
        f" ({describe_images(found)}), and {feed.write_bytes_s / 1e9:.2g} of writes",
    ]
    if feed.node_bytes_s > feed.path_bytes_s:
        lines.append(
            f"its 10 GbE carry {feed.path_bytes_s / 1e9:.2f} GB/s a node, too little: connect it to the fabric, or copy"
            " the set to local disks first"
        )
    else:
        lines.append(f"its 10 GbE carry {feed.path_bytes_s / 1e9:.2f} GB/s a node: enough")
    if feed.kept is not None:
        disks = f"{found.machine.local_tb:g} TB on a node's own disks"
        lines.append(
            f"later epochs read from the {disks}, which hold the set"
            if feed.kept
            else f"the set is larger than the {disks}: every epoch reads from the storage"
        )
    if wanted.samples is not None:
        lines.append(f"{feed.opens_s:,.0f} opens a second if each of {wanted.samples:,} samples is a file: pack them")
    return lines


def describe_images(found: FacilityPlan) -> str:
    """Describe the training rate of a node and the size of an image."""
    rate = found.machine.images_s if found.wanted.images_s is None else found.wanted.images_s
    whose = found.wanted.images_from if found.wanted.images_s is not None else " of ResNet-50"
    return f"{rate:,.0f} images/s{whose}, {found.wanted.image_bytes / 1e3:,.0f} kB each"


def describe_jobs(placed: Placement) -> list[str]:
    """Describe the pods of each job, and the traffic between pods."""
    lines = []
    for number, (job, parts) in enumerate(zip(placed.jobs, placed.parts, strict=True)):
        where = " + ".join(f"{part} on pod {pod + 1}" for pod, part in enumerate(parts) if part)
        between = placed.count_bytes_between(number)
        crossing = f"; {between / 1e6:,.0f} MB between pods in each step" if between else ""
        lines.append(f"{pluralise(job.nodes, 'node')}: {where}{crossing}")
    how = "the minimum" if placed.exact else "maybe not the minimum, since not all placements were tried"
    return [*lines, f"{placed.total_bytes / 1e6:,.0f} MB between pods for one step of each: {how}"]
