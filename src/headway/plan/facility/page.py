"""A facility plan as an HTML page: cards, a drawing of racks, switches and cables, and all lines of the text."""

from __future__ import annotations

import base64
from pathlib import Path

from headway.core.files import write_atomically
from headway.core.text_format import format_bytes, pluralise
from headway.page import panel, renderer
from headway.page.panel import Panel
from headway.plan.facility import text
from headway.plan.facility.design import FacilityPlan
from headway.plan.facility.drawing import draw_facility
from headway.plan.facility.equipment import SERVER
from headway.plan.facility.placement import Placement
from headway.plan.facility.simulation import SimulationNeed
from headway.plan.facility.storage import STORAGE_NAMES


def write_page(
    plan: FacilityPlan, path: Path, placement: Placement | None = None, simulation: SimulationNeed | None = None
) -> None:
    """Writes the plan as one HTML file."""
    nodes = plan.wanted.nodes
    title, panels = f"A facility of {nodes:,} nodes", build_panels(plan, placement, simulation)
    write_atomically(path, renderer.render(panels, title=title, subtitle=plan.machine.title, sections=("Plan",)))


def build_panels(
    plan: FacilityPlan, placement: Placement | None = None, simulation: SimulationNeed | None = None
) -> list[Panel]:
    """Builds the panels in the order of the page."""
    net, feed = plan.fabric, plan.feed
    switches = [one for one in plan.equipment if one.name != SERVER]
    kinds = ", ".join(f"{one.count:,} {one.name}" for one in switches)
    bisection = f"{net.oversubscription:.3g}:1 between pods" if net.leaves > 1 else "full bisection"
    per_rack = pluralise(plan.nodes_per_rack, "node")
    cards = [
        (
            "racks",
            f"{plan.racks + plan.equipment_racks:,}",
            f"{plan.racks:,} of up to {per_rack}; {plan.equipment_racks:,} of the rest",
        ),
        ("power", f"{plan.watts / 1000:,.1f} kW", f"{plan.building_watts / 1000:,.1f} kW with the building"),
        ("switches", f"{sum(one.count for one in switches):,}", f"{kinds}; {bisection}"),
        (f"{plan.link_name} cables", f"{net.node_cables + net.switch_cables:,}", ""),
        ("reads", f"{format_bytes(feed.bytes_s)}/s", STORAGE_NAMES[feed.storage]),
        ("storage network", plan.network.name, pluralise(plan.network.servers, SERVER)),
    ]
    picture = "data:image/svg+xml;base64," + base64.b64encode(draw_facility(plan).encode()).decode()
    note = (
        "The number beside a line counts its cables. Each green bar is a node. Not drawn: switches that join the"
        " management switches, and the racks of switches and servers."
    )
    panels = [
        panel.cards("cards", "Requirements", cards, order=1, section="Plan"),
        panel.images(
            "racks", "Racks, switches and cables", [(picture, "", "")], whole=True, order=2, section="Plan",
            width="full", note=note,
        ),
        panel.table(
            "bill", "Summary", ["", ""], text.list_rows(plan, placement, simulation), order=3, section="Plan",
            width="full",
        ),
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
    note = text.describe_jobs(placement)[-1]
    columns = ["nodes", *pods, "MB between pods, each step"]
    return panel.table("jobs", "Placement of the jobs", columns, rows, order=4, section="Plan", width="full", note=note)
