"""The verbs that study: what a minimum looks like, and whether a script gets where it should. `cli` has the others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.screen import Json, print_result, say
from headway.core.files import expect_writable


def landscape(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    plane: Annotated[bool, typer.Option("--plane", help="Also a plane of two directions around each.")] = False,
    between: Annotated[
        bool,
        typer.Option("--between", help="Also lines from the first to each other; of three, their plane."),
    ] = False,
    path: Annotated[bool, typer.Option("--path", help="Also each run's checkpoints, in their plane.")] = False,
    points: Annotated[int, typer.Option(help="Places on a line.")] = 31,
    grid: Annotated[int, typer.Option(help="Places on a side of a plane.")] = 13,
    radius: Annotated[float, typer.Option(help="How far to go around a solution, in lengths of the filters.")] = 1.0,
    samples: Annotated[int, typer.Option(help="Images of each data set.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of the directions and the samples.")] = 0,
    sharpness: Annotated[
        bool,
        typer.Option("--sharpness/--no-sharpness", help="Also Keskar's sharpness, and eigenvalues."),
    ] = True,
    epsilon: Annotated[float, typer.Option(help="Size of Keskar's box.")] = 1e-3,
    sets: Annotated[str, typer.Option(help="Data sets: both, train or eval.")] = "both",
    statistics: Annotated[
        str, typer.Option(help="Of batch norm: keep, recompute, or auto (kept around a solution, else recomputed).")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="The page; default: landscape.html, in the folder of a run that is alone.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw the loss around trained networks, and measure how sharp their minima are."""
    from headway.core.sample_counter import Counter
    from headway.report import landscape_page
    from headway.report.landscape import LandscapeOptions
    from headway.report.landscape import compute_landscape as run

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
    )
    with Counter("Measuring the loss", "passes over the images", say) as progress:
        found = run(folders, options, say=say, progress=progress)
    page = landscape_page.write_page(found, out)
    print_result(
        found.to_json() | {"page": str(page)}, as_json, f"{landscape_page.format_numbers(found)}\nPage: {page}"
    )


def assess(
    script: Annotated[str, typer.Argument(help="A Python file, or any program.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Of the script.")] = None,
    target_train: Annotated[float | None, typer.Option(help="Training accuracy to reach: 0.9, or 90 (%).")] = None,
    target_val: Annotated[float | None, typer.Option(help="Validation accuracy to reach.")] = None,
    minutes: Annotated[float, typer.Option(help="The time for it; then the script is stopped.")] = 10.0,
    train_pattern: Annotated[
        str | None, typer.Option(help="A regular expression in place of the usual names; its first group: the number.")
    ] = None,
    val_pattern: Annotated[str | None, typer.Option(help="The same for the validation accuracy.")] = None,
    scale: Annotated[str, typer.Option(help="Of numbers without a %: auto, fraction or percent.")] = "auto",
    stop: Annotated[bool, typer.Option("--stop", help="Stop the script once it has passed.")] = False,
    as_json: Json = False,
) -> None:
    """Run a training script for so long, and say whether it reached accuracies."""
    from headway.doctor.assess import Goal, command_of, text
    from headway.doctor.assess import assess as run
    from headway.doctor.scores import Scores

    goal, scores = Goal.of(target_train, target_val, minutes), Scores(train_pattern, val_pattern, scale)

    def echo(piece: str, error: bool) -> None:
        print(piece, end="", file=sys.stderr if error or as_json else sys.stdout, flush=True)

    found = run(command_of(script, arguments or ()), goal, scores, echo=echo, stop_when_reached=stop)
    print_result(found.to_json(), as_json, text(found))
    if not found.passed:
        raise typer.Exit(1)
