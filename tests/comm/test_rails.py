"""Rails: any number of rails at any rates gives the same bits as one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _ranks import Rank, run_ranks

from headway.comm.communicator import Communicator
from headway.comm.rails import (
    StripedGroup,
    compute_min_striped_bytes,
    count_chunk_elements,
    cut_chunks,
    divide_by_rates,
)
from headway.core.errors import UsageError
from headway.core.world import Membership, World

RATES = ((1.0,), (1.0, 1.0), (2.0, 1.0), (1.0, 0.0, 5.0), (1e6, 1.0))
# Gloo's ring splits the last one, in float64, into three segments for each of three ranks.
LENGTHS = (5, 4097, 800_000)


def make_values(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1000 + length)
    return torch.randn(length, generator=generator).mul(100).to(dtype)


def run_operations(rank: Rank) -> list[list[torch.Tensor]]:
    """Returns the results of all operations, for each of `RATES`."""
    groups = [rank.world.create_group(name="rail") for _ in range(max(map(len, RATES)))]
    size, number, out = rank.size, rank.rank, []
    for rates in RATES:
        rails, found = StripedGroup(groups[: len(rates)], rates, min_bytes=0), []
        for length in LENGTHS:
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                found.append(make_values(number, length, dtype))
                rails.all_reduce(found[-1]).wait()
            found.append(make_values(number, length))
            rails.all_reduce(found[-1], "max").wait()
            own = make_values(number, length)
            exchanged, gathered = torch.empty(length * size), torch.empty(length * size)
            rails.all_to_all(exchanged, torch.cat([own + peer for peer in range(size)])).wait()
            rails.all_gather(gathered, own).wait()
            received = torch.empty(length)
            # Receive first: both directions are under way at once.
            receiving = rails.recv(received, (number - 1) % size)
            rails.send(own, (number + 1) % size).wait()
            receiving.wait()
            found += [exchanged, gathered, received]
        out.append(found)
    return out


@pytest.mark.check
@pytest.mark.parametrize("size", [2, 3, 5])
def test_results_have_the_bits_of_one_rail(size: int) -> None:
    results = run_ranks(size, run_operations)
    for number, (single, *striped) in enumerate(results):
        for found in striped:
            assert all(map(torch.equal, found, single))
        for start, length in zip(range(0, len(single), 7), LENGTHS, strict=True):
            exchanged, gathered, received = single[start + 4 : start + 7]
            given = [make_values(rank, length) for rank in range(size)]
            assert torch.equal(exchanged, torch.cat([values + number for values in given]))
            assert torch.equal(gathered, torch.cat(given))
            assert torch.equal(received, given[(number - 1) % size])


def reduce_by_all_algorithms(rank: Rank, rails: int) -> list[torch.Tensor]:
    communicator, out = Communicator(rank.world, rails=rails), []
    for algorithm in communicator.algorithms:
        for wire in ("fp32", "fp16"):
            values = make_values(rank.rank, 1_100_000)
            communicator.all_reduce(values, algorithm=algorithm, wire=wire).wait()
            out.append(values)
    communicator.close()
    return out


@pytest.mark.check
def test_every_algorithm_has_the_bits_of_one_rail() -> None:
    hosts = (0, 1, 2, 0, 1, 2)
    single, striped = (run_ranks(len(hosts), reduce_by_all_algorithms, rails, hosts=hosts)[0] for rails in (1, 3))
    assert len(single) == 8
    assert all(map(torch.equal, striped, single))


RATE = st.floats(0.001, 1e9)


@given(length=st.integers(0, 10**7), rates=st.lists(RATE, min_size=1, max_size=5))
def test_a_message_is_divided_by_the_rates(length: int, rates: list[float]) -> None:
    parts = divide_by_rates(length, rates)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == length
    for rate, (start, stop) in zip(rates, parts, strict=True):
        assert abs((stop - start) - length * rate / sum(rates)) <= 1.001


@given(length=st.integers(1, 3000), size=st.integers(3, 7), cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_each_element_stays_in_its_chunk(length: int, size: int, cuts: tuple[float, float]) -> None:
    values = torch.arange(1, length + 1)
    chunk = count_chunk_elements(length, size, values.element_size())
    assert chunk * size >= length
    start, stop = sorted(round(cut * chunk) for cut in cuts)
    if start == stop:
        return
    part = torch.cat(cut_chunks(values, size, chunk, start, stop))
    width = count_chunk_elements(len(part), size, values.element_size())
    for number, own in enumerate(part.split(width)):
        first = number * chunk
        assert torch.equal(own[own > 0], values[first + start : min(first + stop, first + chunk)])


def test_small_messages_take_one_rail() -> None:
    # 0.4 ms is what 10 kB take on a link of 25 MB/s, and a second link of the same rate saves half of a message's time.
    assert compute_min_striped_bytes([25e6, 25e6]) == pytest.approx(20e3)
    assert compute_min_striped_bytes([25e6, 25e6, 25e6]) < 20e3 < compute_min_striped_bytes([25e6, 1e6])
    assert compute_min_striped_bytes([25e6, 0.0]) == float("inf")


def refuse_interfaces(rank: Rank) -> list[str]:
    out = []
    for number, names in enumerate((("lo", "none-such"), ("none-such",), ("lo", "lo"), ("",))):
        membership = Membership(rank.rank, rank.size, number, identities=["a", "b"])
        with pytest.raises(UsageError) as refused:
            World.create(rank.store, membership, torch.device("cpu"), master="127.0.0.1", secret=b"x", interface=names)
        out.append(str(refused.value))
    return out


def test_an_interface_that_does_not_exist_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(2, refuse_interfaces)
    assert first == second
    for message in first[:2]:
        assert "there is no network interface none-such with an address on the host of rank 0" in message
        assert "lo. Name interfaces that all hosts have." in message
    assert all("Name each interface once, for example [eth0, eth1]." in message for message in first[2:])


def test_nccl_uses_several_interfaces_by_itself() -> None:
    with pytest.raises(UsageError, match=r"NCCL opens the connections.*set NCCL_SOCKET_IFNAME=eth0,eth1"):
        World.create(
            torch.distributed.HashStore(),
            Membership(0, 2),
            torch.device("cuda"),
            master="127.0.0.1",
            secret=b"x",
            interface=("eth0", "eth1"),
        )
