"""The verbs `index`, which keeps an index of run folders up to date, and `runs`, which lists and compares them."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.many import split_list
from headway.cli.screen import LOG, Json, list_given_options, print_result
from headway.core.errors import UsageError
from headway.core.files import expect_writable
from headway.core.text_format import pluralise

Folders = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUNS]...", help="Folders of runs, sweeps, run folders, mlruns, or an mlflow.db. Default: runs."
    ),
]
IndexFile = Annotated[
    Path | None,
    typer.Option(
        "--index",
        metavar="FILE",
        help="Where the index lies. Default: index.sqlite in the first folder; of MLflow alone, in the cache folder.",
    ),
]

# Options that belong to another one, and do nothing without it.
OWNERS = {"curves": "page", "experiment": "mlflow", "descending": "sort"}
KEYS_OPTIONS = {"folders", "keys", "index", "as_json"}


def _option(heading: str, help_text: str, *names: str, **looks: Any) -> Any:
    """Declares an option under a heading of the help."""
    return typer.Option(*names, help=help_text, rich_help_panel=heading, **looks)


_which = partial(_option, "Which runs")
_output = partial(_option, "What to write")


def index(folders: Folders = None, index: IndexFile = None, as_json: Json = False) -> None:
    """Build the index of run folders, or bring it up to date.

    Only runs that changed are read again. It may be deleted at any time: the runs stay the truth.
    """
    from headway.lifecycle.experiments.run_index import open_index
    from headway.lifecycle.experiments.scan import find_index, scan_folders

    found = scan_folders(folders or ())
    with open_index(index or find_index(folders or ())) as opened:
        result = opened.update(found)
    print_result(result.to_json(), as_json, result.describe())


# Typer reads the options from the signature.
def runs(
    context: typer.Context,
    folders: Folders = None,
    where: Annotated[
        list[str] | None,
        _which("Condition, for example `optimizer.lr<0.1` or `state=finished`. May be repeated.", metavar="CONDITION"),
    ] = None,
    sort: Annotated[str | None, _which("Key to sort by. Default: the newest first.", metavar="KEY")] = None,
    descending: Annotated[bool, _which("The highest first.", "--descending")] = False,
    limit: Annotated[int | None, _which("Most runs.", min=1)] = None,
    columns: Annotated[str | None, _output("Keys to show. Default: the usual results.", metavar="KEY,KEY")] = None,
    keys: Annotated[bool, _output("List the keys that the runs have instead.", "--keys")] = False,
    page: Annotated[Path | None, _output("Also write an HTML page that compares these runs.", metavar="FILE")] = None,
    curves: Annotated[
        str | None, _output("Metrics that the page draws. Default: two usual ones.", metavar="METRIC,METRIC")
    ] = None,
    mlflow: Annotated[Path | None, _output("Also write these runs for mlflow-export-import.", metavar="FOLDER")] = None,
    experiment: Annotated[str, _output("Name of the experiment in MLflow.")] = "headway",
    index: IndexFile = None,
    as_json: Json = False,
) -> None:
    """List runs, also those of MLflow.

    Choose them by recipe, result or metric, sort them, compare them on a page, or hand them to MLflow.
    """
    from headway.lifecycle.experiments.listing import choose_columns, format_keys, format_list
    from headway.lifecycle.experiments.query import Condition, Selection, list_keys, select_runs
    from headway.lifecycle.experiments.run_index import open_index
    from headway.lifecycle.experiments.scan import find_index, scan_folders

    given = list_given_options(context)
    for name, owner in OWNERS.items():
        if name in given and owner not in given:
            raise UsageError(f"--{name} belongs to --{owner}", fix=f"Add --{owner}, or leave it out.")
    if keys and (others := sorted(given - KEYS_OPTIONS)):
        raise UsageError(f"--{others[0]} would do nothing beside --keys", fix="Leave one of them out.")
    conditions = tuple(map(Condition.parse, where or ()))
    expect_writable(page)
    found = scan_folders(folders or ())
    with open_index(index or find_index(folders or ())) as opened:
        result = opened.update(found)
        if keys:
            uses = list_keys(opened)
            listing = [{"key": use.key, "runs": use.runs, "different": use.different} for use in uses]
            print_result(listing, as_json, format_keys(uses))
            return
        shown = split_list(columns) or choose_columns(opened)
        selection = Selection(
            conditions=conditions, sort=sort or "", descending=descending, limit=limit, columns=tuple(shown)
        )
        listed = select_runs(opened, selection)
        if page is not None:
            from headway.lifecycle.experiments.compare import choose_score, write_page

            score = choose_score(opened, sort or "", descending=descending)
            axes, drawn = split_list(columns), split_list(curves)
            write_page(opened, listed, result, page, score=score, columns=axes, curves=drawn)
            LOG.info(f"Wrote {page}.")
    if mlflow is not None:
        from headway.lifecycle.experiments.mlflow_json import write_mlflow_export

        written = write_mlflow_export(mlflow, found.read_runs([run.path for run in listed]), experiment)
        options = f"--experiment-name {shlex.quote(experiment)} --input-dir {shlex.quote(str(mlflow))}"
        LOG.info(f"Wrote {pluralise(written, 'run')} to {mlflow}. Next: import-experiment {options}")
    tree = {
        "runs": [run.to_json() for run in listed],
        "damaged": [{"run": str(one.path), "reason": one.reason} for one in result.damaged],
        "page": page and str(page),
        "mlflow": mlflow and str(mlflow),
    }
    print_result(tree, as_json, format_list(listed, shown, len(result.damaged), is_filtered=bool(conditions)))
