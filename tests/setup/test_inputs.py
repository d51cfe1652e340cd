"""Where a run's data lie: said once, chosen anew on another machine, filled within sight, closed whatever happens."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tests._support import digits, finished, headway, packed_digits, refused, write_recipe
from tests.data.tiers._server import Server, make_pack, serving

from headway.core import sample_progress
from headway.core.cpu_count import count_usable_cores
from headway.core.recipe import read_recipe
from headway.data.order import Order
from headway.data.tiers.device import DeviceTier
from headway.data.tiers.memory import MemoryTier
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe

LITTLE = "headway.data.tiers.choice.read_free_memory_bytes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    packed_digits(folder, mode="seekable")
    write_recipe(folder / "recipe.yaml", checkpoint={"every_steps": 4, "keep": 9})
    return folder


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A pack of 60 colour images of 40 x 30 behind a web server, and a recipe on this machine."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    with serving(make_pack(tmp_path)) as server:
        data = {"train": server.uri, "eval": server.uri, "cache_folder": str(tmp_path / "kept"), "cache": "disk"}
        write_recipe(tmp_path / "recipe.yaml", data=data, model={"factory": "headway.model:small_net"})
        yield server


def test_a_run_says_where_its_data_are_and_what_decodes(folder: Path, tmp_path: Path) -> None:
    cores = count_usable_cores()
    for cache, place in (("auto", "is kept in memory: the decoded set of "), ("none", "is read in place: local files")):
        said = headway("train", folder / "recipe.yaml", "--run", tmp_path / cache, f"data.cache={cache}").err
        assert f"Training data {place}" in said
        assert re.search(rf"^Decoding by (the native core|Pillow), 1 thread of {cores} cores? ?\(?", said, re.MULTILINE)
    found = json.loads((tmp_path / "none/summary.json").read_text())["input"]
    assert (found["threads"], found["cores"]) == (1, cores)
    headway("report", tmp_path / "none")
    assert f"1 thread of {cores} core" in (tmp_path / "none/report.html").read_text()
    assert "Training data is read in place: local files are mapped" in (tmp_path / "none/report.html").read_text()


def test_workers_may_read_independently_from_the_whole_set(folder: Path, tmp_path: Path) -> None:
    recipe = read_recipe(folder / "recipe.yaml", ("data.partition=independent",), TrainRecipe)
    setup = build_setup(recipe)
    order = Order(180, recipe.recipe.seed)
    with closing(setup.inputs):
        for rank in range(2):
            stream = iter(setup.batches(0, rank, 2))
            batches = [next(stream) for _ in range(3)]
            positions = np.arange(15 * rank, 15 * rank + 15)
            assert batches[0].samples.tolist() == order.for_worker(rank)(positions)[1].tolist()
            # A run that goes on at a later position reads the same samples, augmented alike.
            (again,) = islice(setup.batches(60, rank, 2), 1)
            assert (again.samples.tolist(), again.seed) == (batches[2].samples.tolist(), order.for_worker(rank).seed)
        assert setup.inputs.build_state(recipe.recipe)["partition"] == "independent"
    path = folder / "recipe.yaml"
    headway("train", path, "--run", tmp_path / "run", "epochs=1")
    said = refused("train", "--resume", tmp_path / "run", "data.partition=independent", status=2)
    assert "data.partition" in said
    more = ("data.partition=independent", "parallel=async")
    said = refused("train", path, "--run", tmp_path / "other", *more, status=2)
    assert "parallel.strategy async does not work with data.partition: independent" in said


def test_a_resume_with_less_memory_keeps_the_data_elsewhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` is chosen anew; what was asked for is not."""
    for cache in ("auto", "memory"):
        run = tmp_path / cache
        headway("train", folder / "recipe.yaml", "--run", run, f"data.cache={cache}")
        assert yaml.safe_load((run / "recipe.yaml").read_text())["data"]["cache"] == "memory"
        shutil.copytree(run, tmp_path / f"{cache}-again")
        shutil.rmtree(tmp_path / f"{cache}-again/checkpoints/step-00000012")
    monkeypatch.setattr(LITTLE, lambda: 100)
    said = headway("train", "--resume", tmp_path / "auto-again")
    assert "Training data is read in place" in said.err
    whole, again = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("auto", "auto-again"))
    assert whole == again
    assert "data.cache: the set needs " in refused("train", "--resume", tmp_path / "memory-again", status=2)


def test_trained_weights_need_no_native_core(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    headway("train", folder / "recipe.yaml", "--run", run, "data.pin=true", "epochs=1")
    assert yaml.safe_load((run / "recipe.yaml").read_text())["data"]["decoder"] == "native"
    without = {**os.environ, "HEADWAY_NATIVE": "0"}
    image = next((folder / "digits").rglob("*.png"))
    for arguments in (("evaluate", run), ("predict", run, image)):
        said = finished(*arguments, env=without)
        assert said.status == 0, said.err
        assert "The native core is not here: Pillow decodes." in said.err
        assert said.out == headway(*arguments).out  # digits are PNG, which Pillow decodes anyway
    shutil.rmtree(run / "checkpoints/step-00000006")
    said = finished("train", "--resume", run, env=without)
    assert said.status == 2
    assert "the native core is not available. Leave HEADWAY_NATIVE unset" in said.err


WRONG = {
    "a network of other outputs": ("model.args={num_classes: 7}", 2),
    "a network that fails": ("model={factory: headway.model:small_net, args: {width: 4}, init: fails.py:init}", 1),
    "no such task": ("task.factory=headway.setup.task:Clasification", 2),
    "three means": ("augment.mean=[1, 2]", 2),
    "a translate": ("augment.translate=30", 2),
    "no evaluation set": ("data.eval=none", 2),
    "a run folder that cannot be": ("epochs=1", 2),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused_leaves_no_thread_behind(remote: Server, tmp_path: Path, case: str) -> None:
    """The police of conftest.py looks."""
    override, status = WRONG[case]
    (tmp_path / "fails.py").write_text("def init(model, images):\n    raise ValueError('no')\n")
    taken = case == "a run folder that cannot be"
    if taken:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/thesis.txt").write_text("years of work")
    said = headway("train", tmp_path / "recipe.yaml", "--run", tmp_path / "run", override, status=status)
    assert ("this folder is not empty" in said.err) == taken
    assert [path.name for path in tmp_path.glob("run/*")] == ["thesis.txt"] * taken


@pytest.mark.check
def test_remote_data_train_and_evaluate(remote: Server, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = headway("train", tmp_path / "recipe.yaml", "--run", run, "data.size=24", "data.scaled=true", "epochs=1")
    assert f"Training data is fetched into the local cache: the set is remote: at most 50 GB of it in {tmp_path}" in (
        said.err
    )
    best = json.loads((run / "summary.json").read_text())["best"]
    found = headway("evaluate", run, "--json").json()
    assert found["accuracy"] == best["accuracy"]
    assert (
        "Training data is fetched"
        in headway(
            "train", tmp_path / "recipe.yaml", "--run", tmp_path / "auto", "data.cache=auto", "data.scaled=true"
        ).err
    )  # decoded, the set would fit into memory


def test_evaluation_is_refused_without_a_thread_left(remote: Server, folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "epochs=0.2")
    assert "its classes are unlike" in refused("evaluate", tmp_path / "run", "--data", remote.uri, status=1)


@pytest.mark.parametrize(
    ("kind", "expected"), [("cpu", MemoryTier), pytest.param("cuda", DeviceTier, marks=pytest.mark.gpu)]
)
def test_random_crops_leave_the_evaluation_set_to_the_device(folder: Path, kind: str, expected: type) -> None:
    """Training crops are made on the host, of pixels in memory; evaluation takes whole images, which are gathered."""
    overrides = ("data.crop=random", "data.cache=device", f"device={kind}")
    setup = build_setup(read_recipe(folder / "recipe.yaml", overrides, TrainRecipe))
    with closing(setup.inputs):
        assert setup.train is not None
        assert setup.eval is not None
        assert type(setup.inputs.open_tier(setup.recipe, setup.train)) is MemoryTier
        assert type(setup.inputs.open_tier(setup.recipe, setup.eval)) is expected
        batch = next(iter(setup.inputs.build_evaluation_loader(setup.recipe, setup.eval)))
        assert batch.images.shape == (30, 8, 8, 1)
        assert batch.images.device.type == torch.device(kind).type


def test_filling_and_scanning_are_shown(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits(tmp_path / "loose", per_class=12)
    arguments = ("train", folder / "recipe.yaml", f"data.train={tmp_path / 'loose'}", "epochs=0.2", "--run")
    said = headway(*arguments, tmp_path / "quick").err
    assert "Filling" not in said
    assert "Scanning" not in said
    shutil.rmtree(tmp_path / "loose")
    digits(tmp_path / "loose", per_class=12)
    for name in ("FIRST_UPDATE_S", "LOG_INTERVAL_S"):
        monkeypatch.setattr(sample_progress, name, 0.0)
    said = headway(*arguments, tmp_path / "slow").err
    assert "Filling the cache of the training data: 120 of 120 images.\n" in said
    assert "Filling the cache of the evaluation data: 60 of 60 images.\n" in said


def test_a_counter_is_a_bar_on_a_terminal() -> None:
    main, side = pty.openpty()
    script = (
        "import sys\nfrom headway.core import sample_progress\n"
        "sample_progress.FIRST_UPDATE_S = sample_progress.BAR_INTERVAL_S = 0.0\n"
        "with sample_progress.SampleProgress('Packing', 'images') as count:\n"
        "    for done in range(0, 1001, 10):\n        count(done, 1000)\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=side, env=environment)
    os.close(side)
    screen = b""
    try:
        while part := os.read(main, 65536):
            screen += part
    except OSError:  # the other side was closed
        pass
    os.close(main)
    out, _ = process.communicate()
    assert (process.returncode, out) == (0, b""), screen.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode())
    assert re.search(r"Packing .* 1000/1000 images", text), text
    assert "\x1b[?25h" in screen.decode(), "the cursor is not shown again"
