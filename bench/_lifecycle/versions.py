"""Versions: equal contents have equal IDs, a million samples open at once, and training is as from a pack."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from PIL import Image

import headway
from bench._common import Claim, median, table, use_one_thread
from headway.data.formats.recordio import RecordioWriter
from headway.lifecycle.store.history import NewEntry
from headway.lifecycle.store.manifest import Schema
from headway.lifecycle.store.open_objects import open_objects
from headway.lifecycle.store.publishing import write_version
from headway.lifecycle.store.records import Change
from headway.lifecycle.store.rows import PLACE_TYPES, Names, Rows, ShardObject
from headway.lifecycle.store.shard_objects import hash_file, stage
from headway.lifecycle.store.store import DEFAULT_SPLITS, Store
from headway.lifecycle.store.version_files import build_manifest

HISTORIES = 200
IMAGES = 10
LABELS = ("ant", "bee", "cat", None)
SAMPLES = 1_000_000

OPEN = """
import sys, time
import headway.data.opening as opening
started = time.perf_counter()
data = opening.open(sys.argv[1])
print(1e3 * (time.perf_counter() - started))
assert len(data) > int(sys.argv[2])
"""


def compare_histories(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Random histories with equal end content: equal IDs, differences that cancel out, splits that stay."""
    count = 8 if options.quick else HISTORIES
    for number in range(IMAGES):
        # Noise, so that they are not near copies of each other, which would share a split.
        noise = np.random.default_rng(number).integers(0, 256, (9, 8), np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
    store = Store.make(folder / "store")
    equal = undone = requests = moved = 0
    for seed in range(count):
        draw = random.Random(seed)
        end = {number: draw.choice(LABELS) for number in draw.sample(range(IMAGES), draw.randint(0, IMAGES))}
        ids = []
        for way in range(2):
            name = f"history-{seed}-{way}"
            store.create(name)
            now: dict[int, str | None] = {}
            splits: dict[str, str] = {}
            is_undone = True
            for wanted in [*(_draw_content(draw) for _ in range(draw.randint(0, 4))), end]:
                before = store.resolve(name)
                changes = list(_reach(folder, now, wanted))
                draw.shuffle(changes)
                outcome = store.apply(name, changes)
                requests, now = requests + 1, wanted
                found = {one.name: one.split for one in store.list_samples(name) if one.label is not None}
                moved += sum(splits.setdefault(one, split) != split for one, split in found.items())
                if outcome.is_new:
                    difference = store.diff(f"{name}@v{before.number}", f"{name}@v{outcome.version.number}")
                    back = store.apply(name, difference.invert().to_changes()).version
                    is_undone = is_undone and back.version == before.version
                    store.apply(name, difference.to_changes())
            undone += is_undone
            ids.append(store.resolve(name).version)
        equal += len(set(ids)) == 1
    how = f"{count} pairs of random histories, {requests:,} requests"
    return [
        Claim("histories_equal", equal / count, "", f"share with equal IDs; {how}"),
        Claim("histories_undone", undone / (2 * count), "", f"share in which each inverse gave the parent; {how}"),
        Claim("splits_moved", moved, "samples", f"that were in another split when they were seen again; {how}"),
    ]


def _draw_content(draw: random.Random) -> dict[int, str | None]:
    return {number: draw.choice(LABELS) for number in draw.sample(range(IMAGES), draw.randint(0, IMAGES))}


def _reach(folder: Path, now: dict[int, str | None], wanted: dict[int, str | None]) -> list[Change]:
    changes = [Change(operation="remove", name=f"{number}.png") for number in now if number not in wanted]
    for number, label in wanted.items():
        if number not in now:
            file = folder / f"{number}.png"
            # Half of the images are placed in a split; their labels come and go without a word about it.
            split = "eval" if number % 2 else ""
            changes.append(Change(operation="add", name=f"{number}.png", label=label, file=file, split=split))
        elif now[number] != label:
            changes.append(Change(operation="label", name=f"{number}.png", label=label))
    return changes


def time_large_version(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """A version of a million samples: opened in a fresh process; one label changed."""
    samples, rounds = (20_000, 3) if options.quick else (SAMPLES, 15)
    store = Store.make(folder / "store")
    store.create("large")
    write_large(store, samples)
    address = f"store:{store.folder}//large@v1"
    opened = []
    for _ in range(rounds):
        command = [sys.executable, "-c", OPEN, f"{address}/train", str(samples // 2)]
        opened.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    objects = sum(path.stat().st_size for path in (store.folder / "objects").rglob("*.rec"))
    relabelled, name = [], "large"
    for number in range(3):
        started = time.process_time()
        version = store.label(name, {f"class-{number}/{number:07d}.jpg": "class-9"}).version
        relabelled.append(time.process_time() - started)
    columns = store.folder / "versions" / version.version
    size = sum(path.stat().st_size for path in columns.rglob("*") if path.is_file())
    assert objects == sum(path.stat().st_size for path in (store.folder / "objects").rglob("*.rec"))
    rows = [("claim", "median", "95 % interval")]
    for what, values, unit in (("open", opened, "ms"), ("relabel", relabelled, "s")):
        middle, low, high = median(values)
        rows.append((what, f"{middle:.4g} {unit}", f"[{low:.4g}, {high:.4g}]"))
    table(rows)
    how = f"{samples:,} samples"
    return [
        Claim("store_open_ms", median(opened)[0], "ms", f"headway.open, median of {rounds} processes; {how}"),
        Claim("store_relabel_s", median(relabelled)[0], "s", f"CPU seconds to change one label; {how}"),
        Claim("store_bytes_a_sample", size / samples, "bytes", f"columns of a version, names of 20 bytes; {how}"),
    ]


def write_large(store: Store, samples: int, *, record: bytes = b"\xff\xd8\xff\xd9", classes: int = 1000) -> None:
    """Makes a version of so many samples that have different IDs and share one record."""
    schema = Schema.build("keep", DEFAULT_SPLITS, None)
    with stage(store.folder) as staging:
        writer = RecordioWriter(staging / "a.rec", staging / "a.idx", 7)
        place = writer.append(record, 0.0, 0)
        writer.close()
        digest = hash_file(staging / "a.rec")
        open_objects(store.folder).keep(staging / "a.rec", digest)
        label = np.arange(samples) % classes
        names = [f"class-{number}/{row:07d}.jpg" for row, number in enumerate(label.tolist())]
        places = {name: np.zeros(samples, kind) for name, kind in PLACE_TYPES.items()}
        places["offset"][:], places["length"][:] = place.offset, place.length
        places["width"][:], places["height"][:] = 8, 8
        rows = Rows(
            schema=schema,
            classes=tuple(f"class-{number}" for number in range(classes)),
            shards=(ShardObject(digest, writer.size_bytes, 7),),
            sample_id=np.random.default_rng(0).integers(0, 256, (samples, 32), np.uint8),
            names=Names.build(names),
            label=label.astype(np.int64),
            split=schema.choose_splits(names),
            shard=np.zeros(samples, np.uint32),
            places=places,
        ).settle()
        version = write_version(store.folder, staging, rows, build_manifest(rows))
    head, _ = store.history.find("large")
    store.history.commit("large", head, [NewEntry(version=version, by="bench", message="", counts={})])


@use_one_thread()
def compare_with_pack(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Training epochs from a version and from a pack of the same images, in turns."""
    import torch

    from headway import model

    samples, rounds = (128, 2) if options.quick else (1024, 51)
    source = folder / "images"
    draw = np.random.default_rng(0)
    for number in range(samples):
        path = source / f"{number % 10}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = draw.integers(0, 256, (12, 12, 3), np.uint8)
        Image.fromarray(coarse).resize((96, 96), Image.Resampling.BICUBIC).save(path, quality=90)
    store = Store.make(folder / "store")
    store.create("images", splits={"train": 1.0})
    # In four additions, so that the version has several shards.
    for part in range(4):
        chosen = folder / f"part-{part}"
        chosen.mkdir()
        for label in range(part, 10, 4):
            (chosen / str(label)).symlink_to(source / str(label))
        store.add("images", chosen)
    headway.pack(source, folder / "packed", mode="keep")
    torch.manual_seed(0)
    network = model.small_net(num_classes=10)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    mean = 127.5

    def train(address: str) -> float:
        started = time.process_time()
        options = {"batch": 64, "seed": 0, "size": 32, "crop": "random", "threads": 1}
        with closing(headway.Loader(address, **options)) as loader:
            for batch in loader:
                optimizer.zero_grad()
                images = (batch.images.permute(0, 3, 1, 2).float() - mean) / mean
                torch.nn.functional.cross_entropy(network(images), batch.labels).backward()
                optimizer.step()
        return time.process_time() - started

    arms = {"pack": str(folder / "packed"), "store": f"store:{store.folder}//images"}
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in sorted(arms, reverse=bool(number % 2)):
            seconds = train(arms[name])
            # The first round fills the page cache.
            if number:
                taken[name].append(seconds)
    ratios = [store_s / pack_s for store_s, pack_s in zip(taken["store"], taken["pack"], strict=True)]
    middle, low, high = median(ratios)
    table([("arm", "CPU s an epoch"), *((name, f"{median(times)[0]:.3f}") for name, times in taken.items())])
    how = f"CPU seconds of a training epoch from a version over those from a pack, {rounds} rounds in turns, "
    return [Claim("store_vs_pack", middle, "", f"{how}{samples:,} JPEGs of 96 pixels; [{low:.3f}, {high:.3f}]")]
