"""Jobs on pods: nothing crosses less."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.plan.facility.placement import PlacedJob, Placement, parse_jobs, place_jobs


def check(found: Placement) -> None:
    assert [sum(parts) for parts in found.parts] == [job.nodes for job in found.jobs]
    assert all(min(parts) >= 0 for parts in found.parts)
    assert all(sum(column) <= nodes for column, nodes in zip(zip(*found.parts, strict=True), found.pods, strict=True))


def find_least_traffic(jobs: list[PlacedJob], pods: list[int]) -> float:
    """The least that crosses, by trying every way."""

    def ways(nodes: int) -> list[tuple[int, ...]]:
        return [parts for parts in product(range(nodes + 1), repeat=len(pods)) if sum(parts) == nodes]

    best = float("inf")
    for parts in product(*(ways(job.nodes) for job in jobs)):
        if all(sum(column) <= free for column, free in zip(zip(*parts, strict=True), pods, strict=True)):
            found = Placement(tuple(jobs), tuple(pods), parts, True)
            best = min(best, found.total_bytes)
    return best


small = st.tuples(
    st.lists(st.builds(PlacedJob, st.integers(1, 4), st.sampled_from([1.0, 3.0, 10.0])), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
).filter(lambda both: sum(job.nodes for job in both[0]) <= sum(both[1]))


@given(small)
@settings(max_examples=60, deadline=None)
def test_nothing_crosses_less(both: tuple[list[PlacedJob], list[int]]) -> None:
    jobs, pods = both
    found = place_jobs(jobs, pods)
    check(found)
    assert found.exact
    assert found.total_bytes == find_least_traffic(jobs, pods)


def test_the_job_with_small_gradients_is_the_one_that_is_split() -> None:
    found = place_jobs([PlacedJob(20, 5e8), PlacedJob(20, 1e6), PlacedJob(20, 5e8)], [30, 30])
    assert [sum(part > 0 for part in parts) for parts in found.parts] == [1, 2, 1]
    assert found.total_bytes == 2e6


def test_many_jobs_are_placed_well_and_it_is_said() -> None:
    found = place_jobs([PlacedJob(nodes, 1.0) for nodes in range(1, 21)], [36] * 6)
    check(found)
    assert not found.exact
    assert found.total_bytes <= 2 * 4  # as many splits as that are good, though not known to be least


@pytest.mark.parametrize(
    ("jobs", "pods", "said"),
    [
        ([PlacedJob(0, 1.0)], [4], "1 node or more"),
        ([PlacedJob(1, -1.0)], [4], "not 1 nodes and -1 bytes"),
        ([PlacedJob(5, 1.0), PlacedJob(4, 1.0)], [4, 4], "the jobs need 9 nodes, and there are 8"),
    ],
)
def test_what_cannot_be_placed_is_said(jobs: list[PlacedJob], pods: list[int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        place_jobs(jobs, pods)


def test_jobs_are_read() -> None:
    assert parse_jobs("30, 12:400,8", 1e6) == [PlacedJob(30, 1e6), PlacedJob(12, 4e8), PlacedJob(8, 1e6)]
    for text in ("", "a", "3,", "3:b", "3:4:5"):
        with pytest.raises(UsageError, match=r"--jobs: '.*' is not a job"):
            parse_jobs(text, 1.0)
