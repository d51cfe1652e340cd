"""The verb that trains: one process, several through the launcher, repeats, and the dry run. `main` has the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.screen import Json, print_result, say
from headway.core.errors import UsageError
from headway.core.files import expect_writable

if TYPE_CHECKING:
    from headway.train.runs import RunResult


# Typer reads the options from the signature.
def train(
    recipe: Annotated[Path | None, typer.Argument(help="A YAML recipe.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Override recipe values, for example batch=128.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--run", "--run-folder", help="Run folder to create; default runs/NAME.")
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Number of trainings, with seeds s, s+1, ...; prints mean and interval.")
    ] = 1,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    procs: Annotated[
        int | None, typer.Option(min=1, help="Number of processes. A lost process costs a step and is replaced.")
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(help="Hosts of the processes, for example a:4,b:4, reached by ssh. Default: this host."),
    ] = None,
    respawn: Annotated[
        bool | None, typer.Option(help="With --procs or --hosts: replace lost processes. Default: yes.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, print its cost and memory, and train nothing.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --dry-run: JSON workload to write; default NAME.workload.json.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="With --dry-run: size of a training set that may be absent.")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=2, help="With --samples: number of classes; default 1000.")] = None,
    eval_samples: Annotated[int | None, typer.Option(min=1, help="With --samples: size of the evaluation set.")] = None,
    as_json: Json = False,
) -> None:
    """Train a recipe into a run folder, or resume a run."""
    plan: dict[str, Any] = {"out": out, "samples": samples, "classes": classes, "eval_samples": eval_samples}
    # Combinations that cannot work are refused before anything is loaded.
    if dry_run:
        if resume is not None or folder is not None or repeat > 1 or respawn is not None:
            fix = "headway train RECIPE --dry-run [--procs N] [--hosts a:4,b:4] [--samples N --classes K] [--out FILE]"
            raise UsageError("--run, --resume, --repeat and --respawn cannot be combined with --dry-run", fix=fix)
        if recipe is None:
            raise UsageError("train needs a recipe", fix="headway train RECIPE --dry-run.")
        _dry_run(recipe, overrides or (), as_json, procs=procs, hosts=hosts, **plan)
        return
    if any(value is not None for value in plan.values()):
        fix = "Add --dry-run, or leave them out."
        raise UsageError("--out, --samples, --classes and --eval-samples only work with --dry-run", fix=fix)
    if resume is not None and (recipe is not None or folder is not None or repeat > 1):
        fix = "A run continues with the recipe that it began with: headway train --resume RUN."
        raise UsageError("a recipe, --run and --repeat cannot be combined with --resume", fix=fix)
    if resume is None and recipe is None:
        raise UsageError("train needs a recipe", fix="headway train RECIPE, or headway train --resume RUN.")
    if procs is not None or hosts is not None:
        if repeat > 1:
            fix = "Leave --procs out, or repeat with seed=1, seed=2."
            raise UsageError("--repeat trains in one process and cannot be combined with --procs", fix=fix)
        target = {"recipe": recipe, "overrides": overrides or (), "folder": folder, "resume": resume}
        _train_on_ranks(target, as_json, procs=procs, hosts=hosts, respawn=respawn is not False)
        return
    if respawn is not None:
        fix = "Name --procs or --hosts too, or leave it out."
        raise UsageError(f"--{'no-' * (not respawn)}respawn only works with --procs or --hosts", fix=fix)
    # Under another launcher torch would print C++ stacks on every rank when one is lost.
    if "RANK" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from headway.train import runs

    if resume is not None:
        _print_run(runs.resume(resume, say=say), as_json)
    elif recipe is not None and repeat == 1:
        _print_run(runs.train(recipe, overrides or (), folder, say=say), as_json)
    elif recipe is not None:
        _print_repeats(runs.repeat(recipe, overrides or (), folder, repeat, say=say), as_json)


def _train_on_ranks(target: dict[str, Any], as_json: bool, **ranks: Any) -> None:
    """Trains with Headway's launcher, and exits with its status."""
    from headway.train import distributed
    from headway.train.runs import find_finished_run

    if (resume := target["resume"]) is not None and (done := find_finished_run(resume, say=say)) is not None:
        _print_run(done, as_json)
        return
    # Rank 0 prints the result, so it needs the option too.
    options = ["--json"] if as_json else []
    raise typer.Exit(distributed.train_on_ranks(*target.values(), **ranks, options=options))


def _print_repeats(ended: Sequence[RunResult], as_json: bool) -> None:
    """Prints mean and 95 % interval over runs with several seeds."""
    from headway.train import runs

    rows = {}
    metrics = [name for name in ended[0].summary.get("best") or () if name not in ("step", "epoch")]
    for name in (*metrics, "seconds", "images_s", "seconds_to_reach"):
        found = [run.summary | run.summary.get("stop_at", {}) for run in ended]
        values = [one[name] for one in found if one.get(name) is not None]
        # A goal that some runs did not reach has no mean.
        if len(values) == len(ended):
            rows[name] = runs.compute_interval(values)
    lines = [f"{name:<10} {mean:.5g} +- {half:.2g}" for name, (mean, half) in rows.items()]
    text = "\n".join([f"{len(ended)} runs in {ended[0].run.folder.parent}; mean and 95 % interval:", *lines])
    result = {name: {"mean": mean, "interval": half} for name, (mean, half) in rows.items()}
    print_result({"runs": [str(run.run.folder) for run in ended], **result}, as_json, text)
    if any(run.was_interrupted for run in ended):
        raise typer.Exit(1)


def _dry_run(
    recipe: Path, overrides: Sequence[str], as_json: bool, *, out: Path | None, eval_samples: int | None, **options: Any
) -> None:
    from headway.report.dry_run_text import format_dry_run
    from headway.train.dry_run import dry_run

    # A dry run of a large network takes seconds: a path that cannot be written is refused first.
    expect_writable(out)
    found = dry_run(recipe, overrides, say=say, evaluation_samples=eval_samples, **options)
    out = out or Path(f"{found.workload.name}.workload.json")
    found.workload.write(out)
    print_result(found.to_json() | {"written": str(out)}, as_json, f"{format_dry_run(found)}\n\nWrote {out}.")


def _print_run(ended: RunResult, as_json: bool) -> None:
    summary, folder = ended.summary, ended.run.folder
    if ended.was_interrupted:
        text = f"Stopped at step {summary['step']} of {summary['steps']}; resume with: {ended.run.resume_command}"
    else:
        best = dict(summary.get("best") or {})
        step, _ = best.pop("step", summary["step"]), best.pop("epoch", None)
        known = [f"{name} {summary[name]:.4f}" for name in best]
        text = "  ".join(
            [f"Trained {folder}:", *known, f"{summary['seconds']:.1f} s", f"{summary['images_s']:,.0f} images/s"]
        )
        # The weights that are kept may be those of an earlier evaluation.
        if step != summary["step"]:
            kept = ", ".join(f"{name} {value:.4f}" for name, value in best.items())
            text += f"\nThe run keeps the best weights, those of step {step:,}: {kept}"
        if summary["damaged_samples"]:
            text += (
                f"\nDamaged samples occurred {summary['damaged_samples']:,} times: see {folder / 'quarantine.jsonl'}."
            )
        reached = summary.get("stop_at")
        if reached:
            goal = ", ".join(f"{name} {value}" for name, value in reached["goal"].items())
            took = reached["seconds_to_reach"]
            text += f"\n{goal} " + (f"after {took:.1f} s" if took else "was not reached")
            text += f" (the clock leaves out {summary['clock_excludes']})"
    if ended.is_lead:
        print_result({"run": str(folder), **summary}, as_json, text)
    if ended.was_interrupted:
        raise typer.Exit(1)
