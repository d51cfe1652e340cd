"""Traces a module into a graph with variable dimensions, which the targets then build from."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch

from headway.core.errors import HeadwayError
from headway.export.pipeline import Pipeline
from headway.export.targets.target import take_first_line

EXAMPLE_BATCH = 3
"""Images in the example: the exporter takes a dimension of 1 for a constant."""
EXPORTER_LOGS = ("torch.onnx", "torch.export", "torch.fx", "torch._dynamo", "torch._export", "onnxscript", "onnx_ir")
_USER_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def trace_pipeline(pipeline: Pipeline) -> torch.export.ExportedProgram:
    """Traces a pipeline for any number of images; see `trace_module`."""
    example = torch.zeros((EXAMPLE_BATCH, *pipeline.size, pipeline.channels), dtype=torch.uint8)
    return trace_module(pipeline, example, {0: torch.export.Dim("batch", min=1)})


def trace_module(
    module: torch.nn.Module, example: torch.Tensor, dynamic: Mapping[int, Any]
) -> torch.export.ExportedProgram:
    """Traces a module.

    Args:
        example: an input; no dynamic dimension may be 1.
        dynamic: the dimensions that vary, each as `torch.export.Dim`.

    Raises:
        HeadwayError: the module cannot be traced; the message names the operation, and the line if it is known.
    """
    shapes = ({**dynamic},)
    with silence_exporter(), torch.no_grad():
        try:
            return torch.export.export(module, (example,), dynamic_shapes=shapes, strict=False)
        # A network of Headway that refuses the images says why.
        except HeadwayError:
            raise
        except Exception:
            # The first way runs the module, so that `len(images)` fixes the batch. The second reads its source, which
            # takes longer and knows less of Python.
            pass
        try:
            return torch.export.export(module, (example,), dynamic_shapes=shapes, strict=True)
        except Exception as error:
            what = f"the network cannot be exported: {describe_export_error(error)}"
            fix = "Sizes and branches must not depend on values. Write that part of the network with other operations."
            raise HeadwayError(what, fix=fix) from error


def describe_export_error(error: BaseException) -> str:
    """Returns an error of an exporter in one line: its own text, and the line of the network that caused it."""
    text, _, trace = str(error).partition("from user code")
    described = f"{type(error).__name__}: {take_first_line(text)}"
    # The innermost frame comes last.
    if places := _USER_LINE.findall(trace):
        described += f" ({Path(places[-1][0]).name}, line {places[-1][1]})"
    return described


@contextmanager
def silence_exporter() -> Iterator[None]:
    """Silences the exporters' own warnings and log lines within the block; errors are still raised."""
    loggers = [logging.getLogger(name) for name in EXPORTER_LOGS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        # torch prints the graph of a failed trace to standard error.
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            # They tell of deprecations inside torch and onnxscript, and of nothing that a user could change.
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
