"""The matrix products of Muon and SOAP in a plan: they take the device's time, once a step, and owners divide them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.doctor._profile import profile
from tests.plan._workload import workload

from headway.core.workload import Workload
from headway.plan.calibration import MeasuredRun
from headway.plan.cluster import load_clusters
from headway.plan.compute import (
    estimate_from_data_sheet,
    estimate_from_profile,
    estimate_from_runs,
    separate_update,
)
from headway.plan.job import build_job
from headway.plan.prediction import predict
from headway.plan.roofline import PEAK_SHARE
from headway.plan.strategies import compare_strategies

PRODUCTS = 3e11
A100 = load_clusters()["dgx-a100"]


def multiply(precision: str = "fp32") -> Workload:
    """The workload of ten convolutions, whose optimizer multiplies matrices for each of them."""
    plain = workload()
    layers = tuple(
        one.model_copy(update={"update_multiply_adds": PRODUCTS * (one.kind == "Conv2d")}) for one in plain.layers
    )
    update = plain.step.update.model_copy(update={"product_precision": precision})
    step = plain.step.model_copy(update={"update": update})
    return plain.model_copy(update={"layers": layers, "step": step})


@pytest.mark.parametrize(("precision", "tflops"), [("fp32", 156), ("bf16", 312)])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_grows_by_the_products_at_the_rate_of_the_device(precision: str, tflops: float, accumulate: int) -> None:
    """Once a step, however many micro-batches it has: 2 operations each, at 80 % of the peak of tensor cores."""

    def predict_s(known: Workload) -> float:
        estimate = estimate_from_data_sheet(known, A100.device_spec)
        return predict(build_job(known, estimate, 10.0, per_device=16.0, accumulate=accumulate), A100, 1).step.seconds

    expected = 2 * 10 * PRODUCTS / (tflops * 1e12 * PEAK_SHARE["tensor cores"])
    assert predict_s(multiply(precision)) - predict_s(workload()) == pytest.approx(expected, rel=1e-6)


def test_owners_divide_them() -> None:
    """Ten equal convolutions on two devices are five each."""
    known, where = multiply(), A100.model_copy(update={"devices": 2})
    job = build_job(known, estimate_from_data_sheet(known, where.device_spec), 10.0, per_device=16.0)
    none = replace(job, compute=replace(job.compute, update_s=0.0))

    def predict_s(job: Any) -> dict[str, float]:
        return {one.name: 32 / one.images_s for one in compare_strategies(known, job, where, 1)}

    times, without = predict_s(job), predict_s(none)
    for name, share in (("data parallel", 1.0), ("optimizer state by owner", 0.5)):
        assert times[name] - without[name] == pytest.approx(share * job.compute.update_s, rel=1e-6)


def test_what_was_measured_had_them() -> None:
    """A profile's fixed time is divided; runs come back as they were."""
    known, alone = multiply(), estimate_from_profile(profile().model_copy(update={"multiply_adds": None}), workload())
    found = separate_update(alone, 0.25 * alone.compute.fixed_s).compute
    assert found.update_s == pytest.approx(0.25 * alone.compute.fixed_s)
    assert found.fixed_s + found.update_s == pytest.approx(alone.compute.fixed_s)
    assert separate_update(alone, 1e9).compute.fixed_s == 0
    job = build_job(known, estimate_from_data_sheet(known, A100.device_spec), 10.0, per_device=64.0)
    fitted = estimate_from_runs([MeasuredRun(8, 64, 4000.0)], job, A100)
    assert fitted.compute.update_s == job.compute.update_s > 0
    planned = predict(build_job(known, fitted, 10.0, per_device=64.0), A100, 1)
    assert planned.batch / planned.step.seconds == pytest.approx(4000, rel=0.01)
