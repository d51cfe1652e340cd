"""Verify: reads every record of a packed data set and lists the damaged ones.

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
from headway.core.printable import escape_controls
from headway.data.columns import COLUMNS_FILE, FLAG_SPLIT, Shard, compute_fingerprint, decode_name, load_columns
from headway.data.formats import recordio, trailer
from headway.data.formats.byte_ranges import map_path
from headway.storage.addresses import parse_local_path

_CHUNK = 1024
_PARTS = ("", "train", "eval")


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
    """Records of each part; the part of an unsplit pack is called ``."""
    damages: list[Damage]


def verify(folder: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> VerifyResult:
    """Checks a packed folder, or both parts of a split one: files, records, labels and image checksums.

    A part counts as damaged if its columns are gone but its shards or its folder exist, or the other part names it.

    Args:
        progress: called with (samples done, samples in all).

    Raises:
        UsageError: the folder is not a packed data set, or is an address.
        DataError: a columns file is so damaged that nothing can be checked with it.
    """
    root = parse_local_path(folder, "Verify the folder before it is copied there, or a local copy.")
    # A split pack has a columns file in each part, an unsplit one in the folder itself.
    packs = [_PackChecker(root / part, part) for part in _PARTS if (root / part / COLUMNS_FILE).is_file()]
    damages = _find_lost_parts(root, packs)
    if not packs and not damages:
        what = "this is not a packed data set" if root.exists() else "the folder does not exist"
        raise UsageError(what, where=str(root), fix="Pack one: headway pack SRC DST.")
    total, done = sum(pack.samples for pack in packs), 0
    with ThreadPoolExecutor(count_usable_cores(), thread_name_prefix="verify") as pool:
        for pack in packs:
            damages += pack.find_damaged_files()
            chunks = [range(low, min(low + _CHUNK, pack.samples)) for low in range(0, pack.samples, _CHUNK)]
            # `map` keeps the order, so damage is listed by sample.
            for chunk, found in zip(chunks, pool.map(pack.find_damaged_records, chunks), strict=True):
                damages += found
                done += len(chunk)
                if progress:
                    progress(done, total)
    return VerifyResult(samples={pack.part: pack.samples for pack in packs}, damages=damages)


def _find_lost_parts(root: Path, packs: list[_PackChecker]) -> list[Damage]:
    """Returns the parts whose columns are gone."""
    there = {pack.part for pack in packs}
    known = {part for pack in packs if pack.part for part in pack.parts}
    lost = []
    for part in _PARTS:
        folder = root / part
        # A part without columns is lost only if there is evidence that it existed.
        beside = bool(there - {""}) and part != "" and folder.is_dir()
        if part not in there and (part in known or beside or any(folder.glob("shard-[0-9]*"))):
            what = "the columns are missing" if folder.is_dir() else "the whole part is missing"
            file = os.path.join(part, COLUMNS_FILE if folder.is_dir() else "")
            lost.append(Damage(index=None, name="", shard=file, offset=0, reason=f"{what}; its samples are lost"))
    return lost


@final
class _PackChecker:
    """One packed folder, read without `opening.open`, which refuses the damage to be reported here."""

    def __init__(self, folder: Path, part: str) -> None:
        self._folder, self.part = folder, part
        self._columns, self._description, _ = load_columns(folder / COLUMNS_FILE)
        self.parts = self._description.parts
        self._label = self._columns["label"]
        self._views: list[memoryview | None] = []
        self.samples = len(self._label)

    def find_damaged_files(self) -> list[Damage]:
        """Checks the columns and each shard as a whole. Call it before `find_damaged_records`."""
        damages = []
        if compute_fingerprint(self._columns) != self._description.fingerprint:
            damages.append(
                self._build_file_damage(COLUMNS_FILE, "a column is damaged (the fingerprint does not match)")
            )
        for number, shard in enumerate(self._description.shards):
            # A view is kept even if the shard is short: records before the cut may be good.
            view, reason = self._map_shard(shard)
            if view is None:
                # The user wants to know how many samples a missing shard costs.
                lost = np.count_nonzero(self._columns["shard"] == number)
                reason = f"{reason}; its {lost:,} samples are lost"
            self._views.append(view)
            if reason:
                damages.append(self._build_file_damage(shard.name, reason))
        return damages

    def find_damaged_records(self, samples: range) -> list[Damage]:
        """Returns the damaged records among `samples`, without those in lost shards."""
        part = slice(samples.start, samples.stop)
        # Lists of Python numbers: faster than indexing arrays record by record.
        columns = (self._columns[name][part].tolist() for name in ("shard", "offset", "crc32c", "flags"))
        damages = []
        for sample, shard, offset, crc, flags in zip(samples, *columns, strict=True):
            # The columns may be damaged themselves.
            if shard >= len(self._views):
                damages.append(self._build_damage(sample, COLUMNS_FILE, offset, f"there is no shard {shard}"))
                continue
            view = self._views[shard]
            reason = self._check_record(view, sample, offset, crc, flags) if view is not None else ""
            if reason:
                damages.append(self._build_damage(sample, self._description.shards[shard].name, offset, reason))
        return damages

    def _map_shard(self, shard: Shard) -> tuple[memoryview | None, str]:
        """Returns the bytes of a shard, or None if no record can be read from it; and the reason."""
        try:
            view = map_path(self._folder / shard.name)
        except DataError as error:
            return None, error.what
        whole = len(view) == shard.size
        if self._description.format != "recordio":
            number = trailer.parse_pack_id(view)
            if number is None and whole:
                return view, "the end of the shard is damaged"
        elif whole:
            # Each record names its pack, so the shard needs no check of its own.
            return view, ""
        else:
            number = _read_first_pack_id(view)
        if number not in (None, self._description.pack_id):
            return None, "the shard belongs to another pack"
        return view, "" if whole else f"the shard has {len(view):,} bytes and should have {shard.size:,}"

    def _check_record(self, view: memoryview, sample: int, offset: int, crc: int, flags: int) -> str:
        if self._description.format != "recordio":
            end = offset + int(self._columns["length"][sample])
            if end > len(view):
                return "the file ends inside the image"
            return "" if crc32c(view[offset:end]) == crc else "the image's checksum does not match"
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
            return "the image's checksum does not match"
        if record.id != sample or not np.array_equal(record.label, label.astype(np.float32)):
            return "the record's label or number differs from the columns"
        return ""

    def _build_damage(self, sample: int, shard: str, offset: int, reason: str) -> Damage:
        name = decode_name(self._columns, sample)
        return Damage(index=sample, name=name, shard=os.path.join(self.part, shard), offset=offset, reason=reason)

    def _build_file_damage(self, file: str, reason: str) -> Damage:
        return Damage(index=None, name="", shard=os.path.join(self.part, file), offset=0, reason=reason)


def _read_first_pack_id(view: memoryview) -> int | None:
    try:
        return recordio.read_record(view, 0)[0].id2
    except DataError:
        # A damaged first record is reported with the others.
        return None
