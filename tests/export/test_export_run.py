"""`headway export` from a run, or an ensemble, to a folder; and what it refuses."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests._support import damage, files, headway, refused, write_recipe
from tests.export.test_pipeline import draw
from tests.export.test_table import build_row, build_table

from headway.core.errors import DataError, HeadwayError
from headway.core.run_folder import RunFolder
from headway.export import export_run as module
from headway.export.export_run import export_run
from headway.export.manifest import MANIFEST, open_manifest, write_manifest
from headway.export.pipeline import Pipeline
from headway.export.table_record import TABLE_FILE, InferenceTable
from headway.export.targets import get_target
from headway.export.targets.target import BuildContext, Session, Target
from headway.training.ensemble import hash_weights
from headway.training.evaluate import predict_outputs
from headway.training.runs import load_trained


class Plain(Target):
    """The pipeline as it is: a target that is built in no time."""

    name, file, files = "onnx", "model.onnx", ("model.onnx",)

    def build(self, pipeline: Pipeline, folder: Path, context: BuildContext) -> dict[str, Any]:
        self.pipeline = pipeline
        (folder / self.file).write_bytes(b"plain")
        return {"plain": True}

    def load(self, folder: Path, threads: int | None = None) -> Session:
        return PlainSession(self.pipeline)


class PlainSession(Session):
    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def run(self, pixels: Any) -> Any:
        with torch.no_grad():
            return self.pipeline(torch.from_numpy(pixels)).numpy()


class Derived(Plain):
    """A target that is made of another one."""

    name, file, files, after = "int8", "int8.onnx", ("int8.onnx",), "onnx"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "order_targets", lambda names: [{"onnx": Plain, "int8": Derived}[name]() for name in names]
    )


def answer(folder: Path, pixels: Any, target: str = "onnx") -> Any:
    open_manifest(folder, target)
    with get_target(target).load(folder, 1) as session:
        return session.run(pixels)


@pytest.mark.check
def test_the_folder(exported: Path) -> None:
    folder = exported / "export"
    manifest = open_manifest(folder, "onnx")
    assert set(files(folder)) == {"model.onnx", "resize.onnx", "predict.py", MANIFEST}
    assert set(manifest.files) == {"model.onnx", "resize.onnx", "predict.py"}
    assert (manifest.task, manifest.activation, manifest.names) == ("class", "softmax", tuple("0123456789"))
    assert (manifest.size, manifest.channels, manifest.outputs, manifest.crop_share) == ((8, 8), 1, 10, 1.0)
    assert manifest.run["members"] == [
        {"folder": str(exported / "run"), "sha256": hash_weights(RunFolder(exported / "run"))}
    ]
    provenance = json.loads((exported / "run/provenance.json").read_text())
    assert manifest.data["training"] == [provenance["fingerprint"]]
    assert manifest.data["evaluation_samples"] == 60
    assert {"headway", "torch", "onnx", "onnxruntime", "onnxscript"} <= set(manifest.versions)
    entry = manifest.targets["onnx"]
    assert entry.gate is not None
    assert entry.gate["passed"]
    assert [one["source"] for one in entry.gate["checks"]] == ["pixels", "files"]
    assert entry.gate["checks"][0]["flips"] == 0
    # Nothing of the work is left beside it.
    assert [path.name for path in exported.iterdir() if path.name.startswith(".")] == []


def test_averaged_weights_are_exported(exported: Path) -> None:
    """The run averages its weights, and looks at mirrored and moved images: as its evaluation, so the export."""
    images = sorted((exported / "digits/7").iterdir())
    rows = [
        json.loads(line)
        for line in headway("predict", exported / "run", *images, "--top", "10", "--json").out.splitlines()
    ]
    from PIL import Image

    pixels = np.stack([np.asarray(Image.open(path)) for path in images])[..., None]
    found = answer(exported / "export", pixels)
    assert [row["label"] for row in rows] == [str(number) for number in found.argmax(1)]
    np.testing.assert_allclose([row["probability"] for row in rows], found.max(1), atol=2e-6)


@pytest.mark.check
def test_an_ensemble_is_one_graph(exported: Path, tmp_path: Path) -> None:
    headway(
        "train",
        exported / "recipe.yaml",
        "--run",
        tmp_path / "b",
        "model.factory=net.py:wide",
        "augment={mean: [40], std: [100]}",
    )
    headway("ensemble", exported / "run", tmp_path / "b", "--out", tmp_path / "all")
    said = headway("export", tmp_path / "all", "--json").json()
    assert said["folder"] == str(tmp_path / "all/export")
    assert said["passed"]
    pixels = draw(1, 12, 8, 8, 1)
    setup = load_trained(RunFolder.open_trained(tmp_path / "all"), wide=True)
    with closing(setup.inputs), torch.no_grad():
        wanted = predict_outputs(setup, torch.from_numpy(pixels)).softmax(1).numpy()
    np.testing.assert_allclose(answer(tmp_path / "all/export", pixels), wanted, atol=1e-6)
    manifest = open_manifest(tmp_path / "all/export")
    assert [Path(one["folder"]).name for one in manifest.run["members"]] == ["run", "b"]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.usefixtures("plain")
@pytest.mark.thin(1)
def test_other_labels(tmp_path: Path, several: bool) -> None:
    from tests.training.test_user_code import pack_a_list

    pack_a_list(tmp_path, several)
    headway("train", write_recipe(tmp_path / "recipe.yaml", batch=10), "--run", tmp_path / "run")
    assert export_run(tmp_path / "run", tmp_path / "export").passed
    manifest = open_manifest(tmp_path / "export")
    assert manifest.names == ("left", "right")
    assert (manifest.task, manifest.activation) == (("multi", "sigmoid") if several else ("value", "identity"))
    assert manifest.threshold == (0.5 if several else None)


def break_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The export then normalises with another mean than the run."""

    def build(setup: Any) -> Pipeline:
        pipeline = real(setup)
        pipeline.members[0].mean.add_(90)
        return pipeline

    real = module.build_pipeline
    monkeypatch.setattr(module, "build_pipeline", build)


@pytest.mark.usefixtures("plain")
def test_a_wrong_export_is_rejected(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_pipeline(monkeypatch)
    said = headway("export", exported / "run", "--out", tmp_path / "e", "--to", "onnx,int8", status=1)
    assert "REJECTED" in said.out
    assert "int8 is not built: the gate has refused onnx, of which it is made." in said.err
    assert "Next" not in said.out
    assert set(files(tmp_path / "e")) == {"REJECTED-model.onnx", "predict.py", MANIFEST}
    manifest = open_manifest(tmp_path / "e")
    assert manifest.usable == ()
    assert set(manifest.targets) == {"onnx"}
    assert manifest.targets["onnx"].gate is not None
    assert not manifest.targets["onnx"].gate["passed"]
    with pytest.raises(Exception, match="the gate has refused the target onnx"):
        open_manifest(tmp_path / "e", "onnx")


@pytest.mark.check
def test_it_says_when_files_are_not_judged_and_why(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: None
) -> None:
    def read_reason(run: Path, out: str) -> str | None:
        result = export_run(run, tmp_path / out, ("onnx", "int8"))
        entries = open_manifest(tmp_path / out).targets
        reasons = {entry.gate["not_from_files"] for entry in entries.values() if entry.gate is not None}
        (reason,) = reasons
        assert result.describe().count(f"not judged from files: {reason}") == (0 if reason is None else 2)
        return reason

    assert read_reason(exported / "run", "a") == "the target onnx, which has resize.onnx, is not part of this export"
    monkeypatch.setattr(Plain, "files", ("model.onnx", "resize.onnx"))
    # The digits have the size that the network takes.
    monkeypatch.setattr(module, "load_resize", lambda folder: lambda pixels: pixels)
    assert read_reason(exported / "run", "b") is None
    recipe = exported / "recipe.yaml"
    headway("train", recipe, "--run", tmp_path / "run", "data.scaled=true", "epochs=1", "model.factory=net.py:linear")
    reason = read_reason(tmp_path / "run", "c")
    assert reason == "data.scaled decodes large JPEGs at a smaller scale, and the gate decodes whole images"


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (tuple("0124356789"), "it calls output 3 '4', and the run '3'"),
        (tuple("012345678"), "it names 9 classes, and the run has 10"),
    ],
)
def test_other_class_names_than_those_of_the_run_are_refused(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], words: str
) -> None:
    """They are in the file that was written, which is what programs read."""
    real = module.write_manifest
    monkeypatch.setattr(
        module, "write_manifest", lambda folder, given: real(folder, replace(given, names=names, outputs=len(names)))
    )
    with pytest.raises(HeadwayError, match=words):
        export_run(exported / "run", tmp_path / "e/export")
    assert list((tmp_path / "e").iterdir()) == []


def test_a_failed_export_leaves_nothing(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_describe_export", fail)
    monkeypatch.setattr(
        module, "_build_targets", lambda targets, pipeline, folder, context: ((folder / "x").touch(), {})
    )
    with pytest.raises(KeyboardInterrupt):
        export_run(exported / "run", tmp_path / "deep/e", gate=None)
    assert list((tmp_path / "deep").iterdir()) == []


@pytest.mark.usefixtures("plain")
def test_a_table_is_added_to_the_export(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = build_table(build_row("eager"))

    def measure(run: Path, folder: Path, *args: Any, **options: Any) -> InferenceTable:
        assert not open_manifest(folder).targets["onnx"].rejected, "the export is written before"
        table.write(folder / TABLE_FILE)
        return table

    monkeypatch.setattr(module, "measure_run_table", measure)
    found = export_run(exported / "run", tmp_path / "e", table=True)
    assert found.table == table
    manifest = open_manifest(tmp_path / "e")
    assert manifest.to_json() == found.manifest.to_json()
    assert set(manifest.files) == {"model.onnx", "predict.py", TABLE_FILE}
    assert "images/s" in found.describe()
    (tmp_path / "e" / TABLE_FILE).write_text("{}")
    with pytest.raises(DataError, match=r"table\.json is damaged"):
        open_manifest(tmp_path / "e")


@pytest.mark.usefixtures("plain")
def test_an_export_outlives_the_failure_of_its_table(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*args: Any, **options: Any) -> InferenceTable:
        raise errors.pop()

    monkeypatch.setattr(module, "measure_run_table", measure)
    errors: list[BaseException] = [HeadwayError("eager PyTorch cannot run this network", where="--table")]
    said = headway("export", exported / "run", "--out", tmp_path / "a", "--table", status=1)
    assert "The export is written, but not its inference table: --table: eager PyTorch cannot run" in said.out
    assert "REJECTED" not in said.out
    errors.append(OSError(28, "No space left on device"))
    found = export_run(exported / "run", tmp_path / "b", table=True)
    assert found.passed
    assert found.to_json()["table_error"] == "[Errno 28] No space left on device"
    errors.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        export_run(exported / "run", tmp_path / "c", table=True)
    for name in "abc":
        assert open_manifest(tmp_path / name).usable == ("onnx",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_what_is_refused(exported: Path, tmp_path: Path) -> None:
    run = exported / "run"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert "this folder is not empty" in refused("export", run, "--out", tmp_path / "full", status=2)
    assert "Did you mean 'openvino'?" in refused("export", run, "--to", "openvin", status=2)
    assert "there is no target" in refused("export", run, "--to", ",", status=2)
    for gate in ("-1", "nan", "101"):
        text = refused("export", run, "--gate", gate, "--out", tmp_path / "e", status=2)
        assert f"--gate: {gate} is not from 0 to 100. Set the percentage points that the metric may drop" in text
    assert "there is no such run folder" in refused("export", tmp_path / "none", status=2)
    assert list((tmp_path).iterdir()) == [tmp_path / "full"]


@pytest.mark.usefixtures("plain")
def test_a_run_without_an_evaluation_set(exported: Path, tmp_path: Path) -> None:
    recipe = exported / "recipe.yaml"
    headway("train", recipe, "--run", tmp_path / "run", "data.eval=null", "epochs=1", "model.factory=net.py:linear")
    text = refused("export", tmp_path / "run", status=2)
    assert "this run has no evaluation set. Name one as --data" in text
    said = headway("export", tmp_path / "run", "--data", exported / "digits.packed/eval", "--json").json()
    assert said["folder"] == str(tmp_path / "run/export")
    # The next one gets another name.
    result = export_run(tmp_path / "run", gate=None)
    assert result.folder == tmp_path / "run/export-2"
    assert result.manifest.targets["onnx"].gate is None
    assert "not judged" in result.describe()


@pytest.mark.usefixtures("plain")
def test_a_folder_that_is_empty(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also through a link; but not the current one, which would be replaced."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    export_run(exported / "run", tmp_path / "link", gate=None)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / MANIFEST).is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "this is the current folder. Name one to create" in refused(
        "export", exported / "run", "--out", ".", status=2
    )


@pytest.mark.usefixtures("plain")
def test_a_task_of_your_own(exported: Path, tmp_path: Path) -> None:
    shutil.copy(exported / "net.py", tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "digits.packed").symlink_to(exported / "digits.packed")
    recipe = write_recipe(tmp_path / "recipe.yaml", task={"factory": "own.py:Own"}, epochs=1)
    headway("train", recipe, "--run", tmp_path / "run")
    result = export_run(tmp_path / "run", gate=None)
    assert (result.manifest.task, result.manifest.activation) == ("own", "softmax")
    headway("train", recipe, "--run", tmp_path / "other", "task.factory=own.py:Silent")
    assert 'Set the attribute activation = "softmax"' in refused("export", tmp_path / "other", status=2)


def test_an_evaluation_of_the_export_allows_as_many_damaged_samples_as_the_run(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported / "export", tmp_path / "export")
    shutil.copytree(exported / "digits.packed/eval", tmp_path / "packed")
    damage(tmp_path / "packed", 0)
    command = ("evaluate", tmp_path / "export", "--data", tmp_path / "packed")
    manifest = open_manifest(tmp_path / "export")
    assert manifest.data["max_bad_share"] == 0.01
    assert "1 of 60 samples are damaged, more than data.max_bad_share 0.01" in refused(*command, status=1)
    write_manifest(tmp_path / "export", replace(manifest, data={**manifest.data, "max_bad_share": 0.05}))
    assert headway(*command, "--json").json()["damaged_samples"] == 1


@pytest.mark.check
@pytest.mark.usefixtures("plain")
def test_a_module_of_a_distribution_with_another_name(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the module onnxruntime of the distribution onnxruntime-gpu."""
    about = tmp_path / "site/engine_of_ours_gpu-1.5.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-of-ours-gpu\nVersion: 1.5\n")
    (about / "top_level.txt").write_text("engine_of_ours\n")
    (tmp_path / "site/engine_of_ours.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(Plain, "packages", ("engine_of_ours",))
    versions = export_run(exported / "run", tmp_path / "export", gate=None).manifest.versions
    assert versions["engine-of-ours-gpu"] == "1.5"
    assert {"python", "torch", "numpy", "pillow"} <= set(versions)
    # A module that is built by hand belongs to no distribution.
    shutil.rmtree(about)
    assert "engine-of-ours-gpu" not in export_run(exported / "run", tmp_path / "other", gate=None).manifest.versions


OWN = """
from headway.setup.task import Classification, Task


class Own(Task):
    primary, higher_is_better = "accuracy", True
    activation = "softmax"

    def __init__(self, target):
        self.inner = Classification(target)

    outputs = property(lambda self: self.inner.outputs)

    def loss(self, outputs, labels):
        return self.inner.loss(outputs, labels)

    def metrics(self, outputs, labels):
        return self.inner.metrics(outputs, labels)

    def predict(self, outputs):
        return self.inner.predict(outputs)


class Silent(Own):
    activation = None
"""
