"""An export predicts and is evaluated as the run that it was made of: by the verbs, from Python, and by its predict.py
in a Python that has neither torch nor Headway."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from bench._export.bare_python import link_packages, run_bare
from tests._support import damage, headway, refused, write_recipe
from tests.export._images import draw, draw_colour, draw_digit, write_classes, write_files

import headway as library
from headway.core.errors import HeadwayError, UsageError
from headway.data.pack import pack
from headway.export.export_run import export_run
from headway.export.exported import open_export
from headway.export.manifest import hash_file, open_manifest, write_manifest
from headway.export.targets.target import OUTPUT

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def root(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its export, and image files of every kind."""
    root = tmp_path_factory.mktemp("exported")
    # An evaluation of the run writes into its folder.
    shutil.copytree(exported / "run", root / "run")
    for name in ("export", "digits.packed"):
        (root / name).symlink_to(exported / name)
    write_files(root / "images", 24, (8, 8), draw_digit)
    return root


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on images of three colours, 24 x 32 pixels."""
    root = tmp_path_factory.mktemp("colours")
    write_classes(root / "classes", 16)
    pack(root / "classes", root / "packed", split=0.25, mode="keep", threads=1)
    data = {"train": "packed/train", "eval": "packed/eval", "size": [24, 32]}
    recipe = write_recipe(root / "recipe.yaml", data=data, model={"factory": "headway.model:small_net"}, batch=12)
    headway("train", recipe, "--run", root / "run", "epochs=3")
    return root


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_packages(tmp_path_factory.mktemp("bare") / "packages")


def read_rows(text: str) -> dict[str, dict[str, Any]]:
    return {row["path"]: row for row in csv.DictReader(io.StringIO(text))}


def compare(run: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The difference of each probability. Labels are equal unless the two best classes are as good."""
    assert list(run) == list(other)
    for path, row in run.items():
        is_close = float(row["probability"]) - float(row["probability_2"]) < 0.01
        assert row["label"] == other[path]["label"] or is_close, path
    return {path: abs(float(row["probability"]) - float(other[path]["probability"])) for path, row in run.items()}


def test_predict_takes_an_export_like_a_run(root: Path) -> None:
    by_run = read_rows(headway("predict", root / "run", root / "images", "--top", "2").out)
    by_export = read_rows(headway("predict", root / "export", root / "images", "--top", "2").out)
    assert len(by_run) == 24
    assert len({row["label"] for row in by_run.values()}) > 3, by_run
    # Both decode by the same decoder.
    assert max(compare(by_run, by_export).values()) <= 1e-5
    as_json = headway("predict", root / "export", root / "images", "--json").out.splitlines()
    assert [list(json.loads(line)) for line in as_json] == [["path", "label", "probability"]] * 24
    said = refused("predict", root / "export", root / "images", "--top", "11", status=2)
    assert "there are 10 classes" in said
    bad = root / "note.png"
    bad.write_text("no image")
    assert "Leave such files out with --skip-bad." in refused("predict", root / "export", bad, status=1)
    said = headway("predict", root / "export", bad, root / "images", "--skip-bad")
    assert read_rows(said.out) == read_rows(headway("predict", root / "export", root / "images").out)
    assert f"Left out {bad}" in said.err


def test_evaluate_takes_an_export_like_a_run(root: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in (root / "export").iterdir()}
    for data in ([], ["--data", root / "digits.packed/train"]):
        by_run = headway("evaluate", root / "run", *data, "--json").json()
        by_export = headway("evaluate", root / "export", *data, "--json").json()
        assert by_export["accuracy"] <= by_export.pop("top5") <= 1
        assert by_export == pytest.approx(by_run, abs=1e-5)
    # The folder stays as it was written: each file has its sha256.
    assert {path.name: path.read_bytes() for path in (root / "export").iterdir()} == before
    (tmp_path / "other/owl").mkdir(parents=True)
    (tmp_path / "other/owl/1.png").write_bytes((root / "images").glob("*x*.png").__next__().read_bytes())
    pack(tmp_path / "other", tmp_path / "other.packed", threads=1)
    said = refused("evaluate", root / "export", "--data", tmp_path / "other.packed", status=1)
    assert "its classes are unlike those of the training data" in said


def test_damaged_samples_are_left_out_of_an_evaluation(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "digits.packed/eval", tmp_path / "packed")
    damage(tmp_path / "packed", 0)
    said = refused("evaluate", root / "export", "--data", tmp_path / "packed", status=1)
    assert "1 of 60 samples are damaged, more than data.max_bad_share 0.01" in said


def test_an_export_without_its_run_needs_data(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "export", tmp_path / "export")
    manifest = open_manifest(root / "export")
    write_manifest(tmp_path / "export", replace(manifest, run={**manifest.run, "folder": str(tmp_path / "run")}))
    said = refused("evaluate", tmp_path / "export", status=2)
    assert "there is no such run folder" in said
    assert "Name a packed folder as --data or data=." in said
    found = headway("evaluate", tmp_path / "export", "--data", root / "digits.packed/eval", "--json").json()
    assert found == headway("evaluate", root / "export", "--json").json()


def test_the_verbs_take_the_target_that_is_named(root: Path, tmp_path: Path) -> None:
    """The other target here answers with one less each probability: its best class is the run's worst."""
    import onnx
    from onnx import helper

    export = tmp_path / "export"
    shutil.copytree(root / "export", export)
    graph = onnx.load(export / "model.onnx")
    for node in graph.graph.node:
        node.output[:] = ["answers" if name == OUTPUT else name for name in node.output]
    graph.graph.initializer.append(helper.make_tensor("one", onnx.TensorProto.FLOAT, [], [1.0]))
    graph.graph.node.append(helper.make_node("Sub", ["one", "answers"], [OUTPUT]))
    onnx.save(graph, export / "int8.onnx")
    manifest = open_manifest(root / "export")
    entry = replace(manifest.targets["onnx"], file="int8.onnx", precision="int8")
    files = {**manifest.files, "int8.onnx": hash_file(export / "int8.onnx")}
    write_manifest(export, replace(manifest, files=files, targets={**manifest.targets, "int8": entry}))
    usual = headway("evaluate", export, "--json").json()["accuracy"]
    assert headway("evaluate", export, "--target", "onnx", "--json").json()["accuracy"] == usual > 0.5
    assert headway("evaluate", export, "--target", "int8", "--json").json()["accuracy"] < 0.2
    ours, others = (
        read_rows(headway("predict", export, root / "images", "--target", one).out) for one in ("onnx", "int8")
    )
    assert all(row["label"] != others[path]["label"] for path, row in ours.items())
    said = refused("predict", root / "run/export-7", root / "images", status=2)
    assert "there is no such export. Write an export of the run first: headway export" in said
    assert "a run has no target 'int8'" in refused("evaluate", root / "run", "--target", "int8", status=2)
    assert "no target 'aoti'" in refused("predict", export, root / "images", "--target", "aoti", status=2)


def test_python_takes_an_export_like_a_run(root: Path) -> None:
    run, export = library.Run(root / "run"), library.Run(root / "export")
    image = draw(7, (40, 30), (150, 90, 90))
    file = io.BytesIO()
    image.save(file, "PNG")
    pixels = np.asarray(image)
    rows = export.predict([image, pixels, file.getvalue()])
    assert [row.pop("path") for row in rows] == ["image 0", "image 1", "image 2"]
    assert rows[0] == rows[1] == rows[2]
    expected = run.predict(image)[0]
    assert rows[0]["label"] == expected["label"]
    assert rows[0]["probability"] == pytest.approx(expected["probability"], abs=1e-5)
    assert export.evaluate()["loss"] == pytest.approx(run.evaluate()["loss"], abs=1e-5)
    assert export.classes == run.classes
    assert repr(export) == f"Run({str(root / 'export')!r}: export)"
    assert export.summary == {}
    for call in (lambda: export.recipe, export.load_model, lambda: export.normalise(pixels)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="an export has no recipe and no network of PyTorch"):
            call()


def test_reading_is_that_of_a_run(root: Path) -> None:
    with open_export(root / "export", threads=1) as export:
        skipped: list[HeadwayError] = []
        places, pixels = export.read([b"no image", (root / "images").glob("*.png").__next__()], skipped.append)
        assert places == [1]
        assert pixels.shape == (1, 8, 8, 1)
        assert [error.where for error in skipped] == ["image 0"]
        outputs = export.run(np.repeat(pixels, 3, axis=0))
        assert outputs.shape == (3, 10)
        assert outputs.sum(axis=1) == pytest.approx(1)
        assert (outputs == outputs[0]).all()


def test_the_script_needs_neither_torch_nor_headway(root: Path, packages: Path) -> None:
    by_run = read_rows(headway("predict", root / "run", root / "images", "--top", "2").out)
    found = run_bare(packages, root / "export/predict.py", *by_run)
    assert (found.returncode, found.stderr) == (0, "")
    by_script = read_rows(found.stdout)
    assert found.stdout.startswith("path,label,probability\n")
    differences = compare(by_run, by_script)
    assert max(differences.values()) <= 0.02
    # Images of the network's size are not resized.
    unresized = [value for path, value in differences.items() if "-8x8." in path]
    assert len(unresized) == 4
    assert max(unresized) <= 1e-5


@pytest.mark.check
@pytest.mark.parametrize("scaled", [True, False])
def test_the_script_crops_and_scales_as_the_run(colours: Path, packages: Path, tmp_path: Path, scaled: bool) -> None:
    """Also large images, which `scaled` decodes at 1/2 to 1/8; their sides are not multiples of 8."""
    shutil.copytree(colours / "run", tmp_path / "run")
    path = tmp_path / "run/recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["data"] |= {"crop": {"share": 0.875}, "scaled": scaled, "cache": "none"}
    path.write_text(yaml.safe_dump(recipe))
    export_run(tmp_path / "run", tmp_path / "export", gate=None)
    write_files(tmp_path / "images", 54, (32, 24), draw_colour)
    for number, size in enumerate([(500, 401), (203, 251), (151, 601), (97, 73), (70, 49)]):
        # Noise, which a smaller decode and a resize smooth differently.
        draw(number, size, (90, 150, 90), noise=80).save(tmp_path / f"images/{number}.jpg")
    by_run = read_rows(headway("predict", tmp_path / "run", tmp_path / "images", "--top", "2").out)
    assert len(by_run) == 59
    found = run_bare(packages, tmp_path / "export/predict.py", *by_run)
    # 0.001 here. Pixels of another resize are 0.01 off, the low byte of 16 bits 0.05.
    assert max(compare(by_run, read_rows(found.stdout)).values()) <= 0.005


def flip_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1
    path.write_bytes(bytes(content))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda folder: (folder / "pipeline.json").unlink(), "pipeline.json"),
    "no graph": (lambda folder: (folder / "model.onnx").unlink(), "model.onnx"),
    "graph": (lambda folder: flip_byte(folder / "model.onnx", -100), "model.onnx"),
    "resize": (lambda folder: flip_byte(folder / "resize.onnx", 50), "resize.onnx"),
    "manifest": (lambda folder: flip_byte(folder / "pipeline.json", 200), "pipeline.json"),
    "cut": (lambda folder: (folder / "pipeline.json").write_text("{"), "pipeline.json"),
    "list": (lambda folder: (folder / "pipeline.json").write_text("[]"), "pipeline.json"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_export_is_refused_by_all(root: Path, packages: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(root / "export", tmp_path / "export")
    damage_it, name = DAMAGES[what]
    damage_it(tmp_path / "export")
    image = next((root / "images").glob("*.png"))
    found = run_bare(packages, tmp_path / "export/predict.py", image)
    assert found.returncode == 1
    assert found.stdout == ""
    assert name in found.stderr
    assert "Copy the whole folder again." in found.stderr
    assert "Traceback" not in found.stderr
    for verb in (["predict", tmp_path / "export", image], ["evaluate", tmp_path / "export"]):
        said = headway(*verb, status=None)
        assert said.status in (1, 2)
        assert name in said.err
        assert "Traceback" not in said.err


def test_the_script_refuses_what_it_cannot_use(root: Path, packages: Path, tmp_path: Path) -> None:
    found = run_bare(packages, root / "export/predict.py", "--target", "int8", next((root / "images").glob("*.png")))
    assert found.returncode == 1
    assert "its target int8 does not exist, or was rejected" in found.stderr
    (tmp_path / "cut.jpg").write_bytes(next((root / "images").glob("*47.jpg")).read_bytes()[:300])
    for bad in (tmp_path / "cut.jpg", tmp_path / "missing.png"):
        found = run_bare(packages, root / "export/predict.py", bad)
        assert found.returncode == 1
        assert f"{bad}: this image cannot be read (" in found.stderr
    assert run_bare(packages, root / "export/predict.py").returncode == 2
