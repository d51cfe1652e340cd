"""Annotations in four formats: what they cost, and whether they come back equal. Croissant, by its own validator.

`mlcroissant` is taken from .venv-peers, or from the PATH. Where it is missing, that claim is left out.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path
from random import Random
from time import process_time

import numpy as np
from PIL import Image

from bench._common import Claim, table
from headway.data.pack import pack
from headway.lifecycle.interchange.annotations import AnnotatedImage, Annotations, Box
from headway.lifecycle.interchange.convert import read_annotations, write_annotations
from headway.lifecycle.interchange.croissant_files import write_croissant
from headway.lifecycle.store.store import Store

FILES = {"coco": "coco.json", "cvat": "cvat.xml", "label-studio": "tasks.json", "list": "list.jsonl"}
PER = 10_000
"""Images that the times are given for."""


def compare_interchange(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Writes and reads the same annotations in each format, then describes packs."""
    count = 200 if options.quick else 50_000
    given = _make_annotations(count)
    rows = [("format", "write, CPU s", "read, CPU s", "MB", "equal")]
    slowest, equal = 0.0, 0
    found = given
    for form, name in FILES.items():
        path = folder / name
        began = process_time()
        write_annotations(path, found, form)
        written = process_time()
        found = read_annotations(path, form)
        read = process_time()
        is_equal = found.to_plain().images == given.to_plain().images
        equal += is_equal
        slowest = max(slowest, (read - began) * PER / count)
        times = [f"{(b - a) * PER / count:.2f}" for a, b in ((began, written), (written, read))]
        rows.append((form, *times, f"{path.stat().st_size / 1e6:.1f}", "yes" if is_equal else "no"))
    table(rows)
    how = f"{count:,} images with up to 3 labels and 5 boxes, one format after the other"
    claims = [
        Claim("annotations_equal", equal / len(FILES), "", f"share of the formats that give back what they got: {how}"),
        Claim("annotations_cpu_s", slowest, "s", f"CPU to write and read {PER:,} images, the slowest format: {how}"),
    ]
    return [*claims, *_validate_croissant(folder)]


def _make_annotations(count: int) -> Annotations:
    draw = Random(0)
    classes = tuple(f"class {number}" for number in range(80))

    def place() -> Box:
        left, top = draw.randrange(600_000) / 1000, draw.randrange(400_000) / 1000
        numbers = (left, top, draw.randrange(40_000) / 1000, draw.randrange(80_000) / 1000)
        return Box(label=draw.choice(classes), form="xywh", numbers=numbers)

    images = [
        AnnotatedImage(
            name=f"images/{number:012}.jpg",
            labels=tuple(draw.sample(classes, draw.randrange(4))),
            boxes=tuple(place() for _ in range(draw.randrange(6))),
            size=(640, 480),
            split="train",
        )
        for number in range(count)
    ]
    return Annotations(images=tuple(images), classes=classes)


def _validate_croissant(folder: Path) -> list[Claim]:
    """Judges descriptions of packs, and of a version with a pool and two labellers, by the validator of MLCommons."""
    peers = Path(".venv-peers/bin/mlcroissant").absolute()
    validator = str(peers) if peers.exists() else shutil.which("mlcroissant")
    if validator is None:
        print("mlcroissant is not here: pip install mlcroissant. Descriptions are not judged.")
        return []
    draw, images = np.random.default_rng(0), folder / "images"
    for number in range(12):
        path = images / f"class-{number % 3}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    sources = {"recordio": folder / "recordio", "tar": folder / "tar", "version": _make_version(folder, images)}
    for form in ("recordio", "tar"):
        pack(images, folder / form, format=form, split=0.25, threads=1)
    accepted = 0
    for name, source in sources.items():
        out = folder / f"{name}-description/croissant.json"
        out.parent.mkdir()
        facts = {"name": "noise", "description": "Noise.", "creator": "Headway", "url": "https://example.com/noise"}
        license = "https://creativecommons.org/publicdomain/zero/1.0/"
        result = write_croissant(str(source), out, license=license, **facts)
        command = [validator, "validate", "--jsonld", str(result.description)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        accepted += done.returncode == 0
        print(f"{name}: {'accepted' if done.returncode == 0 else done.stderr.strip()}")
    how = f"share of descriptions (of {', '.join(sources)}) that `mlcroissant validate` accepts"
    return [Claim("croissant_valid", accepted / len(sources), "", how)]


def _make_version(folder: Path, images: Path) -> str:
    """Returns the address of a version with images of two splits, some without a label, and two labellers."""
    store = Store.make(folder / "store")
    store.create("noise", splits={"train": 0.5, "eval": 0.5})
    store.add("noise", images, by="ann")
    names = sorted(sample.name for sample in store.list_samples("noise"))
    version = store.label("noise", {names[0]: None, names[1]: "another class"}, by="eve").version
    return f"store:{store.folder}//noise@v{version.number}"
