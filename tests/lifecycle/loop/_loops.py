"""What the tests of loops share: a store with digits, a loop on it, and somebody who knows the labels."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from tests._support import digits_arrays, write_recipe

from headway.lifecycle.store.store import Store

LABELLED, HELD_OUT, POOL = 40, 100, 120


def make_loop(folder: Path, *, recipe: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Makes FOLDER/store with the data set `digits`, a recipe, and FOLDER/loop.yaml, whose path it returns.

    The data set has 40 labelled digits, 100 for evaluation, and 120 without labels.
    """
    images, labels = digits_arrays()
    begin = 0
    for part, count in (("labelled", LABELLED), ("eval", HELD_OUT), ("pool", POOL)):
        for number in range(begin, begin + count):
            place = folder / part / ("" if part == "pool" else str(labels[number]))
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.rint(images[number] * (255 / 16)).astype(np.uint8)).save(place / f"{number:04d}.png")
        begin += count
    store = Store.make(folder / "store")
    store.create("digits", splits={"train": 0.8, "eval": 0.2}, classes=[str(label) for label in range(10)])
    store.add("digits", folder / "labelled", split="train", by="anna")
    store.add("digits", folder / "eval", split="eval", by="anna")
    store.add("digits", folder / "pool", unlabelled=True, by="anna")
    write_recipe(folder / "recipe.yaml", **(recipe or {}))
    tree: dict[str, Any] = {
        "name": "digits",
        "data": "store:store//digits",
        "recipe": "recipe.yaml",
        "members": 2,
        "rounds": 2,
        "mine": {"count": 20},
        "labels": {"poll_s": 0.05},
        # Whatever comes is accepted, so that the second round compares with the first.
        "gate": {"drop": 100},
        "export": None,
    }
    (folder / "loop.yaml").write_text(yaml.safe_dump(tree | changes, sort_keys=False))
    return folder / "loop.yaml"


def read_journal(loop: Path) -> list[dict[str, Any]]:
    """The stages of a loop's journal; none before there is one."""
    path = loop / "journal.json"
    stages: list[dict[str, Any]] = json.loads(path.read_text())["stages"] if path.exists() else []
    return stages


def find_stage(loop: Path, number: int, name: str) -> dict[str, Any]:
    """The result of a stage."""
    (found,) = (stage for stage in read_journal(loop) if (stage["round"], stage["name"]) == (number, name))
    facts: dict[str, Any] = found["facts"]
    return facts


def find_truth(name: str) -> str:
    """The label of an image of the pool, whose file has the number of the digit."""
    return str(digits_arrays()[1][int(Path(name).stem)])


def list_waiting(loop: Path) -> list[dict[str, Any]]:
    """The picks of the round that waits for its labels."""
    number = sum(stage["name"] == "mine" for stage in read_journal(loop))
    picks: list[dict[str, Any]] = json.loads((loop / "rounds" / str(number) / "picks.json").read_text())["picks"]
    return picks


def set_labels(loop: Path) -> Path:
    """Sets the column `label` of the newest picks.csv, as a person does; returns its path."""
    number = sum(stage["name"] == "mine" for stage in read_journal(loop))
    path = loop / "rounds" / str(number) / "mined" / "picks.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(row | {"label": find_truth(row["name"])} for row in rows)
    return path


def judge_by_hand(loop: Path, scores: tuple[float, float], *, first_passed: bool = True) -> None:
    """Makes a loop that waits for its first labels one whose round 1 has passed its gate, by its journal alone.

    Rounds 0 and 1 get an export that is a file with a score; its own gate may have refused that of round 0.
    """
    tree = json.loads((loop / "journal.json").read_text())
    first = find_stage(loop, 0, "train")
    verdict = {"images": 100, "lost": 0, "won": 1, "drop": -1.0, "bound": 1.0, "allowed": 0.0, "allowed_bound": None}
    gain = {"mean": 0.01, "low": 0.0, "high": 0.02}
    label = {"number": 4, "labelled": 20, "people_s": 0.0, "review": {}}
    stages: list[tuple[int, str, dict[str, Any]]] = [
        (1, "label", label | {"version": first["version"]}),
        (1, "train", first),
        (1, "gate", verdict | {"passed": True, "against": 0, "gain": gain, "gain_in_all": gain}),
    ]
    for number, score in enumerate(scores):
        export = loop / "rounds" / str(number) / "export"
        export.mkdir(parents=True)
        (export / "score.txt").write_text(str(score))
        facts = {
            "folder": str(export.relative_to(loop)),
            "passed": first_passed or number > 0,
            "targets": {"onnx": True},
        }
        stages.append((number, "export", facts))
    tree["stages"] += [
        {"round": number, "name": name, "facts": facts, "seconds": 1.0, "cpu_s": 1.0, "ended": 1.0}
        for number, name, facts in stages
    ]
    (loop / "journal.json").write_text(json.dumps(tree))
