"""The verbs that examine a run before it is made: what holds it back, and what helps. `cli` has the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from headway.cli.screen import Json, say, show
from headway.core.errors import UsageError
from headway.core.files import writable

# About when the process started: the limit of wall time counts the imports too.
STARTED = perf_counter()

Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Values instead of the recipe's.")]


def doctor(
    recipe: Annotated[str | None, typer.Argument(help="A YAML recipe.")] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The profile to write, JSON; default RECIPE.profile.json.")] = None,
    page: Annotated[Path | None, typer.Option(help="Draw it as an HTML file too.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure for half to two thirds of the time, less exactly.")
    ] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Conclude on the first epoch, whose files are read from the disk.")
    ] = False,
    procs: Annotated[int | None, typer.Option(min=2, help="Measure so many processes together.")] = None,
    hosts: Annotated[str | None, typer.Option(help="Where they run, for example a:4,b:4.")] = None,
    script: Annotated[
        str | None, typer.Option(help="Watch this Python file instead of a recipe; its arguments come after --.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of --script: steps to watch; default 200.")] = None,
    as_json: Json = False,
) -> None:
    """Find out what holds a run back, what each cure would give, and whether the prediction holds."""
    if script is not None:
        if out or page or quick or cold or procs or hosts:
            fix = "headway doctor --script train.py [--steps N] [-- ARGS]"
            raise UsageError("a script is watched as it runs: only --steps and --json go with --script", fix=fix)
        if recipe is not None and recipe.endswith((".yaml", ".yml")) and "--" not in sys.argv:
            fix = "headway doctor RECIPE, or headway doctor --script train.py -- ARGS."
            raise UsageError("the doctor looks at a recipe or at a script, not at both", where=recipe, fix=fix)
        from headway.doctor.script_watch import watch_script

        arguments = [*([] if recipe is None else [recipe]), *(overrides or ())]
        seen = watch_script(script, arguments, steps=steps, to_stderr=as_json)
        show(seen.to_json(), as_json, seen.to_text())
        return
    if recipe is None:
        raise UsageError("doctor wants a recipe", fix="headway doctor RECIPE, or headway doctor --script train.py.")
    if steps is not None:
        raise UsageError("--steps is of --script", fix="Leave it out.")
    out = out or Path(f"{Path(recipe).stem}.profile.json")
    writable(out, page)
    from headway.doctor.terminal_text import format_profile

    if procs is not None or hosts is not None:
        from headway.doctor.rank_examination import examine_ranks as examine_ranks

        if cold:
            fix = "Leave one of them out."
            raise UsageError("--cold measures one process, and --procs and --hosts several", where="--cold", fix=fix)
        found = examine_ranks(Path(recipe), overrides or (), procs=procs, hosts=hosts, say=say, quick=quick)
    else:
        from headway.doctor.examination import examine_recipe

        found = examine_recipe(Path(recipe), overrides or (), say=say, quick=quick, cold=cold, begun=STARTED)
    found = found.doubted()
    found.write(out)
    if page is not None:
        from headway.doctor import profile_page as pages

        pages.write_page(found, page)
    written = f"Wrote {out}{f' and {page}' if page else ''}."
    if as_json:
        say(written)
    show(found.model_dump(mode="json"), as_json, f"{format_profile(found, blocks=_shows_blocks())}\n\n{written}")


def tune(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Overrides = None,
    allow: Annotated[
        str, typer.Option(help="What may change the mathematics too: precision, batch, data.size; by commas.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="The recipe to write; default RECIPE.tuned.yaml.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure for half to two thirds of the time, less exactly.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    as_json: Json = False,
) -> None:
    """Try what makes a recipe faster and leaves its mathematics alone, and write what helps, with the evidence.

    A lossless pack of the training set may be made for it, in a folder beside the recipe (RECIPE.seekable or
    RECIPE.keep), which stays where it helps.
    """
    from headway.doctor.tune import tune as run

    found = run(recipe, overrides or (), allow=allow, out=out, say=say, quick=quick, overwrite=overwrite)
    show(found.to_json(), as_json, found.to_text())


def _shows_blocks() -> bool:
    """Whether standard output can hold them."""
    if os.environ.get("TERM") == "dumb":
        return False
    try:
        "█▏".encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
