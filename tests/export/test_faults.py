"""Ten faults, each planted into `headway export`, are refused with status 1; sound exports are accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from bench._export.faults import FAULTS, SOUND, export, is_refused
from bench._export.pictures import pack_pictures, train_network
from tests._support import refused

from headway.export.manifest import open_manifest

pytest.importorskip("onnxscript")
pytestmark = pytest.mark.check


# One answer of 150 is two thirds of a point.
OPTIONS = ("--to", "onnx,int8", "--gate", "1")
IN_THE_RESIZE = ("no antialias", "one pixel to the side")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 500 pictures, 350 to train on and 150 that the gate sees, and a sound export of it."""
    folder = tmp_path_factory.mktemp("faults")
    pack_pictures(folder, "class", 500)
    train_network(folder / "class.packed", folder / "runs/small_net", epochs=6, optimizer={"lr": 0.1})
    status, _, said = export(folder / "runs/small_net", folder / "sound", *OPTIONS)
    assert status == 0, said
    return folder


@pytest.fixture
def same_resize(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies the resize of the sound export: two seconds less for each export."""
    from headway.export.targets import onnx_graph

    monkeypatch.setattr(
        onnx_graph, "write_resize", lambda pipeline, share, path: shutil.copyfile(folder / "sound/resize.onnx", path)
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused(folder: Path, fault: str, request: pytest.FixtureRequest) -> None:
    if fault not in IN_THE_RESIZE:
        request.getfixturevalue("same_resize")
    out = folder / fault.replace(" ", "-")
    with FAULTS[fault]():
        status, targets, said = export(folder / "runs/small_net", out)
    assert is_refused(status, out, targets), said
    assert list(targets) == ["onnx"]
    entry = targets["onnx"]
    failed = [check for check in entry["gate"]["checks"] if not check["passed"]]
    assert [check["source"] for check in failed] == ["files" if fault in IN_THE_RESIZE else "pixels"]
    assert "REJECTED" in said
    assert failed[0]["faults"][0] in said
    assert (out / "REJECTED-model.onnx").exists()
    assert not (out / "model.onnx").exists()
    # The folder itself is whole; it is the target that nobody can use.
    assert open_manifest(out).usable == ()
    assert "the gate has refused" in refused("evaluate", out, status=1)


def test_a_crash_is_no_refusal(tmp_path: Path) -> None:
    entry = {"rejected": True, "file": "REJECTED-model.onnx"}
    assert is_refused(1, tmp_path, {"onnx": entry})
    assert not is_refused(1, tmp_path, {})
    assert not is_refused(0, tmp_path, {"onnx": entry})
    assert not is_refused(1, tmp_path, {"onnx": entry, "int8": {"rejected": False, "file": "int8.onnx"}})


@pytest.mark.parametrize("name", ["small_net", "several labels", "numbers"])
@pytest.mark.usefixtures("same_resize")
def test_a_sound_export_is_accepted(folder: Path, name: str) -> None:
    labels, changes = SOUND[name]
    run, out = folder / "runs" / name.replace(" ", "-"), folder / f"sound-{name.replace(' ', '-')}"
    if not run.exists():
        train_network(pack_pictures(folder, labels, 300), run, **changes)
        status, _, said = export(run, out, *OPTIONS)
        assert status == 0, said
    else:
        out = folder / "sound"
    targets = json.loads((out / "pipeline.json").read_text())["targets"]
    assert not any(entry["rejected"] for entry in targets.values())
    checks = targets["onnx"]["gate"]["checks"]
    assert [check["source"] for check in checks] == ["pixels", "files"]
    assert all(check["faults"] == [] for check in checks)
    assert checks[0]["flips"] == 0
    assert [check["source"] for check in targets["int8"]["gate"]["checks"]] == ["pixels", "files"]
    about = targets["int8"]["about"]
    train = json.loads((run / "provenance.json").read_text())["fingerprint"]
    assert about["calibration"]["fingerprint"] == train
    assert 0 < len(about["calibration"]["samples"]) <= 256
    assert (out / "int8.onnx").stat().st_size < (out / "model.onnx").stat().st_size


@pytest.mark.usefixtures("same_resize")
def test_int8_needs_training_images_that_the_gate_does_not_see(folder: Path) -> None:
    run = folder / "runs/small_net"
    train = str(folder / "class.packed/train")
    said = refused("export", run, "--to", "int8", "--data", train, "--out", folder / "same", status=2)
    assert "the training set is the evaluation set" in said
    assert not (folder / "same").exists()
