"""Verifies a packed data set: reads every record and lists the damaged ones.

RecordIO records are read as other tools read them, frame and label included; in the other formats, only the bytes of
the images are checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from crc32c import crc32c

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import DataError, UsageError
from headway.core.path_suggestions import suggest_path
from headway.core.printable import escape_controls
from headway.data.columns import COLUMNS_FILE, FLAG_SPLIT, Shard, decode_name, load_columns
from headway.data.formats import recordio, trailer
from headway.data.formats.byte_ranges import map_path
from headway.data.formats.detect import PACK_FIX
from headway.data.store_address import EVAL, MANIFEST_FILE, StoreAddress, is_store_address
from headway.data.store_objects import read_objects_address
from headway.data.unjoined import expect_joined
from headway.data.version_columns import compute_content_fingerprint
from headway.storage.addresses import parse_local_path, redact_url

_CHUNK_RECORDS = 1024
_SET_NAMES = ("", "train", "eval")
_WRONG_CHECKSUM = "the image's checksum does not match"


@final
@dataclass(frozen=True, kw_only=True)
class Damage:
    """One damaged record, or a damaged file if `index` is None."""

    index: int | None
    """Number of the sample in its data set."""
    name: str
    """The sample's name in its source; empty for a file."""
    shard: str
    """The file, relative to the verified folder."""
    offset: int
    """Byte offset in the file."""
    reason: str

    def __str__(self) -> str:
        if self.index is None:
            return f"{self.shard}: {self.reason}"
        name = escape_controls(self.name, lines=False)
        return f"sample {self.index} ({name}), {self.shard} at byte {self.offset}: {self.reason}"


@final
@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """Number of records checked, and the damage found."""

    samples: dict[str, int]
    """Number of records of each set; an unsplit pack is one set, whose name is empty."""
    damages: list[Damage]


def verify(folder: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> VerifyResult:
    """Checks a packed folder, or both sets of a split one: files, records, labels and image checksums.

    A set without columns counts as damaged if its shards or its folder exist, or the other set names it.

    Args:
        folder: a local path, or a version in a store such as `store:cars@v3`.
        progress: called with (samples done, samples in all).

    Raises:
        UsageError: the folder is not a packed data set, is a part of one, or is a URL; or the shards of the store are
            not on this machine.
        DataError: a columns file is too damaged to check anything with it.
    """
    if is_store_address(folder):
        address = StoreAddress.parse(os.fspath(folder))
        root = address.resolve_split() if address.split else address.resolve()
        if (place := read_objects_address(address.find_store())) is not None:
            what = f"the shards of this store lie at {redact_url(place.address)}, and only local ones are read here"
            raise UsageError(what, where=str(folder), fix="Check the whole store: headway dataset verify.")
    else:
        root = parse_local_path(folder, "Verify the folder before it is copied there, or a local copy.")
    # A split pack has a columns file in each set, an unsplit one in the folder itself.
    checkers = [_PackChecker(root / name, name) for name in _list_sets(root)]
    if not checkers:
        expect_joined(root)
    damages = _find_missing_sets(root, checkers)
    if not checkers and not damages:
        what = "this is not a packed data set" if root.exists() else "the folder does not exist"
        hint = "" if root.exists() else suggest_path(root, _is_packed)
        raise UsageError(what, where=str(root), fix=hint or PACK_FIX)
    num_total = sum(checker.samples for checker in checkers)
    num_done = 0
    with ThreadPoolExecutor(count_usable_cores(), thread_name_prefix="verify") as pool:
        for checker in checkers:
            damages += checker.find_damaged_files()
            chunks = [
                range(first, min(first + _CHUNK_RECORDS, checker.samples))
                for first in range(0, checker.samples, _CHUNK_RECORDS)
            ]
            # `map` keeps the order, so damage is listed by sample.
            for chunk, chunk_damages in zip(chunks, pool.map(checker.find_damaged_records, chunks), strict=True):
                damages += chunk_damages
                num_done += len(chunk)
                if progress:
                    progress(num_done, num_total)
    return VerifyResult(samples={checker.set_name: checker.samples for checker in checkers}, damages=damages)


def _list_sets(root: Path) -> list[str]:
    """Returns the names of the sets in a packed folder, or of the splits of a version in a store."""
    names = set(_SET_NAMES)
    if (root / MANIFEST_FILE).is_file():
        names.update(path.parent.name for path in root.glob(f"*/{COLUMNS_FILE}"))
    return [
        name for name in sorted(names, key=lambda name: (name == EVAL, name)) if (root / name / COLUMNS_FILE).is_file()
    ]


def _is_packed(folder: Path) -> bool:
    return any((folder / name / COLUMNS_FILE).is_file() for name in _SET_NAMES)


def _find_missing_sets(root: Path, checkers: list[_PackChecker]) -> list[Damage]:
    """Returns one damage for each set whose columns are missing."""
    present_sets = {checker.set_name for checker in checkers}
    expected_sets = {name for checker in checkers if checker.set_name for name in checker.sets}
    damages = []
    for name in _SET_NAMES:
        folder = root / name
        # A set without columns is lost only if there is evidence that it existed.
        has_sibling = bool(present_sets - {""}) and name != "" and folder.is_dir()
        if name not in present_sets and (name in expected_sets or has_sibling or any(folder.glob("shard-[0-9]*"))):
            what = "the columns are missing" if folder.is_dir() else "the whole set is missing"
            file = os.path.join(name, COLUMNS_FILE if folder.is_dir() else "")
            damages.append(Damage(index=None, name="", shard=file, offset=0, reason=f"{what}; its samples are lost"))
    return damages


@final
class _PackChecker:
    """Checks one packed folder. `opening.open` is not used, as it raises for the damage to be reported here."""

    def __init__(self, folder: Path, set_name: str) -> None:
        self._folder = folder
        self.set_name = set_name
        self._columns, self._description, _ = load_columns(folder / COLUMNS_FILE)
        self.sets = self._description.sets
        self._label = self._columns["label"]
        self._views: list[memoryview | None] = []
        self.samples = len(self._label)

    def find_damaged_files(self) -> list[Damage]:
        """Checks the columns and each shard as a whole. Call it before `find_damaged_records`."""
        damages = []
        if compute_content_fingerprint(self._columns) != self._description.fingerprint:
            damages.append(
                self._build_file_damage(COLUMNS_FILE, "a column is damaged (the fingerprint does not match)")
            )
        for shard_index, shard in enumerate(self._description.shards):
            # A view is kept even if the shard is truncated: records before its end may be intact.
            view, reason = self._map_shard(shard)
            if view is None:
                # The user wants to know how many samples a missing shard costs.
                num_lost = np.count_nonzero(self._columns["shard"] == shard_index)
                reason = f"{reason}; its {num_lost:,} samples are lost"
            self._views.append(view)
            if reason:
                damages.append(self._build_file_damage(shard.name, reason))
        return damages

    def find_damaged_records(self, samples: range) -> list[Damage]:
        """Returns the damaged records among `samples`, without those in missing shards."""
        rows = slice(samples.start, samples.stop)
        # Lists of Python numbers: faster than indexing arrays record by record.
        columns = (self._columns[name][rows].tolist() for name in ("shard", "offset", "crc32c", "flags"))
        damages = []
        for sample, shard, offset, crc, flags in zip(samples, *columns, strict=True):
            # The columns may be damaged themselves.
            if shard >= len(self._views):
                damages.append(self._build_damage(sample, COLUMNS_FILE, offset, f"there is no shard {shard}"))
                continue
            view = self._views[shard]
            gap = self._description.record_gaps[shard] if self._description.record_gaps else 0
            if view is None:
                reason = ""
            elif self._description.format != "recordio" or self._description.shards[shard].pack_id is not None:
                # Records of a store keep the numbers and labels of the pack that they came with.
                reason = self._check_image(view, sample, offset, crc, flags)
            else:
                reason = self._check_record(view, sample, gap, offset, crc, flags)
            if reason:
                damages.append(self._build_damage(sample, self._description.shards[shard].name, offset, reason))
        return damages

    def _map_shard(self, shard: Shard) -> tuple[memoryview | None, str]:
        """Returns the bytes of a shard (None if no record can be read from it), and its damage (empty: intact)."""
        try:
            view = map_path(self._folder / shard.name)
        except DataError as error:
            return None, error.what
        is_complete = len(view) == shard.size
        if self._description.format != "recordio":
            pack_id = trailer.parse_pack_id(view)
            if pack_id is None and is_complete:
                return view, "the end of the shard is damaged"
        elif is_complete and shard.pack_id is None:
            # Each record contains the number of its pack, so the shard itself needs no check.
            return view, ""
        else:
            pack_id = _read_first_pack_id(view)
        if pack_id not in (None, self._description.pack_id if shard.pack_id is None else shard.pack_id):
            return None, "the shard belongs to another pack"
        return view, "" if is_complete else f"the shard has {len(view):,} bytes and should have {shard.size:,}"

    def _check_image(self, view: memoryview, sample: int, offset: int, crc: int, flags: int) -> str:
        """Returns the damage of the bytes of an image; empty if they are intact."""
        length = int(self._columns["length"][sample])
        if flags & FLAG_SPLIT:
            try:
                return "" if crc32c(recordio.join_record(view, offset, length)) == crc else _WRONG_CHECKSUM
            except DataError as error:
                return error.what
        if offset + length > len(view):
            return "the file ends inside the image"
        return "" if crc32c(view[offset : offset + length]) == crc else _WRONG_CHECKSUM

    def _check_record(self, view: memoryview, sample: int, gap: int, offset: int, crc: int, flags: int) -> str:
        """Returns the damage of a RecordIO record; empty if it is intact."""
        label = self._columns["label"][sample]
        # A split record is addressed by its frame, any other by its image.
        start = offset if flags & FLAG_SPLIT else recordio.compute_record_start(offset, label.size if label.ndim else 0)
        if start < 0:
            return "no record can begin there"
        try:
            record, _ = recordio.read_record(view, start)
        except DataError as error:
            return error.what
        # Frame and pack come before the checksum: they tell a mixed-up shard from a flipped bit.
        if record.id2 != self._description.pack_id:
            return "the record belongs to another pack"
        if len(record.image) != self._columns["length"][sample] or crc32c(record.image) != crc:
            return _WRONG_CHECKSUM
        if record.id != sample + gap or not np.array_equal(record.label, label.astype(np.float32)):
            return "the record's label or number differs from the columns"
        return ""

    def _build_damage(self, sample: int, shard: str, offset: int, reason: str) -> Damage:
        name = decode_name(self._columns, sample)
        return Damage(index=sample, name=name, shard=os.path.join(self.set_name, shard), offset=offset, reason=reason)

    def _build_file_damage(self, file: str, reason: str) -> Damage:
        return Damage(index=None, name="", shard=os.path.join(self.set_name, file), offset=0, reason=reason)


def _read_first_pack_id(view: memoryview) -> int | None:
    try:
        return recordio.read_record(view, 0)[0].id2
    except DataError:
        # A damaged first record is reported with the others.
        return None
