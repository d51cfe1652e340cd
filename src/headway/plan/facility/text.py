"""A facility plan as text for a terminal."""

from __future__ import annotations

from headway.core.text_format import format_bytes, format_count, pluralise
from headway.plan.facility.cables import PATCH_CORD
from headway.plan.facility.design import TRAINING_POWER_SHARE, FacilityPlan
from headway.plan.facility.equipment import SERVER
from headway.plan.facility.fabric import SMALL_RADIX, Fabric
from headway.plan.facility.placement import Placement
from headway.plan.facility.request import RACK_WATTS
from headway.plan.facility.simulation import MILES_PER_NODE_HOUR, SimulationNeed
from headway.plan.facility.storage import STORAGE_NAMES, StorageNetwork
from headway.plan.wording import format_hours

LABEL_WIDTH = 11


def format_facility(
    plan: FacilityPlan, placement: Placement | None = None, simulation: SimulationNeed | None = None
) -> str:
    """Formats the plan: a title, then labelled lines."""
    wanted, machine = plan.wanted, plan.machine
    gpus = wanted.nodes * machine.gpus
    lines = [f"{wanted.nodes:,} x {machine.title}: {gpus:,} GPUs, {wanted.nodes * machine.tflops / 1e3:,.1f} PFLOPS"]
    rows = list_rows(plan, placement, simulation)
    return "\n".join([*lines, *(f"  {name:<{LABEL_WIDTH}}{part}" for name, part in rows)])


def list_rows(
    plan: FacilityPlan, placement: Placement | None = None, simulation: SimulationNeed | None = None
) -> list[tuple[str, str]]:
    """Lists rows of a topic and a sentence; further sentences of a topic have an empty one."""
    topics = {
        "racks": [describe_racks(plan), describe_floor(plan)],
        "power": [describe_power(plan), describe_heat(plan), describe_air(plan)],
        "fabric": describe_fabric(plan),
        "cables": [describe_cables(plan)],
        "storage": describe_storage(plan),
        "network": describe_network(plan),
        "ports": [describe_ports(plan)],
        "driving": describe_simulation(simulation, plan.wanted.nodes) if simulation else [],
        "jobs": describe_jobs(placement) if placement else [],
    }
    return [("" if at else name, part) for name, parts in topics.items() for at, part in enumerate(parts)]


def describe_racks(plan: FacilityPlan) -> str:
    """Describes the number of racks and their fill."""
    headroom = plan.headroom_watts
    # Less than a watt is rounding.
    left = f"{headroom / 1000:.1f} kW" if headroom >= 1 else "no power"
    kw = plan.wanted.rack_watts / 1000
    many = f"{pluralise(plan.racks, 'rack')} of up to {pluralise(plan.nodes_per_rack, 'node')}"
    return (
        f"{many}, {kw:g} kW each; a full one has {left} left; and {pluralise(plan.equipment_racks, 'rack')} for"
        f" {describe_equipment(plan)}"
    )


def describe_equipment(plan: FacilityPlan) -> str:
    """Counts the switches and the storage servers."""
    switches = sum(one.count for one in plan.equipment if one.name != SERVER)
    return f"{pluralise(switches, 'switch')} and {pluralise(plan.network.servers, SERVER)}"


def describe_floor(plan: FacilityPlan) -> str:
    """Describes floor space and efficiency, and compares them with racks of half the power."""
    spread = f"{plan.floor_m2:,.1f} m2 for all racks with their share of the aisles"
    # The comparison shows the floor that less power and cooling per rack would cost.
    half = plan.count_racks(plan.wanted.rack_watts / 2)
    other = "" if half is None else f"; of racks of half the power, nodes would take {half:,}"
    return f"{spread}{other}; {plan.gflops_per_watt:,.0f} GFLOPS per watt"


def describe_power(plan: FacilityPlan) -> str:
    """Describes the power of the nodes, of switches and storage servers, and of the building."""
    building = f"{plan.building_watts / 1000:,.1f} kW for the building (PUE {plan.wanted.pue:g})"
    return (
        f"{plan.watts / 1000:,.1f} kW: {plan.node_watts / 1000:,.1f} kW for the nodes,"
        f" {plan.equipment_watts / 1000:,.1f} kW for switches and storage servers (assumed); {building}"
    )


def describe_heat(plan: FacilityPlan) -> str:
    """Describes heat and energy."""
    # Only for racks at least as dense as in NVIDIA's designs, 19.2 kW.
    warning = "; training keeps it there for days: size the cooling for the maximum, not for a mean"
    heat = f"{format_count(plan.heat_btu_h)} BTU/h of heat{warning if plan.wanted.rack_watts >= RACK_WATTS else ''}"
    share = f"with nodes at {TRAINING_POWER_SHARE:.0%} of their maximum, as SaturnV's under load"
    return f"{heat}; {plan.kwh_a_year / 1000:,.0f} MWh a year of training, {share}"


def describe_air(plan: FacilityPlan) -> str:
    """Describes the air that carries the heat away."""
    rise = f"air that warms up by {plan.wanted.air_rise_k:g} K"
    return f"{plan.air_m3_h:,.0f} m3/h of {rise}: {plan.rack_air_m3_h:,.0f} m3/h through a full rack"


def describe_fabric(plan: FacilityPlan) -> list[str]:
    """Describes the switches, their links, the oversubscription between pods, and growth."""
    net = plan.fabric
    kinds = [f"{many} x {ports} ports" for ports, many in net.switches.items()]
    # One kind of switch on both levels: the sum alone would hide the two levels.
    if net.cores and net.core_ports == net.leaf_ports:
        kinds = [f"({net.leaves} + {net.cores}) x {net.leaf_ports} ports"]
    lines = [f"{' + '.join(kinds)}; {net.ports_per_node} {plan.link_name} ports of each node"]
    if net.leaves == 1:
        lines.append(f"full bisection between all nodes; {pluralise(net.links_left, 'link')} left")
    else:
        top = "to each other" if net.leaves == 2 else f"to {pluralise(net.cores, 'core switch')}"
        lines.append(
            f"full bisection inside {pluralise(net.nodes_per_pod, 'node')}, {net.oversubscription:.3g}:1 between them:"
            f" {net.up} links of each {top}"
        )
    return [*lines, _describe_growth(net)]


def _describe_growth(net: Fabric) -> str:
    """Describes what more nodes change."""
    pods = f"pods of {pluralise(net.nodes_per_pod, 'node')} replicate"
    if net.leaf_ports == SMALL_RADIX and net.leaves <= 2:
        room = pluralise(net.nodes_per_pod * 2, "node")
        return f"room for {room} with two such switches; for more, plan the final number: their pods are larger"
    if net.leaves == 1:
        return f"{pods}: each keeps {net.up} links for others"
    text = f"{pods}: their links end on a panel, so that more pods change no cable of a finished one"
    if not net.cores:
        return text
    left = pluralise(net.links_left, "port") if net.links_left >= net.up else ""
    return f"{text}; {left} left at the top" if left else f"{text}; the next one needs another core switch"


def describe_cables(plan: FacilityPlan) -> str:
    """Lists the cables."""
    net, storage_cords = plan.fabric, plan.storage_patch_cords
    parts = []
    for kind, many in plan.cables.items():
        part = f"{many:,} {kind}"
        if kind == PATCH_CORD:
            part = pluralise(many, kind)
            if net.patch_cords and storage_cords:
                part += f" ({net.patch_cords:,} of the fabric, {storage_cords:,} of the storage)"
        parts.append(part)
    parts[0] += f" ({net.node_cables:,} of nodes{' and storage' if net.storage_pods else ''}"
    parts[0] += f", {net.switch_cables:,} of switches)"
    return ", ".join(parts)


def describe_storage(plan: FacilityPlan) -> list[str]:
    """Describes the type of storage, the rates it must deliver, and the caches of the nodes."""
    feed, wanted = plan.feed, plan.wanted
    lines = [
        STORAGE_NAMES[feed.storage],
        f"{format_bytes(feed.bytes_s)}/s of reads in the first epoch, {format_bytes(feed.node_bytes_s)}/s a node"
        f" ({describe_images(plan)}), and {format_bytes(feed.write_bytes_s)}/s of writes",
    ]
    cache = f"cache: {format_bytes(feed.cache_bytes)} of a node's own disks hold"
    if not feed.cache_bytes:
        lines.append("no cache: nodes have no disks of their own, and read everything in every epoch")
    elif feed.cached is None or feed.later_bytes_s is None:
        lines.append(f"{cache} {format_count(feed.cache_bytes / wanted.image_bytes)} such {wanted.unit}")
    elif feed.cached == 1:
        lines.append(f"{cache} the set: later epochs read nothing from the storage")
    else:
        later = f"later epochs read {format_bytes(feed.later_bytes_s)}/s from the storage"
        lines.append(f"{cache} {feed.cached:.0%} of the set: {later}")
    if wanted.samples is not None:
        lines.append(f"{feed.opens_s:,.0f} opens a second if each of {wanted.samples:,} samples is a file: pack them")
    return lines


def describe_images(plan: FacilityPlan) -> str:
    """Describes the training rate of a node with its source, and the size of an image."""
    rate = f"{plan.images_s:,.0f} {plan.wanted.unit}/s {plan.images_from}"
    return f"{rate}; {format_bytes(plan.wanted.image_bytes)} each"


def describe_network(plan: FacilityPlan) -> list[str]:
    """Describes the network of the storage, from the nodes to the servers, and why no slower one carries the load."""
    net = plan.network
    lines = [f"{name} cannot carry it: {reason}" for name, reason in net.refused]
    carried = f"{format_bytes(net.node_bytes_s)}/s a node"
    if net.leaves:
        lines.append(f"{net.node_ports} x {net.name} of each node carry {carried}: {_describe_switches(net)}")
    else:
        lines.append(f"storage over InfiniBand, on the fabric, which carries {carried}")
    each = format_bytes(net.server_port_bytes_s * net.server_ports / net.servers)
    lines.append(
        f"{pluralise(net.servers, SERVER)} with {net.server_ports // net.servers} x {net.server_link}"
        f"{' each' if net.servers > 1 else ''}, by {'their' if net.servers > 1 else 'its'} ports: a server has to"
        f" deliver up to {each}/s"
    )
    if net.with_cards:
        lines.append(f"{' or '.join(net.with_cards)} would do too, with other cards in the nodes")
    if not net.carries:
        lines.append("so training waits for data until the nodes' caches hold them: store smaller images")
    return lines


def _describe_switches(net: StorageNetwork) -> str:
    assert net.leaf is not None
    switches = f"{pluralise(net.leaves, 'switch')} of {net.leaf.title}"
    if net.main is None:
        return f"{switches}, for nodes and servers"
    uplinks = f"{net.uplinks} x {net.server_link} of each"
    up = format_bytes(net.uplinks * net.uplink_bytes_s)
    return f"{switches}; {uplinks} ({up}/s) to {pluralise(net.mains, 'main switch')} of {net.main.title}"


def describe_ports(plan: FacilityPlan) -> str:
    """Lists the ports in use on the fullest switch of each kind."""
    return ", ".join(f"{one.name} {one.used} of {one.ports}" for one in plan.switches)


def describe_simulation(need: SimulationNeed, nodes: int) -> list[str]:
    """Describes the hours and nodes of simulated driving."""
    lines = [
        f"{need.miles:,.0f} simulated miles take {format_hours(need.hours)} on {pluralise(nodes, 'node')}, at the rate"
        f" of SaturnV's nodes: {MILES_PER_NODE_HOUR:,.0f} miles an hour each"
    ]
    if need.nodes is not None and need.within_hours is not None:
        lines.append(f"in {format_hours(need.within_hours)}: {pluralise(need.nodes, 'node')}")
    return lines


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
