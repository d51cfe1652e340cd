"""Predictions: limits that are known by hand, and properties of all plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bench._plan.buckets import make_even_buckets
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.core.workload import WorkloadWindow
from headway.plan.cluster import Cluster, ClusterStorage, load_clusters
from headway.plan.convergence import EpochsLaw
from headway.plan.job import TrainingJob
from headway.plan.prediction import Prediction, estimate_storage_rates, predict
from headway.plan.scaling import find_paying_nodes, predict_scaling
from headway.plan.sensitivity import rank_sensitivities
from headway.plan.step import ComputeTime, PlannedBucket
from headway.plan.strips import SplitNetwork, SplitWindow

# Each of two ranks needs a row of 0.5 MB of the other. Nothing runs beside the exchange of a pooling.
WINDOW = WorkloadWindow(rows=8, row_bytes=500_000, kernel=3, padding=1, is_convolution=False)
SPLIT = SplitNetwork((SplitWindow(WINDOW), SplitWindow(WINDOW)))
LAW = EpochsLaw(35.0, 47_000.0, 1_600, 68_000, 0.04)


def job(**changes: Any) -> TrainingJob:
    values: dict[str, Any] = {
        "samples": 1_281_167, "encoded_bytes": 114_660.0, "compute": ComputeTime(0.015, 6.4e-4),
        "gradients": tuple(make_even_buckets(51e6)),
        "bucket_bytes": 1, "epochs": LAW, "per_device": 52.0,
    }  # fmt: skip
    return TrainingJob(**{**values, **changes})


def cluster(**changes: Any) -> Cluster:
    return load_clusters()["dgx-1"].model_copy(update=changes)


def one(asked: TrainingJob, where: Cluster, nodes: int) -> Prediction:
    return predict_scaling(asked, where, [nodes])[0]


def test_time_energy_and_efficiency_are_what_they_are_made_of() -> None:
    found = predict_scaling(job(), cluster(), [1, 16])
    first, many = found
    assert many.devices == 128
    assert many.batch == 128 * 52
    assert many.images_s == pytest.approx(many.batch / many.step.seconds)
    assert many.hours == pytest.approx(1_281_167 * LAW.predict_epochs(many.batch) / many.images_s / 3600)
    assert many.kwh == pytest.approx(16 * 2.8 * 1.4 * many.hours)
    assert many.efficiency == pytest.approx(first.hours / many.hours / 16)
    assert many.cost is None
    assert many.low_hours < many.hours < many.high_hours


def test_a_batch_for_all_shrinks_on_each_device() -> None:
    asked = job(per_device=None, batch=4096.0)
    found = predict_scaling(asked, cluster(), [1, 4, 64])
    assert [one.batch for one in found] == [4096] * 3
    assert [one.statistical for one in found] == [1, 1, 1]
    assert found[2].scaling < found[1].scaling < 1
    with pytest.raises(UsageError, match=r"a batch of 4,096 leaves 0.062 samples for each of 65,536"):
        one(asked, cluster(), 8192)


def test_more_devices_than_samples_share_images() -> None:
    """Two have a strip each of an image, and tell each other its edge."""
    asked = job(per_device=None, batch=4096.0, split=SPLIT)
    found = one(asked, cluster(), 1024)
    assert found.strips == 2
    free = one(job(per_device=None, batch=4096.0), cluster(), 1024)
    assert found.step.seconds == pytest.approx(free.step.seconds + 4 * (3.4e-6 + 0.5e6 / 120e9))  # forward and back
    assert one(asked, cluster(), 512).strips == 1


def test_loading_limits_where_it_is_slower() -> None:
    where = cluster(node=cluster().node.model_copy(update={"images_s": 1000.0}))
    found = one(job(), where, 4)
    assert (found.limit, found.images_s) == ("loading", pytest.approx(4000))


def test_storage_limits_the_first_epoch_and_what_is_not_kept() -> None:
    """Half of the set is kept: half as much is read later."""
    total = 1_281_167 * 114_660
    far = ClusterStorage(shared_gb_s=1.0, cache_gb=total / 2e9)
    first, later = estimate_storage_rates(job(), cluster(storage=far), 8)
    assert first == pytest.approx(1e9 / 114_660)
    assert later == pytest.approx(2 * first)
    found = one(job(), cluster(storage=far), 8)
    assert found.limit == "storage"
    assert found.first_images_s == pytest.approx(first)
    kept = one(job(), cluster(storage=far.model_copy(update={"cache_gb": total / 1e9 + 1})), 8)
    alone = one(job(), cluster(), 8)
    extra = 1_281_167 / first - 1_281_167 / alone.images_s
    assert kept.hours == pytest.approx(alone.hours + extra / 3600)
    assert estimate_storage_rates(job(encoded_bytes=None), cluster(storage=far), 8)[0] == float("inf")


def test_files_that_are_opened_limit_where_each_is_a_sample() -> None:
    far = ClusterStorage(opens_s=500.0, shards=False)
    assert estimate_storage_rates(job(), cluster(storage=far), 8)[0] == 500
    assert estimate_storage_rates(job(encoded_bytes=None), cluster(storage=far), 8) == (500, 500)
    assert estimate_storage_rates(job(), cluster(storage=far.model_copy(update={"shards": True})), 8)[0] == float("inf")


@given(st.floats(1e-4, 0.1), st.floats(1e-3, 1e-2), st.floats(16, 512), st.integers(1, 300))
@settings(deadline=None, max_examples=40)
def test_more_nodes_never_train_less(fixed: float, sample: float, each: float, nodes: int) -> None:
    found = predict_scaling(job(compute=ComputeTime(fixed, sample), per_device=each), cluster(), [nodes, 2 * nodes])
    assert found[1].images_s > found[0].images_s
    assert found[0].scaling == found[0].statistical == 1
    assert 0 < found[1].scaling <= 1.001
    assert found[1].statistical <= 1


BYTES = (8_196_000, *(4_000, 2_359_296, 590_000) * 20)
LAYERS = tuple(PlannedBucket(nbytes, (at + 1) / len(BYTES)) for at, nbytes in enumerate(BYTES))
"""Gradients of a network, for which the planner chooses the bucket size."""


@given(
    st.integers(1, 1024),
    st.sampled_from(["dgx-1", "p40-100gbe", "p100-50gbe"]),
    st.sampled_from([{}, {"bucket_bytes": None, "gradients": LAYERS, "per_device": 16.0}]),
)
@settings(deadline=None, max_examples=60)
def test_better_parts_never_make_it_worse(nodes: int, name: str, changes: dict[str, Any]) -> None:
    """And worse ones never better: 20 % less bandwidth or speed, more latency, jitter or fixed time."""
    for moved in rank_sensitivities(job(**changes), load_clusters()[name], nodes):
        good_when_more = moved.name not in (
            "fixed time of a step",
            "latency between nodes",
            "jitter of devices",
            "contention in a node",
        )
        better, worse = (moved.more, moved.less) if good_when_more else (moved.less, moved.more)
        assert better <= 1 + 1e-9, moved
        assert worse >= 1 - 1e-9, moved


def test_what_moves_the_answer_is_first() -> None:
    slow = load_clusters()["p40-100gbe"].model_copy(
        update={"between": load_clusters()["p40-100gbe"].between.model_copy(update={"gbit_s": 1.0})}
    )
    assert rank_sensitivities(job(), slow, 8)[0].name == "bandwidth between nodes"
    assert rank_sensitivities(job(), cluster(), 1)[0].name == "speed of a device"


def test_nodes_pay_until_the_batch_no_longer_learns() -> None:
    nodes = [2**power for power in range(11)]
    few = find_paying_nodes(job(), cluster(), nodes)
    assert few < find_paying_nodes(job(epochs=90.0), cluster(), nodes) == 1024
    tighter = replace(LAW, critical=LAW.critical / 10)
    assert find_paying_nodes(job(epochs=tighter), cluster(), nodes) < few
    assert find_paying_nodes(job(), cluster(), [1, 1024]) == few  # what lies between is tried too
    assert find_paying_nodes(job(), cluster(), [few, few]) == few


def test_a_set_smaller_than_a_step_takes_a_step_and_pays_for_no_more_nodes() -> None:
    few = job(samples=4000, epochs=1.0, per_device=64.0)
    found = one(few, cluster(), 64)
    assert found.batch == 32_768
    assert found.hours * 3600 == pytest.approx(found.step.seconds)
    assert found.images_s == pytest.approx(4000 / found.step.seconds)
    assert find_paying_nodes(few, cluster(), [1, 64]) == 4


def test_a_batch_that_does_not_divide_waits_for_the_device_with_one_more() -> None:
    even, odd = (predict(job(per_device=None, batch=batch), cluster(), 1) for batch in (16.0, 12.0))
    assert odd.devices == 8
    assert odd.step == even.step
    assert odd.images_s == pytest.approx(0.75 * even.images_s)


def test_the_band_is_wider_where_less_is_known() -> None:
    def width(**changes: Any) -> float:
        (found,) = predict_scaling(job(**changes), cluster(), [16])
        return found.high_hours / found.low_hours

    two = replace(LAW, error=None)
    narrow = replace(LAW, high=1_700.0)  # the batch lies beyond it
    assert width() < width(epochs=two)
    assert width() < width(covariance=np.diag([0.35, *[0.0] * 6]) ** 2)
    assert width() < width(epochs=narrow)
    assert width(epochs=90.0) < width()


def test_a_first_epoch_from_the_storage_limits_where_it_is_most_of_the_time() -> None:
    far = ClusterStorage(shared_gb_s=0.05, cache_gb=1000.0)
    assert one(job(epochs=2.0), cluster(storage=far), 8).limit == "storage"
    assert one(job(epochs=2000.0), cluster(storage=far), 8).limit == "computing"


def test_gradients_exchanged_less_often_make_larger_batches() -> None:
    found = one(job(accumulate=4), cluster(), 8)
    assert found.batch == 4 * 64 * 52
    assert found.images_s > one(job(), cluster(), 8).images_s


def test_oversubscription_costs_who_is_spread() -> None:
    far = cluster().between.model_copy(update={"oversubscription": 4.0, "group": 2})
    where = cluster(between=far)
    whole, apart = one(job(), where, 16), one(job(spread=True), where, 16)
    assert whole.images_s == one(job(), cluster(), 16).images_s > apart.images_s
    assert one(job(spread=True), where, 2).images_s == one(job(), where, 2).images_s


@pytest.mark.parametrize(
    ("nodes", "changes", "said"),
    [
        ([], {}, "node counts start at 1"),
        ([0, 4], {}, "node counts start at 1"),
        ([4], {"batch": 100.0}, "per device or for all devices"),
        ([4], {"per_device": None}, "per device or for all devices"),
        ([4], {"per_device": 0.5}, "--per-device: a batch has 1 to 1,000,000,000 samples, not 0.5"),
        ([4], {"per_device": float("nan")}, "not nan"),
        ([4], {"per_device": float("inf")}, "not inf"),
        ([4], {"per_device": None, "batch": 0.0}, "--batch: a batch has 1 to 1,000,000,000 samples, not 0"),
        ([4], {"per_device": 1e300}, "not 1e\\+300"),
        ([4], {"compute": ComputeTime(0.0, 0.0)}, "takes no time"),
        ([200_000], {}, "up to 1,000,000 devices"),
    ],
)
def test_what_cannot_be_planned_is_said(nodes: list[int], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        predict_scaling(job(**changes), cluster(), nodes)


def test_no_more_nodes_than_there_are() -> None:
    with pytest.raises(UsageError, match=r"has 4 nodes, not 8. Write --nodes 1..4"):
        predict_scaling(job(), cluster(nodes=4), [8])
