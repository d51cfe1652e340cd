"""What a facility's plan says on a terminal."""

from __future__ import annotations

from headway.plan.facility import RACK_WATTS, STORAGE_NAMES, FacilityPlan, name_link
from headway.plan.placement import Placement
from headway.plan.wording import pluralise

LABEL_WIDTH = 11


def format_facility(found: FacilityPlan, placed: Placement | None = None) -> str:
    """Lines of at most some 110 columns."""
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
    """How many, and how full."""
    headroom = found.headroom_watts
    left = f"{headroom / 1000:.1f} kW left" if headroom >= 1 else "none left"
    kw = found.wanted.rack_watts / 1000
    many = f"{pluralise(found.racks, 'rack')} of up to {pluralise(found.nodes_per_rack, 'node')}"
    return f"{many}, {kw:g} kW each; a full one has {left}"


def describe_floor(found: FacilityPlan) -> str:
    """What it takes, and what racks of half the power would."""
    spread = f"{found.floor_m2:,.1f} m2 with its share of the aisles"
    half = found.count_racks(found.wanted.rack_watts / 2)
    other = "" if half is None else f"; racks of half the power would be {half:,}"
    return f"{spread}{other}; {found.gflops_per_watt:,.0f} GFLOPS per watt"


def describe_power(found: FacilityPlan) -> str:
    """Of the nodes, and of the building."""
    building = f"{found.building_watts / 1000:,.1f} kW for the building (PUE {found.wanted.pue:g})"
    return f"{found.watts / 1000:,.1f} kW for the nodes, switches apart; {building}"


def describe_heat(found: FacilityPlan) -> str:
    """In both units; and what racks as full as this want."""
    warning = "; training keeps it there for days: cool for all of it, not for a mean"
    energy = f"{found.kwh_a_year / 1000:,.0f} MWh a year of training"
    return f"{found.heat_btu_h:,.0f} BTU/h of heat, {energy}{warning if found.wanted.rack_watts >= RACK_WATTS else ''}"


def describe_fabric(found: FacilityPlan) -> list[str]:
    """Switches, what joins them, and how much less than full bisection that is."""
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
    """The bill."""
    net = found.fabric
    parts = [f"{many:,} {kind}" for kind, many in found.cables.items()]
    parts[0] += f" ({net.node_cables:,} of nodes, {net.switch_cables:,} between switches)"
    return ", ".join(parts)


def describe_ethernet(found: FacilityPlan) -> str:
    """The switches of the other two networks."""
    ten, one = found.ethernet[10], found.ethernet[1]
    return f"{pluralise(ten, 'switch')} of 24 ports for storage (10 GbE), {one} for management (1 GbE)"


def describe_storage(found: FacilityPlan) -> list[str]:
    """Its kind, what it has to give, and whether the way to it is wide enough."""
    feed, wanted = found.feed, found.wanted
    lines = [
        STORAGE_NAMES[feed.storage],
        f"{feed.bytes_s / 1e9:,.1f} GB/s of reads in the first epoch, {feed.node_bytes_s / 1e9:.2f} a node"
        f" ({describe_images(found)}), and {feed.write_bytes_s / 1e9:.2g} of writes",
    ]
    if feed.node_bytes_s > feed.path_bytes_s:
        lines.append(
            f"its 10 GbE carry {feed.path_bytes_s / 1e9:.2f} GB/s a node, too little: have it on the fabric, or fill"
            " local disks before"
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
    """What a node trains on."""
    rate = found.machine.images_s if found.wanted.images_s is None else found.wanted.images_s
    whose = found.wanted.images_from if found.wanted.images_s is not None else " of ResNet-50"
    return f"{rate:,.0f} images/s{whose}, {found.wanted.image_bytes / 1e3:,.0f} kB each"


def describe_jobs(placed: Placement) -> list[str]:
    """Where each goes, and what crosses."""
    lines = []
    for number, (job, parts) in enumerate(zip(placed.jobs, placed.parts, strict=True)):
        where = " + ".join(f"{part} on pod {pod + 1}" for pod, part in enumerate(parts) if part)
        between = placed.count_bytes_between(number)
        crossing = f"; {between / 1e6:,.0f} MB between pods in each step" if between else ""
        lines.append(f"{pluralise(job.nodes, 'node')}: {where}{crossing}")
    how = "the least there is" if placed.exact else "not all ways were weighed"
    return [*lines, f"{placed.total_bytes / 1e6:,.0f} MB between pods for one step of each: {how}"]
