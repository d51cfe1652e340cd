"""What a run's report shows: panels from its metrics and evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import UsageError
from headway.core.files import read_text, write_atomically
from headway.core.recipe import format_value
from headway.core.recipe_yaml import parse_recipe
from headway.core.run_folder import RunFolder
from headway.observe import stragglers
from headway.page import panel
from headway.page import renderer as page
from headway.page.panel import Panel
from headway.report import observation_panels, step_anatomy, utilisation_panels
from headway.setup.inputs import TIER_PHRASES, describe_decoding
from headway.setup.run_log import NON_METRIC_KEYS
from headway.train.evaluation_panels import write_panels
from headway.train.progress import format_duration

SECTIONS = (
    "Result",
    "Training",
    observation_panels.SECTION,
    "Time",
    "Evaluation",
    "Loss landscape",
    "Recipe and machine",
)


def write_report(folder: Path, beside: Sequence[Path] = ()) -> Path:
    """Writes report.html of a run and returns its path.

    Args:
        beside: run folders whose layers' rates are drawn with this one's.

    Raises:
        UsageError: one is no run folder, or has not observed its layers.
    """
    runs = [RunFolder.open(path) for path in (folder, *beside)]
    for run in runs if beside else ():
        if not run.rows_path("layers").exists():
            fix = "Train with observe={layer_rates: true}, or leave --beside out."
            raise UsageError("this run has no rates of layers to compare", where=str(run.folder), fix=fix)
    return write_run_report(runs[0], runs[1:])


def write_run_report(run: RunFolder, beside: Sequence[RunFolder] = ()) -> Path:
    """Writes report.html from the run's metrics and panels; returns its path.

    Args:
        beside: other runs, whose layers' rates are drawn with this one's.
    """
    records = list(run.read_metrics())
    about, recipe = run.read_provenance(origins=dict, command=list, host=dict, versions=dict), run.read_recipe_text()
    summary = run.read_summary()
    for path in run.panels.glob("compared-*.json"):  # with runs that may not be beside it now
        path.unlink()
    train = [record for record in records if record["kind"] == "train"]
    write_panels(run, _build_run_panels(records, summary, about, recipe))
    write_panels(
        run,
        [
            *stragglers.build_panels(run),
            *utilisation_panels.build_panels(run, records, about),
            *observation_panels.build_panels(run, train, beside),
        ],
    )
    made = [Panel.from_json(read_text(path)) for path in sorted(run.panels.glob("*.json"))]
    state = "finished" if summary.get("finished") else "not finished"
    html = page.render(
        made,
        title=f"{run.folder.resolve().name}",
        subtitle=f"Headway run, {state}; started {about['started']} on {about['host']['name']}",
        sections=SECTIONS,
        footer=f"headway {about['versions']['headway']}, torch {about['versions']['torch']}",
    )
    write_atomically(run.report_path, html)
    return run.report_path


def _build_run_panels(
    records: list[dict[str, Any]], summary: dict[str, Any], about: dict[str, Any], recipe: str
) -> list[Panel]:
    train = [record for record in records if record["kind"] == "train"]
    evaluated = [record for record in records if record["kind"] == "evaluate"]
    return [
        _build_cards(summary, evaluated, about),
        *observation_panels.build_divergence_cards(records),
        *_build_curves(train, evaluated),
        *_build_time_panels(train, summary),
        *_build_input_table(summary),
        *step_anatomy.build_panels(summary, about["device"]),
        *_build_recipe_tables(about, recipe),
    ]


def _build_cards(summary: dict[str, Any], evaluated: list[dict[str, Any]], about: dict[str, Any]) -> Panel:
    cards = []
    for name in sorted(_list_metrics(evaluated), key=lambda name: name == "loss"):
        last = evaluated[-1][name]
        cards.append(
            (name.replace("_", " "), format_metric(name, last), f"epoch {evaluated[-1]['epoch']:.4g}, the last")
        )
        best = summary.get("best") or {}
        if best.get(name, last) != last and name != "loss":
            note = f"epoch {best['epoch']:.4g}; these weights are kept"
            cards.append((f"best {name.replace('_', ' ')}", format_metric(name, best[name]), note))
    if summary:
        seconds = summary["seconds"]
        cards.append(("time", format_duration(seconds), f"{summary['step']} of {summary['steps']} steps"))
        reached = summary.get("stop_at")
        if reached:
            goal = ", ".join(f"{name} {value}" for name, value in reached["goal"].items())
            took = reached["seconds_to_reach"]
            cards.append(
                (f"time to {goal}", format_duration(took) if took else "not reached", "see the note on the clock")
            )
        cards.append(("images/s", f"{summary['images_s']:,.0f}", "while training"))
        cards.append(("waiting for data", f"{summary['wait_share']:.1%}", "of training time, after the first batch"))
        if summary["damaged_samples"]:
            cards.append(("damaged samples", f"{summary['damaged_samples']:,}", "listed in quarantine.jsonl"))
    count = about["parameters"]
    cards.append(("parameters", f"{count / 1e6:.3g} M" if count >= 1e6 else f"{count:,}", ""))
    note = f"The clock leaves out {summary['clock_excludes']}." if summary else "This run has not ended yet."
    return panel.cards("result", "Result", cards, section="Result", order=100, note=note)


def format_metric(name: str, value: float | None) -> str:
    """A mean of a metric: accuracies in percent."""
    if value is None:
        return "no number"
    return f"{value:.2%}" if "accuracy" in name or name == "exact" else f"{value:.4g}"


def _list_metrics(records: list[dict[str, Any]]) -> list[str]:
    last = records[-1].items() if records else ()
    return [name for name, value in last if name not in NON_METRIC_KEYS and not isinstance(value, dict)]


def _build_curves(train: list[dict[str, Any]], evaluated: list[dict[str, Any]]) -> list[Panel]:
    """Metrics of training and evaluation, then what only training has. A number that was not finite is a gap."""
    out = []
    names = list(dict.fromkeys([*_list_metrics(evaluated), *_list_metrics(train)]))
    for place, name in enumerate(sorted(names, key=lambda name: name == "loss")):
        series = [
            (label, [r["epoch"] for r in records], [r.get(name) for r in records])
            for label, records in (
                ("training, one batch" if name != "loss" else "training", train),
                ("evaluation", evaluated),
            )
            if any(name in r for r in records)
        ]
        words = name.replace("_", " ")
        out.append(_build_curve(name, words.capitalize(), words, series, order=200 + place))
    if train:
        for place, (name, title, label) in enumerate(
            (
                ("lr", "Learning rate", "learning rate"),
                ("batch", "Batch", "samples of a step"),
                ("images_s", "Throughput", "images/s"),
            )
        ):
            found = [r for r in train if name in r]  # older records do not tell the batch
            epochs, values = [r["epoch"] for r in found], [r[name] for r in found]
            if name != "batch" or len(set(values)) > 1:
                series, bounds = [(label, epochs, values)], panel.choose_y_range(values)
                out.append(_build_curve(name, title, label, series, order=250 + place, y_range=bounds))
    return out


def _build_curve(name: str, title: str, y_label: str, series: list[Any], **more: Any) -> Panel:
    """A panel over epochs in the section on training."""
    return panel.lines(f"curve-{name}", title, series, x_label="epoch", y_label=y_label, section="Training", **more)


def _build_time_panels(train: list[dict[str, Any]], summary: dict[str, Any]) -> list[Panel]:
    out = []
    if summary:
        stages = summary["seconds_by_stage"]
        out.append(
            panel.bars(
                "stages",
                "Where the time went",
                ["run"],
                [(stage, [round(seconds, 4)]) for stage, seconds in stages.items()],
                x_label="seconds",
                section="Time",
                order=300,
                width="full",
                note="Host time by stage. On a GPU, forward, backward and optimizer are the time to hand work over.",
            )
        )
        total = max(sum(stages.values()), 1e-9)
        rows = [(stage, f"{s:.3f}", f"{s / total:.1%}") for stage, s in sorted(stages.items(), key=lambda x: -x[1])]
        out.append(panel.table("stage-table", "Stages", ("stage", "seconds", "share"), rows, section="Time", order=310))
    if train:
        series = [("waiting", [r["epoch"] for r in train], [100 * r["wait_share"] for r in train])]
        out.append(
            panel.lines(
                "curve-wait",
                "Share of time the device waited for data",
                series,
                x_label="epoch",
                y_label="% of training time",
                section="Time",
                order=320,
            )
        )
    return out


def _build_input_table(summary: dict[str, Any]) -> list[Panel]:
    """What each stage of the input would give alone, beside what the run took."""
    found = summary.get("input")
    if found is None:
        return []
    rows = [(f"{name} (the loader's thread)", f"{rate:,.0f}") for name, rate in found["stage_images_s"].items()]
    rows += [(f"{name} (a decoding thread)", f"{rate:,.0f}") for name, rate in found["thread_images_s"].items()]
    rows.append(("the run took", f"{summary['images_s']:,.0f}"))
    threads, cores = found["threads"], found.get("cores")
    name, _, reason = found["tier"].partition(", ")
    note = (
        f"{describe_decoding(found['backend'], threads, cores)} "
        f"Training data {TIER_PHRASES.get(name, name)}: {reason}. "
        f"When a batch was asked for, {found['occupancy']:.1f} of {found['ahead']} were ready in the mean. "
        f"Read: {found['record_bytes'] / 1e6:,.1f} MB."
    )
    title = "Input: images/s of each stage alone"
    return [panel.table("input", title, ("stage", "images/s"), rows, section="Time", order=330, note=note)]


def _build_recipe_tables(about: dict[str, Any], recipe: str) -> list[Panel]:
    values = flatten_recipe(recipe)
    rows = [(key, values.get(key, ""), origin) for key, origin in about["origins"].items()]
    found = [*describe_machine(about), ("command", " ".join(about["command"]))]
    section = "Recipe and machine"
    return [
        panel.table(
            "recipe",
            "Recipe, with where each value came from",
            ("key", "value", "origin"),
            rows,
            section=section,
            order=500,
            width="full",
        ),
        panel.table(
            "machine", "Machine and versions", ("what", "value"), found, section=section, order=510, width="full"
        ),
    ]


def describe_machine(about: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) of where and with what a run was made, from its provenance."""
    host = about["host"]
    return [
        ("processor", f"{host['processor']}, {host['cores']} cores"),
        ("device", about["device"]),
        ("memory", f"{host['memory_bytes'] / 2**30:.1f} GiB"),
        ("system", host["system"]),
        ("torch threads", str(about["torch_threads"])),
        *about["versions"].items(),
        ("git", about["git"] or "not in a git repository"),
        ("data fingerprint", about["fingerprint"][:16]),
    ]


def flatten_recipe(recipe: str) -> dict[str, str]:
    """The leaves of a recipe's YAML by dotted key, as they are written."""
    out: dict[str, str] = {}

    def walk(tree: Any, path: str) -> None:
        if isinstance(tree, dict) and tree:
            for key, value in tree.items():
                walk(value, f"{path}.{key}" if path else str(key))
        else:
            out[path] = format_value(tree)

    walk(parse_recipe(recipe, "recipe.yaml")[0], "")
    return out
