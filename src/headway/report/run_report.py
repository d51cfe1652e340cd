"""Report of a run: panels from its metrics, evaluations and observations, on one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import UsageError
from headway.core.files import read_text, write_atomically
from headway.core.profile import MOST_OTHER_LOAD
from headway.core.recipe import flatten, format_value
from headway.core.recipe_yaml import parse_recipe
from headway.core.run_folder import RunFolder
from headway.core.text_format import format_bytes, format_duration, pluralise
from headway.page import panel
from headway.page import renderer as page
from headway.page.panel import Panel
from headway.report import (
    async_panels,
    callback_panels,
    layer_clocks,
    local_panels,
    observation_panels,
    step_anatomy,
    straggler_panels,
    utilisation_panels,
)
from headway.report.class_table import build_class_table
from headway.report.layer_clocks import LayerClocks
from headway.setup.input_wording import TIER_PHRASES, describe_decoding
from headway.setup.metric_catalog import TOP
from headway.setup.run_log import NON_METRIC_KEYS
from headway.training.callback_context import SECTION
from headway.training.evaluation_panels import write_panels

SHARES = frozenset({"exact", "precision", "recall", "f1", "micro_f1"})
"""Metrics that are shown in percent, beside accuracies."""
SECTIONS = (
    "Result",
    "Training",
    observation_panels.SECTION,
    "Time",
    "Evaluation",
    SECTION,
    "Loss landscape",
    "Recipe and machine",
)


def write_report(folder: Path, beside: Sequence[Path] = ()) -> Path:
    """Writes report.html of a run and returns its path.

    Args:
        beside: Folders of runs whose layer rates are drawn next to this run's.

    Raises:
        UsageError: A folder is not a run folder, or a run did not record its layer rates.
    """
    runs = [RunFolder.open(path) for path in (folder, *beside)]
    for run in runs if beside else ():
        if not run.rows_path("layers").exists():
            fix = "Train with observe={layer_rates: true}, or leave --beside out."
            raise UsageError("the run did not record layer rates to compare", where=str(run.folder), fix=fix)
    return write_run_report(runs[0], runs[1:])


def write_run_report(run: RunFolder, beside: Sequence[RunFolder] = ()) -> Path:
    """Writes report.html from the run's metrics and panels, and returns its path.

    Args:
        beside: Runs whose layer rates are drawn next to this run's.
    """
    # Everything is read from the run folder, so a report can be written at any time, and again.
    records = list(run.read_metrics())
    about, recipe = run.read_provenance(origins=dict, command=list, host=dict, versions=dict), run.read_recipe_text()
    summary = run.read_summary()
    # Comparisons of an earlier report may be with other runs.
    for path in run.panels.glob("compared-*.json"):
        path.unlink()
    train = [record for record in records if record["kind"] == "train"]
    other_load = utilisation_panels.read_other_load(run)
    layers = layer_clocks.read_layer_clocks(run, about["device"])
    write_panels(run, _build_run_panels(records, summary, about, recipe, other_load, layers))
    write_panels(run, [*straggler_panels.build_panels(run), *utilisation_panels.build_panels(run, records, about)])
    write_panels(run, observation_panels.build_panels(run, train, beside))
    write_panels(run, [*async_panels.build_panels(run, train), *local_panels.build_panels(train)])
    # Evaluation, landscape and other commands left panels of their own in the folder.
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
    records: list[dict[str, Any]],
    summary: dict[str, Any],
    about: dict[str, Any],
    recipe: str,
    other_load: float | None,
    layers: LayerClocks | None,
) -> list[Panel]:
    train = [record for record in records if record["kind"] == "train"]
    evaluated = [record for record in records if record["kind"] == "evaluate"]
    return [
        _build_cards(summary, evaluated, about, other_load),
        *observation_panels.build_divergence_cards(records),
        *_build_curves(train, evaluated),
        *_build_time_panels(train, summary),
        *callback_panels.build_panels(records),
        *_build_input_table(summary),
        *step_anatomy.build_panels(summary, about["device"], layers),
        *([] if layers is None else layer_clocks.build_panels(layers)),
        *build_class_table(evaluated, summary.get("best"), about["target"]["classes"]),
        *_build_recipe_tables(about, recipe),
    ]


def _build_cards(
    summary: dict[str, Any], evaluated: list[dict[str, Any]], about: dict[str, Any], other_load: float | None
) -> Panel:
    cards = []
    # The loss comes last: readers look for accuracy first.
    for name in sorted(_list_metrics(evaluated), key=lambda name: name == "loss"):
        last, words = evaluated[-1][name], name.replace("_", " ")
        best, note = summary.get("best") or {}, f"last, epoch {round(evaluated[-1]['epoch'], 1):g}"
        # One card in place of two with the same number.
        if best.get("epoch") == evaluated[-1]["epoch"]:
            cards.append((words, format_metric(name, last), f"{note}, which is the best; its weights are saved"))
            continue
        cards.append((words, format_metric(name, last), note))
        # The loss of the best epoch is not the lowest one.
        if name in best and name != "loss":
            note = f"epoch {round(best['epoch'], 1):g}; its weights are saved"
            cards.append((f"{words}, best", format_metric(name, best[name]), note))
    if summary:
        seconds = summary["seconds"]
        cards.append(("time", format_duration(seconds), f"{summary['step']} of {summary['steps']} steps"))
        if ended := summary.get("ended"):
            cards.append(("ended early", f"step {summary['step']:,}", ended))
        reached = summary.get("stop_at")
        if reached:
            goal = ", ".join(f"{name} {value}" for name, value in reached["goal"].items())
            took = reached["seconds_to_reach"]
            cards.append((f"time to {goal}", format_duration(took) if took else "not reached", "see the clock's note"))
        cards.append(("images/s", f"{summary['images_s']:,.0f}", "while training"))
        cards.append(("waiting for data", f"{summary['wait_share']:.1%}", "of training time, after the first batch"))
        if shares := summary.get("exchange"):
            note = "of training time: " + ", ".join(f"{exchange} {share:.1%}" for exchange, share in shares.items())
            cards.append(("waiting for other processes", f"{summary['exchange_share']:.1%}", note))
        if summary["damaged_samples"]:
            cards.append(("damaged samples", f"{summary['damaged_samples']:,}", "listed in quarantine.jsonl"))
    if resumes := about.get("resumes"):
        note = f"the last time from step {resumes[-1]['step']:,}, by {pluralise(resumes[-1]['ranks'], 'process')}"
        cards.append(("started again", pluralise(len(resumes), "time"), note))
    if other_load is not None and other_load > MOST_OTHER_LOAD:
        note = "of the processor: on an idle machine the times of this run are shorter"
        cards.append(("other programs", f"{other_load:.0%}", note))
    count = about["parameters"]
    cards.append(("parameters", f"{count / 1e6:.3g} M" if count >= 1e6 else f"{count:,}", ""))
    note = "The run has not ended yet."
    if summary:
        note = f"The clock leaves out {summary['clock_excludes']}."
    elif "parents" in about:
        note = "These weights were not trained here: they come from the runs that provenance.json names as parents."
    return panel.cards("result", "Result", cards, section="Result", order=100, note=note)


def format_metric(name: str, value: float | None) -> str:
    """Formats the value of a metric; accuracies in percent."""
    if value is None:
        return "not finite"
    is_share = "accuracy" in name or name in SHARES or TOP.fullmatch(name) is not None
    return f"{value:.2%}" if is_share else f"{value:.4g}"


def _list_metrics(records: list[dict[str, Any]]) -> list[str]:
    last = records[-1].items() if records else ()
    return [name for name, value in last if name not in NON_METRIC_KEYS and not isinstance(value, dict)]


def _build_curves(train: list[dict[str, Any]], evaluated: list[dict[str, Any]]) -> list[Panel]:
    """Builds curves of the metrics, then of values that only training has. A value that is not finite is a gap."""
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
        kinds = (
            ("lr", "Learning rate", "learning rate"),
            ("batch", "Batch", "samples per step"),
            ("images_s", "Throughput", "images/s"),
        )
        for place, (name, title, label) in enumerate(kinds):
            # Older records have no batch.
            points = [r for r in train if name in r]
            epochs, values = [r["epoch"] for r in points], [r[name] for r in points]
            # A constant batch needs no curve: it is in the table of the recipe.
            if name != "batch" or len(set(values)) > 1:
                series, bounds = [(label, epochs, values)], panel.choose_y_range(values)
                out.append(_build_curve(name, title, label, series, order=250 + place, y_range=bounds))
    return out


def _build_curve(name: str, title: str, y_label: str, series: list[Any], **more: Any) -> Panel:
    """Builds a chart over epochs in the section on training."""
    return panel.lines(f"curve-{name}", title, series, x_label="epoch", y_label=y_label, section="Training", **more)


def _build_time_panels(train: list[dict[str, Any]], summary: dict[str, Any]) -> list[Panel]:
    out = []
    if summary:
        stages = summary["seconds_by_stage"]
        stacks = [(stage, [round(seconds, 4)]) for stage, seconds in stages.items()]
        note = "Host time by stage. On a GPU, forward, backward and optimizer are kernel launch times."
        wide: dict[str, Any] = {"section": "Time", "width": "full"}
        out.append(
            panel.bars("stages", "Time by stage", ["run"], stacks, x_label="seconds", order=300, note=note, **wide)
        )
        # A run that was stopped at once has no seconds to divide by.
        total = max(sum(stages.values()), 1e-9)
        # The longest stage comes first, so that the table begins with the bottleneck.
        rows = [(stage, f"{s:.3f}", f"{s / total:.1%}") for stage, s in sorted(stages.items(), key=lambda x: -x[1])]
        out.append(panel.table("stage-table", "Stages", ("stage", "seconds", "share"), rows, section="Time", order=310))
    if train:
        epochs = [r["epoch"] for r in train]
        series = [("waiting for data", epochs, [100 * r["wait_share"] for r in train])]
        if any("exchange_share" in r for r in train):
            shares = [100 * r.get("exchange_share", 0.0) for r in train]
            series.append(("waiting for exchanges with other processes", epochs, shares))
        title = "Share of time spent waiting for data" + (" and for other processes" if len(series) > 1 else "")
        given: dict[str, Any] = {"x_label": "epoch", "y_label": "% of training time", "section": "Time", "order": 320}
        out.append(panel.lines("curve-wait", title, series, **given))
    return out


def _build_input_table(summary: dict[str, Any]) -> list[Panel]:
    """Builds the table of images/s that each input stage reaches alone, and the rate of the run."""
    loader = summary.get("input", {})
    # Batches that another process has decoded have no stages here.
    if "tier" not in loader:
        return []
    # Rates of a single thread: only decoding has several of them.
    rows = [(f"{name} (the loader's thread)", f"{rate:,.0f}") for name, rate in loader["stage_images_s"].items()]
    rows += [(f"{name} (one decoding thread)", f"{rate:,.0f}") for name, rate in loader["thread_images_s"].items()]
    rows.append(("the run", f"{summary['images_s']:,.0f}"))
    threads, cores = loader["threads"], loader.get("cores")
    name, _, reason = loader["tier"].partition(", ")
    note = (
        f"{describe_decoding(loader['backend'], threads, cores)} "
        f"Training data {TIER_PHRASES.get(name, name)}: {reason}. "
        f"On average {loader['occupancy']:.1f} of {loader['ahead']} prefetched batches were ready when the loop asked. "
        f"Read: {format_bytes(loader['record_bytes'])}."
    )
    title = "Input: images/s of each stage alone"
    return [panel.table("input", title, ("stage", "images/s"), rows, section="Time", order=330, note=note)]


def _build_recipe_tables(about: dict[str, Any], recipe: str) -> list[Panel]:
    values = flatten_recipe(recipe)
    rows = [(key, values.get(key, ""), origin) for key, origin in about["origins"].items()]
    machine = [*describe_machine(about), ("command", " ".join(about["command"]))]
    title, wide = "Recipe, with the origin of each value", {"section": "Recipe and machine", "width": "full"}
    return [
        panel.table("recipe", title, ("key", "value", "origin"), rows, order=500, **wide),
        panel.table("machine", "Machine and versions", ("property", "value"), machine, order=510, **wide),
    ]


def describe_machine(about: dict[str, Any]) -> list[tuple[str, str]]:
    """Describes the machine, versions and data of a run as (property, value), from its provenance."""
    host = about["host"]
    return [
        ("processor", f"{host['processor']}, {host['cores']} cores"),
        ("device", about["device"]),
        ("memory", format_bytes(host["memory_bytes"])),
        ("system", host["system"]),
        ("torch threads", str(about["torch_threads"])),
        *about["versions"].items(),
        ("git", about["git"] or "not in a git repository"),
        ("data fingerprint", about["fingerprint"][:16]),
    ]


def flatten_recipe(recipe: str) -> dict[str, str]:
    """Flattens the YAML of a recipe to values by dotted key, written as in the recipe."""
    tree, _ = parse_recipe(recipe, "recipe.yaml")
    return {key: format_value(value) for key, value in flatten(tree)}
