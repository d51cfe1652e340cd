"""The verb `mine`, which chooses images to label, and examines labels and sets."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.screen import Json, list_given_options, print_result
from headway.core.errors import UsageError

CHOICE, LABELS = "Options of the choice", "Options of --label-errors"
MODES = ("label_errors", "leaks", "review")
# Options that each way of calling the verb takes, beside --json.
TAKEN = {
    "": {
        *("sources", "runs", "labelled", "held_out", "count", "strategy", "random_share", "weight", "quota"),
        *("keep_copies", "seed", "out"),
    },
    "label_errors": {"sources", "runs", "recipe", "folds", "count", "seed", "out"},
    "leaks": {"sources", "out"},
    "review": {"sources"},
}


# Typer reads the options from the signature.
def mine(
    context: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="POOL...", help="Packed folder, or anything to pack. With --leaks two sets or more."),
    ],
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="Trained run, or an ensemble. May be repeated."),
    ] = None,
    labelled: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SET",
            help="Images that are labelled. May be repeated. Default: the training sets of the runs.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    held_out: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SET",
            help="Images whose copies are not chosen. May be repeated. Default: the evaluation sets of the runs.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Number of images. Default: 100; with --label-errors all suspects."),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(help="margin, entropy, bald, k-center, badge or random.", rich_help_panel=CHOICE),
    ] = "margin",
    random_share: Annotated[
        float, typer.Option(help="Share of random picks, at least 0.05.", rich_help_panel=CHOICE)
    ] = 0.2,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help="Factor on the scores of a class, or of names such as 'night/*'. May be repeated.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SHARE",
            help="Share of the picks for a class, or for names such as 'night/*'. May be repeated.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    keep_copies: Annotated[
        bool,
        typer.Option(
            "--keep-copies",
            help="Do not look for near copies. Equal files are out all the same.",
            rich_help_panel=CHOICE,
        ),
    ] = False,
    label_errors: Annotated[
        bool, typer.Option("--label-errors", help="List the labels of a set that look wrong.", rich_help_panel=LABELS)
    ] = False,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Recipe to train without each fold, instead of --runs.", rich_help_panel=LABELS),
    ] = None,
    folds: Annotated[int, typer.Option(help="With --recipe: number of folds.", rich_help_panel=LABELS)] = 5,
    leaks: Annotated[bool, typer.Option("--leaks", help="Find images that occur in several sets.")] = False,
    review: Annotated[
        bool, typer.Option("--review", help="Judge the picks of a folder, once picks.csv has labels.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random choices.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder to create. Default: mined/NAME.")] = None,
    as_json: Json = False,
) -> None:
    """Choose the images of a pool that are worth a label.

    Near copies are out first, and a share of the picks is always random. Or examine labels (--label-errors), sets
    (--leaks), or what the picks gave (--review).
    """
    given = list_given_options(context)
    mode = _choose_mode(given, sources, recipe, strategy)
    source = sources[0]
    if mode == "leaks":
        from headway.lifecycle.mining.leak_folder import PAGE, check_leaks

        found = check_leaks(sources, out)
        page = "" if out is None else f"\nPage: {out / PAGE}"
        print_result(found.to_json() | {"folder": out}, as_json, f"{found.describe()}{page}")
        # Exit status 1 lets a script react to leaks.
        if found.leaks:
            raise typer.Exit(1)
        return
    if mode == "review":
        from headway.lifecycle.mining.review_folder import review_folder

        reviewed = review_folder(Path(source))
        print_result(reviewed.to_json() | {"folder": source}, as_json, reviewed.describe())
        return
    from headway.core.run_folder import RunFolder

    # `..` has a name that leads out of the folder, and `.` has none.
    name = Path(source.rstrip("/")).name
    out = out or RunFolder.find_free_name(Path("mined"), name if name not in ("", "..") else "pool")
    result: Any
    if mode == "label_errors":
        from headway.lifecycle.mining.label_queue import PAGE, queue_label_errors

        result = queue_label_errors(source, out, runs=runs or (), recipe=recipe, folds=folds, count=count, seed=seed)
        text = f"{result.describe()}\nPage: {out / PAGE}"
    else:
        from headway.lifecycle.mining.mine import mine as mine_pool
        from headway.lifecycle.mining.mine_result import PAGE, MineOptions
        from headway.lifecycle.mining.quotas import parse_share

        options = MineOptions(
            strategy=strategy,
            count=100 if count is None else count,
            random_share=random_share,
            weights=tuple(parse_share(one, "--weight") for one in weight or ()),
            quotas=tuple(parse_share(one, "--quota", most=1) for one in quota or ()),
            seed=seed,
            labelled=tuple(labelled or ()),
            held_out=tuple(held_out or ()),
            keeps_copies=keep_copies,
        )
        result = mine_pool(source, runs or (), out, options)
        folder = shlex.quote(str(out))
        text = (
            f"{result.describe()}\nPage: {out / PAGE}\nNext: set the labels in {out / 'picks.csv'}, then headway mine "
            f"{folder} --review"
        )
    print_result(result.to_json() | {"folder": str(out)}, as_json, text)


def _choose_mode(given: set[str], sources: list[str], recipe: Path | None, strategy: str) -> str:
    """Returns the way in which the verb was called; raises UsageError if an option does not belong to it."""
    modes = [mode for mode in MODES if mode in given]
    if len(modes) > 1:
        both = " and ".join(f"--{mode.replace('_', '-')}" for mode in modes)
        raise UsageError(f"{both} cannot be combined", fix="Leave all but one of them out.")
    mode = modes[0] if modes else ""
    for name in sorted(given - TAKEN[mode] - {"as_json", mode}):
        option = f"--{name.replace('_', '-')}"
        what = f"--{mode.replace('_', '-')} does not take it" if mode else "it is for --label-errors"
        raise UsageError(what, where=option, fix=f"Leave {option} out.")
    for option in ("folds", "seed"):
        if mode == "label_errors" and option in given and recipe is None:
            what = "it is for the folds that a recipe is trained on"
            raise UsageError(what, where=f"--{option}", fix="Add --recipe RECIPE.")
    if not mode and "random_share" in given and strategy == "random":
        what = "a random choice is random as a whole"
        raise UsageError(what, where="--random-share", fix="Leave it out, or use margin.")
    if mode != "leaks" and len(sources) > 1:
        raise UsageError(f"{len(sources)} sets, and one is examined at a time", fix="Name one set.")
    return mode
