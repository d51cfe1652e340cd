"""What a job is planned from."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doctor._profile import profile
from tests.plan._workload import workload

from headway.core.errors import UsageError
from headway.plan.ask import epochs_of, job_of, of_device, of_profile, of_runs, read_nodes, read_points, read_runs
from headway.plan.calibrate import Run, calibrate
from headway.plan.cluster import clusters
from headway.plan.convergence import Epochs, Point
from headway.plan.step import Compute, Step, buckets_of, even_buckets, step


def free(compute: Compute, run: Run) -> Step:
    return Step(compute.fixed_s, compute.sample_s * run.samples, 0.0, 0.0, 0.0)


@given(st.floats(2e-3, 3e-2), st.floats(1e-4, 1e-2))
@settings(deadline=None, max_examples=30)
def test_two_runs_that_tell_are_explained(fixed: float, sample: float) -> None:
    runs = [Run(1, b, b / (fixed + sample * b)) for b in (1.0, 400.0)]
    found = calibrate(runs, free)
    for run in runs:
        assert found.seconds(run.samples) == pytest.approx(run.seconds, rel=0.05)


def test_one_run_is_explained_whatever_its_fixed_time_is() -> None:
    run = Run(1, 64, 800)
    assert calibrate([run], free).seconds(64) == pytest.approx(run.seconds, rel=1e-3)
    assert calibrate([run], free, fixed_s=0.02) == Compute(0.02, pytest.approx((0.08 - 0.02) / 64))


def test_what_the_exchange_takes_is_no_computing() -> None:
    cluster, buckets = clusters()["p40-100gbe"], even_buckets(4e9)
    true = Compute(0.01, 3e-3)
    seconds = step(true, 64, buckets, cluster.network(16), jitter=cluster.jitter).seconds
    assert seconds > 1.5 * true.seconds(64)
    found = of_runs([Run(128, 64, 128 * 64 / seconds)], buckets, cluster)
    assert found.basis == "runs"
    assert found.compute.seconds(64) == pytest.approx(true.seconds(64), rel=0.02)


def test_a_profile_gives_the_loop_it_measured() -> None:
    found = profile()
    known = of_profile(found)
    loop = sum(one.seconds for one in found.ceilings if one.side == "loop")
    assert known.basis == "profile"
    assert known.compute.seconds(found.batch) == pytest.approx(found.batch * loop)
    assert 0 <= known.compute.fixed_s < known.compute.seconds(found.batch)
    several = found.model_copy(update={"launch": {"1": 0.002, "100": 0.021}})
    assert of_profile(several).compute.seconds(found.batch) == pytest.approx(found.batch * loop)


def test_a_data_sheet_gives_a_share_of_its_peak() -> None:
    known = of_device(workload(), clusters()["dgx-1-p100"].of)
    flops = 6 * workload().forward_multiply_adds
    assert known.compute.sample_s == pytest.approx(flops / (9.3e12 * 0.5))
    assert known.basis == "data sheet"
    assert "9.3 TFLOPS" in known.how


def test_epochs_come_from_the_best_there_is() -> None:
    recipe, _ = epochs_of(workload())
    assert recipe == 10.0
    guessed, said = epochs_of(workload(), noise_scale=320)
    assert isinstance(guessed, Epochs)
    assert guessed.epochs(32) == pytest.approx(10)
    assert "noise scale of 320" in said
    fitted, said = epochs_of(workload(), points=[Point(32, 10), Point(320, 20)], noise_scale=5)
    assert isinstance(fitted, Epochs)
    assert fitted.epochs(320) == pytest.approx(20)
    assert "2 batches" in said
    one, _ = epochs_of(workload(), points=[Point(64, 12)])
    assert one == 12


def test_a_job_is_the_workload() -> None:
    job = job_of(workload(), of_device(workload(), clusters()["dgx-1"].of), 10.0)
    assert job.per_device == 32
    assert job.batch is None
    assert job.backward == pytest.approx(2 / 3)
    assert list(job.buckets) == buckets_of(workload())
    assert job_of(workload(), of_device(workload(), clusters()["dgx-1"].of), 10.0, batch=512).per_device is None


def test_nodes_are_read() -> None:
    assert read_nodes("1..64") == [1, 2, 4, 8, 16, 32, 64]
    assert read_nodes("3..20") == [3, 6, 12, 20]
    assert read_nodes("8") == [8]
    assert read_nodes("1, 2,130") == [1, 2, 130]
    for text in ("", "0", "a", "4..2", "0..4", "1,-2", "1..", "2.5"):
        with pytest.raises(UsageError, match=r"--nodes: .* is no count of nodes"):
            read_nodes(text)


def test_runs_and_points_are_read() -> None:
    assert read_runs("8x208:11105, 512x65:604217") == [Run(8, 208, 11105), Run(512, 65, 604217)]
    for text in ("", "8x208", "8:208:3", "0x3:4", "ax3:4"):
        with pytest.raises(UsageError, match=r"--runs: .* is no run"):
            read_runs(text)
    assert read_points("1632:35,32768:56") == [Point(1632, 35), Point(32768, 56)]
    for text in ("", "3", "0:1", "1:0", "a:1", "1:2:3", "1:inf", "nan:1"):
        with pytest.raises(UsageError, match=r"--epochs-at: .* is not a batch with its epochs"):
            read_points(text)


def test_what_cannot_be_calibrated_is_said() -> None:
    with pytest.raises(UsageError, match="calibrated by runs"):
        calibrate([], free)
    with pytest.raises(UsageError, match="above 0"):
        calibrate([Run(1, 64, 0)], free)
