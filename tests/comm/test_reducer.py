"""Reducer: N ranks are one rank, for every algorithm; what rides in the last bucket; what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from _ranks import Rank, run_ranks
from tests._support import collect_messages

from headway.comm.buckets import LAST_BUCKET_DIVISOR, GradientBucket, plan_buckets
from headway.comm.communicator import Communicator
from headway.comm.reducer import BucketPlan, Reducer
from headway.core.errors import CommunicationError
from headway.core.world import World

BATCH = 11


class Net(nn.Module):
    """Convolution in channels-last, batch norm, a branch that only even inputs take, and a part nobody uses."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.head = nn.Linear(8, 5)
        self.some = nn.Linear(8, 5)
        self.idle = nn.Linear(2, 2)

    def forward(self, images: torch.Tensor, some: bool) -> torch.Tensor:
        found = torch.relu(self.norm(self.conv(images))).mean((2, 3))
        return self.head(found) + (self.some(found) if some else 0)


def network(norm: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(norm).double().to(memory_format=torch.channels_last)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(5, (BATCH,), generator=generator)


def train(net: Net, reducer: Reducer | None, rank: int, size: int, accumulate: int) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for step in range(4):
        images, labels = batch(step)
        low, high = rank * BATCH // size, (rank + 1) * BATCH // size
        parts = list(
            zip(images[low:high].tensor_split(accumulate), labels[low:high].tensor_split(accumulate), strict=True)
        )
        total = torch.zeros((), dtype=torch.float64)
        for number, (part, wanted) in enumerate(parts):
            if reducer is not None and number == len(parts) - 1:
                reducer.prepare_for_backward()
            loss = nn.functional.cross_entropy(net(part, some=step > 0), wanted, reduction="sum") / BATCH
            loss.backward()
            total += loss.detach()
        if reducer is not None:
            verdict = reducer.finish(total, (float(rank),))
            assert verdict is not None
            assert verdict.live_ranks == size
            assert verdict.flags == (sum(range(size)),)
            losses.append(verdict.loss)
        else:
            losses.append(float(total))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses


def ranks_train(rank: Rank, accumulate: int) -> list[tuple[list[float], dict[str, torch.Tensor], list[str]]]:
    out = []
    communicator = Communicator(rank.world)
    for algorithm in communicator.algorithms:
        net = network()
        reducer = Reducer(
            net.named_parameters(),
            communicator,
            # wire: float64 goes as it is
            plan=BucketPlan(
                choose_algorithm=lambda nbytes, algorithm=algorithm: algorithm, bucket_bytes=600, wire="fp16"
            ),
            num_flags=1,
        )
        with collect_messages() as said:
            losses = train(net, reducer, rank.rank, rank.size, accumulate)
        assert len(reducer.buckets) > 2
        assert reducer.order is not None
        reducer.close()
        out.append((losses, dict(net.state_dict()), said))
    communicator.close()
    return out


@pytest.mark.thin(1)
@pytest.mark.parametrize(("hosts", "accumulate"), [((0, 0), 1), ((0, 1, 1), 2), ((0, 1, 0, 1), 1)])
def test_n_ranks_are_one_rank(hosts: tuple[int, ...], accumulate: int) -> None:
    alone = network()
    losses = train(alone, None, 0, 1, 1)
    results = run_ranks(len(hosts), ranks_train, accumulate, hosts=hosts)
    for runs in zip(*results, strict=True):
        for found, state, said in runs:
            assert found == pytest.approx(losses, abs=1e-12)
            for name, value in alone.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
                assert torch.equal(state[name], runs[0][1][name])
            assert len(said) == 1
            assert "some.weight" in said[0]
            assert "idle.bias" in said[0]


def statistics(rank: Rank) -> Any:
    net = network(norm=True)
    communicator = Communicator(rank.world)
    buffers = [value for value in net.buffers() if value.is_floating_point()]
    reducer = Reducer(
        net.named_parameters(), communicator, plan=BucketPlan(bucket_bytes=1 << 20), buffers=buffers, average=True
    )
    images, labels = batch(rank.rank)
    with torch.no_grad():
        net(images, True)
    own = [value.clone() for value in buffers]
    net.zero_grad()
    nn.functional.cross_entropy(net(images, True), labels).backward()
    grads = {name: value.grad.clone() for name, value in net.named_parameters() if value.grad is not None}
    for buffer, value in zip(buffers, own, strict=True):
        buffer.copy_(value)
    reducer.finish()
    communicator.close()
    assert net.idle.weight.grad is None  # nobody used it: the optimizer leaves it alone
    assert net.conv.weight.grad.stride() == net.conv.weight.stride()
    return own, buffers, grads, {name: net.get_parameter(name).grad for name in grads}


def test_statistics_and_gradients_become_means() -> None:
    results = run_ranks(3, statistics)
    for number in range(len(results[0][0])):
        mean = torch.stack([own[number] for own, *_ in results]).mean(0)
        for _, found, _, _ in results:
            torch.testing.assert_close(found[number], mean, rtol=0, atol=1e-12)
    for name in results[0][2]:
        mean = torch.stack([grads[name] for *_, grads, _ in results]).mean(0)
        for *_, found in results:
            torch.testing.assert_close(found[name], mean, rtol=0, atol=1e-12)


def double_statistics(rank: Rank, kind: torch.dtype) -> tuple[torch.Tensor, torch.dtype]:
    """Buffers of float64 beside gradients of another type."""
    communicator = Communicator(rank.world)
    weights = [nn.Parameter(torch.ones(5, dtype=kind)) for _ in range(2)]
    mean = torch.tensor([1 / 3, 1e-9, 1e12 + 1 / 7], dtype=torch.float64) * (rank.rank + 1)
    single = torch.full((2,), 0.5 + rank.rank)
    named = [(f"weight {number}", value) for number, value in enumerate(weights)]
    reducer = Reducer(named, communicator, plan=BucketPlan(bucket_bytes=8, wire="fp16"), buffers=[mean, single])
    for _ in range(2):  # the second time as the gradients came
        mean.copy_(torch.tensor([1 / 3, 1e-9, 1e12 + 1 / 7], dtype=torch.float64) * (rank.rank + 1))
        single.fill_(0.5 + rank.rank)
        reducer.prepare_for_backward()
        sum(value.sum() for value in weights).backward()
        reducer.finish()
        assert all(value.grad is not None and (value.grad == 2).all() for value in weights)
        for value in weights:
            value.grad = None
    reducer.close()
    communicator.close()
    assert (single == 1.0).all()
    return mean, reducer.buckets[-1].flat.dtype


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_statistics_of_float64_keep_their_precision(kind: torch.dtype) -> None:
    exact = torch.tensor([1 / 3, 1e-9, 1e12 + 1 / 7], dtype=torch.float64) * 1.5
    for found, dtype in run_ranks(2, double_statistics, kind):
        assert dtype == torch.float64
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=0)


def unused_twice(rank: Rank, named: bool) -> tuple[list[str], bool]:
    """Two Reducers, as of two generations."""
    net, communicator = network(), Communicator(rank.world)
    said: list[str] = []
    for _ in range(2):
        reducer = Reducer(net.named_parameters(), communicator, has_reported_unused=named)
        images, labels = batch(0)
        reducer.prepare_for_backward()
        nn.functional.cross_entropy(net(images, False), labels).backward()
        with collect_messages() as found:
            reducer.finish()
        said += found
        net.zero_grad()
        named = reducer.has_reported_unused
        reducer.close()
    communicator.close()
    return said, named


@pytest.mark.parametrize("named", [False, True])
def test_parameters_without_a_gradient_are_named_once(named: bool) -> None:
    for said, after in run_ranks(2, unused_twice, named):
        assert [text.split(",")[0] for text in said] == ["Without a gradient in the first step"] * (not named)
        assert after


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_frozen_later_has_no_gradient(waits: bool) -> None:
    """Also where the host does not wait in each step, as on CUDA, and knows from the first one what is used."""
    net, communicator = network(), Communicator(World.create_single(torch.device("cpu")))
    reducer = Reducer(net.named_parameters(), communicator, has_reported_unused=True)
    reducer._host_waits = waits
    for step in range(2):
        net.zero_grad()
        net.conv.requires_grad_(step == 0)
        images, labels = batch(step)
        reducer.prepare_for_backward()
        nn.functional.cross_entropy(net(images, True), labels).backward()
        reducer.finish()
        assert (net.conv.weight.grad is None) == (step == 1)
        assert net.head.weight.grad is not None
    reducer.close()
    communicator.close()


def uneven(rank: Rank) -> tuple[int, int, dict[str, torch.Tensor]]:
    net, communicator = network(), Communicator(rank.world)
    reducer = Reducer(net.named_parameters(), communicator, average=True, uneven=True)
    steps, lived = 0, 0
    while True:
        has = steps < 2 + rank.rank
        if has:
            images, labels = batch(steps)
            reducer.prepare_for_backward()
            nn.functional.cross_entropy(net(images, True), labels).backward()
        verdict = reducer.finish(contributes=has)
        assert verdict is not None
        if not verdict.live_ranks:
            break
        steps, lived = steps + 1, lived + verdict.live_ranks
        for value in net.parameters():
            if value.grad is not None:
                value.data -= 0.1 * value.grad
        net.zero_grad()
    reducer.close()
    communicator.close()
    return steps, lived, dict(net.state_dict())


def test_uneven_data_ends_everywhere_at_the_same_step() -> None:
    results = run_ranks(3, uneven)
    assert [(steps, lived) for steps, lived, _ in results] == [(4, 9)] * 3
    net = network()
    for step in range(4):  # all ranks had the same batches: the mean over those that live is the batch's own gradient
        images, labels = batch(step)
        nn.functional.cross_entropy(net(images, True), labels).backward()
        for value in net.parameters():
            if value.grad is not None:
                value.data -= 0.1 * value.grad
        net.zero_grad()
    for _, _, state in results:
        for name, value in net.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def mixed_up(rank: Rank) -> str:
    net, communicator = network(), Communicator(rank.world)
    reducer = Reducer(net.named_parameters(), communicator)
    first, second = torch.ones(4), torch.ones(4)
    named = [(first, "first"), (second, "second")]
    for tensor, name in named if rank.rank else reversed(named):
        communicator.all_reduce(tensor, tag=name).wait()
    images, labels = batch(0)
    nn.functional.cross_entropy(net(images, True), labels).backward()
    try:
        reducer.finish()
    except CommunicationError as error:
        return str(error)
    finally:
        communicator.close()
    return "not noticed"


def test_operations_in_another_order_are_named() -> None:
    for said in run_ranks(3, mixed_up):
        assert "Number 1 was rank 0: second; rank 1: first; rank 2: first" in said


def sixteen_bits(rank: Rank) -> tuple[str, list[str], torch.Tensor]:
    net, communicator = nn.Linear(1000, 4, bias=False), Communicator(rank.world)
    spare = nn.Parameter(torch.zeros(3))  # the last bucket goes as fp32: give it something else to carry
    reducer = Reducer(
        [("spare", spare), *net.named_parameters()],
        communicator,
        plan=BucketPlan(choose_algorithm=lambda nbytes: "two_dimensional", bucket_bytes=100, wire="fp16"),
    )
    values = torch.full((4, 1000), 1e-14)
    values[0, ::1000] = 1.0
    with collect_messages() as said:
        for _ in range(2):  # what a step lost is known in the next one
            net.weight.grad, spare.grad = values.clone(), torch.ones(3)
            reducer.finish()
    wire = reducer.wire
    reducer.close()
    communicator.close()
    return wire, said, net.weight.grad


def test_a_wire_that_loses_too_much_is_given_up() -> None:
    for wire, said, _ in run_ranks(2, sixteen_bits, hosts=(0, 1)):
        assert wire == "fp32"
        assert len(said) == 1
        assert said[0].startswith("fp16 between hosts lost")


def without_parameters(rank: Rank) -> list[tuple[float, tuple[float, ...]]]:
    reducer = Reducer([], Communicator(rank.world), num_flags=1)
    sums = []
    for _ in range(2):
        reducer.prepare_for_backward()
        reduction = reducer.finish(1.5, (float(rank.rank),))
        sums.append((reduction.loss, reduction.flags))
    return sums


def test_without_parameters_the_numbers_are_summed_alone() -> None:
    assert run_ranks(2, without_parameters) == [[(3.0, (1.0,))] * 2] * 2


def test_missing_flags_are_refused() -> None:
    communicator = Communicator(World.create_single(torch.device("cpu")))
    with pytest.raises(ValueError, match="1 flags"):
        Reducer([("a", nn.Parameter(torch.ones(2)))], communicator).finish(0.0, (1.0,))


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.sampled_from(["fp32", "bf16"])), min_size=1, max_size=40),
    st.integers(1, 8000),
)
def test_a_plan_has_everything_once_and_keeps_to_its_size(items: list[tuple[int, str]], most: int) -> None:
    sizes, kinds = [size for size, _ in items], [kind for _, kind in items]
    groups = plan_buckets(sizes, kinds, most)
    assert sorted(number for group in groups for number in group) == list(range(len(items)))
    for group in groups:
        assert group == sorted(group)
        assert len({kinds[number] for number in group}) == 1
        assert len(group) == 1 or sum(sizes[number] for number in group) <= most
    last = groups[-1]
    assert len(last) == 1 or sum(sizes[number] for number in last) <= most // LAST_BUCKET_DIVISOR


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "gaps"])
def test_views_have_their_parameters_strides_where_these_leave_no_gaps(layout: str) -> None:
    value = torch.randn(4, 3, 5, 5)
    if layout == "channels_last":
        value = value.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        value = value.transpose(0, 3)
    elif layout == "gaps":
        value = value[:, ::2]
    parameter = nn.Parameter(value)
    parameter.grad = torch.randn_like(value)
    bucket = GradientBucket([("a", parameter), ("b", nn.Parameter(torch.ones(3)))], ranks=3, tail=2)
    bucket.fill()
    assert torch.equal(bucket.views[0], parameter.grad)
    assert (bucket.views[0].stride() == value.stride()) == (layout != "gaps")
    assert bucket.flat.numel() % 64 == bucket.flat.numel() % 3 == 0
    assert torch.count_nonzero(bucket.flat) == value.numel()
