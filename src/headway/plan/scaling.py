"""Predictions over several node counts: efficiencies, error bands, and the most nodes that still pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from headway.core.errors import UsageError
from headway.plan.cluster import Cluster
from headway.plan.job import TrainingJob
from headway.plan.prediction import Prediction, predict
from headway.plan.sensitivity import compute_band

# More nodes pay while the speed grows at least as their number to this power: twice the nodes, 1.41 times as fast.
SPEEDUP_EXPONENT = 0.5
MAX_DEVICES, MAX_SAMPLES = 10**6, 10**9


def predict_scaling(job: TrainingJob, cluster: Cluster, nodes: Sequence[int]) -> list[Prediction]:
    """Predicts the run for each node count, ascending. Efficiencies are relative to the smallest count.

    Raises UsageError if a node count or the batch is out of range, or the batch has too few samples for the devices.
    """
    counts = sorted(set(nodes))
    if not counts or counts[0] < 1:
        raise UsageError("node counts start at 1", where="--nodes", fix="Write --nodes 1..64, or --nodes 1,2,4.")
    if counts[-1] * cluster.devices > MAX_DEVICES:
        fix = f"Write --nodes 1..{MAX_DEVICES // cluster.devices}."
        raise UsageError(f"a plan covers up to {MAX_DEVICES:,} devices", where="--nodes", fix=fix)
    if cluster.between is None and counts[-1] > 1:
        fix = "Write --nodes 1, or give the cluster a link `between:` its nodes."
        raise UsageError(f"{cluster.title} is one node, not {counts[-1]}", where="--nodes", fix=fix)
    if cluster.nodes is not None and counts[-1] > cluster.nodes:
        problem = f"{cluster.title} has {cluster.nodes} nodes, not {counts[-1]}"
        raise UsageError(problem, where="--nodes", fix=f"Write --nodes 1..{cluster.nodes}.")
    if (job.per_device is None) == (job.batch is None):
        fix = "Give --per-device or --batch, not both."
        raise UsageError("the batch is set per device or for all devices together", where="--per-device", fix=fix)
    for name, value in (("--per-device", job.per_device), ("--batch", job.batch)):
        if value is not None and not 1 <= value <= MAX_SAMPLES:
            raise UsageError(f"a batch has 1 to {MAX_SAMPLES:,} samples, not {value:g}", where=name)
    if not job.compute.seconds(1.0) > 0:
        fix = "Write the workload anew: headway train RECIPE --dry-run."
        raise UsageError("a step of this workload takes no time: no layer of it computes anything", fix=fix)
    first, *_ = planned = [predict(job, cluster, count) for count in counts]
    predictions = []
    for one in planned:
        low, high = compute_band(job, cluster, one)
        scaling = one.images_s / one.nodes / (first.images_s / first.nodes)
        predictions.append(
            replace(one, scaling=scaling, statistical=first.epochs / one.epochs, low_hours=low, high_hours=high)
        )
    return predictions


def predict_within_node(job: TrainingJob, cluster: Cluster) -> list[Prediction]:
    """Predicts the run on 1, 2, 4, ... devices of one node, and on all. Efficiencies are relative to one device.

    Counts for which the batch has too few samples are left out.
    """
    counts = sorted({*(1 << power for power in range(cluster.devices.bit_length())), cluster.devices})
    found: list[Prediction] = []
    for count in counts:
        part = cluster.model_copy(update={"devices": count})
        if count > cluster.devices or job.split_batch(count) < 1:
            continue
        (one,) = predict_scaling(job, part, [1])
        first = found[0] if found else one
        found.append(replace(one, scaling=one.images_s / count / first.images_s, statistical=first.epochs / one.epochs))
    return found


def find_paying_devices(predictions: Sequence[Prediction]) -> int:
    """Finds the most devices of a node that still pay, among predictions on more and more of them."""
    best, *others = predictions
    for one in others:
        if math.log(best.hours / one.hours) < SPEEDUP_EXPONENT * math.log(one.devices / best.devices):
            break
        best = one
    return best.devices


def find_paying_nodes(job: TrainingJob, cluster: Cluster, nodes: Sequence[int]) -> int:
    """Finds the most nodes that still pay: see `SPEEDUP_EXPONENT`; and the batch must not exceed the training set.

    Args:
        nodes: counts to try. Doublings between two counts are tried too.
    """
    counts = sorted(set(nodes))
    for low, high in pairwise(tuple(counts)):
        counts += [low << power for power in range(1, (high - 1).bit_length()) if low << power < high]
    best, *others = (predict(job, cluster, count) for count in sorted(counts))
    for one in others:
        speedup, growth = best.hours / one.hours, one.nodes / best.nodes
        if one.batch > job.samples or math.log(speedup) < SPEEDUP_EXPONENT * math.log(growth):
            break
        best = one
    return best.nodes


def find_nodes_in_time(
    job: TrainingJob, cluster: Cluster, nodes: Sequence[int], deadline_h: float | None, *, surely: bool
) -> int | None:
    """Finds the fewest nodes that keep a deadline; also between the counts to try. None: no deadline, or none does.

    Args:
        surely: the upper end of the band has to keep it.
    """
    if deadline_h is None:
        return None

    def keeps(count: int) -> bool:
        (found,) = predict_scaling(job, cluster, [count])
        return (found.high_hours if surely else found.hours) <= deadline_h

    late = 0
    for count in sorted(set(nodes)):
        if not keeps(count):
            late = count
            continue
        # More nodes of a neighbourhood need less time: halve the distance to the largest count that is late.
        while count - late > 1:
            middle = (late + count) // 2
            count, late = (middle, late) if keeps(middle) else (count, middle)
        return count
    return None
