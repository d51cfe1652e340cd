"""A place: as many ranks as its grid has, on one host unless the recipe asks for several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from tests.comm._ranks import Rank, run_ranks
from torch import nn

from headway.comm.comm_recipe import CommRecipe
from headway.core.errors import UsageError
from headway.core.launcher_environment import LaunchedProcess
from headway.core.world import World
from headway.launch.ranks import Ranks
from headway.model.gates import SwitchGate
from headway.model.mixture import MixtureOfExperts
from headway.parallel.parallel_recipe import AnyParallelRecipe
from headway.parallel.place import Place
from headway.setup.divide_layers import divide_layers


def test_a_grid_has_as_many_ranks_as_its_place() -> None:
    with pytest.raises(UsageError, match="a grid of 2 x 1 needs 2 ranks, and there are 1"):
        Place.create(World.create_single(torch.device("cpu")), (2, 1))


def join_place(rank: Rank, across_hosts: bool) -> tuple[int, ...] | str:
    try:
        return Place.join(rank.world, (2, 1), across_hosts=across_hosts).ranks.ranks
    except UsageError as error:
        return str(error)


def wait_for_all(rank: Rank) -> list[set[str]]:
    """What the rank has waited for after each operation."""
    place, plain = Place.create(rank.world, (2, 1)), rank.world.create_group(name="plain")
    x, out, took = torch.ones(2), torch.empty(2), list[set[str]]()
    for wait in (
        lambda: place.lines[0].all_to_all(out, x).wait(),
        lambda: place.ranks.all_reduce(x).wait(),
        lambda: place.ranks.all_reduce(x).wait("statistics"),
        # Alone in its line, and a group whose waits are none of the network's.
        lambda: place.lines[1].all_to_all(out, x).wait(),
        lambda: plain.all_reduce(x).wait(),
    ):
        wait()
        took.append(set(rank.world.waits.take()))
    return took


def test_waits_count_as_what_the_group_or_the_caller_says() -> None:
    expected = [{"halos"}, {"samples of a place"}, {"statistics"}, set(), set()]
    assert run_ranks(2, wait_for_all) == [expected, expected]


def test_a_place_lies_on_one_host() -> None:
    """Unless asked for: two hosts of two ranks have two places, whatever their numbers; two of three do not."""
    assert run_ranks(4, join_place, False, hosts=(0, 1, 0, 1)) == [(0, 2), (1, 3), (0, 2), (1, 3)]
    said = run_ranks(4, join_place, False, hosts=(0, 0, 0, 1))
    assert all("the 2 processes that share an image lie on several hosts" in str(one) for one in said)
    assert run_ranks(4, join_place, True, hosts=(0, 0, 0, 1)) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def connect_divided(rank: Rank, asked: dict[str, Any]) -> str:
    recipe: AnyParallelRecipe = TypeAdapter(AnyParallelRecipe).validate_python(asked)
    network = nn.ModuleDict({"towers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    network["mixture"] = MixtureOfExperts(2, 2, experts=2, gate=SwitchGate(2, 2))
    launched = LaunchedProcess(rank.rank, rank.size, 0, 1, None, None, "headway")
    ranks = Ranks(CommRecipe(), launched, None)
    divided = divide_layers(recipe, network, torch.optim.SGD(network.parameters()), ranks=ranks)
    assert divided is not None
    try:
        divided.connect(rank.world)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["experts", "towers"])
def test_experts_and_towers_lie_on_one_host(strategy: str) -> None:
    """Unless asked for: places are runs of ranks."""
    assert run_ranks(4, connect_divided, {"strategy": strategy}, hosts=(0, 0, 1, 1)) == [""] * 4
    said = run_ranks(2, connect_divided, {"strategy": strategy}, hosts=(0, 1))
    assert all(f"the 2 processes that share the {strategy}" in str(one) for one in said)
    assert all("set parallel.across_hosts to true" in str(one) for one in said)
    assert run_ranks(2, connect_divided, {"strategy": strategy, "across_hosts": True}, hosts=(0, 1)) == [""] * 2
