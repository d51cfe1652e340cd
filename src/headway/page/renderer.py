"""One self-contained HTML file from panels."""

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


def render(
    panels: Sequence[Panel], *, title: str, subtitle: str, sections: Sequence[str] | None = None, footer: str = ""
) -> str:
    """The page as one HTML text that asks for nothing outside itself.

    Args:
        panels: drawn by kind, ascending in (order, name) under the heading of their section. Half-width panels stand
            side by side; one without a neighbour takes the full width.
        sections: the headings that come first, in this order (those without a panel are left out); the others follow
            by their lowest panel order.

    Raises HeadwayError, naming the panel, where one cannot be drawn or two have one name.
    """
    pictures = [check_panel(panel) for panel in panels]
    names = [p.document.name for p in pictures]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise HeadwayError(f"two panels are called {twice!r}", fix="Give every panel a name of its own.")
    first = {section: index for index, section in enumerate(sections or ())}
    lowest: dict[str, int] = {}
    for panel in (p.document for p in pictures):
        lowest[panel.section] = min(panel.order, lowest.get(panel.section, panel.order))

    def place(p: CheckedPanel) -> tuple[int, int, str, int, str]:
        panel = p.document
        return (first.get(panel.section, len(first)), lowest[panel.section], panel.section, panel.order, panel.name)

    drawn = groupby(sorted(pictures, key=place), key=lambda p: p.document.section)
    groups = [(section, _lay_out(group)) for section, group in drawn]
    html = _load_template().render(
        title=title,
        subtitle=subtitle,
        footer=footer,
        groups=groups,
        css=_read_asset("page.css"),
        script=_read_asset("charts.js"),
        plotly=_load_plotly() if any(p.json for p in pictures) else "",
    )
    return html.encode("utf-8", errors="replace").decode("utf-8")  # a title may hold what is not Unicode


def _lay_out(pictures: Iterable[CheckedPanel]) -> list[tuple[CheckedPanel, bool]]:
    """(picture, whether it takes the full width): also where it has no half-width neighbour to share its row."""
    placed: list[tuple[CheckedPanel, bool]] = []
    for full, run in groupby(pictures, key=lambda p: p.document.width == "full"):
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


def _load_plotly() -> Markup:
    from plotly.offline import get_plotlyjs  # 5 MB of text: read where a chart needs it

    return Markup(get_plotlyjs())
