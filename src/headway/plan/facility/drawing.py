"""Drawing of a facility as SVG: the fabric above the racks, the storage network below them.

From top to bottom: core switches, the switch of each pod, its racks with a bar for each node, a tray that gathers the
Ethernet cables of the racks, storage and management switches, main switches, storage servers. The number beside a line
counts its cables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from headway.core.text_format import pluralise
from headway.plan.facility.design import FacilityPlan

# Pods, and racks per pod, that are drawn one by one. The drawing says how many more there are.
MAX_PODS, MAX_RACKS = 4, 8
RACK_W, NODE_W, NODE_H, NODE_STEP = 38, 28, 14, 18
# From one rack to the next: room for the number beside its line.
RACK_STEP, POD_GAP, MARGIN = 62, 30, 20
# Narrowest pod whose switches still hold their captions.
POD_W = 360
SWITCH_H, TRAY_H, LINE_H = 40, 6, 44
# Share of the width of a pod for storage switches, from the left, and for management switches, from the right.
STORAGE_SHARE, MANAGEMENT_SHARE = 0.54, 0.42
DARK, GREEN, BLUE, ORANGE, GREY, TEAL = "#33404f", "#4f9d4f", "#3d7ab8", "#c06a14", "#6b7683", "#2b8080"


@dataclass(frozen=True)
class _Column:
    """A pod as it is drawn."""

    left: float
    width: float
    # Nodes in each rack; empty for storage servers.
    racks: tuple[int, ...]
    title: str

    @property
    def middle(self) -> float:
        return self.left + self.width / 2


def draw_facility(plan: FacilityPlan) -> str:
    """Draws the facility as SVG."""
    columns = _arrange_columns(plan)
    right = max(column.left + column.width for column in columns)
    more = plan.fabric.pods - min(plan.fabric.pods, MAX_PODS)
    shapes = list[str]()
    top = _draw_top(plan, columns, right, shapes)
    floor = _draw_pods(plan, columns, top, shapes)
    if more:
        shapes.append(_draw_text(right + POD_GAP, floor - NODE_H, f"and {more:,} more pods", GREY))
    bottom = _draw_ethernet(plan, columns, floor, shapes)
    width, height = right + MARGIN + (150 if more else 0), bottom + MARGIN
    style = "font-family='system-ui,sans-serif' font-size='12'"
    view = f"viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' height='{height:.0f}'"
    ground = f"<rect width='{width:.0f}' height='{height:.0f}' fill='#ffffff'/>"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {view} {style}>{ground}{''.join(shapes)}</svg>"


def _arrange_columns(plan: FacilityPlan) -> list[_Column]:
    """Arranges the pods from left to right, with the pods of storage servers behind them."""
    columns, left = list[_Column](), float(MARGIN)
    for pod, nodes in enumerate(plan.pods[:MAX_PODS]):
        whole, rest = divmod(nodes, plan.nodes_per_rack)
        racks = (plan.nodes_per_rack,) * whole + ((rest,) if rest else ())
        # Beside the racks there is room for the number of those that are not drawn.
        width = max(POD_W, (min(len(racks), MAX_RACKS) + (len(racks) > MAX_RACKS)) * RACK_STEP)
        title = f"pod {pod + 1}: {pluralise(nodes, 'node')} in {pluralise(len(racks), 'rack')}"
        columns.append(_Column(left, width, racks, title))
        left += width + POD_GAP
    if plan.fabric.storage_pods:
        title = f"{pluralise(plan.fabric.storage_pods, 'pod')} of storage"
        columns.append(_Column(left, POD_W, (), title))
    return columns


def _draw_top(plan: FacilityPlan, columns: Sequence[_Column], right: float, shapes: list[str]) -> float:
    """Draws what joins the pods. Returns the top of their switches."""
    net, left = plan.fabric, MARGIN
    if net.leaves == 1:
        return MARGIN
    if net.is_direct:
        # The cables run from the one switch to the other: below, with the pods.
        y = MARGIN + SWITCH_H / 2
        one, other = columns
        shapes.append(_draw_line(one.left + one.width, y, other.left, y, ORANGE))
        shapes.append(_draw_text((one.left + one.width + other.left) / 2, y - 6, str(net.up), ORANGE, "middle"))
        return MARGIN
    cores = f"core: {pluralise(net.cores, 'switch')} of {net.core_ports} ports"
    name = cores if net.cores else f"patch panels: {pluralise(net.up, 'cord')} between the pods"
    shapes.append(_draw_box(left, MARGIN, right - left, SWITCH_H, ORANGE, [name]))
    for column in columns:
        links = net.up * (1 if column.racks else net.storage_pods)
        _draw_drop(shapes, column.middle, MARGIN + SWITCH_H, ORANGE, f"{links:,} {plan.link_name}")
    return MARGIN + SWITCH_H + LINE_H


def _draw_pods(plan: FacilityPlan, columns: Sequence[_Column], top: float, shapes: list[str]) -> float:
    """Draws the switch, the racks and the nodes of each pod. Returns the bottom of the racks."""
    net = plan.fabric
    tall = max(max(column.racks, default=0) for column in columns) * NODE_STEP + 8
    racks_top = top + SWITCH_H + LINE_H
    for column in columns:
        switches = "switch" if column.racks else pluralise(net.storage_pods, "switch")
        lines = [f"{switches} of {net.leaf_ports} ports", column.title]
        shapes.append(_draw_box(column.left, top, column.width, SWITCH_H, BLUE, lines))
        if not column.racks:
            _draw_drop(shapes, column.middle, top + SWITCH_H, BLUE, f"{net.storage_links:,} {plan.link_name}")
            servers = [pluralise(plan.network.servers, "storage server"), f"{plan.network.server_link}"]
            shapes.append(_draw_box(column.left, racks_top, column.width, SWITCH_H, TEAL, servers))
            continue
        drawn = column.racks[:MAX_RACKS]
        used = (len(drawn) + (len(column.racks) > MAX_RACKS)) * RACK_STEP
        for at, nodes in enumerate(drawn):
            left = column.middle - used / 2 + at * RACK_STEP + (RACK_STEP - RACK_W) / 2
            _draw_drop(shapes, left + RACK_W / 2, top + SWITCH_H, BLUE, f"{nodes * net.ports_per_node}")
            shapes.append(f"<rect x='{left:.1f}' y='{racks_top}' width='{RACK_W}' height='{tall}' fill='#e3e8ee'/>")
            for row in range(nodes):
                y, x = racks_top + 6 + row * NODE_STEP, left + (RACK_W - NODE_W) / 2
                shapes.append(f"<rect x='{x:.1f}' y='{y}' width='{NODE_W}' height='{NODE_H}' fill='{GREEN}'/>")
        if len(column.racks) > MAX_RACKS:
            left = column.middle + used / 2 - RACK_STEP
            shapes.append(_draw_text(left, racks_top + 14, f"+ {len(column.racks) - MAX_RACKS}", GREY))
    return racks_top + tall


@dataclass(frozen=True)
class _Group:
    """Drawn pods whose Ethernet cables go to the same switches, and the nodes that these serve."""

    left: float
    right: float
    nodes: int


def _draw_ethernet(plan: FacilityPlan, columns: Sequence[_Column], floor: float, shapes: list[str]) -> float:
    """Draws the storage and management switches, and what the storage switches hang on. Returns the bottom."""
    net, pods = plan.network, [column for column in columns if column.racks]
    tray, switches = floor + 8, floor + 8 + TRAY_H + LINE_H
    groups = _group_pods(plan, pods)
    for group in groups:
        width = group.right - group.left
        shapes.append(f"<rect x='{group.left}' y='{tray}' width='{width}' height='{TRAY_H}' fill='{GREY}'/>")
        if net.leaf is not None and net.blocks is not None:
            share = width * STORAGE_SHARE
            cables = f"{group.nodes * net.node_ports:,} x {net.name}"
            _draw_drop(shapes, group.left + share / 2, tray + TRAY_H, TEAL, cables)
            count = net.blocks.count(group.nodes)
            lines = [f"storage: {pluralise(count, 'switch')}", f"of {net.leaf.title}"]
            shapes.append(_draw_box(group.left, switches, share, SWITCH_H, TEAL, lines))
        share = width * MANAGEMENT_SHARE
        left = group.right - share
        _draw_drop(shapes, left + share / 2 - 20, tray + TRAY_H, GREY, f"{group.nodes:,} x 1 GbE")
        count = plan.management.blocks.count(group.nodes)
        lines = [f"management: {pluralise(count, 'switch')}", f"of {plan.management.leaf.title}"]
        shapes.append(_draw_box(left, switches, share, SWITCH_H, GREY, lines))
    bottom = switches + SWITCH_H
    if net.blocks is None:
        return bottom
    left, right = groups[0].left, groups[-1].right
    if net.mains and net.main is not None:
        for group in groups:
            uplinks = net.blocks.count(group.nodes) * net.uplinks
            middle = group.left + (group.right - group.left) * STORAGE_SHARE / 2
            _draw_drop(shapes, middle, bottom, TEAL, f"{uplinks:,} x {net.server_link}")
        bottom += LINE_H
        lines = [f"main: {pluralise(net.mains, 'switch')} of {net.main.title}"]
        shapes.append(_draw_box(left, bottom, right - left, SWITCH_H, DARK, lines))
        bottom += SWITCH_H
    # The servers stand below a lone storage switch, or in the middle below the main switches.
    middle = (left + right) / 2 if net.mains else left + (right - left) * STORAGE_SHARE / 2
    _draw_drop(shapes, middle, bottom, TEAL, f"{net.server_ports:,} x {net.server_link}")
    bottom += LINE_H
    shapes.append(_draw_box(middle - 95, bottom, 190, SWITCH_H, TEAL, [pluralise(net.servers, "storage server")]))
    return bottom + SWITCH_H


def _group_pods(plan: FacilityPlan, pods: Sequence[_Column]) -> list[_Group]:
    """Groups the drawn pods: each alone, or all together if pods share Ethernet switches."""
    sizes = [blocks.size for blocks in (plan.network.blocks, plan.management.blocks) if blocks is not None]
    if max(sizes) > plan.fabric.nodes_per_pod and len(pods) > 1:
        return [_Group(pods[0].left, pods[-1].left + pods[-1].width, plan.wanted.nodes)]
    return [_Group(pod.left, pod.left + pod.width, sum(pod.racks)) for pod in pods]


def _draw_drop(shapes: list[str], x: float, top: float, colour: str, label: str) -> None:
    """Draws a line down to the next level, with a label beside it."""
    shapes.append(_draw_line(x, top, x, top + LINE_H, colour))
    shapes.append(_draw_text(x + 4, top + LINE_H / 2 + 4, label, colour))


def _draw_line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    place = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {place} stroke='{colour}' stroke-width='2'/>"


def _draw_box(x: float, y: float, width: float, height: float, colour: str, lines: Sequence[str]) -> str:
    """Draws a switch or server with its caption, centred line by line."""
    box = f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height}' rx='4' fill='{colour}'/>"
    first = y + height / 2 + 4 - 8 * (len(lines) - 1)
    texts = [_draw_text(x + width / 2, first + 16 * row, line, "#ffffff", "middle") for row, line in enumerate(lines)]
    return box + "".join(texts)


def _draw_text(x: float, y: float, content: str, colour: str, anchor: str = "start") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}'>{escape(content)}</text>"
