"""How the network of a run is called: compiled, with Winograd's filtering, or with activations computed again."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests._support import finished, headway, packed_digits, records, refused, write_recipe

from headway.checkpoint.checkpoints import Checkpoints
from headway.setup.compilation import report_graph_breaks
from headway.setup.precision import explain_unused_winograd
from headway.training.runs import load_recipe

DROPOUT = "model.factory=net.py:dropout"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("called")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml")
    return folder


MODELS = {
    "dropout": (DROPOUT, "activation_checkpointing=['^[1-4]$']"),
    "our blocks, ghost batches": (
        "model={factory: headway.model:small_net, args: {width: 4}, batch_norm: {ghost: 7}}",
        "activation_checkpointing=true",
    ),
    "micro-batches, bf16": (DROPOUT, "activation_checkpointing=['1', '3', '4']", "micro_batch=8", "precision=bf16"),
    "16-bit weights": (DROPOUT, "activation_checkpointing=['^[1-4]$']", "precision=bf16", "half_weights=true"),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("case", MODELS)
def test_a_run_that_computes_again_ends_as_one_that_keeps(folder: Path, tmp_path: Path, case: str) -> None:
    """Weights, statistics, the optimizer's state and random generators of the last checkpoint, bit for bit."""
    overrides = MODELS[case]
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "again", *overrides)
    kept = [override for override in overrides if not override.startswith("activation_checkpointing")]
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "kept", *kept)
    again, plain = (Checkpoints(tmp_path / name / "checkpoints").newest() for name in ("again", "kept"))
    assert again is not None
    assert plain is not None
    assert again.tensors.keys() == plain.tensors.keys()
    for name, value in plain.tensors.items():
        assert torch.equal(again.tensors[name], value), name
    assert records(tmp_path / "again", "evaluate")[-1]["loss"] == records(tmp_path / "kept", "evaluate")[-1]["loss"]


@NO_GPU
def test_an_automatic_micro_batch_counts_what_is_kept(folder: Path, tmp_path: Path) -> None:
    found = []
    for number, more in enumerate(((), ("activation_checkpointing=true",))):
        run = tmp_path / str(number)
        headway(
            "train",
            folder / "recipe.yaml",
            "--run",
            run,
            "micro_batch=auto",
            "model.factory=headway.model:small_net",
            *more,
        )
        text = (run / "provenance.json").read_text()
        match = re.search(r"auto: ([\d.]+) kB a sample kept for backward", text)
        assert match is not None
        found.append(float(match[1]))
    assert found[1] < 0.6 * found[0]


def test_what_is_computed_again_is_said(folder: Path, tmp_path: Path) -> None:
    more = ("model.factory=headway.model:small_net", "activation_checkpointing=true", "epochs=1")
    said = headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", *more)
    assert "Computed again in the backward pass: layer1, layer2, layer3 and 1 more." in said.err


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no such module": (
        (DROPOUT, "activation_checkpointing=['^block1']"),
        "activation_checkpointing: '^block1' matches no module. Modules of this network are for example: 0, 1, 2.",
    ),
    "no blocks": (
        (DROPOUT, "activation_checkpointing=true"),
        "activation_checkpointing: the network has none of Headway's own blocks. Name modules of yours",
    ),
    "no expression": (("activation_checkpointing=['(']",), "'(' is not a regular expression"),
    "none named": (("activation_checkpointing=[]",), "activation_checkpointing names no module"),
    "compiled, too": (
        ("activation_checkpointing=true", "compile=true"),
        "torch.compile decides itself which activations are kept for backward: remove activation_checkpointing, or",
    ),
    "graphs on a CPU": (
        ("compile=graphs", "device=cpu"),
        "compile: graphs are CUDA graphs, which need a GPU: set it to true or false",
    ),
    "graphs of parts": (("compile=graphs", "micro_batch=auto"), "remove micro_batch, or set compile to true"),
    "another word": (("compile=fast",), "compile must be"),
    "Winograd's filtering, channels first": (("winograd=true", "channels_last=false"), "set channels_last: true"),
    "no convolution for it": (
        (DROPOUT, "winograd=true"),
        "winograd: the network has no 3x3 convolution with stride 1 and 16 channels or more. Remove it.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path, case: str) -> None:
    overrides, sentence = BAD[case]
    assert sentence in refused("train", folder / "recipe.yaml", "--run", tmp_path / "never", *overrides, status=2)
    assert not (tmp_path / "never").exists()


@NO_GPU
def test_graphs_are_refused_where_auto_finds_no_gpu(folder: Path, tmp_path: Path) -> None:
    sentence = refused("train", folder / "recipe.yaml", "--run", tmp_path / "never", "compile=graphs", status=2)
    assert sentence == "compile: graphs are CUDA graphs, which need a GPU. Set it to true or false."


@pytest.mark.check
@pytest.mark.parametrize("how", ["true", "max-autotune"])
def test_a_compiled_run_ends_nearly_as_one_that_is_not(folder: Path, tmp_path: Path, how: str) -> None:
    more = ("epochs=1", "model.factory=net.py:wide")
    for name, compiled in (("plain", "false"), ("compiled", how)):
        headway("train", folder / "recipe.yaml", "--run", tmp_path / name, f"compile={compiled}", *more)
    plain, compiled = (load_file(tmp_path / name / "weights.safetensors") for name in ("plain", "compiled"))
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_run_with_winograds_filtering_ends_nearly_as_one_without(folder: Path, tmp_path: Path) -> None:
    more = ("epochs=1", "model.factory=headway.model:small_net", "precision=fp32", "device=cpu")
    for name in ("true", "false"):
        headway("train", folder / "recipe.yaml", "--run", tmp_path / name, f"winograd={name}", *more)
    ours, plain = (load_file(tmp_path / name / "weights.safetensors") for name in ("true", "false"))
    assert any(not torch.equal(ours[name], value) for name, value in plain.items()), "it was used"
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_run_says_where_winograds_filtering_changes_nothing(folder: Path, tmp_path: Path) -> None:
    more = ("epochs=1", "model.factory=headway.model:small_net", "device=cpu", "winograd=true")
    done = headway("train", folder / "recipe.yaml", "--run", tmp_path / "bf16", "precision=bf16", *more)
    assert "winograd: true changes nothing in bf16." in done.out + done.err


@pytest.mark.parametrize(
    ("device", "override", "said"),
    [
        ("cpu", "precision=fp32", ""),
        ("cuda", "precision=fp32", "winograd: true changes nothing on a GPU."),
        ("cpu", "precision=fp16", "winograd: true changes nothing in fp16."),
        ("cpu", "compile=true", "winograd: true changes nothing in a compiled network."),
        ("cuda", "winograd=false", ""),
    ],
)
def test_where_winograds_filtering_changes_nothing(folder: Path, device: str, override: str, said: str) -> None:
    recipe = load_recipe(folder / "recipe.yaml", ["winograd=true", "precision=fp32", override]).recipe
    assert explain_unused_winograd(recipe, torch.device(device)) == said


def test_without_the_core_a_run_says_that_winograds_filtering_changes_nothing(folder: Path) -> None:
    program = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from headway.training.runs import load_recipe\n"
        "from headway.setup.precision import explain_unused_winograd\n"
        "recipe = load_recipe(Path(sys.argv[1]), ['winograd=true', 'precision=fp32']).recipe\n"
        "print(explain_unused_winograd(recipe, torch.device('cpu')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, folder / "recipe.yaml"],
        env=os.environ | {"HEADWAY_NATIVE": "0"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "winograd: true changes nothing without the native core" in done.stdout


TALKS = """
from torch import nn

class Talks(nn.Module):
    def forward(self, x):
        print("training" if self.training else "evaluating", "on", len(x))
        return x

def talks(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Talks(), nn.Linear(8, num_classes))
"""


def test_lines_at_which_the_graph_breaks_are_said_at_the_first_call(caplog: pytest.LogCaptureFixture) -> None:
    space: dict[str, Any] = {"__name__": "talks"}
    exec(compile(TALKS, "talks.py", "exec"), space)
    model = space["talks"](10)
    forward = report_graph_breaks(torch.compile(model, backend="eager"), model)
    caplog.set_level(logging.INFO, "headway")
    images = torch.rand(3, 1, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, where it goes on behind a break
        outputs = forward(images)
    assert torch.equal(outputs, model(images))
    (text,) = caplog.messages
    assert text.startswith(
        "torch.compile breaks the network's graph: talks.py:6 in Talks (2): Dynamo does not know how"
    )
    forward(images)
    assert len(caplog.messages) == 1


@pytest.mark.check
def test_a_compiled_run_says_where_its_graph_breaks(folder: Path, tmp_path: Path) -> None:
    (folder / "talks.py").write_text(TALKS)
    more = ("compile=true", "model.factory=talks.py:talks", "epochs=1")
    said = finished("train", folder / "recipe.yaml", "--run", tmp_path / "run", *more).err
    assert said.count("torch.compile breaks the network's graph: ") == 1
    assert "talks.py:6 'print(" in said


@pytest.mark.check
def test_a_compiled_run_with_16_bit_weights_learns(folder: Path, tmp_path: Path) -> None:
    more = ("compile=true", "precision=bf16", "half_weights=true", DROPOUT, "epochs=4")
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", *more)
    assert records(tmp_path / "run", "evaluate")[-1]["accuracy"] > 0.5


@pytest.mark.gpu
# torch 2.11 says so of graphs that it records itself, and of fp32 networks on a GPU with TF32.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty", "ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("more", [(), ("precision=bf16", "half_weights=true"), ("evaluate.flip=true",)])
def test_graphs_end_nearly_as_what_is_not_compiled(folder: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    for name, compiled in (("plain", "false"), ("graphs", "graphs")):
        overrides = ("device=cuda", "model.factory=net.py:wide", f"compile={compiled}", *more)
        headway("train", folder / "recipe.yaml", "--run", tmp_path / name, *overrides)
    plain, graphs = (load_file(tmp_path / name / "weights.safetensors") for name in ("plain", "graphs"))
    for name, value in plain.items():
        torch.testing.assert_close(graphs[name], value, rtol=1e-2, atol=1e-3, msg=name)
