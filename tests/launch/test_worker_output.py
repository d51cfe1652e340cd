"""What is shown of the lines of several workers, and when."""

from __future__ import annotations

import pytest

from headway.launch import worker_output
from headway.launch.worker_output import WorkerOutput
from headway.launch.workers import ERR, OUT

TRACE = "Traceback (most recent call last):\n  here\nValueError: x\n"
FULL = "headway: the disk is full.\n"


@pytest.fixture
def begun() -> WorkerOutput:
    """Of a run that has begun, with ranks a, b and c; what a writes is passed on as it is."""
    found = WorkerOutput({"a": 0, "b": 1, "c": 2})
    found.release()
    return found


def test_what_goes_on_is_shown_at_once_and_last_words_with_the_end(
    begun: WorkerOutput, capsys: pytest.CaptureFixture[str]
) -> None:
    begun.show("a", OUT, "result\n")
    begun.show("b", OUT, "unseen\n")
    begun.show("b", ERR, f"a note\n{TRACE}")
    begun.show("b", ERR, FULL)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("result\n", "[rank 1] a note\n")
    begun.beat()
    assert capsys.readouterr().err == ""
    begun.show_last_words("b")
    begun.show_last_words("b")
    assert capsys.readouterr().err == "".join(f"[rank 1] {line}\n" for line in (TRACE + FULL).splitlines())


def test_what_were_no_last_words_is_shown_after_a_while(
    begun: WorkerOutput, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun.show("b", ERR, TRACE)
    monkeypatch.setattr(worker_output, "HOLD_S", -1.0)
    begun.beat()
    assert capsys.readouterr().err.startswith("[rank 1] Traceback")
    begun.show("b", ERR, "and on\n")
    assert capsys.readouterr().err == "[rank 1] and on\n"


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({"a": 1, "b": 1, "c": 1}, ""),  # rank 0 has said it itself
        ({"b": 1, "c": 1}, f"[rank 1] {FULL}"),
        ({"a": 2, "b": 1, "c": 1}, f"[rank 1] {FULL}"),
    ],
)
def test_what_several_say_alike_is_said_once(
    begun: WorkerOutput, statuses: dict[str, int], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for worker in ("b", "c"):
        begun.show(worker, ERR, FULL)
    begun.show_failure(statuses, 1)
    begun.show_last_words("b")
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("status", [-9, 1])
def test_what_rank_0_said_itself_is_said_once_and_what_others_say_beside_it_too(
    begun: WorkerOutput, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where rank 0 was killed after it had said it."""
    begun.show("a", ERR, f"a note\n{FULL}")
    begun.show("b", ERR, FULL)
    begun.show("c", ERR, "headway: something else.\n")
    begun.show_failure({"a": status, "b": 1, "c": 1}, 1)
    assert capsys.readouterr().err == f"a note\n{FULL}[rank 2] headway: something else.\n"
