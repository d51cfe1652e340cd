"""The verbs `landscape`, which draws a minimum, `assess`, which checks the accuracies of a script, and `replay`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.screen import LOG, Json, print_result
from headway.core.files import expect_writable


# Typer reads the options from the signature.
def landscape(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders. A sweep's folder stands for its finished runs.")
    ],
    plane: Annotated[
        bool, typer.Option("--plane", help="Also draw a plane of two directions around each run.")
    ] = False,
    between: Annotated[
        bool,
        typer.Option(
            "--between", help="Also draw lines from the first run to the others, and the plane of three runs."
        ),
    ] = False,
    path: Annotated[bool, typer.Option("--path", help="Also draw each run's checkpoints, in their plane.")] = False,
    points: Annotated[int, typer.Option(help="Points on a line.")] = 31,
    grid: Annotated[int, typer.Option(help="Points on a side of a plane.")] = 13,
    radius: Annotated[float, typer.Option(help="Distance around a solution, in filter norms.")] = 1.0,
    samples: Annotated[int, typer.Option(help="Images per data set.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the directions and samples.")] = 0,
    sharpness: Annotated[
        bool,
        typer.Option("--sharpness/--no-sharpness", help="Also compute Keskar's sharpness and eigenvalues."),
    ] = True,
    epsilon: Annotated[float, typer.Option(help="Size of Keskar's box.")] = 1e-3,
    sets: Annotated[str, typer.Option(help="Data sets: both, train or eval.")] = "both",
    statistics: Annotated[
        str,
        typer.Option(
            help="Batch norm statistics: keep, recompute, or auto (keep around a solution, otherwise recompute)."
        ),
    ] = "auto",
    over: Annotated[
        str | None,
        typer.Option(
            metavar="KEY,KEY",
            help="Recipe keys of a grid of sharpness and accuracy. Default: the two that differ, if there are two.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Page to write. Default: landscape.html, in the folder of the run or sweep if there is one."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw the loss around trained networks.

    Also measure how sharp their minima are.
    """
    from headway.core.sample_progress import SampleProgress
    from headway.report import landscape_page
    from headway.report.landscape import LandscapeOptions, compute_landscape
    from headway.report.landscape_grid import parse_keys
    from headway.report.landscape_runs import is_folder_of_runs

    # Measuring takes minutes: refuse a path that cannot be written before it begins.
    expect_writable(out)
    options = LandscapeOptions(
        plane=plane,
        between=between,
        path=path,
        points=points,
        grid=grid,
        radius=radius,
        samples=samples,
        seed=seed,
        sharpness=sharpness,
        epsilon=epsilon,
        sets=sets,
        statistics=statistics,
        over=parse_keys(over),
    )
    # A line of 31 points passes over all images 31 times, so the user sees how far it is.
    with SampleProgress("Measuring the loss", "passes over the images", LOG) as progress:
        result = compute_landscape(folders, options, progress=progress)
    if out is None and len(folders) == 1 and is_folder_of_runs(folders[0]):
        out = folders[0] / "landscape.html"
    page = landscape_page.write_page(result, out)
    print_result(
        result.to_json() | {"page": str(page)}, as_json, f"{landscape_page.format_numbers(result)}\nPage: {page}"
    )


def assess(
    script: Annotated[str, typer.Argument(help="A Python file, or any program.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the script.")] = None,
    target_train: Annotated[
        float | None, typer.Option(help="Training accuracy to reach, for example `0.9` or `90` (%).")
    ] = None,
    target_val: Annotated[float | None, typer.Option(help="Validation accuracy to reach.")] = None,
    minutes: Annotated[float, typer.Option(help="Time limit, after which the script is stopped.")] = 10.0,
    train_pattern: Annotated[
        str | None,
        typer.Option(
            help="Regular expression for training accuracy. Its first group is the number. Default: the usual names."
        ),
    ] = None,
    val_pattern: Annotated[
        str | None, typer.Option(help="Regular expression for validation accuracy, as above.")
    ] = None,
    scale: Annotated[str, typer.Option(help="Scale of numbers without a %: auto, fraction or percent.")] = "auto",
    stop: Annotated[bool, typer.Option("--stop", help="Stop the script once it has passed.")] = False,
    as_json: Json = False,
) -> None:
    """Run a training script for a limited time.

    Report if it reached the target accuracies.
    """
    from headway.doctor.accuracy_parser import AccuracyParser
    from headway.doctor.assess import AccuracyGoal, build_command, format_assessment
    from headway.doctor.assess import assess as run_assessment

    goal = AccuracyGoal.from_options(target_train, target_val, minutes)
    parser = AccuracyParser(train_pattern, val_pattern, scale)

    # With --json, standard output is for the result: the script's own output moves to standard error.
    def echo(piece: str, error: bool) -> None:
        print(piece, end="", file=sys.stderr if error or as_json else sys.stdout, flush=True)

    assessment = run_assessment(build_command(script, arguments or ()), goal, parser, echo=echo, stop_when_reached=stop)
    print_result(assessment.to_json(), as_json, format_assessment(assessment))
    # Exit status 1 lets a shell script or CI react to a failed assessment.
    if not assessment.passed:
        raise typer.Exit(1)


def replay(
    run: Annotated[Path, typer.Argument(help="Folder of a run with `parallel: {strategy: async}`.")],
    as_json: Json = False,
) -> None:
    """Repeat an asynchronous run from its log, in one process.

    Compare the result with its checkpoints, bit for bit.
    """
    from headway.training.replay_run import replay_run

    result = replay_run(run)
    print_result(result.to_json(), as_json, result.describe())
    if result.first_difference:
        raise typer.Exit(1)
