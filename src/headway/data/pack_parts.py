"""The folder in which the parts of a pack lie until they are joined."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.core.errors import DataError, UsageError
from headway.core.printable import escape_controls
from headway.data.pack_identity import find_difference, identify_finished, identify_planned
from headway.data.pack_part import PART_FILE, PartFacts, PartSet, load_part_set
from headway.data.pack_plan import PackJob, PackPart, SetPlan

PARTS_SUFFIX = ".parts"
JOINED = "joined"
"""Name of the folder in which a join collects the shards."""
SAME_IMAGES = "Give all parts the same images and options"

_SET_NAMES = ("train", "eval")
_MAX_LISTED_PARTS = 20


def get_parts_folder(dst: Path) -> Path:
    """Returns the folder that holds the finished parts of a pack until they are joined."""
    return dst.with_name(f"{dst.name}{PARTS_SUFFIX}")


@final
@dataclass(frozen=True, kw_only=True)
class FinishedPart:
    """A finished part of a pack."""

    folder: Path
    sets: Mapping[str, PartSet]
    """The sets by name: train and eval, or one without a name."""

    @property
    def facts(self) -> PartFacts:
        """Facts about its first set; index, count and options are those of all sets."""
        return next(iter(self.sets.values())).facts

    def format_command(self, dst: Path, index: int) -> str:
        """Returns the command that packs a part of the same pack, with the same options."""
        source = next(iter(self.sets.values())).description.source
        words = ["headway", "pack", source, str(dst), "--part", f"{index}/{self.facts.count}"]
        for option, text in self.facts.options.items():
            words += [option, text] if text else [option]
        # The file may come from another machine.
        return escape_controls(shlex.join(words), lines=False)


def load_finished_parts(parts_folder: Path) -> list[FinishedPart]:
    """Loads all finished parts, sorted by number.

    Raises DataError if a folder is no finished part, or its file is damaged.
    """
    return sorted(map(_load_part, _list_folders(parts_folder)), key=lambda part: part.facts.index)


def _list_folders(parts_folder: Path) -> list[Path]:
    names = sorted(os.listdir(parts_folder)) if parts_folder.is_dir() else []
    folders = [parts_folder / name for name in names if not name.startswith(".") and name != JOINED]
    # A hidden folder is of a pack that runs, or was killed.
    return [folder for folder in folders if folder.is_dir()]


def _load_part(folder: Path) -> FinishedPart:
    names = ("",) if (folder / PART_FILE).is_file() else _SET_NAMES
    if lacking := [name for name in names if not (folder / name / PART_FILE).is_file()]:
        what = f"{os.path.join(lacking[0], PART_FILE)} is missing in it, so it is no finished part"
        raise DataError(what, where=str(folder), fix="Copy the folder again, or pack this part again.")
    return FinishedPart(folder=folder, sets={name: load_part_set(folder / name) for name in names})


def expect_same_pack(dst: Path, plans: Sequence[SetPlan], job: PackJob) -> None:
    """Raises UsageError if a part that is to be packed does not belong to a finished one beside it.

    Args:
        dst: the folder that the parts are packed for.
        plans: the plans of the whole sets.
    """
    assert job.part is not None
    parts_folder = get_parts_folder(dst)
    beside: FinishedPart | None = None
    for folder in _list_folders(parts_folder):
        # One is enough to compare with. A damaged one is named by the join.
        if beside is None and folder.name != job.part.folder_name:
            with suppress(DataError):
                beside = _load_part(folder)
    if beside is None:
        return
    ours, theirs = identify_planned(plans, job), identify_finished(beside.sets)
    if difference := find_difference("this part", ours, beside.folder.name, theirs):
        same = f"{SAME_IMAGES}: {beside.format_command(dst, min(job.part.index, beside.facts.count))}"
        what = f"this part and {beside.folder.name} would be of different packs: {difference}"
        raise UsageError(what, where=str(parts_folder), fix=f"{same}\nTo begin anew, remove the folder.")


def list_missing_parts(present: Sequence[int], count: int) -> str:
    """Describes which parts are missing, for example `parts 1, 3 are`; empty if none is."""
    missing = sorted(set(range(1, count + 1)) - set(present))
    listed = ", ".join(map(str, missing[:_MAX_LISTED_PARTS]))
    if len(missing) > _MAX_LISTED_PARTS:
        listed += f" and {len(missing) - _MAX_LISTED_PARTS:,} more"
    return f"part{'s'[: len(missing) > 1]} {listed} {'are' if len(missing) > 1 else 'is'}" if missing else ""


def describe_next_step(dst: str, part: PackPart) -> str:
    """Says what to do after a part was packed: join the parts, or pack those that are not there yet."""
    parts_folder = get_parts_folder(Path(dst).resolve())
    numbers = range(1, part.count + 1)
    present = [k for k in numbers if (parts_folder / PackPart(index=k, count=part.count).folder_name).is_dir()]
    command = f"headway pack --join {shlex.quote(dst)}"
    if missing := list_missing_parts(present, part.count):
        return f"Of {part.count} parts, {missing} not in {parts_folder} yet. Once all are: {command}"
    return f"All parts are there. Join them: {command}"
