"""Towers on several ranks give the bits of one process, and refuse by name what cannot be divided."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from headway import model
from headway.core.errors import UsageError
from headway.model.batch_norm import GhostBatchNorm
from headway.parallel.tower_modules import find_towers
from headway.parallel.towers import Towers, divide_towers

MATCH = r"^towers\.(\d+)"
SAMPLES = 4


def run_step(forward: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    outputs = forward(x).float()
    loss = F.cross_entropy(outputs, torch.arange(len(x)) % outputs.shape[1])
    loss.backward()
    return outputs.detach(), loss.detach()


def divide(rank: Rank, network: nn.Module) -> Towers:
    towers = divide_towers(network, MATCH, rank.world.rank, rank.world.size)
    towers.connect(rank.world)
    return towers


def compare(
    rank: Rank, network: nn.Module, x: Tensor, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> dict[str, float]:
    """Largest differences to one process, of what this rank has; what it must not have is infinitely far off."""
    whole = copy.deepcopy(network)
    with context():
        expected = run_step(whole, x)
        towers = divide(rank, network)
        outputs = run_step(lambda x: towers.run(network, x), x)
    found = {name: differ(*pair) for name, *pair in zip(("outputs", "loss"), outputs, expected, strict=True)}
    for name, parameter in network.named_parameters():
        if name in towers.unsummed:
            found[name] = float("inf") if parameter.numel() or parameter.grad is not None else 0.0
        else:
            found[name] = differ(parameter.grad, whole.get_parameter(name).grad)
    for name, buffer in network.named_buffers():
        # Counts are kept by all ranks, statistics by the tower's own until the step is complete.
        if not buffer.dim() or not name.startswith("towers") or name.startswith(f"towers.{towers.own}."):
            found[name] = differ(buffer, whole.get_buffer(name))
    return found


def differ(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return float((one - other).abs().max())


def alexnet(dtype: torch.dtype, *, last: bool, side: int = 67, **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    network: nn.Module = model.alexnet(num_classes=5, two_towers=True, fc_width=32, **options).to(dtype)
    x = torch.randn(SAMPLES, 3, side, side, dtype=dtype)
    layout = torch.channels_last if last else torch.contiguous_format
    return network.to(memory_format=layout), x.to(memory_format=layout)  # type: ignore[call-overload]


def compare_alexnet(
    rank: Rank, dtype: torch.dtype, last: bool, options: dict[str, Any], is_mixed: bool
) -> dict[str, float]:
    mixed = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    return compare(rank, *alexnet(dtype, last=last, **options), mixed if is_mixed else nullcontext)


PLAIN: dict[str, Any] = {}
NORMS = {"batch_norm": True, "pool5_norm": True}


@pytest.mark.parametrize(
    ("dtype", "last", "options", "is_mixed"),
    [
        (torch.float32, True, PLAIN, False),
        (torch.float64, False, PLAIN, False),
        (torch.float32, True, PLAIN, True),
        (torch.float64, True, NORMS, False),
        pytest.param(torch.float32, False, PLAIN, False, marks=pytest.mark.check),
        pytest.param(torch.float64, True, PLAIN, False, marks=pytest.mark.check),
        pytest.param(torch.float32, True, NORMS, False, marks=pytest.mark.check),
        pytest.param(torch.float32, False, NORMS, False, marks=pytest.mark.check),
        pytest.param(torch.float64, False, NORMS, False, marks=pytest.mark.check),
        pytest.param(torch.float32, True, NORMS, True, marks=pytest.mark.check),
    ],
)
def test_alexnet_on_two_ranks_has_the_bits_of_one_process(
    dtype: torch.dtype, last: bool, options: dict[str, Any], is_mixed: bool
) -> None:
    """Loss, gradients and running statistics; dropout in its head draws the same numbers."""
    for found in run_ranks(2, compare_alexnet, dtype, last, options, is_mixed):
        assert max(found.values()) == 0, found


class Tower(nn.Module):
    def __init__(self, towers: int, dropout: float, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.scale = nn.Conv2d(3, 2, 3), norm, nn.Parameter(torch.rand(1))
        self.second, self.drop = nn.Conv2d(2 * towers + 3, 4, 1, bias=False), nn.Dropout(dropout)

    def begin(self, x: Tensor) -> Tensor:
        one, two = F.relu(self.norm(self.first(x)), inplace=True).chunk(2, dim=1)
        return torch.cat([one * self.scale, two], 1)


class Meeting(nn.Module):
    """A stem, towers that meet twice, in channels and in rows, and a head that uses what they joined the first time."""

    def __init__(self, towers: int = 2, dropout: float = 0.0, ghost: int | None = None) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 3, 1), nn.Linear(2 * towers + 4, 5)
        norms = [nn.BatchNorm2d(2) if ghost is None else GhostBatchNorm(2, group=ghost) for _ in range(towers)]
        self.towers = nn.ModuleList(Tower(towers, dropout, norm) for norm in norms)
        self.meet: Callable[[list[Any]], Tensor] = lambda parts: torch.cat(parts, 2)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        towers: Any = self.towers
        joined = torch.cat([tower.begin(stem) for tower in towers], dim=-3)
        assert joined.shape[1] == joined.size(1) == 2 * len(towers)
        more = torch.cat([joined, stem[:, :, 2:, 2:]], 1)
        rows = self.meet([tower.drop(tower.second(more)) for tower in towers])
        outputs: Tensor = self.head(torch.cat([rows.mean((2, 3)), joined.mean((2, 3))], 1))
        return outputs


def build(towers: int = 2, **options: Any) -> tuple[Meeting, Tensor]:
    torch.manual_seed(1)
    return Meeting(towers, **options).double(), torch.randn(SAMPLES, 3, 6, 5, dtype=torch.float64)


def compare_meeting(rank: Rank, towers: int, frozen: tuple[str, ...], ghost: int | None) -> dict[str, float]:
    network, x = build(towers, ghost=ghost)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    return compare(rank, network, x)


@pytest.mark.parametrize(
    ("towers", "frozen", "ghost"),
    [
        (2, (), None),
        (2, ("stem", "towers.0"), None),
        (2, (), 3),
        pytest.param(3, (), None, marks=pytest.mark.check),
        pytest.param(2, ("towers.1",), None, marks=pytest.mark.check),
    ],
)
def test_any_network_of_towers_is_exact(towers: int, frozen: tuple[str, ...], ghost: int | None) -> None:
    """What enters towers has the gradients of all of them, also if a tower has no gradient of its own."""
    for found in run_ranks(towers, compare_meeting, towers, frozen, ghost):
        assert max(found.values()) <= 1e-15, found


def use_one_tower_only(rank: Rank) -> dict[str, float]:
    network, x = build()
    network.meet = lambda parts: torch.cat([parts[0], parts[1].detach()], 2)
    return compare(rank, network, x)


def test_a_tower_without_a_gradient_takes_part_in_the_exchange() -> None:
    for found in run_ranks(2, use_one_tower_only):
        assert max(found.values()) <= 1e-15, found


REFUSED: dict[str, tuple[Callable[[Any, list[Any]], Any], str]] = {
    "a sum": (lambda _, parts: parts[0] + parts[1], "Tensor.add of values of the towers 0, 1 has no rule"),
    "another order": (lambda _, parts: torch.cat(parts[::-1], 2), "torch.cat of values of tower 1, tower 0, instead"),
    "a number": (lambda _, parts: parts[0] * parts[0].sum().item(), "Tensor.item of values of a tower, whose numbers"),
    "a choice": (lambda _, parts: parts[0] if parts[0].max() > 0 else parts[1], "Tensor.__bool__ of values of a tower"),
    "random numbers": (lambda _, parts: parts[0] + torch.rand_like(parts[0]), "torch.rand_like of values of a tower"),
    "in place": (lambda self, parts: self.stem.weight.detach().mul_(parts[0].sum()), "Tensor.mul_ of values of a"),
    "joined through relu": (
        lambda _, parts: torch.relu_(torch.cat(parts, 1)), "torch.relu_ of the joined channels of towers",
    ),
    "joined in place": (lambda _, parts: torch.cat(parts, 2).add_(1), "Tensor.add_ of the joined channels of towers"),
}  # fmt: skip


def refuse(rank: Rank, names: list[str]) -> list[str]:
    said = []
    for name in names:
        network, x = build(dropout=0.5 if name == "dropout" else 0.0)
        if name in REFUSED:
            network.meet = lambda parts, name=name, self=network: REFUSED[name][0](self, parts)  # type: ignore[misc]
        try:
            divide(rank, network).run(network, x)
        except UsageError as error:
            said.append(str(error))
    return said


def test_functions_that_cannot_be_divided_are_refused_by_name_and_layer() -> None:
    expected = ["towers.0.drop: torch.nn.functional.dropout of values of a tower, whose random numbers"]
    expected += [f"Meeting: {text}" for _, text in REFUSED.values()]
    first, second = run_ranks(2, refuse, ["dropout", *REFUSED])
    for one, other, text in zip(first, second, expected, strict=True):
        assert one.startswith(text), one
        # A rank without the numbers says so, of the same function.
        assert other.startswith(text.partition(" of ")[0]), other


def count_bytes(rank: Rank) -> list[int]:
    """Bytes that this rank sends in a forward and backward pass, one exchange after another."""
    network, x = alexnet(torch.float32, last=True, side=227)
    towers, sent = divide(rank, network), list[int]()
    send: Any = towers.group.all_to_all

    def observe(out: Tensor, into: Tensor, *splits: Any) -> Any:
        sent.append(into.numel() * into.element_size())
        return send(out, into, *splits)

    towers.group.all_to_all = observe  # type: ignore[method-assign]
    run_step(lambda x: towers.run(network, x), x)
    return sent


def test_alexnet_sends_the_channels_after_the_pools() -> None:
    """Of a sample: 128 x 13 x 13 numbers before conv3, there and back, and 128 x 6 x 6 before fc6: 191,488 bytes."""
    pool2, pool5 = 128 * 13 * 13 * 4, 128 * 6 * 6 * 4
    for sent in run_ranks(2, count_bytes):
        assert sent == [pool2 * SAMPLES, pool5 * SAMPLES, pool2 * SAMPLES]
        assert sum(sent) == 191_488 * SAMPLES


def join(rank: Rank) -> str:
    """The whole network on each rank for a block, and what is said of it outside."""
    network, x = build()
    whole = copy.deepcopy(network)
    towers = divide(rank, network)
    with towers.join(), torch.no_grad():
        assert torch.equal(network(x), whole(x))
        assert all(torch.equal(one, whole.state_dict()[name]) for name, one in network.state_dict().items())
    assert all(not network.get_parameter(name).numel() for name in towers.unsummed)
    with pytest.raises(UsageError) as seen:
        network(x)
    return str(seen.value)


def test_joined_towers_are_the_whole_network() -> None:
    assert all("are on several processes of the run" in said for said in run_ranks(2, join))


def tied() -> nn.Module:
    network: Any = build()[0]
    network.towers[1].first = network.towers[0].first
    return network


def scalar() -> nn.Module:
    network: Any = build()[0]
    for tower in network.towers:
        tower.scale = nn.Parameter(torch.tensor(1.0))
    return network


def unlike() -> nn.Module:
    network: Any = build()[0]
    network.towers[1].first = nn.Conv2d(3, 2, 5)
    return network


UNFIT: dict[str, tuple[Callable[[], nn.Module], str, int, str]] = {
    "nothing matches": (lambda: build()[0], r"^column(\d+)", 2, "matches no module of this network.*towers.0"),
    "one tower": (lambda: build()[0], r"^towers\.(0)", 2, "finds the tower 0. There must be at least two"),
    "a gap": (lambda: build(3)[0], r"^towers\.([02])", 2, "finds the towers 0, 2"),
    "no number": (lambda: build()[0], r"^(towers)", 2, "takes 'towers' of 'towers' as the number of a tower"),
    "3 ranks": (lambda: build()[0], MATCH, 3, "2 processes train a network of 2 towers together, and there are 3"),
    "one parameter": (tied, MATCH, 2, "towers.1.first.weight: this parameter is towers.0.first.weight too"),
    "a number alone": (scalar, MATCH, 2, "towers.0.scale: this parameter of a tower is a single number"),
    "other layers": (unlike, MATCH, 2, "towers.1: tower 1 has other parameters or buffers than tower 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_networks_without_such_towers_are_refused(name: str) -> None:
    make, match, ranks, said = UNFIT[name]
    with pytest.raises(UsageError, match=said):
        divide_towers(make(), match, 0, ranks)


def test_a_tower_may_have_several_modules() -> None:
    names = ("left_0", "left_1", "right_0", "right_1")
    network = nn.ModuleDict({name: nn.Linear(1, 1) for name in names})
    assert find_towers(network, r"^(?:left|right)_(\d)") == [["left_0", "right_0"], ["left_1", "right_1"]]
