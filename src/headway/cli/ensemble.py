"""The verb `ensemble`, which averages the predictions, or the weights, of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from headway.cli.screen import LOG, Json, print_result
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.training.soup import SoupKind


# Typer reads the options from the signature.
def ensemble(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Run folders; with --snapshots one.")
    ] = None,
    of: Annotated[
        Path | None, typer.Option(metavar="SWEEP", help="Take the best trials of a sweep as members.")
    ] = None,
    best: Annotated[int, typer.Option(min=2, help="With --of: number of trials.")] = 4,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write, for predict and evaluate. Default: only print the figures.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Packed folder to evaluate on. Default: the evaluation set of the first run.")
    ] = None,
    snapshots: Annotated[bool, typer.Option("--snapshots", help="Take the checkpoints of one run as members.")] = False,
    soup: Annotated[
        str | None,
        typer.Option(help="Average weights instead of probabilities: uniform, or greedy (only those that help)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Average the predictions of several runs.

    Report what each of them adds. With --soup, average their weights into one network.
    """
    from headway.core.sample_progress import SampleProgress
    from headway.training.make_ensemble import make_ensemble

    if soup not in (None, "uniform", "greedy"):
        raise UsageError(f"there is no soup {soup!r}", where="--soup", fix="Set it to uniform or greedy.")
    if of is None and not folders:
        raise UsageError("an ensemble needs runs", fix="headway ensemble RUN RUN, or headway ensemble --of SWEEP.")
    if of is not None:
        if folders:
            raise UsageError("runs cannot be combined with --of", fix="Name runs, or a sweep with --of.")
        from headway.sweep.best import list_best

        folders = list_best(of, best)
    with SampleProgress("Evaluating the members", "images", LOG) as progress:
        result = make_ensemble(
            folders or [],
            out=out,
            data=data,
            snapshots=snapshots,
            soup=cast("SoupKind | None", soup),
            progress=progress,
        )
    written = "" if out is None else f"\nFolder: {out}"
    print_result(result.to_json(), as_json, f"{result.describe()}{written}")
