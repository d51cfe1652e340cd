"""Lines of several workers: those that are shown, and the moment."""

from __future__ import annotations

import pytest

from headway.launch import worker_output
from headway.launch.worker_output import WorkerOutput
from headway.launch.workers import STDERR, STDOUT

TRACE = "Traceback (most recent call last):\n  here\nValueError: x\n"
FULL = "headway: the disk is full.\n"


@pytest.fixture
def output() -> WorkerOutput:
    """Output of a run that has begun, with the workers a, b and c. Lines of a, rank 0, are shown unchanged."""
    found = WorkerOutput({"a": 0, "b": 1, "c": 2})
    found.release()
    return found


def test_lines_are_shown_at_once_and_last_words_at_the_end(
    output: WorkerOutput, capsys: pytest.CaptureFixture[str]
) -> None:
    output.show("a", STDOUT, "result\n")
    output.show("b", STDOUT, "unseen\n")
    output.show("b", STDERR, f"a note\n{TRACE}")
    output.show("b", STDERR, FULL)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("result\n", "[rank 1] a note\n")
    output.beat()
    assert capsys.readouterr().err == ""
    output.show_last_words("b")
    output.show_last_words("b")
    assert capsys.readouterr().err == "".join(f"[rank 1] {line}\n" for line in (TRACE + FULL).splitlines())


def test_held_lines_are_shown_after_a_while(
    output: WorkerOutput, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output.show("b", STDERR, TRACE)
    monkeypatch.setattr(worker_output, "MAX_HOLD_S", -1.0)
    output.beat()
    assert capsys.readouterr().err.startswith("[rank 1] Traceback")
    output.show("b", STDERR, "and on\n")
    assert capsys.readouterr().err == "[rank 1] and on\n"


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({"a": 1, "b": 1, "c": 1}, ""),  # rank 0 has said it itself
        ({"b": 1, "c": 1}, f"[rank 1] {FULL}"),
        ({"a": 2, "b": 1, "c": 1}, f"[rank 1] {FULL}"),
    ],
)
def test_the_same_error_of_several_workers_is_shown_once(
    output: WorkerOutput, statuses: dict[str, int], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for worker in ("b", "c"):
        output.show(worker, STDERR, FULL)
    output.show_failure(statuses, 1)
    output.show_last_words("b")
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("status", [-9, 1])
def test_the_error_of_rank_0_is_shown_once_and_other_errors_too(
    output: WorkerOutput, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds too if rank 0 was killed after it had printed its error."""
    output.show("a", STDERR, f"a note\n{FULL}")
    output.show("b", STDERR, FULL)
    output.show("c", STDERR, "headway: something else.\n")
    output.show_failure({"a": status, "b": 1, "c": 1}, 1)
    assert capsys.readouterr().err == f"a note\n{FULL}[rank 2] headway: something else.\n"
