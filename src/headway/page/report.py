"""One self-contained HTML file from panels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from headway.core.errors import HeadwayError
from headway.page.charts import Picture, picture
from headway.page.panel import Panel

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
    names = [panel.name for panel in panels]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise HeadwayError(f"two panels are called {twice!r}", fix="Give every panel a name of its own.")
    first = {section: index for index, section in enumerate(sections or ())}
    lowest = {section: min(p.order for p in panels if p.section == section) for section in {p.section for p in panels}}
    drawn = sorted(
        panels, key=lambda p: (first.get(p.section, len(first)), lowest[p.section], p.section, p.order, p.name)
    )
    groups = [(section, _paired(group)) for section, group in groupby(drawn, key=lambda p: p.section)]
    html = _template().render(
        title=title,
        subtitle=subtitle,
        footer=footer,
        groups=groups,
        css=_file("report.css"),
        script=_file("charts.js"),
        plotly=_plotly() if any(p.json for _, pictures in groups for p in pictures) else "",
    )
    return html.encode("utf-8", errors="replace").decode("utf-8")  # a title may hold what is not Unicode


def write(path: Path, html: str) -> None:
    """Write a page aside and rename it into place: who looks finds the old page or the new one, never half."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(html, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise HeadwayError(f"the page cannot be written: {error.strerror}", where=str(path)) from error
    finally:
        aside.unlink(missing_ok=True)


def _paired(panels: Iterable[Panel]) -> list[Picture]:
    """Pictures in order; a half-width panel without a half-width neighbour to share its row becomes full."""
    pictures: list[Picture] = []
    for full, run in groupby(panels, key=lambda panel: panel.width == "full"):
        row = list(run)
        lone = None if full or len(row) % 2 == 0 else row[-1]
        pictures += [picture(panel, full=full or panel is lone) for panel in row]
    return pictures


@cache
def _template() -> Template:
    loader = FileSystemLoader(TEMPLATES)
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template("report.html")


def _file(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs  # 5 MB of text: read where a chart needs it

    return Markup(get_plotlyjs())
