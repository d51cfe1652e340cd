"""Who hears of what: mismatches, ranks that join, stall, shut down or die; process sets; the timeline."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from tests.comm.hvd._start import refused, started

import headway.comm.hvd as hvd
from headway.comm.hvd import context, negotiator


def mismatches(rank: Rank) -> list[str]:
    me, odd = rank.rank, rank.rank == 1
    failed = hvd.HorovodInternalError
    with started(rank):
        ones = torch.ones(4)
        ints = torch.ones(4, dtype=torch.int32)
        cases = {
            "shapes": lambda: hvd.allreduce(torch.ones(4 + odd), name="shapes"),
            "rank": lambda: hvd.allreduce(torch.ones(4, 1) if odd else ones, name="rank"),
            "types": lambda: hvd.allreduce(ints if odd else ones, name="types"),
            "op": lambda: hvd.allreduce(ones, name="op", op=hvd.Max if odd else hvd.Sum),
            "scale": lambda: hvd.allreduce(ones, name="scale", prescale_factor=1.0 + odd),
            "root": lambda: hvd.broadcast(ones, int(odd), name="root"),
            "rows": lambda: hvd.allgather(torch.ones(me, 2 + odd), name="rows"),
            "alltoall": lambda: hvd.alltoall(torch.ones(rank.size, 2 + odd), name="alltoall"),
            "scatter": lambda: hvd.reducescatter(torch.ones(6 + odd), name="scatter"),
            "group": lambda: hvd.grouped_allreduce([ones] * (2 + odd), name="group"),
            "scalar": lambda: hvd.synchronize(hvd.allgather_async(torch.tensor(1.0), name="scalar")),
        }
        said = [refused(failed, case, f".{name}") for name, case in cases.items()]
        # Errors of one rank alone are raised there, and nobody else notices.
        if odd:
            refused(ValueError, lambda: hvd.allreduce(torch.ones(2, 3).t()), "contiguous")
            refused(ValueError, lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64)), "Complex")
            refused(ValueError, lambda: hvd.allreduce(torch.ones(2, dtype=torch.bool)), "Bool")
            refused(ValueError, lambda: hvd.allreduce(ones, average=True, op=hvd.Sum), "not both")
            refused(ValueError, lambda: hvd.broadcast(ones, rank.size), "root rank")
            refused(ValueError, lambda: hvd.alltoall(torch.ones(rank.size + 1)), "split equally")
            refused(ValueError, lambda: hvd.alltoall(ones, splits=[1] * (rank.size + 1)), "splits for")
            refused(ValueError, lambda: hvd.alltoall(torch.ones(1), splits=[1] * rank.size), "rows")
            refused(ValueError, lambda: hvd.alltoall(ones, splits=torch.ones(rank.size)), "32-bit")
            refused(failed, lambda: hvd.reducescatter(ones, op=hvd.Max), "Average and Sum")
            refused(ValueError, lambda: hvd.grouped_allreduce([]), "")
            hvd.allreduce_async(ones, name="twice")
            refused(ValueError, lambda: hvd.allreduce_async(ones, name="twice"), "allreduce.twice", "under way")
        with pytest.warns(DeprecationWarning, match="average"):
            summed = hvd.allreduce(ones, average=False)
        assert summed.tolist() == [rank.size] * 4
        if not odd:
            hvd.allreduce_async(ones, name="twice")
        hvd.barrier()
    return said


def test_all_ranks_are_told_how_they_differ_and_can_go_on() -> None:
    first, *others = run_ranks(3, mismatches)
    assert all(other == first for other in others)
    shapes, number, types, op, scale, root, rows, *_ = first
    assert "rank 0 has [4]" in shapes
    assert "rank 1 has [5]" in shapes
    assert "rank 1 has [4, 1]" in number
    assert "rank 0 has float32, rank 1 has int32" in types
    assert "rank 0 has sum, rank 1 has max" in op
    assert "(2.0, 1.0)" in scale
    assert "rank 0 has 0, rank 1 has 1" in root
    assert "rank 0 has [*, 2], rank 1 has [*, 3]" in rows


def uneven(rank: Rank) -> list[int]:
    """Rank r has r + 1 batches, and then two more rounds in which another rank is the last."""
    last = []
    with started(rank):
        for batch in range(rank.rank + 1):
            handles = [hvd.allreduce_async(torch.full((3,), 2.0), name=f"g{i}", op=hvd.Sum) for i in range(3)]
            found = [hvd.synchronize(handle).tolist() for handle in handles]
            assert found == [[2.0 * (rank.size - batch)] * 3] * 3  # ranks that have joined bring zeros
            mean = hvd.allreduce(torch.ones(2, dtype=torch.float64))
            assert mean.tolist() == [(rank.size - batch) / rank.size] * 2
            assert hvd.allreduce(torch.tensor([5]), op=hvd.Max).tolist() == [5]
        last.append(hvd.join())
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == rank.size  # nameless ones are matched again
        if rank.rank == 0:  # whether the others have joined yet or not
            for action in (
                lambda: hvd.allgather(torch.ones(2)),
                lambda: hvd.broadcast(torch.ones(2), 0),
                lambda: hvd.alltoall(torch.ones(rank.size)),
                lambda: hvd.reducescatter(torch.ones(4)),
            ):
                refused(hvd.HorovodInternalError, action, "joined")
            hvd.barrier()  # those that have joined do not come
        last.append(hvd.join())
        assert hvd.allgather_object(rank.rank) == list(range(rank.size))
    return last


def test_ranks_that_have_joined_bring_zeros_until_all_have() -> None:
    assert run_ranks(3, uneven) == [[2, 0]] * 3


def sets(rank: Rank) -> None:
    me, pairs = rank.rank, [[0, 2], [1, 3]]
    with started(rank, process_sets=[low := hvd.ProcessSet([1, 0])]):
        assert low.ranks == [0, 1]
        assert low.process_set_id == 1
        even_and_odd = [hvd.add_process_set(pair) for pair in pairs]
        mine, other = even_and_odd[me % 2], even_and_odd[1 - me % 2]
        assert (mine.size(), mine.rank(), mine.includes_self(), other.includes_self()) == (2, me // 2, True, False)
        refused(ValueError, other.rank, str(me))
        refused(ValueError, lambda: hvd.add_process_set([2, 0]), "already")
        refused(ValueError, lambda: hvd.add_process_set([0, 9]), "9")
        refused(ValueError, lambda: hvd.ProcessSet(["a"]), "ranks")
        refused(ValueError, lambda: hvd.ProcessSet(3), "ranks")  # type: ignore[arg-type]
        # Of the set, of all, and of a set that overlaps with it, under way at the same time and in any order.
        own = torch.full((3,), float(me))
        everywhere = hvd.allreduce_async(own, name="a", op=hvd.Sum)
        within = hvd.allreduce_async(own, name="a", op=hvd.Sum, process_set=mine)
        if low.includes_self():
            assert hvd.allgather(own, process_set=low).tolist() == [0.0] * 3 + [1.0] * 3
        assert hvd.synchronize(within).tolist() == [float(sum(mine.ranks or ()))] * 3
        assert hvd.synchronize(everywhere).tolist() == [6.0] * 3
        assert hvd.allreduce(own, process_set=mine).tolist() == [1.0 + me % 2] * 3
        root = (mine.ranks or [])[1]
        assert hvd.broadcast(own, root, process_set=mine).tolist() == [float(root)] * 3
        assert hvd.broadcast_object(me, root, process_set=mine) == root
        refused(ValueError, lambda: hvd.broadcast(own, me ^ 1, process_set=mine), "root rank")
        assert hvd.reducescatter(torch.arange(3.0), process_set=mine).tolist() == ([0.0, 1.0], [2.0])[me // 2]
        refused(ValueError, lambda: hvd.allreduce(own, process_set=other), "not a member")
        refused(NotImplementedError, lambda: hvd.allreduce(own, op=hvd.Adasum, process_set=mine), "process set")
        hvd.barrier(mine)
        for one in even_and_odd:
            assert hvd.remove_process_set(one)
        assert mine.size() is None
        refused(ValueError, lambda: hvd.allreduce(own, process_set=mine), "not registered")
        assert not hvd.remove_process_set(mine)
        assert not hvd.remove_process_set(hvd.global_process_set)
        again = hvd.add_process_set([3, 1, 2])
        assert again.process_set_id == 2  # the number of one that was removed
        if me:
            assert hvd.allreduce(own, op=hvd.Sum, process_set=again).tolist() == [6.0] * 3
        hvd.barrier()
    assert low.process_set_id is None


def test_process_sets() -> None:
    run_ranks(4, sets)


def other_sets(rank: Rank) -> str:
    with started(rank):
        return refused(hvd.HorovodInternalError, lambda: hvd.add_process_set([rank.rank]), "(0,)", "(1,)")


def test_a_process_set_that_ranks_name_differently() -> None:
    one, other = run_ranks(2, other_sets)
    assert one == other


LATE = "rank 1 lacks allreduce.late"
NEVER = "rank 0 lacks allreduce.never; rank 1 lacks allreduce.never; rank 2 lacks allreduce.another"


def stalled(rank: Rank) -> list[str]:
    """The clock of rank 0, which negotiates, jumps over the time after which a stall ends the job once all is said."""
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.2"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "10000"
    said: list[str] = []
    later_s = 0.0
    negotiator.monotonic = lambda: time.monotonic() + later_s

    def emit(record: logging.LogRecord) -> None:
        nonlocal later_s
        text = record.getMessage()
        if text.partition(": ")[2].startswith(LATE):  # a busy machine may have made rank 0 or 2 late before
            said.append(text)
            rank.store.set("warned", "")
        if NEVER in text:
            later_s = 20_000.0

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("headway.comm").addHandler(handler)
    with started(rank):
        if rank.rank == 1:
            rank.store.wait(["warned"])
        assert hvd.allreduce(torch.ones(2), name="late").tolist() == [1.0, 1.0]
        name = "never" if rank.rank == 2 else "another"
        return [*said, refused(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(2), name=name), "lacks")]


def test_a_stall_is_warned_of_and_ends_the_job_after_the_time_for_it() -> None:
    said = run_ranks(3, stalled)
    assert LATE in said[0][0]
    for *_, error in said:
        assert NEVER in error


def ends_early(rank: Rank) -> str:
    with started(rank):
        hvd.allreduce(torch.ones(2))
        if rank.rank == 1:
            rank.store.wait(["0 waits", "2 waits"])
            hvd.shutdown()
            hvd.shutdown()  # once more does nothing
            return refused(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(1)), "init()")
        pending = hvd.allreduce_async(torch.ones(2), name="with nobody")
        rank.store.set(f"{rank.rank} waits", "")
        text = refused(hvd.HorovodInternalError, lambda: hvd.synchronize(pending), "shut down")
        assert refused(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(2))) == text
        assert hvd.size() == rank.size
    refused(ValueError, hvd.size, "init()")
    return text


def test_where_one_rank_shuts_down_the_others_pending_operations_fail() -> None:
    run_ranks(3, ends_early)


def again(rank: Rank) -> None:
    for number in range(3):
        with started(rank):
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == rank.size, number
        assert not hvd.is_initialized()


def test_init_after_shutdown() -> None:
    run_ranks(3, again)


def killed(rank: Rank, victim: int) -> tuple[str, str] | None:
    with started(rank):
        hvd.allreduce(torch.ones(2))
        if rank.rank == victim:
            if os.fork() == 0:  # a data loader's worker outlives the rank for a while
                time.sleep(5)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        waited = refused(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(2)), "rank")
        return waited, refused(hvd.HorovodInternalError, lambda: hvd.barrier(), "rank")


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.thin(1)
def test_a_killed_rank_is_named_at_once(victim: int) -> None:
    for rank, said in enumerate(run_ranks(3, killed, victim, dying={victim})):
        assert rank == victim or all(f"rank {victim}" in text for text in said)


def timeline(rank: Rank, folder: Path) -> None:
    os.environ["HOROVOD_TIMELINE"] = str(folder / "first.json")
    os.environ["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
    with started(rank):
        hvd.allreduce(torch.ones(4), name="loss")
        hvd.broadcast(torch.ones(4), 0, name="weights")
        hvd.barrier()
        if rank.rank == 0:
            json.loads((folder / "first.json").read_text())  # whole at any time
        hvd.start_timeline(str(folder / "second.json"))
        hvd.barrier()
        hvd.allgather(torch.ones(4), name="other")
        hvd.barrier()
        hvd.stop_timeline()
        hvd.stop_timeline()
        hvd.barrier()  # rank 0 notes what other ranks announce, as long as it has not come here
        hvd.allreduce(torch.ones(4), name="unseen")


def test_timeline(tmp_path: Path) -> None:
    run_ranks(2, timeline, tmp_path)
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "second"))
    rows = {event["args"]["name"]: event["pid"] for event in first if "name" in event.get("args", {})}
    assert {"allreduce.loss", "broadcast.weights"} <= set(rows)
    of_loss = [event for event in first if event["pid"] == rows["allreduce.loss"] and event["ph"] != "M"]
    assert {event["name"] for event in of_loss} == {"0", "1", "NEGOTIATE_ALLREDUCE", "ALLREDUCE"}
    spans = {event["name"]: event for event in of_loss if event["ph"] == "X"}
    assert all(span["dur"] > 0 for span in spans.values())
    assert spans["NEGOTIATE_ALLREDUCE"]["ts"] <= spans["ALLREDUCE"]["ts"]
    assert any(event["name"] == "CYCLE_START" for event in first)
    assert not any(event["name"] == "CYCLE_START" for event in second)
    names = {event["args"]["name"] for event in second if "name" in event.get("args", {})}
    assert "allgather.other" in names
    assert not {"allreduce.loss", "allreduce.unseen"} & names
    assert "start_time_since_epoch_in_micros" in first[0]["args"]


def not_yet() -> None:
    for ask in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.is_homogeneous, hvd.stop_timeline):
        refused(ValueError, ask, "init()")
    refused(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(1)), "init()")


def test_alone_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    not_yet()
    hvd.init(comm=[0])
    assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size()) == (0, 1, 1, 1)
    assert hvd.allreduce(torch.ones(3)).tolist() == [1.0] * 3
    assert hvd.join() == 0
    assert hvd.allgather_object("x") == ["x"]
    hvd.shutdown()
    refused(ValueError, lambda: hvd.init(comm=[0, 1]), "ProcessSet")
    refused(ValueError, lambda: hvd.init(comm=5), "MPI")  # type: ignore[arg-type]
    hvd.shutdown()
    not_yet()


def test_what_is_built() -> None:
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not any((hvd.mpi_built(), hvd.mpi_enabled(), hvd.ddl_built(), hvd.ccl_built()))
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    assert bool(hvd.nccl_built()) == hasattr(torch._C, "_nccl_version")
    refused(ValueError, hvd.mpi_threads_supported, "MPI")


def met_again(rank: Rank) -> list[tuple[int, bytes]]:
    """Three jobs in one process, as after two restarts by the launcher: generation and secret of each."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "2"
    found = []
    for _ in range(3):
        with started(rank):
            world = context.get_engine().world
            found.append((world.generation, world.secret))
            assert world.store is not None
            assert not world.store.check(["secret"])
            assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == rank.size
    return found


def test_each_job_of_a_process_has_a_generation_of_its_own_and_the_secret_of_the_run() -> None:
    first, other = run_ranks(2, met_again)
    assert first == other
    assert [generation for generation, _ in first] == [2, 3, 4]
    assert len({secret for _, secret in first}) == 1
