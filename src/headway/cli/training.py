"""The verb that trains: one process, several through the launcher, repeats, and the dry run. `main` has the others."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer

from headway.cli.screen import Json, Overrides, print_result
from headway.core.errors import UsageError
from headway.core.files import expect_writable

if TYPE_CHECKING:
    from headway.training.run_steps import RunResult


@final
@dataclass(frozen=True)
class TrainOptions:
    """The options of `train`, except those that only the dry run has.

    Attributes:
        recipe: path of the recipe; None with --resume.
        overrides: KEY=VALUE for the recipe.
        folder: run folder to create; None: runs/NAME.
        repeat: number of runs, each with a seed of its own.
        resume: folder of the run to resume.
        procs: number of processes.
        hosts: hosts of the processes.
        respawn: replace lost processes; None if neither --respawn nor --no-respawn was given.
    """

    recipe: Path | None
    overrides: Sequence[str]
    folder: Path | None
    repeat: int
    resume: Path | None
    procs: int | None
    hosts: str | None
    respawn: bool | None

    @property
    def uses_launcher(self) -> bool:
        """True if Headway's launcher starts the processes."""
        return self.procs is not None or self.hosts is not None

    def check_dry_run(self) -> None:
        """Raises UsageError if --dry-run cannot be combined with an option, or a recipe is missing."""
        if self.resume is not None or self.repeat > 1 or self.respawn is not None:
            fix = "headway train RECIPE --dry-run [--procs N] [--hosts a:4,b:4] [--samples N --classes K] [--out FILE]"
            raise UsageError("--resume, --repeat and --respawn cannot be combined with --dry-run", fix=fix)
        if self.recipe is None:
            raise UsageError("train needs a recipe", fix="headway train RECIPE --dry-run.")

    def check_training(self) -> None:
        """Raises UsageError if options contradict each other, or recipe and --resume are both missing."""
        # The run folder has the recipe of a run; another recipe would make it another run.
        if self.resume is not None and (self.recipe is not None or self.folder is not None or self.repeat > 1):
            fix = "A run continues with its own recipe: headway train --resume RUN [epochs=40]."
            raise UsageError("a recipe, --run and --repeat cannot be combined with --resume", fix=fix)
        if self.resume is None and self.recipe is None:
            raise UsageError("train needs a recipe", fix="headway train RECIPE, or headway train --resume RUN.")
        if self.uses_launcher and self.repeat > 1:
            fix = "Leave --procs out, or repeat with seed=1, seed=2."
            raise UsageError("--repeat trains in one process and cannot be combined with --procs", fix=fix)
        if not self.uses_launcher and self.respawn is not None:
            fix = "Name --procs or --hosts too, or leave it out."
            flag = "--respawn" if self.respawn else "--no-respawn"
            raise UsageError(f"{flag} only works with --procs or --hosts", fix=fix)


# Typer reads the options from the signature.
def train(
    recipe: Annotated[Path | None, typer.Argument(help="A YAML recipe.")] = None,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option("--run", "--run-folder", help="Run folder to create. Default: runs/NAME.")
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Train this often, with seeds s, s+1, ..., and print mean and interval.")
    ] = 1,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the run in this folder; epochs=40 after it makes the run longer.")
    ] = None,
    procs: Annotated[
        int | None, typer.Option(min=1, help="Number of processes. A lost process costs a step and is replaced.")
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(help="Hosts of the processes, for example `a:4,b:4`, reached by ssh. Default: this host."),
    ] = None,
    respawn: Annotated[
        bool | None, typer.Option(help="With --procs or --hosts: replace lost processes. Default: yes.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, print its cost and memory, and train nothing.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --dry-run: JSON workload to write. Default: NAME.workload.json.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="With --dry-run: size of the training set, which may then be absent.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=2, help="With --samples: number of classes. Default: 1000.")
    ] = None,
    eval_samples: Annotated[int | None, typer.Option(min=1, help="With --samples: size of the evaluation set.")] = None,
    as_json: Json = False,
) -> None:
    """Train a recipe into a run folder, or resume a run."""
    # Without a recipe the first override stands in its place: `--resume RUN epochs=40`.
    if resume is not None and recipe is not None and "=" in str(recipe):
        recipe, overrides = None, [str(recipe), *(overrides or ())]
    options = TrainOptions(recipe, overrides or (), folder, repeat, resume, procs, hosts, respawn)
    sizes: dict[str, Any] = {"samples": samples, "classes": classes, "evaluation_samples": eval_samples}
    # Combinations that cannot work are refused before anything is loaded: torch alone takes seconds.
    if dry_run:
        options.check_dry_run()
        _dry_run(options, out, as_json, **sizes)
        return
    if any(value is not None for value in (out, *sizes.values())):
        fix = "Add --dry-run, or leave them out."
        raise UsageError("--out, --samples, --classes and --eval-samples only work with --dry-run", fix=fix)
    options.check_training()
    if options.uses_launcher:
        _train_on_ranks(options, as_json)
    else:
        _train_in_process(options, as_json)


def _train_in_process(options: TrainOptions, as_json: bool) -> None:
    """Trains in this process, alone or as a rank that another launcher started."""
    # Under another launcher torch would print C++ stacks on every rank when one is lost. The variable counts only if it
    # is set before torch is imported.
    if "RANK" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from headway.training import runs

    if options.resume is not None:
        _print_run(runs.resume(options.resume, overrides=options.overrides), as_json)
        return
    assert options.recipe is not None
    if options.repeat == 1:
        _print_run(runs.train(options.recipe, options.overrides, options.folder), as_json)
    else:
        results = runs.repeat(options.recipe, options.overrides, options.folder, options.repeat)
        _print_repeats(results, as_json)


def _train_on_ranks(options: TrainOptions, as_json: bool) -> None:
    """Trains with Headway's launcher, and exits with its status."""
    from headway.launch.hosts import parse_hosts
    from headway.training import distributed
    from headway.training.runs import extend, find_finished_run

    # Once and here: the ranks find the changed recipe in the run folder.
    if options.resume is not None and options.overrides:
        num_ranks = sum(host.procs for host in parse_hosts(options.procs, options.hosts))
        extend(options.resume, options.overrides, num_ranks)

    # A finished run needs no ranks: its result is printed again.
    if options.resume is not None and (finished_run := find_finished_run(options.resume)) is not None:
        _print_run(finished_run, as_json)
        return
    status = distributed.train_on_ranks(
        options.recipe,
        options.overrides,
        options.folder,
        options.resume,
        procs=options.procs,
        hosts=options.hosts,
        respawn=options.respawn is not False,
        # Rank 0 prints the result, so it needs the option too.
        options=["--json"] if as_json else [],
    )
    raise typer.Exit(status)


def _print_repeats(results: Sequence[RunResult], as_json: bool) -> None:
    """Prints mean and 95 % interval over runs with several seeds."""
    from headway.core.statistics import compute_interval

    intervals = {}
    metrics = [name for name in results[0].summary.get("best") or () if name not in ("step", "epoch")]
    # `seconds_to_reach` exists only in recipes with a goal, under `stop_at`.
    for name in (*metrics, "seconds", "images_s", "seconds_to_reach"):
        summaries = [run.summary | run.summary.get("stop_at", {}) for run in results]
        values = [summary[name] for summary in summaries if summary.get(name) is not None]
        # A goal that some runs did not reach has no mean.
        if len(values) == len(results):
            intervals[name] = compute_interval(values)
    lines = [f"{name:<10} {mean:.5g} +- {half:.2g}" for name, (mean, half) in intervals.items()]
    text = "\n".join([f"{len(results)} runs in {results[0].run.folder.parent}; mean and 95 % interval:", *lines])
    result = {name: {"mean": mean, "interval": half} for name, (mean, half) in intervals.items()}
    print_result({"runs": [str(run.run.folder) for run in results], **result}, as_json, text)
    if any(run.was_interrupted for run in results):
        raise typer.Exit(1)


def _dry_run(options: TrainOptions, out: Path | None, as_json: bool, **sizes: Any) -> None:
    """Prints cost and memory of a run, and writes its workload."""
    from headway.core.run_folder import RunFolder
    from headway.report.dry_run_text import format_dry_run
    from headway.training.dry_run import dry_run

    assert options.recipe is not None
    # A dry run of a large network takes seconds: a path that cannot be written is refused first, and so is a run folder
    # that the run itself would refuse.
    expect_writable(out)
    if options.folder is not None:
        RunFolder.expect_free(options.folder)
    found = dry_run(options.recipe, options.overrides, procs=options.procs, hosts=options.hosts, **sizes)
    out = out or Path(f"{found.workload.name}.workload.json")
    found.workload.write(out)
    print_result(found.to_json() | {"written": str(out)}, as_json, f"{format_dry_run(found)}\n\nWrote {out}.")


def _print_run(result: RunResult, as_json: bool) -> None:
    """Prints the result of a run, on its leading rank; exits with 1 if the run was interrupted."""
    # Every rank has the result; the leading one prints it for all.
    if result.is_lead:
        print_result({"run": str(result.run.folder), **result.summary}, as_json, _describe_run(result))
    if result.was_interrupted:
        raise typer.Exit(1)


def _describe_run(result: RunResult) -> str:
    """Describes a finished or interrupted run, for the terminal."""
    summary, folder = result.summary, result.run.folder
    if result.was_interrupted:
        return f"Stopped at step {summary['step']} of {summary['steps']}; resume with: {result.run.resume_command}"
    best = dict(summary.get("best") or {})
    epochs = round(summary["epochs"], 1)
    best_step, best_epoch = best.pop("step", summary["step"]), best.pop("epoch", summary["epochs"])
    last_metrics = [f"{name} {summary[name]:.4f}" for name in best]
    text = "  ".join(
        [f"Trained {folder}:", *last_metrics, f"{summary['seconds']:.1f} s", f"{summary['images_s']:,.0f} images/s"]
    )
    if summary["damaged_samples"]:
        text += f"\nDamaged samples occurred {summary['damaged_samples']:,} times: see {folder / 'quarantine.jsonl'}."
    # The time to a goal is less than the wall time, so the text names the parts that are left out.
    if stop_result := summary.get("stop_at"):
        goal = ", ".join(f"{name} {value}" for name, value in stop_result["goal"].items())
        seconds_to_goal = stop_result["seconds_to_reach"]
        text += f"\n{goal} " + (f"after {seconds_to_goal:.1f} s" if seconds_to_goal else "was not reached")
        text += f" (the clock leaves out {summary['clock_excludes']})"
    # The weights that are kept may be those of an earlier evaluation.
    best_text = ""
    if best:
        best_epoch_text = (
            "the last epoch" if best_step == summary["step"] else f"epoch {round(best_epoch, 1):g} of {epochs:g}"
        )
        metrics_text = ", ".join(f"{name} {value:.4f}" for name, value in best.items())
        best_text = f"Best: {best_epoch_text}, {metrics_text}; its weights are kept. "
    return f"{text}\n{best_text}Next: headway report {shlex.quote(str(folder))}"
