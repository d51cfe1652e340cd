"""A small graph with the input and output of an export, made by hand: no exporter has to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE, CLASSES = 6, 5


def write_small_model(path: Path, *, has_layers: bool = True, seed: int = 0) -> Path:
    """Writes uint8 [b, 6, 6, 1] -> two convolutions with a residual sum, a linear layer, softmax -> [b, 5]."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(seed)
    arrays: dict[str, NDArray[Any]] = {
        "scale": np.float32([1 / 255]),
        "w1": random.normal(0, 0.6, (8, 1, 3, 3)).astype(np.float32),
        "w2": random.normal(0, 0.25, (8, 8, 3, 3)).astype(np.float32),
        "w3": random.normal(0, 0.6, (CLASSES, 8)).astype(np.float32),
        "bias": random.normal(0, 0.1, CLASSES).astype(np.float32),
    }
    nodes = [
        helper.make_node("Cast", ["pixels"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "scale"], ["scaled"]),
        helper.make_node("Transpose", ["scaled"], ["images"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["images", "w1"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["c"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["b", "c"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["e"]),
        helper.make_node("Flatten", ["e"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "bias"], ["logits"], name="head", transB=1),
        helper.make_node("Softmax", ["logits"], ["outputs"]),
    ]
    if not has_layers:
        nodes = [
            *nodes[:2],
            helper.make_node("Flatten", ["scaled"], ["logits"]),
            helper.make_node("Softmax", ["logits"], ["outputs"]),
        ]
        arrays = {"scale": arrays["scale"]}
    outputs = CLASSES if has_layers else SIDE * SIDE
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("pixels", TensorProto.UINT8, ["batch", SIDE, SIDE, 1])],
        [helper.make_tensor_value_info("outputs", TensorProto.FLOAT, ["batch", outputs])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(path))
    return path


def draw_images(count: int, seed: int = 1) -> NDArray[np.uint8]:
    """Draws images of soft spots, uint8 [count, 6, 6, 1]."""
    random = np.random.default_rng(seed)
    return (random.integers(0, 4, (count, SIDE, SIDE, 1)) * 80).clip(0, 255).astype(np.uint8)
