"""DistributedOptimizer: N ranks with N shares are one rank with the whole batch, in float64; and what it refuses."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from tests.comm.hvd._start import refused, started
from torch import Tensor, nn

import headway.comm.hvd as hvd

BATCH, STEPS = 24, 4


class Net(nn.Module):
    """With a branch that only some batches take, and a parameter that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.side, self.unused = nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor, aside: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden) + (self.side(hidden) if aside else 0.0)


def made() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(5)
    return Net().double(), torch.randn(BATCH, 4).double(), torch.randn(BATCH, 3).double()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def alone(kind: str) -> dict[str, Tensor]:
    model, x, y = made()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        ((model(x) - y) ** 2).mean().backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
    return model.state_dict()


def equal_to_alone(rank: Rank, kind: str, passes: int = 1, **options: Any) -> None:
    model, x, y = made()
    if "lists" in options:
        options.pop("lists")
        options["groups"] = [[model.first.weight, model.unused.bias], [model.second.bias, model.second.weight]]
    optimizer = OPTIMIZERS[kind](model.parameters())
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    assert wrapped is optimizer
    share = BATCH // rank.size // passes
    for _ in range(STEPS):
        wrapped.zero_grad()
        for number in range(passes):
            low = (rank.rank * passes + number) * share
            loss = ((model(x[low : low + share]) - y[low : low + share]) ** 2).mean() / passes
            if options.get("op") == hvd.Sum:
                loss = loss / rank.size
            loss.backward()
        wrapped.step()
    for name, found in model.state_dict().items():
        torch.testing.assert_close(found, alone(kind)[name], rtol=1e-12, atol=1e-12)


def equalities(rank: Rank) -> None:
    with started(rank):
        for kind in OPTIMIZERS:
            equal_to_alone(rank, kind)
            equal_to_alone(rank, kind, passes=2)
        equal_to_alone(rank, "momentum", op=hvd.Sum)
        equal_to_alone(rank, "momentum", gradient_predivide_factor=3.0)
        equal_to_alone(rank, "momentum", groups=3)
        equal_to_alone(rank, "momentum", passes=2, lists=True)
        with pytest.warns(DeprecationWarning, match="num_groups"):
            equal_to_alone(rank, "momentum", num_groups=2)


@pytest.mark.parametrize(
    "size", [2, pytest.param(3, marks=pytest.mark.check), pytest.param(4, marks=pytest.mark.check)]
)
def test_n_ranks_are_one_rank(size: int) -> None:
    run_ranks(size, equalities)


def the_rest(rank: Rank) -> None:
    with started(rank):
        synchronized(rank)
        races(rank)
        branches(rank)
        sparse(rank)
        compressed_and_memory_formats(rank)
        joined(rank)
        of_a_process_set(rank)
        wrong_groups()


def synchronized(rank: Rank) -> None:
    model, x, y = made()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    ((model(x) - y) ** 2).mean().mul(rank.rank + 1).backward()
    optimizer.synchronize()
    averaged = model.first.weight.grad.clone()
    expected = copy.deepcopy(model)
    expected.zero_grad()
    ((expected(x) - y) ** 2).mean().mul((rank.size + 1) / 2).backward()
    torch.testing.assert_close(averaged, expected.first.weight.grad, rtol=1e-12, atol=1e-12)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = model.first.weight.detach().clone()
    with optimizer.skip_synchronize():
        optimizer.step()
    moved = (model.first.weight - before).norm().item()
    assert 0 < moved <= 1e-4 + 1e-12  # the clipped gradient was used as it was
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()


def races(rank: Rank) -> None:
    model, x, y = made()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    ((model(x) - y) ** 2).mean().backward()
    refused(AssertionError, optimizer.zero_grad, "step()")
    refused(AssertionError, lambda: ((model(x) - y) ** 2).mean().backward(), "backward_passes_per_step")
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    # A state that is loaded, as after a failure, forgets what was under way.
    ((model(x) - y) ** 2).mean().backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    hvd.barrier()


def branches(rank: Rank) -> None:
    """A parameter that only rank 0 used has its gradient, divided by the ranks, everywhere."""
    model, x, y = made()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=2)
    ((model(x, aside=rank.rank == 0) - y) ** 2).mean().backward()
    mine = model.side.weight.grad
    local = hvd.broadcast(mine if mine is not None else torch.zeros_like(model.side.weight), 0)
    optimizer.synchronize()
    assert local.any()
    torch.testing.assert_close(model.side.weight.grad, local / rank.size, rtol=1e-12, atol=1e-12)
    assert not model.unused.weight.grad.any()
    with optimizer.skip_synchronize():
        optimizer.step()
    # Taken out of training and back in again.
    optimizer.zero_grad()
    for frozen in (True, False):
        model.first.requires_grad_(not frozen)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        assert bool(model.first.weight.grad.any()) is not frozen
        optimizer.zero_grad(set_to_none=False)


def sparse(rank: Rank) -> None:
    for as_dense in (False, True):
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 3, sparse=True)
        start = embedding.weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(embedding.parameters(), lr=1.0), embedding.named_parameters(), sparse_as_dense=as_dense
        )
        embedding(torch.tensor([rank.rank, 5, 5])).sum().backward()
        optimizer.step()
        assert embedding.weight.grad.is_sparse
        counts = torch.zeros(10)
        counts[: rank.size] = 1 / rank.size
        counts[5] = 2.0
        torch.testing.assert_close(start - embedding.weight.detach(), counts[:, None].expand(10, 3))
    own = torch.zeros(rank.size, 4)
    own[: rank.rank] = torch.eye(4)[: rank.rank]
    several = [own.to_sparse_coo(), torch.zeros(3, 2).to_sparse_coo()]
    waits = [hvd.sparse_allreduce_async(t, name=str(n), op=hvd.Sum) for n, t in enumerate(several)]
    dense = [hvd.allreduce(t.to_dense(), op=hvd.Sum) for t in several]
    for wait, want in zip(waits, dense, strict=True):
        torch.testing.assert_close(wait().to_dense(), want)


def compressed_and_memory_formats(rank: Rank) -> None:
    torch.manual_seed(0)
    for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2)):
        net = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), compression=compression
        )
        net(torch.full((2, 3, 8, 8), rank.rank + 1.0)).mean().backward()
        local = net.weight.grad.clone()
        wanted = hvd.allreduce(local.contiguous())
        optimizer.step()
        assert net.weight.grad.dtype == torch.float32
        torch.testing.assert_close(net.weight.grad.contiguous(), wanted, rtol=tolerance, atol=1e-6)


def joined(rank: Rank) -> None:
    """Rank r has r + 1 batches; gradients of those that have ended count as zeros."""
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for _ in range(rank.rank + 1):
        optimizer.zero_grad()
        model(torch.ones(1, 1).double()).sum().backward()
        optimizer.step()
    assert hvd.join() == rank.size - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=rank.size - 1)
    steps = sum((rank.size - batch) / rank.size for batch in range(rank.size))
    torch.testing.assert_close(model.weight.item(), -steps)


def of_a_process_set(rank: Rank) -> None:
    pair = hvd.add_process_set([0, 1])
    model, x, y = made()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=pair
    )
    ((model(x * (rank.rank + 1)) - y) ** 2).mean().backward()
    own = model.first.weight.grad.clone()
    everyone = hvd.allgather_object(own)
    optimizer.step()
    wanted = (everyone[0] + everyone[1]) / 2 if rank.rank < 2 else own
    torch.testing.assert_close(model.first.weight.grad, wanted, rtol=1e-12, atol=1e-12)
    optimizer.zero_grad()
    hvd.barrier()


def wrong_groups() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for groups in (0, -1, [[model.first.weight], [model.first.weight]], [["first"]]):
        refused(ValueError, lambda groups=groups: hvd.DistributedOptimizer(optimizer, groups=groups), "group")


@pytest.mark.check
def test_what_else_scripts_do_with_it() -> None:
    run_ranks(3, the_rest)


def delta(rank: Rank) -> None:
    with started(rank):
        model, x, y = made()
        reference = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), op=hvd.Adasum
        )
        plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        share = BATCH // rank.size
        mine = slice(rank.rank * share, (rank.rank + 1) * share)
        for _ in range(2):
            optimizer.zero_grad()
            ((model(x[mine]) - y[mine]) ** 2).mean().backward()
            optimizer.step()
            # By hand: a step of its own, and Adasum of what it changed.
            starts = [parameter.detach().clone() for parameter in reference.parameters()]
            plain.zero_grad()
            ((reference(x[mine]) - y[mine]) ** 2).mean().backward()
            plain.step()
            for parameter, start in zip(reference.parameters(), starts, strict=True):
                with torch.no_grad():
                    parameter.copy_(start + hvd.allreduce(parameter - start, op=hvd.Adasum))
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        refused(AssertionError, optimizer.skip_synchronize, "Adasum")
        pair = hvd.add_process_set([0])
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        refused(NotImplementedError, lambda: hvd.DistributedOptimizer(other, op=hvd.Adasum, process_set=pair), "set")


def test_adasum_combines_updates() -> None:
    run_ranks(2, delta)


def test_what_is_refused(job: None) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def wrap(**options: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, **options)

    named = list(model.named_parameters())
    refused(ValueError, lambda: wrap(named_parameters=[*named, named[0]]), named[0][0], "unique")
    refused(ValueError, lambda: wrap(named_parameters=named[1:]), "no name")
    refused(ValueError, lambda: wrap(named_parameters=model.parameters()), "pairs")
    refused(ValueError, lambda: wrap(backward_passes_per_step=0), "at least 1")
    refused(ValueError, lambda: wrap(gradient_predivide_factor=2.0, op=hvd.Sum), "Average")
    wrap()
    refused(ValueError, wrap, "already")
    optimizer.step()
