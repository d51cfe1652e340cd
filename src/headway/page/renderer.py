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
from headway.page.panel_data import CheckedPanel, check_panel

TEMPLATES = Path(__file__).parent / "templates"

# plotly.js with the traces of `charts.js` alone, from deploy/plotly-bundle.sh: 1.8 MB, read if a chart needs it. The
# Python package plotly, whose plotly.js has 4.8 MB, would add 64 MB to an installation.
PLOTLY = "plotly.min.js"


def render(
    panels: Sequence[Panel], *, title: str, subtitle: str, sections: Sequence[str] | None = None, footer: str = ""
) -> str:
    """Render the page as one HTML text that loads nothing from outside itself.

    Args:
        panels: sorted by (order, name) under the heading of their section. Half-width panels stand side by side; one
            without a neighbour takes the full width.
        sections: headings that come first, in this order, if they have a panel; the others follow by their lowest
            order.

    Raises HeadwayError if a panel cannot be drawn, or two have the same name.
    """
    checked = [check_panel(panel) for panel in panels]
    names = [one.document.name for one in checked]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise HeadwayError(f"two panels are called {twice!r}", fix="Give every panel its own name.")
    # Sections in the given order, then by their lowest panel; panels of a section by (order, name).
    first = {section: index for index, section in enumerate(sections or ())}
    lowest: dict[str, int] = {}
    for panel in (one.document for one in checked):
        lowest[panel.section] = min(panel.order, lowest.get(panel.section, panel.order))

    def sort_key(one: CheckedPanel) -> tuple[int, int, str, int, str]:
        panel = one.document
        return (first.get(panel.section, len(first)), lowest[panel.section], panel.section, panel.order, panel.name)

    by_section = groupby(sorted(checked, key=sort_key), key=lambda one: one.document.section)
    groups = [(section, _lay_out(group)) for section, group in by_section]
    html = _load_template().render(
        title=title,
        subtitle=subtitle,
        footer=footer,
        groups=groups,
        css=_read_asset("page.css"),
        script=_read_asset("charts.js"),
        plotly=_read_asset(PLOTLY) if any(one.json for one in checked) else "",
    )
    # A title may hold a file name in another encoding, which Python reads as surrogates.
    return html.encode("utf-8", errors="replace").decode("utf-8")


def _lay_out(checked: Iterable[CheckedPanel]) -> list[tuple[CheckedPanel, bool]]:
    """Return (panel, whether it takes the full width): also if it has no half-width neighbour in its row."""
    placed: list[tuple[CheckedPanel, bool]] = []
    for full, run in groupby(checked, key=lambda one: one.document.width == "full"):
        row = list(run)
        lone = len(row) - 1 if len(row) % 2 and not full else -1
        placed += [(p, full or index == lone) for index, p in enumerate(row)]
    return placed


@cache
def _load_template() -> Template:
    loader = FileSystemLoader(TEMPLATES)
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template("page.html")


def _read_asset(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))
