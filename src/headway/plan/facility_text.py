"""A facility plan as text for a terminal."""

from __future__ import annotations

from headway.core.text_format import format_bytes, pluralise
from headway.plan.facility import RACK_WATTS, STORAGE_NAMES, FacilityPlan, name_link
from headway.plan.placement import Placement

LABEL_WIDTH = 11


def format_facility(plan: FacilityPlan, placement: Placement | None = None) -> str:
    """Formats the plan: a title, then labelled lines."""
    wanted, machine = plan.wanted, plan.machine
    gpus = wanted.nodes * machine.gpus
    lines = [f"{wanted.nodes:,} x {machine.title}: {gpus:,} GPUs, {wanted.nodes * machine.tflops / 1e3:,.1f} PFLOPS"]
    rows = list_rows(plan, placement)
    return "\n".join([*lines, *(f"  {name:<{LABEL_WIDTH}}{part}" for name, part in rows)])


def list_rows(plan: FacilityPlan, placement: Placement | None = None) -> list[tuple[str, str]]:
    """Lists rows of a topic and a sentence; further sentences of a topic have an empty one."""
    topics = {
        "racks": [describe_racks(plan), describe_floor(plan)],
        "power": [describe_power(plan), describe_heat(plan)],
        "fabric": describe_fabric(plan),
        "cables": [describe_cables(plan), describe_ethernet(plan)],
        "storage": describe_storage(plan),
        "jobs": describe_jobs(placement) if placement else [],
    }
    return [("" if at else name, part) for name, parts in topics.items() for at, part in enumerate(parts)]


def describe_racks(plan: FacilityPlan) -> str:
    """Describes the number of racks and their fill."""
    headroom = plan.headroom_watts
    # Less than a watt is rounding.
    left = f"{headroom / 1000:.1f} kW left" if headroom >= 1 else "none left"
    kw = plan.wanted.rack_watts / 1000
    many = f"{pluralise(plan.racks, 'rack')} of up to {pluralise(plan.nodes_per_rack, 'node')}"
    return f"{many}, {kw:g} kW each; a full one has {left}"


def describe_floor(plan: FacilityPlan) -> str:
    """Describes floor space and efficiency, and compares them with racks of half the power."""
    spread = f"{plan.floor_m2:,.1f} m2 with its share of the aisles"
    # The comparison shows the floor that less power and cooling per rack would cost.
    half = plan.count_racks(plan.wanted.rack_watts / 2)
    other = "" if half is None else f"; racks of half the power would be {half:,}"
    return f"{spread}{other}; {plan.gflops_per_watt:,.0f} GFLOPS per watt"


def describe_power(plan: FacilityPlan) -> str:
    """Describes the power of the nodes and of the building."""
    building = f"{plan.building_watts / 1000:,.1f} kW for the building (PUE {plan.wanted.pue:g})"
    return f"{plan.watts / 1000:,.1f} kW for the nodes, switches apart; {building}"


def describe_heat(plan: FacilityPlan) -> str:
    """Describes heat and energy."""
    # Only for racks at least as dense as in NVIDIA's designs, 19.2 kW.
    warning = "; training keeps it there for days: size the cooling for the maximum, not for a mean"
    energy = f"{plan.kwh_a_year / 1000:,.0f} MWh a year of training"
    return f"{plan.heat_btu_h:,.0f} BTU/h of heat, {energy}{warning if plan.wanted.rack_watts >= RACK_WATTS else ''}"


def describe_fabric(plan: FacilityPlan) -> list[str]:
    """Describes the switches, their links, and the oversubscription between leaves."""
    net = plan.fabric
    kinds = [f"{many} x {ports} ports" for ports, many in net.switches.items()]
    # One kind of switch on both levels: the sum alone would hide the two levels.
    if net.core_ports == net.leaf_ports:
        kinds = [f"({net.leaves} + {net.cores}) x {net.leaf_ports} ports"]
    lines = [f"{' + '.join(kinds)}; {net.ports_per_node} {name_link(plan.machine)} ports of each node"]
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


def describe_cables(plan: FacilityPlan) -> str:
    """Lists the cables."""
    net = plan.fabric
    parts = [f"{many:,} {kind}" for kind, many in plan.cables.items()]
    parts[0] += f" ({net.node_cables:,} of nodes, {net.switch_cables:,} between switches)"
    return ", ".join(parts)


def describe_ethernet(plan: FacilityPlan) -> str:
    """Describes the switches of the storage and management networks."""
    ten, one = plan.ethernet[10], plan.ethernet[1]
    return f"{pluralise(ten, 'switch')} of 24 ports for storage (10 GbE), {one} for management (1 GbE)"


def describe_storage(plan: FacilityPlan) -> list[str]:
    """Describes the type of storage, the rates it must deliver, and whether the network to it is fast enough."""
    feed, wanted = plan.feed, plan.wanted
    lines = [
        STORAGE_NAMES[feed.storage],
        f"{format_bytes(feed.bytes_s)}/s of reads in the first epoch, {format_bytes(feed.node_bytes_s)}/s a node"
        f" ({describe_images(plan)}), and {format_bytes(feed.write_bytes_s)}/s of writes",
    ]
    # The 10 GbE of the storage are apart from the fabric, and much slower than it.
    path = f"its 10 GbE carry {format_bytes(feed.path_bytes_s)}/s a node"
    if feed.node_bytes_s > feed.path_bytes_s:
        lines.append(f"{path}, too little: connect it to the fabric, or copy the set to local disks first")
    else:
        lines.append(f"{path}: enough")
    # Unknown without the size of the training set.
    if feed.kept is not None:
        disks = f"{plan.machine.local_tb:g} TB on a node's own disks"
        lines.append(
            f"later epochs read from the {disks}, which hold the set"
            if feed.kept
            else f"the set is larger than the {disks}: every epoch reads from the storage"
        )
    if wanted.samples is not None:
        lines.append(f"{feed.opens_s:,.0f} opens a second if each of {wanted.samples:,} samples is a file: pack them")
    return lines


def describe_images(plan: FacilityPlan) -> str:
    """Describes the training rate of a node and the size of an image."""
    rate = plan.machine.images_s if plan.wanted.images_s is None else plan.wanted.images_s
    whose = plan.wanted.images_from if plan.wanted.images_s is not None else " of ResNet-50"
    return f"{rate:,.0f} images/s{whose}, {format_bytes(plan.wanted.image_bytes)} each"


def describe_jobs(placement: Placement) -> list[str]:
    """Describes the pods of each job, and the traffic between pods."""
    lines = []
    for number, (job, parts) in enumerate(zip(placement.jobs, placement.parts, strict=True)):
        pods = " + ".join(f"{part} on pod {pod + 1}" for pod, part in enumerate(parts) if part)
        between = placement.count_bytes_between(number)
        crossing = f"; {format_bytes(between)} between pods in each step" if between else ""
        lines.append(f"{pluralise(job.nodes, 'node')}: {pods}{crossing}")
    how = "the minimum" if placement.exact else "maybe not the minimum, since not all placements were tried"
    return [*lines, f"{format_bytes(placement.total_bytes)} between pods for one step of each: {how}"]
