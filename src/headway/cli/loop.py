"""The verb `loop`, which trains, mines, waits for labels, and trains again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.screen import Json, print_result


# Typer reads the options from the signature.
def loop(
    settings: Annotated[Path, typer.Argument(metavar="LOOP.yaml", help="Settings of the loop.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the loop. Default: loops/NAME.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Exit if labels are missing; do not wait.")] = False,
    as_json: Json = False,
) -> None:
    """Train networks, mine images, wait for their labels, and train again, round by round.

    The same command begins a loop and continues it, whatever has ended it. A new network is exported if it is not
    worse than the accepted one.
    """
    from headway.lifecycle.loop.run_loop import run_loop

    summary = run_loop(settings, out, once=once)
    print_result(summary.to_json(), as_json, summary.describe())
