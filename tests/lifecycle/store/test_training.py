"""Versions in the Loader and in recipes: the same samples as from a pack, and a run keeps the version it began with."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import yaml
from tests._support import digits, refused, write_recipe
from tests._support import headway as run_headway

import headway
from headway.lifecycle.store.store import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    digits(folder / "digits")
    store = Store.make(folder / "store")
    store.create("digits", splits={"train": 0.75, "eval": 0.25})
    store.add("digits", folder / "digits")
    headway.pack(f"store:{folder / 'store'}//digits", folder / "digits.packed", mode="keep")
    return folder


def serve(source: str | Path, **options: object) -> dict[str, tuple[bytes, int]]:
    """By name, the pixels and the label that a Loader serves in one epoch."""
    found = {}
    with (
        closing(headway.open(source)) as dataset,
        closing(headway.Loader(dataset, batch=16, threads=1, **options)) as loader,  # type: ignore[arg-type]
    ):
        for batch in loader:
            rows = zip(batch.served.tolist(), batch.images, batch.labels.tolist(), strict=True)
            found |= {dataset.name(row): (image.numpy().tobytes(), label) for row, image, label in rows}
    return found


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_a_loader_serves_what_a_pack_of_the_version_serves(folder: Path, cache: str) -> None:
    address = f"store:{folder / 'store'}//digits@v1/train"
    found = serve(address, cache=cache)
    assert found == serve(folder / "digits.packed/train", cache=cache)
    assert len(found) > 150


def test_equal_versions_of_two_stores_have_equal_order_and_fingerprint(folder: Path, tmp_path: Path) -> None:
    """So that a run can go on with another store, whatever came first into it."""
    other = Store.make(tmp_path / "store")
    other.create("other", splits={"train": 0.75, "eval": 0.25})
    for label in range(9, -1, -1):
        (tmp_path / f"part-{label}").mkdir()
        (tmp_path / f"part-{label}/{label}").symlink_to(folder / f"digits/{label}")
        other.add("other", tmp_path / f"part-{label}")
    addresses = (f"store:{folder / 'store'}//digits", f"store:{tmp_path / 'store'}//other")
    with closing(headway.open(addresses[0])) as one, closing(headway.open(addresses[1])) as two:
        assert one.fingerprint == two.fingerprint
        assert len(two.description.shards) == 10
        np.testing.assert_array_equal(one.columns["sample_id"], two.columns["sample_id"])
        assert [bytes(record) for record in one.read(range(20))] == [bytes(record) for record in two.read(range(20))]


def test_a_run_keeps_the_version_that_it_began_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(folder / "cache"))
    # Its shards lie elsewhere: nothing else differs.
    far = ("--store", folder / "far", "--shards", folder / "bulk")
    run_headway("dataset", "create", "moving", *far, "--splits", "train=0.75,eval=0.25")
    store = Store(folder / "far")
    store.add("moving", f"store:{folder / 'store'}//digits")
    recipe = write_recipe(
        folder / "recipe.yaml", data={"train": "store:far//moving", "eval": "store:far//moving@v1"}, epochs=1
    )
    run = folder / "run"
    run_headway("train", recipe, "--run", run)
    version = store.resolve("moving").version
    resolved = yaml.safe_load((run / "recipe.yaml").read_text())["data"]
    assert resolved["train"] == f"store:far//moving@{version}/train"
    assert resolved["eval"] == f"store:far//moving@{version}/eval"
    origins = json.loads((run / "provenance.json").read_text())["origins"]
    assert origins["data.train"] == "auto: store:far//moving when the run began"
    accuracy = run_headway("evaluate", run, "--json").json()
    names = [one.name for one in store.list_samples("moving/eval")]
    store.label("moving", dict.fromkeys(names, "0"))
    # Not even the garbage collection takes it away while the run is there.
    kept = store.collect_garbage(keep=1, grace_s=0)
    assert (kept.pinned, version in kept.versions) == (1, False)
    assert run_headway("evaluate", run, "--json").json() == accuracy
    now = run_headway("evaluate", run, "--data", f"store:{folder / 'far'}//moving/eval", "--json").json()
    assert now != accuracy
    shutil.rmtree(run)
    assert store.collect_garbage(keep=1, grace_s=0).versions == (version,)
    # The environment names the store where the address does not.
    monkeypatch.setenv("HEADWAY_STORE", str(folder / "store"))
    run_headway("schedule", recipe, "data.train=store:digits@v1", "data.eval=store:digits")
    message = refused("train", recipe, "data.train=store:digit", status=2)
    assert "data.train: store:digit" in message
    assert "Did you mean 'digits'?" in message


def test_a_split_without_labels_cannot_be_trained_on(folder: Path) -> None:
    store = Store(folder / "store")
    store.create("pool", start="digits@v1")
    store.label("pool", {one.name: None for one in list(store.list_samples("pool"))[:60]})
    recipe = write_recipe(folder / "pool.yaml", data={"train": "store:store//pool/unlabelled", "eval": None})
    assert "have no labels" in refused("train", recipe, "--run", folder / "pool-run", status=2)
