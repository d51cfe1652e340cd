"""Writes the Croissant description of a pack, and `samples.csv` beside it, from the pack's columns and shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Any, final

import numpy as np

from headway.core.errors import DataError, UsageError
from headway.core.files import (
    describe_os_error,
    expect_writable,
    open_atomically,
    read_text,
    write_atomically,
)
from headway.core.untrusted_json import JsonError, parse_object
from headway.data import opening
from headway.data.columns import COLUMNS_FILE, FLAG_NOT_JPEG, FLAG_RAW, PACK_FORMATS
from headway.data.dataset import Dataset
from headway.data.formats.pack_source import EVAL_NAMES
from headway.data.formats.tar_writer import guess_extension
from headway.data.store_address import is_store_address
from headway.data.tiers.remote_dataset import RemoteShards
from headway.export.manifest import hash_file
from headway.lifecycle.interchange.croissant import (
    CroissantFacts,
    DescribedFile,
    DescribedSet,
    build_croissant,
)
from headway.lifecycle.interchange.croissant_source import CroissantSource, open_version
from headway.lifecycle.interchange.croissant_table import SAMPLES_CSV, Progress, advise_version, write_samples
from headway.storage.addresses import parse_local_path

DESCRIPTION = "croissant.json"
_OCTETS = "application/octet-stream"
_MEDIA_TYPES = {"tar": "application/x-tar", "recordio": _OCTETS, "lmdb": _OCTETS, "raw": _OCTETS}
_SHARDS = {
    "recordio": "RecordIO, as MXNet reads it",
    "tar": "tar in the WebDataset layout",
    "lmdb": "LMDB with Caffe's Datum values",
    "raw": "pixels without headers",
}


@final
@dataclass(frozen=True, kw_only=True)
class CroissantResult:
    """The result of `write_croissant`.

    Attributes:
        description: the JSON-LD file.
        samples_file: the CSV file beside it.
        samples: number of samples.
        files: number of files that are described.
        facts: what the owner said, with the defaults filled in.
        notes: what the owner should look at, as sentences.
    """

    description: Path
    samples_file: Path
    samples: int
    files: int
    facts: CroissantFacts
    notes: tuple[str, ...] = ()


def write_croissant(
    pack: str,
    out: Path | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    license: str | None = None,
    creator: str | None = None,
    url: str | None = None,
    published: str | None = None,
    version: str | None = None,
    progress: Progress = lambda done, total: None,
) -> CroissantResult:
    """Writes `croissant.json` and `samples.csv` of a pack; see `CroissantFacts` for what is not given here.

    Args:
        pack: a packed folder, a folder with the packs `train` and `eval`, or a version: `store:cars@v3`.
        out: the JSON file. Default: `croissant.json` in the packed folder. Facts that are not given are taken from it
            if it exists, and from the data set of a version.
        published: default: today.
        version: default: 1.0.0.
        progress: called with (samples done, samples in all).

    Raises:
        UsageError: this is not a pack, or a required fact is missing.
        DataError: a file or a record of the pack is damaged.
    """
    source = open_version(pack) if is_store_address(pack) else _find_pack(pack)
    if out is None and source.is_version:
        fix = "Name the file to write: --out FOLDER/croissant.json."
        raise UsageError("the folder of a version never changes, so nothing is written there", where=pack, fix=fix)
    out = source.root / DESCRIPTION if out is None else out
    given = {"name": name, "description": description, "license": license, "creator": creator, "url": url}
    given |= {"published": published, "version": version}
    earlier = _read_earlier(out)
    facts = _collect_facts(earlier, source.facts, {key: value for key, value in given.items() if value is not None})
    facts.check()
    samples_file = out.with_name(SAMPLES_CSV)
    with ExitStack() as stack:
        sets = {split: stack.enter_context(closing(dataset)) for split, dataset in _open_sets(source).items()}
        expect_writable(out, samples_file)
        _expect_own_table(samples_file, earlier)
        described = _describe_sets(sets, source)
        files = [*_describe_files(sets, out.parent)]
        notes = []
        with open_atomically(samples_file) as file:
            table = write_samples(file, sets, described, source.setters, progress)
            if version is None and samples_file.exists():
                file.flush()
                digests = {one.sha256 for one in files} <= _list_digests(earlier)
                notes += advise_version(facts.version, samples_file, Path(file.name), same_files=digests)
    archives = tuple(file.id for file in files if file.media_type == _MEDIA_TYPES["tar"])
    described = replace(described, archives=archives if described.image_types else ())
    tree = build_croissant(facts, described, [table, *files])
    # Last: it names the other file's SHA-256.
    write_atomically(out, json.dumps(tree, indent=1, ensure_ascii=False) + "\n")
    return CroissantResult(
        description=out,
        samples_file=samples_file,
        samples=sum(map(len, sets.values())),
        files=len(files) + 1,
        facts=facts,
        notes=tuple(notes),
    )


def _expect_own_table(samples_file: Path, earlier: Mapping[str, Any]) -> None:
    """Raises UsageError if there is a file of this name that the earlier description does not name."""
    files = earlier.get("distribution")
    names = [one.get("contentUrl") for one in files if isinstance(one, dict)] if isinstance(files, list) else []
    if samples_file.exists() and SAMPLES_CSV not in names:
        what = "this file exists, and no description beside it names it"
        fix = "Move it away, or name a file in another folder with --out."
        raise UsageError(what, where=str(samples_file), fix=fix)


def _list_digests(earlier: Mapping[str, Any]) -> set[str]:
    """Returns the SHA-256 of all files of an earlier description."""
    files = earlier.get("distribution")
    found = [one.get("sha256") for one in files if isinstance(one, dict)] if isinstance(files, list) else []
    return {one for one in found if isinstance(one, str)}


def _collect_facts(earlier: Mapping[str, Any], known: Mapping[str, str], given: dict[str, str]) -> CroissantFacts:
    """Returns the given facts, over those of an earlier description, over known ones, over defaults."""
    defaults = {"published": date.today().isoformat(), "version": "1.0.0"}
    return CroissantFacts(
        **dict.fromkeys(("name", "description", "license", "creator", "url"), "")
        | defaults
        | dict(known)
        | _get_facts(earlier)
        | given
    )


def _read_earlier(path: Path) -> dict[str, Any]:
    """Returns the description that is there; empty if there is none."""
    if not path.exists():
        return {}
    try:
        return parse_object(read_text(path))
    except (JsonError, UnicodeDecodeError, OSError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        what = f"this description exists and cannot be read ({reason})"
        raise UsageError(what, where=str(path), fix="Delete it, or name another file with --out.") from None


def _get_facts(tree: Mapping[str, Any]) -> dict[str, str]:
    found = {key: tree.get(key) for key in ("name", "description", "license", "url", "version")}
    if isinstance(creator := tree.get("creator"), dict):
        found["creator"] = creator.get("name")
    found["published"] = tree.get("datePublished")
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _find_pack(pack: str) -> CroissantSource:
    """Returns the packs of a folder by the name of their split, which is empty for a single one."""
    root = parse_local_path(pack, "Describe a local copy of the pack.")
    if (root / COLUMNS_FILE).is_file():
        return CroissantSource(root=root, splits={"": root})
    names = [name for name in ("train", *EVAL_NAMES) if (root / name / COLUMNS_FILE).is_file()]
    if not names:
        fix = "Pack the images first: headway pack SRC DST."
        raise UsageError("this is not a packed folder", where=str(root), fix=fix)
    return CroissantSource(root=root, splits={name: root / name for name in names})


def _open_sets(source: CroissantSource) -> dict[str, Dataset]:
    sets = {split: opening.open(path) for split, path in source.splits.items()}
    first = next(iter(sets.values())).description
    for split, dataset in sets.items():
        about = dataset.description
        if about.format not in PACK_FORMATS:
            raise UsageError("this is not a packed folder", where=str(dataset.folder), fix="Pack it first.")
        if (about.label_kind, about.classes) != (first.label_kind, first.classes):
            what = f"the labels of {split} are others than those of {next(iter(sets))}"
            raise DataError(what, where=str(source.root), fix="Describe each pack alone.")
    return sets


def _describe_sets(sets: dict[str, Dataset], source: CroissantSource) -> DescribedSet:
    first = next(iter(sets.values())).description
    return DescribedSet(
        label_kind=first.label_kind,
        classes=first.classes,
        splits=tuple(split for split in sets if split),
        archives=(),
        image_types=_list_image_types(sets),
        activity=source.activity or f"headway pack, format {first.format}, mode {first.mode}",
        derived_from=source.derived_from,
        labellers=source.labellers,
        separator=_choose_separator(first.classes) if first.label_kind == "multi" else "",
    )


def _choose_separator(classes: Sequence[str]) -> str:
    """Returns what separates the labels of an image in samples.csv: a semicolon, unless a class holds one."""
    for separator in (";", "|", "/", "\t"):
        if not any(separator in name for name in classes):
            return separator
    what = "classes hold ; and | and / and tabs, so that several of them cannot be one cell of a table"
    raise UsageError(what, fix="Rename a class, and pack the images again.")


def _list_image_types(sets: dict[str, Dataset]) -> tuple[str, ...]:
    """Returns the media types of the images in tar shards; empty for other packs, and for pixels without headers."""
    if any(one.description.format != "tar" or bool((one.flags & FLAG_RAW).any()) for one in sets.values()):
        return ()
    kinds = {"jpg"}
    for dataset in sets.values():
        for sample in np.flatnonzero(dataset.flags & FLAG_NOT_JPEG):
            kinds.add(guess_extension(bytes(dataset.read([int(sample)])[0][:16])))
    return tuple(f"image/{kind.replace('jpg', 'jpeg')}" for kind in sorted(kinds))


def _describe_files(sets: dict[str, Dataset], folder: Path) -> Iterator[DescribedFile]:
    """Yields the shards and the columns of all sets; a shard that splits of a version share once."""
    seen: set[str] = set()
    for split, dataset in sets.items():
        about = dataset.description
        prefix = f"{split}-" if split else ""
        kind = about.format
        told = f"Images: {_SHARDS[kind]}."
        for number, shard in enumerate(about.shards):
            name = shard.name
            # Shards at an address are not fetched: their names say their SHA-256.
            if isinstance(dataset.source, RemoteShards):
                if name not in seen:
                    seen.add(name)
                    yield DescribedFile(
                        id=f"{prefix}shard-{number:05}",
                        path=f"{dataset.source.remote.display_uri}/{name}",
                        size=shard.size,
                        sha256=PurePosixPath(name).stem,
                        media_type=_MEDIA_TYPES[kind],
                        about=told,
                    )
                continue
            if (real := os.path.realpath(dataset.folder / name)) in seen:
                continue
            seen.add(real)
            yield _describe_file(dataset.folder / name, folder, f"{prefix}shard-{number:05}", _MEDIA_TYPES[kind], told)
        told = f"Columns of the samples; the fingerprint of the data set is {about.fingerprint}."
        yield _describe_file(dataset.folder / COLUMNS_FILE, folder, f"{prefix}columns", _OCTETS, told)


def _describe_file(path: Path, folder: Path, name: str, kind: str, about: str) -> DescribedFile:
    try:
        size, digest = path.stat().st_size, hash_file(path)
    except OSError as error:
        raise DataError(f"it cannot be read ({describe_os_error(error)})", where=str(path)) from None
    relative = Path(os.path.relpath(path, folder)).as_posix()
    return DescribedFile(id=name, path=relative, size=size, sha256=digest, media_type=kind, about=about)


def summarise(result: CroissantResult) -> dict[str, Any]:
    """Returns the result as JSON."""
    return {
        "croissant": str(result.description),
        "samples_file": str(result.samples_file),
        "samples": result.samples,
        "files": result.files,
        **vars(result.facts),
        "notes": list(result.notes),
    }
