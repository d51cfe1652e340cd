"""A shard or a columns file that is cut while it is mapped ends in a sentence, and other faults end as they would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests import _support as support
from tests.data import _packs as packs

from headway.data import mapping, native, opening
from headway.data.pack import pack

SHARED = """
import faulthandler, os, signal, sys
from pathlib import Path
import numpy as np
from headway.core.errors import DataError
from headway.data import opening
from headway.data.columns import COLUMNS_FILE
from headway.data.decode import build_decoder
from headway.data.decode_request import DecodeRequest, GatherRequest
from headway.data.mapping import map_file

folder, case = Path(sys.argv[1]), sys.argv[2]
faulthandler.enable()
"""

CUT = (
    SHARED
    + """
data = opening.open(folder)
ids, boxes = np.arange(len(data)), np.zeros((len(data), 4), np.float32)
boxes[:, 2:] = 8
out = np.zeros((len(data), 8, 8, 3), np.uint8)
decoder = build_decoder(2, case if case in ("native", "pillow") else "native")
records = data.read(ids)
if case.endswith("later"):
    faulthandler.disable()
    faulthandler.enable()  # its handler is before ours until a decoder is made
    decoder.close()
    decoder = build_decoder(2)
elif case == "enabled":
    faulthandler.disable()
    faulthandler.enable()  # its handler is before ours until a batch is read
    records = data.read(ids)
else:
    assert not decoder.decode(DecodeRequest(records, boxes, out)).any()
shard = folder / data.description.shards[0].name
os.truncate(folder / COLUMNS_FILE if case == "columns" else shard, data.offset.max() if case == "last" else 100)
try:
    if case == "columns":
        data.label.sum()
        data.check_columns()
    elif case == "python":
        assert not any(bytes(records[int(np.argmax(data.offset))]))  # the process lives, and reads zeros
        data.read(ids)
    elif case == "gather":
        decoder.gather(GatherRequest(records, out))
    else:
        decoder.decode(DecodeRequest(records, boxes, out))
    print("nothing was said")
except DataError as error:
    print(error)
decoder.close()
data.close()
del data, records, decoder
from headway.data import native
print(native.count_lost_files())
"""
)

FOREIGN = (
    SHARED
    + """
def nothing(number, frame):
    print("the user's handler", flush=True)

data = opening.open(folder)
if case == "after":
    faulthandler.disable()
    data.read([0])
    faulthandler.enable()
elif case == "between":
    faulthandler.disable()
    data.read([0])
    faulthandler.enable()
    build_decoder(2).close()
elif case == "alone":
    faulthandler.disable()
    data.read([0])
else:
    data.read([0])
if case == "sent":
    signal.signal(signal.SIGBUS, nothing)
    build_decoder(2).close()
    os.kill(os.getpid(), signal.SIGBUS)
    sys.exit(0)
import mmap
path = folder / "foreign"
path.write_bytes(bytes(1 << 16))
with open(path, "rb") as file:
    other = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(path, 0)
print(other[5000])
"""
)

needs_core = pytest.mark.skipif(not native.is_available(), reason="the native core is not built")


def some(*cases: str) -> list[Any]:
    """The first case in the plain suite, all others in the long one."""
    return [cases[0], *(pytest.param(case, marks=pytest.mark.check) for case in cases[1:])]


def ran(script: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.fixture
def packed(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """300 images in one shard of several pages."""
    pack(packs.folder(tmp_path / "images", {"a": 150, "b": 150}), tmp_path / "packed", threads=1)
    return tmp_path / "packed"


@needs_core
@pytest.mark.parametrize(
    "case", some("enabled", "native", "pillow", "gather", "python", "columns", "last", "native-later")
)
def test_a_file_that_is_cut_while_it_is_in_use_is_named(case: str, packed: Path) -> None:
    data = opening.open(packed)
    name = "columns.safetensors" if case == "columns" else data.description.shards[0].name
    size = (packed / name).stat().st_size
    done = ran(CUT, packed, case)
    assert done.returncode == 0, done.stderr
    said, guards = done.stdout.splitlines()
    left = int(data.offset.max()) if case == "last" else 100
    assert said == (
        f"{packed / name}: the file was cut from {size} to {left} bytes while it was in use. Copy it again, or pack "
        "again. To replace data in use, write a new file and rename it."
    )
    assert guards == "0"  # it is forgotten with its last user
    assert not done.stderr


@needs_core
@pytest.mark.parametrize("case", some("before", "after", "between", "alone"))
def test_faults_elsewhere_end_the_process_as_they_would(case: str, packed: Path) -> None:
    done = ran(FOREIGN, packed, case)
    assert done.returncode == -signal.SIGBUS, done.stderr
    assert done.stderr.startswith("" if case == "alone" else "Fatal Python error: Bus error")
    assert ("Fatal Python error" in done.stderr) == (case != "alone")
    assert done.stderr.count("Fatal Python error") <= 1
    assert not done.stdout


@needs_core
@pytest.mark.check
def test_a_signal_that_was_sent_reaches_the_handler_of_the_user(packed: Path) -> None:
    done = ran(FOREIGN, packed, "sent")
    assert (done.returncode, done.stdout) == (0, "the user's handler\n"), done.stderr


@pytest.mark.check
def test_without_the_native_core_a_cut_shard_gives_short_records_and_cut_columns_a_sentence(packed: Path) -> None:
    (shard,) = packed.glob("*.rec")
    whole = shard.read_bytes()
    by_pillow = CUT.replace('else "native")', 'else "pillow")')
    script = by_pillow.replace("    decoder.decode(", "    records = data.read(ids)\n    decoder.decode(")
    done = ran(script, packed, "pillow", HEADWAY_NATIVE="0")
    assert (done.returncode, done.stdout) == (0, "nothing was said\n0\n"), done.stderr
    shard.write_bytes(whole)
    done = ran(by_pillow.replace("data.label.sum()", "data.read(ids)"), packed, "columns", HEADWAY_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert f"{packed / 'columns.safetensors'}: the file was cut from" in done.stdout


@needs_core
@pytest.mark.check
def test_a_run_whose_shard_is_cut_ends_by_its_name(tmp_path: Path) -> None:
    train = support.packed_digits(tmp_path, mode="seekable") / "train"
    recipe = support.write_recipe(tmp_path / "recipe.yaml", epochs=4000, data={"cache": "none"})
    shard = train / opening.open(train).description.shards[0].name
    log = tmp_path / "run/metrics.jsonl"
    with support.running("train", recipe, "--run", tmp_path / "run", support.paced(tmp_path)) as process:
        with support.slowly(tmp_path):
            while process.poll() is None and not (log.exists() and "train" in log.read_text()):
                time.sleep(0.05)
            os.truncate(shard, 100)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 1, out + err
    assert f"headway: {shard}: the file was cut from" in err
    assert "Traceback" not in err


@pytest.mark.skipif(not native.is_available(), reason="tickets are those of the native core")
def test_a_ticket_that_another_thread_gets_at_once_keeps_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment at which the native core has a ticket back and the end of the old mapping, another file is
    mapped, as another thread may do."""
    for name in ("old", "new"):
        (tmp_path / name).write_bytes(name.encode() * 5000)
    real, views = native.unguard_file, list[memoryview]()

    def unguard(ticket: int) -> None:
        real(ticket)
        monkeypatch.setattr(native, "unguard_file", real)
        with (tmp_path / "new").open("rb") as file:
            views.append(mapping.map_file(file, tmp_path / "new"))

    with (tmp_path / "old").open("rb") as file:
        old = mapping.map_file(file, tmp_path / "old")
    count = len(mapping._mapped_files)
    monkeypatch.setattr(native, "unguard_file", unguard)
    del old
    assert len(views) == 1
    # The old one is gone, and the new one is there: without it, reading would end the process.
    assert len(mapping._mapped_files) == count
    assert bytes(views[0][-3:]) == b"new"
