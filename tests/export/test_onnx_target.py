"""model.onnx and resize.onnx compute what the modules compute, for any number of images and any size."""

from __future__ import annotations

import logging
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.export.test_pipeline import draw

from headway import model as models
from headway.core.errors import HeadwayError
from headway.core.modules import replace_modules
from headway.core.run_folder import RunFolder
from headway.export.dense_mixture import densify_mixture
from headway.export.pipeline import Member, Pipeline, Resize, build_pipeline
from headway.export.targets import TARGETS, get_target, order_targets
from headway.export.targets import target as target_module
from headway.export.targets.onnx import MODEL, RESIZE, OnnxSession, load_resize
from headway.export.targets.onnx_graph import write_model
from headway.export.targets.target import check_packages
from headway.model.gates import NoisyTopKGate
from headway.model.resnet import BasicBlock, Bottleneck, ResNet
from headway.training.runs import load_trained

BATCHES = (1, 2, 3, 7, 64)
NETWORKS: dict[str, tuple[Any, int]] = {
    "small_net": (lambda: models.small_net(10), 8),
    "cifar_net": (lambda: models.cifar_net(10), 32),
    "cifar_resnet": (lambda: models.cifar_resnet(10, depth=8), 32),
    "cifar_resnet without shortcuts": (lambda: models.cifar_resnet(10, depth=8, skip_connections=False), 32),
    "resnet18 and 34": (lambda: ResNet(BasicBlock, (1, 1, 1, 1), 10, 3), 32),
    "resnet50 and 101": (lambda: ResNet(Bottleneck, (1, 1, 1, 1), 10, 3), 32),
    "alexnet": (lambda: models.alexnet(10), 67),
    "gru": (lambda: models.gru(10, layers=2, pixels_per_step=8), 8),
    "cifar_moe, noisy": (lambda: models.cifar_moe(10, width=16, blocks=1, hidden=16), 16),
    "cifar_moe, switch": (
        lambda: models.cifar_moe(10, width=16, blocks=1, hidden=16, gate="switch", capacity_factor=1.0),
        16,
    ),
    "ghost batch norm": (lambda: models.convert_to_ghost(models.small_net(10), 2), 8),
    "blur pool": (lambda: models.add_blur_pool(ResNet(BasicBlock, (1, 1, 1, 1), 10, 3))[0], 32),
}
"""Each kind of network of `headway.model`, and the side of its images. `bench.export` has all of them whole."""


def build(name: str) -> Pipeline:
    """A pipeline around a network whose batch norms have statistics, as after a training."""
    torch.manual_seed(0)
    make, side = NETWORKS[name]
    network = make()
    for module in network.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
        if isinstance(module, NoisyTopKGate):
            # It begins at zero, where all experts are equally good.
            torch.nn.init.normal_(module.weight)
    member = Member(replace_modules(network, densify_mixture), (120.0, 115.0, 100.0), (60.0, 61.0, 62.0))
    return Pipeline([member], "softmax", size=(side, side), channels=3, outputs=10)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.check
def test_every_network_is_exported(name: str, tmp_path: Path) -> None:
    pipeline = build(name)
    write_model(pipeline, tmp_path / MODEL)
    with OnnxSession(tmp_path / MODEL, 1) as session, torch.no_grad():
        for count in BATCHES:
            pixels = draw(count, count, *pipeline.size, 3)
            found, wanted = session.run(pixels), pipeline(torch.from_numpy(pixels)).numpy()
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
            assert np.array_equal(found.argmax(1), wanted.argmax(1))


def test_the_graph_of_a_run(exported: Path) -> None:
    setup = load_trained(RunFolder.open_trained(exported / "run"), wide=True)
    with closing(setup.inputs), get_target("onnx").load(exported / "export", 1) as session, torch.no_grad():
        pipeline = build_pipeline(setup)
        for count in BATCHES:
            pixels = draw(count, count, 8, 8, 1)
            found = session.run(pixels)
            np.testing.assert_allclose(found, pipeline(torch.from_numpy(pixels)).numpy(), rtol=0, atol=1e-6)
            np.testing.assert_allclose(found.sum(1), 1, atol=1e-5)
        # Whatever the memory looks like.
        np.testing.assert_allclose(session.run(pixels[::-1][:, :, ::-1]), session.run(pixels[::-1, :, ::-1].copy()))


def test_the_graph_of_the_resize(exported: Path) -> None:
    run, module = load_resize(exported / "export", 1), Resize((8, 8))
    for h, w in ((8, 8), (1, 1), (1, 40), (33, 2), (61, 47), (200, 301), (375, 500)):
        image = draw(h, 1, h, w, 1)
        found, wanted = run(image), module(torch.from_numpy(image)).numpy()
        assert found.dtype == np.uint8
        assert found.shape == (1, 8, 8, 1)
        difference = abs(found.astype(int) - wanted)
        # Another order of summation: only sums beside a half may be rounded otherwise.
        assert difference.max() <= 1
        assert difference.sum() <= 1


def test_files_tell_nothing_of_this_machine(exported: Path) -> None:
    import onnx

    for name in (MODEL, RESIZE):
        data = (exported / "export" / name).read_bytes()
        for trace in (b"/home", str(Path(__file__).parents[2]).encode(), b"site-packages", b"stack_trace"):
            assert trace not in data
        graph = onnx.load_from_string(data)
        onnx.checker.check_model(graph, full_check=True)
        assert [one.name for one in (*graph.graph.input, *graph.graph.output)] == ["pixels", "outputs"]
        assert [one.version for one in graph.opset_import if not one.domain] == [20]


class Uneven(torch.nn.Module):
    """Its shapes depend on values, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        total = sum(float(one) for one in images.flatten(1).sum(1))
        return self.layer(images.mean((2, 3))) * (1 if total > 0 else 2)


def test_what_cannot_be_exported_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipeline = Pipeline(
        [Member(Uneven(), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))], "softmax", size=(4, 4), channels=3, outputs=10
    )
    with pytest.raises(HeadwayError, match=r"the network cannot be exported: \w+: .+\. Sizes and branches") as caught:
        write_model(pipeline, tmp_path / MODEL)
    assert "(test_onnx_target.py, line " in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    # The exporter's own 80 lines are not shown.
    assert capfd.readouterr() == ("", "")


@pytest.mark.check
def test_the_exporter_is_silent(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    levels = {name: logging.getLogger(name).level for name in ("torch.onnx", "onnxscript")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        write_model(build("ghost batch norm"), tmp_path / MODEL)
    assert caught == []
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    assert levels == {name: logging.getLogger(name).level for name in levels}


def test_a_graph_that_is_none(tmp_path: Path) -> None:
    (tmp_path / MODEL).write_bytes(b"no graph")
    with pytest.raises(
        HeadwayError, match=r"model\.onnx: ONNX Runtime cannot load this graph \(.+\)\. Export the run again"
    ):
        get_target("onnx").load(tmp_path)


def test_targets_come_in_order() -> None:
    assert [one.name for one in order_targets(["int8"])] == ["onnx", "int8"]
    assert [one.name for one in order_targets(["int8", "onnx", "int8"])] == ["onnx", "int8"]
    assert [one.name for one in order_targets(TARGETS)] == list(TARGETS)
    for name in TARGETS:
        assert get_target(name).name == name
    with pytest.raises(HeadwayError, match=r"--to: there is no target 'onx'\. Did you mean 'onnx'\?"):
        order_targets(["onx"])
    with pytest.raises(HeadwayError, match=r"--to: there is no target\. Name one or more of onnx, "):
        order_targets([])


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    target = get_target("onnx")
    monkeypatch.setattr(target_module, "find_spec", lambda name: None if name == "onnxscript" else object())
    # Not needed to run.
    check_packages(target)
    wanted = r"the target onnx needs onnxscript, not installed here\. Install it: pip install 'headway\[export\]'\."
    with pytest.raises(HeadwayError, match=wanted):
        check_packages(target, builds=True)


@pytest.mark.gpu
def test_tensorrt(exported: Path) -> None:
    with (
        get_target("tensorrt").load(exported / "export") as session,
        get_target("onnx").load(exported / "export") as cpu,
    ):
        for count in BATCHES:
            pixels = draw(count, count, 8, 8, 1)
            np.testing.assert_allclose(session.run(pixels), cpu.run(pixels), rtol=0, atol=5e-3)


def test_tensorrt_says_what_it_needs() -> None:
    import onnxruntime

    if "TensorrtExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("TensorRT is here")
    with pytest.raises(HeadwayError, match=r"needs an NVIDIA GPU and an ONNX Runtime with TensorRT\. Install"):
        get_target("tensorrt").load(Path())
