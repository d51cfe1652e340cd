"""A plan of what a user says: options as `headway plan` has them, and what of them excludes each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from headway.core.errors import UsageError
from headway.core.profile import Profile, Workload
from headway.plan.cluster import Cluster, Device, find_cluster
from headway.plan.compute import (
    MISFIT,
    ComputeEstimate,
    apply_measured_links,
    build_job,
    choose_epochs,
    estimate_from_data_sheet,
    estimate_from_profile,
    estimate_from_runs,
    estimate_node_loading,
    parse_nodes,
    parse_pairs,
    parse_points,
    parse_runs,
)
from headway.plan.convergence import EpochsLaw
from headway.plan.job_plan import JobPlan, build_plan, predict_data_growth


@final
@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a user says of a plan, as the options of `headway plan` have it; see there."""

    nodes: str | None = None
    profiles: tuple[Path, ...] = ()
    runs: str | None = None
    per_device: float | None = None
    batch: float | None = None
    accumulate: int | None = None
    spread: bool = False
    epochs_at: str | None = None
    noise_scale: float | None = None
    deadline_h: float | None = None
    price: float | None = None
    errors_at: str | None = None
    sizes_at: str | None = None
    image_bytes: float | None = None


def plan_job(workload: Workload, cluster: str, asked: PlanRequest) -> tuple[JobPlan, Cluster]:
    """The plan, and the cluster with what profiles and prices say of it.

    Raises:
        UsageError: see the functions of this file; or options that exclude each other.
    """
    where = find_cluster(cluster)
    if asked.price is not None:
        if not 0 <= asked.price < math.inf:
            raise UsageError(f"a price is 0 or more, not {asked.price:g}", where="--price")
        where = _update_node(where, cost_per_hour=asked.price)
    if asked.deadline_h is not None and not 0 < asked.deadline_h < math.inf:
        raise UsageError(f"a deadline is some hours away, not {asked.deadline_h:g}", where="--deadline")
    if asked.spread and where.between.group is None:
        what = f"{where.title} has no groups that its nodes could be spread over"
        raise UsageError(what, where="--spread", fix="Give `group` and `oversubscription` of `between` in a YAML file.")
    if asked.image_bytes is not None:
        if not 0 < asked.image_bytes < math.inf:
            raise UsageError(f"an image has some bytes, not {asked.image_bytes:g}", where="--image-kb")
        seen = workload.input.model_copy(update={"encoded_bytes": asked.image_bytes})
        workload = workload.model_copy(update={"input": seen})
    points = [] if asked.epochs_at is None else parse_points(asked.epochs_at)
    epochs, epochs_from = choose_epochs(workload, points=points, noise_scale=asked.noise_scale)
    known, where = _estimate_compute(workload, where, asked, epochs)
    if isinstance(epochs, EpochsLaw) and (epochs.error or 0.0) > MISFIT:
        warning = f"Epochs do not follow E = E_min (1 + B / B_crit): the fit is {epochs.error:.0%} off."
        known = replace(known, warnings=(*known.warnings, warning))
    job = build_job(
        workload,
        known,
        epochs,
        per_device=asked.per_device,
        batch=asked.batch,
        accumulate=asked.accumulate,
        spread=asked.spread,
    )
    nodes = parse_nodes(asked.nodes or f"1..{min(where.nodes or MOST_NODES, MOST_NODES)}")
    found = build_plan(workload, job, where, known, epochs_from, nodes, deadline_h=asked.deadline_h)
    if asked.errors_at is not None:
        fix = "Samples, and the error with so many: 1e5:0.32,1e6:0.24."
        errors = parse_pairs(asked.errors_at, "--errors-at", "a set's samples with an error", fix)
        fix = "Samples, and the parameters of the network that suits them: 1e5:2e6,1e6:8e6."
        many = (
            parse_pairs(asked.sizes_at, "--sizes-at", "a set's samples with parameters", fix) if asked.sizes_at else []
        )
        found = replace(found, grown=predict_data_growth(workload, errors, many))
    elif asked.sizes_at is not None:
        raise UsageError("sizes of networks go with --errors-at", where="--sizes-at")
    return found, where


MOST_NODES = 64
"""If nothing is said."""


def _update_node(where: Cluster, **changes: float) -> Cluster:
    return where.model_copy(update={"node": where.node.model_copy(update=changes)})


def _estimate_compute(
    workload: Workload, where: Cluster, asked: PlanRequest, epochs: EpochsLaw | float
) -> tuple[ComputeEstimate, Cluster]:
    """What a step takes, and the cluster with what profiles say of it."""
    if asked.profiles and asked.runs is not None:
        raise UsageError("a step is known by a profile or by runs, not by both", where="--runs")
    if asked.runs is not None:
        sketch = build_job(
            workload, estimate_from_data_sheet(workload, where.of), epochs, per_device=1.0, spread=asked.spread
        )
        return estimate_from_runs(parse_runs(asked.runs), sketch, where), where
    if not asked.profiles:
        return estimate_from_data_sheet(workload, where.of), where
    profiles = [Profile.read(path) for path in asked.profiles]
    alone = [one for one in profiles if one.ranks == 1]
    together = [one for one in profiles if one.ranks > 1]
    if len(alone) != 1 or len(together) > 1:
        what = f"one profile of a single process is wanted, and one more may be of several; here are {len(alone)} and"
        what += f" {len(together)}"
        raise UsageError(what, where="--profile", fix="headway doctor RECIPE writes the one, with --procs N the other.")
    for one in together:
        where = apply_measured_links(one, where)
    if where.node.images_s is None and (loads := estimate_node_loading(alone[0], where)) is not None:
        where = _update_node(where, images_s=loads)
    known = estimate_from_profile(alone[0], workload)
    doubts = {path: one.verdict.unexplained for path, one in zip(asked.profiles, profiles, strict=True)}
    warnings = [*known.warnings, *(f"{path} was not confirmed. {why}" for path, why in doubts.items() if why)]
    if alone[0].machine.get("device") == "cpu" and not isinstance(where.device, Device):  # the catalog has none
        warning = f"The profile is of a CPU, and {where.title} has {where.of.title}: this is what CPUs in their place"
        warnings.append(f"{warning} would do. Make the profile on such a device, or leave it out.")
    return replace(known, warnings=tuple(warnings)), where
