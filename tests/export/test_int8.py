"""int8: 8-bit layers, of which so many go back to fp32 as the gate asks for; calibrated on training images only."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.export._graphs import draw_images, write_small_model

from headway.core.errors import HeadwayError
from headway.export.gate import judge
from headway.export.targets.int8 import Quantised, needs_reduced_range, quantise, rank_layers
from headway.export.targets.int8_graph import CalibratedGraph
from headway.export.targets.onnx import OnnxSession
from headway.export.verdict import Verdict

onnx = pytest.importorskip("onnx")
LAYERS = ["first", "second", "head"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model") / "model.onnx")


def build(model: Path, out: Path, refusals: int | None, **options: Any) -> Quantised:
    """Quantises with a gate that refuses the first files. None: nothing is judged."""
    seen = []

    def check(path: Path) -> Verdict:
        seen.append(path.read_bytes())
        assert refusals is not None
        faults = ("It is refused.",) if len(seen) <= refusals else ()
        return Verdict(precision="int8", source="pixels", metric="accuracy", samples=1, faults=faults)

    options = {"kind": "class", "reduce_range": False} | options
    found = quantise(model, out, draw_images(40), check=None if refusals is None else check, **options)
    assert len(set(seen)) == len(seen), "each try is another file"
    return found


def find_layers_in_int8(path: Path) -> list[str]:
    """Names of the layers whose weights are 8-bit numbers."""
    graph = onnx.load(str(path)).graph
    producers = {output: node.op_type for node in graph.node for output in node.output}
    layers = [node for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    return [node.name for node in layers if producers.get(node.input[1]) == "DequantizeLinear"]


def test_all_layers_are_quantised_where_the_gate_holds(model: Path, tmp_path: Path) -> None:
    out, images = tmp_path / "int8.onnx", draw_images(64, seed=9)
    found = build(model, out, refusals=0)
    assert found.to_json() == {"layers": 3, "in_fp32": [], "reduce_range": False, "tries": 1}
    assert find_layers_in_int8(out) == LAYERS
    with OnnxSession(model) as before, OnnxSession(out) as after:
        reference = before.run(images)
        for batch in (1, 7, 64):
            outputs = after.run(images[:batch])
            assert np.abs(outputs - reference[:batch]).max() < 0.05
        assert judge("class", reference, after.run(images), reference.argmax(1), "int8", 10).passed
    # Each channel of a weight has its own scale.
    tensors = {tensor.name: tensor for tensor in onnx.load(str(out)).graph.initializer}
    assert list(tensors["w2_scale"].dims) == [8]
    assert tensors["w2_quantized"].data_type == onnx.TensorProto.INT8


def test_normalisation_and_head_stay_in_fp32(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "int8.onnx"
    build(model, out, refusals=0)
    graph = onnx.load(str(out)).graph
    producers = {output: node.op_type for node in graph.node for output in node.output}
    (softmax,) = (node for node in graph.node if node.op_type == "Softmax")
    (scale,) = (node for node in graph.node if node.op_type == "Mul")
    assert producers[softmax.input[0]] == "Gemm"
    assert producers[scale.input[0]] == "Cast"


@pytest.mark.parametrize("refusals", [1, 2, 9])
def test_layers_go_back_one_by_one_the_worst_first(model: Path, tmp_path: Path, refusals: int) -> None:
    out, said = tmp_path / "int8.onnx", list[str]()
    found = build(model, out, refusals, show=said.append)
    graph = CalibratedGraph.prepare(model, tmp_path, draw_images(40), False)
    ranked = rank_layers(LAYERS, lambda name: graph.compare_alone(name, draw_images(40), "class"))
    # The last layer stays in int8, though the gate refuses it.
    back = ranked[: min(refusals, 2)]
    assert list(found.in_fp32) == back
    assert found.tries == len(back) + 1
    assert find_layers_in_int8(out) == [name for name in LAYERS if name not in back]
    assert found.verdict is not None
    assert found.verdict.passed == (refusals < 3)
    assert said[0] == "int8 in all 3 layers is refused: each layer is tried alone."
    assert [line.partition(" ")[0] for line in said[1:]] == back


def test_a_layer_that_is_destroyed_by_8_bits_is_found(tmp_path: Path) -> None:
    """One weight of a channel is so large that the others become zero."""
    path = write_small_model(tmp_path / "model.onnx")
    proto = onnx.load(str(path))
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == "w2")
    values = onnx.numpy_helper.to_array(weight).copy()
    # The input of this weight is cut off by ReLU, so that the number itself changes nothing.
    values[:, 0, 0, 0] = 4000
    weight.CopyFrom(onnx.numpy_helper.from_array(values, "w2"))
    first = next(tensor for tensor in proto.graph.initializer if tensor.name == "w1")
    kernel = onnx.numpy_helper.to_array(first).copy()
    kernel[0] = -1
    first.CopyFrom(onnx.numpy_helper.from_array(kernel, "w1"))
    onnx.save(proto, str(path))
    graph = CalibratedGraph.prepare(path, tmp_path, draw_images(40), False)
    assert rank_layers(LAYERS, lambda name: graph.compare_alone(name, draw_images(40), "class"))[0] == "second"


def test_without_a_gate_all_layers_are_quantised(model: Path, tmp_path: Path) -> None:
    found = build(model, tmp_path / "int8.onnx", refusals=None)
    assert found.verdict is None
    assert found.in_fp32 == ()


def test_equal_input_gives_equal_files(model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        build(model, tmp_path / name, refusals=1)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_weights_have_7_bits_where_sums_saturate(model: Path, tmp_path: Path) -> None:
    largest = {}
    for reduce_range in (False, True):
        out = tmp_path / f"{reduce_range}.onnx"
        assert build(model, out, refusals=0, reduce_range=reduce_range).reduce_range is reduce_range
        tensors = {tensor.name: tensor for tensor in onnx.load(str(out)).graph.initializer}
        weights = onnx.numpy_helper.to_array(tensors["w2_quantized"]).astype(int)
        largest[reduce_range] = np.abs(weights).max()
    assert largest == {False: 127, True: 64}
    assert needs_reduced_range(frozenset({"avx2", "avx512f"}), "x86_64")
    assert not needs_reduced_range(frozenset({"avx2", "avx_vnni"}), "x86_64")
    assert not needs_reduced_range(frozenset({"avx512f", "avx512_vnni"}), "x86_64")
    assert not needs_reduced_range(frozenset({"asimd"}), "aarch64")


def test_a_graph_without_layers_is_refused(tmp_path: Path) -> None:
    path = write_small_model(tmp_path / "model.onnx", has_layers=False)
    with pytest.raises(HeadwayError, match="no Conv, Gemm or MatMul that could be computed in int8"):
        build(path, tmp_path / "int8.onnx", refusals=0)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=8))
def test_layers_are_ranked_by_answers_and_then_by_difference(damage: list[tuple[int, float]]) -> None:
    names = [f"layer{number}" for number in range(len(damage))]
    by_name = dict(zip(names, damage, strict=True))
    ranked = rank_layers(names, by_name.__getitem__)
    assert sorted(ranked) == sorted(names)
    assert [by_name[name] for name in ranked] == sorted(damage, reverse=True)
    for one, other in pairwise(ranked):
        assert by_name[one] > by_name[other] or names.index(one) < names.index(other), "equal ones keep their order"
