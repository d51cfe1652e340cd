"""A Workload on disk: read as it was written, and refused where it is another thing. Torch is not needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.doctor._profile import profile

from headway.core.errors import UsageError
from headway.core.profile import Profile, ShortRun, Throughput
from headway.core.workload import (
    Workload,
    WorkloadExchange,
    WorkloadInput,
    WorkloadLayer,
    WorkloadPhase,
    WorkloadRun,
    WorkloadStep,
    WorkloadUpdate,
)

COUNT = st.integers(0, 10**12)


def run(name: Any, predicted: float | None) -> ShortRun:
    rate = Throughput(value=100, low=99, high=101, windows=9)
    return ShortRun(name=name, steps=9, images_s=rate, predicted=predicted, wait_share=None, note="")


def layer(place: int, **more: Any) -> WorkloadLayer:
    given: dict[str, Any] = {
        "name": f"layer{place}",
        "kind": "Linear",
        "parameters": 10,
        "weight_bytes": 40,
        "gradient_bytes": 40,
        "ready": place,
        "input_shape": (3,),
        "output_shape": None,
        "forward_multiply_adds": 100,
        "backward_multiply_adds": 200,
        "activation_bytes": 12,
        "saved_bytes": 7,
        "saved_bytes_fixed": 5,
    }
    return WorkloadLayer(**given | more)


def workload(*layers: WorkloadLayer) -> Workload:
    return Workload(
        name="run",
        layers=layers,
        input=WorkloadInput(
            height=8, width=8, channels=1, decoded_bytes=64, encoded_bytes=None, source_pixels=None, on_host=("flip",),
            on_device=(),
        ),
        step=WorkloadStep(
            batch=30,
            micro_batch=None,
            precision="fp32",
            half_weights=False,
            compiled=False,
            update=WorkloadUpdate(optimizer="sgd", state_bytes=0, passes=3.0),
            exchange=WorkloadExchange(
                gradient_bytes=80, statistics_bytes=0, algorithm="auto", wire_ratio=0.5, bucket_bytes=None,
                sync_batch_norm=False,
            ),
        ),
        run=WorkloadRun(
            samples=90, epochs=2.0, steps=6,
            phases=(WorkloadPhase(steps=6, batch=30, height=8, width=8, forward_multiply_adds=1),),
            evaluations=2, evaluation_samples=None, checkpoints=2, checkpoint_bytes=100,
        ),
    )  # fmt: skip


@given(st.lists(st.tuples(COUNT, COUNT, COUNT, COUNT), max_size=5))
def test_sums_are_those_of_the_layers(rows: list[tuple[int, int, int, int]]) -> None:
    names = ("parameters", "forward_multiply_adds", "saved_bytes", "saved_bytes_fixed")
    found = workload(*(layer(place, **dict(zip(names, row, strict=True))) for place, row in enumerate(rows)))
    assert found.parameters == sum(row[0] for row in rows)
    assert found.forward_multiply_adds == sum(row[1] for row in rows)
    assert found.backward_multiply_adds == 200 * len(rows)
    assert found.count_saved_bytes(3) == sum(3 * row[2] + row[3] for row in rows)


@given(st.permutations(range(6)))
def test_layers_come_in_the_order_of_their_gradients(order: list[int]) -> None:
    found = workload(*(layer(place, ready=ready) for place, ready in enumerate(order)), layer(9, ready=None))
    assert [one.ready for one in found.order_by_gradient()] == list(range(6))


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = workload(layer(0), layer(1, input_shape=None, ready=None))
    found.write(tmp_path / "w.json")
    assert Workload.read(tmp_path / "w.json") == found
    assert json.loads((tmp_path / "w.json").read_text())["version"] == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "not a Workload of version 1 (version must be "),
        ({"steps": 3}, "not a Workload of version 1 (there is no key 'steps')"),
        ({"layers": None}, "not a Workload of version 1 (layers must be a list, and it has no value)"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps(workload(layer(0)).model_dump(mode="json") | change))
    with pytest.raises(UsageError) as caught:
        Workload.read(path)
    assert said in str(caught.value)
    assert str(caught.value).endswith("headway train RECIPE --dry-run writes one.")


def test_no_file_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Workload.read(tmp_path / "w.json")
    (tmp_path / "w.json").write_text("{")
    with pytest.raises(UsageError, match="not a Workload of version 1"):
        Workload.read(tmp_path / "w.json")


def test_a_number_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValidationError):
        layer(0, saved_bytes=-1)


@given(
    st.lists(st.floats(0.2, 5), min_size=1, max_size=3),
    st.none() | st.floats(1e-3, 1e3),
    st.floats(0.1, 10),
    st.booleans(),
)
def test_runs_agree_that_are_off_alike(off: list[float], cold: float | None, times: float, near: bool) -> None:
    def found(off: Iterable[float]) -> Profile:
        ran = [run(name, 100 * one) for name, one in zip(("synthetic", "replay", "warm"), off, strict=False)]
        concluded = profile().verdict.model_copy(update={"confirmed": near})
        return profile(runs=(*ran, run("cold", cold and 100 * cold), run("replay", None)), verdict=concluded)

    assert found(off[:1] * 3).disagreement == pytest.approx(1)
    assert found(off).disagreement == pytest.approx(max(off) / min(off))
    assert found(times * one for one in off).disagreement == pytest.approx(max(off) / min(off))
    assert found(off[:1] * 3).mark_contradictions() == found(off[:1] * 3)
    doubted = found([0.2, 1.0]).mark_contradictions()
    assert not doubted.verdict.confirmed
    assert doubted.verdict.unexplained.startswith("The short runs contradict each other by 5.0 times")
    assert doubted.mark_contradictions() == doubted
    assert profile(runs=()).disagreement == 1


def test_passes_that_take_less_time_with_more_samples_confirm_nothing() -> None:
    found = profile(launch={"2": 0.381, "32": 1.255, "128": 0.396}).mark_contradictions()
    assert not found.verdict.confirmed
    assert found.verdict.unexplained.startswith(
        "Passes of 128 samples were measured to take less time than those of 32;"
    )
    assert profile().mark_contradictions() == profile()


def test_it_needs_no_torch() -> None:
    code = "import sys, headway.core.profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
