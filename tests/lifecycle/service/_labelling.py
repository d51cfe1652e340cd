"""Data sets without labels, queues over them, and what a server knows of their labels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.lifecycle.service._service import Reply, Served, add_images, build_tar, create, draw, key

JSON = {"Content-Type": "application/json"}
CLASSES = tuple(f"class {number}" for number in range(10))


def name_image(number: int) -> str:
    return f"pool/{number:05d}.jpg"


def find_id(number: int) -> str:
    """The ID of an image that is stored as it is."""
    return hashlib.sha256(draw(number)).hexdigest()


def propose(number: int) -> str:
    """The class that a network proposes for an image."""
    return CLASSES[number % len(CLASSES)]


def add_pool(served: Served, name: str, numbers: Sequence[int], classes: Sequence[str] | None = None) -> None:
    """A data set of images without labels."""
    create(served, name, splits={"train": 1.0}, **({} if classes is None else {"classes": list(classes)}))
    add_images(served, name, build_tar({name_image(number): draw(number) for number in numbers}))


def build_picks(numbers: Sequence[int], **more: Any) -> dict[str, Any]:
    """The content of a mine.json, as far as it matters."""
    picks = [
        {
            "sample": place,
            "name": name_image(number),
            "proposed": propose(number),
            "probability": 0.5,
            "arm": "random" if place % 5 == 0 else "margin",
            "score": None if place % 5 == 0 else 1 - place / 1000,
        }
        for place, number in enumerate(numbers)
    ]
    clusters = [{"kept": ["pool", 1], "out": [7, 8]}, {"kept": ["labelled", 0], "out": [9]}]
    tree = {"format": 1, "pool": "pool", "strategy": "margin", "runs": [{"run": "runs/first", "sha256": None}]}
    return tree | {"near_copies": {"out": 3, "clusters": clusters}, "picks": picks} | more


def send(served: Served, method: str, path: str, tree: Any, headers: Mapping[str, str] | None = None) -> Reply:
    return served.ask(method, path, json.dumps(tree).encode(), JSON | dict(headers or {}))


def add_queue(served: Served, dataset: str, numbers: Sequence[int], **more: Any) -> str:
    reply = send(served, "POST", f"/datasets/{dataset}/mine", build_picks(numbers, **more))
    assert reply.status in (200, 201), reply.body
    queue: str = reply.json()["queue"]
    return queue


def lease(served: Served, name: str, grid: str, by: str = "", **wish: Any) -> dict[str, Any]:
    reply = send(served, "PUT", f"/datasets/{name}/grids/{grid}", wish | {"by": by})
    assert reply.status == 200, reply.body
    tree: dict[str, Any] = reply.json()
    return tree


def set_labels(
    served: Served, name: str, queue: str, labels: Mapping[str, str | None], by: str = "", **more: Any
) -> Reply:
    rows = [{"sha256": sample, "label": label, "seconds": 2.0} for sample, label in labels.items()]
    body = {"queue": queue, "by": by, "labels": rows} | more
    return send(served, "POST", f"/datasets/{name}/labels", body, key())


def read_labels(served: Served, name: str) -> dict[str, str | None]:
    """The label of each sample of the newest version, by ID."""
    found, after = dict[str, str | None](), ""
    while True:
        tree = served.ask("GET", f"/datasets/{name}/samples?after={after}").json()
        found |= {one["sha256"]: one["label"] for one in tree["samples"]}
        after = tree["next"]
        if after is None:
            return found


def list_versions(served: Served, name: str) -> list[dict[str, Any]]:
    versions: list[dict[str, Any]] = served.ask("GET", f"/datasets/{name}/versions").json()["versions"]
    return versions
