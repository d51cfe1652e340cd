"""Members in processes of their own that are killed, stopped and cut off: the others meet in the next generation."""

from __future__ import annotations

import contextlib
import random
import select
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.comm._fleet import SECRET, Fleet, Worker, fleet, next_of, until

from headway.comm.coordinator_client import CoordinatorClient
from headway.core.errors import CommunicationError, GenerationEndedError, UsageError

FOUR = [(0, 0), (0, 1), (1, 0), (1, 1)]
IDS = [f"{host}.{local}.0" for host, local in FOUR]


def go(made: Fleet) -> list[Worker]:
    """Four workers in generation 0."""
    workers = made.start(*IDS)
    assert [worker.reaches(0)["rank"] for worker in workers] == [0, 1, 2, 3]
    return workers


def together(workers: list[Worker], number: int) -> list[int]:
    """Ranks of workers that have come to a generation that is exactly theirs."""
    found = [worker.reaches(number) for worker in workers]
    assert {one["number"] for one in found} == {number}
    assert {one["size"] for one in found} == {len(workers)}
    return [one["rank"] for one in found]


@pytest.mark.parametrize("victim", range(4))
def test_a_killed_worker_costs_one_generation_at_once(victim: int) -> None:
    with fleet(FOUR) as made:
        workers = go(made)
        gone = workers.pop(victim)
        gone.signal(signal.SIGKILL)
        assert together(workers, 1) == [0, 1, 2]
        for worker in workers:
            assert worker.heard("generation")[-1]["lost"] == [gone.id]
            assert f"rank {victim} (process {gone.process.pid} on " in worker.heard("lost")[0]["why"]
            assert worker.waits_for("changed") == {"what": "changed", "number": 0}
        assert made.left == {gone.id: "died"}


def test_a_stopped_worker_is_lost_after_the_time_out_and_fenced_when_it_wakes() -> None:
    with fleet(FOUR, timeout_s=4.0) as made:  # in which a busy machine lets the others beat
        workers = go(made)
        zombie = workers.pop(0)
        zombie.signal(signal.SIGSTOP)
        assert together(workers, 1) == [0, 1, 2]
        assert made.left == {zombie.id: "silent"}
        zombie.tell("confirm 0")  # it wakes in the middle of what it was about
        zombie.signal(signal.SIGCONT)
        assert zombie.ends() == 3
        assert "was silent for 4 s" in zombie.waits_for("fenced")["why"]
        assert zombie.heard("confirmed") == []
        assert together(workers, 1) == [0, 1, 2]


def test_a_second_loss_while_the_others_are_ready() -> None:
    with fleet(FOUR) as made:
        workers = go(made)
        first, second = workers.pop(1), workers[2]
        second.tell("slow 20")
        second.tell("confirm 0")
        second.waits_for("confirmed")
        first.signal(signal.SIGKILL)
        made.forms(1)
        second.waits_for("lost")  # and is not ready: the others wait
        assert [worker.generation for worker in workers] == [0, 0, 0]
        workers.remove(second)
        second.signal(signal.SIGKILL)
        assert together(workers, 2) == [0, 1]
        for worker in workers:
            assert worker.heard("generation")[-1]["lost"] == [first.id, second.id]
            assert second.id not in str(worker.heard("lost"))


def test_a_newcomer_joins_at_a_boundary_though_a_member_is_lost_at_it() -> None:
    with fleet(FOUR) as made:
        workers = go(made)
        victim = workers.pop(3)
        victim.tell("slow 20")  # it is to stand at the boundary 20 s later than the others
        victim.tell("confirm 0")
        victim.waits_for("confirmed")
        (late,) = made.start("0.1.1", joining=True)
        victim.signal(signal.SIGKILL)
        ranks = {worker.id: worker.reaches(2)["rank"] for worker in (*workers, late)}
        assert ranks == {"0.0.0": 0, "0.1.0": 1, "0.1.1": 2, "1.0.0": 3}
        assert f"process {late.process.pid} on " in workers[0].heard("generation")[2]["why"]
        late.signal(signal.SIGKILL)
        assert together(workers, 3) == [0, 1, 2]


def test_the_death_of_the_launcher_ends_the_workers() -> None:
    with fleet(FOUR) as made:
        workers = go(made)
        workers[1].tell("slow 0.2")
        made.coordinator.close()
        assert [worker.ends() for worker in workers] == [4] * 4
        assert "launcher" in workers[0].waits_for("gone")["why"]


def test_a_farewell_is_no_loss() -> None:
    with fleet(FOUR) as made:
        workers = go(made)
        for worker in workers:
            worker.tell("bye")
        assert [worker.ends() for worker in workers] == [0] * 4
        until(lambda: made.left == dict.fromkeys(IDS, "done"), "the farewells")
        assert len(made.formed) == 1


def test_an_old_generation_is_not_confirmed() -> None:
    with fleet([(0, 0), (0, 1)]) as made:
        one, two = made.member("0.0.0"), made.member("0.1.0")
        next_of(one, two)
        one.confirm(0)
        two.close()
        with pytest.raises(GenerationEndedError, match="died"):
            until(lambda: one.confirm(0), "the loss")
        assert next_of(one)[0].number == 1
        one.confirm(1)
        with pytest.raises(GenerationEndedError, match="generation 0 is over"):
            one.confirm(0)


def test_a_change_before_the_watch_is_not_missed() -> None:
    with fleet([(0, 0), (0, 1)]) as made:
        one, two = made.member("0.0.0"), made.member("0.1.0")
        next_of(one, two)
        two.close()
        until(lambda: one.has_changed, "the loss")
        calls: list[str] = []
        one.watch_generation(0, lambda: calls.append(threading.current_thread().name))
        until(lambda: calls == ["member"], "the call")
        one.watch_generation(next_of(one)[0].number, lambda: calls.append("again"))
        one.check()
        one.confirm(1)
        assert calls == ["member"]


def test_each_loss_is_told_to_a_watch_that_repeats() -> None:
    with fleet([(0, 0), (0, 1), (0, 2)]) as made:
        one, two, three = (made.member(f"0.{local}.0") for local in range(3))
        next_of(one, two, three)
        calls: list[tuple[str, ...]] = []
        one.watch_generation(0, lambda: calls.append(one.list_members()), repeats=True)
        for lost, left in ((three, ("0.0.0", "0.1.0")), (two, ("0.0.0",))):
            lost.close()
            until(lambda left=left: calls and calls[-1] == left, "the loss")  # type: ignore[misc]
        # Once for each, although its thread has woken up for other messages.
        assert len(calls) == 2


class Link:
    """A connection to the coordinator that can be cut: nothing is closed, nothing goes through any more."""

    def __init__(self, port: int) -> None:
        self._target, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut = False
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        here, _ = self._listener.accept()
        there = socket.create_connection(("127.0.0.1", self._target))
        with here, there:
            while True:
                ends = [self._stopped] if self.cut else [self._stopped, here, there]
                readable, _, _ = select.select(ends, [], [], 0.02)
                if self._stopped in readable:
                    return
                for end in readable:
                    (there if end is here else here).sendall(end.recv(1 << 16))

    def close(self) -> None:
        self._stop.send(b"\0")
        self._thread.join()
        for end in (self._listener, self._stop, self._stopped):
            end.close()


@contextlib.contextmanager
def linked(made: Fleet) -> Iterator[Link]:
    link = Link(made.coordinator.port)
    try:
        yield link
    finally:
        link.close()


def test_a_cut_link_is_noticed_on_both_sides() -> None:
    with fleet([(0, 0), (0, 1)], timeout_s=1.5) as made, linked(made) as link:
        near = made.member("0.0.0")
        far = CoordinatorClient("127.0.0.1", link.port, secret=SECRET, worker="0.1.0")
        made.members.append(far)
        next_of(near, far)
        called = threading.Event()
        far.watch_generation(0, called.set)
        link.cut = True
        assert called.wait(60)
        with pytest.raises(CommunicationError, match="nothing was heard from the launcher for") as raised:
            far.check()
        assert not isinstance(raised.value, GenerationEndedError)
        assert next_of(near)[0].lost_workers == ("0.1.0",)
        assert made.left == {"0.1.0": "silent"}


GOOD = {"HEADWAY_COORDINATOR": "127.0.0.1:1", "HEADWAY_SECRET": "x", "HEADWAY_MEMBER": "0.0.0"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"HEADWAY_SECRET": ""}, "HEADWAY_SECRET is not"),
        ({"HEADWAY_MEMBER": ""}, "HEADWAY_MEMBER is not"),
        ({"HEADWAY_MEMBER": "1"}, "HEADWAY_MEMBER is '1'"),
        ({"HEADWAY_MEMBER": "0.-1.0"}, "HEADWAY_MEMBER is"),
        ({"HEADWAY_COORDINATOR": "here"}, "should be ADDRESS:PORT"),
        ({"HEADWAY_COORDINATOR": "here:0"}, "should be ADDRESS:PORT"),
        ({"HEADWAY_COORDINATOR": ":80"}, "should be ADDRESS:PORT"),
    ],
)
def test_a_wrong_environment_is_refused_by_name(change: dict[str, str], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        CoordinatorClient.from_environment(GOOD | change)


def test_without_a_launcher_there_is_no_member() -> None:
    assert CoordinatorClient.from_environment({"HEADWAY_SECRET": "x"}) is None


def test_a_launcher_that_is_not_there_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(CommunicationError, match=rf"^{where}: the launcher cannot be reached"):
        CoordinatorClient.from_environment(GOOD | {"HEADWAY_COORDINATOR": where})


def chaos(seed: int, events: int) -> None:
    """Kills, stops, wakes, newcomers, farewells and slow workers at random moments; then, in the quiet, all that live
    are in one generation, which is the newest, with the ranks that the coordinator gave them."""
    chance = random.Random(seed)
    with fleet(FOUR, timeout_s=1.0) as made:
        made.start(*IDS)
        stopped: list[Worker] = []
        for _ in range(events):
            awake = [one for one in alive(made) if one not in stopped]
            if over(made) or not awake:
                break
            what = chance.choice(("kill", "kill", "stop", "wake", "join", "join", "slow", "bye", "leave", "pause"))
            worker = chance.choice(awake)
            if what in ("kill", "stop", "bye") and len(awake) <= 3:
                what = "join"
            match what:
                case "kill":
                    worker.signal(signal.SIGKILL)
                    worker.process.wait()
                case "stop":
                    worker.signal(signal.SIGSTOP)
                    stopped.append(worker)
                case "wake" if stopped:
                    stopped.pop(chance.randrange(len(stopped))).signal(signal.SIGCONT)
                case "join" if made.began:
                    made.start(f"{chance.randrange(3)}.{chance.randrange(2)}.{len(made.workers)}", joining=True)
                case "slow":
                    worker.tell(f"slow {chance.uniform(0, 0.3):.3f}")
                case "bye":
                    worker.tell("bye")
                case "leave":
                    worker.tell("leave 1000")
            replace_early_losses(made)
            threading.Event().wait(chance.choice((0, 0, 0.01, 0.1, 0.4)))
        for worker in stopped:
            worker.signal(signal.SIGCONT)
        settle(made)


def replace_early_losses(made: Fleet) -> None:
    """One that is lost before the start is replaced, as a launcher does."""
    for host, local in FOUR if not made.began else ():
        present = [one for one in alive(made) if one.id.startswith(f"{host}.{local}.")]
        if not present:
            made.start(f"{host}.{local}.{len(made.workers)}")


def settle(made: Fleet) -> None:
    def agreed() -> bool:
        replace_early_losses(made)  # on a busy machine they are still about to start
        if not made.began or over(made):
            return not alive(made)
        newest = made.formed[-1]
        ids = [worker.id for worker in newest.workers]
        until(
            lambda: (
                made.formed[-1] is not newest
                or all(one.generation == newest.number for one in alive(made) if one.id in ids)
            ),
            "its members",
        )
        for worker in made.workers.values():  # all stand at a boundary, as after a vote
            worker.tell(f"leave {newest.number}")
        until(lambda: made.formed[-1].number > newest.number or over(made), "the next generation")
        newest = made.formed[-1]
        here = alive(made)
        until(
            lambda: made.formed[-1] is not newest or all(one.generation == newest.number for one in alive(made)),
            "its workers",
        )
        return made.formed[-1] is newest and here == alive(made)

    until(agreed, "agreement")
    newest = made.formed[-1]
    ranks = [worker.id for worker in newest.workers]
    living = {worker.id: worker.heard("generation")[-1] for worker in alive(made)}
    assert over(made) or sorted(living) == sorted(ranks)
    for rank, worker in enumerate(ranks if living else ()):
        assert (living[worker]["rank"], living[worker]["size"]) == (rank, len(ranks))
    numbers = [event.number for event in made.formed]
    assert numbers == list(range(len(numbers)))
    for worker in made.workers.values():
        seen = [one["number"] for one in worker.heard("generation")]
        assert seen == sorted(set(seen))
        for one in worker.heard("generation"):
            assert [member.id for member in made.formed[one["number"]].workers][one["rank"]] == worker.id


def over(made: Fleet) -> bool:
    """Whether nobody is left of the newest generation."""
    return made.began and all(worker.id in made.left for worker in made.formed[-1].workers)


def alive(made: Fleet) -> list[Worker]:
    return [worker for worker in made.workers.values() if worker.process.poll() is None]


@pytest.mark.parametrize("seed", range(1))
def test_whatever_happens_the_living_agree(seed: int) -> None:
    chaos(seed, 12)


@pytest.mark.check
@pytest.mark.parametrize("seed", range(100, 112))
def test_whatever_happens_the_living_agree_at_length(seed: int) -> None:
    chaos(seed, 25)
