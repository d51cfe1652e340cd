"""A plan of what a user says: options as `headway plan` has them, and what of them excludes each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from headway.core.errors import UsageError
from headway.core.profile import Profile
from headway.core.workload import Workload
from headway.plan.ask import (
    MISFIT,
    Known,
    epochs_of,
    job_of,
    links_of,
    loading_of,
    of_device,
    of_profile,
    of_runs,
    read_nodes,
    read_pairs,
    read_points,
    read_runs,
)
from headway.plan.cluster import Cluster, Device, cluster_of
from headway.plan.convergence import Epochs
from headway.plan.report import Plan, grown, plan


@final
@dataclass(frozen=True, kw_only=True)
class Asked:
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


def planned(workload: Workload, cluster: str, asked: Asked) -> tuple[Plan, Cluster]:
    """The plan, and the cluster with what profiles and prices say of it.

    Raises:
        UsageError: see the functions of this file; or options that exclude each other.
    """
    where = cluster_of(cluster)
    if asked.price is not None:
        if not 0 <= asked.price < math.inf:
            raise UsageError(f"a price is 0 or more, not {asked.price:g}", where="--price")
        where = _with_node(where, cost_per_hour=asked.price)
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
    points = [] if asked.epochs_at is None else read_points(asked.epochs_at)
    epochs, epochs_from = epochs_of(workload, points=points, noise_scale=asked.noise_scale)
    known, where = _known(workload, where, asked, epochs)
    if isinstance(epochs, Epochs) and (epochs.error or 0.0) > MISFIT:
        warning = f"Epochs do not follow E = E_min (1 + B / B_crit): the fit is {epochs.error:.0%} off."
        known = replace(known, warnings=(*known.warnings, warning))
    job = job_of(
        workload,
        known,
        epochs,
        per_device=asked.per_device,
        batch=asked.batch,
        accumulate=asked.accumulate,
        spread=asked.spread,
    )
    nodes = read_nodes(asked.nodes or f"1..{min(where.nodes or MOST_NODES, MOST_NODES)}")
    found = plan(workload, job, where, known, epochs_from, nodes, deadline_h=asked.deadline_h)
    if asked.errors_at is not None:
        fix = "Samples, and the error with so many: 1e5:0.32,1e6:0.24."
        errors = read_pairs(asked.errors_at, "--errors-at", "a set's samples with an error", fix)
        fix = "Samples, and the parameters of the network that suits them: 1e5:2e6,1e6:8e6."
        many = (
            read_pairs(asked.sizes_at, "--sizes-at", "a set's samples with parameters", fix) if asked.sizes_at else []
        )
        found = replace(found, grown=grown(workload, errors, many))
    elif asked.sizes_at is not None:
        raise UsageError("sizes of networks go with --errors-at", where="--sizes-at")
    return found, where


MOST_NODES = 64
"""If nothing is said."""


def _with_node(where: Cluster, **changes: float) -> Cluster:
    return where.model_copy(update={"node": where.node.model_copy(update=changes)})


def _known(workload: Workload, where: Cluster, asked: Asked, epochs: Epochs | float) -> tuple[Known, Cluster]:
    """What a step takes, and the cluster with what profiles say of it."""
    if asked.profiles and asked.runs is not None:
        raise UsageError("a step is known by a profile or by runs, not by both", where="--runs")
    if asked.runs is not None:
        sketch = job_of(workload, of_device(workload, where.of), epochs, per_device=1.0, spread=asked.spread)
        return of_runs(read_runs(asked.runs), sketch, where), where
    if not asked.profiles:
        return of_device(workload, where.of), where
    profiles = [Profile.read(path) for path in asked.profiles]
    alone = [one for one in profiles if one.ranks == 1]
    together = [one for one in profiles if one.ranks > 1]
    if len(alone) != 1 or len(together) > 1:
        what = f"one profile of a single process is wanted, and one more may be of several; here are {len(alone)} and"
        what += f" {len(together)}"
        raise UsageError(what, where="--profile", fix="headway doctor RECIPE writes the one, with --procs N the other.")
    for one in together:
        where = links_of(one, where)
    if where.node.images_s is None and (loads := loading_of(alone[0], where)) is not None:
        where = _with_node(where, images_s=loads)
    known = of_profile(alone[0], workload)
    doubts = {path: one.verdict.unexplained for path, one in zip(asked.profiles, profiles, strict=True)}
    warnings = [*known.warnings, *(f"{path} was not confirmed. {why}" for path, why in doubts.items() if why)]
    if alone[0].machine.get("device") == "cpu" and not isinstance(where.device, Device):  # the catalog has none
        warning = f"The profile is of a CPU, and {where.title} has {where.of.title}: this is what CPUs in their place"
        warnings.append(f"{warning} would do. Make the profile on such a device, or leave it out.")
    return replace(known, warnings=tuple(warnings)), where
