"""What the tests of runs and of the command line share: the command itself, small real images, quick recipes."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import yaml
from numpy.typing import NDArray
from PIL import Image

from headway.cli import main
from headway.data import opening
from headway.data.pack import pack

if TYPE_CHECKING:
    from headway.checkpoint.checkpoints import Checkpoint, Checkpoints

NET = """
from torch import nn

def linear(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

def dropout(num_classes):
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(6 * 64, num_classes),
    )

def wide(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, num_classes))
"""
"""A user's file with networks for gray images of 8 x 8. `wide` has 45,010 parameters for ten classes: 180 kB of
weights, 360 kB of a checkpoint with momentum."""

PACE = """
import time
from pathlib import Path

def pace(images, labels, keys):
    if Path(__file__).with_name("slowly").exists():
        time.sleep(0.1)
    return images, labels
"""


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def headway(*arguments: str | Path, status: int | None = 0) -> Said:
    """The command line in this process, which has torch already; checks the exit status unless it is None."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, ["headway", *map(str, arguments)]
    log = logging.getLogger("headway")
    handlers, level = log.handlers, log.level
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main.main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    finally:
        sys.argv = before
        log.handlers, log.propagate = handlers, True
        log.setLevel(level)
    said = Said(code, out.getvalue(), err.getvalue())
    if status is not None:
        assert code == status, f"{' '.join(map(str, arguments))} left with {code}:\n{said.out}\n{said.err}"
    return said


def read_newest(checkpoints: Checkpoints) -> Checkpoint | None:
    """The newest checkpoint; fails if a damaged one is skipped."""
    warnings: list[str] = []
    found = checkpoints.newest(warnings)
    assert warnings == []
    return found


@contextlib.contextmanager
def collect_messages() -> Iterator[list[str]]:
    """The messages of the library within the block. Unlike caplog, it also works in a process without pytest."""
    said, log, handler = list[str](), logging.getLogger("headway"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def refused(*arguments: str | Path, status: int) -> str:
    """The sentence with which a command was refused: on stderr, one paragraph, no traceback."""
    said = headway(*arguments, status=status)
    assert "Traceback" not in said.err
    assert "headway: " in said.err, said.err
    sentence = said.err.partition("headway: ")[2].strip()
    assert sentence.endswith((".", "!", "?")) or "\n" in sentence, sentence
    return sentence


def free_port() -> int:
    """A port below those that the kernel hands out by itself: neither a connection of a test that runs beside this one
    nor a server of its that asked for any port gets it before it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "headway", *map(str, arguments)]


def paced(folder: Path) -> str:
    """What a command is to be told so that a run of a recipe in this folder obeys `slowly`."""
    (folder / "pace.py").write_text(PACE)
    return "transform=pace.py:pace"


@contextlib.contextmanager
def slowly(folder: Path) -> Iterator[None]:
    """For the time of the block, runs that are `paced` in this folder make ten steps a second at most. What the block
    waits for, such as a process that starts anew, then comes before the run's end, however fast its steps are."""
    (folder / "slowly").touch()
    try:
        yield
    finally:
        (folder / "slowly").unlink()


@contextlib.contextmanager
def running(*arguments: str | Path, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, its output piped; killed at the end of the block if it still runs."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def workers_of(launcher: int) -> list[psutil.Process]:
    """The ranks that a launcher has started; its other children, such as the tests' fork server, are none."""
    found = []
    for child in psutil.Process(launcher).children():
        # One that is just ending has no environment any more.
        with contextlib.suppress(psutil.Error, OSError):
            if "RANK" in child.environ():
                found.append(child)
    return found


def finished(*arguments: str | Path, **more: Any) -> Said:
    """The command in a process of its own, waited for."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, **more)
    return Said(done.returncode, done.stdout, done.stderr)


@cache
def digits_arrays() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """scikit-learn's handwritten digits: 1,797 images of 8 x 8 with values from 0 to 16, and their labels.

    As `load_digits` of scikit-learn gives them, whose import takes two seconds of every process.
    """
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    rows = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", np.uint8, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


def digits(folder: Path, per_class: int = 24) -> Path:
    """The digits as folder/CLASS/NN.png: gray, 8 x 8."""
    images, labels = digits_arrays()
    images = np.rint(images * (255 / 16)).astype(np.uint8)
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
        for number, image in enumerate(images[labels == label][:per_class]):
            Image.fromarray(image).save(folder / str(label) / f"{number:03d}.png")
    return folder


def packed_digits(folder: Path, per_class: int = 24, split: float = 0.25, mode: str = "raw") -> Path:
    """The digits in folder/digits, and packed into folder/digits.packed/train and /eval: 180 and 60 images.

    Raw pixels are those of the files, and a training on them takes a quarter less: it is Pillow that decodes PNG files.
    """
    made, source = _packed_digits(per_class, split, mode), folder / "digits"
    for place in {Path(name).parent for name in made}:
        (folder / place).mkdir(parents=True, exist_ok=True)
    for name, content in made.items():
        is_columns = name.endswith("columns.safetensors")
        (folder / name).write_bytes(_with_source(content, source) if is_columns else content)
    return folder / "digits.packed"


@cache
def _packed_digits(per_class: int, split: float, mode: str) -> dict[str, bytes]:
    """Every file of `packed_digits`: to make them takes ten times as long as to write them."""
    with tempfile.TemporaryDirectory() as place:
        source = digits(Path(place) / "digits", per_class)
        pack(source, Path(place) / "digits.packed", split=split, threads=1, mode=mode)
        return files(Path(place))


def _with_source(columns: bytes, source: Path) -> bytes:
    """A columns file that names another folder as the source of its images."""
    size = 8 + int.from_bytes(columns[:8], "little")
    header = json.loads(columns[8:size])
    description = json.loads(header["__metadata__"]["headway"])
    header["__metadata__"]["headway"] = json.dumps(description | {"source": str(source)})
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + columns[size:]


def write_recipe(path: Path, **changes: Any) -> Path:
    """A recipe on `digits.packed` beside it that trains in a fraction of a second. A change of None takes a key out;
    mappings are merged."""
    tree: dict[str, Any] = {
        "data": {"train": "digits.packed/train", "eval": "digits.packed/eval", "threads": 1},
        "model": {"factory": "net.py:linear"},
        "optimizer": {"name": "sgd", "lr": 0.02},
        "batch": 30,
        "epochs": 2,
        "precision": "fp32",
        "log_every_steps": 1,
    }
    tree = _merged(tree, changes)
    if not (path.parent / "net.py").exists():
        (path.parent / "net.py").write_text(NET)
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def _merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(tree)
    for key, value in changes.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = _merged(out[key], value)
        else:
            out[key] = value
    return out


def records(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Records of metrics.jsonl; every line has to be whole."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if kind is None or record["kind"] == kind]


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative name."""
    return {
        os.fsdecode(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def damage(packed: Path, *samples: int) -> None:
    """Flips a byte in the middle of some images of a packed data set."""
    data = opening.open(packed)
    for sample in samples:
        with (packed / data.description.shards[int(data.shard[sample])].name).open("r+b") as file:
            file.seek(int(data.offset[sample]) + int(data.length[sample]) // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0xFF]))
