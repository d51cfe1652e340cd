"""The page of two runs beside each other."""

from __future__ import annotations

from pathlib import Path

from headway.core.files import write_atomically
from headway.page import panel
from headway.page import renderer as page
from headway.page.panel import Panel
from headway.report.comparison import Comparison, ratio
from headway.report.panels import metric_text
from headway.train.progress import format_duration

SECTIONS = ("Result", "Time", "Training", "What differs")
WORDS = {"images_s": "images/s", "seconds": "time", "wait_share": "waiting for data", "seconds_to_reach": "to goal"}
"""Of numbers that are no metrics."""


def write(found: Comparison, out: Path | None = None) -> Path:
    """Writes the page, one file that needs nothing else; default: against-NAME.html in the first run's folder."""
    name = found.against.run.folder.resolve().name
    path = out or found.run.run.folder / f"against-{name}.html"
    html = page.render(
        panels(found),
        title=f"{found.run.name} against {found.against.name}",
        subtitle=f"Headway runs, started {found.run.about['started']} and {found.against.about['started']}",
        sections=SECTIONS,
        footer=f"headway {found.run.about['versions']['headway']}",
    )
    write_atomically(path, html)
    return path


def panels(found: Comparison) -> list[Panel]:
    """Result, time and curves of both, and what differs."""
    return [_cards(found), *_time(found), *_curves(found), *_differing(found)]


def _cards(found: Comparison) -> Panel:
    cards = []
    for name, (mine, theirs) in found.numbers().items():
        times = ratio(mine, theirs)
        said = "" if times is None else f": {times:.3g} times"
        label = WORDS.get(name, name.replace("_", " "))
        cards.append((label, _text(name, mine), f"against {_text(name, theirs)}{said}"))
    title = f"{found.run.name} against {found.against.name}"
    return panel.cards("result", title, cards, section="Result", order=100, note=found.sentence())


def _text(name: str, value: float | None) -> str:
    if value is None:
        return "not reached" if name == "seconds_to_reach" else metric_text(name, value)
    if name in ("seconds", "seconds_to_reach"):
        return format_duration(value)
    if name == "wait_share":
        return f"{value:.1%}"
    return f"{value:,.0f}" if name == "images_s" else metric_text(name, value)


def _time(found: Comparison) -> list[Panel]:
    stages = found.stages()
    totals = [max(sum(both[place] for both in stages.values()), 1e-12) for place in (0, 1)]
    rows = []
    for stage, (mine, theirs) in stages.items():
        times = ratio(mine, theirs)
        shares = (f"{mine / totals[0]:.1%}", f"{theirs / totals[1]:.1%}")
        rows.append((stage, _ms(mine), _ms(theirs), "-" if times is None else f"{times:.2f}", *shares))
    names = [side.name for side in found.sides]
    note = "Host time by stage, over the whole run. On a GPU, forward, loss, backward and optimizer are the time to "
    note += "hand work over."
    return [
        panel.bars(
            "stages",
            "Where the time went",
            names,
            [(stage, [float(f"{seconds * 1e3:.4g}") for seconds in both]) for stage, both in stages.items()],
            x_label=found.unit,
            section="Time",
            order=300,
            width="full",
            note=note,
        ),
        panel.table(
            "stage-table",
            f"Stages, {found.unit}",
            ("stage", *names, "ratio", *(f"share, {name}" for name in names)),
            rows,
            section="Time",
            order=310,
            width="full",
        ),
    ]


def _curves(found: Comparison) -> list[Panel]:
    out = []
    metrics = [name for name in found.run.metrics() if name in found.against.metrics()]
    wanted = [("images_s", "Throughput", "images/s", "train"), ("loss", "Training loss", "loss", "train")]
    for name in metrics:
        words = name.replace("_", " ")
        wanted.append((name, f"{words.capitalize()} on the evaluation set", words, "evaluate"))
    for place, (name, title, label, kind) in enumerate(wanted):
        series = []
        for side in found.sides:
            records = side.train if kind == "train" else side.evaluated
            series.append((side.name, [one["epoch"] for one in records], [one.get(name) for one in records]))
        bounds = (
            panel.choose_y_range([value for _, _, values in series for value in values]) if name == "images_s" else None
        )
        curve = panel.lines(
            f"{kind}-{name}",
            title,
            series,
            x_label="epoch",
            y_label=label,
            section="Training",
            order=200 + place,
            y_range=bounds,
        )
        out.append(curve)
    return out


def _differing(found: Comparison) -> list[Panel]:
    """Tables of what differs; what does not is in the sentence."""
    out = []
    for place, (name, title, rows) in enumerate(
        (("recipe", "Recipe", found.recipe()), ("machine", "Machine, versions and data", found.machine()))
    ):
        if rows:
            columns = ("key" if name == "recipe" else "what", *(side.name for side in found.sides))
            cells = [(one.what, one.run, one.against) for one in rows]
            section = "What differs"
            out.append(panel.table(name, title, columns, cells, section=section, order=500 + place, width="full"))
    return out


def _ms(seconds: float) -> str:
    return f"{float(f'{seconds * 1e3:.3g}'):g}"
