"""Exchanges of Gloo ranks: pieces of any size arrive where they belong."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from torch import Tensor

from headway.core.errors import CollectiveTimeoutError, CommunicationError
from headway.core.group import DIRECT_BYTES, Group

LARGE = DIRECT_BYTES // 4
SIZES = (0, 1, 300, LARGE - 1, LARGE, 2 * LARGE + 7)
"""In fp32: none, small, and from `LARGE` on those that go directly."""


def draw_sizes(ranks: int, number: int) -> list[list[int]]:
    """Elements that each rank sends to each: mixed, none, all small, all large, and large ones of one rank alone."""
    make = random.Random(number)
    kinds = (SIZES, (0,), SIZES[:4], SIZES[4:], SIZES)
    sizes = [[make.choice(kinds[number % len(kinds)]) for _ in range(ranks)] for _ in range(ranks)]
    return sizes if number % len(kinds) < 4 else [row if rank == 1 else [5] * ranks for rank, row in enumerate(sizes)]


def piece(source: int, to: int, number: int, numel: int) -> Tensor:
    return torch.arange(numel, dtype=torch.float32) * (1 + source) + 1000 * to + number


def exchange(rank: Rank) -> list[bool]:
    group, right = rank.world.create_group(range(rank.size), name="exchanges"), []
    pending = []
    for number in range(15):
        sizes = draw_sizes(rank.size, number)
        mine, got = sizes[rank.rank], [row[rank.rank] for row in sizes]
        into = torch.cat([piece(rank.rank, to, number, numel) for to, numel in enumerate(mine)])
        out = torch.full((sum(got),), -1.0)
        expected = torch.cat([piece(source, rank.rank, number, numel) for source, numel in enumerate(got)])
        pending.append((group.all_to_all(out, into, got, mine), out, expected, into))
        # Several are on their way at once.
        if number % 3 == 2:
            for work, *_ in pending:
                work.wait()
            right += [torch.equal(out, expected) for _, out, expected, _ in pending]
            pending = []
    for numel in (3, LARGE - 1, LARGE):
        gathered = torch.empty(rank.size * numel)
        group.all_gather(gathered, piece(rank.rank, 0, 0, numel)).wait()
        right.append(torch.equal(gathered, torch.cat([piece(source, 0, 0, numel) for source in range(rank.size)])))
        swapped = torch.empty(rank.size * numel)
        group.all_to_all(swapped, gathered + rank.rank).wait()
        expected = torch.cat([piece(rank.rank, 0, 0, numel) + source for source in range(rank.size)])
        right.append(torch.equal(swapped, expected))
    # A receive of the group's own that waits meanwhile gets none of the pieces.
    asked = torch.empty(LARGE)
    receiving = group.recv(asked, (rank.rank - 1) % rank.size)
    work = group.all_to_all(torch.empty(rank.size * LARGE), torch.zeros(rank.size * LARGE))
    work.wait()
    # What has been waited for is there.
    work.wait()
    group.send(torch.full((LARGE,), 1.0 + rank.rank), (rank.rank + 1) % rank.size).wait()
    receiving.wait()
    right.append(bool((asked == 1 + (rank.rank - 1) % rank.size).all()))
    # Pieces are equal or told.
    with pytest.raises(RuntimeError):
        group.all_to_all(torch.empty(rank.size * LARGE + 1), torch.zeros(rank.size * LARGE + 1))
    return right


@pytest.mark.parametrize("ranks", [2, 3])
def test_pieces_of_any_size_arrive(ranks: int) -> None:
    for right in run_ranks(ranks, exchange):
        assert len(right) == 22
        assert all(right), right


def move_until_interrupted(group: Group, *, sends: bool) -> None:
    interrupting = threading.Thread(target=lambda: (time.sleep(0.003), group.interrupt(1)))
    for number in itertools.count():
        if number == 10 and sends:
            interrupting.start()
        move = group.send if sends else group.recv
        try:
            move(torch.zeros(8), int(sends)).wait()
        except CommunicationError:
            if sends:
                interrupting.join()
            raise


def interrupt_sends(rank: Rank) -> list[bool]:
    """Whether each row of sends, or of receives, ended because of the interruption, and not by its limit of time."""
    ended = []
    for number in range(12):
        group = rank.world.create_group(range(2), name=f"interrupted {number}", timeout_s=60)
        with pytest.raises(CommunicationError) as failed:
            move_until_interrupted(group, sends=rank.rank == 0)
        ended.append(not isinstance(failed.value, CollectiveTimeoutError))
        rank.world.control.barrier()
    return ended


def test_sends_that_are_interrupted_end() -> None:
    """After `abort` alone, about one wait in ten did not: Gloo had forgotten the send."""
    assert run_ranks(2, interrupt_sends) == [[True] * 12] * 2
