"""Directions: filters as long as the network's, and planes that hold what they are made of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headway.core.errors import UsageError
from headway.model import small_net
from headway.observe import directions


def nets() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, groups=1),
        nn.BatchNorm2d(5),
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        nn.Linear(7, 3),
    )


def lengths(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight.flatten(1), dim=1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-3, 1e3))
def test_every_filter_of_a_direction_is_as_long_as_the_networks(seed: int, scale: float) -> None:
    model = nets()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    found = directions.draw_direction(model, seed)
    assert found.keys() == {"0.weight", "2.weight", "3.weight"}
    for name in ("0.weight", "3.weight"):
        torch.testing.assert_close(lengths(found[name]), lengths(model.get_parameter(name).detach()))
    # [inputs, outputs / groups, ...]: output k of group g is fed by the inputs of that group.
    drawn, own = (
        one.detach().unflatten(0, (2, 2)).transpose(1, 2).flatten(0, 1)
        for one in (found["2.weight"], model.get_parameter("2.weight"))
    )
    torch.testing.assert_close(lengths(drawn), lengths(own))


def test_a_seed_is_one_draw_whatever_the_scale_and_whatever_is_frozen() -> None:
    torch.manual_seed(0)
    one, other = small_net(width=4), small_net(width=4)
    other.head.weight.requires_grad_(False)
    here, there = (directions.draw_direction(model, 7) for model in (one, other))
    assert set(here) - set(there) == {"head.weight"}
    for name in there:
        a, b = (found[name].flatten(1) / lengths(found[name])[:, None] for found in (here, there))
        torch.testing.assert_close(a, b)
    assert not torch.equal(here["head.weight"], directions.draw_direction(one, 8)["head.weight"])


def test_a_filter_of_zeros_stays_and_a_network_without_weights_is_refused() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[0] = 0
    found = directions.draw_direction(model, 0)["weight"]
    assert not found[0].any()
    assert found[1].any()
    with pytest.raises(UsageError, match="no weight to move"):
        directions.draw_direction(nn.BatchNorm2d(3), 0)


def test_a_network_is_put_back_also_after_an_error() -> None:
    model = small_net(width=4)
    before = directions.copy_state(model)
    direction = directions.draw_direction(model, 0)

    def fall() -> None:
        with directions.move_weights(model, {}, [(0.5, direction)]):
            moved = directions.copy_state(model)
            torch.testing.assert_close(moved["head.weight"], before["head.weight"] + 0.5 * direction["head.weight"])
            assert torch.equal(moved["head.bias"], before["head.bias"])
            model.layer1.norm.running_mean += 1  # type: ignore[operator]
            raise KeyError

    with pytest.raises(KeyError):
        fall()
    for name, tensor in directions.copy_state(model).items():
        assert torch.equal(tensor, before[name]), name


def test_tied_weights_move_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    direction = directions.draw_direction(model, 0)
    assert list(direction) == ["0.weight"]
    with directions.move_weights(model, {}, [(1.0, direction)]):
        torch.testing.assert_close(model[1].weight.detach(), before + direction["0.weight"])


STATES = st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=3, max_size=6)


@settings(max_examples=30, deadline=None)
@given(STATES)
def test_principal_axes_are_those_of_a_singular_value_decomposition(rows: list[list[float]]) -> None:
    matrix = torch.tensor(rows, dtype=torch.float64)
    states = [{"a": row[:2].clone(), "b": row[2:].clone()} for row in matrix]
    values = torch.linalg.svdvals(matrix)
    if values[1] < 1e-2 * values[0] or values[0] == 0:
        return
    axes = directions.fit_plane({"a": torch.zeros(2).double(), "b": torch.zeros(2).double()}, states, ["a", "b"])
    u, v = (torch.cat([axis["a"], axis["b"]]) for axis in (axes.first, axes.second))
    assert torch.stack([u @ u, v @ v, u @ v]).tolist() == pytest.approx([1, 1, 0], abs=1e-6)
    found = torch.tensor(axes.coordinates, dtype=torch.float64)
    torch.testing.assert_close(found, torch.stack([matrix @ u, matrix @ v], dim=1), atol=1e-6, rtol=1e-6)
    shares = (values[:2] ** 2 / (values**2).sum()).tolist()
    assert list(axes.shares) == pytest.approx(shares, abs=1e-6)


def test_a_plane_through_three_states_holds_all_three() -> None:
    torch.manual_seed(0)
    states = [{"a": torch.randn(5, dtype=torch.float64), "b": torch.randn(2, dtype=torch.float64)} for _ in range(3)]
    axes = directions.span_plane(*states, ["a", "b"])  # type: ignore[misc]
    assert axes.coordinates[0] == (0, 0)
    assert axes.coordinates[1][1] == 0
    for state, (x, y) in zip(states, axes.coordinates, strict=True):
        for name in state:
            torch.testing.assert_close(states[0][name] + x * axes.first[name] + y * axes.second[name], state[name])


def test_states_on_one_line_make_no_plane() -> None:
    one = {"a": torch.tensor([1.0, 2.0, 3.0])}
    line = [{"a": one["a"] * factor} for factor in (0.0, 2.0, 3.0)]
    with pytest.raises(UsageError, match="the 4 states lie on one line"):
        directions.fit_plane(one, line, ["a"])
    with pytest.raises(UsageError, match="the three states lie on one line"):
        directions.span_plane(line[0], line[1], line[2], ["a"])
    with pytest.raises(UsageError, match="the three states lie on one line"):
        directions.span_plane(one, one, line[0], ["a"])
