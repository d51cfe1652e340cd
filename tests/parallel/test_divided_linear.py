"""Divided layers are exact: outputs and gradients are those of the whole layers, on real ranks with uneven shares."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from torch import Tensor, nn

from headway.core.errors import UsageError
from headway.core.rows import Range, divide
from headway.parallel.divided_linear import Scheme, divide_linear_layers, find_linear_layers
from headway.parallel.parts import OwnPart, OwnParts

SAMPLES, INPUTS = 7, 11


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    out = nn.Sequential(nn.Linear(INPUTS, 9), nn.Tanh(), nn.Linear(9, 8, bias=False), nn.Tanh(), nn.Linear(8, 5))
    out = out.double()
    for parameter in out.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return out


def inputs(*middle: int) -> Tensor:
    return torch.randn(SAMPLES, *middle, INPUTS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def largest_difference(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).detach().abs().max()) if one.numel() else 0.0


def compare(rank: Rank, scheme: Scheme, middle: tuple[int, ...], patterns: tuple[str, ...]) -> dict[str, float]:
    world = rank.world
    whole, x = network(), inputs(*middle).requires_grad_()
    expected = whole(x)
    factor = torch.randn(expected.shape, generator=torch.Generator().manual_seed(8), dtype=expected.dtype)
    (expected * factor).sum().backward()
    own = copy.deepcopy(network())
    divided = divide_linear_layers(own, patterns, world.rank, world.size, scheme)
    divided.connect(world)
    divided.set_batch(SAMPLES)
    mine = slice(*divide(SAMPLES, world.size)[world.rank])
    part = x.detach()[mine].clone().requires_grad_()
    out = own(part)
    (out * factor[mine]).sum().backward()
    assert part.grad is not None
    assert x.grad is not None
    found = {
        "outputs": largest_difference(out, expected[mine]),
        "gradient of the inputs": largest_difference(part.grad, x.grad[mine]),
    }
    for name, parameter in own.named_parameters():
        reference, gradient = whole.get_parameter(name).grad, parameter.grad
        assert reference is not None
        assert gradient is not None
        if name in divided.parts.by_name:
            reference = reference[slice(*divided.parts.by_name[name].rows)]
        else:
            world.control.all_reduce(gradient).wait()
        found[name] = largest_difference(gradient, reference)
    with divided.join(), torch.no_grad():
        own.eval()
        found["joined"] = largest_difference(own(x), expected)
        assert divided.list_whole().keys() == divided.parts.by_name.keys()
    with pytest.raises(UsageError, match="is divided over the processes of the run"):
        own(part)
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.check)])
@pytest.mark.parametrize(
    ("scheme", "middle", "patterns"),
    [("all", (), ("^0$", "^2$", "^4$")), ("turns", (), ("^0$", "4")), ("turns", (3,), ("2",)), ("all", (2,), (".",))],
)
def test_divided_layers_are_the_whole_ones(
    ranks: int, scheme: Scheme, middle: tuple[int, ...], patterns: tuple[str, ...]
) -> None:
    for found in run_ranks(ranks, compare, scheme, middle, patterns):
        assert max(found.values()) <= 1e-13, found


def memory(rank: Rank, scheme: Scheme) -> int:
    """Bytes that the backward pass needs of a large layer's inputs."""
    world = rank.world
    own = nn.Sequential(nn.Linear(1000, 2, bias=False))
    divided = divide_linear_layers(own, (".",), world.rank, world.size, scheme)
    divided.connect(world)
    divided.set_batch(40)
    kept = 0

    def pack(saved: Tensor) -> Tensor:
        nonlocal kept
        kept += saved.numel() * saved.element_size() * (saved.shape[-1] == 1000 and len(saved) > 2)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        own(torch.randn(20, 1000)).sum().backward()
    return kept


def test_in_turns_no_gathered_inputs_are_kept() -> None:
    assert run_ranks(2, memory, "all") == [40 * 1000 * 4] * 2
    assert run_ranks(2, memory, "turns") == [0] * 2


def wrong_rows(rank: Rank) -> str:
    own = network()
    world = rank.world
    divided = divide_linear_layers(own, ("0",), world.rank, world.size, "all")
    divided.connect(world)
    divided.set_batch(SAMPLES)
    with pytest.raises(UsageError) as seen:
        own(inputs())
    return str(seen.value)


def test_rows_that_are_no_samples_are_refused() -> None:
    assert all("inputs of 7 rows for" in said and said.startswith("0:") for said in run_ranks(2, wrong_rows))


REFUSED: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no regular expression": (("(",), 2, "is not a regular expression"),
    "no such layer": (("^fc6$",), 2, "matches no fully connected layer.*are 0, 2, 4"),
    "too few outputs": (("4",), 6, "5 outputs cannot be divided over 6 processes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_divided_are_refused(name: str) -> None:
    patterns, ranks, said = REFUSED[name]
    with pytest.raises(UsageError, match=said):
        divide_linear_layers(network(), patterns, 0, ranks, "all")


def test_shared_weights_are_refused_and_other_classes_are_no_linear_layers() -> None:
    class Other(nn.Linear):
        pass

    shared: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Other(4, 4))
    assert find_linear_layers(shared, (".",)) == ["0", "1"]
    shared[1].weight = shared[0].weight
    with pytest.raises(UsageError, match="another layer uses the same weights"):
        divide_linear_layers(shared, ("0",), 0, 2, "all")


def test_parts_know_the_tensors_of_a_checkpoint() -> None:
    parts = OwnParts({"fc.weight": OwnPart((5, 3), Range(2, 4))})
    whole = {
        "model/fc.weight": torch.rand(5, 3),
        "optimizer/fc.weight/step": torch.tensor(4.0),
        "model/x": torch.rand(2),
    }
    cut = parts.cut(whole)
    assert cut.keys() == whole.keys()
    assert torch.equal(cut["model/fc.weight"], whole["model/fc.weight"][2:4])
    assert cut["optimizer/fc.weight/step"] == 4
    wrapped: Any = parts.wrap(dict(cut))
    assert (wrapped["model/fc.weight"].shape, wrapped["model/fc.weight"].start) == ((5, 3), 2)
    assert isinstance(wrapped["model/x"], Tensor)
