"""The scripts of the labs: on small data of a user's, by one process and by two; data that they refuse; their pages."""

from __future__ import annotations

import difflib
import gzip
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray
from tests._support import free_port

ROOT = Path(__file__).resolve().parents[1]
LABS = ROOT / "examples/labs"
# Runs a script, and then writes the sum of its network's weights.
RUN = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
weights = runpy.run_path(sys.argv[0], run_name="__main__")["model"].parameters()
print("weights", sum(one.double().abs().sum().item() for one in weights), file=sys.stderr)
"""
SHOWN = re.compile(r"(?:epoch|round) (\d) train_acc ([01]\.\d{4}) val_acc ([01]\.\d{4})")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unpacked goes there."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


def idx(values: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def shades(count: int, classes: int, *shape: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Noise whose brightness is the class."""
    rng, labels = np.random.default_rng(count), np.arange(count, dtype=np.uint8) % classes
    noise = rng.integers(0, 20, (count, *shape), np.uint8)
    return noise + (labels * (220 // classes)).reshape(-1, *[1] * len(shape)).astype(np.uint8), labels


def idx_folder(folder: Path, *, names: tuple[str, str] = ("train-", "t10k-")) -> Path:
    """A user's folder in the form of MNIST: 12 x 10 pixels, 3 classes; the labels compressed."""
    folder.mkdir()
    for name, count in zip(names, (90, 30), strict=True):
        images, labels = shades(count, 3, 12, 10)
        (folder / f"{name}images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{name}labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return folder


def cifar_folder(folder: Path) -> Path:
    """CIFAR-10's binary files: a label and 3 planes of 32 x 32 bytes for each image."""
    folder.mkdir()
    for name, count in (("data_batch_1.bin", 100), ("test_batch.bin", 50)):
        images, labels = shades(count, 10, 3072)
        (folder / name).write_bytes(np.concatenate([labels[:, None], images], axis=1).tobytes())
    return folder


SCRIPTS = {
    "fashion_serial": (idx_folder, (), 1, 8),
    "fashion_parallel": (idx_folder, (), 2, 8),
    "cifar_serial": (cifar_folder, ("800",), 1, 4),
    "cifar_parallel": (cifar_folder, ("800",), 2, 4),
}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(name, marks=[pytest.mark.check] * (name in ("cifar_serial", "fashion_parallel")))
        for name in SCRIPTS
    ],
)
def test_a_script_of_a_lab_trains_on_data_of_the_user(script: str, tmp_path: Path) -> None:
    """It tells brightness apart, and as often as its page says; of several ranks one prints, and all end alike."""
    make, arguments, world, rounds = SCRIPTS[script]
    folder, port = make(tmp_path / "data"), str(free_port())
    ranks = []
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", RUN, str(LABS / f"{script}.py"), str(folder), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if world > 1 else {}),
            )
        )
    said = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, said
    assert [out for out, _ in said[1:]] == [""] * (world - 1)
    (weights,) = {re.findall(r"^weights (.*)$", err, re.MULTILINE)[0] for _, err in said}
    assert float(weights) > 0
    shown = [SHOWN.fullmatch(line) for line in said[0][0].splitlines()]
    assert [int(one[1]) for one in shown if one] == [*range(1, rounds + 1)], said
    last = shown[-1]
    assert last is not None
    # A guess is right in a third or a tenth.
    assert float(last[2]) > 0.4
    assert 0 <= float(last[3]) <= 1


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that the scripts share."""
    monkeypatch.syspath_prepend(str(LABS))
    monkeypatch.delitem(sys.modules, "lab", raising=False)
    import lab

    return lab


def test_data_that_a_lab_cannot_read_are_named_in_a_sentence(lab: ModuleType, tmp_path: Path) -> None:
    folder = idx_folder(tmp_path / "data")
    images, labels = folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte.gz"
    whole = images.read_bytes()

    def refuse(where: Path = folder) -> str:
        with pytest.raises(SystemExit) as end:
            lab.open_sets(where)
        return str(end.value)

    images.write_bytes(whole[:-1])
    assert refuse() == f"{images}: the file has 10,815 bytes, and its header promises 10,816. Copy it again."
    images.write_bytes(b"PK\3\4" + whole[4:])
    assert refuse() == f"{images}: this is not an IDX file. Copy it again."
    images.write_bytes(gzip.compress(whole))
    assert refuse() == f"{images}: this is not an IDX file. It is compressed: add .gz to its name."
    images.write_bytes(whole)
    kept = labels.read_bytes()
    labels.write_bytes(gzip.compress(idx(np.zeros(89, np.uint8))))
    assert refuse().startswith(f"{images}: there are 90 images, and labels of shape [89] in {labels}. Put one label")
    labels.write_bytes(gzip.compress(idx(np.arange(90, dtype=np.uint8) % 4)))
    assert refuse() == (
        f"{folder}: the training set has the classes [0, 1, 2, 3], and the held-out set [0, 1, 2]. The lab needs the "
        "same classes in both."
    )
    labels.write_bytes(kept[:-9])
    assert refuse() == f"{labels}: the compressed file is damaged or cut. Copy it again."
    labels.unlink()
    assert refuse().startswith(f"{images}: its labels are missing. Put them into ")
    # A set that its owner has not divided, and one of which only the test files are there.
    one = idx_folder(tmp_path / "one", names=("", "more-"))
    for name in ("more-images-idx3-ubyte", "more-labels-idx1-ubyte.gz"):
        (one / name).unlink()
    assert refuse(one).endswith(
        f"To split one set: headway pack {one} lab.packed --split 0.2, and then name lab.packed."
    )
    assert "there is no such" in refuse(tmp_path / "nothing")


def test_the_exercise_without_data_says_how_it_is_called() -> None:
    for script in ("serial", "parallel"):
        call = [sys.executable, str(LABS / f"cifar_{script}.py")]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"cifar_{script}.py FOLDER [SAMPLES]" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.check
def test_digits_are_written_once_as_idx_files(lab: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train, held_out = lab.open_sets(None)
    assert (len(train), len(held_out), train.description.common_size) == (1438, 359, (8, 8))
    assert train.classes == held_out.classes == tuple("0123456789")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["digits-idx"], "no temporary folder is left"
    assert lab.open_sets(None)[0].fingerprint == train.fingerprint


@pytest.mark.parametrize(("page", "scripts"), [("fashion-mnist", "fashion"), ("cifar10", "cifar")])
def test_the_page_shows_what_the_solution_changes(page: str, scripts: str) -> None:
    """Every line that differs, docstrings excepted."""
    texts = [
        (LABS / f"{scripts}_{kind}.py").read_text().split('"""', 2)[2].splitlines() for kind in ("serial", "parallel")
    ]
    changes = [
        line for line in difflib.unified_diff(*texts, n=0, lineterm="") if not line.startswith(("@@", "---", "+++"))
    ]
    (shown,) = re.findall(
        r"^```diff\n(.*?)^```$", (ROOT / f"docs/labs/{page}.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert shown.splitlines() == [line for line in changes if line not in ("+", "-")]
