"""An ensemble: the folder that names its members, and the members loaded as one network.

ENSEMBLE/
    ensemble.json       format, the rule of averaging, and for each member its run folder and the sha256 of its weights
    provenance.json     versions, host, command, and the labels that the members predict
    members/step-*/     members that are checkpoints of one run
    study.json          figures of the members and of the ensemble
    evaluation.json, panels/*.json      of the last `headway evaluate`
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError, UsageError
from headway.core.run_folder import RunFolder, collect_provenance
from headway.core.untrusted_json import JsonError, expect_entries, is_sha256, is_text, is_whole_number
from headway.setup.train_setup import TrainSetup

LOG = logging.getLogger("headway.training")
FORMAT = 1
RULE = "mean of probabilities"


def hash_weights(run: RunFolder) -> str:
    """Returns the sha256 of a run's weights. Raises UsageError: it has none yet."""
    if not run.weights_path.is_file():
        fix = "They are written by its first evaluation or checkpoint."
        raise UsageError("this run has no weights yet", where=str(run.folder), fix=fix)
    with run.weights_path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_ensemble(run: RunFolder, members: Sequence[RunFolder], setup: TrainSetup) -> None:
    """Writes the files of an ensemble into its folder.

    Paths of members inside the folder are relative to it, so that it can be moved with them. Others are absolute.
    """
    entries = []
    for member in members:
        path = member.folder.resolve()
        inside = path.is_relative_to(run.folder.resolve())
        shown = path.relative_to(run.folder.resolve()) if inside else path
        entries.append({"run": str(shown), "sha256": hash_weights(member)})
    about = {"target": asdict(setup.target), "members": [entry["run"] for entry in entries]}
    run.write_json("provenance", collect_provenance({}, setup.loaded.base, **about))
    # Last: the folder is an ensemble from the moment this file exists.
    run.write_json("ensemble", {"format": FORMAT, "rule": RULE, "members": entries})


def list_members(run: RunFolder) -> list[RunFolder]:
    """Returns the run folders of an ensemble's members, and checks that they have the weights of the beginning.

    Raises:
        HeadwayError: ensemble.json is damaged, a member is gone, or it has other weights by now.
    """
    entries = _read_entries(run)
    members = []
    for number, entry in enumerate(entries, 1):
        # An absolute path replaces the folder of the ensemble.
        folder = run.folder / entry["run"]
        try:
            member = RunFolder.open(folder)
            found = hash_weights(member)
        except UsageError as error:
            fix = "Put it back, or make the ensemble again from the runs that are left."
            what = f"member {number} of this ensemble cannot be used ({error.what})"
            raise HeadwayError(what, where=str(folder), fix=fix) from None
        if found != entry["sha256"]:
            what = f"member {number} of this ensemble has other weights than when the ensemble was made"
            fix = f"Make the ensemble again, in place of {run.folder}."
            raise HeadwayError(what, where=str(member.weights_path), fix=fix)
        members.append(member)
    return members


def _read_entries(run: RunFolder) -> list[dict[str, str]]:
    tree = run.read_json(run.ensemble_path.stem)
    # The folder may come from elsewhere, so its types are checked before they are used.
    try:
        is_list = (lambda value: isinstance(value, list) and len(value) > 1, "a list of two members or more")
        version = (lambda value: is_whole_number(value, 1, FORMAT), f"a format up to {FORMAT}, which is known here")
        rule = (lambda value: value == RULE, repr(RULE))
        expect_entries(tree, {"format": version, "rule": rule, "members": is_list})
        for place, entry in enumerate(tree["members"]):
            wanted = {"run": (is_text, "a path"), "sha256": (is_sha256, "a sha256")}
            expect_entries(entry, wanted, f"members[{place}].")
    except JsonError as error:
        where, fix = str(run.folder), "Make the ensemble again."
        raise HeadwayError(f"{run.ensemble_path.name} is damaged: {error}", where=where, fix=fix) from None
    entries: list[dict[str, str]] = tree["members"]
    return entries


def expect_several(folders: Sequence[Path]) -> None:
    """Raises UsageError if there are fewer than two runs, or one of them twice."""
    if len(folders) < 2:
        fix = "Name another run, or take the checkpoints of this one: --snapshots."
        raise UsageError("an ensemble needs two runs or more", where=", ".join(map(str, folders)), fix=fix)
    seen: dict[str, Path] = {}
    for folder in folders:
        # Two names of one folder, for example with and without a slash or through a link.
        if (real := os.path.realpath(folder)) in seen:
            raise UsageError("this run is named twice", where=str(folder), fix="Name each run once.")
        seen[real] = folder


def join_members(setups: Sequence[TrainSetup], names: Sequence[str]) -> TrainSetup:
    """Returns the setup of an ensemble: predictions and evaluations with it average over the members.

    Members may differ in their network, normalisation, precision and views at test time. They must have the same labels
    and decode an image to the same pixels.

    Args:
        names: names of the members in messages.

    Raises:
        UsageError: two members do not fit together; the message names the difference.
    """
    first = setups[0]
    for setup, name in zip(setups[1:], names[1:], strict=True):
        for what, read in _COMPARED.items():
            ours, theirs = read(first), read(setup)
            if ours != theirs:
                fix = "Members need the same labels and the same decoded images."
                raise UsageError(
                    f"{what} differs: {_describe_difference(ours, theirs)}", where=f"{names[0]}, {name}", fix=fix
                )
    for setup in setups:
        # Never switched back: networks of an ensemble are not trained.
        setup.model.eval()
    return replace(first, members=tuple(setups))


_COMPARED: dict[str, Callable[[TrainSetup], Any]] = {
    "the kind of the labels": lambda setup: setup.target.kind,
    "the list of classes": lambda setup: setup.target.classes,
    "the number of values of a label": lambda setup: setup.target.numbers,
    "the number of outputs": lambda setup: setup.task.outputs,
    "task.factory": lambda setup: setup.recipe.task.factory,
    "data.size": lambda setup: setup.size,
    "data.channels": lambda setup: setup.channels,
    "data.crop.share": lambda setup: setup.recipe.data.crop.share,
    "data.scaled": lambda setup: setup.recipe.data.scaled,
}
"""Facts in which all members agree, by the names that messages give them."""


def _describe_difference(ours: Any, theirs: Any) -> str:
    """Describes a difference; of two lists of texts, only the first place."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and ours and isinstance(ours[0], str):
        if len(ours) != len(theirs):
            return f"{len(ours):,} and {len(theirs):,}"
        place = next(place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        return f"number {place} is {ours[place]!r} and {theirs[place]!r}"
    return f"{ours} and {theirs}"
