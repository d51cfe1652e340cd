"""A facility plan as an HTML page: cards, a drawing of racks, switches and cables, and all lines of the text."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from headway.core.files import write_atomically
from headway.core.text_format import format_bytes, pluralise
from headway.page import panel, renderer
from headway.page.panel import Panel
from headway.plan import facility_text
from headway.plan.facility import STORAGE_NAMES, FacilityPlan, name_link
from headway.plan.placement import Placement

# Pods, and racks per pod, that are drawn one by one. The drawing says how many more there are.
MAX_PODS, MAX_RACKS = 6, 8
NODE_W, NODE_H, GAP = 38, 14, 8
DARK, GREEN, BLUE, ORANGE, GREY = "#33404f", "#4f9d4f", "#3d7ab8", "#d0802a", "#7d8895"


def write_page(plan: FacilityPlan, path: Path, placement: Placement | None = None) -> None:
    """Writes the plan as one HTML file."""
    nodes = plan.wanted.nodes
    title, panels = f"A facility of {nodes:,} nodes", build_panels(plan, placement)
    write_atomically(path, renderer.render(panels, title=title, subtitle=plan.machine.title, sections=("Plan",)))


def build_panels(plan: FacilityPlan, placement: Placement | None = None) -> list[Panel]:
    """Builds the panels in the order of the page."""
    net, feed = plan.fabric, plan.feed
    switches = " + ".join(f"{many} x {ports}" for ports, many in net.switches.items())
    cards = [
        ("racks", f"{plan.racks:,}", f"{pluralise(plan.nodes_per_rack, 'node')} in each"),
        ("power", f"{plan.watts / 1000:,.1f} kW", f"{plan.building_watts / 1000:,.1f} kW with the building"),
        ("switches", switches, f"{net.oversubscription:.3g}:1 between leaves" if net.leaves > 1 else "full bisection"),
        (f"{name_link(plan.machine)} cables", f"{net.node_cables + net.switch_cables:,}", ""),
        ("reads", f"{format_bytes(feed.bytes_s)}/s", STORAGE_NAMES[feed.storage]),
    ]
    picture = "data:image/svg+xml;base64," + base64.b64encode(draw_facility(plan).encode()).decode()
    panels = [
        panel.cards("cards", "Requirements", cards, order=1, section="Plan"),
        panel.images(
            "racks", "Racks, switches and cables", [(picture, "", "")], whole=True, order=2, section="Plan",
            width="full", note="The number on a line counts its cables. Each green bar is a node.",
        ),
        panel.table("bill", "Summary", ["", ""], facility_text.list_rows(plan), order=3, section="Plan", width="full"),
    ]  # fmt: skip
    if placement is not None:
        panels.append(_build_jobs_panel(placement))
    return panels


def _build_jobs_panel(placement: Placement) -> Panel:
    """Builds the table of jobs: nodes on each pod, and traffic between pods."""
    rows = [
        (f"{job.nodes:,}", *(str(part or "") for part in parts), f"{placement.count_bytes_between(number) / 1e6:,.0f}")
        for number, (job, parts) in enumerate(zip(placement.jobs, placement.parts, strict=True))
    ]
    pods = [f"pod {number + 1} ({nodes} nodes)" for number, nodes in enumerate(placement.pods)]
    note = facility_text.describe_jobs(placement)[-1]
    columns = ["nodes", *pods, "MB between pods, each step"]
    return panel.table("jobs", "Placement of the jobs", columns, rows, order=4, section="Plan", width="full", note=note)


@dataclass(frozen=True)
class _Rack:
    """One rack."""

    # Nodes of the pod that the rack stands in.
    own: int
    # Nodes of the next pod.
    rest: int


def draw_facility(plan: FacilityPlan) -> str:
    """Draws the facility as SVG: cores on top, leaves below, racks at the bottom under the leaf of their nodes."""
    net, pods = plan.fabric, plan.pods
    pod_racks = _fill_racks(pods, plan.nodes_per_rack)[:MAX_PODS]
    widths = [
        max(len(racks[:MAX_RACKS]), 1) * (NODE_W + GAP) + GAP + (34 if len(racks) > MAX_RACKS else 0)
        for racks in pod_racks
    ]
    tallest = min(plan.nodes_per_rack, plan.wanted.nodes)
    inner = sum(widths) + 30 * (len(pod_racks) - 1)
    total = max(inner + (90 if len(pods) > MAX_PODS else 0) + 40, 420)
    core_y, leaf_y = 20, 130 if net.cores else 30
    rack_y = leaf_y + 90
    height = rack_y + tallest * (NODE_H + 4) + 60
    # Left edge and centre of each pod: a leaf stands above the centre of its racks.
    x = (total - inner) / 2 if len(pods) <= MAX_PODS else 20.0
    lefts, middles = list[float](), list[float]()
    for width in widths:
        lefts.append(x)
        middles.append(x + width / 2)
        x += width + 30
    shapes = list[str]()
    # Cables first, so that racks and switches cover their ends. A rack on the border of two pods has cables to both
    # leaves.
    for number, racks in enumerate(pod_racks):
        following = middles[number + 1] if number + 1 < len(middles) else None
        shapes += _draw_cables(racks, lefts[number], middles[number], following, leaf_y, rack_y, net.ports_per_node)
    for number, racks in enumerate(pod_racks):
        shapes += _draw_pod(
            pods[number], racks, lefts[number], middles[number], leaf_y, rack_y, tallest, net.leaf_ports
        )
    if len(pods) > MAX_PODS:
        shapes.append(_draw_text(x + 30, rack_y + 20, f"and {len(pods) - MAX_PODS:,} more", GREY))
    # Two leaves are joined directly; more of them hang on the core, which is drawn as one box.
    if net.leaves == 2:
        y = leaf_y + 15
        shapes.append(_draw_line(middles[0] + 55, y, middles[1] - 55, y, ORANGE, 3))
        shapes.append(_draw_text(sum(middles) / 2, y - 6, f"{net.up}", ORANGE))
    elif net.cores:
        centre = sum(middles) / len(middles)
        for middle in middles:
            shapes.append(_draw_line(middle, leaf_y, centre, core_y + 34, ORANGE, 3))
            shapes.append(_draw_text((middle * 2 + centre) / 3 + 14, leaf_y - 24, f"{net.up}", ORANGE))
        name = f"{net.cores} x {net.core_ports} ports" if net.cores > 1 else f"{net.core_ports} ports"
        shapes.append(_draw_box(centre - 75, core_y, 150, 34, ORANGE, f"core: {name}"))
    style = "font-family='system-ui,sans-serif' font-size='12'"
    view = f"viewBox='0 0 {total:.0f} {height:.0f}' width='{total:.0f}' height='{height:.0f}'"
    ground = f"<rect width='{total:.0f}' height='{height:.0f}' fill='#ffffff'/>"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {view} {style}>{ground}{''.join(shapes)}</svg>"


def _fill_racks(pods: Sequence[int], per_rack: int) -> list[list[_Rack]]:
    """Distributes the nodes of each pod over racks. A rack with nodes of two pods stands in the first."""
    rows, left = list[list[_Rack]](), 0
    for at, nodes in enumerate(pods):
        # Nodes of this pod that already stand in the last rack of the pod before.
        nodes -= left
        following = pods[at + 1] if at + 1 < len(pods) else 0
        whole, last = divmod(nodes, per_rack)
        racks = [_Rack(per_rack, 0)] * whole
        left = min(per_rack - last, following) if last else 0
        rows.append([*racks, *([_Rack(last, left)] if last else [])])
    return rows


def _draw_cables(
    racks: Sequence[_Rack], x: float, middle: float, following: float | None, leaf_y: float, rack_y: float, ports: int
) -> list[str]:
    """Draws the cables from racks to their leaf, and from a shared rack to the next pod's leaf."""
    shapes = list[str]()
    for at, rack in enumerate(racks[:MAX_RACKS]):
        # The cable ends in the middle of its rack.
        centre = x + GAP + at * (NODE_W + GAP) + NODE_W / 2
        shapes.append(_draw_line(centre, rack_y, middle, leaf_y + 30, BLUE, 1.5))
        shapes.append(_draw_text(centre, rack_y - 5, f"{rack.own * ports}", BLUE))
        if rack.rest and following is not None:
            shapes.append(_draw_line(centre + 20, rack_y, following, leaf_y + 30, BLUE, 1.5))
            shapes.append(_draw_text(centre + 34, rack_y - 5, f"{rack.rest * ports}", BLUE))
    return shapes


def _draw_pod(
    nodes: int, racks: Sequence[_Rack], x: float, middle: float, leaf_y: float, rack_y: float, tallest: int, ports: int
) -> list[str]:
    """Draws the racks, the nodes and the leaf switch of a pod."""
    tall, shapes = tallest * (NODE_H + 4) + 8, list[str]()
    for at, rack in enumerate(racks[:MAX_RACKS]):
        left = x + GAP + at * (NODE_W + GAP)
        shapes.append(f"<rect x='{left}' y='{rack_y}' width='{NODE_W}' height='{tall}' rx='3' fill='#eef1f5'/>")
        for row in range(rack.own + rack.rest):
            y = rack_y + 6 + row * (NODE_H + 4)
            size = f"width='{NODE_W - 10}' height='{NODE_H}' rx='2'"
            shapes.append(f"<rect x='{left + 5}' y='{y}' {size} fill='{GREEN}'/>")
    if len(racks) > MAX_RACKS:
        shapes.append(
            _draw_text(x + GAP + MAX_RACKS * (NODE_W + GAP) + 14, rack_y + 30, f"+ {len(racks) - MAX_RACKS}", GREY)
        )
    shapes.append(_draw_box(middle - 55, leaf_y, 110, 30, BLUE, f"{ports} ports"))
    shapes.append(_draw_text(middle, rack_y + tall + 18, f"{nodes} nodes, {len(racks)} racks", DARK))
    return shapes


def _draw_line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}' stroke-width='{width}'/>"


def _draw_box(x: float, y: float, width: float, height: float, colour: str, label: str) -> str:
    box = f"<rect x='{x:.1f}' y='{y:.1f}' width='{width}' height='{height}' rx='4' fill='{colour}'/>"
    return box + _draw_text(x + width / 2, y + height / 2 + 4, label, "#ffffff")


def _draw_text(x: float, y: float, content: str, colour: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='middle' fill='{colour}'>{escape(content)}</text>"
