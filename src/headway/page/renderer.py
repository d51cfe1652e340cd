"""Renderer of panels: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from headway.core.errors import HeadwayError
from headway.page.panel import Panel
from headway.page.panel_data import CANVAS_KINDS, PLOTLY_KINDS, CheckedPanel, check_panel

TEMPLATE_FOLDER = Path(__file__).parent / "templates"

# plotly.js with the traces of `charts.js` alone, from deploy/plotly-bundle.sh: 1.8 MB, read if a chart needs it. The
# Python package plotly, whose plotly.js has 4.8 MB, would add 64 MB to an installation.
PLOTLY_FILE = "plotly.min.js"


def render(
    panels: Sequence[Panel], *, title: str, subtitle: str, sections: Sequence[str] | None = None, footer: str = ""
) -> str:
    """Returns the page as one HTML text that loads nothing from outside itself.

    Args:
        panels: sorted by (order, name) under the heading of their section. Half-width panels stand side by side; one
            without a neighbour takes the full width.
        sections: headings that come first, in this order, if they have a panel; the others follow by their lowest
            order.

    Raises:
        HeadwayError: a panel cannot be drawn, or two have the same name.
    """
    checked_panels = [check_panel(panel) for panel in panels]
    names = [checked_panel.document.name for checked_panel in checked_panels]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise HeadwayError(f"two panels are called {duplicate!r}", fix="Give every panel its own name.")
    # Sections in the given order, then by their lowest panel; panels of a section by (order, name).
    section_index = {section: index for index, section in enumerate(sections or ())}
    lowest: dict[str, int] = {}
    for panel in (checked_panel.document for checked_panel in checked_panels):
        lowest[panel.section] = min(panel.order, lowest.get(panel.section, panel.order))

    def sort_key(checked_panel: CheckedPanel) -> tuple[int, int, str, int, str]:
        panel = checked_panel.document
        return (
            section_index.get(panel.section, len(section_index)),
            lowest[panel.section],
            panel.section,
            panel.order,
            panel.name,
        )

    panels_by_section = groupby(
        sorted(checked_panels, key=sort_key), key=lambda checked_panel: checked_panel.document.section
    )
    groups = [(section, _lay_out(group)) for section, group in panels_by_section]
    kinds = {one.document.kind for one in checked_panels if one.json}
    html = _load_template().render(
        title=title,
        subtitle=subtitle,
        footer=footer,
        groups=groups,
        css=_read_asset("page.css"),
        script=_read_asset("rules.js") + _read_asset("charts.js"),
        canvas_script=_read_asset("canvas.js") if kinds & set(CANVAS_KINDS) else "",
        plotly=_read_asset(PLOTLY_FILE) if kinds & set(PLOTLY_KINDS) else "",
    )
    # A title may hold a file name in another encoding, which Python reads as surrogates.
    return html.encode("utf-8", errors="replace").decode("utf-8")


def _lay_out(checked_panels: Iterable[CheckedPanel]) -> list[tuple[CheckedPanel, bool]]:
    """Returns (panel, True if it takes the full width): also if it has no half-width neighbour in its row."""
    layout: list[tuple[CheckedPanel, bool]] = []
    for is_full, row_panels in groupby(
        checked_panels, key=lambda checked_panel: checked_panel.document.width == "full"
    ):
        row = list(row_panels)
        lone_index = len(row) - 1 if len(row) % 2 and not is_full else -1
        layout += [(checked_panel, is_full or index == lone_index) for index, checked_panel in enumerate(row)]
    return layout


@cache
def _load_template() -> Template:
    # Strict: a misspelt variable is an error, not an empty string.
    loader = FileSystemLoader(TEMPLATE_FOLDER)
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template("page.html")


def _read_asset(name: str) -> Markup:
    return Markup((TEMPLATE_FOLDER / name).read_text(encoding="utf-8"))
