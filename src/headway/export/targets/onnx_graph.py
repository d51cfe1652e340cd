"""Writes the ONNX graphs of an export by torch's exporter, and removes the exporter's notes from them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headway.core.errors import HeadwayError
from headway.core.files import write_and_sync
from headway.core.text_format import format_bytes
from headway.export.pipeline import Pipeline, Resize
from headway.export.small_maps import unfold_small_maps
from headway.export.targets.target import INPUT, OUTPUT
from headway.export.trace import describe_export_error, silence_exporter, trace_module, trace_pipeline

OPSET = 20
"""Version of ONNX's operators. ONNX Runtime 1.17 and later has all of them."""
MOST_BYTES = (1 << 31) - (1 << 20)
"""A file of ONNX is a protobuf message, which holds 2 GiB at most."""


def write_model(pipeline: Pipeline, path: Path) -> None:
    """Writes a pipeline, for any number of images; see `write_graph`. Small maps are unfolded: `unfold_small_maps`."""
    # A copy: the pipeline is compared with the graph, and other targets are made of it.
    write_graph(trace_pipeline(unfold_small_maps(copy.deepcopy(pipeline))), path)


def write_resize(pipeline: Pipeline, share: float, path: Path) -> None:
    """Writes the resize to a pipeline's pixels, for images of any size; see `write_graph`.

    Args:
        share: as in `Resize`.
    """
    # Two different sides, so that the exporter does not take them for one.
    example = torch.zeros((1, 37, 53, pipeline.channels), dtype=torch.uint8)
    sides = {1: torch.export.Dim("height", min=1), 2: torch.export.Dim("width", min=1)}
    write_graph(trace_module(Resize(pipeline.size, share), example, sides), path)


def write_graph(program: torch.export.ExportedProgram, path: Path) -> None:
    """Writes a traced module as an ONNX file with the input `pixels` and the output `outputs`.

    Raises:
        HeadwayError: ONNX lacks an operation, which the message names, or the graph is too large for a file.
    """
    with silence_exporter():
        try:
            written = torch.onnx.export(
                program,
                input_names=[INPUT],
                output_names=[OUTPUT],
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
                custom_translation_table=_build_translations(),
            )
            assert written is not None
            proto = written.model_proto
        # The exporter wraps any error in one of its own.
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            what = f"the network cannot be written as ONNX: {describe_export_error(cause)}"
            fix = "Write that part of the network with other operations, or leave onnx out of --to."
            raise HeadwayError(what, where=path.name, fix=fix) from error
    _strip_traces(proto)
    if (size := proto.ByteSize()) > MOST_BYTES:
        what = f"the graph has {format_bytes(size)}, and an ONNX file holds at most {format_bytes(MOST_BYTES)}"
        raise HeadwayError(what, where=path.name, fix="Leave onnx and all that is built from it out of --to.")
    write_and_sync(path, proto.SerializeToString(deterministic=True))


def _build_translations() -> dict[Any, Any]:
    """Returns translations of operations that the exporter lacks."""
    from onnxscript import opset20

    def adaptive_max_pool2d(images: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
        if list(output_size) != [1, 1]:
            raise NotImplementedError(f"adaptive_max_pool2d with the output size {list(output_size)}")
        pooled = opset20.GlobalMaxPool(images)
        # The second output, the places of the maxima, is not used.
        return pooled, pooled

    return {torch.ops.aten.adaptive_max_pool2d.default: adaptive_max_pool2d}


def _strip_traces(proto: Any) -> None:
    """Removes the exporter's notes from a graph: they hold source lines and paths of this machine."""
    graphs = [proto.graph, *proto.functions]
    while graphs:
        graph = graphs.pop()
        del graph.metadata_props[:]
        graph.doc_string = ""
        for node in graph.node:
            del node.metadata_props[:]
            node.doc_string = ""
            graphs.extend(attribute.g for attribute in node.attribute if attribute.HasField("g"))
        for value in (*getattr(graph, "input", ()), *getattr(graph, "output", ()), *graph.value_info):
            if hasattr(value, "metadata_props"):
                del value.metadata_props[:]
        for initializer in getattr(graph, "initializer", ()):
            del initializer.metadata_props[:]
            initializer.doc_string = ""
    del proto.metadata_props[:]
