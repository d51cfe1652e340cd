"""Estimates the loader's rate with a packed set: packs the run's first records in memory and reads those."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import final

import numpy as np

from headway.core.cpu_count import count_usable_cores
from headway.core.recipe import LoadedRecipe
from headway.data import native
from headway.data.columns import FLAG_NOT_JPEG, FLAG_RAW, PACK_FORMATS
from headway.data.dataset import Dataset
from headway.data.formats.dataset_source import DatasetImages
from headway.data.order import Order
from headway.data.pack import build_encoder
from headway.data.pack_mode import ImageEncoder, PackMode, StoredImage
from headway.data.pack_set import use_strict_pillow
from headway.data.records import Records
from headway.data.tiers.next_use import HostSlots
from headway.data.tiers.remote_dataset import RemoteShards
from headway.data.tiers.tier import Ids, Spans, Tier
from headway.doctor.loader_measurement import LoaderMeasurement, measure_loader
from headway.doctor.measurement_job import MeasurementJob
from headway.doctor.smaller_images import choose_stored_side
from headway.setup.recipe import TrainRecipe
from headway.storage.addresses import get_cache_folder

# Images packed between two looks at the clock.
CHUNK = 16
# Limits of the packed records that stand for all others.
MOST, MOST_BYTES = 2048, 128 * 2**20
# Samples that decide which kinds of files a set has.
LOOKED_AT = 4096
# Share of JPEGs from which a set counts as JPEGs.
MOSTLY = 0.9
# If a crop covers less of an image's area, part of a seekable file need not be decoded.
LITTLE = 0.9
# Size of a lossless pack over its source, at most: seekable files grow by about 1 %.
GROWTH = 1.05
THEN = " && "


@final
@dataclass(frozen=True)
class PackCommand:
    """A pack that a recipe could train on."""

    # The set to pack, as the command takes it, and the folder of the pack.
    source: str
    folder: Path
    mode: PackMode

    def format_command(self, loaded: LoadedRecipe[TrainRecipe]) -> str:
        """Returns the two shell commands that pack the set and train on it."""
        named = self.folder.name if self.folder.parent == loaded.base else str(self.folder)
        pack = ["headway", "pack", self.source, format_path(self.folder), "--mode", str(self.mode)]
        train = ["headway", "train", format_path(find_recipe_file(loaded)), f"data.train={named}"]
        return THEN.join(map(shlex.join, (pack, train)))

    @staticmethod
    def parse(text: str) -> PackCommand | None:
        """Parses the text of `format_command`; None: the text is another command."""
        words = shlex.split(text)
        if words[:2] != ["headway", "pack"]:
            return None
        source, folder, _, mode = words[2:6]
        return PackCommand(source, Path(folder), PackMode.parse(mode))


def build_pack_command(job: MeasurementJob, mode: PackMode) -> PackCommand:
    """Builds the command for a pack beside the recipe, named after it."""
    loaded = job.loaded
    train = loaded.recipe.data.train.removeprefix("file://")
    source = format_path(loaded.base / Path(train).expanduser())
    stem = find_recipe_file(loaded).stem if find_recipe_file(loaded).suffix else loaded.recipe.name
    return PackCommand(source, loaded.base / f"{stem}.{choose_folder_suffix(mode)}", mode)


def choose_folder_suffix(mode: PackMode) -> str:
    """Returns the end of a pack's folder name."""
    return mode.kind if mode.side is None else f"{mode.side}"


def find_recipe_file(loaded: LoadedRecipe[TrainRecipe]) -> Path:
    """Returns the file of a recipe by the origins of its values; `RECIPE` if they name none."""
    for origin in loaded.origins.values():
        if match := re.fullmatch(r"(.+\.ya?ml):\d+", origin):
            return loaded.base / match[1]
    return Path("RECIPE")


def format_path(path: Path) -> str:
    """Formats a path relative to the current folder if it is inside of it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def list_lossless_modes(job: MeasurementJob) -> list[PackMode]:
    """Returns pack modes that keep every pixel and may help."""
    train, crop = job.setup.inputs.train, job.setup.recipe.data.crop
    if train is None or isinstance(train.source, RemoteShards) or (train.flags[:LOOKED_AT] & FLAG_RAW).any():
        return []
    modes = []
    if train.description.format not in PACK_FORMATS:
        modes.append(PackMode(kind="keep"))
    shape = np.stack([train.width[:LOOKED_AT], train.height[:LOOKED_AT]])
    square = float(np.mean(shape.min(axis=0) / np.maximum(shape.max(axis=0), 1))) if len(train) else 1.0
    small = (sum(crop.scale) / 2 if crop.is_random else square * crop.share**2) < LITTLE
    plain = train.description.mode in ("keep", "foreign")
    able = native.is_available() and job.setup.recipe.data.decoder != "pillow"
    if small and plain and able and _is_mostly_jpeg(train):
        modes.append(PackMode(kind="seekable"))
    return modes


def choose_smaller_mode(job: MeasurementJob) -> PackMode | None:
    """Returns a mode that stores images as small as the recipe needs; None: they are not much larger now."""
    train, crop = job.setup.inputs.train, job.setup.recipe.data.crop
    if train is None or isinstance(train.source, RemoteShards) or not _is_mostly_jpeg(train):
        return None
    side = choose_stored_side(train, job.setup.inputs.size, crop)
    return None if side is None else PackMode(kind="encode", side=side)


def fits_in_disk_cache(job: MeasurementJob) -> bool:
    """Returns True if the training set is remote and fits in the recipe's cache folder."""
    train, options = job.setup.inputs.train, job.setup.recipe.data
    if train is None or not isinstance(train.source, RemoteShards):
        return False
    nbytes = int(train.length.sum(dtype=np.int64))
    return nbytes <= min(options.cache_gb * 1e9, read_free_disk_bytes(Path(options.cache_folder or get_cache_folder())))


def read_free_disk_bytes(folder: Path) -> int:
    """Returns the free bytes of the disk of a folder, which need not exist yet."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return shutil.disk_usage(there).free


def _is_mostly_jpeg(dataset: Dataset) -> bool:
    """Returns True if nearly all of the first samples are JPEGs."""
    return bool(np.mean(dataset.flags[:LOOKED_AT] & (FLAG_RAW | FLAG_NOT_JPEG) == 0) >= MOSTLY)


@final
class FirstRecords:
    """The first records of a run, in the order in which it reads them."""

    def __init__(self, job: MeasurementJob) -> None:
        dataset = job.setup.inputs.train
        assert dataset is not None
        recipe = job.setup.recipe
        self._job, self._dataset = job, dataset
        order = Order(len(dataset), recipe.seed, recipe.data.window)
        asked = order(np.arange(min(len(dataset), MOST)))[1]
        # A sample may come twice: it is packed once, in its first position.
        self._ids = asked[np.sort(np.unique(asked, return_index=True)[1])]

    def pack(self, mode: PackMode, *, limit_s: float) -> PackedSample:
        """Packs as many records as the time allows."""
        images = DatasetImages(self._dataset, isinstance(self._dataset.source, RemoteShards))
        encoder = build_encoder(mode, None, False, [])[0]
        until, ids, stored, nbytes = perf_counter() + limit_s, list[int](), list[StoredImage](), 0
        with use_strict_pillow(), ThreadPoolExecutor(count_usable_cores()) as pool:
            for low in range(0, len(self._ids), CHUNK):
                some = self._ids[low : low + CHUNK].tolist()
                for sample, one in zip(some, _treat_records(pool, encoder, images, some), strict=True):
                    # A record with a reason is damaged, and a pack would leave it out.
                    if not one.reason:
                        ids.append(sample)
                        stored.append(one)
                        nbytes += one.size_bytes
                if perf_counter() >= until or nbytes >= MOST_BYTES:
                    break
        return PackedSample(self._job, self._dataset, ids, stored)


def _treat_records(
    pool: ThreadPoolExecutor, encoder: ImageEncoder, images: DatasetImages, ids: Sequence[int]
) -> Iterator[StoredImage]:
    near = images.prefetch(ids)
    return pool.map(lambda sample: encoder(near.read(sample), None, ""), ids)


@final
class PackedSample:
    """Some records as a pack stores them. Attributes: count: number of records; 0: all are damaged."""

    def __init__(
        self, job: MeasurementJob, dataset: Dataset, ids: Sequence[int], stored: Sequence[StoredImage]
    ) -> None:
        self._job, self._dataset, self._ids, self._stored = job, dataset, np.array(ids, np.int64), stored
        self.count = len(ids)

    def measure_loader(self, *, limit_s: float) -> LoaderMeasurement:
        """Measures the loader over a set in memory that consists of these records, repeated."""
        return measure_loader(self._job, limit_s=limit_s, tier=self.build_tier(), verify="never")

    def build_tier(self) -> Tier:
        """Builds a cache tier that serves these records in place of all others."""
        return _SampleTier(self._dataset, self._ids, self._stored)


@final
class _SampleTier(Tier):
    """Serves a few records in place of a whole set."""

    def __init__(self, dataset: Dataset, ids: Ids, stored: Sequence[StoredImage]) -> None:
        super().__init__(dataset, "none", "as it would be")
        self._place = np.arange(len(dataset)) % len(ids)
        # A sample that was packed is itself; any other one is replaced by one of them.
        self._place[ids] = np.arange(len(ids))
        self._records = Records.from_buffers([bytes(one.payload) for one in stored])
        self.flags = np.array([one.flags for one in stored], np.uint8)[self._place]
        self.width = np.array([one.width for one in stored], np.uint32)[self._place]
        self.height = np.array([one.height for one in stored], np.uint32)[self._place]

    def read(self, ids: Sequence[int] | Ids) -> Records:
        place = self._place[np.asarray(ids, np.int64)]
        return Records(self._records.address[place], self._records.length[place], self._records.keep)

    def expect(self, spans: Spans, order: Order | None = None, slots: HostSlots | None = None) -> None:
        """Does nothing: all records are in memory."""

    def close(self) -> None:
        """Does nothing: the memory is freed with the last Records."""
