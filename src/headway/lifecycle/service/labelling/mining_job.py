"""Mining as a job of the server: runs in the folder `runs` of the store choose samples that have no label yet."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.core.errors import DataError
from headway.core.untrusted_json import JsonError, expect_entries, is_text, is_whole_number, parse_object
from headway.data.store_address import UNLABELLED, StoreAddress
from headway.lifecycle.mining.choose import STRATEGIES
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.jobs import Job
from headway.lifecycle.service.labelling.labelling import Labelling
from headway.lifecycle.service.labelling.parsing import MOST_PICKS, parse_queue
from headway.lifecycle.service.problems import refuse
from headway.lifecycle.service.processes import RUNS, Command, Processes
from headway.lifecycle.service.tokens import Principal

MINED = "mined"
"""Folder in the service's one with the results of these jobs."""
RESULT = "mine.json"
_KNOWN = ("runs", "strategy", "count", "seed")


def is_mining(tree: Mapping[str, Any]) -> bool:
    """Returns True for a body that names runs, and no picks that somebody has mined already."""
    return "runs" in tree and "picks" not in tree and "listed" not in tree


def plan_mining(
    labelling: Labelling, processes: Processes, dataset: str, tree: Mapping[str, Any], folder: Path
) -> Command:
    """Returns the command that mines the samples without labels of the newest version.

    Args:
        tree: `runs`: names of runs, as `GET /runs` lists them; `strategy`, `count` and `seed` of `headway mine`.
        folder: to create.

    Raises:
        ProblemError: the body is malformed (400), or there is no such data set (404) or run (422).
    """
    try:
        checks = {name: check for name, check in _CHECKS.items() if name in tree}
        expect_entries(tree, checks)
        for name in tree.keys() - set(_KNOWN):
            raise JsonError(f"it has {name[:100]!r}, not one of {', '.join(_KNOWN)}")
    except JsonError as error:
        raise refuse("malformed", f"the body cannot be read: {error}", "Mend it.") from None
    known = processes.list_runs()
    if unknown := [run for run in tree["runs"] if run not in known]:
        raise refuse("wrong-change", f"there is no run {unknown[0][:100]!r}", "GET /runs lists them.")
    version = labelling.datasets.find_version(dataset).version
    pool = StoreAddress(name=dataset, version=version, split=UNLABELLED)
    arguments = ["mine", str(pool), "--out", str(folder), "--json"]
    for run in tree["runs"]:
        arguments += ["--runs", str(labelling.datasets.folder / RUNS / run)]
    for name in ("strategy", "count", "seed"):
        if name in tree:
            arguments += [f"--{name}", str(tree[name])]
    return Command("mine", tuple(arguments), folder)


def run_mining(
    labelling: Labelling, processes: Processes, dataset: str, command: Command, principal: Principal, job: Job
) -> Answer:
    """Mines, and makes a queue of the picks; called in a thread.

    Raises as `Processes.run` and `Labelling.add_queue`.
    """
    try:
        processes.run(command, job)
        data = (command.folder / RESULT).read_bytes()
        try:
            proposed = parse_queue(parse_object(data))
        except JsonError as error:
            raise DataError(f"the result is damaged: {error}", where=str(command.folder / RESULT)) from None
        return labelling.add_queue(dataset, proposed, principal)
    finally:
        # The queue has all that the page needs, and the images lie in the store.
        shutil.rmtree(command.folder, ignore_errors=True)


_CHECKS = {
    "runs": (lambda value: isinstance(value, list) and bool(value) and all(map(is_text, value)), "a list of runs"),
    "strategy": (lambda value: value in STRATEGIES, f"one of {', '.join(STRATEGIES)}"),
    "count": (lambda value: is_whole_number(value, 1, MOST_PICKS), f"1 to {MOST_PICKS:,}"),
    "seed": (lambda value: is_whole_number(value, 0, 1 << 31), "a seed"),
}
