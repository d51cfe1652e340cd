"""The names of the catalog, which `headway plan` takes in place of files: `--cluster list` prints them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headway.plan.catalogs import read_catalog
from headway.plan.cluster import load_clusters, load_devices
from headway.plan.facility.catalog import list_node_types
from headway.plan.workloads import list_workloads


def format_catalog() -> str:
    """Formats all names: clusters with their titles, then networks, devices and links."""
    clusters, rooms = load_clusters(), list_node_types()
    width = max(map(len, clusters))

    def list_lines(names: Iterable[str]) -> list[str]:
        return [f"  {name:<{width}}  {clusters[name].title}" for name in names]

    return "\n".join(
        [
            "Clusters (--cluster) that are node types of a facility too (--facility 36 --node NAME):",
            *list_lines(name for name in clusters if name in rooms),
            "Other clusters (--cluster):",
            *list_lines(name for name in clusters if name not in rooms),
            f"Networks, in place of a recipe: {', '.join(list_workloads())}.",
            f"Devices for a cluster's own file: {', '.join(load_devices())}.",
            f"Links for such a file: {', '.join(read_catalog('links'))}.",
        ]
    )


def describe_catalog() -> dict[str, Any]:
    """Returns the same names as plain values for JSON."""
    rooms = list_node_types()
    clusters = [
        {"name": name, "title": cluster.title, "node_type": name in rooms} for name, cluster in load_clusters().items()
    ]
    return {
        "clusters": clusters,
        "networks": list_workloads(),
        "devices": list(load_devices()),
        "links": list(read_catalog("links")),
    }
