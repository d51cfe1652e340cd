"""pipeline.json: what is written is read again, and nothing that was changed or refused is opened."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import DataError, HeadwayError, UsageError
from headway.core.untrusted_json import JsonError
from headway.export.manifest import (
    MANIFEST,
    Manifest,
    TargetEntry,
    compute_digest,
    hash_file,
    is_export,
    open_manifest,
    parse_manifest,
    write_manifest,
)

MODEL = b"a graph"


def make(folder: Path, **changes: Any) -> Manifest:
    """Writes a small export; returns its manifest."""
    folder.mkdir()
    (folder / "model.onnx").write_bytes(MODEL)
    (folder / "REJECTED-int8.onnx").write_bytes(b"another")
    entries = {
        "onnx": TargetEntry(file="model.onnx", precision="fp32", gate={"passed": True}, about={"opset": 20}),
        "int8": TargetEntry(file="REJECTED-int8.onnx", precision="int8", gate={"passed": False}, rejected=True),
    }
    fields: dict[str, Any] = {
        "task": "class",
        "activation": "softmax",
        "names": ("ö", "b"),
        "outputs": 2,
        "threshold": None,
        "size": (24, 32),
        "channels": 3,
        "crop_share": 0.875,
        "scaled": False,
        "decoder": "native",
        "files": {name: hash_file(folder / name) for name in ("model.onnx", "REJECTED-int8.onnx")},
        "targets": entries,
        "run": {"folder": "runs/a", "members": []},
        "data": {"evaluation": "f"},
        "versions": {"torch": "2"},
        "processor": {"flags": []},
    }
    manifest = Manifest(**(fields | changes))
    write_manifest(folder, manifest)
    return manifest


def rewrite(folder: Path, **changes: Any) -> None:
    """Changes entries as somebody would who knows the format, checksum included."""
    tree = json.loads((folder / MANIFEST).read_text()) | changes
    (folder / MANIFEST).write_text(json.dumps(tree | {"sha256": compute_digest(tree)}))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = make(tmp_path / "e")
    found = open_manifest(tmp_path / "e", "onnx")
    assert replace(found, sha256="") == written
    assert found.sha256 == compute_digest(json.loads((tmp_path / "e" / MANIFEST).read_text()))
    assert is_export(tmp_path / "e")
    assert not is_export(tmp_path)
    # Other blanks and another order of keys are the same manifest.
    rewrite(tmp_path / "e")
    assert open_manifest(tmp_path / "e") == found


def test_a_refused_target_is_not_opened(tmp_path: Path) -> None:
    make(tmp_path / "e")
    manifest = open_manifest(tmp_path / "e")
    assert manifest.usable == ("onnx",)
    with pytest.raises(
        DataError, match=r"the gate has refused the target int8 of this export\. Its pipeline\.json has"
    ):
        open_manifest(tmp_path / "e", "int8")
    with pytest.raises(UsageError, match=r"this export has no target 'onxx'\. Did you mean 'onnx'\?"):
        manifest.get_target("onxx")


def test_a_folder_that_is_no_export(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"this is not an export: it has no pipeline\.json\. Make one with headway export"
    ):
        open_manifest(tmp_path)
    with pytest.raises(UsageError, match="there is no such export"):
        open_manifest(tmp_path / "none")


@pytest.mark.parametrize("name", ["model.onnx", "REJECTED-int8.onnx"])
def test_a_changed_byte_is_refused(tmp_path: Path, name: str) -> None:
    """Also of a file that is not used: a folder is whole or it is not opened."""
    make(tmp_path / "e")
    path = tmp_path / "e" / name
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(DataError, match=f"{name} is damaged: its sha256 is another. Copy the folder again"):
            open_manifest(tmp_path / "e")
    path.unlink()
    with pytest.raises(DataError, match=rf"{name} cannot be read \(No such file or directory\)\. Copy"):
        open_manifest(tmp_path / "e")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """Neither a pipe, on which a read would wait for ever, nor a link out of the folder."""
    make(tmp_path / "e")
    path = tmp_path / "e/model.onnx"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="it is a named pipe"):
        open_manifest(tmp_path / "e")
    path.unlink()
    (tmp_path / "outside").write_bytes(MODEL)
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match="it is a link that leads out of its folder"):
        open_manifest(tmp_path / "e")


@given(st.data())
def test_no_changed_manifest_is_opened(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A flipped bit, or a missing end: refused in a sentence, or the same content."""
    folder = tmp_path_factory.mktemp("m") / "e"
    make(folder)
    text = (folder / MANIFEST).read_bytes()
    whole = open_manifest(folder)
    place = data.draw(st.integers(0, len(text) - 1))
    bit = data.draw(st.integers(0, 8))
    changed = text[:place] if bit == 8 else text[:place] + bytes([text[place] ^ (1 << bit)]) + text[place + 1 :]
    (folder / MANIFEST).write_bytes(changed)
    # Another content of the same file is not possible; a changed blank may leave the content as it was.
    try:
        found = open_manifest(folder)
    except HeadwayError as error:
        found, said = whole, str(error)
    else:
        said = "pipeline.json"
    assert "pipeline.json" in said
    assert found == whole
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"format": 2}, r"it has 2 as format, not a format up to 1, which is known here"),
        ({"task": "segment"}, "it has 'segment' as task, not one of class, multi, value, own"),
        ({"activation": "relu"}, "not one of softmax, sigmoid, identity"),
        ({"names": ["a"]}, "it has 1 names for 2 outputs"),
        ({"outputs": 0}, "it has 0 as outputs, not a whole number from 1"),
        ({"size": [24]}, "it has a list as size, not two whole numbers"),
        ({"size": [24, 1 << 40]}, "it has a list as size, not two whole numbers"),
        ({"channels": True}, "it has a truth value as channels, not 1 or 3"),
        ({"channels": 4}, "not 1 or 3"),
        ({"crop_share": 0}, "not a number above 0, at most 1"),
        ({"orientation": "exif"}, "not 'ignored', the only rule known here"),
        ({"targets": {}}, "not an object with a target"),
        ({"targets": {"onnx": {"file": "model.onnx"}}}, r"it lacks targets\.onnx\.precision"),
        ({"files": {"../model.onnx": "0" * 64}}, "not a plain name with a sha256"),
        ({"files": {"model.onnx": "0"}}, "not a plain name with a sha256"),
        ({"files": {f"{n}": "0" * 64 for n in range(65)}}, "it names 65 files, more than 64"),
        ({"files": {"other": "0" * 64}}, r"its target onnx has the file 'model\.onnx', which is not listed in files"),
    ],
)
def test_every_entry_is_checked(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    """Also where the checksum fits: the folder may come from elsewhere."""
    make(tmp_path / "e")
    rewrite(tmp_path / "e", **changes)
    with pytest.raises(DataError, match=f"pipeline.json is damaged: .*{what}"):
        open_manifest(tmp_path / "e")


def test_every_entry_is_needed(tmp_path: Path) -> None:
    make(tmp_path / "e")
    tree = json.loads((tmp_path / "e" / MANIFEST).read_text())
    for name in tree:
        with pytest.raises(JsonError, match=f"it lacks {name}"):
            parse_manifest(json.dumps({key: value for key, value in tree.items() if key != name}))
