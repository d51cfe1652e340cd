"""bench.gpu: its pieces, how a call goes on where another one was killed, what it records, and the kit."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from bench import _vit, gpu
from bench._gpu import gather, kit, records
from bench._gpu.pieces import LIMIT_MINUTES, PIECES, ROOT, TESTS, Piece, fill_command
from bench._gpu.run import run_piece

from headway.model import measure_model_size

KEY = {"device": "a GPU", "code": "01234567"}
CLAIM = {"name": "one", "value": 1.0, "unit": "", "how": "counted"}

# A piece that answers as a bench does. What it is given: a word, and --json FILE.
ANSWERS = f"""
import json, sys, time
from pathlib import Path
def main():
    word, place = sys.argv[1], Path(sys.argv[sys.argv.index("--json") + 1])
    print("the table of", word)
    if word == "waits":
        time.sleep(600)
    if word == "fails":
        sys.exit("no memory")
    place.write_text(json.dumps({{"machine": {{"gpu": "a GPU"}}, "claims": [{CLAIM!r}]}}))
main()
"""


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of modules, with the module `answers`."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/answers.py").write_text(ANSWERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    return tmp_path


def piece(name: str) -> Piece:
    return Piece(name, f"what is {name}", ("answers", name), ("answers", name))


def options(out: Path, *more: str) -> argparse.Namespace:
    return gpu.arguments(()).parse_args(["--out", str(out), *more])


def test_every_piece_is_short_and_there() -> None:
    names = [one.name for one in PIECES]
    assert len(set(names)) == len(names)
    for one in PIECES:
        assert 0 < one.minutes <= LIMIT_MINUTES
        if not one.is_tests:
            assert (ROOT / f"{one.command[0].replace('.', '/')}.py").is_file()
        if one.dry and not one.is_tests:
            assert one.command[0] == one.dry[0]
            assert "--quick" in one.dry
            assert "--results" not in one.dry


def test_a_dry_run_tries_each_module_once() -> None:
    tried = [one.dry[0] for one in PIECES if one.dry]
    assert sorted(tried) == sorted({one.command[0] for one in PIECES})


def test_every_test_that_needs_a_gpu_is_in_one_piece() -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_gpu_bench.py"]
    marked = [path.relative_to(ROOT / "tests").as_posix() for path in files if "pytest.mark.gpu" in path.read_text()]
    assert sorted(marked) == sorted(file for files in TESTS for file in files)


def test_the_benches_that_make_leaves_out_are_pieces() -> None:
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("BENCHES"))
    left_out = set(line.partition("$(filter-out gpu ")[2].partition(",")[0].split())
    assert left_out <= {one.command[0].removeprefix("bench.") for one in PIECES}
    assert left_out


def test_a_record_says_what_was_run_and_found(answers: Path) -> None:
    found = run_piece(piece("one"), answers, 60.0, dry=False)
    assert found["status"] == "done"
    assert found["claims"] == [CLAIM]
    assert found["machine"] == {"gpu": "a GPU"}
    assert found["output"] == "the table of one\n"
    assert found["command"] == "-m answers one"
    path = records.write(piece("one"), answers / "out", {**KEY, **found})
    assert path.name == "gpu-one.json"
    assert json.loads(path.read_text())["claims"] == [CLAIM]
    assert [one.name for one in path.parent.iterdir()] == ["gpu-one.json"]


@pytest.mark.parametrize(("word", "seconds", "status"), [("fails", 60.0, "failed"), ("waits", 0.5, "timed out")])
def test_a_piece_that_fails_or_hangs_is_told(answers: Path, word: str, seconds: float, status: str) -> None:
    found = run_piece(piece(word), answers, seconds, dry=False)
    assert (found["status"], found["claims"]) == (status, [])


def test_what_is_recorded_is_not_run_again(tmp_path: Path) -> None:
    pieces = [piece(name) for name in ("one", "two", "three", "four")]
    out, kept = tmp_path / "out", tmp_path / "kept"
    records.write(pieces[0], kept, {**KEY, "status": "done"})
    records.write(pieces[1], out, {**KEY, "status": "timed out"})
    records.write(pieces[2], out, {**KEY, "code": "an older one", "status": "done"})
    (out / "gpu-four.json").write_text("{")
    left = records.to_do(pieces, (out, kept), KEY)
    assert [one.name for one in left] == ["three", "four", "two"]
    assert [one.name for one in records.to_do(pieces, (out, kept), KEY, again=True)] == ["one", "two", "three", "four"]
    assert records.to_do(pieces, (out, kept), {**KEY, "device": "another"}) == pieces


def test_a_short_call_runs_one_piece_and_leaves_the_rest(answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces, out = [piece("one"), piece("two")], answers / "out"
    assert gpu.run(pieces, options(out, "--minutes", "1"), KEY, {})
    assert "1 pieces are left for the next call, two first." in capsys.readouterr().out
    assert [one.name for one in out.iterdir()] == ["gpu-one.json"]
    assert gpu.run(pieces, options(out, "--minutes", "1"), KEY, {})
    assert "Nothing is left to do." in capsys.readouterr().out
    assert len(list(out.iterdir())) == 2


def test_a_failure_is_the_status_of_the_call(answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not gpu.run([piece("fails"), piece("one")], options(answers / "out", "--dry"), {}, {})
    said = capsys.readouterr().out
    assert "no memory" in said
    assert "done in" in said
    assert not (answers / "out").exists()


def test_a_dry_run_leaves_out_what_another_piece_tries(answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    untried = Piece("two", "what is two", ("answers", "two"), ())
    assert gpu.run([piece("one"), untried], options(answers / "out", "--dry"), {}, {})
    said = capsys.readouterr().out
    assert "what is one" in said
    assert "what is two" not in said


def test_a_killed_call_goes_on_with_the_next_piece(answers: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from bench import gpu
from bench._family import run_bench
from bench._gpu.pieces import Piece
pieces = [Piece(name, "what is " + name, ("answers", name), ()) for name in sys.argv[2:]]
run_bench(lambda: sys.exit(not gpu.run(pieces, gpu.arguments(()).parse_args(["--out", sys.argv[1]]), {KEY!r}, {{}})))
"""
    out = answers / "out"

    def call(*names: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, str(out), *names]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    with call("one", "waits") as first:
        assert first.stdout is not None
        for line in first.stdout:
            if "waits" in line:
                break
        first.send_signal(signal.SIGKILL)
    kept = (out / "gpu-one.json").read_bytes()
    with call("one", "two") as second:
        said = second.communicate(timeout=60)[0]
    assert second.returncode == 0
    assert "what is one" not in said
    assert "what is two" in said
    assert (out / "gpu-one.json").read_bytes() == kept
    assert not (out / "gpu-waits.json").exists()


def test_the_version_of_the_code_is_that_of_what_runs(tmp_path: Path) -> None:
    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / "bench/a.py").write_text("1")
    before = records.code_version(tmp_path)
    (tmp_path / "bench/results/gpu-one.json").write_text("{}")
    assert records.code_version(tmp_path) == before
    (tmp_path / "bench/a.py").write_text("2")
    assert records.code_version(tmp_path) != before


def test_a_command_gets_the_folder_of_the_records(tmp_path: Path) -> None:
    assert fill_command(("bench.a", "--results", "{out}/b.jsonl"), tmp_path) == [
        "bench.a",
        "--results",
        f"{tmp_path}/b.jsonl",
    ]


HEADER = b"\xff\xd8 tables \xff\xda\x00\x04ab"


@pytest.fixture
def content(tmp_path: Path) -> Path:
    """A small kit, not packed yet."""
    source, content = tmp_path / "source", tmp_path / "content"
    for number in range(20):
        folder = source / f"cifar10/train/{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:04d}.jpg").write_bytes(HEADER + bytes([number]) * number)
    (source / "cifar10/train/0/odd.jpg").write_bytes(b"\xff\xd8 other \xff\xda\x00\x02" + b"x")
    (source / "imagenet-250").mkdir()
    (source / "imagenet-250/n01_1.JPEG").write_bytes(b"a photograph")
    (content / "site/a_package").mkdir(parents=True)
    (content / "site/a_package/__init__.py").write_text("")
    (content / "core/headway/data").mkdir(parents=True)
    (content / "core/headway/data/libheadway.so").write_bytes(b"native")
    gather.take_data(source, content)
    return content


def test_what_the_kit_holds_comes_out_as_it_was(content: Path, tmp_path: Path) -> None:
    gather.write(content, tmp_path / "kit")
    target = kit.unpack(tmp_path / "kit" / kit.ARCHIVE, tmp_path / "target")
    for source in ("cifar10", "imagenet-250"):
        files = [one for one in (tmp_path / "source" / source).rglob("*") if one.is_file()]
        for one in files:
            assert (target / one.relative_to(tmp_path / "source")).read_bytes() == one.read_bytes()
        assert len([one for one in (target / source).rglob("*") if one.is_file()]) == len(files)
    kit.place_core(target / kit.CORE, tmp_path / "src")
    core = tmp_path / "src/headway/data/libheadway.so"
    assert core.read_bytes() == b"native"
    core.write_bytes(b"built here")
    kit.place_core(target / kit.CORE, tmp_path / "src")
    assert core.read_bytes() == b"built here"


def test_the_size_of_the_kit_is_told_and_limited(
    content: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = gather.write(content, tmp_path / "kit")
    assert size == sum(one.stat().st_size for one in (tmp_path / "kit").iterdir())
    assert "of 48 MB that may travel" in capsys.readouterr().out
    wheel = tmp_path / "headway.whl"
    monkeypatch.setenv("HEADWAY_TEST_DATA", str(tmp_path / "source"))
    monkeypatch.setattr(sys, "argv", ["gather", str(wheel), str(tmp_path / "kit")])
    monkeypatch.setattr(gather, "download", lambda folder: [])
    monkeypatch.setattr(gather, "unpack_core", lambda wheel, content: content.mkdir())
    gather.main()
    monkeypatch.setattr(gather, "MOST_BYTES", 100)
    with pytest.raises(SystemExit, match=r"MB, and 0 may travel\. Take less"):
        gather.main()


def test_a_kit_is_used_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kit.find(tmp_path) is None
    (tmp_path / kit.FOLDER).mkdir()
    with tarfile.open(tmp_path / kit.FOLDER / kit.ARCHIVE, "w:xz"):
        pass
    assert kit.find(tmp_path) == tmp_path / kit.FOLDER
    monkeypatch.setenv(kit.USED, "a digest")
    assert kit.find(tmp_path) is None


@pytest.mark.check
def test_the_vision_transformer_has_the_published_size() -> None:
    with torch.device("meta"):
        found = measure_model_size(_vit.vit_small(1000), torch.empty(1, 3, 224, 224))
    assert found.parameters == 22_050_664
    assert found.multiply_adds is not None
    assert 4.5e9 < found.multiply_adds < 4.7e9
