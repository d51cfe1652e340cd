"""Horovod's collectives by value: every operation and type, ragged and empty tensors, orders that differ by rank."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from functools import reduce

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from tests.comm.hvd._start import refused, started, value
from torch import Tensor

import headway.comm.hvd as hvd

SUMMABLE = (torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOVABLE = (*SUMMABLE, *FLOATS, torch.int16, torch.bool)
SHAPES: tuple[tuple[int, ...], ...] = ((17,), (5, 3), (2, 3, 4), (), (0, 3))


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted), f"{found} is not {wanted}"


def reductions(rank: Rank) -> None:
    ranks = range(rank.size)
    combine = {
        hvd.Sum: sum,
        hvd.Min: lambda values: reduce(torch.minimum, values),
        hvd.Max: lambda values: reduce(torch.maximum, values),
        hvd.Product: lambda values: reduce(torch.mul, values),
    }
    for dtype, shape in itertools.product((*SUMMABLE, *FLOATS), SHAPES):
        values = [value(one, shape, dtype, salt=len(shape)) for one in ranks]
        mine = values[rank.rank].clone()
        for op, combined in combine.items():
            same(hvd.allreduce(mine, op=op), combined(values).to(dtype))
        same(mine, values[rank.rank])
        total = sum(values)
        mean = total.div(rank.size) if dtype in FLOATS else (total // rank.size)  # all are positive
        same(hvd.allreduce(mine), mean.to(dtype))
        inplace = mine.clone()
        assert hvd.allreduce_(inplace, op=hvd.Sum).data_ptr() == inplace.data_ptr()
        same(inplace, total.to(dtype))
    numbers = value(rank.rank, (9,), torch.float64)
    total = sum(value(one, (9,), torch.float64) for one in ranks)
    scaled = hvd.allreduce(numbers, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    same(scaled, total * 2)
    whole = hvd.allreduce(numbers.int(), op=hvd.Sum, prescale_factor=0.5)
    same(whole, sum((value(one, (9,), torch.int32) / 2).trunc().int() for one in ranks).int())
    negative = hvd.allreduce(torch.tensor([-7 * rank.size, 7 * rank.size, -1]), op=hvd.Average)
    same(negative, torch.tensor([-7 * rank.size, 7 * rank.size, -1]))


def groups_and_order(rank: Rank) -> None:
    ranks = range(rank.size)
    shapes = [(3,), (2, 2), (0,), ()]
    mixed = [value(rank.rank, shape, dtype) for shape, dtype in zip(shapes, FLOATS, strict=True)]
    wanted = [sum(value(one, tuple(t.shape), t.dtype) for one in ranks) for t in mixed]
    for found, want in zip(hvd.grouped_allreduce(mixed, op=hvd.Sum), wanted, strict=True):
        same(found, want)
    for tensor, want in zip(hvd.grouped_allreduce_([t.clone() for t in mixed], op=hvd.Sum), wanted, strict=True):
        same(tensor, want)
    # Every rank submits in another order; small ones share buffers.
    names = [f"t{number}" for number in range(40)]
    turned = names[rank.rank :] + names[: rank.rank]
    order = turned if rank.rank % 2 else turned[::-1]
    handles = {
        name: hvd.allreduce_async(torch.full((len(name) + 3,), float(names.index(name))), name=name, op=hvd.Sum)
        for name in order
    }
    for name in reversed(order):
        found = hvd.synchronize(handles[name])
        same(found, torch.full((len(name) + 3,), float(names.index(name) * rank.size)))
        assert hvd.synchronize(handles[name]) is None
        refused(ValueError, lambda handle=handles[name]: hvd.poll(handle), "waited for already")
    # Kinds under way at the same time, in opposite orders, and from several threads.
    kinds = [
        lambda: hvd.allreduce_async(torch.ones(3), name="x", op=hvd.Sum),
        lambda: hvd.allgather_async(torch.full((rank.rank, 2), rank.rank), name="x"),
        lambda: hvd.broadcast_async(torch.full((4,), rank.rank), rank.size - 1, name="x"),
        lambda: hvd.reducescatter_async(torch.ones(rank.size), name="x", op=hvd.Sum),
    ]
    got: dict[int, Tensor] = {}
    numbers = range(4) if rank.rank % 2 else reversed(range(4))
    threads = [
        threading.Thread(target=lambda i=i: got.update({i: hvd.synchronize(kinds[i]())}), name=f"caller-{i}")
        for i in numbers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same(got[0], torch.full((3,), float(rank.size)))
    same(got[1], torch.cat([torch.full((one, 2), one) for one in ranks]))
    same(got[2], torch.full((4,), rank.size - 1))
    same(got[3], torch.full((1,), float(rank.size)))


def moves(rank: Rank) -> None:
    ranks = range(rank.size)
    for dtype in MOVABLE:
        for shapes in ([(one + 1, 3) for one in ranks], [(2 * one, 2, 2) for one in ranks], [(0, 4)] * rank.size):
            same(
                hvd.allgather(value(rank.rank, shapes[rank.rank], dtype)),
                torch.cat([value(one, shapes[one], dtype) for one in ranks]),
            )
        for root, shape in itertools.product(ranks, SHAPES):
            mine = value(rank.rank, shape, dtype)
            same(hvd.broadcast(mine, root), value(root, shape, dtype))
            same(mine, value(rank.rank, shape, dtype))
            same(hvd.broadcast_(mine, root), value(root, shape, dtype))
            same(mine, value(root, shape, dtype))
        # Rank a sends (a + b) % 3 rows to rank b; one row more than needed is left over.
        table = [[(a + b) % 3 for b in ranks] for a in ranks]
        sent = [value(a, (sum(table[a]) + 1, 2), dtype, salt=3) for a in ranks]
        rows, counts = hvd.alltoall(sent[rank.rank], splits=torch.tensor(table[rank.rank], dtype=torch.int32))
        from_each = [sent[a].split([*table[a], 1])[rank.rank] for a in ranks]
        same(rows, torch.cat(from_each))
        same(counts, torch.tensor([table[a][rank.rank] for a in ranks], dtype=torch.int32))
        equal = hvd.alltoall(value(rank.rank, (2 * rank.size, 2), dtype))
        same(equal, torch.cat([value(a, (2 * rank.size, 2), dtype).split(2)[rank.rank] for a in ranks]))
    # One rank has nearly everything: each broadcasts its own.
    big = [200_000 if one == rank.size - 1 else one for one in ranks]
    same(hvd.allgather(torch.full((big[rank.rank],), rank.rank)), torch.cat([torch.full((big[o],), o) for o in ranks]))
    several = hvd.grouped_allgather([torch.full((rank.rank + 1,), 7.0), torch.ones(rank.rank, 2, dtype=torch.int8)])
    same(several[0], torch.full((sum(ranks) + rank.size,), 7.0))
    same(several[1], torch.ones(sum(ranks), 2, dtype=torch.int8))
    for dtype, count in itertools.product((*SUMMABLE, *FLOATS), (0, 1, 7, 4 * rank.size)):
        total = sum(value(one, (count, 3), dtype) for one in ranks)
        lengths = [count // rank.size + (one < count % rank.size) for one in ranks]
        mine = value(rank.rank, (count, 3), dtype)
        same(hvd.reducescatter(mine, op=hvd.Sum), total.split(lengths)[rank.rank])
        mean = total.div(rank.size).to(dtype) if dtype in FLOATS else total // rank.size
        same(hvd.reducescatter(mine), mean.split(lengths)[rank.rank])
        same(mine, value(rank.rank, (count, 3), dtype))
    scattered = hvd.grouped_reducescatter(
        [torch.ones(rank.size, 2), torch.ones(rank.size)], op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0
    )
    same(scattered[0], torch.full((1, 2), 1.5 * rank.size))
    same(scattered[1], torch.full((1,), 1.5 * rank.size))


def compressed(rank: Rank) -> None:
    mine = torch.tensor([1.0, 1e-3, 300.0]) * (rank.rank + 1)
    for compression, dtype in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        found = hvd.allreduce(mine, op=hvd.Max, compression=compression)
        same(found, (torch.tensor([1.0, 1e-3, 300.0]) * rank.size).to(dtype).float())
        whole = torch.tensor([70_000])
        same(hvd.allreduce(whole, op=hvd.Max, compression=compression), whole)  # whole numbers go as they are


def places(rank: Rank) -> None:
    assert (hvd.rank(), hvd.size()) == (rank.rank, rank.size)
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank.rank, rank.size, 0, 1)
    assert hvd.is_homogeneous()
    assert hvd.is_initialized()
    hvd.init()  # once more does nothing
    assert hvd.rank() == rank.rank


def everything(rank: Rank, fusion_bytes: str) -> None:
    os.environ["HOROVOD_FUSION_THRESHOLD"] = fusion_bytes
    with started(rank):
        places(rank)
        reductions(rank)
        groups_and_order(rank)
        moves(rank)
        compressed(rank)


@pytest.mark.parametrize(
    ("size", "fusion_bytes"),
    [
        pytest.param(1, "", marks=pytest.mark.check),
        (2, "0"),
        pytest.param(3, "", marks=pytest.mark.check),
        pytest.param(4, "100", marks=pytest.mark.check),
    ],
)
def test_values(size: int, fusion_bytes: str) -> None:
    run_ranks(size, everything, fusion_bytes)


def gradients(rank: Rank) -> None:
    """Of f(x) summed with weights that differ by rank and place."""
    ranks = range(rank.size)
    with started(rank):

        def grad_of(function, shape: tuple[int, ...]) -> Tensor:  # type: ignore[no-untyped-def]
            x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
            y = function(x)
            (y * weights(rank.rank, tuple(y.shape))).sum().backward()
            assert x.grad is not None
            return x.grad

        def weights(one: int, shape: tuple[int, ...]) -> Tensor:
            count = int(torch.tensor(shape).prod())
            return torch.arange(count, dtype=torch.float64).reshape(shape) + 10 * one

        def total(shape: tuple[int, ...]) -> Tensor:
            return sum(weights(one, shape) for one in ranks)  # type: ignore[return-value]

        n, me = rank.size, rank.rank
        same(grad_of(lambda x: hvd.allreduce(x, op=hvd.Sum), (4,)), total((4,)))
        same(grad_of(hvd.allreduce, (4,)), total((4,)) / n)
        grouped = grad_of(lambda x: torch.cat(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)), (3,))
        same(grouped, total((6,))[:3] + 2 * total((6,))[3:])
        # As in Horovod, what is gathered or broadcast has the average of the ranks' gradients.
        rows = [one + 1 for one in ranks]
        mean = total((sum(rows), 2)) / n
        same(grad_of(hvd.allgather, (me + 1, 2)), mean.split(rows)[me])
        grouped = grad_of(lambda x: torch.cat(hvd.grouped_allgather([x, x])), (me + 1, 2))
        mean = total((2 * sum(rows), 2)) / n
        same(grouped, sum(half.split(rows)[me] for half in mean.split(sum(rows))))
        same(grad_of(lambda x: hvd.broadcast(x, 1), (5,)), total((5,)) / n if me == 1 else torch.zeros(5).double())
        # Rank a sends b rows to rank b, and keeps one.
        sends = list(ranks)
        back = grad_of(lambda x: hvd.alltoall(x, splits=sends)[0], (sum(sends) + 1, 2))
        parts = [weights(b, (b * n, 2)).split([b] * n)[me] for b in ranks]
        same(back, torch.cat([*parts, torch.zeros(1, 2).double()]))
        gathered = torch.cat([weights(one, (2, 2)) for one in ranks])
        same(grad_of(hvd.reducescatter, (2 * n, 2)), gathered)
        summed = grad_of(lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5), (2 * n, 2))
        same(summed, gathered * n * 0.5)
        grouped = grad_of(lambda x: torch.cat(hvd.grouped_reducescatter([x, x], op=hvd.Average)), (2 * n,))
        same(grouped, sum(torch.cat([weights(one, (4,)).split(2)[half] for one in ranks]) for half in (0, 1)))


def test_gradients() -> None:
    run_ranks(3, gradients)


def adasum_of(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    half = len(values) // 2  # neighbours first, then pairs of them
    a, b = adasum_of(values[:half]), adasum_of(values[half:])
    if not (a.any() and b.any()):
        return a + b
    return (1 - a.dot(b) / (2 * a.dot(a))) * a + (1 - a.dot(b) / (2 * b.dot(b))) * b


def adasum(rank: Rank) -> None:
    with started(rank):
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-2)):
            names = ("a", "b", "zero on rank 0")
            brought = [
                [torch.randn(length, generator=torch.Generator().manual_seed(one)).to(dtype) for length in (5, 64, 3)]
                for one in range(rank.size)
            ]
            brought[0][2].zero_()
            handles = [
                hvd.allreduce_async(tensor, name=name, op=hvd.Adasum)
                for name, tensor in zip(names, brought[rank.rank], strict=True)
            ]
            for number, handle in enumerate(handles):
                wanted = adasum_of([one[number].double() for one in brought])
                torch.testing.assert_close(hvd.synchronize(handle).double(), wanted, rtol=tolerance, atol=tolerance)
        same_everywhere = torch.ones(4)
        same(hvd.allreduce(same_everywhere, op=hvd.Adasum), same_everywhere)
        across = torch.zeros(rank.size)
        across[rank.rank] = 2.0
        same(hvd.allreduce(across, op=hvd.Adasum), torch.full((rank.size,), 2.0))
        refused(ValueError, lambda: hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum), "floating")


def test_adasum_adds_the_orthogonal_and_averages_the_parallel() -> None:
    run_ranks(4, adasum)


def not_a_power_of_two(rank: Rank) -> None:
    with started(rank):
        refused(NotImplementedError, lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum), "power of two", "3")


def test_adasum_wants_a_power_of_two() -> None:
    run_ranks(3, not_a_power_of_two)


def test_an_unknown_process_set_is_refused(job: None) -> None:
    unknown = hvd.ProcessSet([0])
    unknown.process_set_id = 7
    tensor = torch.ones(4)
    for case in (hvd.alltoall, hvd.allgather, hvd.allreduce, lambda one, **kw: hvd.broadcast(one, 0, **kw)):
        refused(ValueError, lambda case=case: case(tensor, process_set=unknown), "there is no process set 7")


def test_warnings_point_to_the_caller(job: None) -> None:
    tensor, parameter = torch.ones(3), torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), [("p", parameter)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for single in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
            single(tensor, average=True)
        for grouped in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allreduce_async):
            grouped([tensor], average=True)
        parameter.sum().backward()
        optimizer.synchronize()
        optimizer.step()
    assert [warning.filename for warning in said] == [__file__] * 8
