"""Batch norm over ranks: N ranks give what one gives on the joined batch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from torch import Tensor, nn

from headway.comm.batch_norm import SyncBatchNorm, convert_sync_batchnorm, normalise_batch
from headway.core.errors import UsageError
from headway.core.group import Group
from headway.core.world import World

CPU = torch.device("cpu")
KINDS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (5,)),
    "1d of series": (nn.BatchNorm1d, (5, 7)),
    "2d": (nn.BatchNorm2d, (5, 4, 3)),
    "3d": (nn.BatchNorm3d, (5, 2, 3, 2)),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"momentum": 0.9, "eps": 0.1},
    {"affine": False},
    {"track_running_stats": False},
]
SIZES = {2: ((4, 4), (5, 2), (6, 0)), 3: ((3, 3, 3), (1, 4, 2), (0, 5, 0))}


@pytest.fixture
def alone() -> Iterator[Group]:
    world = World.create_single(CPU)
    yield world.create_group(name="norm")
    world.close()


def cases(ranks: int) -> Iterator[tuple[type[nn.Module], dict[str, Any], list[Tensor], list[Tensor], tuple[int, ...]]]:
    """(class, options, batches of three steps, weights of the outputs, samples of each rank)."""
    make = torch.Generator().manual_seed(ranks)
    for kind, shape in KINDS.values():
        for options in OPTIONS:
            for sizes in SIZES[ranks]:
                whole = (sum(sizes), *shape)
                steps = [torch.randn(whole, generator=make, dtype=torch.float64) * 3 + 2 for _ in range(3)]
                weights = [torch.randn(whole, generator=make, dtype=torch.float64) for _ in range(3)]
                yield kind, options, steps, weights, sizes


def filled(module: Any) -> Any:
    if module.weight is not None:
        with torch.no_grad():
            module.weight.copy_(torch.linspace(0.5, -2, len(module.weight)))
            module.bias.copy_(torch.linspace(-1, 1, len(module.bias)))
    return module.double()


def passed(module: Any, steps: list[Tensor], weights: list[Tensor]) -> dict[str, Tensor]:
    """Outputs, input gradients, parameter gradients and buffers after some steps."""
    found: dict[str, Tensor] = {}
    for number, (x, weight) in enumerate(zip(steps, weights, strict=True)):
        x = x.clone().requires_grad_()
        y = module(x)
        (y * weight).sum().backward()
        assert x.grad is not None
        found |= {f"y{number}": y.detach(), f"dx{number}": x.grad}
    found |= {f"d{name}": parameter.grad for name, parameter in module.named_parameters()}
    return found | dict(module.named_buffers())


def all_cases(rank: Rank) -> list[dict[str, Tensor]]:
    group, out = rank.world.create_group(name="norm"), []
    for kind, options, steps, weights, sizes in cases(rank.size):
        mine = [[whole.split(sizes)[rank.rank] for whole in wholes] for wholes in (steps, weights)]
        module = convert_sync_batchnorm(filled(kind(5, **options)), group)
        out.append(passed(module, *mine))
    return out


@pytest.mark.thin(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_are_one_rank_on_the_joined_batch(ranks: int) -> None:
    found = run_ranks(ranks, all_cases)
    for number, (kind, options, steps, weights, _) in enumerate(cases(ranks)):
        expected = passed(filled(kind(5, **options)), steps, weights)
        for name, value in expected.items():
            pieces = [of_rank[number][name] for of_rank in found]
            if name.startswith(("y", "dx")):
                got = [torch.cat(pieces)]
            elif name in ("dweight", "dbias"):
                got = [torch.stack(pieces).sum(0)]
            else:
                got = pieces
            for each in got:
                difference = (each - value).abs().max()
                assert difference <= 1e-12 * (1 + value.abs().max()), (kind, options, name, difference)


class Spied:
    """A group that counts what is asked of it."""

    def __init__(self, group: Group) -> None:
        self.group, self.size, self.calls = group, group.size, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.group, name)


def half_precision(rank: Rank) -> dict[str, Any]:
    group = Spied(rank.world.create_group(name="norm"))
    out: dict[str, Any] = {}
    for kind in (torch.bfloat16, torch.float16):
        x = wide_batch().to(kind).chunk(2)[rank.rank].requires_grad_()
        module: Any = SyncBatchNorm(4, group=group)
        y = module(x)
        (y * wide_weights().chunk(2)[rank.rank].to(kind)).float().sum().backward()
        out[str(kind)] = y.detach(), x.grad, module.running_mean, module.running_var, module.weight.grad
        whole = SyncBatchNorm(4, group=group).to(kind)  # every parameter and buffer too
        y = whole(x.detach())
        (y * wide_weights().chunk(2)[rank.rank].to(kind)).float().sum().backward()
        out[f"all {kind}"] = y.detach(), whole.running_mean, whole.weight.grad
    far = (wide_batch() + 1e4).chunk(2)[rank.rank]
    module = SyncBatchNorm(4, group=group)
    module(far)
    out["far"] = module.running_mean, module.running_var
    out["calls"] = dict(group.calls)
    return out


def wide_batch() -> Tensor:
    spread = torch.tensor([0.1, 1, 3, 20.0]).view(1, 4, 1, 1)
    return torch.randn(64, 4, 8, 8, generator=torch.Generator().manual_seed(0)) * spread


def wide_weights() -> Tensor:
    return torch.randn(64, 4, 8, 8, generator=torch.Generator().manual_seed(1)) + 0.5


def test_half_precision_and_far_means() -> None:
    found = run_ranks(2, half_precision)
    for kind in (torch.bfloat16, torch.float16):
        x = wide_batch().to(kind).requires_grad_()
        module = nn.BatchNorm2d(4)
        y = module(x)
        (y * wide_weights().to(kind)).float().sum().backward()
        close: dict[str, Any] = {"rtol": 2 * torch.finfo(kind).eps, "atol": 2 * torch.finfo(kind).eps}
        y_found, dx, mean, var, dw = (torch.cat(parts) for parts in zip(*(f[str(kind)] for f in found), strict=True))
        assert y_found.dtype == dx.dtype == kind
        assert mean.dtype == var.dtype == dw.dtype == torch.float32
        torch.testing.assert_close(y_found, y, **close)
        torch.testing.assert_close(dx, x.grad, **close)
        torch.testing.assert_close(mean, module.running_mean.repeat(2), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(var, module.running_var.repeat(2), rtol=1e-5, atol=0)
        torch.testing.assert_close(dw.view(2, -1).sum(0), module.weight.grad, rtol=1e-4, atol=0)
        y_found, mean, dw = (torch.cat(parts) for parts in zip(*(f[f"all {kind}"] for f in found), strict=True))
        assert y_found.dtype == mean.dtype == dw.dtype == kind
        torch.testing.assert_close(y_found, y, **close)
        torch.testing.assert_close(mean, module.running_mean.repeat(2).to(kind), **close)
    exact = nn.BatchNorm2d(4).double()
    exact((wide_batch() + 1e4).double())
    for mean, var in (one["far"] for one in found):
        torch.testing.assert_close(mean.double(), exact.running_mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(var.double(), exact.running_var, rtol=1e-5, atol=0)  # raw squares would be off by 1
    assert found[0]["calls"] == {"all_gather": 5, "all_reduce": 2}  # back only where the input wants it


def shapes_and_flags(rank: Rank) -> list[Any]:
    group = Spied(rank.world.create_group(name="norm"))
    model = convert_sync_batchnorm(net(), group)
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    y = model[0](x)
    loss = model(x).sum()
    grads = torch.autograd.grad(y, [model[0].weight], y, retain_graph=True)
    inner = torch.randn_like(y).requires_grad_()
    normed = model[1](inner)
    (dx,) = torch.autograd.grad(normed, [inner], torch.ones(()).expand_as(normed))  # as .sum() hands it on
    out = [t.is_contiguous(memory_format=torch.channels_last) for t in (y, normed, dx)]
    before = copy.deepcopy(model[1].state_dict())
    model[1](torch.empty(0, 4, 6, 6))  # on every rank
    same = all(torch.equal(before[key], value) for key, value in model[1].state_dict().items())
    frozen = SyncBatchNorm(4, group=group)
    frozen.track_running_stats = False
    frozen(torch.randn(2, 4, 6, 6) + 5)
    same = same and bool((frozen.running_mean == 0).all()) and frozen.num_batches_tracked == 0
    calls = Counter(group.calls)
    model.eval()
    if rank.rank == 0:
        model(x)
    return [*out, same, group.calls == calls, bool(loss.isfinite()), len(grads)]


def net() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 6),
        nn.BatchNorm1d(6),
    )


def test_memory_format_empty_steps_and_evaluation_on_one_rank() -> None:
    for found in run_ranks(2, shapes_and_flags):
        assert found == [True, True, True, True, True, True, 1]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("training", [True, False])
def test_alone_it_is_torchs(alone: Group, options: dict[str, Any], training: bool) -> None:
    for kind, shape in KINDS.values():
        theirs, ours = filled(kind(5, **options)), filled(SyncBatchNorm(5, **options, group=alone))
        steps, weights = [torch.randn(3, *shape).double()], [torch.randn(3, *shape).double()]
        expected = passed(theirs.train(training), steps, weights)
        found = passed(ours.train(training), steps, weights)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_conversion_keeps_everything(alone: Group) -> None:
    model = net().to(memory_format=torch.channels_last)
    model[1].bias.requires_grad_(False)
    model[5].eval()
    seen: list[nn.Module] = []
    model[1].register_forward_hook(lambda module, *_: seen.append(module))
    before = dict(model.state_dict(keep_vars=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert convert_sync_batchnorm(model, alone) is model
    assert [type(model[n]) for n in (1, 5)] == [SyncBatchNorm, SyncBatchNorm]
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    assert all(after[name] is value for name, value in before.items())
    assert not model[1].bias.requires_grad
    assert (model[1].training, model[5].training) == (True, False)
    weight = model[1].weight.detach().clone()
    model(torch.randn(2, 3, 6, 6)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, weight)
    assert seen == [model[1]]
    net().load_state_dict(model.state_dict())
    model.load_state_dict(net().state_dict())


def test_conversion_of_the_root_of_shared_ones_and_of_converted_ones(alone: Group) -> None:
    assert isinstance(convert_sync_batchnorm(nn.BatchNorm3d(2), alone), SyncBatchNorm)
    assert isinstance(convert_sync_batchnorm(nn.SyncBatchNorm(2), alone), SyncBatchNorm)
    norm = nn.BatchNorm1d(2)
    model = convert_sync_batchnorm(nn.ModuleDict({"a": norm, "b": nn.Sequential(norm), "c": norm}), alone)
    assert model["a"] is model["b"][0] is model["c"]  # type: ignore[index]
    world = World.create_single(CPU)
    other = world.create_group(name="other")
    was = model["a"]  # type: ignore[index]
    assert convert_sync_batchnorm(model, other)["a"] is was  # type: ignore[index]
    assert was.group is other
    world.close()


def test_a_copy_shares_the_group(alone: Group) -> None:
    model = convert_sync_batchnorm(net(), alone)
    other = copy.deepcopy(model)
    assert other[1].group is alone
    assert other[1].weight is not model[1].weight
    assert torch.equal(other[1].weight, model[1].weight)


class Activated(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_what_cannot_be_converted_says_so(alone: Group) -> None:
    with pytest.raises(UsageError, match=r"0\.1: Activated is a batch norm with a forward pass of its own"):
        convert_sync_batchnorm(nn.Sequential(nn.Sequential(nn.ReLU(), Activated(2))), alone)
    with pytest.raises(UsageError, match="does not know its number of channels"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm2d()), alone)
    ran = nn.Sequential(nn.LazyBatchNorm2d())
    ran(torch.randn(2, 3, 4, 4))
    assert isinstance(convert_sync_batchnorm(ran, alone)[0], SyncBatchNorm)  # type: ignore[index]


@pytest.mark.parametrize("shape", [(5,), (2, 4), (2, 4, 5), ()])
def test_a_wrong_input_says_so(alone: Group, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"a batch norm of 5 channels was given an input of shape \["):
        SyncBatchNorm(5, group=alone)(torch.zeros(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_a_gpu_gives_the_gradients_of_torch(dtype: torch.dtype, affine: bool) -> None:
    device = torch.device("cuda")
    world = World.create_single(device)
    x = torch.randn(8, 64, 6, 5, device=device).to(memory_format=torch.channels_last)
    norms = [nn.BatchNorm2d(64, affine=affine).to(device) for _ in range(2)]
    norms[1] = convert_sync_batchnorm(norms[1], world.create_group(name="norm"))
    # A group of one takes torch's own way unless it is told not to, so the function is called itself.
    found = []
    for norm in norms:
        own = x.to(dtype).detach().requires_grad_()
        if isinstance(norm, SyncBatchNorm):
            out, *_ = normalise_batch(own, norm.weight, norm.bias, norm.eps, norm.group)
        else:
            out = norm(own)
        (out.float() * x.sin()).sum().backward()
        found.append([own.grad, *(one.grad for one in norm.parameters())])
    world.close()
    for mine, torchs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, torchs, rtol=0.02, atol=0.02 if dtype == torch.bfloat16 else 1e-4)
