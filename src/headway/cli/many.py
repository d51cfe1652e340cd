"""The verb `sweep`, which trains many runs at once."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

import typer

from headway.cli.screen import Json, Overrides, print_result
from headway.core.errors import UsageError


# Typer reads the options from the signature.
def sweep(
    recipe: Annotated[Path | None, typer.Argument(help="A YAML recipe.")] = None,
    overrides: Overrides = None,
    space: Annotated[Path | None, typer.Option(help="YAML file of what the trials differ in.")] = None,
    budget: Annotated[str | None, typer.Option(help="Most work, in full trainings, for example 8.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to create. Default: sweeps/NAME.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the sweep in this folder.")] = None,
    method: Annotated[
        str, typer.Option(help="Which trials go on: random (all), halving, hyperband, asha or pbt.")
    ] = "halving",
    eta: Annotated[int, typer.Option(help="One trial of so many goes on from a rung.")] = 3,
    smallest: Annotated[
        str, typer.Option(help="Fraction of a training after which trials are first compared.")
    ] = "1/27",
    max_trials: Annotated[int | None, typer.Option(min=1, help="Most trials.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the trials' values.")] = 0,
    slots: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that train at once here. Default: one for each GPU, else core."),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Machines to train on by ssh, with their numbers of processes: a:4,b:4.")
    ] = None,
    joinable: Annotated[bool, typer.Option("--joinable", help="Let workers on other machines join.")] = False,
    join: Annotated[
        Path | None, typer.Option(help="Train for the sweep in this folder, which runs on another machine.")
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="With --join: seconds to wait for the sweep.")] = 600.0,
    lease: Annotated[
        float, typer.Option(min=0.5, help="Seconds of silence after which a worker on another machine is lost.")
    ] = 30.0,
    together: Annotated[int, typer.Option(min=1, help="Most trials that take turns in one process.")] = 16,
    seeds: Annotated[int, typer.Option(min=0, help="Trainings of the winner with new seeds.")] = 3,
    fuse: Annotated[
        Literal["off", "auto"],
        typer.Option(help="auto: trials take forward and backward together, where a measurement says that it pays."),
    ] = "off",
    lr: Annotated[bool, typer.Option("--lr", help="Find the learning rate. Needs neither space nor budget.")] = False,
    batches: Annotated[
        str | None, typer.Option(help="With --lr: batches, for example 64,256,1024. Default: the recipe's.")
    ] = None,
    optimizers: Annotated[
        str | None, typer.Option(help="With --lr: optimizers, for example sgd,lars. Default: the recipe's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train many runs with different values, and find the best.

    Trials that read the same batches share one loader. Bad ones stop early; the best one is trained again with new
    seeds.
    """
    if join is not None:
        if recipe is not None or space is not None or budget is not None or resume is not None or hosts is not None:
            fix = "Write headway sweep --join SWEEP."
            raise UsageError("--join needs the folder of a sweep, and takes --slots and --wait alone", fix=fix)
        from headway.sweep.join import join_sweep

        join_sweep(join, slots, wait)
        return
    if slots is not None and hosts is not None:
        fix = "Name this machine in --hosts too, for example localhost:2, or leave it out."
        raise UsageError("--hosts says how many processes each machine runs, and --slots cannot be added", fix=fix)
    if lr:
        if hosts is not None or joinable or slots == 0:
            raise UsageError("--lr trains on this machine alone", fix="Leave out --hosts, --joinable and --slots 0.")
        if space is not None or budget is not None:
            raise UsageError("--lr has neither --space nor --budget", fix="Write headway sweep --lr RECIPE.")
        from headway.sweep.learning_rate import RateOptions, find_rates, resume_rates

        if recipe is not None and resume is None:
            wanted = RateOptions(
                batches=tuple(parse_batch(text) for text in split_list(batches)),
                optimizers=tuple(split_list(optimizers)),
                slots=slots,
            )
            rates = find_rates(recipe, overrides or (), wanted, out)
        elif recipe is None and resume is not None and not (out or batches or optimizers or slots):
            rates = resume_rates(resume)
        else:
            fix = "Write headway sweep --lr RECIPE, or headway sweep --lr --resume FOLDER."
            raise UsageError("--lr needs either a recipe, or --resume without other settings", fix=fix)
        print_result(rates.to_json(), as_json, rates.describe())
        if rates.has_failed:
            raise typer.Exit(1)
        return
    if batches is not None or optimizers is not None:
        raise UsageError("--batches and --optimizers belong to --lr", fix="Write headway sweep --lr RECIPE.")
    if resume is not None:
        if any(one is not None for one in (recipe, space, budget, out, hosts)):
            fix = "A sweep continues with its own settings: headway sweep --resume SWEEP."
            raise UsageError("a recipe, --space, --budget, --hosts and --out cannot be combined with --resume", fix=fix)
        from headway.sweep.sweep import resume_sweep

        result = resume_sweep(resume)
    else:
        if recipe is None or space is None or budget is None:
            what = "a sweep needs a recipe, a space and a budget"
            raise UsageError(what, fix="headway sweep RECIPE --space SPACE.yaml --budget 8.")
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
