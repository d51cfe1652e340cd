"""AOTInductor: a compiled pipeline computes the same for any number of images, and nothing of the compiler stays."""

from __future__ import annotations

import importlib
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from headway.core.errors import HeadwayError, UsageError
from headway.doctor import environment_builds
from headway.export.pipeline import Member, Pipeline
from headway.export.targets import aoti, get_target
from headway.export.targets.aoti import MODEL, AotiSession, AotiTarget
from headway.export.targets.target import BuildContext

NOTHING = BuildContext(setup=None)  # type: ignore[arg-type]
"""AOTInductor needs nothing of the run."""


def build_tiny() -> Pipeline:
    """A convolution and a linear layer, for 6 x 6 pixels."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    return Pipeline([Member(network, (128.0,) * 3, (64.0,) * 3)], "softmax", size=(6, 6), channels=3, outputs=5)


def draw(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, 6, 6, 3), np.uint8)


@pytest.mark.check
def test_compiled_code_computes_what_the_pipeline_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, scratch = tmp_path / "export", tmp_path / "tmp"
    folder.mkdir()
    scratch.mkdir()
    # When it is first imported, torch's compiler names a folder for its cache in the environment.
    importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("TMPDIR", str(scratch))
    pipeline, environment, threads = build_tiny(), dict(os.environ), torch.get_num_threads()
    facts = AotiTarget().build(pipeline, folder, NOTHING)
    assert facts["torch"] == torch.__version__
    # Nothing of the compiler stays, neither beside the file nor in the environment.
    assert [path.name for path in folder.iterdir()] == [MODEL]
    assert dict(os.environ) == environment
    assert not [path for path in scratch.iterdir() if path.name.startswith("torchinductor")]
    session = AotiTarget().load(folder, threads + 1)
    try:
        for count in (1, 2, 3, 7, 64):
            with torch.no_grad():
                wanted = pipeline(torch.from_numpy(draw(count))).numpy()
            found = session.run(draw(count))
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
            assert found.dtype == np.float32
        # OpenMP counts for each calling thread.
        counted = list[int]()
        other = threading.Thread(target=lambda: (session.run(draw(2)), counted.append(torch.get_num_threads())))
        other.start()
        other.join()
        assert counted == [threads + 1]
    finally:
        session.close()
    assert torch.get_num_threads() == threads
    assert [path.name for path in folder.iterdir()] == [MODEL]
    assert not list(scratch.iterdir())


def test_the_number_of_threads_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: lambda pixels: pixels.float())
    threads = torch.get_num_threads()
    with AotiSession(tmp_path / MODEL, threads + 1) as session:
        session.run(draw(1))
        assert torch.get_num_threads() == threads + 1
    assert torch.get_num_threads() == threads
    # One that has computed nothing has changed nothing.
    with AotiSession(tmp_path / MODEL, threads + 1):
        torch.set_num_threads(threads + 2)
    assert torch.get_num_threads() == threads + 2
    torch.set_num_threads(threads)


def test_without_a_compiler_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment_builds.find_compiler() is None
    with pytest.raises(UsageError, match=r"needs a C\+\+ compiler, and there is none\. Install one .* leave aoti out"):
        AotiTarget().build(build_tiny(), tmp_path, NOTHING)
    assert not list(tmp_path.iterdir())


class Branching(nn.Module):
    """Its way depends on the values, which a trace cannot follow."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)[:, :5] if images.sum() > 0 else images.flatten(1)[:, 5:10]


def test_a_network_that_cannot_be_traced_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aoti, "find_compiler", lambda: "g++")
    pipeline = Pipeline([Member(Branching(), None, None)], "softmax", size=(6, 6), channels=3, outputs=5)
    with pytest.raises(HeadwayError, match=r"cannot be exported: .*branching.* must not depend on values"):
        AotiTarget().build(pipeline, tmp_path, NOTHING)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_file_that_is_no_package_is_told(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (tmp_path / MODEL).write_bytes(content)
    with pytest.raises(
        HeadwayError, match=r"model\.pt2: this compiled network cannot be loaded \(.+\)\. Export the run"
    ):
        AotiSession(tmp_path / MODEL)
    assert not caplog.records


def test_it_is_found_by_its_name() -> None:
    assert isinstance(get_target("aoti"), AotiTarget)
    assert AotiTarget.files == (MODEL,)
