"""The gate passes equal outputs, sees every difference that counts, and does not depend on the order of samples."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.export import gate
from headway.export.drop_bound import compute_flip_bound, compute_mean_bound, compute_share_bound
from headway.export.gate import NEAR_GAP, judge

KINDS = ("class", "multi", "value")
Case = tuple[NDArray[Any], NDArray[Any]]


def draw(kind: str, seed: int, samples: int, outputs: int = 4) -> Case:
    """Reference outputs and labels, of which about nine in ten are right."""
    random = np.random.default_rng(seed)
    if kind == "class":
        reference = random.dirichlet([0.3] * outputs, samples).astype(np.float32)
        is_wrong = random.random(samples) < 0.1
        return reference, np.where(is_wrong, random.integers(0, outputs, samples), reference.argmax(1))
    if kind == "multi":
        reference = random.random((samples, outputs)).astype(np.float32)
        return reference, ((reference > 0.5) ^ (random.random((samples, outputs)) < 0.1)).astype(np.float32)
    reference = random.normal(size=(samples, outputs)).astype(np.float32)
    return reference, reference + random.normal(size=(samples, outputs)).astype(np.float32)


@given(st.sampled_from(KINDS), st.integers(0, 99), st.integers(2, 300), st.sampled_from(["fp32", "bf16", "int8"]))
def test_equal_outputs_pass_with_any_limit(kind: str, seed: int, samples: int, precision: Any) -> None:
    reference, labels = draw(kind, seed, samples)
    for source in ("pixels", "files"):
        verdict = judge(kind, reference, reference.copy(), labels, precision, 0.0, source=source)
        assert verdict.passed, verdict.faults
        assert (verdict.drop, verdict.flips, verdict.difference) == (0, 0, 0)
        assert verdict.reference == verdict.value
        assert verdict.bound >= 0
        assert json.loads(json.dumps(verdict.to_json(), allow_nan=False))["passed"] is True


@given(
    st.sampled_from(KINDS), st.integers(0, 99), st.sampled_from(["fp32", "int8"]), st.sampled_from(["pixels", "files"])
)
def test_the_order_of_the_samples_changes_nothing(kind: str, seed: int, precision: Any, source: Any) -> None:
    reference, labels = draw(kind, seed, 200)
    outputs = np.roll(reference, seed % 3, axis=0)
    order = np.random.default_rng(seed).permutation(len(reference))
    names = ["a", "b", "c", "d"]
    one = judge(kind, reference, outputs, labels, precision, source=source, names=names)
    # Samples keep their ids, and only the lists of flips follow the order.
    other = judge(
        kind, reference[order], outputs[order], labels[order], precision, source=source, samples=order, names=names
    )
    assert sorted(map(str, one.near)) == sorted(map(str, other.near))
    assert replace(one, near=(), faults=()) == replace(other, near=(), faults=())
    assert len(one.faults) == len(other.faults)


@given(st.integers(0, 99), st.integers(1, 50), st.sampled_from([0.002, 0.009, 0.011, 0.3]))
def test_fp32_from_the_same_pixels_allows_no_flip(seed: int, flips: int, gap: float) -> None:
    reference, labels = draw("class", seed, 100)
    # The two best classes of the first samples lie this far apart, and swap.
    reference[:flips] = np.array([0.5 + gap / 2, 0.5 - gap / 2, 0, 0], np.float32)
    outputs = reference.copy()
    outputs[:flips, :2] = outputs[:flips, 1::-1]
    same = judge("class", reference, outputs, labels)
    assert not same.passed
    assert same.flips == flips
    assert same.near == ()
    files = judge("class", reference, outputs, labels, source="files")
    assert files.passed == (gap <= NEAR_GAP)
    assert len(files.near) == (flips if files.passed else 0), "allowed flips are listed"
    assert [flip.answers for flip in files.near] == [(0, 1)] * len(files.near)


def test_a_flip_to_the_third_class_is_not_near() -> None:
    """The two best classes are nearly equal, but the export chose neither."""
    reference = np.array([[0.45, 0.449, 0.101], [0.2, 0.2, 0.6]], np.float32)
    outputs = np.array([[0.3, 0.3, 0.4], [0.2, 0.2, 0.6]], np.float32)
    assert not judge("class", reference, outputs, np.array([0, 2]), source="files").passed


@given(st.integers(0, 99), st.floats(0.001, 0.2))
def test_a_label_flips_at_one_half(seed: int, move: float) -> None:
    reference, labels = draw("multi", seed, 60)
    assume(((np.abs(reference - 0.5) > 1e-3) | (reference > 0.5)).all())
    reference[0, 0] = 0.5 + move / 2
    outputs = reference.copy()
    outputs[0, 0] = 0.5 - move / 2
    verdict = judge("multi", reference, outputs, labels, source="files")
    assert verdict.flips == 1
    # The two answers p and 1 - p lie twice as far apart as p and one half.
    assert verdict.passed == (2 * (float(reference[0, 0]) - 0.5) <= NEAR_GAP)


@given(st.integers(0, 99), st.sampled_from(KINDS))
def test_fp32_refuses_outputs_that_moved_without_a_flip(seed: int, kind: str) -> None:
    """On a small set wrong constants may change no answer."""
    reference, labels = draw(kind, seed, 40)
    column, spread = int(reference[0].argmax()), 1.0
    if kind == "value":
        # One number has larger units than the others, and is measured by its own range as they are.
        reference[:, 0] *= 1000
        labels[:, 0] *= 1000
        column = seed % 4
        spread = float(np.ptp(reference[:, column]))
    for share, passes in ((0.5, True), (5.0, False)):
        outputs = reference.copy()
        # The best class gains, or the label moves away from one half.
        outputs[0, column] += np.float32(share * gate.MAX_DIFFERENCE * spread) * (
            1 if reference[0, column] > 0.5 else -1
        )
        outputs = outputs.clip(0, 1) if kind != "value" else outputs
        moved = float(np.abs(outputs - reference).max())
        assume(passes or moved > gate.MAX_DIFFERENCE * spread)
        verdict = judge(kind, reference, outputs, labels)
        assume(verdict.flips == 0)
        assert verdict.passed == passes, verdict.faults


@given(st.integers(0, 20), st.integers(0, 20), st.sampled_from([0.0, 0.5, 1.0, 2.5]))
def test_int8_may_lose_as_much_as_the_limit(lost: int, won: int, allowed: float) -> None:
    samples = 400
    labels = np.arange(samples) % 10
    right, wrong = (np.eye(10, dtype=np.float32)[(labels + step) % 10] for step in (0, 1))
    reference, outputs = right.copy(), right.copy()
    outputs[:lost] = wrong[:lost]
    reference[lost : lost + won] = wrong[lost : lost + won]
    verdict = judge("class", reference, outputs, labels, "int8", allowed)
    assert verdict.flips == lost + won
    assert verdict.drop == pytest.approx(100 * (lost - won) / samples)
    assert verdict.passed == (lost - won <= allowed * samples / 100)
    assert verdict.worst is None, "40 samples of a class are too few"
    assert verdict.bound > verdict.drop


def test_a_class_may_lose_three_times_as_much() -> None:
    labels = np.repeat([0, 1, 2], [900, 50, 49])
    reference = np.eye(3, dtype=np.float32)[labels]
    for group, count, passes in ((1, 1, False), (0, 4, True), (2, 4, True), (2, 5, True)):
        outputs = reference.copy()
        first = int(np.flatnonzero(labels == group)[0])
        outputs[first : first + count] = np.eye(3, dtype=np.float32)[(group + 1) % 3]
        verdict = judge("class", reference, outputs, labels, "int8", 0.6, names=["a", "b", "c"])
        assert verdict.passed == passes, (group, count, verdict.faults)
    one_lost = judge("class", reference, np.roll(reference, 1, axis=0), labels, "int8", 5)
    assert one_lost.worst is not None
    assert (one_lost.worst.name, one_lost.worst.samples, one_lost.worst.points) == ("1", 50, 2.0)


def test_a_label_that_is_always_or_never_predicted_is_seen() -> None:
    """Both change little of the accuracy over many labels."""
    random = np.random.default_rng(0)
    labels = (random.random((1000, 200)) < 0.06).astype(np.float32)
    reference = labels * np.float32(0.8) + np.float32(0.1)
    for value, name in ((0.1, "7"), (0.9, "not 7")):
        outputs = reference.copy()
        outputs[:, 7] = value
        verdict = judge("multi", reference, outputs, labels, "int8", 0.5)
        assert verdict.drop < 0.5
        assert not verdict.passed
        assert verdict.worst is not None
        assert verdict.worst.name == name


@given(st.integers(0, 99), st.floats(0.0, 0.02))
def test_the_error_of_numbers_may_grow_by_its_share(seed: int, growth: float) -> None:
    reference, labels = draw("value", seed, 50, outputs=2)
    outputs = labels + (reference - labels) * np.float32(1 + growth)
    assume(abs(growth - 0.005) > 1e-4)
    for precision, source in (("int8", "pixels"), ("fp32", "files")):
        verdict = judge("value", reference, outputs, labels, precision, 0.5, source=source)  # type: ignore[arg-type]
        assert verdict.drop == pytest.approx(100 * growth, abs=1e-3)
        assert verdict.passed == (growth < 0.005)
    assert judge("value", reference[:, :1], reference[:, :1] + 1, reference[:, 0], "int8").drop == math.inf


def test_a_number_in_small_units_is_judged_by_its_own_error() -> None:
    """Ages from 0 to 1000 beside a share from 0 to 1, whose error grows while that of the ages stays."""
    reference, labels = draw("value", 0, 60, outputs=2)
    for numbers in (reference, labels):
        numbers[:, 0] *= 1000
    for growth, passes in ((0.014, True), (0.02, False), (2.0, False)):
        outputs = reference.copy()
        outputs[:, 1] += (reference - labels)[:, 1] * np.float32(growth)
        for precision, source in (("int8", "pixels"), ("fp32", "files")):
            names = ["age", "share"]
            verdict = judge("value", reference, outputs, labels, precision, 0.5, source=source, names=names)  # type: ignore[arg-type]
            assert verdict.drop < 0.5
            assert verdict.passed == passes, verdict.faults
            assert verdict.worst is not None
            assert verdict.worst.name == "share"
            assert verdict.worst.points == pytest.approx(100 * growth, rel=1e-3)
    assert verdict.faults == ("The error of share grows by 200 % on 60 samples, more than 1.5.",)
    wrong = judge("value", reference, reference * np.float32([1, -1]), labels, names=["age", "share"])
    assert wrong.faults[0].startswith("Output share differs by ")


@pytest.mark.parametrize("kind", ["value", "own"])
def test_a_number_that_is_always_the_same_may_differ_by_rounding(kind: str) -> None:
    reference, labels = draw("value", 0, 60, outputs=2)
    reference[:, 1] = labels[:, 1] = 2020
    for difference, passes in ((0.0, True), (1e-3, True), (0.1, False)):
        outputs = reference + np.float32([0, difference])
        assert judge(kind, reference, outputs, labels).passed == passes
        assert kind == "own" or judge(kind, reference, outputs, labels, "int8").passed == passes


@given(st.integers(0, 30), st.integers(0, 30), st.integers(61, 5000))
def test_the_bound_grows_with_losses_and_falls_with_gains(lost: int, won: int, total: int) -> None:
    bound = compute_flip_bound(lost, won, total)
    assert compute_flip_bound(lost + 1, won, total) > bound
    assert compute_flip_bound(lost, won + 1, total) <= bound
    assert compute_flip_bound(lost, 0, 2 * total) < compute_flip_bound(lost, 0, total)
    assert (lost - won) / total < bound <= 1


@given(st.integers(1, 400), st.data())
def test_the_bound_of_a_share_is_that_of_the_binomial_distribution(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, total))
    bound = compute_share_bound(count, total, 0.975)
    if count == total:
        assert bound == 1
        return
    below = sum(math.comb(total, k) * bound**k * (1 - bound) ** (total - k) for k in range(count + 1))
    assert below == pytest.approx(0.025, rel=1e-6)
    if not count:
        assert bound == pytest.approx(1 - 0.025 ** (1 / total))


def test_the_bound_holds_in_95_of_100_draws() -> None:
    """True drop 1 point: 2 % are lost and 1 % won, 300 samples."""
    random, holds = np.random.default_rng(0), 0
    for lost, won, _ in random.multinomial(300, [0.02, 0.01, 0.97], size=400).tolist():
        holds += compute_flip_bound(lost, won, 300) >= 0.01
    assert holds / 400 >= 0.95
    drops = random.normal(0.01, 0.1, size=(400, 300))
    assert 0.95 <= np.mean([compute_mean_bound(one) >= 0.01 for one in drops]) < 1
    assert compute_mean_bound(np.zeros(1)) == math.inf


def test_a_set_that_is_too_small_for_the_gate_is_named() -> None:
    for samples, is_few in ((60, True), (4000, False)):
        reference, labels = draw("class", 0, samples)
        verdict = judge("class", reference, reference, labels, "int8", 0.5)
        assert verdict.passed
        assert (verdict.bound > 0.5) == is_few
        assert (f"{samples} samples are too few to tell" in verdict.describe()) == is_few
        assert "too few" not in judge("class", reference, reference, labels, "fp32", 0.5).describe()


BROKEN: dict[str, Any] = {
    "NaN": lambda outputs: np.where(np.arange(len(outputs))[:, None] == 3, np.nan, outputs),
    "infinity": lambda outputs: np.where(np.arange(len(outputs))[:, None] == 3, np.inf, outputs),
    "the same outputs": lambda outputs: np.repeat(outputs[:1], len(outputs), axis=0),
    "answers with 3": lambda outputs: outputs[:, :3],
    "the shape [59, 4]": lambda outputs: outputs[:59],
    "the shape [60]": lambda outputs: outputs[:, 0],
}


@pytest.mark.parametrize("words", BROKEN)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_cannot_be_compared_fail(kind: str, words: str) -> None:
    reference, labels = draw(kind, 0, 60)
    for precision in ("fp32", "bf16", "int8"):
        verdict = judge(kind, reference, BROKEN[words](reference), labels, precision, 100.0)
        assert not verdict.passed
        assert any(words in fault or "NaN or infinity" in fault for fault in verdict.faults)
        assert "REJECTED" in verdict.describe()
        json.dumps(verdict.to_json(), allow_nan=False)


def test_a_run_that_answers_nothing_is_refused() -> None:
    """Else an untrained or diverged run would pass with anything that is as broken."""
    labels = np.zeros(20, np.int64)
    for reference in (np.full((20, 3), np.nan), np.full((20, 3), 1 / 3)):
        verdict = judge("class", reference, reference, labels)
        assert any(fault.startswith("The run gives") for fault in verdict.faults)


def test_outputs_that_are_no_probabilities_fail() -> None:
    """An export without its softmax has the same answers."""
    reference, labels = draw("class", 0, 60)
    for outputs, words in ((np.log(reference + 1e-3), "no probabilities"), (reference / 2, "add up to 1")):
        assert words in judge("class", reference, outputs, labels, "int8", 100).faults[0]
    scores, labels = draw("multi", 0, 60)
    assert "no probabilities" in judge("multi", scores, 20 * scores - 10, labels, "int8", 100).faults[0]


def test_outputs_of_a_task_of_the_users_own_stay_as_they_are() -> None:
    reference, _ = draw("value", 0, 60)
    assert judge("own", reference, reference + np.float32(1e-6), None).passed
    assert not judge("own", reference, reference + np.float32(0.05), None).passed
    assert judge("own", reference, reference + np.float32(0.05), None, source="files").passed
    assert not judge("own", reference, reference + 1, None, source="files").passed
    with pytest.raises(UsageError, match="metric of this task of your own is not known"):
        judge("own", reference, reference, None, "int8")


REFUSED: dict[str, dict[str, Any]] = {
    "no kind of labels 'words'": {"kind": "words"},
    "no precision 'fp8'": {"precision": "fp8"},
    "-1 is not from 0 to 100": {"allowed": -1},
    "nan is not from 0 to 100": {"allowed": math.nan},
    "shape \\[0, 4\\]": {"reference": np.zeros((0, 4))},
    "labels of the shape \\[19\\]": {"labels": np.zeros(19, np.int64)},
    "not numbers of 4 classes": {"labels": np.full(20, 4)},
    "numbers of 4 classes": {"labels": np.zeros(20)},
    "no labels": {"labels": None},
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_arguments_are_refused(words: str) -> None:
    reference, labels = draw("class", 0, 20)
    arguments: dict[str, Any] = {"kind": "class", "reference": reference, "outputs": reference, "labels": labels}
    with pytest.raises(UsageError, match=words):
        judge(**(arguments | REFUSED[words]))


def test_a_refusal_names_flips_and_classes() -> None:
    reference = np.eye(3, dtype=np.float32)[np.arange(30) % 3] * np.float32(0.9) + np.float32(1 / 30)
    ids = np.arange(30) + 100
    verdict = judge("class", reference, reference[:, ::-1], np.arange(30) % 3, samples=ids, names=["a", "b", "c"])
    assert verdict.faults[0] == (
        "20 answers change, and none may: sample 100 (a becomes c; 0.900 apart), sample 102 (c becomes a; 0.900 apart),"
        " sample 103 (a becomes c; 0.900 apart) and 17 more."
    )
