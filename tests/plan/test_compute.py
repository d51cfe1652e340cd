"""Compute estimates from profiles, runs and data sheets, and the job that is built from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bench._plan.buckets import make_even_buckets
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doctor._profile import profile
from tests.plan._workload import workload

from headway.core import collectives
from headway.core.errors import UsageError
from headway.core.profile import JointTiming, PipelineSide, Profile, StageCeiling
from headway.doctor.throughput_model import ThroughputModel
from headway.plan.calibration import MeasuredRun
from headway.plan.cluster import load_clusters
from headway.plan.compute import (
    apply_measured_links,
    estimate_from_data_sheet,
    estimate_from_profile,
    estimate_from_runs,
    estimate_node_loading,
)
from headway.plan.convergence import ConvergencePoint, EpochsLaw
from headway.plan.job import build_job, choose_epochs
from headway.plan.losses import load_priors
from headway.plan.parsing import parse_nodes, parse_points, parse_runs
from headway.plan.prediction import get_algorithms, predict, predict_job_step
from headway.plan.roofline import PEAK_SHARE
from headway.plan.step import GPU_ALGORITHMS, NCCL_ALGORITHMS, ComputeTime, list_gradients


def test_what_the_exchange_takes_is_no_computing() -> None:
    cluster = load_clusters()["p40-100gbe"]
    sketch = replace(
        build_job(workload(), estimate_from_data_sheet(workload(), cluster.device_spec), 10.0, per_device=64.0),
        gradients=tuple(make_even_buckets(4e9)), bucket_bytes=1, wire_ratio=0.5,
    )  # fmt: skip
    true = ComputeTime(0.01, 3e-3)
    there = replace(sketch, compute=true, losses=load_priors("field").losses)
    seconds = predict_job_step(there, cluster, cluster.build_network(16), 64).seconds
    assert seconds > 1.2 * true.seconds(64)
    found = estimate_from_runs([MeasuredRun(128, 64, 128 * 64 / seconds)], sketch, cluster)
    assert found.basis == "runs"
    # Whose software ran is not known: NCCL's own algorithms are, unless the cluster names others.
    planned = build_job(workload(), found, 10.0)
    assert get_algorithms(planned, cluster) == NCCL_ALGORITHMS
    assert get_algorithms(sketch, cluster) == GPU_ALGORITHMS
    assert get_algorithms(planned, cluster.model_copy(update={"algorithms": ("tree",)})) == ("tree",)
    assert found.compute.seconds(64) == pytest.approx(true.seconds(64), rel=0.02)
    assert found.warnings == ()
    with pytest.raises(UsageError, match="no device explains all of these runs: 8x32 gave 50,000 images/s, and"):
        estimate_from_runs([MeasuredRun(8, 32, 50_000.0), MeasuredRun(8, 64, 20.0)], sketch, cluster)
    torn = estimate_from_runs([MeasuredRun(8, 64, 1000.0), MeasuredRun(8, 64, 1300.0)], sketch, cluster)
    assert torn.warnings[0].startswith("One fit does not explain all runs: 8x64 gave 1,000 images/s, and ")
    assert found.covariance is not None
    assert torn.covariance is not None
    assert torn.covariance[0, 0] > 0.13**2
    with pytest.raises(UsageError, match="12 devices do not fill nodes of 8"):
        estimate_from_runs([MeasuredRun(12, 64, 100.0)], sketch, cluster)


def like(found: Profile, **changes: Any) -> Profile:
    return found.model_copy(update={"multiply_adds": workload().forward_multiply_adds, **changes})


def on_gpu(found: Profile, **changes: Any) -> Profile:
    return like(found, machine={"usable_cores": 2, "device": "Tesla V100-SXM2-16GB"}, **changes)


def test_a_profile_gives_the_loop_it_measured() -> None:
    found = on_gpu(profile())
    known = estimate_from_profile(found, workload())
    loop = sum(one.seconds for one in found.ceilings if one.side == "loop")
    assert known.basis == "profile"
    assert known.compute.seconds(found.batch) == pytest.approx(found.batch * loop)
    assert 0 <= known.compute.fixed_s < known.compute.seconds(found.batch)
    several = like(found, launch={"1": 0.5, "50": 0.012, "100": 0.021})
    told = estimate_from_profile(several, workload()).compute
    assert told.seconds(found.batch) == pytest.approx(found.batch * loop)
    transform = next(one.seconds for one in found.ceilings if one.stage == "transform")
    assert told.sample_s == pytest.approx(transform + 0.009 / 50)  # of the two largest batches


def test_a_profile_of_another_network_or_of_several_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="multiply-adds per image, the workload photos has 4,001,000,000"):
        estimate_from_profile(like(profile(), multiply_adds=10**6), workload())
    with pytest.raises(UsageError, match="measures 2 processes together"):
        estimate_from_profile(like(profile(), ranks=2), workload())


def test_a_profile_says_what_a_machine_loads() -> None:
    found, cluster = on_gpu(profile()), load_clusters()["dgx-1"]
    fit = found.threads
    assert fit is not None
    with_cores = [
        cluster.model_copy(update={"node": cluster.node.model_copy(update={"cores": cores})}) for cores in (8, 16)
    ]
    assert estimate_node_loading(found, with_cores[0]) == pytest.approx(8 / (fit.serial_s + fit.parallel_s))
    assert estimate_node_loading(found, with_cores[1]) == pytest.approx(8 / (fit.serial_s + fit.parallel_s / 2))
    quiet = like(found, ceilings=tuple(one for one in found.ceilings if one.side != "input"))
    assert estimate_node_loading(quiet, cluster) is None


@given(st.floats(1e-5, 1e-2), st.floats(1e-5, 1e-2), st.floats(1, 2), st.floats(1, 2), st.floats(0, 1e-3))
@settings(deadline=None, max_examples=50)
def test_a_processor_that_loads_and_trains_is_as_slow_as_the_doctor_says(
    loader: float, loop: float, loader_slower: float, loop_slower: float, stall: float
) -> None:
    together = JointTiming(
        input_alone=loader,
        loop_alone=loop,
        input_beside=loader * loader_slower,
        loop_beside=loop * loop_slower,
        cores=2,
    )
    parts: list[tuple[str, PipelineSide, float]] = [
        ("decode", "input", loader), ("compute", "loop", loop), ("evaluate", "stall", stall)
    ]  # fmt: skip
    ceilings = [
        StageCeiling(stage=stage, side=side, resource="host", seconds=took, how="") for stage, side, took in parts
    ]
    model = ThroughputModel.from_ceilings(ceilings, together)
    found = like(
        profile(machine={"device": "cpu"}),
        ceilings=tuple(ceilings),
        together=together,
        predicted=model.predict_images_s(),
    )
    computing = found.batch / estimate_from_profile(found, workload()).compute.seconds(found.batch)
    loading = estimate_node_loading(found, load_clusters()["dgx-1"].model_copy(update={"devices": 1}))
    assert loading is not None
    assert min(computing, loading) == pytest.approx(model.predict_images_s(stalls=False))


def test_values_that_are_read_of_each_sample_grow_with_the_batch() -> None:
    sync = StageCeiling(stage="sync", side="loop", resource="device", seconds=2e-3, how="")
    slow = on_gpu(profile(), ceilings=(*(one for one in profile().ceilings if one.stage != "sync"), sync))
    fixed, each = (
        estimate_from_profile(like(slow, facts={"syncs a step": reads}), workload()).compute for reads in (3.0, 128.0)
    )
    assert each.seconds(128) == pytest.approx(fixed.seconds(128))
    assert each.seconds(256) - fixed.seconds(256) == pytest.approx(128 * 2e-3)


def test_what_stops_a_run_is_as_the_doctor_measured_it() -> None:
    found = on_gpu(profile(), facts={"evaluate seconds": 80.0, "checkpoint seconds": 5.0})
    known, where = estimate_from_profile(found, workload()), load_clusters()["dgx-1"]
    job = build_job(workload(), known, 10.0)
    assert (job.evaluation_s, job.checkpoint_s) == (80, 5)
    assert job.checkpoints == workload().run.checkpoints > 0
    free = replace(job, evaluation_s=0.0, checkpoint_s=0.0)
    stopped, freed = (predict(one, where, 2).hours * 3600 for one in (job, free))
    assert stopped - freed == pytest.approx(job.evaluations * 80 / 16 + job.checkpoints * 5)


def test_a_profile_of_ranks_says_what_they_tell_each_other() -> None:
    facts = {"exchange bytes/s": 2e9, "exchange latency seconds": 6e-4}
    facts |= {f"rank {rank} seconds a step": 1 + 0.01 * rank for rank in range(4)}
    found = apply_measured_links(like(profile(), ranks=4, facts=facts), load_clusters()["dgx-1"])
    assert found.inside.gb_s == pytest.approx(2 * 1.5)
    waited = facts | {"exchange alone seconds a step": 2.4e-3}  # a quarter is latency
    assert apply_measured_links(
        like(profile(), ranks=4, facts=waited), load_clusters()["dgx-1"]
    ).inside.gb_s == pytest.approx(4)
    assert found.inside.latency_us == pytest.approx(100)
    assert found.jitter == pytest.approx(0.0127, rel=0.01)
    one = load_clusters()["dgx-1"].model_copy(update={"devices": 4, "inside": found.inside})
    ring = collectives.predict_cost("ring", one.build_network(1))
    assert ring.latency_s == pytest.approx(6e-4)
    with pytest.raises(UsageError, match="no exchange between processes"):
        apply_measured_links(profile(), load_clusters()["dgx-1"])


def test_a_data_sheet_gives_a_share_of_its_peak() -> None:
    known = estimate_from_data_sheet(workload(), load_clusters()["dgx-1-p100"].device_spec)
    flops = 6 * workload().forward_multiply_adds
    assert known.compute.sample_s == pytest.approx(flops / (9.3e12 * PEAK_SHARE["fp32"]), rel=0.01)
    assert known.basis == "data sheet"
    assert "9.3 TFLOPS" in known.how
    assert [text[:22] for text in known.warnings] == ["No device was measured"]
    assert (
        "989 TFLOPS in mixed precision"
        in estimate_from_data_sheet(workload(), load_clusters()["dgx-h100"].device_spec).warnings[1]
    )
    assert (
        "80% of 156 TFLOPS (TF32)" in estimate_from_data_sheet(workload(), load_clusters()["dgx-a100"].device_spec).how
    )
    few = workload(convolutions=2)
    assert estimate_from_data_sheet(few, load_clusters()["dgx-1"].device_spec).compute.fixed_s < known.compute.fixed_s


def test_epochs_come_from_the_best_there_is() -> None:
    recipe, _ = choose_epochs(workload())
    assert recipe == 10.0
    guessed, said = choose_epochs(workload(), noise_scale=320)
    assert isinstance(guessed, EpochsLaw)
    assert guessed.predict_epochs(32) == pytest.approx(10)
    assert "noise scale of 320" in said
    fitted, said = choose_epochs(workload(), points=[ConvergencePoint(32, 10), ConvergencePoint(320, 20)])
    assert isinstance(fitted, EpochsLaw)
    assert fitted.predict_epochs(320) == pytest.approx(20)
    assert "2 batches" in said
    one, said = choose_epochs(workload(), points=[ConvergencePoint(64, 12)])
    assert one == 12
    assert "whatever the batch" in said
    with pytest.raises(UsageError, match="several batches of --epochs-at"):
        choose_epochs(workload(), points=[ConvergencePoint(32, 10), ConvergencePoint(320, 20)], noise_scale=5)
    known = workload(name="imagenet-resnet50")
    lars = known.model_copy(
        update={
            "run": known.run.model_copy(update={"samples": 1_281_167}),
            "step": known.step.model_copy(
                update={"update": known.step.update.model_copy(update={"optimizer": "lars"})}
            ),
        }
    )
    law, said = choose_epochs(lars)
    assert isinstance(law, EpochsLaw)
    assert "official" in said
    assert choose_epochs(known)[0] == 10.0  # not on ImageNet, nor by LARS


def test_a_job_is_the_workload() -> None:
    sheet = estimate_from_data_sheet(workload(), load_clusters()["dgx-1"].device_spec)
    job = build_job(workload(), sheet, 10.0)
    assert job.per_device == 32
    assert job.batch is None
    assert job.backward == pytest.approx(2 / 3)
    assert list(job.gradients) == list_gradients(workload())
    assert len(job.split.windows) == 10
    assert build_job(workload(), sheet, 10.0, batch=512).per_device is None


def test_micro_batches_of_the_recipe_stay() -> None:
    known = workload()
    micro = known.model_copy(update={"step": known.step.model_copy(update={"micro_batch": 10})})
    sheet = estimate_from_data_sheet(known, load_clusters()["dgx-1"].device_spec)
    job = build_job(micro, sheet, 10.0)
    assert (job.per_device, job.accumulate) == (8, 4)  # as training splits 32
    assert build_job(micro, sheet, 10.0, accumulate=2).accumulate == 2


def test_images_that_grow_take_what_they_take_in_the_mean() -> None:
    known = workload()
    half = known.run.phases[0].model_copy(update={"steps": 31_250, "forward_multiply_adds": 2_000_500_000})
    full = half.model_copy(update={"forward_multiply_adds": 4_001_000_000})
    grows = known.model_copy(update={"run": known.run.model_copy(update={"phases": (half, full)})})
    sheet = estimate_from_data_sheet(known, load_clusters()["dgx-1"].device_spec)
    assert build_job(grows, sheet, 10.0).compute.sample_s == pytest.approx(0.75 * sheet.compute.sample_s)


def test_nodes_are_read() -> None:
    assert parse_nodes("1..64") == [1, 2, 4, 8, 16, 32, 64]
    assert parse_nodes("3..20") == [3, 6, 12, 20]
    assert parse_nodes("8") == [8]
    assert parse_nodes("1, 2,130") == [1, 2, 130]
    for text in ("", "0", "a", "4..2", "0..4", "1,-2", "1..", "2.5"):
        with pytest.raises(UsageError, match=r"--nodes: .* is not a list of node counts"):
            parse_nodes(text)


def test_runs_and_points_are_read() -> None:
    assert parse_runs("8x208:11105, 512x65:604217") == [MeasuredRun(8, 208, 11105), MeasuredRun(512, 65, 604217)]
    for text in ("", "8x208", "8:208:3", "0x3:4", "ax3:4"):
        with pytest.raises(UsageError, match=r"--runs: .* is not a measured run"):
            parse_runs(text)
    assert parse_points("1632:35,32768:56") == [ConvergencePoint(1632, 35), ConvergencePoint(32768, 56)]
    for text in ("", "3", "0:1", "1:0", "a:1", "1:2:3", "1:inf", "nan:1"):
        with pytest.raises(UsageError, match=r"--epochs-at: .* is not a batch with its epochs"):
            parse_points(text)
