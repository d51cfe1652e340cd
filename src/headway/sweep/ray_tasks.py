"""Workers for a sweep from a Ray cluster: Ray places them, Headway trains. Needs `pip install headway[ray]`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from headway.core.errors import UsageError
from headway.sweep.join import join_sweep


def join_from_ray(sweep: str | Path, wait_s: float = 600.0) -> int:
    """Joins a sweep with all processors and GPUs of each node of the Ray cluster, until the sweep ends.

    Call `ray.init` first. All nodes have to see the sweep's folder and the data under the same paths.

    Args:
        sweep: folder of a sweep that was started with `--joinable` or `--slots 0`.
        wait_s: seconds to wait for its coordinator.

    Returns:
        the number of nodes.

    Raises:
        UsageError: Ray is not installed, or there is no cluster.
        ray.exceptions.RayTaskError: a node cannot train; its cause says why.
    """
    try:
        ray: Any = importlib.import_module("ray")
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    except ImportError:
        raise UsageError("Ray is not installed here", fix="Install it: pip install headway[ray].") from None
    if not ray.is_initialized():
        raise UsageError("this program has not joined a Ray cluster", fix='Call ray.init(address="auto") first.')
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    # Not again by Ray: a worker that was lost has left nothing behind, and whoever wants more can join again.
    task = ray.remote(max_retries=0)(join_sweep)
    tasks = [
        task.options(
            num_cpus=node["Resources"]["CPU"],
            num_gpus=node["Resources"].get("GPU", 0),
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(Path(sweep).absolute(), None, wait_s)
        for node in nodes
    ]
    ray.get(tasks)
    return len(nodes)
