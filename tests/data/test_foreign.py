"""What is the same for all foreign formats: columns that are kept, parts, patterns, and folders of images."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save
from tests.data._foreign import LABELS, PICTURES, cache, names_of, said, same
from tests.data.test_formats_recordio import written

from headway.core.errors import UsageError
from headway.data import foreign, opening
from headway.data.formats.patterns import expand_pattern, group_shards
from headway.storage.addresses import get_cache_folder

__all__ = ["cache"]

CLASSES = ("bird", "cat", "dog")


def images(root: Path, some: slice = slice(None)) -> Path:
    for number, (image, label) in list(enumerate(zip(PICTURES, LABELS, strict=True)))[some]:
        (root / CLASSES[label]).mkdir(parents=True, exist_ok=True)
        (root / CLASSES[label] / f"{number}.jpg").write_bytes(image)
    return root


def in_order() -> tuple[list[bytes], list[int]]:
    """The images of the folder, by class and name."""
    order = sorted(range(7), key=lambda number: (LABELS[number], number))
    return [PICTURES[number] for number in order], [LABELS[number] for number in order]


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was scanned, in order."""
    seen: list[str] = []

    def scan(found: Any, root: Path, source: str, progress: Any) -> Any:
        seen.append(source)
        return original(found, root, source, progress)

    original = foreign.scan_records
    monkeypatch.setattr(foreign, "scan_records", scan)
    return seen


# Folders of images


def test_a_folder_of_images(tmp_path: Path, cache: Path) -> None:
    folder = images(tmp_path / "set")
    data = same(opening.open(folder), *in_order())
    assert (data.classes, data.description.format) == (CLASSES, "folder")
    numbers = (1, 5, 6, 2, 3, 0, 4)
    assert names_of(data) == [f"{CLASSES[LABELS[number]]}/{number}.jpg" for number in numbers]


def test_an_image_that_is_gone_or_changed_shows_in_its_record(tmp_path: Path, cache: Path) -> None:
    folder = images(tmp_path / "set")
    data = opening.open(folder)
    (folder / "bird/1.jpg").unlink()
    (folder / "bird/5.jpg").write_bytes(PICTURES[5][:50])
    (folder / "bird/6.jpg").write_bytes(PICTURES[6] + b"more")
    found = [bytes(record) for record in data.read([0, 1, 2, 3])]
    assert found == [b"", PICTURES[5][:50], PICTURES[6], PICTURES[2]]


def test_a_link_that_leads_nowhere_is_a_bad_sample_or_nothing(tmp_path: Path, cache: Path) -> None:
    folder = images(tmp_path / "set")
    for name in ("gone", "bird/gone.txt", "dog/gone.jpg", "circle.bin"):
        (folder / name).symlink_to(tmp_path / "nowhere" if name != "circle.bin" else "circle.bin")
    data = opening.open(folder)
    assert [bytes(record) for record in data.read(range(8))] == [*in_order()[0], b""]
    assert data.name(7) == "dog/gone.jpg"
    arrays = tmp_path / "arrays"
    arrays.mkdir()
    np.save(arrays / "images.npy", np.zeros((2, 4, 4), np.uint8))
    np.save(arrays / "labels.npy", np.zeros(2, np.int64))
    (arrays / "gone").symlink_to(tmp_path / "nowhere")
    assert len(opening.open(arrays)) == 2


def test_names_of_any_bytes(tmp_path: Path, cache: Path) -> None:
    folder = os.fsencode(tmp_path / "set")
    os.makedirs(folder + b"/caf\xe9")
    for name in (b"\xff.jpg", "ü.jpg".encode()):
        with open(folder + b"/caf\xe9/" + name, "wb") as file:
            file.write(PICTURES[0])
    for _ in range(2):
        data = same(opening.open(tmp_path / "set"), [PICTURES[0]] * 2, [0, 0])
        assert names_of(data) == ["caf\\xe9/\\xff.jpg", "caf\\xe9/ü.jpg"]


def test_a_listing(tmp_path: Path, cache: Path) -> None:
    images(tmp_path / "set")
    rows = [f"set/{CLASSES[label]}/{number}.jpg,{label}.5" for number, label in enumerate(LABELS)]
    (tmp_path / "list.csv").write_text("\n".join(["path,value", *rows]))
    data = same(opening.open(tmp_path / "list.csv"), PICTURES, np.array(LABELS) + 0.5)
    assert data.name(0) == "set/dog/0.jpg"


def test_a_folder_with_two_halves(tmp_path: Path, cache: Path) -> None:
    images(tmp_path / "set/train", slice(0, 5))
    images(tmp_path / "set/val", slice(5, 7))
    assert said(tmp_path / "set", UsageError) == (
        f"{tmp_path}/set: this holds several data sets: train, val. Name one: {tmp_path}/set/train."
    )
    assert len(opening.open(tmp_path / "set/train")) == 5
    assert len(opening.open(tmp_path / "set/val")) == 2


# What is nothing


def test_what_is_there_and_is_no_data(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"anything")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    unknown = "its format is not known. Name a packed folder, or pack the original data."
    assert said(tmp_path / "file.bin", UsageError) == f"{tmp_path}/file.bin: {unknown}"
    assert said(tmp_path / "empty", UsageError) == f"{tmp_path}/empty: {unknown}"
    assert "the folder is empty" in said(tmp_path / "folder", UsageError)
    for name in ("none", "folder/none", "none/none", "*.none"):
        missing = "there is no such file or folder. Pack one: headway pack SRC DST."
        assert said(tmp_path / name, UsageError) == f"{tmp_path}/{name}: {missing}"
    assert said(tmp_path / "file.bin/none", UsageError) == f"{tmp_path}/file.bin: {unknown}"
    assert "x1.tar: a shard is missing (2 of 2 are)" in said(tmp_path / "x{1,2}.tar")
    os.mkfifo(tmp_path / "pipe")
    assert said(tmp_path / "pipe", UsageError) == f"{tmp_path}/pipe: {unknown}"


# Columns that are kept


def test_columns_are_kept_beside_the_data(tmp_path: Path, cache: Path, scans: list[str]) -> None:
    folder = images(tmp_path / "set")
    first = same(opening.open(folder), *in_order())
    kept = tmp_path / ".set.columns.safetensors"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [kept.name]
    assert not cache.exists()
    second = same(opening.open(folder), *in_order())
    assert scans == [str(folder)]
    assert second.description == first.description
    for data in (first, second):  # both are mapped
        assert not data.width.flags.writeable
        assert not data.width.flags.owndata


def test_columns_go_to_the_cache_where_the_place_is_read_only(
    tmp_path: Path, cache: Path, scans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.rec", PICTURES, LABELS)
    whole = foreign.write_atomically

    def refuse_beside(target: Path, data: bytes) -> None:
        if not target.is_relative_to(cache):
            raise PermissionError(30, "read-only file system")
        whole(target, data)

    monkeypatch.setattr(foreign, "write_atomically", refuse_beside)
    for _ in range(2):
        same(opening.open(path), PICTURES)
    assert len(scans) == 1
    assert len(list((cache / "columns").iterdir())) == 1
    # And where there is no place at all, they are held in memory.
    monkeypatch.setattr(foreign, "write_atomically", lambda target, data: (_ for _ in ()).throw(OSError(28, "full")))
    (path := tmp_path / "b.rec").write_bytes((tmp_path / "a.rec").read_bytes())
    for _ in range(2):
        same(opening.open(path), PICTURES)
    assert len(scans) == 3


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADWAY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert get_cache_folder() == Path("/home/someone/.cache/headway")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert get_cache_folder() == Path("/caches/headway")
    monkeypatch.setenv("HEADWAY_CACHE", "/here")
    assert get_cache_folder() == Path("/here")


def test_a_changed_source_is_scanned_again(tmp_path: Path, cache: Path, scans: list[str]) -> None:
    path = written(tmp_path / "a.rec", PICTURES, LABELS)
    same(opening.open(path), PICTURES)
    written(path, PICTURES[::-1], LABELS)  # of the same size
    later = path.stat().st_mtime_ns + 1
    os.utime(path, ns=(later, later))
    same(opening.open(path), PICTURES[::-1])
    written(path, PICTURES[:3], LABELS[:3])
    same(opening.open(path), PICTURES[:3], LABELS[:3])
    assert len(scans) == 3
    same(opening.open(path), PICTURES[:3], LABELS[:3])
    assert len(scans) == 3


def test_a_new_file_is_seen(tmp_path: Path, cache: Path, scans: list[str]) -> None:
    folder = images(tmp_path / "set", slice(0, 3))
    (folder / "cat/deep/er").mkdir(parents=True)
    (folder / "cat/deep/er/x.jpg").write_bytes(PICTURES[0])
    (folder / "dog/empty").mkdir()
    assert len(opening.open(folder)) == 4
    names = ("cat/new.jpg", "cat/deep/er/new.jpg", "cat/deep/new.jpg", "dog/empty/new.jpg", "fish/new.jpg")
    for count, name in enumerate(names, 5):
        time.sleep(0.05)  # the clock of a file system ticks every few milliseconds
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(PICTURES[0])
        assert len(opening.open(folder)) == count
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(3):
        time.sleep(0.05)
        written(shards / f"{number}.rec", PICTURES[:2], LABELS[:2])
        assert len(opening.open(shards)) == len(opening.open(shards / "*.rec")) == 2 * number + 2
    (shards / "1.rec").unlink()
    assert len(opening.open(shards)) == len(opening.open(shards / "*.rec")) == 4


def test_damaged_or_older_columns_are_made_anew(tmp_path: Path, cache: Path, scans: list[str]) -> None:
    path = written(tmp_path / "a.rec", PICTURES, LABELS)
    same(opening.open(path), PICTURES)
    kept = tmp_path / ".a.rec.columns.safetensors"
    whole = kept.read_bytes()
    with safe_open(kept, framework="numpy") as file:
        metadata = file.metadata()
    scanned = json.loads(metadata["scanned"])
    for damaged in (
        b"",
        whole[:-1],
        whole[:100],
        save(load(whole), metadata={**metadata, "scanned": "[]"}),
        save(load(whole), metadata={**metadata, "scanned": json.dumps({**scanned, "layout": 0})}),
        save(load(whole), metadata={**metadata, "scanned": json.dumps({**scanned, "files": [["a"]]})}),
        save(load(whole), metadata={**metadata, "scanned": json.dumps({**scanned, "files": []})}),
        save(load(whole), metadata={**metadata, "headway": "{}"}),
    ):
        kept.write_bytes(damaged)
        before = len(scans)
        same(opening.open(path), PICTURES)
        assert len(scans) == before + 1
        made, wanted = load(kept.read_bytes()), load(whole)
        assert all(np.array_equal(made[name], wanted[name]) for name in wanted)


def test_progress_counts_samples(tmp_path: Path, cache: Path) -> None:
    path = written(tmp_path / "a.rec", PICTURES * 20, LABELS * 20)
    seen: list[tuple[int, int]] = []
    opening.open(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(64, 140), (128, 140), (140, 140)]
    opening.open(path, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 3


def test_two_processes_that_scan_at_once_agree(tmp_path: Path, cache: Path) -> None:
    path = written(tmp_path / "a.rec", PICTURES * 50, LABELS * 50)
    code = f"from headway.data import opening; print(opening.open({str(path)!r}).fingerprint)"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    prints = {process.communicate()[0] for process in started}
    assert all(process.returncode == 0 for process in started)
    assert prints == {opening.open(path).fingerprint + "\n"}
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == [".a.rec.columns.safetensors"]


# Addresses


def test_an_address_may_be_relative_or_a_path(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images(tmp_path / "set")
    monkeypatch.chdir(tmp_path)
    for uri in ("set", "./set/", Path("set"), "../" + tmp_path.name + "/set"):
        data = same(opening.open(uri), *in_order())
    monkeypatch.chdir(tmp_path / "set")
    same(opening.open("."), *in_order())
    monkeypatch.chdir("/")
    same(data, *in_order())  # of a folder that was named relative to another


def test_names_with_signs_that_mean_something(tmp_path: Path, cache: Path) -> None:
    for name in ("a{1,2}.rec", "b[1].rec", "c*.rec", "d?labels=coarse"):
        same(opening.open(written(tmp_path / name, PICTURES, LABELS)), PICTURES)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("{00..02}", ["00", "01", "02"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{0..002}", ["000", "001", "002"]),
        ("{b,a}{1..2}", ["b1", "b2", "a1", "a2"]),
        ("x{3..3}y", ["x3y"]),
        ("{2..1}", []),
        ("plain", []),
    ],
)
def test_braces(pattern: str, names: list[str]) -> None:
    assert [path.name for path in expand_pattern(Path("/nowhere") / pattern)] == names


def test_series_of_shards() -> None:
    wanted = {
        "train": ["train-000.tar", "train-001.tar"],
        "val": ["val_0.tar"],
        "a": ["a-00000-of-00002.rec", "a-00001-of-00002.rec"],
        "shards": ["7.tar"],
        "b": ["b.tar"],
    }
    assert group_shards(name for names in wanted.values() for name in reversed(names)) == wanted


def test_kept_columns_are_readable_by_others(tmp_path: Path, cache: Path) -> None:
    """The mode of a file that others may read is what the user's umask says."""
    path = written(tmp_path / "a.rec", PICTURES, LABELS)
    opening.open(path)
    kept = tmp_path / ".a.rec.columns.safetensors"
    assert stat.S_IMODE(kept.stat().st_mode) == stat.S_IMODE(path.stat().st_mode)
