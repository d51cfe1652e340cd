"""Advice for a loop over our own Loader: told from its statistics, never in the words of another loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import headway
from headway.data.loader import Loader
from headway.doctor.loader_facts import LoaderFacts, advise_loader, collect_loader_facts
from headway.watch.loop_watch import LoopWatch, watch


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for place in range(12):
        path = tmp_path / "photos" / "ab"[place % 2] / f"{place}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (96, 128, 3), np.uint8)).save(path)
    return tmp_path / "photos"


def served(loader: Loader[Any]) -> LoaderFacts:
    for _ in loader:
        pass
    return collect_loader_facts(loader)


def changes(facts: LoaderFacts, *, wait: float = 0.6, cores: int = 8, **stages: float) -> str:
    facts = dataclasses.replace(facts, stages=stages or facts.stages)
    advice = advise_loader(facts, wait=wait, cores=cores, shares_cores=True)
    return " | ".join(f"{why}: {change}" for why, change in advice)


def test_each_stage_has_its_own_cure(photos: Path) -> None:
    facts = served(headway.Loader(photos, batch=4, seed=1, size=32, threads=2))
    assert facts.slowest in facts.stages
    assert f"decode {1 / facts.stages['decode']:,.0f}" in facts.describe()
    assert "2 decoding threads" in facts.describe()
    facts = dataclasses.replace(facts, stats=dataclasses.replace(facts.stats, backend="native"))
    said = changes(facts, decode=1.0, read=0.1)
    assert "headway.Loader(..., threads=7)" in said, "1.25 x 2 / (1 - 0.6), and at most one core less than there are"
    assert "headway.Loader(..., cache='memory')" in said
    assert "headway.Loader(..., scaled=True)" in said, "three times as large as the batch"
    assert "headway pack IMAGES PACKED --mode resize=32,quality=90" in said
    assert "DataLoader" not in said.replace("headway.Loader", "")
    assert "num_workers" not in said
    said = changes(facts, decode=0.1, read=1.0)
    assert said == "reading the records limits the loader, and the decoded set fits in memory: " + (
        "headway.Loader(..., cache='memory')"
    )
    assert "threads=" not in changes(facts, cores=2, decode=1.0), "there is no core for another"
    assert "your transform takes 2,000 us" in changes(facts, transform=2e-3, decode=1e-3)


def test_what_is_done_already_is_not_advised(photos: Path) -> None:
    facts = served(headway.Loader(photos, batch=4, seed=1, size=32, threads=1, cache="memory"))
    assert facts.tier == "memory"
    assert "cache" not in changes(facts, decode=1.0)
    assert "scaled" not in changes(facts, decode=1.0)
    assert "pack" not in changes(facts, decode=1.0)
    facts = served(headway.Loader(photos, batch=4, seed=1, size=32, scaled=True, backend="pillow"))
    assert "backend='native'" in changes(dataclasses.replace(facts, has_native=True), decode=1.0)
    said = changes(dataclasses.replace(facts, has_native=False), decode=1.0)
    assert "install a C++ compiler" in said
    assert "backend=" not in said
    assert "scaled" not in said
    facts = served(headway.Loader(photos, batch=4, seed=1, size=96))
    assert "scaled" not in changes(facts, decode=1.0), "the images are no larger than the batch's"
    assert "pack" not in changes(facts, decode=1.0)


def test_a_data_set_of_the_users_own(photos: Path) -> None:
    loader = headway.Loader([{"x": torch.zeros(3)}] * 16, batch=4, seed=1, workers=0)
    facts = served(loader)
    assert facts.is_own
    assert "no workers" in facts.describe()
    assert "the loop loads the samples itself" in changes(facts)
    assert "headway.Loader(..., workers=2)" in changes(facts), "1.25 x 0.6 / (1 - 0.6)"
    assert "too slow, on 1 cores" not in changes(facts, cores=4)


def test_a_watch_knows_the_loader(photos: Path) -> None:
    loader = headway.Loader(photos, batch=2, seed=1, size=16)
    model = torch.nn.Linear(16 * 16 * 3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(seen: LoopWatch[Any]) -> Iterator[int]:
        for images, labels in seen.loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images.flatten(1) / 255.0), labels).backward()
            optimizer.step()
            yield len(images)

    with watch(loader, model, optimizer) as seen:
        assert sum(sum(train(seen)) for _ in range(8)) == 8 * 12
    found = seen.verdict()
    assert found.batch == 2
    assert found.loader.startswith("headway.Loader, ")
    assert "each stage alone in images/s: order " in str(found)
    assert not any("DataLoader" in one or "headway doctor RECIPE" in one for one in found.unknown)
