"""Communicator: every algorithm is the sum, on every layout of hosts; all ranks get the same bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _ranks import Rank, run_ranks

from headway.comm.communicator import ALGORITHMS, Communicator
from headway.comm.wire_codec import WireCodec
from headway.core.errors import CommunicationError, GenerationEndedError, UsageError
from headway.core.world import World

LAYOUTS = [(0, 0), (0, 1), (0, 1, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1, 1)]
LENGTHS = (1, 2, 7, 64, 4097)


def value(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1000 + length)
    found = torch.randn(length, generator=generator, dtype=torch.float64)
    return (found * 8).round().to(dtype) if dtype in (torch.int64, torch.int32) else found.to(dtype)


def sums(rank: Rank) -> list[Any]:
    out = []
    with_rails = Communicator(rank.world, rails=2)
    for algorithm in with_rails.algorithms:
        for dtype in (torch.float64, torch.float32, torch.int64, torch.int32):
            buffers = [value(rank.rank, length, dtype) for length in LENGTHS]
            pending = [with_rails.all_reduce(buffer, algorithm=algorithm, tag=str(len(buffer))) for buffer in buffers]
            for one in pending:
                one.wait()
            out.append((algorithm, "fp32", dtype, buffers))
        for wire in ("fp16", "bf16"):
            buffers = [value(rank.rank, length, torch.float32) for length in LENGTHS]
            for buffer in buffers:
                with_rails.all_reduce(buffer, algorithm=algorithm, wire=wire).wait()
            out.append((algorithm, wire, torch.float32, buffers))
    large = value(rank.rank, 600_000, torch.float32)  # striped
    with_rails.all_reduce(
        large, algorithm="two_dimensional" if "two_dimensional" in with_rails.algorithms else "ring"
    ).wait()
    out.append(("striped", "fp32", torch.float32, [large]))
    out.append((with_rails.digest, with_rails.log[-1].done, with_rails.log[-1].seq))
    with_rails.close()
    return out


@pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: "".join(map(str, hosts)))
@pytest.mark.thin(2)
def test_every_algorithm_is_the_sum_and_the_same_bits_everywhere(hosts: tuple[int, ...]) -> None:
    results = run_ranks(len(hosts), sums, hosts=hosts)
    assert {result[-1] for result in results} == {results[0][-1]}  # one digest, one log
    names = set()
    for rows in zip(*(result[:-1] for result in results), strict=True):
        algorithm, wire, dtype, first = rows[0]
        names.add(algorithm)
        tolerance = {"fp32": 1e-12 if dtype == torch.float64 else 2e-6, "fp16": 4e-3, "bf16": 3e-2}[wire]
        for number, found in enumerate(first):
            terms = [value(rank, len(found), dtype) for rank in range(len(hosts))]
            expected = torch.stack(terms).to(torch.float64).sum(0)
            scale = torch.stack(terms).abs().to(torch.float64).sum(0).amax()
            assert (found.to(torch.float64) - expected).abs().amax() <= tolerance * scale
            for _, _, _, others in rows[1:]:
                assert torch.equal(others[number], found)
    even = len({hosts.count(host) for host in hosts}) == 1
    assert names - {"striped"} == set(ALGORITHMS) - (set() if even else {"two_dimensional"})


def refused(rank: Rank) -> str:
    communicator = Communicator(rank.world)
    try:
        with pytest.raises(UsageError, match="contiguous"):
            communicator.all_reduce(torch.ones(4, 4).T)
        with pytest.raises(UsageError, match="as many ranks on each host"):
            communicator.all_reduce(torch.ones(4), algorithm="two_dimensional")
    finally:
        communicator.close()
    return "refused"


def test_what_cannot_be_done_is_refused() -> None:
    assert run_ranks(3, refused, hosts=(0, 0, 1)) == ["refused"] * 3
    with pytest.raises(UsageError, match="0 rails"):
        Communicator(World.create_single(torch.device("cpu")), rails=0)


def test_a_world_of_one_changes_nothing() -> None:
    communicator = Communicator(World.create_single(torch.device("cpu")))
    buffer = torch.arange(5.0)
    seen = []
    pending = communicator.all_reduce(buffer, algorithm="tree", wire="fp16")
    pending.add_done_callback(seen.append)
    pending.wait()
    assert buffer.tolist() == [0, 1, 2, 3, 4]
    assert seen == [pending]
    communicator.close()


def orders(rank: Rank) -> list[int]:
    communicator = Communicator(rank.world)
    buffers = [torch.ones(8), torch.ones(8)]
    named = list(zip(buffers, ("a", "b"), strict=True))
    for buffer, name in named if rank.rank == 0 else reversed(named):
        communicator.all_reduce(buffer, tag=name).wait()
    communicator.close()
    return communicator.digest


def test_another_order_gives_another_digest() -> None:
    found = run_ranks(3, orders)
    assert found[1] == found[2] != found[0]


def given_up(rank: Rank) -> list[str]:
    communicator = Communicator(rank.world)
    communicator.all_reduce(torch.ones(4)).wait()
    if rank.rank == 2:
        import time

        time.sleep(60)
    kinds = []
    for algorithm in communicator.algorithms:
        pending = communicator.all_reduce(torch.ones(100_000), algorithm=algorithm)
        if algorithm == "ring" and rank.rank < 2:
            import threading

            timer = threading.Timer(0.3, rank.world.abort, ("given up",))
            timer.start()
        try:
            pending.wait()
        except CommunicationError as error:
            kinds.append(f"{type(error).__name__}: {error}")
        if rank.rank < 2:
            timer.join()
    communicator.close()
    return kinds


def test_a_generation_that_is_given_up_fails_at_once() -> None:
    results = run_ranks(4, given_up, hosts=(0, 0, 1, 1), dying=(2, 3))
    for kinds in results[:2]:
        assert kinds[1:] == ["GenerationEndedError: given up."] * 3
        assert (
            kinds[0] == "GenerationEndedError: given up." or "closed by peer" in kinds[0]
        )  # the other one gave up a moment before


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_messages_hold_what_their_type_can(wire: Any) -> None:
    codec = WireCodec(wire, torch.device("cpu"))
    for scale in (1e-33, 1e-8, 1.0, 6e4, 1e30, 3e38):
        values = torch.tensor([1.0, -0.5, 0.25, 2**-11, 0.0]) * scale
        message, out = codec.allocate_message(5, values.device), torch.empty(5)
        codec.encode(values, message)
        codec.decode(message, out)
        torch.testing.assert_close(out, values, rtol=2**-8 if wire == "bf16" else 2**-10, atol=0)
    assert codec.num_flushed == 0


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so_and_is_counted(bad: float) -> None:
    codec = WireCodec("fp16", torch.device("cpu"))
    message, out = codec.allocate_message(3, torch.device("cpu")), torch.empty(3)
    codec.encode(torch.tensor([1.0, bad, 2.0]), message)
    codec.decode(message, out)
    assert not out[1].isfinite()
    assert codec.num_flushed >= 1


def test_what_is_flushed_to_zero_is_counted() -> None:
    codec = WireCodec("fp16", torch.device("cpu"))
    values = torch.tensor([1.0, 1e-20, 1e-30, 0.0])
    message, out = codec.allocate_message(4, values.device), torch.empty(4)
    codec.encode(values, message)
    codec.decode(message, out)
    assert out.tolist() == [1, 0, 0, 0]
    assert codec.num_flushed == 2
    codec.decode(message, out, add=True)
    assert out.tolist() == [2, 0, 0, 0]


def sum_in_part(rank: Rank) -> tuple[float, tuple[tuple[int, ...], ...], str]:
    """Of four ranks, those of equal parity; they count as on the hosts of ranks 0 and 2."""
    world = rank.world
    part = world.create_part([world.rank % 2, world.rank % 2 + 2], name="part", on_hosts_of=(0, 2))
    buffer = torch.full((3,), float(world.rank))
    communicator = Communicator(part)
    communicator.all_reduce(buffer).wait()
    communicator.close()
    world.abort("the test is over")
    with pytest.raises(GenerationEndedError) as seen:
        part.create_group(name="later")
    return float(buffer[0]), part.hosts, str(seen.value)


def test_a_part_of_a_world_sums_alone_and_ends_with_it() -> None:
    found = run_ranks(4, sum_in_part, hosts=(0, 0, 0, 1))
    assert [one[0] for one in found] == [2, 4, 2, 4]
    assert {one[1] for one in found} == {((0, 1),)}
    assert all("the test is over" in one[2] for one in found)
