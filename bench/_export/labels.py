"""Labels of image files by `predict.py` of an export, without torch and Headway, against `headway predict RUN`.

The files are photographs and pictures of CIFAR-10 in every format and mode that Headway reads, of odd sizes and of the
network's own size. They are new to the network, so that many of its answers are far from sure.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

import headway
from bench._common import Claim, table
from bench._data import images as copy_photographs
from bench._export.bare_python import link_packages, run_bare
from bench._export.image_kinds import save_kind
from headway.export.export_run import export_run

SIDE, FILES, PER_CLASS, EPOCHS = 32, 500, 300, 6
NEAR = 0.01
"""Two best classes whose probabilities are so close may change places where an image is resized."""
OF_CIFAR = "HEADWAY_CIFAR10"
RECIPE = {
    "data": {"train": "packed/train", "eval": "packed/eval"},
    "model": {"factory": "headway.model:small_net"},
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
    "augment": {"flip": True, "translate": 2},
    "schedule": "cosine",
    "batch": 64,
    "precision": "fp32",
}


@dataclass(frozen=True)
class Answer:
    """What the run says of a file, and what `predict.py` says.

    Attributes:
        file: its name.
        label, probability: by the run.
        margin: probability of the run's best class minus that of its second best.
        other_label, other_probability: by `predict.py`.
    """

    file: str
    label: str
    probability: float
    margin: float
    other_label: str
    other_probability: float

    @property
    def differs(self) -> bool:
        """True if the label is another."""
        return self.label != self.other_label

    @property
    def difference(self) -> float:
        """Difference of the probabilities of the best class."""
        return abs(self.probability - self.other_probability)

    @property
    def is_resized(self) -> bool:
        """True if the file has another size than the network's images."""
        return f"-{SIDE}x{SIDE}." not in self.file


def compare_labels(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Exports a run on CIFAR-10, predicts the files by both, and returns the claims; none where the data are absent."""
    cifar = os.environ.get(OF_CIFAR)
    photographs = copy_photographs(folder / "photographs")
    if cifar is None or photographs is None:
        print(f"left out: it needs CIFAR-10 as ${OF_CIFAR}, a folder with train/CLASS/NAME, and the photographs")
        return []
    count, per_class, epochs = (60, 30, 1) if options.quick else (FILES, PER_CLASS, EPOCHS)
    run = _train(folder, Path(cifar), per_class, epochs)
    export = export_run(run, folder / "export").folder
    (folder / "files").mkdir()
    paths = _write_files(folder / "files", sorted(photographs.rglob("*.JPEG")), Path(cifar) / "test", count)
    answers = _ask_both(run, export, paths, link_packages(folder / "packages"))
    return _judge(answers)


def _train(folder: Path, cifar: Path, per_class: int, epochs: int) -> Path:
    for part, limit in (("train", per_class), ("eval", max(per_class // 5, 5))):
        for source in sorted((cifar / ("train" if part == "train" else "test")).iterdir()):
            target = folder / part / source.name
            target.mkdir(parents=True)
            for path in sorted(source.iterdir())[:limit]:
                (target / path.name).symlink_to(path.absolute())
        headway.pack(folder / part, folder / "packed" / part)
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE | {"epochs": epochs}))
    return headway.train(recipe, run=folder / "run").folder


def _write_files(folder: Path, photographs: list[Path], cifar: Path, count: int) -> list[Path]:
    """Writes half of the files from photographs, of odd sizes, and half from test pictures of CIFAR-10, as they are."""
    random, paths = np.random.default_rng(24), []
    # The newest pictures of each class: the first ones were evaluated on.
    pictures = [
        path
        for place in range(1, 1 + count // 20)
        for path in (sorted(one.iterdir())[-place] for one in sorted(cifar.iterdir()))
    ]
    for number in range(count):
        # A kind of file gets both in turns.
        sources = pictures if (number + number // 18) % 2 else photographs
        with Image.open(sources[number // 2 % len(sources)]) as opened:
            image = opened.convert("RGB")
        if sources is photographs:
            # Down to a quarter, each side by itself.
            sides = [max(int(side * random.uniform(0.25, 1)), 1) for side in image.size]
            image = image.crop((0, 0, sides[0], sides[1]))
        paths.append(save_kind(image, folder, number))
    return paths


def _ask_both(run: Path, export: Path, paths: list[Path], packages: Path) -> list[Answer]:
    command = [sys.executable, "-m", "headway", "predict", run, *paths, "--top", "2"]
    asked = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    script = run_bare(packages, export / "predict.py", *paths)
    for done in (asked, script):
        assert done.returncode == 0, done.stderr
    answers = []
    rows = (csv.DictReader(io.StringIO(done.stdout)) for done in (asked, script))
    for path, ours, theirs in zip(paths, *rows, strict=True):
        assert ours["path"] == theirs["path"] == str(path)
        best, second = float(ours["probability"]), float(ours["probability_2"])
        answers.append(
            Answer(path.name, ours["label"], best, best - second, theirs["label"], float(theirs["probability"]))
        )
    return answers


def _judge(answers: list[Answer]) -> list[Claim]:
    """Prints the files whose label differs, and returns the claims."""
    different = [one for one in answers if one.differs]
    if different:
        heading = ("file", "run", "probability", "ahead of the second by", "predict.py")
        table(
            [
                heading,
                *(
                    (one.file, one.label, f"{one.probability:.4f}", f"{one.margin:.4f}", one.other_label)
                    for one in different
                ),
            ]
        )
    far = [one for one in different if one.margin >= NEAR]
    resized = [one.difference for one in answers if one.is_resized]
    whole = [one.difference for one in answers if not one.is_resized]
    unsure = sum(one.probability < 0.5 for one in answers)
    how = f"{len(answers)} files, {len(different) - len(far)} more within {NEAR}; the best class below 0.5 for {unsure}"
    return [
        Claim("labels_differ", len(far), "files", how),
        Claim("probability_resized", max(resized), "difference", f"the largest of {len(resized)} files"),
        Claim("probability_not_resized", max(whole), "difference", f"the largest of {len(whole)} files"),
    ]
