"""The verb `export`, which writes a trained run as files that other programs run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.screen import LOG, Json, print_result


# Typer reads the options from the signature.
def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or an ensemble.")],
    to: Annotated[
        str, typer.Option(help="Targets, separated by commas: onnx, openvino, openvino-bf16, aoti, int8 or tensorrt.")
    ] = "onnx",
    out: Annotated[Path | None, typer.Option(help="Folder to create. Default: RUN/export.")] = None,
    gate: Annotated[float, typer.Option(help="Largest drop of the accuracy that passes, in percentage points.")] = 0.5,
    data: Annotated[
        str | None, typer.Option(help="Packed folder to judge on. Default: the run's evaluation set.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Also measure latency, throughput and memory.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --table: take about a minute, for figures not to be quoted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the whole pipeline of a run as files for other programs.

    Compare them with the run over the evaluation set, and leave with status 1 if an answer changed.
    """
    from headway.core.sample_progress import SampleProgress
    from headway.export.export_run import export_run

    names = [name.strip() for name in to.split(",") if name.strip()]
    # Building says nothing for a while, and the gate then takes the whole evaluation set for each target.
    with SampleProgress("Judging the export", "images", LOG) as progress:
        result = export_run(run, out, names, gate, data, table=table, quick=quick, progress=progress)
    text = result.describe()
    if result.passed:
        text += f"\nNext: headway predict {shlex.quote(str(result.folder))} IMAGES"
    print_result(result.to_json(), as_json, text)
    if not result.passed or result.table_error is not None:
        raise typer.Exit(1)
