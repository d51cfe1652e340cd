"""`headway assess`: real scripts that reach their targets, or do not, die, hang, and start others."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from tests._support import Said, command, headway, refused

from headway.doctor.accuracy_parser import AccuracyParser
from headway.doctor.assess import MAY_BE_PERCENT, AccuracyGoal, OutputLines, assess, build_command


def script(folder: Path, body: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(body)
    return path


def assessed(folder: Path, body: str, *options: str, status: int, minutes: float = 0.5) -> Said:
    return headway("assess", script(folder, body), "--minutes", str(minutes), *options, status=status)


GOOD = """
import sys
for epoch in range(4):
    print(f"epoch {epoch} train acc {0.5 + epoch / 10:.2f}")
    print(f"epoch {epoch} val_acc: {0.4 + epoch / 10:.2f}")
print("arguments", *sys.argv[1:])
print("a warning", file=sys.stderr)
"""


def test_a_script_that_reaches_both(tmp_path: Path) -> None:
    path = script(tmp_path, GOOD)
    said = headway("assess", path, "--target-train", "0.8", "--target-val", "70", "--", "--lr", "0.1")
    assert said.out.startswith("epoch 0 train acc 0.50\n"), "what the script prints is passed on"
    assert "arguments --lr 0.1\n" in said.out
    assert "a warning\n" in said.err
    verdict = said.out.partition("PASS: ")[2]
    assert "training accuracy: target 0.8, reached after" in verdict
    assert "validation accuracy: target 0.7, reached after" in verdict
    assert "best 0.7, last 0.7" in verdict


def test_json_is_the_only_thing_on_standard_output(tmp_path: Path) -> None:
    said = assessed(tmp_path, GOOD, "--target-val", "0.7", "--json", status=0)
    found = said.json()
    assert found["passed"] is True
    assert found["best"] == {"train": 0.8, "val": 0.7}
    assert found["readings"] == {"train": 4, "val": 4}
    assert (found["ended"], found["status"]) == ("itself", 0)
    assert found["goal"] == {"train": None, "val": 0.7, "seconds": 30.0}
    assert "epoch 0 train acc" in said.err


@pytest.mark.check
def test_a_script_whose_time_is_up_was_stopped_then(tmp_path: Path) -> None:
    """Also one that passes, and one that shows nothing. A shell has begun long before a Python has."""
    stopped = r"; the time was up, and the script was stopped after \d+\.\d s\."
    options = ("--target-val", "0.8", "--minutes", "0.1")
    said = headway("assess", "sh", *options, "--", "-c", "echo val acc 0.9; exec sleep 60")
    assert re.search(r"PASS: the targets were reached after \d+\.\d s of 6 s" + stopped, said.out)
    said = assessed(tmp_path, "import time\ntime.sleep(60)", "--target-val", "0.8", minutes=0.01, status=1)
    assert re.search("FAIL: the script showed no validation accuracy" + stopped, said.out)


def test_options_of_the_script_come_after_two_dashes(tmp_path: Path) -> None:
    said = headway("assess", script(tmp_path, GOOD), "--lr", "0.1", status=2)
    assert "No such option: --lr" in said.err
    assert "Options of the script come after --: headway assess train.py --target-val 0.9 -- --lr 0.1." in said.err
    assert "come after --" not in headway("train", "--lr", "0.1", status=2).err


def test_both_have_to_be_reached_at_one_moment(tmp_path: Path) -> None:
    """Training when it is good, validation when it was better before: over-fitted, and no pass."""
    lines = [(0.6, 0.9), (0.95, 0.7)]
    body = "".join(f"print('train acc {a} val acc {b}')\n" for a, b in lines)
    said = assessed(tmp_path, body, "--target-train", "0.9", "--target-val", "0.8", status=1)
    assert "FAIL: the targets were not reached at once" in said.out
    assert "training accuracy: target 0.9, reached after" in said.out
    assert "validation accuracy: target 0.8, reached after" in said.out
    assert "best 0.9, last 0.7" in said.out
    assessed(tmp_path, body + "print('val acc 0.85')\n", "--target-train", "0.9", "--target-val", "0.8", status=0)


def test_a_script_that_shows_nothing_or_says_not_what_of(tmp_path: Path) -> None:
    said = assessed(tmp_path, "pass", "--target-train", "0.9", "--target-val", "0.8", status=1)
    assert "FAIL: the script showed no training accuracy and no validation accuracy." in said.out
    assert "target 0.9, no value seen" in said.out
    assert "--train-pattern 'TRAIN=([\\d.]+)' and --val-pattern 'VAL=([\\d.]+)'" in said.out
    options = ("--target-val", "0.8", "--val-pattern", r"VAL=([\d.]+)")
    assessed(tmp_path, "print('VAL=0.9')", *options, status=0)  # as it is advised
    said = assessed(tmp_path, "print('accuracy: 0.95')", "--target-val", "0.8", status=1)
    assert "--train-pattern or --val-pattern: accuracy: 0.95" in said.out
    options = ("--target-val", "0.8", "--val-pattern", r"accuracy: ([\d.]+)")
    assessed(tmp_path, "print('accuracy: 0.95')", *options, status=0)


def test_a_script_that_dies_fails_though_it_was_good(tmp_path: Path) -> None:
    body = "print('val acc 0.9', flush=True)\nraise KeyError('lost')"
    said = assessed(tmp_path, body, "--target-val", "0.8", status=1)
    assert "FAIL: the script ended with status 1 after" in said.out
    assert "KeyError: 'lost'" in said.err
    assert "reached after" in said.out
    body = "import os\nprint('val acc 0.9', flush=True)\nos.abort()"
    assert "ended by signal SIGABRT" in assessed(tmp_path, body, "--target-val", "0.8", status=1).out


BARS = """
import sys, time
for epoch in range({epochs}):
    for step in range(1, 6):
        shown = 1.0 if step < 5 else epoch / 4
        sys.stderr.write(f"\\rEpoch {{epoch}}/4: {{step}}/5 [00:01, train_acc={{shown}}]")
        sys.stderr.flush()
        time.sleep(0.01)
    print(f"val acc {{epoch * 25}}%")
"""


def test_a_bar_drawn_in_place_counts_when_it_is_full(tmp_path: Path) -> None:
    """The mean over the first batches of an epoch is no training accuracy."""
    said = assessed(tmp_path, BARS.format(epochs=4), "--target-train", "0.8", "--json", status=1)
    assert said.json()["best"] == {"train": 0.75, "val": 0.75}
    body = BARS.format(epochs=5)
    said = assessed(tmp_path, body, "--target-train", "1.0", "--target-val", "1.0", "--json", status=0)
    assert said.json()["readings"] == {"train": 5, "val": 5}


def test_lines_of_streams() -> None:
    lines = OutputLines()
    assert lines.feed(b"one\r\ntwo\nthr", 1.0)[1] == [(1.0, "one"), (1.0, "two")]
    assert lines.feed(b"ee\n\xff\xc3", 2.0)[1] == [(2.0, "three")]
    assert lines.end(3.0) == [(3.0, "\ufffd\ufffd")]
    assert lines.feed(b"\rdrawing 1/3\rdrawing 2/3", 1.0)[1] == []
    assert lines.is_unfinished()
    assert lines.feed(b"\rother 1/7\r", 2.0)[1] == [(2.0, "drawing 2/3")]
    assert lines.feed(b"\b\b\bother 7/7", 3.0)[1] == [(3.0, "other 7/7")]
    assert lines.feed(b"\nother 7/7\n", 4.0)[1] == [(4.0, "other 7/7")], "what is told is not told again"
    lines.feed(b"x" * 200_000, 5.0)
    assert len(lines.end(6.0)[0][1]) == 65_536


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


CHILDREN = """
import os, subprocess, time
children = [subprocess.Popen(["sleep", "60"], start_new_session=bool(n)) for n in range(2)]
open("pids", "w").write(" ".join(map(str, [os.getpid(), *(child.pid for child in children)])))
print("train acc 0.5 val acc 0.6", flush=True)
{end}
"""
SHELLS_CHILDREN = """
{ignore}
sleep 60 &
first=$!
setsid sleep 60 &
echo $$ $first $! > pids
echo train acc 0.5 val acc 0.6
exec sleep 60
"""
"""The same of a shell, which has begun long before a Python has; what it ignores its children ignore too. It waits for
none of them: they may be ended before it is, and it would then end by itself."""


@pytest.mark.parametrize("stubborn", [False, pytest.param(True, marks=pytest.mark.check)])
def test_at_the_end_of_the_time_every_process_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    """Also those in a session of their own, and those that do not listen to SIGTERM."""
    monkeypatch.chdir(tmp_path)
    body = SHELLS_CHILDREN.format(ignore="trap '' TERM" if stubborn else "")
    goal = AccuracyGoal.from_options(0.9, 0.5, 5 / 60)
    found = assess(build_command("sh", ["-c", body]), goal, AccuracyParser(), grace_s=0.5 if stubborn else 20)
    assert (found.passed, found.ended) == (False, "time")
    assert found.status == (-signal.SIGKILL if stubborn else -signal.SIGTERM)
    assert found.why.startswith(
        "the training accuracy did not reach its target; the time was up, and the script was stopped "
    )
    assert found.best == {"train": 0.5, "val": 0.6}
    assert alive([int(pid) for pid in (tmp_path / "pids").read_text().split()]) == []


def test_children_that_hold_its_output_do_not_hold_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    body = CHILDREN.format(end="children[1].kill(); children[1].wait()")
    path = script(tmp_path, body)
    found = assess(build_command(str(path)), AccuracyGoal.from_options(None, 0.5, 1), AccuracyParser())
    assert (found.passed, found.ended) == (True, "itself")
    assert alive([int(pid) for pid in (tmp_path / "pids").read_text().split()]) == []


@pytest.mark.check
def test_a_script_has_time_to_end_well(tmp_path: Path) -> None:
    """What it prints after its time is passed on, and does not count."""
    body = "trap 'echo val acc 0.99; echo saved; exit 0' TERM; echo val acc 0.5; while :; do sleep 0.1; done"
    options = ("--target-val", "0.9", "--json", "--minutes", "0.08")
    said = headway("assess", "sh", *options, "--", "-c", body, status=1)
    assert "saved" in said.err
    assert said.json()["best"]["val"] == 0.5


def test_it_can_be_stopped_when_it_is_good_enough(tmp_path: Path) -> None:
    body = "import time\nprint('val acc 0.9')\ntime.sleep(60)"
    options = ("--target-val", "0.8", "--stop", "--json")
    found = assessed(tmp_path, body, *options, "--scale", "fraction", status=0).json()
    assert (found["ended"], found["passed"], found["kept_on"]) == ("reached", True, False)
    percent = assessed(tmp_path, body.replace("0.9", "90"), *options, status=0).json()
    assert percent["ended"] == "reached"


def test_it_is_not_stopped_by_what_may_be_less_than_a_percent(tmp_path: Path) -> None:
    body = "import time\nprint('val acc 0.95', flush=True)\ntime.sleep(0.4)\n"
    options = ("--target-val", "0.9", "--stop")
    failed = assessed(tmp_path, body + "print('val acc 12.5')", *options, status=1).out
    assert "target 0.9, not reached; best 0.125, last 0.125" in failed
    said = assessed(tmp_path, body, *options, status=0).out
    assert "The script was not stopped: its numbers may be percent. If not, give --scale fraction." in said
    assert MAY_BE_PERCENT not in assessed(tmp_path, body, *options[:2], status=0).err


def test_the_moment_at_which_it_would_have_been_stopped_is_told_once(tmp_path: Path) -> None:
    told, waits = tmp_path / "told", f"while not os.path.exists({str(tmp_path / 'told')!r}): time.sleep(0.01)"
    body = f"import os, time\nprint('val acc 0.95')\n{waits}\nprint('val acc 0.96')\nprint('val acc 0.9')"
    heard: list[str] = []

    def echo(text: str, error: bool) -> None:
        heard.append(text)
        if text == MAY_BE_PERCENT:
            told.touch()

    goal = AccuracyGoal.from_options(None, 0.9, 1)
    found = assess(
        build_command(str(script(tmp_path, body))), goal, AccuracyParser(), echo=echo, stop_when_reached=True
    )
    assert (found.ended, found.kept_on) == ("itself", True)
    assert heard.count(MAY_BE_PERCENT) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.check)])
def test_ending_the_assessment_ends_the_script(
    tmp_path: Path, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins without it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    path = script(tmp_path, CHILDREN.format(end="time.sleep(60)"))
    started = command("assess", path, "--target-val", "0.9", "--minutes", "1")
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "train acc 0.5 val acc 0.6\n"
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode == 1
    assert err.endswith("Stopped.\n")
    assert "Traceback" not in err
    assert alive([int(pid) for pid in (tmp_path / "pids").read_text().split()]) == []


def test_programs_that_are_no_python(tmp_path: Path) -> None:
    path = script(tmp_path, "#!/bin/sh\necho val acc $1\n", "train.sh")
    refusal = refused("assess", path, "--target-val", "0.5", status=2)
    assert "neither a Python file nor executable. Make it executable: chmod +x" in refusal
    path.chmod(0o755)
    assert "PASS" in headway("assess", path, "--target-val", "0.5", "--", "0.6").out
    assert "PASS" in headway("assess", "sh", "--target-val", "0.5", "--", "-c", "echo val acc 0.7").out


def test_wrong_usage_is_a_sentence(tmp_path: Path) -> None:
    path = script(tmp_path, "pass")
    for arguments, sentence in (
        ((path,), "there is no target. Give --target-train, --target-val, or both."),
        ((path, "--target-val", "0"), "--target-val: 0 is not an accuracy"),
        ((path, "--target-train", "101"), "--target-train: 101 is not an accuracy"),
        ((path, "--target-val", "nan"), "--target-val: nan is not an accuracy"),
        ((path, "--target-val", "0.9", "--minutes", "0"), "--minutes: 0 minutes is not a time limit"),
        ((path, "--target-val", "0.9", "--val-pattern", "["), "is not a regular expression"),
        ((tmp_path / "none.py", "--target-val", "0.9"), "there is no such script"),
        ((tmp_path, "--target-val", "0.9"), "this is a folder, not a script"),
    ):
        assert sentence in refused("assess", *arguments, status=2)
    broken = script(tmp_path, "#!/no/such/program\n", "broken")
    broken.chmod(0o755)
    assert "this cannot be run (No such file or directory)" in refused("assess", broken, "--target-val", "1", status=2)
