"""pipeline.json: everything that a program needs to run an export, and the sha256 of each of its files."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from headway.core.errors import DataError, UsageError, suggest_nearest
from headway.core.files import (
    describe_os_error,
    expect_inside,
    is_plain_name,
    open_regular,
    read_text,
    write_atomically,
)
from headway.core.untrusted_json import (
    Checks,
    JsonError,
    expect_entries,
    is_object,
    is_sha256,
    is_text,
    is_whole_number,
    parse_object,
)

FORMAT = 1
MANIFEST = "pipeline.json"
REJECTED = "REJECTED-"
"""Prefix of the file of a target that the gate has refused."""
KINDS = ("class", "multi", "value", "own")
ACTIVATIONS = ("softmax", "sigmoid", "identity")
PRECISIONS = ("fp32", "bf16", "int8")
MOST_FILES = 64
MOST_SIDE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class TargetEntry:
    """One target of an export.

    Attributes:
        file: name of the file that its runtime loads.
        precision: `fp32`, `bf16` or `int8`.
        gate: the verdict as JSON; None: the target was not judged.
        rejected: True if the gate refused it.
        about: facts of the target's own, such as the layers that stayed in fp32.
    """

    file: str
    precision: str
    gate: Mapping[str, Any] | None = None
    rejected: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of pipeline.json.

    Attributes:
        task: `class` (one of several classes), `multi` (several labels), `value` (numbers), or `own`: a task of the
            user's own, whose columns only its code knows.
        activation: already applied to the outputs: `softmax`, `sigmoid` or `identity`.
        names: name of each output: classes, labels, or columns of numbers.
        outputs: number of outputs.
        threshold: probability from which on a label is predicted (`multi`); otherwise None.
        size: (height, width) of the pixels that the pipeline takes.
        channels: 1 (gray) or 3 (red, green, blue).
        crop_share: share of each side of the largest centred box that is kept.
        scaled: True if large JPEGs are decoded at 1/2, 1/4 or 1/8.
        decoder: decoder of the run, `native` or `pillow`; they differ by 1 in a pixel at most.
        orientation: `ignored`: images are not turned by their EXIF entry.
        files: sha256 of each file of the folder, by name.
        targets: the targets, by name.
        run: where the weights come from: `folder`, the `sha256` of the weights of each `members` entry, `task`.
        data: fingerprints of the `training` and the `evaluation` set, number of `evaluation_samples` compared and of
            `evaluation_damaged` ones, and `max_bad_share` of the run.
        versions: versions of the packages that made the export.
        processor: name and flags of the processor that made it.
        sha256: of everything above; identifies the export.
    """

    task: str
    activation: str
    names: tuple[str, ...]
    outputs: int
    threshold: float | None
    size: tuple[int, int]
    channels: int
    crop_share: float
    scaled: bool
    decoder: str
    orientation: str = "ignored"
    files: Mapping[str, str]
    targets: Mapping[str, TargetEntry]
    run: Mapping[str, Any]
    data: Mapping[str, Any]
    versions: Mapping[str, str]
    processor: Mapping[str, Any]
    sha256: str = ""

    def get_target(self, name: str, where: str = "") -> TargetEntry:
        """Returns a target's entry. Raises DataError if the gate refused it, UsageError if it was not exported."""
        if name not in self.targets:
            fix = suggest_nearest(name, self.targets) or f"Export the run again with --to {name}."
            raise UsageError(f"this export has no target {name!r}", where=where, fix=fix)
        entry = self.targets[name]
        if entry.rejected:
            what = f"the gate has refused the target {name} of this export"
            fix = "Its pipeline.json has the reasons. Export the run again, or use another target."
            raise DataError(what, where=where, fix=fix)
        return entry

    @property
    def usable(self) -> tuple[str, ...]:
        """Names of the targets that the gate has not refused."""
        return tuple(name for name, entry in self.targets.items() if not entry.rejected)

    def to_json(self) -> dict[str, Any]:
        """Returns the tree of pipeline.json, with its sha256."""
        tree: dict[str, Any] = {"format": FORMAT}
        for name in _ENTRIES:
            if name not in ("format", "sha256"):
                tree[name] = getattr(self, name)
        tree["targets"] = {name: dict(vars(entry)) for name, entry in self.targets.items()}
        # Through JSON once, so that tuples are lists and the digest is that of the tree that a reader parses.
        tree = json.loads(json.dumps(tree))
        return tree | {"sha256": compute_digest(tree)}


_TARGET_ENTRIES: Checks = {
    "file": (is_plain_name, "a plain name of a file"),
    "precision": (lambda value: value in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
    "gate": (lambda value: value is None or is_object(value), "an object or null"),
    "rejected": (lambda value: isinstance(value, bool), "true or false"),
    "about": (is_object, "an object"),
}


def _is_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_whole_number(side, 1, MOST_SIDE) for side in value)


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1


_ENTRIES: Checks = {
    "format": (lambda value: is_whole_number(value, 1, FORMAT), f"a format up to {FORMAT}, which is known here"),
    "task": (lambda value: value in KINDS, f"one of {', '.join(KINDS)}"),
    "activation": (lambda value: value in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"),
    "names": (lambda value: isinstance(value, list) and all(map(is_text, value)), "a list of texts"),
    "outputs": (lambda value: is_whole_number(value, 1, 1 << 31), "a whole number from 1"),
    "threshold": (lambda value: value is None or _is_share(value), "a number from 0 to 1, or null"),
    "size": (_is_size, "two whole numbers"),
    "channels": (lambda value: value in (1, 3) and value is not True, "1 or 3"),
    "crop_share": (_is_share, "a number above 0, at most 1"),
    "scaled": (lambda value: isinstance(value, bool), "true or false"),
    "decoder": (is_text, "a text"),
    "orientation": (lambda value: value == "ignored", "'ignored', the only rule known here"),
    "files": (is_object, "an object"),
    "targets": (lambda value: is_object(value) and len(value) > 0, "an object with a target"),
    "run": (is_object, "an object"),
    "data": (is_object, "an object"),
    "versions": (is_object, "an object"),
    "processor": (is_object, "an object"),
    "sha256": (is_sha256, "64 hexadecimal digits"),
}


def compute_digest(tree: Mapping[str, Any]) -> str:
    """Returns the sha256 of a manifest's tree without its own `sha256`."""
    # Keys sorted: a program may have read and written the file in another order.
    kept = {name: value for name, value in tree.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Returns the sha256 of a file, read piece by piece. Raises OSError if it cannot be read or is no regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(cast("io.BufferedReader", file), "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes pipeline.json into an export's folder. Write it last: the folder is an export once it exists."""
    write_atomically(folder / MANIFEST, json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n")


def is_export(folder: Path) -> bool:
    """Returns True if a folder has a pipeline.json."""
    return (folder / MANIFEST).is_file()


def open_manifest(folder: Path, target: str | None = None) -> Manifest:
    """Reads pipeline.json, and compares every file of the export with its sha256.

    Args:
        target: a target that is going to be used.

    Raises:
        UsageError: the folder is no export, or has no such target.
        DataError: a file is missing, or a byte of it or of the manifest has changed; or the gate refused the target.
    """
    where = str(folder)
    try:
        manifest = parse_manifest(read_text(folder / MANIFEST))
    except FileNotFoundError:
        what = f"this is not an export: it has no {MANIFEST}" if folder.is_dir() else "there is no such export"
        raise UsageError(what, where=where, fix="Make one with headway export RUN.") from None
    except JsonError as error:
        raise DataError(f"{MANIFEST} is damaged: {error}", where=where, fix=_COPY_AGAIN) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{MANIFEST} cannot be read ({describe_os_error(error)})", where=where) from None
    for name, sha256 in manifest.files.items():
        try:
            expect_inside(folder, name)
            found = hash_file(folder / name)
        except OSError as error:
            what = f"{name} cannot be read ({describe_os_error(error)})"
            raise DataError(what, where=where, fix=_COPY_AGAIN) from None
        if found != sha256:
            raise DataError(f"{name} is damaged: its sha256 is another", where=where, fix=_COPY_AGAIN)
    if target is not None:
        manifest.get_target(target, where)
    return manifest


_COPY_AGAIN = "Copy the folder again, or export the run again."


def parse_manifest(text: str) -> Manifest:
    """Parses the text of pipeline.json. Raises JsonError if an entry is missing or wrong, or the sha256 is another."""
    tree = parse_object(text)
    # The format is looked at first, so that a later version is named as such.
    expect_entries(tree, {"format": _ENTRIES["format"]})
    expect_entries(tree, _ENTRIES)
    if tree["sha256"] != compute_digest(tree):
        raise JsonError("its sha256 is another")
    files, targets = tree["files"], tree["targets"]
    if len(files) > MOST_FILES:
        raise JsonError(f"it names {len(files):,} files, more than {MOST_FILES}")
    for name, sha256 in files.items():
        if not is_plain_name(name) or name == MANIFEST or not is_sha256(sha256):
            raise JsonError(f"it has {name[:100]!r} in files, not a plain name with a sha256")
    for name, entry in targets.items():
        expect_entries(entry, _TARGET_ENTRIES, f"targets.{name}.")
        if entry["file"] not in files:
            raise JsonError(f"its target {name} has the file {entry['file']!r}, which is not listed in files")
    if len(tree["names"]) != tree["outputs"]:
        raise JsonError(f"it has {len(tree['names'])} names for {tree['outputs']} outputs")
    fields = {name: tree[name] for name in _ENTRIES if name != "format"}
    fields |= {"names": tuple(tree["names"]), "size": tuple(tree["size"])}
    fields["targets"] = {
        name: TargetEntry(**{key: entry[key] for key in _TARGET_ENTRIES}) for name, entry in targets.items()
    }
    return Manifest(**fields)
