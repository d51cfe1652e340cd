from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from headway.core.errors import HeadwayError, UsageError
from headway.core.mounts import Mount
from headway.sweep import journal as module
from headway.sweep.budget import Method
from headway.sweep.journal import NAME, open_journal, read_journal
from headway.sweep.records import Created, Planned, Promoted, Record, Result, decode_record
from headway.sweep.state import RecordError, State, fold

from ._sweeps import Scores, go_on, make_plan

PLAN = make_plan("halving", 4, 3, 9, seed=5)
RECORDS = go_on(PLAN, Scores())

# What a second process does: hold the sweep until it is killed.
HOLD = """
import sys, time
from pathlib import Path
from fractions import Fraction
from headway.sweep.budget import plan_brackets
from headway.sweep.journal import open_journal
with open_journal(Path(sys.argv[1]), plan_brackets(4, 3, Fraction(1, 9), "halving", seed=5)):
    print("open", flush=True)
    time.sleep(600)
"""

# A sweep of some hundred results, which is killed after it has written so many bytes.
RUN = """
import os, signal, sys
from pathlib import Path
from tests.sweep._sweeps import Scores, make_plan, run_sweep

left, pwrite = int(sys.argv[3]), os.pwrite

def write(handle, data, offset):
    global left
    count = pwrite(handle, data[:left], offset)
    left -= count
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return count

os.pwrite = write
run_sweep(Path(sys.argv[2]), make_plan(sys.argv[1], 8, 3, 9, seed=5), Scores())
"""


def write(folder: Path, records: list[Record]) -> bytes:
    with open_journal(folder, PLAN) as journal:
        journal.append(*records)
    return (folder / NAME).read_bytes()


def reopen(folder: Path) -> State:
    with open_journal(folder, PLAN) as journal:
        return journal.state


def test_a_journal_gives_back_what_was_written_and_other_programs_read_it(tmp_path: Path) -> None:
    content = write(tmp_path, RECORDS[:30])
    assert reopen(tmp_path) == read_journal(tmp_path) == fold(State(PLAN), RECORDS[:30])
    assert write(tmp_path, RECORDS[30:]).startswith(content)
    assert reopen(tmp_path) == fold(State(PLAN), RECORDS)
    lines = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert [line["kind"] for line in lines[:2]] == ["planned", "created"]
    assert len(lines) == len(RECORDS) + 1
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("count", [0, 1, 45])
def test_a_last_line_torn_at_any_byte_is_removed(tmp_path: Path, count: int) -> None:
    content = write(tmp_path, RECORDS[:count])
    path, start = tmp_path / NAME, content[:-1].rfind(b"\n") + 1
    before = fold(State(PLAN), RECORDS[: max(0, count - 1)])
    for length in range(start, len(content)):
        path.write_bytes(content[:length])
        if count:
            assert read_journal(tmp_path) == before
            assert path.stat().st_size == length
        else:
            with pytest.raises(UsageError, match="stopped before its first decision"):
                read_journal(tmp_path)
        assert reopen(tmp_path) == before
        assert path.read_bytes() == (content[:start] if count else content)
        # The same record follows again.
        assert write(tmp_path, RECORDS[count - 1 : count] if count else []) == content


def test_blocks_of_the_last_line_may_be_missing(tmp_path: Path) -> None:
    content = write(tmp_path, RECORDS[:9])
    start = content[:-1].rfind(b"\n") + 1
    for first in range(start, len(content) - 1, 7):
        torn = bytearray(content)
        torn[first : first + 7] = bytes(len(torn[first : first + 7]))
        torn[-1:] = b"\n"
        (tmp_path / NAME).write_bytes(torn)
        assert reopen(tmp_path) == fold(State(PLAN), RECORDS[:8])
        assert (tmp_path / NAME).read_bytes() == content[:start]


def test_damage_in_the_middle_is_refused_with_its_line_and_the_way_out(tmp_path: Path) -> None:
    content = write(tmp_path, RECORDS[:20])
    path = tmp_path / NAME
    starts = [0, *(place + 1 for place, byte in enumerate(content) if byte == ord("\n"))]
    # Every byte of a line in the middle, its end too, and some of all others but the last.
    for place in (*range(starts[7], starts[8]), *range(0, starts[-2], 13)):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        number = next(number for number, start in enumerate(starts[1:], 1) if place < start)
        with pytest.raises(HeadwayError) as refused, open_journal(tmp_path, PLAN):
            pass
        assert f"{path}: line {number} is damaged: " in str(refused.value)
        assert path.read_bytes() == changed
        with pytest.raises(HeadwayError, match=f"line {number} is damaged"):
            read_journal(tmp_path)
        if number == 1:
            assert "Copy the file from a backup, or begin a new sweep." in str(refused.value)
    command = str(refused.value).rpartition("decided again: ")[2].removesuffix(".")
    subprocess.run(["sh", "-c", command], check=True)
    assert reopen(tmp_path) == fold(State(PLAN), RECORDS[: number - 2])


def test_whole_lines_that_do_not_fit_are_refused_also_at_the_end(tmp_path: Path) -> None:
    lines = write(tmp_path, RECORDS[:20]).splitlines(keepends=True)
    for wrong, number, message in (
        ([*lines[:5], *lines[6:]], 6, "trial 5 is new, and 4 would be the next number"),
        ([*lines, lines[-1]], 22, "trial"),
        (lines[1:], 1, "the sweep was not planned before"),
        ([*lines, lines[0]], 22, "the sweep was planned before"),
    ):
        (tmp_path / NAME).write_bytes(b"".join(wrong))
        with pytest.raises(HeadwayError, match=f"line {number} is damaged: .*{message}"):
            reopen(tmp_path)
        assert (tmp_path / NAME).read_bytes() == b"".join(wrong)


def test_records_of_a_newer_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(module, "encode_record", lambda record: {"kind": "paused", "trial": 0})
        newer.setattr(module, "fold", lambda state, records: state)
        with open_journal(tmp_path, PLAN) as journal:
            journal.append(Created(0, {}))
    message = (
        r"line 1 cannot be read: its kind is 'paused', which this version .* Use the version of Headway that began"
    )
    with pytest.raises(HeadwayError, match=message):
        reopen(tmp_path)


def test_a_sweep_goes_on_with_the_plan_that_it_began_with(tmp_path: Path) -> None:
    write(tmp_path, RECORDS[:3])
    for other, message in (
        (
            make_plan("halving", 5, 3, 9, seed=5),
            r"the sweep was begun with another budget \(4\)\. Set it back in sweep",
        ),
        (make_plan("asha", 4, 3, 9, seed=5), r"another method \(halving\)"),
        (make_plan("halving", 4, 3, 9, seed=6), r"another seed \(5\)"),
        (make_plan("halving", 4, 3, 3, seed=5), r"another choice of trials and rungs\."),
        (make_plan("halving", 4, 3, 9, seed=5, higher_is_better=False), r"another direction of the score\."),
    ):
        with pytest.raises(UsageError, match=message), open_journal(tmp_path, other):
            pass
    assert reopen(tmp_path) == fold(State(PLAN), RECORDS[:3])


def test_a_record_that_does_not_fit_is_not_written(tmp_path: Path) -> None:
    with open_journal(tmp_path, PLAN) as journal:
        with pytest.raises(RecordError):
            journal.append(Created(0, {}), Promoted(0, 1), Created(1, {}))
        assert journal.state == fold(State(PLAN), [Created(0, {})])
        with pytest.raises(ValueError, match="not JSON compliant"):
            journal.append(Result(0, 0, float("nan")))
        journal.append(Result(0, 0, 0.5))
    assert reopen(tmp_path) == fold(State(PLAN), [Created(0, {}), Result(0, 0, 0.5)])


def test_a_sweep_is_not_run_twice_and_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    with open_journal(tmp_path, PLAN), pytest.raises(UsageError) as refused, open_journal(tmp_path, PLAN):
        pass
    expected = f"{tmp_path}: another process runs this sweep. Wait for it, or stop it."
    assert str(refused.value) == expected
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(UsageError) as refused, open_journal(tmp_path, PLAN):
            pass
        assert str(refused.value) == expected
        assert read_journal(tmp_path) == State(PLAN)
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert reopen(tmp_path) == State(PLAN)


@pytest.mark.check
@pytest.mark.parametrize("method", ["halving", "asha", "pbt"])
def test_a_sweep_that_is_killed_again_and_again_makes_the_same_decisions(tmp_path: Path, method: Method) -> None:
    plan, path, random, kills = make_plan(method, 8, 3, 9, seed=5), tmp_path / NAME, Random(method), 0
    command = [sys.executable, "-c", RUN, method, str(tmp_path)]
    # The plan alone has some 300 bytes.
    while status := subprocess.run([*command, str(random.randint(500, 2500))], check=False).returncode:
        assert status == -signal.SIGKILL
        kills += 1
    assert kills >= 3
    lines = [json.loads(line.rpartition(b', "crc32"')[0] + b"}") for line in path.read_bytes().splitlines()]
    assert list(map(decode_record, lines)) == [Planned(plan), *go_on(plan, Scores())]


def test_a_program_that_a_sweep_starts_does_not_keep_its_lock(tmp_path: Path) -> None:
    with open_journal(tmp_path, PLAN):
        trial = subprocess.Popen(["sleep", "600"])
    try:
        assert reopen(tmp_path) == State(PLAN)
    finally:
        trial.kill()
        trial.wait()


def test_file_systems_without_locks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as network:
        network.setattr(module, "find_mount", lambda path: Mount("/", "nfs4", "server:/x", "rw"))
        with pytest.raises(UsageError, match=r"network file system \(nfs4\) may not hold\. Name a folder on a disk of"):
            reopen(tmp_path)

    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as bare:
        bare.setattr(fcntl, "flock", refuse)
        with pytest.raises(UsageError, match=r"which this file system refuses \(No locks available\)\. Name a folder"):
            reopen(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_no_sweep_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such folder of a sweep"):
        reopen(tmp_path / "none")
    with pytest.raises(UsageError, match=r"this is not the folder of a sweep \(it has no decisions\.jsonl\)"):
        read_journal(tmp_path)
    os.mkfifo(tmp_path / NAME)
    for read in (reopen, read_journal):
        with pytest.raises(HeadwayError, match=r"the journal cannot be read or written \(it is a named pipe"):
            read(tmp_path)


@contextmanager
def limit_files(nbytes: int) -> Iterator[None]:
    """Files of this process may not become larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    content = write(tmp_path, RECORDS[:9])
    with open_journal(tmp_path, PLAN) as journal:
        for spare in (0, 1, 40):
            with (
                pytest.raises(HeadwayError, match=r"\(File too large\).* headway sweep --resume "),
                limit_files(len(content) + spare),
            ):
                journal.append(*RECORDS[9:])
            assert (tmp_path / NAME).read_bytes() == content
            assert journal.state == fold(State(PLAN), RECORDS[:9])
        journal.append(*RECORDS[9:])
    assert reopen(tmp_path) == fold(State(PLAN), RECORDS)


@pytest.mark.root
def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    filler = small_disk / "filler"
    with open_journal(small_disk, PLAN) as journal:
        filler.write_bytes(bytes((1 << 20) - 8192))
        # The last page of the file takes some lines more.
        with pytest.raises(HeadwayError) as full:
            journal.append(*(Created(number, {"x": 0.5}) for number in range(999)))
        assert str(full.value) == (
            f"{small_disk / NAME}: the disk is full. Nothing before it is lost: make room. "
            f"Then go on: headway sweep --resume {small_disk}."
        )
        whole = len(journal.state.trials)
        assert whole > 9
        assert read_journal(small_disk) == journal.state
        assert (small_disk / NAME).read_bytes().endswith(b"}\n")
        filler.unlink()
        journal.append(Created(whole, {}))
    assert len(reopen(small_disk).trials) == whole + 1


@pytest.mark.parametrize("broken", ["pwrite", "fsync", "ftruncate"])
def test_a_disk_that_fails_anywhere_leaves_a_whole_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    content = write(tmp_path, RECORDS[:9])
    # Longer than the record that takes its place at last.
    lost = Created(9, {"x": "x" * 100})
    line = len(write(tmp_path, [lost])) - len(content)
    (tmp_path / NAME).write_bytes(content)
    pwrite = os.pwrite

    def fail(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_journal(tmp_path, PLAN) as journal:
        # With all of its bytes, only syncing can fail.
        for part in range(line + (broken != "pwrite")):

            def write_part(handle: int, data: bytes, offset: int, part: int = part) -> int:
                # The beginning is written, and then nothing.
                if offset > len(content) or part == 0:
                    fail()
                return pwrite(handle, data[:part], offset)

            with monkeypatch.context() as disk:
                if broken != "fsync":
                    disk.setattr(os, "pwrite", write_part)
                if broken != "pwrite":
                    disk.setattr(os, broken, fail)
                if broken == "ftruncate":
                    disk.setattr(os, "fsync", fail)
                with pytest.raises(HeadwayError, match="the disk is full"):
                    journal.append(lost)
            assert journal.state == fold(State(PLAN), RECORDS[:9])
            if broken != "ftruncate":
                assert (tmp_path / NAME).read_bytes() == content
        journal.append(RECORDS[9])
        assert read_journal(tmp_path) == journal.state
        assert (tmp_path / NAME).read_bytes().count(b"\n") == 11
        journal.append(*RECORDS[10:])
    assert reopen(tmp_path) == fold(State(PLAN), RECORDS)


def test_each_line_is_on_disk_before_the_state_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_journal(tmp_path, PLAN) as journal:
        sizes, fsync = list[int](), os.fsync

        def note(handle: int) -> None:
            assert len(journal.state.trials) == len(sizes)
            sizes.append(os.fstat(handle).st_size)
            fsync(handle)

        monkeypatch.setattr(os, "fsync", note)
        journal.append(*RECORDS[:5])
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    assert sizes == [sum(map(len, lines[: count + 2])) for count in range(5)]


@pytest.mark.fresh
def test_a_journal_is_read_and_decided_on_without_torch(tmp_path: Path) -> None:
    write(tmp_path, RECORDS[:9])
    code = (
        "import sys; from pathlib import Path; from headway.sweep import halving, journal; "
        "state = journal.read_journal(Path(sys.argv[1])); "
        "print(len(state.trials), halving.is_over(state), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "9 False False\n"
