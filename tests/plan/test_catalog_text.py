"""`headway plan --cluster list`: the catalog, whatever option asks for it."""

from __future__ import annotations

import pytest
from tests._support import headway, refused

from headway.plan.cluster import load_clusters, load_devices
from headway.plan.facility.catalog import list_node_types
from headway.plan.workloads import list_workloads


@pytest.mark.parametrize(
    "asked",
    [
        ("--cluster", "list"),
        ("resnet50", "--cluster", "list"),
        ("--facility", "list"),
        ("--facility", "36", "--node", "list"),
        ("list",),
    ],
    ids=" ".join,
)
def test_the_catalog_is_printed(asked: tuple[str, ...]) -> None:
    first, other = headway("plan", *asked).out.split("Other clusters (--cluster):\n")
    assert [line.split()[0] for line in first.splitlines()[1:]] == [
        name for name in load_clusters() if name in list_node_types()
    ]
    assert {name for name in load_clusters() if f"  {name} " in other} == set(load_clusters()) - set(list_node_types())
    assert f"in place of a recipe: {', '.join(list_workloads())}.\n" in other


def test_json_of_the_catalog_has_every_name() -> None:
    found = headway("plan", "--cluster", "list", "--json").json()
    assert [one["name"] for one in found["clusters"]] == list(load_clusters())
    assert [one["name"] for one in found["clusters"] if one["node_type"]] == [
        name for name in load_clusters() if name in list_node_types()
    ]
    assert (found["networks"], found["devices"]) == (list_workloads(), list(load_devices()))


@pytest.mark.parametrize("number", ["abc", "3.5", ""])
def test_a_number_of_nodes_that_is_none_is_refused_in_our_words(number: str) -> None:
    said = refused("plan", "--facility", number, status=2)
    assert f"--facility: {number!r} is not a number of nodes. Write headway plan --facility 36; " in said
