"""`bench.plan`: what it reads of published rows, and what it counts."""

from __future__ import annotations

import numpy as np
import pytest
from bench._plan.scaling import (
    Row,
    basis_of,
    between_of,
    cluster_of,
    gradient_bytes,
    predicted,
    rows,
    step_of,
)
from bench._plan.sweeps import Sweep, sweeps
from bench._plan.times import times

from headway.plan.losses import load_priors

PRIORS = load_priors("field")


def row(series: str, gpus: int) -> Row:
    return next(one for one in rows() if (one.series, one.gpus) == (series, gpus))


def test_each_row_is_to_be_predicted_or_to_calibrate() -> None:
    assert {one.role for one in rows()} == {"predict", "calibrate"}
    assert all((one.images_s is None) != (one.efficiency is None) for one in rows())
    for one in rows():
        assert cluster_of(one).device_spec.memory_gb > 0
        assert gradient_bytes(one) > 4e7


@pytest.mark.parametrize(
    ("link", "gigabytes_s"),
    [
        ("8x NDR400", 8 * 400 / 8 * 0.92),
        ("4x EDR100", 4 * 100 / 8 * 0.92),
        ("FDR56", 56 / 8 * 0.92),
        ("100 GbE", 100 / 8 * 0.8),
        ("25 GbE RoCE", 25 / 8 * 0.92),
        ("about 1.2 GB/s Ethernet, parameter servers", 1.2),
    ],
)
def test_links_are_read_by_one_rule_for_each_kind(link: str, gigabytes_s: float) -> None:
    assert between_of(link).bytes_s == pytest.approx(gigabytes_s * 1e9)


@pytest.mark.check
def test_what_a_series_was_calibrated_by_is_explained() -> None:
    """A single run exactly; several, within their errors."""
    for one in rows():
        if one.role != "predict" or one.images_s is None:
            continue
        basis = basis_of(one, PRIORS)
        for known in basis.runs:
            off = step_of(basis.parameters, known, known.gpus).seconds / known.run.seconds - 1
            if known.series == one.series:
                assert abs(off) < (0.001 if len(basis.runs) == 1 else 0.08), one


def test_several_nodes_are_predicted_from_one_whole_node_too() -> None:
    series = "dlperf-tf1-resnet-50-amp-b224"
    assert [one.gpus for one in basis_of(row(series, 8), PRIORS).runs] == [1]
    assert [one.gpus for one in basis_of(row(series, 16), PRIORS).runs] == [1, 8]


def test_a_series_borrows_what_its_note_says() -> None:
    from_other = basis_of(row("v100-dgx2h-v0.6", 1536), PRIORS).parameters.compute.fixed_s
    borrowed = basis_of(row("v100-dgx1-v0.6", 1040), PRIORS).parameters.compute.fixed_s
    # The optimizer's pass takes longer in slower memory.
    assert borrowed == pytest.approx(from_other, rel=0.05)


def test_rows_without_smaller_ones_are_told_to_come_from_the_device() -> None:
    found = predicted(row("goyal-p100", 256))
    assert found.basis.startswith("the device, by ")
    assert 0 < found.value <= 100
    assert predicted(row("tencent-b64", 1024)).basis == "1 of its series"


def test_what_counts_is_several_nodes_or_poor_scaling() -> None:
    assert predicted(row("tencent-b64", 1024)).scored
    assert not predicted(row("deck-v100-fp32", 8)).scored  # 98 % of linear on one node
    assert predicted(row("deck-v100-fp16", 8)).scored  # 85 %


def test_parameter_servers_hide_nothing() -> None:
    cluster = cluster_of(row("tf2017-k80-ec2-b64", 64))
    assert (cluster.algorithms, cluster.overlap) == (("shared_server",), False)
    assert cluster_of(row("goyal-p100", 256)).overlap


def test_sweeps_predict_what_they_were_not_fitted_to() -> None:
    sizes = [2.0**power for power in range(10, 20)]
    exact = Sweep("a", "b", 4, tuple((size, 1e-5 + size * 1e-9) for size in sizes))
    assert np.abs(exact.errors).max() < 1e-9
    assert len(exact.errors) == 5
    bent = Sweep("a", "b", 4, tuple((size, (1e-5 + size * 1e-9) * (1 + at % 2)) for at, size in enumerate(sizes)))
    assert bent.errors == pytest.approx([-0.5] * 5)
    assert all(len(one.points) >= 4 for one in sweeps())


@pytest.mark.check
def test_minutes_are_those_of_rows_that_are_predicted_and_most_lie_in_their_bands() -> None:
    found = times()
    assert all(row(one.series, one.gpus).role == "predict" for one in found)
    assert np.mean([one.low <= one.minutes <= one.high for one in found]) >= 0.75  # bands of 90 %, eight runs
    assert np.median([abs(one.error) for one in found]) < 0.1
