"""The verbs `sweep` and `curve`, which train many runs at once."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headway.cli.screen import Json, Overrides, list_given_options, print_result
from headway.core.errors import UsageError

# Options of each use of the verb. Others would do nothing there, so they are refused.
JOIN_OPTIONS = {"join", "slots", "wait"}
RATE_OPTIONS = {"lr", "recipe", "overrides", "out", "slots", "batches", "optimizers"}
RESUME_OPTIONS = {"resume"}
RATE_RESUME_OPTIONS = {"lr", "resume"}
OWNERS = {"wait": "--join", "batches": "--lr", "optimizers": "--lr"}
"""Options that neither a new sweep nor one that is continued takes, and the option that they belong to."""


def _option(heading: str, help_text: str, *names: str, **looks: Any) -> Any:
    """Declares an option under a heading of the help."""
    return typer.Option(*names, help=help_text, rich_help_panel=heading, **looks)


_new = partial(_option, "A new sweep: headway sweep RECIPE --space SPACE.yaml --budget 8")
_places = partial(_option, "Where a new sweep trains")
_again = partial(_option, "A sweep that was begun")
_rates = partial(_option, "Learning rates: headway sweep RECIPE --lr")


# Typer reads the options from the signature.
def sweep(
    context: typer.Context,
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="A YAML recipe.")] = None,
    overrides: Overrides = None,
    space: Annotated[Path | None, _new("What the trials differ in. Required.", metavar="SPACE.yaml")] = None,
    budget: Annotated[
        str | None, _new("Most work, in full trainings, for example 8. Required.", metavar="TRAININGS")
    ] = None,
    out: Annotated[Path | None, _new("Folder to create. Default: sweeps/NAME.", metavar="FOLDER")] = None,
    method: Annotated[
        str,
        _new("Which trials go on: random (all), halving, hyperband, asha or pbt.", metavar="METHOD"),
    ] = "halving",
    eta: Annotated[int, _new("One trial of so many goes on from a rung.", metavar="N")] = 3,
    smallest: Annotated[
        str, _new("Fraction of a training after which trials are first compared.", metavar="FRACTION")
    ] = "1/27",
    max_trials: Annotated[int | None, _new("Most trials.", min=1, metavar="N")] = None,
    seed: Annotated[int, _new("Seed of the trials' values.", min=0, metavar="N")] = 0,
    seeds: Annotated[int, _new("Trainings of the winner with new seeds.", min=0, metavar="N")] = 3,
    together: Annotated[int, _new("Most trials that take turns in one process.", min=1, metavar="N")] = 16,
    fuse: Annotated[
        Literal["off", "auto"],
        _new("auto: trials take forward and backward together, where a measurement says that it pays."),
    ] = "off",
    slots: Annotated[
        int | None,
        _places(
            "Processes that train at once here; with --join and --lr too. Default: one for each GPU, else core.",
            min=0,
            metavar="N",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        _places("Machines to train on by ssh, with their numbers of processes.", metavar="A:4,B:4"),
    ] = None,
    joinable: Annotated[bool, _places("Let workers on other machines join.", "--joinable")] = False,
    lease: Annotated[
        float,
        _places("Seconds of silence after which a worker on another machine is lost.", min=0.5, metavar="SECONDS"),
    ] = 30.0,
    resume: Annotated[Path | None, _again("Continue it. With --lr, a search for rates.", metavar="SWEEP")] = None,
    join: Annotated[Path | None, _again("Train for it: it runs on another machine.", metavar="SWEEP")] = None,
    wait: Annotated[float, _again("With --join: seconds to wait for the sweep.", min=0, metavar="SECONDS")] = 600.0,
    lr: Annotated[bool, _rates("Find the learning rate. Needs neither space nor budget.", "--lr")] = False,
    batches: Annotated[
        str | None, _rates("Batches, for example 64,256,1024. Default: the recipe's.", metavar="N,N")
    ] = None,
    optimizers: Annotated[
        str | None, _rates("Optimizers, for example sgd,lars. Default: the recipe's.", metavar="NAME,NAME")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train many runs with different values, and find the best.

    Trials that read the same batches share one loader. Bad ones stop early; the best one is trained again with new
    seeds.
    """
    given = list_given_options(context) - {"as_json"}
    if join is not None:
        _refuse_others(given, JOIN_OPTIONS, "Write headway sweep --join SWEEP, with --slots and --wait alone.")
        from headway.sweep.join import join_sweep

        join_sweep(join, slots, wait)
        return
    if lr:
        _find_rates(given, recipe, overrides, out, resume, slots, batches, optimizers, as_json)
        return
    for name in sorted(given & OWNERS.keys()):
        raise UsageError(f"{_write_option(name)} belongs to {OWNERS[name]}", fix="Leave it out, or see --help.")
    if resume is not None:
        settings = "Its settings are in sweep.yaml in its folder, where slots, hosts and joinable may be changed."
        _refuse_others(given, RESUME_OPTIONS, f"Write headway sweep --resume SWEEP. {settings}")
        from headway.sweep.sweep import resume_sweep

        result = resume_sweep(resume)
    else:
        if recipe is None or space is None or budget is None:
            what = "a sweep needs a recipe, a space and a budget"
            raise UsageError(what, fix="Write headway sweep RECIPE --space SPACE.yaml --budget 8.")
        if slots is not None and hosts is not None:
            fix = "Name this machine in --hosts too, for example localhost:2, or leave it out."
            raise UsageError("--hosts says how many processes each machine runs, and --slots cannot be added", fix=fix)
        if "lease" in given and hosts is None and not joinable and slots != 0:
            fix = "Leave it out, or add --hosts or --joinable."
            raise UsageError("--lease is for workers on other machines, and this sweep has none", fix=fix)
        from headway.sweep.budget import parse_method
        from headway.sweep.sweep import SweepOptions, run_sweep

        options = SweepOptions(
            budget=parse_fraction(budget, "--budget"),
            method=parse_method(method),
            eta=eta,
            smallest=parse_fraction(smallest, "--smallest"),
            max_trials=max_trials,
            seed=seed,
            slots=slots,
            hosts=hosts,
            joinable=joinable,
            lease_s=lease,
            together=together,
            seeds=seeds,
            fuse=fuse,
        )
        result = run_sweep(recipe, overrides or (), space, options, out)
    print_result(result.to_json(), as_json, result.describe())


def _find_rates(
    given: set[str],
    recipe: Path | None,
    overrides: list[str] | None,
    out: Path | None,
    resume: Path | None,
    slots: int | None,
    batches: str | None,
    optimizers: str | None,
    as_json: bool,
) -> None:
    """Runs `--lr`, or continues it."""
    from headway.sweep.learning_rate import RateOptions, find_rates, resume_rates

    if resume is not None:
        _refuse_others(given, RATE_RESUME_OPTIONS, "Write headway sweep --lr --resume FOLDER, without other settings.")
        rates = resume_rates(resume)
    else:
        _refuse_others(given, RATE_OPTIONS, "Write headway sweep --lr RECIPE. It trains on this machine alone.")
        if recipe is None:
            fix = "Write headway sweep --lr RECIPE, or headway sweep --lr --resume FOLDER."
            raise UsageError("--lr needs either a recipe, or --resume", fix=fix)
        if slots == 0:
            raise UsageError("--lr trains on this machine alone", fix="Leave out --slots 0.")
        wanted = RateOptions(
            batches=tuple(parse_batch(text) for text in split_list(batches)),
            optimizers=tuple(split_list(optimizers)),
            slots=slots,
        )
        rates = find_rates(recipe, overrides or (), wanted, out)
    print_result(rates.to_json(), as_json, rates.describe())
    if rates.has_failed:
        raise typer.Exit(1)


# Typer reads the options from the signature.
def curve(
    context: typer.Context,
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="A YAML recipe.")] = None,
    overrides: Overrides = None,
    batches: Annotated[
        str | None, typer.Option(help="Batches, two or more, for example 64,128,256. Required.", metavar="N,N")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Value that the recipe's metric has to reach. Default: that of stop_at.", metavar="VALUE"),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each batch with the rate that was found.", metavar="N")
    ] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder to create. Default: sweeps/NAME-curve.")] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that train at once. Default: one for each GPU, else for each core.", metavar="N"
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the curve in this folder.", metavar="FOLDER")] = None,
    as_json: Json = False,
) -> None:
    """Measure the steps to a target by batch.

    Each batch trains at its own best learning rate. The page shows where perfect scaling ends, and where a larger
    batch saves no more steps.
    """
    from headway.sweep.batch_curve import CurveOptions, draw_curve, resume_curve

    if resume is not None:
        given = list_given_options(context) - {"as_json"}
        _refuse_others(given, RESUME_OPTIONS, "Write headway curve --resume FOLDER, without other settings.")
        result = resume_curve(resume)
    else:
        if recipe is None or batches is None:
            fix = "Write headway curve RECIPE --batches 64,128,256, or headway curve --resume FOLDER."
            raise UsageError("a curve needs a recipe and batches", fix=fix)
        sizes = tuple(parse_batch(text) for text in split_list(batches))
        wanted = CurveOptions(batches=sizes, target=target, seeds=seeds, slots=slots)
        result = draw_curve(recipe, overrides or (), wanted, out)
    print_result(result.to_json(), as_json, result.describe())


def _refuse_others(given: set[str], taken: set[str], fix: str) -> None:
    """Raises UsageError if there are options that this use of the verb would ignore."""
    for name in sorted(given - taken):
        raise UsageError(f"{_write_option(name)} would do nothing here", fix=fix)


def _write_option(name: str) -> str:
    arguments = {"recipe": "a recipe", "overrides": "key=value"}
    return arguments.get(name) or "--" + name.replace("_", "-")


def parse_fraction(text: str, option: str) -> Fraction:
    """Parses a number such as 8, 0.5 or 1/27. Raises UsageError if it is none."""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"{option} {text} is not a number", fix="Write for example 8, 0.5 or 1/27.") from None


def split_list(text: str | None) -> list[str]:
    """Splits a list such as `64,256`; None has no entries."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def parse_batch(text: str) -> int:
    """Parses a batch. Raises UsageError if it is no whole number."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--batches {text} is not a whole number", fix="Write for example 64,256,1024.") from None
