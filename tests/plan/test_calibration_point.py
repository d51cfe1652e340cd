"""A plan at the devices and the batch of a measured run gives that run back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests._support import headway
from tests.plan._workload import workload

from headway.core.errors import UsageError
from headway.core.workload import Workload
from headway.plan.cluster import load_clusters
from headway.plan.compute import estimate_from_data_sheet
from headway.plan.job import build_job, compute_mean_work
from headway.plan.request import PlanRequest, plan_job

FULL = 4_001_000_000
RATE = 150.0


def build_growing(**step: int | None) -> Workload:
    """A recipe whose images have 112 pixels in the first half of its steps and 224 in the second."""
    known = workload()
    half = known.run.phases[0].model_copy(update={"steps": 15_625, "forward_multiply_adds": FULL})
    small = half.model_copy(update={"height": 112, "width": 112, "forward_multiply_adds": FULL // 4})
    return known.model_copy(
        update={
            "run": known.run.model_copy(update={"phases": (small, half)}),
            "step": known.step.model_copy(update=step),
        }
    )


@pytest.mark.parametrize(
    ("recipe", "options", "runs"),
    [
        pytest.param(build_growing(batch=64), {}, "8x8:1100", id="grows"),
        pytest.param(build_growing(batch=512, micro_batch=10), {}, "8x64:1100", id="grows-in-micro-batches"),
        pytest.param(workload(), {"per_device": 64.0}, "8x64:1100", id="per-device"),
        pytest.param(workload(), {"per_device": 32.0, "accumulate": 2}, "8x64:1100", id="accumulates"),
        pytest.param(workload(), {"batch": 512.0, "accumulate": 4}, "8x64:1100", id="accumulates-one-batch"),
        pytest.param(build_growing(per_device=64, batch=64), {}, "8x64:1100", id="per-device-recipe"),
    ],
)
def test_a_plan_at_the_calibration_point_is_the_run(recipe: Workload, options: dict[str, float], runs: str) -> None:
    request = PlanRequest(cluster="dgx-1-p100", nodes="1", runs=runs, **options)  # type: ignore[arg-type]
    plan = plan_job(recipe, request)
    samples = float(runs.partition("x")[2].partition(":")[0])
    assert plan.predictions[0].batch == 8 * samples
    assert plan.predictions[0].images_s == pytest.approx(1100, rel=1e-4)
    # The same job on one of the node's devices, from a run there.
    alone = plan_job(recipe, PlanRequest(**{**request.__dict__, "runs": f"1x{8 * samples}:{RATE}"}))
    within = alone.within_node[0]
    if within.batch == 8 * samples:
        assert within.images_s == pytest.approx(RATE, rel=1e-4)


def test_several_nodes_give_a_run_on_several_back() -> None:
    request = PlanRequest(cluster="dgx-1-p100", nodes="4", runs="32x64:4000", per_device=16.0, accumulate=4)
    assert plan_job(build_growing(), request).predictions[0].images_s == pytest.approx(4000, rel=1e-4)


def test_profile_and_data_sheet_are_of_the_largest_size_and_runs_of_the_mean(tmp_path: Path) -> None:
    growing, device = build_growing(), load_clusters()["dgx-1"].device_spec
    assert compute_mean_work(growing) == pytest.approx(0.625)
    sheet = estimate_from_data_sheet(growing, device)
    assert build_job(growing, sheet, 10.0).compute.sample_s == pytest.approx(0.625 * sheet.compute.sample_s)
    runs = plan_job(growing, PlanRequest(cluster="dgx-1", nodes="1", runs="8x64:1100", per_device=64.0))
    assert runs.job.compute.sample_s == runs.estimate.compute.sample_s
    # Evaluation is at the largest size in both cases: a third of a training sample of that size.
    assert runs.job.evaluation_s == pytest.approx(5000 * runs.job.compute.sample_s / 0.625 / 3)
    path = tmp_path / "growing.json"
    growing.write(path)
    said = headway("plan", path, "--cluster", "dgx-1", "--nodes", "1", "--runs", "8x64:1100").out
    assert "images grow from 112 x 112 to 224 x 224, and runs count as the mean over the whole recipe" in said
    said = headway("plan", path, "--cluster", "dgx-1", "--nodes", "1").out
    assert "images grow from 112 x 112 to 224 x 224, and a mean sample takes 62% of one of the largest size" in said


def test_a_run_of_growing_images_may_be_as_fast_as_their_mean_allows() -> None:
    # 900 images/s are 21.6 TFLOPS at 224 pixels, and 13.5 in the mean; the peak is 15.7.
    request = PlanRequest(cluster="dgx-1", nodes="1", runs="1x64:900", per_device=64.0)
    plan_job(build_growing(), request)
    with pytest.raises(UsageError, match="TFLOPS a device, the workload computes in fp32"):
        plan_job(build_growing(), PlanRequest(**{**request.__dict__, "runs": "1x64:1200"}))
