"""Parameters, optimizer state and objects from one rank to all; synchronised batch norm; elastic state."""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from typing import Any

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from tests.comm.hvd._start import refused, started
from torch import nn

import headway.comm.hvd as hvd
from headway.comm.hvd import objects
from headway.comm.hvd.elastic import ElasticSampler, ObjectState, State, TorchState
from headway.comm.hvd.errors import HorovodInternalError
from headway.core.errors import UsageError

OPTIMIZERS = {
    "sgd": lambda p, r: torch.optim.SGD(p, lr=0.1 * (r + 1), momentum=0.9, nesterov=r == 0),
    "adam": lambda p, r: torch.optim.Adam(p, lr=0.1 * (r + 1), betas=(0.8 + 0.01 * r, 0.9), amsgrad=r == 0),
    "adagrad": lambda p, r: torch.optim.Adagrad(p, lr=0.1 * (r + 1)),
    "rprop": lambda p, r: torch.optim.Rprop(p, lr=0.1, etas=(0.4, 1.1 + r)),
    "none": lambda p, r: torch.optim.SGD(p, lr=0.1 * (r + 1)),
}


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 4, 2)).double()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 4, 4).double()).square().sum().backward()
        optimizer.step()


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(equal(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(equal, found, wanted))
    return type(found) is type(wanted) and found == wanted


def from_one_to_all(rank: Rank) -> None:
    root = 1
    with started(rank):
        for form in ("dict", "pairs", "plain"):
            model = net(rank.rank).to(memory_format=torch.channels_last)
            given = {
                "dict": model.state_dict(),
                "pairs": list(model.named_parameters()) + list(model.named_buffers()),
                "plain": [*model.parameters(), *model.buffers()],
            }[form]
            hvd.broadcast_parameters(given, root_rank=root)
            assert equal(model.state_dict(), net(root).state_dict())
            assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        refused(ValueError, lambda: hvd.broadcast_parameters(model.parameters(), 0), "generator")  # type: ignore[arg-type]
        for make in OPTIMIZERS.values():
            model = net(0)
            optimizer = make(model.parameters(), rank.rank)
            trained(model, optimizer, steps=2 * rank.rank)  # rank 0 has no state yet
            before = copy.deepcopy(optimizer.state_dict())
            hvd.broadcast_optimizer_state(optimizer, root_rank=root)
            everyone = hvd.allgather_object(optimizer.state_dict())
            assert all(equal(other, everyone[root]) for other in everyone)
            assert rank.rank != root or equal(optimizer.state_dict(), before)
            trained(model, optimizer, steps=1)  # and it goes on from there
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        refused(ValueError, lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(net(0).parameters()), 0), "LBFGS")
        thing = {"rank": rank.rank, 0: [1, None], "tensor": torch.arange(rank.rank + 1)}
        assert equal(hvd.broadcast_object(thing, root), {"rank": 1, 0: [1, None], "tensor": torch.arange(2)})
        assert hvd.broadcast_object(thing if rank.rank == root else None, root, name="named")["rank"] == root
        assert hvd.allgather_object("x" * 1000 * rank.rank) == ["x" * 1000 * one for one in range(rank.size)]
        refused(ValueError, lambda: hvd.broadcast_object(1, rank.size), "root rank")


class Evil:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def unsigned(rank: Rank) -> None:
    """Rank 0 sends what a stranger could: a pickle that does not carry the signature of this job."""
    with started(rank):
        if rank.rank == 0:
            objects._sign = lambda pickled: bytes(32)  # type: ignore[assignment]
            hvd.broadcast_object(Evil(), 0)
        else:
            refused(HorovodInternalError, lambda: hvd.broadcast_object(None, 0), "no process of this job has signed")
        hvd.barrier()


def test_a_pickle_that_nobody_of_the_job_signed_is_not_unpickled() -> None:
    run_ranks(2, unsigned)


def without_a_secret(rank: Rank) -> float:
    """Sums go on; what is pickled is refused on all ranks, also where it lies within something else."""
    with started(rank):
        fix = ("several hosts without a secret", "HEADWAY_SECRET", "openssl rand -hex 32")
        refused(UsageError, lambda: hvd.broadcast_object(1, 0), *fix)
        refused(UsageError, lambda: hvd.allgather_object(1), *fix)
        refused(UsageError, lambda: hvd.broadcast_optimizer_state(torch.optim.SGD(net(0).parameters()), 0), *fix)
        refused(UsageError, lambda: TorchState(epoch=1).sync(), *fix)
        return float(hvd.allreduce(torch.ones(1), op=hvd.Sum))


def test_no_object_is_unpickled_under_a_secret_that_everybody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_SECRET", raising=False)
    assert run_ranks(2, without_a_secret, hosts=(0, 1)) == [2.0, 2.0]


def test_state_from_one_rank_to_all() -> None:
    run_ranks(3, from_one_to_all)


def batch_norm(rank: Rank) -> None:
    """N ranks with unlike shares are one rank with all samples; twice, since the ranks may meet anew."""
    torch.manual_seed(0)
    x, weights = torch.randn(9, 4, 3).double(), torch.randn(9, 4, 3).double()
    shares = torch.arange(9).split([2, 3, 4])
    mine = shares[rank.rank]
    synced = None
    whole = nn.BatchNorm1d(4).double()
    for _ in range(2):
        with started(rank):
            synced = synced or hvd.SyncBatchNorm(4).double()
            assert isinstance(copy.deepcopy(synced), nn.Module)
            own, all_x = x[mine].clone().requires_grad_(), x.clone().requires_grad_()
            found, wanted = synced(own), whole(all_x)
            (found * weights[mine]).sum().backward()
            (wanted * weights).sum().backward()
            torch.testing.assert_close(found, wanted[mine], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(own.grad, all_x.grad[mine], rtol=1e-10, atol=1e-12)
            assert equal(list(synced.state_dict()), list(whole.state_dict()))
            for one, other in zip(synced.buffers(), whole.buffers(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
            summed = hvd.allreduce(synced.weight.grad, op=hvd.Sum)
            torch.testing.assert_close(summed, whole.weight.grad, rtol=1e-10, atol=1e-12)
            whole.zero_grad()
            synced.zero_grad()


def test_batch_norm_over_all_ranks() -> None:
    run_ranks(3, batch_norm)


def elastic(rank: Rank) -> None:
    with started(rank):
        model = net(rank.rank)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1 + rank.rank, momentum=0.9), model.named_parameters()
        )
        sampler = ElasticSampler(range(20), seed=3)
        state = TorchState(model, optimizer, sampler=sampler, epoch=10 + rank.rank, note=[rank.rank])
        assert state.model is model
        state.sync()
        assert equal(model.state_dict(), net(0).state_dict())
        assert (state.epoch, state.note, optimizer.param_groups[0]["lr"]) == (10, [0], 0.1)
        synced = copy.deepcopy(model.state_dict())
        trained(model, optimizer, 1)
        state.epoch = 11
        sampler.record_batch(0, 2)
        state.restore()  # to what was synchronised
        assert equal(model.state_dict(), synced)
        assert (state.epoch, sampler.processed_num) == (10, 0)
        trained(model, optimizer, 2)
        state.epoch = 12
        sampler.record_batch(0, 2)
        state.commit()
        committed = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        trained(model, optimizer, 1)
        state.epoch = 13
        sampler.record_batch(1, 2)
        for _ in range(2):
            state.restore()
            assert equal((model.state_dict(), optimizer.state_dict()), committed)
            assert (state.epoch, sampler.processed_num) == (12, 2 * rank.size)
            trained(model, optimizer, 1)
        state.model = net(7)  # another network takes the place of the first
        state.restore()
        assert equal(state.model.state_dict(), net(7).state_dict())
        plain = ObjectState(hvd.broadcast_object, hvd.rank, step=rank.rank)
        plain.sync()
        assert plain.step == 0
        plain.step = 5
        plain.commit()
        plain.step = 6
        plain.restore()
        assert plain.step == 5
        again(rank)


def again(rank: Rank) -> None:
    """A disagreement is no lost worker: all go back to their commit, and begin anew."""
    calls: list[Any] = []

    @hvd.elastic.run
    def train(state: TorchState, gift: str) -> str:
        calls.append((state.epoch, gift))
        if len(calls) == 1:
            state.epoch = 1
            state.commit()
            state.epoch = 2
            hvd.allreduce(torch.ones(1 + rank.rank))
        return "done"

    state = TorchState(epoch=0)
    state.register_reset_callbacks([lambda: calls.append(hvd.size())])
    assert train(state, gift="x") == "done"
    assert calls == [(0, "x"), rank.size, (1, "x")]


def test_elastic_state() -> None:
    run_ranks(2, elastic)


def lost(rank: Rank) -> None:
    """No launcher brings the others together again: the error is theirs to handle."""

    @hvd.elastic.run
    def train(state: State) -> None:
        if rank.rank == 1:
            os._exit(3)
        hvd.allreduce(torch.ones(1))

    with started(rank):
        refused(hvd.HorovodInternalError, lambda: train(TorchState(epoch=0)), "rank 1")


def test_a_lost_worker_without_a_launcher_of_ours() -> None:
    run_ranks(2, lost, dying={1})


def test_state_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        State(lambda value: value, lambda: 0)  # type: ignore[abstract]


@pytest.mark.parametrize(("samples", "ranks", "processed"), [(20, 3, 0), (20, 3, 6), (7, 4, 6), (5, 4, 5), (4, 1, 0)])
def test_a_sampler_deals_out_what_is_left(
    job: None, monkeypatch: pytest.MonkeyPatch, samples: int, ranks: int, processed: int
) -> None:
    dealt, order = [], list(range(samples))
    random.Random(3 + 2).shuffle(order)
    for rank in range(ranks):
        sampler = ElasticSampler(range(samples), seed=3)
        sampler.set_epoch(2)
        monkeypatch.setattr("headway.comm.hvd.context.size", lambda: ranks)
        monkeypatch.setattr("headway.comm.hvd.context.rank", lambda rank=rank: rank)
        sampler.load_state_dict({"epoch": 2, "processed_num": processed})
        assert len(list(sampler)) == len(sampler)
        dealt.append(list(sampler))
        monkeypatch.undo()
    left = order[processed:]
    assert len({len(share) for share in dealt}) == 1
    counts = Counter(sample for share in dealt for sample in share)
    assert set(counts) == set(left)
    rows = [share[0] for share in dealt if share]
    assert rows == [left[one % len(left)] for one in range(len(rows))]


def test_a_sampler_counts_what_all_ranks_have_done(job: None) -> None:
    sampler = ElasticSampler(range(10), shuffle=False)
    assert list(sampler) == list(range(10))
    sampler.record_batch(0, 4)
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 4}
    assert list(sampler) == list(range(10))  # dealt out anew only when the ranks change
    sampler.load_state_dict(sampler.state_dict())
    assert list(sampler) == list(range(4, 10))
    sampler.set_epoch(1)
    assert (len(sampler), sampler.processed_num) == (10, 0)
