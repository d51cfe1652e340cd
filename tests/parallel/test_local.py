"""The outer optimizer of local steps, the rounds of a run, and the states that each rank has of its own."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from headway.checkpoint.pieces import Piece
from headway.core.errors import CheckpointError
from headway.parallel.local import OuterOptimizer
from headway.parallel.own_states import select_states, wrap_states
from headway.parallel.rounds import Rounds


def build_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def flatten(network: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def sum_gradients(networks: list[nn.Module]) -> None:
    """Stands in for the all-reduce: every network gets the sum of all gradients."""
    for parameters in zip(*(network.parameters() for network in networks), strict=True):
        total = sum(parameter.grad for parameter in parameters if parameter.grad is not None)
        for parameter in parameters:
            assert isinstance(total, Tensor)
            parameter.grad = total.clone()


def step_alone(network: nn.Module, images: Tensor, labels: Tensor, lr: float) -> None:
    F.cross_entropy(network(images), labels).backward()
    torch.optim.SGD(network.parameters(), lr=lr).step()
    network.zero_grad()


def train(sizes: list[int], *, every: int, lr: float = 1.0, momentum: float = 0.0, steps: int = 6) -> nn.Module:
    """Trains a network of as many ranks as there are sizes: samples of each rank in a step."""
    generator = torch.Generator().manual_seed(1)
    networks = [build_network() for _ in sizes]
    outers = [OuterOptimizer(network.named_parameters(), lr=lr, momentum=momentum) for network in networks]
    for step in range(steps):
        images = torch.randn(sum(sizes), 5, dtype=torch.float64, generator=generator)
        labels = torch.randint(3, (sum(sizes),), generator=generator)
        for outer, network, *part in zip(outers, networks, images.split(sizes), labels.split(sizes), strict=True):
            if step % every == 0:
                outer.begin_round()
            step_alone(network, *part, lr=0.3)
        if (step + 1) % every == 0:
            for outer, size in zip(outers, sizes, strict=True):
                outer.put_gradients(size / sum(sizes))
            sum_gradients(networks)
            for outer in outers:
                outer.step()
    for network in networks:
        assert torch.equal(flatten(network), flatten(networks[0]))
    return networks[0]


def test_rounds_of_one_step_are_data_parallel() -> None:
    """Also with uneven shares."""
    alone = train([9], every=1)
    torch.testing.assert_close(flatten(train([4, 3, 2], every=1)), flatten(alone), rtol=1e-12, atol=1e-12)


def test_one_rank_trains_as_without_rounds() -> None:
    torch.testing.assert_close(flatten(train([9], every=3)), flatten(train([9], every=1)), rtol=1e-12, atol=1e-12)


def test_outer_steps_are_those_of_torch() -> None:
    """Nesterov's SGD of torch on the mean of (weights before the round - weights after it)."""
    torch.manual_seed(3)
    network, other = build_network(), build_network()
    outer = OuterOptimizer(network.named_parameters(), lr=0.7, momentum=0.9)
    reference = torch.optim.SGD(other.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        outer.begin_round()
        with torch.no_grad():
            for parameter, expected in zip(network.parameters(), other.parameters(), strict=True):
                change = torch.randn_like(parameter)
                parameter += change
                expected.grad = -change
        outer.put_gradients(1.0)
        outer.step()
        reference.step()
        torch.testing.assert_close(flatten(network), flatten(other), rtol=1e-13, atol=1e-13)


def test_the_outer_gradient_points_against_the_change() -> None:
    """A step of the outer optimizer goes where the ranks went; torchft once went the other way."""
    network = build_network()
    outer = OuterOptimizer(network.named_parameters(), lr=0.7, momentum=0.9)
    outer.begin_round()
    before = flatten(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 1
    outer.put_gradients(1.0)
    assert all((parameter.grad == -1).all() for parameter in network.parameters() if parameter.grad is not None)
    outer.step()
    # The first step of Nesterov's momentum is lr x (1 + momentum) of the gradient.
    torch.testing.assert_close(flatten(network), before + 0.7 * 1.9)


def test_a_lost_rank_does_not_shorten_the_step() -> None:
    """The shares of the others sum to less than 1."""
    network = build_network()
    outer = OuterOptimizer(network.named_parameters())
    outer.begin_round()
    before = flatten(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 1
    outer.put_gradients(0.25)
    outer.step(0.25)
    torch.testing.assert_close(flatten(network), before + 1)


def test_frozen_weights_stay() -> None:
    network = build_network()
    outer = OuterOptimizer(network.named_parameters(), lr=0.7, momentum=0.9)
    outer.begin_round()
    frozen = next(iter(network.parameters()))
    before = frozen.detach().clone()
    frozen.requires_grad = False
    outer.put_gradients(1.0)
    outer.step()
    assert torch.equal(frozen, before)


def test_weights_of_the_last_meeting_are_lent_and_given_back() -> None:
    network = build_network()
    outer = OuterOptimizer(network.named_parameters())
    outer.begin_round()
    before = flatten(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 1
    after = flatten(network)
    with outer.swap_in():
        assert torch.equal(flatten(network), before)
    assert torch.equal(flatten(network), after)


def test_momentum_of_another_network_is_refused() -> None:
    outer = OuterOptimizer(build_network().named_parameters(), momentum=0.9)
    state = copy.deepcopy(outer.state())
    outer.load(state, "here")
    state.popitem()
    with pytest.raises(CheckpointError, match=r"outer momentum of '2\.bias' is missing"):
        outer.load(state, "here")


@given(first=st.integers(0, 9), length=st.integers(1, 7), more=st.integers(0, 30), every=st.integers(1, 9))
def test_rounds_cover_a_run(first: int, length: int, more: int, every: int) -> None:
    rounds = Rounds(first=first, length=length, steps=first + more)
    ends = [step for step in range(rounds.steps + 1) if not step or rounds.is_end(step)]
    assert ends[-1] == rounds.steps
    for start, end in pairwise(ends):
        assert end - start <= (length if rounds.is_alone(end) else 1)
        assert all(rounds.find_start(step) == start for step in range(start + 1, end + 1))
        assert rounds.is_due(end, every) == any(step % every == 0 for step in range(start + 1, end + 1))
    assert all(not rounds.is_due(step, every) for step in range(1, rounds.steps) if step not in ends)


@given(ranks=st.integers(1, 4), readers=st.integers(1, 4))
def test_states_of_each_rank_are_its_own_again(ranks: int, readers: int) -> None:
    states = torch.arange(float(ranks * 6)).view(ranks, 2, 3)
    wrapped = [wrap_states({"optimizer/w/momentum": one, "model/w": one}, r, ranks) for r, one in enumerate(states)]
    pieces = [one["ranks/optimizer/w/momentum"] for one in wrapped]
    assert [piece.start for piece in pieces if isinstance(piece, Piece)] == list(range(ranks))
    stored = {
        "ranks/optimizer/w/momentum": torch.cat([one.tensor for one in pieces if isinstance(one, Piece)]),
        "model/w": states[0],
    }
    for rank in range(readers):
        found = select_states(stored, rank, readers)
        assert set(found) == {"optimizer/w/momentum", "model/w"}
        expected = states[rank] if readers == ranks else states.mean(0)
        assert torch.equal(found["optimizer/w/momentum"], expected)
        assert torch.equal(found["model/w"], states[0])
