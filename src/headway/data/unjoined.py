"""Recognises parts of a pack that are not joined yet: their shards could be read, without names, classes and order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from headway.core.errors import UsageError
from headway.data.pack_part import PART_FILE, load_part_set
from headway.data.pack_parts import JOINED, PARTS_SUFFIX, get_parts_folder

_PART_NAME = re.compile(r"part-\d+-of-\d+")


def expect_joined(path: Path) -> None:
    """Raises UsageError if a path is a part of a pack, the folder of its parts, or the pack before they are joined.

    The message has the command that joins them.
    """
    # The part itself, or one of its sets; the folder that holds its sets; a shard, or a pattern of shards.
    for folder in (path, path / "train", path.parent):
        if (folder / PART_FILE).is_file():
            facts = load_part_set(folder).facts
            what = f"this is part {facts.index} of {facts.count} of a pack that is not joined yet"
            # The set of a part lies in the part.
            part_folder = folder if _PART_NAME.fullmatch(folder.name) else folder.parent
            raise UsageError(what, where=str(path), fix=_describe_join(part_folder.absolute().parent))
    whole = path.absolute()
    # A pack, or a set of one, that is not there because its parts are not joined.
    if not path.exists():
        for dst in (whole, whole.parent):
            if not dst.exists() and _holds_parts(get_parts_folder(dst)):
                fix = f"Its parts are packed: headway pack --join {shlex.quote(str(dst))}"
                raise UsageError("there is no such file or folder", where=str(path), fix=fix)
    # The folder of the parts; the folder in which a killed join has collected shards; or a set in that one.
    joined = next((folder for folder in (whole, whole.parent) if folder.name == JOINED), None)
    parts_folder = joined.parent if joined else whole
    if _holds_parts(parts_folder):
        what = "these are parts of a pack that are not joined yet"
        raise UsageError(what, where=str(path), fix=_describe_join(parts_folder))


def _holds_parts(folder: Path) -> bool:
    if not folder.name.endswith(PARTS_SUFFIX) or not folder.is_dir():
        return False
    return any(_PART_NAME.match(child.name) and child.is_dir() for child in folder.iterdir())


def _describe_join(parts_folder: Path) -> str:
    if parts_folder.name.endswith(PARTS_SUFFIX):
        dst = parts_folder.with_name(parts_folder.name.removesuffix(PARTS_SUFFIX))
        return f"Join the parts: headway pack --join {shlex.quote(str(dst))}"
    return f"Lay it beside the other parts in DST{PARTS_SUFFIX}, and join them: headway pack --join DST"
