"""OpenVINO computes what the pipeline computes, in float32 unless bf16 is asked for by name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.export.test_onnx_target import build

from headway.core.errors import HeadwayError, UsageError
from headway.core.run_folder import RunFolder
from headway.export.pipeline import build_pipeline
from headway.export.targets import get_target, openvino
from headway.export.targets import target as target_module
from headway.export.targets.onnx import MODEL
from headway.export.targets.onnx_graph import write_model
from headway.export.targets.openvino import (
    OpenVinoBf16Target,
    OpenVinoSession,
    OpenVinoTarget,
    expect_bf16,
    import_openvino,
)
from headway.export.targets.target import BuildContext
from headway.training.runs import load_trained

BATCHES = (1, 2, 3, 7, 64)


def draw(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, 8, 8, 1), np.uint8)


def has_bf16() -> bool:
    try:
        expect_bf16()
    except UsageError:
        return False
    return True


def test_it_computes_what_the_pipeline_computes(exported: Path) -> None:
    pipeline = build_pipeline(load_trained(RunFolder.open_trained(exported / "run"), wide=True))
    with get_target("openvino").load(exported / "export", 1) as session:
        kept = list[tuple[np.ndarray, np.ndarray]]()
        for count in BATCHES:
            found = session.run(draw(count))
            with torch.no_grad():
                kept.append((found, pipeline(torch.from_numpy(draw(count))).numpy()))
        # Afterwards: an answer is not overwritten by the next one.
        for found, wanted in kept:
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
            assert np.array_equal(found.argmax(1), wanted.argmax(1))
        strided = np.ascontiguousarray(draw(6).transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        np.testing.assert_array_equal(session.run(strided), session.run(draw(6)))


def test_bf16_is_used_only_by_name(exported: Path) -> None:
    target = get_target("openvino-bf16")
    assert isinstance(target, OpenVinoBf16Target)
    assert (target.precision, OpenVinoTarget.precision) == ("bf16", "fp32")
    if not has_bf16():
        with pytest.raises(UsageError, match="no bf16 units"):
            target.load(exported / "export")
        return
    with target.load(exported / "export", 1) as half, get_target("openvino").load(exported / "export", 1) as whole:
        difference = np.abs(half.run(draw(64)) - whole.run(draw(64))).max()
    assert 1e-5 < difference < 0.1


def test_a_processor_without_bf16_is_told(exported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runtime = import_openvino()
    monkeypatch.setattr(runtime.Core, "get_property", lambda core, device, name: ["FP32", "INT8"])
    target = OpenVinoBf16Target()
    pipeline = build("small_net")
    for call in (
        lambda: target.load(exported / "export"),
        lambda: target.build(pipeline, tmp_path, BuildContext(setup=None)),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=r"openvino-bf16: this processor .* openvino, which computes in float32\."):
            call()


@pytest.mark.fresh
def test_it_is_imported_without_its_telemetry() -> None:
    """By itself, `import openvino` starts a thread that sends an event to a server."""
    program = """
import sys, threading
from headway.export.targets.openvino import import_openvino
openvino = import_openvino()
assert not [name for name in sys.modules if name.startswith("openvino_telemetry")], "telemetry"
assert threading.active_count() == 1, threading.enumerate()
assert import_openvino() is openvino is sys.modules["openvino"]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["openvino", "openvino-bf16"])
def test_without_the_package_it_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(target_module, "find_spec", lambda package: None)
    with pytest.raises(UsageError, match=r"pip install 'headway\[openvino\]'"):
        get_target(name).load(tmp_path)


def test_it_writes_no_file_and_states_its_precision(tmp_path: Path) -> None:
    facts = OpenVinoTarget().build(build("small_net"), tmp_path, BuildContext(setup=None))  # type: ignore[arg-type]
    assert facts["inference_precision"] == "f32"
    assert not list(tmp_path.iterdir())
    assert (OpenVinoTarget.after, OpenVinoTarget.files, OpenVinoTarget.file) == ("onnx", (), MODEL)


@pytest.mark.parametrize("content", [b"", b"no graph", None])
def test_a_file_that_is_no_graph_is_told(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / MODEL).write_bytes(content)
    with pytest.raises(
        HeadwayError, match=r"model\.onnx: OpenVINO cannot load this graph \(.+\)\. Export the run again"
    ):
        OpenVinoSession(tmp_path / MODEL)


def test_float32_is_set_and_not_left_to_openvino(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = import_openvino()
    seen = list[dict[str, object]]()
    compile_model = runtime.Core.compile_model

    def note(core: Any, model: str, device: str, options: dict[str, object]) -> object:
        seen.append(options)
        return compile_model(core, model, device, options)

    monkeypatch.setattr(runtime.Core, "compile_model", note)
    openvino.OpenVinoSession(exported / "export" / MODEL, 3).close()
    assert seen[0]["INFERENCE_PRECISION_HINT"] == "f32"
    assert seen[0]["INFERENCE_NUM_THREADS"] == 3


@pytest.mark.check
@pytest.mark.parametrize("name", ["small_net", "cifar_resnet", "gru", "cifar_moe, noisy", "blur pool"])
def test_other_networks_run_too(name: str, tmp_path: Path) -> None:
    pipeline = build(name)
    for parameter_name, parameter in pipeline.named_parameters():
        # A gate begins with zeros, so that all experts tie, and OpenVINO breaks ties in another way than PyTorch.
        if parameter_name.endswith("gate.weight"):
            torch.nn.init.normal_(parameter)
    write_model(pipeline, tmp_path / MODEL)
    height, width = pipeline.size
    with OpenVinoTarget().load(tmp_path, 1) as session:
        for count in BATCHES:
            pixels = np.random.default_rng(count).integers(0, 256, (count, height, width, 3), np.uint8)
            with torch.no_grad():
                wanted = pipeline(torch.from_numpy(pixels)).numpy()
            np.testing.assert_allclose(session.run(pixels), wanted, rtol=0, atol=1e-5)


def test_a_copy_of_the_folder_runs(exported: Path, tmp_path: Path) -> None:
    shutil.copyfile(exported / "export" / MODEL, tmp_path / MODEL)
    with OpenVinoTarget().load(tmp_path, 1) as session:
        assert session.run(draw(2)).shape == (2, 10)
