"""A program of the user's that judges an export: what it prints, how it fails, and that nothing of it stays behind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Literal

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import HeadwayError, UsageError
from headway.core.process_group import read_start_time
from headway.lifecycle.loop.loop_recipe import VerifyRecipe
from headway.lifecycle.loop.verification import PROCESS, Verification, identify_program, measure_export

NUMBERS = st.integers(-(10**6), 10**6).map(lambda number: number / 1000)


def verify(folder: Path, script: str, timeout_s: float = 100.0) -> float:
    settings = VerifyRecipe(command=("sh", "-c", script), metric="score", timeout_s=timeout_s)
    return measure_export(settings, folder, folder / "rounds/1/export", folder / "rounds/1/verify")


def test_the_number_is_in_the_last_line(tmp_path: Path) -> None:
    """It runs in the folder of LOOP.yaml, with the folders of the export and of the round as arguments."""
    script = 'echo "$PWD" "$0" "$1"; echo "{\\"score\\": 1}"; echo "{\\"score\\": 0.25}"; echo; echo warned >&2'
    assert verify(tmp_path, script) == 0.25
    said = (tmp_path / "rounds/1/verify/output.txt").read_text().split()
    assert said[:3] == [str(tmp_path), str(tmp_path / "rounds/1/export"), str(tmp_path / "rounds/1")]
    assert (tmp_path / "rounds/1/verify/errors.txt").read_text() == "warned\n"
    # A second run leaves nothing of the first.
    assert verify(tmp_path, 'echo "{\\"score\\": -3}"') == -3
    assert (tmp_path / "rounds/1/verify/errors.txt").read_text() == ""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", "has ended with exit status 3"),
        ("echo no simulator >&2; exit 1", "status 1. Its last error line: 'no simulator'"),
        ("kill -SEGV $$", "was ended by SIGSEGV"),
        ("true", "it has printed nothing"),
        ("echo done", "it is not JSON"),
        ("echo [1]", "it holds a list, not an object"),
        ("""echo '{"other": 1, "more": 2}'""", "it lacks 'score', and has 'other', 'more'"),
        ("""echo '{"score": NaN}'""", "'score' is nan, not a finite number"),
        ("""echo '{"score": -Infinity}'""", "'score' is -inf, not a finite number"),
        ("""echo '{"score": true}'""", "it has a truth value as 'score', not a number"),
        ("""echo '{"score": "0.5"}'""", "it has a text as 'score', not a number"),
        ("""echo '{"score": 1, "score": 2}'""", "it has 'score' twice"),
        ("""printf '{"score": 1'; printf '%0400d}\\n' 0""", "too large"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_number_is_refused_in_words(script: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(HeadwayError) as refused:
        verify(tmp_path, script)
    assert words in str(refused.value)
    assert refused.value.fix
    assert str(tmp_path / "rounds/1/verify") in str(refused.value)


def test_what_cannot_be_run_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "plain.sh").write_text("#!/bin/sh\n")
    (tmp_path / "lost.sh").write_text("#!/no/such/interpreter\n")
    (tmp_path / "lost.sh").chmod(0o755)
    for name, words in (
        ("no-such-program", "there is no program"),
        ("./plain.sh", "there is no program"),
        ("./lost.sh", "cannot be run (No such file"),
    ):
        settings = VerifyRecipe(command=(name,), metric="score")
        with pytest.raises(UsageError, match=r"verify\.command") as refused:
            measure_export(settings, tmp_path, tmp_path, tmp_path / "verify")
        assert words in str(refused.value)


def list_processes(folder: Path) -> list[psutil.Process]:
    """The processes that run in a folder."""
    found = []
    for one in psutil.process_iter():
        try:
            if one.cwd() == str(folder) and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("script", ["sleep 600 & wait", "sleep 600 & sleep 600 & echo '{\"score\": 1}'"])
def test_all_that_a_program_starts_ends_with_it(script: str, tmp_path: Path) -> None:
    """At the time limit, and after it has ended by itself."""
    if "score" in script:
        assert verify(tmp_path, script) == 1
    else:
        with pytest.raises(HeadwayError, match="has not ended within"):
            verify(tmp_path, script, timeout_s=0.5)
    psutil.wait_procs(list_processes(tmp_path), 60)
    assert not list_processes(tmp_path)


def test_a_forgotten_program_is_ended_and_no_other(tmp_path: Path) -> None:
    """A loop that was killed leaves its program running, whose number may be that of another process later."""
    note = tmp_path / "rounds/1/verify" / PROCESS
    note.parent.mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        created = read_start_time(process.pid)
        for content in ("", "[]", json.dumps({"pid": process.pid, "created": created - 5}), json.dumps({"pid": -1})):
            note.write_text(content)
            assert verify(tmp_path, "echo '{\"score\": 1}'") == 1
            assert process.poll() is None
            note.unlink()
        note.write_text(json.dumps({"pid": process.pid, "created": created}))
        assert verify(tmp_path, "echo '{\"score\": 1}'") == 1
        process.wait(60)


def build(before: float, value: float, better: Literal["higher", "lower"], allowed: float) -> Verification:
    return Verification(
        program="", metric="score", better=better, value=value, against=0, before=before, allowed=allowed
    )


@given(NUMBERS, NUMBERS, st.integers(0, 5000).map(lambda number: number / 1000))
def test_lower_is_higher_with_the_sign_turned(before: float, value: float, allowed: float) -> None:
    higher, lower = build(before, value, "higher", allowed), build(-before, -value, "lower", allowed)
    assert higher.passed == lower.passed
    assert higher.passed == (round(1000 * (before - value)) <= round(1000 * allowed))
    assert Verification.from_json(json.loads(json.dumps(higher.to_json()))) == higher
    assert build(before, before, "lower", 0.0).passed


def test_a_program_is_known_by_its_command_and_its_files(tmp_path: Path) -> None:
    settings = VerifyRecipe(command=("python3", "simulate.py"), metric="score")
    (tmp_path / "simulate.py").write_text("print(1)")
    first = identify_program(settings, tmp_path)
    assert identify_program(settings.model_copy(update={"drop": 3.0, "timeout_s": 5.0}), tmp_path) == first
    assert identify_program(settings.model_copy(update={"metric": "other"}), tmp_path) != first
    # A script behind -c may be longer than a name of a file can be.
    assert identify_program(settings.model_copy(update={"command": ("sh", "-c", "true;" * 99)}), tmp_path) != first
    (tmp_path / "simulate.py").write_text("print(2)")
    assert identify_program(settings, tmp_path) != first
