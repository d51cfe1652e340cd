"""The negotiator over real sockets: what it hands out, together with what, and when; settings, requests, groups."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.comm._ranks import Rank, run_ranks
from tests.comm.hvd._start import refused, value

from headway.comm.communicator import Communicator
from headway.comm.hvd import lifecycle
from headway.comm.hvd.collectives import scale_in_place, split_rows
from headway.comm.hvd.connection import connect_pair
from headway.comm.hvd.engine import Engine
from headway.comm.hvd.negotiator import Negotiator
from headway.comm.hvd.requests import Request, Response, find_disagreement
from headway.comm.hvd.settings import Settings
from headway.comm.hvd.timeline import Timeline
from headway.core.errors import UsageError


def summed(name: str, numbers: int = 1, kind: str = "float32", **fields: Any) -> Request:
    return Request(0, name, "allreduce", (kind,), ((numbers,),), **fields)


class Ranks:
    """The other ends of the connections of a negotiator."""

    def __init__(self, size: int, **settings: Any) -> None:
        pairs = [connect_pair(b"secret") for _ in range(size)]
        self.ends = [end for end, _ in pairs]
        self._unread: list[list[Any]] = [[] for _ in range(size)]
        theirs = {rank: end for rank, (_, end) in enumerate(pairs)}
        chosen = Settings(cycle_s=0.0, **settings)
        self.negotiator = Negotiator(theirs, chosen, Timeline(), lambda nbytes: f"for {nbytes}")

    def ask(self, rank: int, *requests: Request) -> None:
        for request in requests:
            self.ends[rank].send("request", request=request.to_fields())

    def told(self, rank: int, kind: str) -> dict[str, Any]:
        unread = self._unread[rank]
        while not unread:
            unread.extend(self.ends[rank].receive() or [{"kind": "end"}])
        message: dict[str, Any] = unread.pop(0)
        assert message["kind"] == kind, message
        return message

    def response(self, rank: int) -> Response:
        return Response.from_fields(self.told(rank, "go")["response"])

    def responses(self, *names: str, done: bool = True) -> list[Response]:
        """The same on all ranks, in the same order; in total these names."""
        rows = []
        for rank in range(len(self.ends)):
            rows.append([self.response(rank)])
            while sum(len(response.names) for response in rows[-1]) < len(names):
                rows[-1].append(self.response(rank))
        assert all(row == rows[0] for row in rows)
        assert sorted(name for response in rows[0] for name in response.names) == sorted(names)
        for _ in rows[0] if done else ():
            self.ends[0].send("done", process_set=0)
        return rows[0]

    def close(self) -> None:
        for end in self.ends:
            end.send("ended")
        self.negotiator.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, fusion_bytes=40)
    yield ranks
    ranks.close()


def busy(ranks: Ranks) -> None:
    """Two rounds are under way: what is ready from now on is handed out together."""
    for name in ("first", "second"):
        for rank in (0, 1):
            ranks.ask(rank, Request(0, name, "barrier"))
        assert [response.names for response in ranks.responses(name, done=False)] == [(name,)]


def go_on(ranks: Ranks) -> None:
    """Said by the rank that asked last, so that all that was asked is known by then."""
    for _ in range(2):
        ranks.ends[-1].send("done", process_set=0)


def test_what_is_alike_and_small_goes_together(two: Ranks) -> None:
    busy(two)
    asked = [
        summed("a"),
        summed("b", op="max"),
        summed("c", 4, "float64"),
        summed("d", 8),
        summed("e", prescale=2.0),
        summed("f", op="max"),
        Request(0, "g", "allgather", ("int8",), ((3,),)),
        summed("h", 11),
    ]
    two.ask(0, *asked)
    two.ask(1, *reversed(asked[1:]), asked[0])
    go_on(two)
    found = {frozenset(response.names): response.algorithm for response in two.responses(*"abcdefgh")}
    assert found.keys() == {frozenset(names) for names in ("h", "g", "bf", "e", "d", "ac")}
    assert found[frozenset("ac")] == "for 36"


def test_what_a_rank_lacks_waits_and_holds_up_nothing(two: Ranks) -> None:
    two.ask(0, summed("x"), summed("y"))
    two.ask(1, summed("z"), summed("y"))
    assert two.responses("y")[0].names == ("y",)
    two.ask(1, summed("x"))
    two.ask(0, summed("z"))
    two.responses("x", "z")


def test_no_more_than_two_rounds_are_under_way(two: Ranks) -> None:
    busy(two)
    for rank in (0, 1):
        two.ask(rank, summed("waits"))
    two.ask(0, summed("last"))
    two.ends[0].send("done", process_set=0)
    assert two.responses("waits")[0].names == ("waits",)


def test_a_disagreement_is_told_and_spoils_nothing_else(two: Ranks) -> None:
    busy(two)
    two.ask(0, summed("good"), summed("bad", 2), summed("fine"))
    two.ask(1, summed("good"), summed("bad", 3), summed("fine"))
    go_on(two)
    found = {response.names: response.error for response in two.responses("good", "bad", "fine")}
    assert not found["good", "fine"]
    assert "rank 0 has [2], rank 1 has [3]" in found["bad",]


def test_rows_of_all_ranks_travel_with_the_response(two: Ranks) -> None:
    for rank, rows in enumerate((2, 5)):
        two.ask(rank, Request(0, "g", "allgather", ("int8",), ((rows, 3),)))
        two.ask(rank, Request(0, "t", "alltoall", ("int8",), ((4,),), splits=(rank, 4 - rank)))
    rows = {response.names[0]: response.rows for response in two.responses("g", "t")}
    assert rows == {"g": (((2, 5),),), "t": (((0, 4), (1, 3)),)}


def test_a_joined_rank_is_excused_and_told_what_the_others_do(two: Ranks) -> None:
    two.ask(0, summed("before"))
    two.ask(1, Request(0, "join", "join"))
    assert two.responses("before")[0].like == (summed("before"),)
    two.ask(0, summed("after"))
    two.responses("after")
    two.ask(0, Request(0, "join", "join"))
    assert two.responses("join")[0].value == 0


def test_a_rank_that_shuts_down_or_hangs_up_ends_all() -> None:
    ranks = Ranks(3)
    ranks.ends[2].send("stop")
    for rank in range(3):
        ranks.told(rank, "stop")
        ranks.ends[rank].send("ended")
    for rank in range(3):
        ranks.told(rank, "over")
    ranks.close()
    ranks = Ranks(3)
    ranks.ends[1].hang_up()
    for rank in (0, 2):
        assert "rank 1" in ranks.told(rank, "fail")["why"]
    ranks.close()


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "request"},
        {"kind": "request", "request": [0, "a"]},
        {"kind": "request", "request": [0, "a", "sing", [], [], "cpu", "sum", 1, 1, 0, []]},
        {"kind": "request", "request": [0, "a", "allreduce", ["float32"], [], "cpu", "sum", 1, 1, 0, []]},
        {"kind": "request", "request": [0, "a", "allreduce", ["float32"], [["x"]], "cpu", "sum", 1, 1, 0, []]},
        {"kind": "request", "request": [0, "a", "add_set", [], [], "cpu", "sum", 1, 1, 0, [0, 99]]},
        {"kind": "request", "request": [0, "a", "remove_set", [], [], "cpu", "sum", 1, 1, 0, []]},
        {"kind": "done", "process_set": [0]},
        {"kind": "fail"},
    ],
)
def test_what_is_no_message_ends_the_job_in_a_sentence(message: dict[str, Any]) -> None:
    ranks = Ranks(2)
    ranks.ends[1].send(**message)
    for rank in range(2):
        assert ranks.told(rank, "fail")["why"].startswith("rank 1 sent an invalid message (")
    ranks.close()


def test_a_forked_child_does_not_keep_a_connection(two: Ranks) -> None:
    mine, theirs = connect_pair(b"secret")
    child = os.fork()
    if child == 0:
        os._exit(sum(end.fileno() != -1 for end in (mine, *two.ends)))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    mine.send("still here")
    assert theirs.receive() == [{"kind": "still here"}]
    mine.close()
    theirs.close()


names = st.text(max_size=8)
shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=3).map(tuple)
requests = st.builds(
    lambda name, dims, op, factor, splits: Request(
        3, name, "allreduce", ("float32",) * len(dims), dims, "cuda", op, factor, -factor, 2, splits
    ),
    names,
    shapes,
    st.sampled_from(["sum", "max"]),
    st.floats(allow_nan=False),
    st.lists(st.integers(0, 99), max_size=4).map(tuple),
)


@given(requests, requests)
def test_messages_survive_the_journey(first: Request, second: Request) -> None:
    def journey(fields: list[Any]) -> Any:
        return json.loads(json.dumps(fields))

    assert Request.from_fields(journey(first.to_fields())) == first
    response = Response(0, "alltoall", ("a", "b"), "no", "tree", (((1, 2), (3,)), ()), (first, second), 7)
    assert Response.from_fields(journey(response.to_fields())) == response
    assert find_disagreement({0: first, 1: first}, has_joined_ranks=True) == ""
    same = (first.op, first.shapes, first.prescale) == (second.op, second.shapes, second.prescale)
    assert (find_disagreement({0: first, 1: second}, has_joined_ranks=False) == "") is same


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares(rows: int, ranks: int) -> None:
    found = split_rows(rows, ranks)
    assert sum(found) == rows
    assert len(found) == ranks
    assert found == sorted(found, reverse=True)
    assert max(found) - min(found) <= 1


def test_scale() -> None:
    whole = torch.tensor([-7, 7, 49, 3 * (2**50 + 1)])
    scale_in_place(whole, 1.0, 3)
    assert whole.tolist() == [-2, 2, 16, 2**50 + 1]
    half = torch.tensor([1.0, 60_000.0]).half()
    scale_in_place(half, 0.5, 2)
    assert half.tolist() == [0.25, 15_000.0]
    floats = torch.tensor([10.0]).double()
    scale_in_place(floats, 1.0, 3)
    assert floats.item() == 10 / 3


def test_settings() -> None:
    assert Settings.read({}) == Settings()
    found = Settings.read(
        {
            "HOROVOD_FUSION_THRESHOLD": "1000",
            "HOROVOD_CYCLE_TIME": "2.5",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
            "HOROVOD_TIMELINE": "t.json",
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
            "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
            "HOROVOD_GLOO_IFACE": "eth1",
        }
    )
    assert found == Settings(1000, 2.5e-3, 5.0, 7.0, 60.0, "t.json", True, False, "eth1")
    off = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"}
    assert (Settings.read(off).stall_s, Settings.read(off).stall_shutdown_s) == (None, None)
    assert Settings.read({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"}).stall_shutdown_s is None  # before the warning
    assert Settings.read({"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}).hierarchical is True
    for text in ("x", "-1", "inf", "nan"):
        refused(UsageError, lambda text=text: Settings.read({"HOROVOD_CYCLE_TIME": text}), "HOROVOD_CYCLE_TIME", text)


def by_host(rank: Rank) -> list[str]:
    """Sums by host, whose algorithm rank 0 chooses by size; other hosts than the ranks' own are made up here."""
    communicator = Communicator(rank.world)
    choose = {64: "two_dimensional", 400: "leader", 4000: "tree"}
    engine = Engine(rank.world, communicator, Settings(), lambda nbytes: choose.get(nbytes, "ring"))
    for numbers in (16, 100, 1000, 7):
        mine = value(rank.rank, (numbers,), torch.float32)
        handle = engine.submit(summed(f"of {numbers}", numbers), [mine], [mine])
        wanted = sum(value(one, (numbers,), torch.float32) for one in range(rank.size))
        assert torch.equal(engine.wait(handle), wanted)
    used = [entry.algorithm for entry in communicator.log if entry.tag.startswith("of ")]
    engine.shut_down()
    return used


def chosen(rank: Rank) -> list[list[str]]:
    """By the measured links, by host, or not by host."""
    communicator = Communicator(rank.world)
    found = []
    for settings in (Settings(), Settings(hierarchical=True), Settings(hierarchical=False)):
        choose = lifecycle._build_chooser(communicator, settings)
        found.append([choose(nbytes) for nbytes in (1 << 6, 1 << 14, 1 << 24)])
    communicator.close()
    return found


@pytest.mark.check
def test_which_algorithm_sums_take() -> None:
    first, *others = run_ranks(3, chosen, hosts=(0, 1, 1))
    assert all(other == first for other in others)  # all have rank 0's numbers
    measured, by_host, flat = first
    assert set(measured) <= {"ring", "tree", "leader"}
    assert by_host == ["leader"] * 3  # hosts of unlike sizes
    assert flat == ["ring"] * 3


def test_sums_go_by_host_as_rank_0_chooses() -> None:
    found = run_ranks(4, by_host, hosts=(0, 1, 0, 1))
    assert found == [["two_dimensional", "leader", "tree", "ring"]] * 4
