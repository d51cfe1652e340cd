"""The verbs that examine a run before it is made: `doctor` and `tune`. `main` has the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from headway.cli.screen import LOG, Json, Overrides, can_print, print_result
from headway.core.errors import UsageError
from headway.core.files import expect_writable

# About the start of the process: the time limit of an examination includes the imports.
START_S = perf_counter()


# Typer reads the options from the signature.
def doctor(
    recipe: Annotated[str | None, typer.Argument(help="A YAML recipe.")] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="JSON profile to write. Default: RECIPE.profile.json.")] = None,
    page: Annotated[Path | None, typer.Option(help="Also write an HTML page.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Take at most 45 s instead of 120 s, and measure less exactly.")
    ] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Examine the first epoch, which reads its files from the disk.")
    ] = False,
    procs: Annotated[int | None, typer.Option(min=2, help="Measure this many processes together.")] = None,
    hosts: Annotated[str | None, typer.Option(help="Hosts of these processes, for example `a:4,b:4`.")] = None,
    script: Annotated[
        str | None, typer.Option(help="Watch this Python file instead of a recipe. Its arguments come after `--`.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="With --script: steps to watch. Default: 200.")] = None,
    as_json: Json = False,
) -> None:
    """Find out what limits a run.

    Also predict the gain of each change, and check the prediction.
    """
    if script is not None:
        if out or page or quick or cold or procs or hosts:
            fix = "Run: headway doctor --script train.py [--steps N] [-- ARGS]"
            raise UsageError("only --steps and --json can be combined with --script", fix=fix)
        _watch_script(script, [*([] if recipe is None else [recipe]), *(overrides or ())], steps, as_json)
        return
    if recipe is None:
        fix = "Run headway doctor RECIPE, or headway doctor --script train.py."
        raise UsageError("doctor needs a recipe", fix=fix)
    if steps is not None:
        raise UsageError("--steps only works with --script", fix="Leave it out.")
    # An examination takes minutes: refuse a path that cannot be written before it begins.
    out = out or Path(f"{Path(recipe).stem}.profile.json")
    expect_writable(out, page)
    from headway.doctor.terminal_text import format_profile

    if procs is not None or hosts is not None:
        from headway.doctor.rank_examination import examine_ranks

        if cold:
            fix = "Leave one of them out."
            raise UsageError("--cold measures one process, --procs and --hosts several", where="--cold", fix=fix)
        profile = examine_ranks(Path(recipe), overrides or (), procs=procs, hosts=hosts, quick=quick)
    else:
        from headway.doctor.examination import examine_recipe

        profile = examine_recipe(Path(recipe), overrides or (), quick=quick, cold=cold, begun=START_S)
    profile = profile.mark_contradictions()
    profile.write(out)
    if page is not None:
        from headway.doctor import profile_page

        profile_page.write_page(profile, page)
    written = f"Wrote {out}{f' and {page}' if page else ''}."
    # With --json standard output holds the profile alone.
    if as_json:
        LOG.info(written)
    # A dumb terminal (TERM=dumb, as editors set it) gets plain characters.
    blocks = os.environ.get("TERM") != "dumb" and can_print("█▏")
    print_result(profile.model_dump(mode="json"), as_json, f"{format_profile(profile, blocks=blocks)}\n\n{written}")


def _watch_script(script: str, arguments: Sequence[str], steps: int | None, as_json: bool) -> None:
    """Watches the training loop of a script, and prints the observation."""
    # Without `--` in the command, a recipe as first argument is a mistake, and no argument of the script.
    if arguments and arguments[0].endswith((".yaml", ".yml")) and "--" not in sys.argv:
        fix = "Run headway doctor RECIPE, or headway doctor --script train.py -- ARGS."
        raise UsageError("the doctor examines a recipe or a script, not both", where=arguments[0], fix=fix)
    # Imports stand inside the verbs: torch takes seconds to load, and --help must not.
    from headway.watch.script_watch import watch_script

    observation = watch_script(script, arguments, steps=steps, to_stderr=as_json)
    print_result(observation.to_json(), as_json, observation.to_text())


def tune(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Overrides = None,
    allow: Annotated[
        str, typer.Option(help="Changes of the mathematics to allow, separated by commas: precision, batch, data.size.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Recipe to write. Default: RECIPE.tuned.yaml.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Examine for at most 45 s a round instead of 120 s, less exactly.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Find settings that make a recipe faster.

    Try only settings that leave the mathematics unchanged, apart from those that --allow names. Write a recipe with the
    settings that helped. A trial may make a lossless pack of the training set, in a folder beside the recipe
    (RECIPE.seekable or RECIPE.keep). The pack stays if it helps.
    """
    from headway.doctor.tune import tune as tune_recipe

    tuning = tune_recipe(recipe, overrides or (), allow=allow, out=out, quick=quick, overwrite=overwrite)
    print_result(tuning.to_json(), as_json, tuning.to_text())
