"""Ten faults that are planted into exports, which the gate must refuse, and ten sound exports, which it must accept.

A fault is planted while `headway export` runs: its pipeline, resize or graph, or the order of its classes, is changed
between the build and the gate. The command must leave with status 1 and keep the file as REJECTED. The sound exports
differ in network, task, views, averaging of weights and seed. The pictures are shrunk by the resize, and the evaluation
set has 539 of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, final
from unittest.mock import patch

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from bench._common import Claim, table
from bench._export.pictures import Labels, pack_pictures, train_network
from headway.cli import main
from headway.export import export_run, pipeline
from headway.export.targets import onnx_graph
from headway.export.trace import EXAMPLE_BATCH, trace_module

IMAGENET_MEAN, IMAGENET_STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)


@final
class Changed(nn.Module):
    """A pipeline whose pixels or answers are changed on their way."""

    def __init__(
        self,
        inner: pipeline.Pipeline,
        before: Callable[[Tensor], Tensor] = lambda pixels: pixels,
        after: Callable[[Tensor], Tensor] = lambda outputs: outputs,
    ) -> None:
        super().__init__()
        self.inner, self._before, self._after = inner, before, after
        self.size, self.channels = inner.size, inner.channels
        self.outputs, self.activation = inner.outputs, inner.activation

    def forward(self, pixels: Tensor) -> Tensor:
        return self._after(self.inner(self._before(pixels)))


def change_pipeline(change: Callable[[pipeline.Pipeline], nn.Module]) -> AbstractContextManager[Any]:
    """Changes the pipeline after it was built of the run."""
    return patch.object(export_run, "build_pipeline", lambda setup: change(pipeline.build_pipeline(setup)))


def set_constants(mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> AbstractContextManager[Any]:
    """Changes the constants of the normalisation; None: they stay."""

    def change(built: pipeline.Pipeline) -> nn.Module:
        for member in built.members:
            assert isinstance(member, pipeline.Member)
            if mean is not None:
                member.mean = torch.tensor(mean)
            if std is not None:
                member.inv_std = 1 / torch.tensor(std)
        return built

    return change_pipeline(change)


def forget_antialias() -> AbstractContextManager[Any]:
    """Leaves the triangle of the resize as narrow as for an image that is enlarged."""

    def resize(rows: Tensor, start: Tensor, end: Tensor, count: int) -> Tensor:
        number = torch.arange(count, dtype=torch.float64)[:, None]
        centers = start.double() + (number + 0.5) * (end - start).double() / count
        index = torch.arange(rows.shape[0], dtype=torch.float64)
        weights = (1 - (index - centers + 0.5).abs()).clamp(min=0.0)
        return (weights / weights.sum(dim=1, keepdim=True)).float() @ rows.float()

    return patch.object(pipeline, "_resize_rows", resize)


def move_by_a_pixel() -> AbstractContextManager[Any]:
    """Moves every resized image by one pixel to the right."""
    real = pipeline.Resize.forward
    return patch.object(pipeline.Resize, "forward", lambda self, pixels: real(self, pixels).roll(1, dims=2))


def swap_two_classes() -> AbstractContextManager[Any]:
    """Sorts the outputs by other names than those of the classes."""
    return change_pipeline(
        lambda built: Changed(built, after=lambda outputs: outputs[:, [0, 1, 2, 3, 4, 5, 6, 7, 9, 8]])
    )


def stay_in_training() -> AbstractContextManager[Any]:
    """Normalises by the statistics of the batch, as batch norm does while it trains."""

    def change(built: pipeline.Pipeline) -> nn.Module:
        for module in built.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean = module.running_var = None
        return built

    return change_pipeline(change)


def freeze_the_batch() -> AbstractContextManager[Any]:
    """Traces the graph for the batch of its example only."""

    def trace(built: pipeline.Pipeline) -> torch.export.ExportedProgram:
        example = torch.zeros((EXAMPLE_BATCH, *built.size, built.channels), dtype=torch.uint8)
        return trace_module(built, example, {})

    return patch.object(onnx_graph, "trace_pipeline", trace)


def cut_the_weights() -> AbstractContextManager[Any]:
    """Ends the largest tensor of the file early: its last tenth is zeros."""
    real = onnx_graph.write_model

    def write(built: pipeline.Pipeline, path: Path) -> None:
        real(built, path)
        proto = onnx.load(str(path))
        largest = max(proto.graph.initializer, key=lambda tensor: int(np.prod(tensor.dims)))
        values = numpy_helper.to_array(largest).copy()
        values.reshape(-1)[-(values.size // 10) :] = 0
        largest.CopyFrom(numpy_helper.from_array(values, largest.name))
        onnx.save(proto, str(path))

    return patch.object(onnx_graph, "write_model", write)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "BGR": lambda: change_pipeline(lambda built: Changed(built, before=lambda pixels: pixels.flip(3))),
    "scale 0 to 255": lambda: set_constants((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "mean of another data set": lambda: set_constants(IMAGENET_MEAN, None),
    "std of another data set": lambda: set_constants(None, IMAGENET_STD),
    "no antialias": forget_antialias,
    "one pixel to the side": move_by_a_pixel,
    "classes in another order": swap_two_classes,
    "training mode": stay_in_training,
    "frozen batch": freeze_the_batch,
    "truncated weights": cut_the_weights,
}

SOUND: dict[str, tuple[Labels, dict[str, Any]]] = {
    "small_net": ("class", {}),
    "another seed": ("class", {"seed": 5}),
    "cifar_resnet": ("class", {"model": {"factory": "headway.model:cifar_resnet", "args": {"depth": 8}}, "epochs": 1}),
    "cifar_net": (
        "class",
        {"model": {"factory": "headway.model:cifar_net", "args": {}}, "epochs": 1, "data": {"size": 24}},
    ),
    "two convolutions, gray": (
        "class",
        {
            "model": {"factory": "bench._sweep.networks:two_convolutions", "args": {}},
            "data": {"channels": 1, "size": 8},
        },
    ),
    "six views at test time": ("class", {"evaluate": {"flip": True, "shift": 1}}),
    "averaged weights": ("class", {"model": {"ema": {"half_life_steps": 8}}}),
    "centre crop of 0.8": ("class", {"data": {"crop": {"share": 0.8}}}),
    "several labels": ("multi", {}),
    "numbers": ("value", {"optimizer": {"lr": 0.005}}),
}


def export(run: Path, out: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Runs `headway export` in this process. Returns its exit status, its verdicts by target, and what it said."""
    said, status = io.StringIO(), 0
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", ["headway", "export", str(run), "--out", str(out), *options]))
        for stream in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(stream(said))
        try:
            main.main()
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 1
    manifest = out / "pipeline.json"
    targets = json.loads(manifest.read_text())["targets"] if manifest.exists() else {}
    return status, targets, said.getvalue()


def is_refused(status: int, out: Path, targets: Mapping[str, Any]) -> bool:
    """Returns True if an export left with status 1, and the gate has judged and marked each target of it."""
    marked = all(entry["rejected"] and (out / entry["file"]).name.startswith("REJECTED-") for entry in targets.values())
    # A crash leaves with 1 too, and writes nothing.
    return status == 1 and bool(targets) and marked


def compare_faults(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Counts the faults that are refused, and the sound exports that are accepted."""
    rows, packed = [("export", "status", "what the gate says")], {}
    kinds = list(SOUND.items())[: 2 if options.quick else None]
    for labels in {labels for _, (labels, _) in kinds}:
        packed[labels] = pack_pictures(folder, labels)
    accepted = refused = 0
    runs = folder / "runs"
    for number, (name, (labels, changes)) in enumerate(kinds):
        run = train_network(packed[labels], runs / str(number), **changes)
        status, targets, said = export(run, folder / f"sound-{number}")
        accepted += status == 0 and bool(targets)
        rows.append((name, str(status), summarise(targets, said)))
    faults = list(FAULTS.items())[: 2 if options.quick else None]
    for name, plant in faults:
        out = folder / f"fault-{name.replace(' ', '-')}"
        with plant():
            status, targets, said = export(runs / "0", out)
        refused += is_refused(status, out, targets)
        rows.append((f"fault: {name}", str(status), summarise(targets, said)))
    table(rows)
    how = "headway export to ONNX Runtime, 539 pictures that the resize shrinks"
    return [
        Claim("faults_refused", refused, "exports", f"of {len(faults)} planted faults, exit status 1; {how}"),
        Claim("sound_accepted", accepted, "exports", f"of {len(kinds)} sound exports of different networks; {how}"),
    ]


def summarise(targets: Mapping[str, Any], said: str) -> str:
    """Returns the first reason of a refusal, or the numbers of an export that passed."""
    for entry in targets.values():
        checks = entry["gate"]["checks"]
        for check in checks:
            if check["faults"]:
                return f"{check['source']}: {check['faults'][0]}"[:150]
        first = checks[0]
        return f"{first['metric']} {first['value']:.4f}, {first['flips']} flips of {first['samples']}"
    return said.strip().splitlines()[-1][:150] if said.strip() else ""
