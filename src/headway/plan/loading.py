"""Loading speed of a node for which neither a profile nor the user gives one: published, or assumed from its cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headway.core.workload import Workload
from headway.plan.calibration import MeasuredRun
from headway.plan.cluster import Cluster
from headway.plan.job import TrainingJob
from headway.plan.prediction import estimate_loader_rate, estimate_storage_rates

# Million source pixels that a core reads, decodes, crops and resizes in a second: OpenCV in PyTorch's DataLoader, 1,589
# images/s of 194,195 pixels on 2 cores of an EPYC (docs/claims.md, bench.input). Headway's own loader is 3.9 times as
# fast there, and DGX-1's cores of 2016 are a third as fast in the deck (catalog/clusters.yaml).
CORE_MPIXELS_S = 154.0
# Standard deviations of the logarithm of a loading speed: the deck's range of 10,000 to 15,000 images/s is the 90 % of
# the first, and the two ratios above are within the 90 % of the second.
PUBLISHED_ERROR, ASSUMED_ERROR = 0.14, 0.75


def complete_loading(workload: Workload, cluster: Cluster) -> tuple[Cluster, str]:
    """Completes a cluster by the images/s that its CPUs load. Returns (cluster, source in words).

    The cluster stays as it is, and the source is empty, if it has a loading speed, or nothing tells one: neither the
    pixels of an image nor the cores are known, or the device itself crops decoded images.
    """
    node, pixels = cluster.node, workload.input.source_pixels
    if node.images_s is not None or not pixels or "random crop" in workload.input.on_device:
        return cluster, ""
    if node.decode_mpixels_s is not None:
        mpixels_s, error = node.decode_mpixels_s, PUBLISHED_ERROR
        source = "loading as published for such a node"
    elif node.cores is not None:
        mpixels_s, error = node.cores * CORE_MPIXELS_S, ASSUMED_ERROR
        source = f"loading assumed: {CORE_MPIXELS_S:g} million pixels/s on each of {node.cores} cores"
    else:
        return cluster, ""
    changes = {"images_s": mpixels_s * 1e6 / pixels, "loading_error": error}
    return cluster.model_copy(update={"node": node.model_copy(update=changes)}), source


def lift_exceeded_limits(job: TrainingJob, cluster: Cluster, runs: Sequence[MeasuredRun]) -> tuple[Cluster, str]:
    """Lifts the limits of loading and storage that measured runs exceeded. Returns (cluster, what was lifted in words).

    Such a run had another input pipeline than the published or assumed one, or none.
    """
    fastest = max(run.images_s / max(1, run.ranks // cluster.devices) for run in runs)
    # Storage of one node; the one that all nodes share is a fact of the cluster, not of a node.
    own = cluster.model_copy(update={"storage": cluster.storage.model_copy(update={"shared_gb_s": None})})
    loads = fastest <= estimate_loader_rate(cluster, 1)
    # Runs may have read from a warm cache.
    reads = fastest <= estimate_storage_rates(replace(job, batch=1.0, per_device=None), own, 1)[1]
    lifted = [name for name, holds in (("loading", loads), ("storage", reads)) if not holds]
    changes: dict[str, object] = {}
    if not loads:
        changes["node"] = cluster.node.model_copy(update={"images_s": None})
    if not reads:
        changes["storage"] = cluster.storage.model_copy(update={"node_gb_s": None, "opens_s": None})
    verb, it = ("are", "they") if len(lifted) == 2 else ("is", "it")
    text = (
        f"{' and '.join(lifted)} {verb} taken not to limit, as the runs exceed what {it} would allow" if lifted else ""
    )
    return cluster.model_copy(update=changes), text
