from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.core import run_folder as module
from headway.core.errors import UsageError
from headway.core.files import write_atomically
from headway.core.run_folder import IDS_BYTES, RESUME_COMMAND, RunFolder, collect_provenance, read_json_lines


def lines(path: Path, *records: object, torn: str = "") -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records) + torn)


def ids(run: RunFolder, count: int) -> None:
    run.ids_path.write_bytes(b"".join(struct.pack("<3q", number, number * 7, number * 7) for number in range(count)))


def test_create_makes_a_folder_and_open_finds_it_once_it_has_a_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "runs/deep/a"
    run = RunFolder.create(folder)
    assert run.panels.is_dir()
    assert run.checkpoints.is_dir()
    with pytest.raises(UsageError, match=r"not a run folder \(it has no recipe\.yaml\)"):
        RunFolder.open(folder)
    run.recipe_path.write_text("seed: 0\n")
    assert RunFolder.open(folder).folder == folder


def test_create_takes_an_empty_folder_and_refuses_one_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (RunFolder.create(tmp_path / "a").folder / "recipe.yaml").write_text("")
    with pytest.raises(UsageError) as refused:
        RunFolder.create(tmp_path / "a")
    assert str(refused.value) == (
        f"{tmp_path}/a: this run folder exists. Resume it: headway train --resume {tmp_path}/a. "
        "Or name another one with --run."
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(UsageError, match=r"mine: this folder is not empty\. Name another one with --run\."):
        RunFolder.create(tmp_path / "mine")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="this is a file, not a folder"):
        RunFolder.create(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"
    for folder in (tmp_path / "file/below", Path("/proc/no-run")):
        with pytest.raises(
            UsageError, match=r": this folder cannot be created or used \(N.*Name another one with --run\."
        ):
            RunFolder.create(folder)


def test_how_a_run_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RESUME_COMMAND, raising=False)
    assert RunFolder(Path("runs/my run")).resume_command == "headway train --resume 'runs/my run'"
    monkeypatch.setenv(RESUME_COMMAND, "headway train --resume x --procs 2")
    assert RunFolder(Path("runs/my run")).resume_command == "headway train --resume x --procs 2"


def test_create_takes_over_what_was_killed_before_its_recipe_was_written(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a").folder
    for name in ("provenance.json", ".provenance.json.123", ".recipe.yaml.123"):
        (folder / name).write_text("{")
    assert RunFolder.create(folder).folder == folder
    (folder / "panels/provenance.json").write_text("{}")
    with pytest.raises(UsageError, match="this folder is not empty"):
        RunFolder.create(folder)


def test_open_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match=r"nowhere: there is no such run folder\. Start a run with headway train RECIPE\."
    ):
        RunFolder.open(tmp_path / "nowhere")
    (tmp_path / "runs/photos").mkdir(parents=True)
    (tmp_path / "runs/photo").mkdir()
    (tmp_path / "runs/photos/recipe.yaml").touch()
    monkeypatch.chdir(tmp_path)
    # Only what is a run; also if its folder was left out.
    for name in ("runs/photoz", "phots", "photos"):
        with pytest.raises(UsageError, match=r"no such run folder\. Did you mean 'runs/photos'\?$"):
            RunFolder.open(Path(name))


def test_a_free_name_counts_up(tmp_path: Path) -> None:
    names = []
    for _ in range(4):
        folder = RunFolder.find_free_name(tmp_path, "run")
        names.append(folder.name)
        folder.mkdir()
    assert names == ["run", "run-2", "run-3", "run-4"]
    (tmp_path / "run-2").rmdir()
    assert RunFolder.find_free_name(tmp_path, "run").name == "run-2"


def test_json_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "a")
    data = {"accuracy": 0.5, "names": ["na\u00efve", None], "deep": {"x": [1, 2]}}
    run.write_json("summary", data)
    assert run.read_json("summary") == data
    assert "na\u00efve" in (run.folder / "summary.json").read_text(encoding="utf-8")
    assert run.read_summary() == data
    with pytest.raises(UsageError, match=r"the run has no provenance\.json"):
        run.read_json("provenance")
    assert RunFolder.create(tmp_path / "b").read_summary() == {}


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "a")
    assert list(run.read_metrics()) == []
    records = [{"position": number, "loss": number / 3} for number in range(5)]
    whole = "".join(f"{json.dumps(record)}\n" for record in records).encode()
    for size in range(len(whole)):
        run.metrics_path.write_bytes(whole[:size])
        found = list(run.read_metrics())
        # a record counts as soon as its brace is there, whether its line has ended or not
        assert found == records[: whole[:size].count(b"}")]
    for torn in (b'{"position": 9, "name": "\xff\xfe', b'{"posi\n{"position": 9}\n'):
        run.metrics_path.write_bytes(whole + torn)
        assert list(run.read_metrics()) == records


def test_cut_back_takes_out_what_came_later(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "a")
    lines(run.metrics_path, *({"position": position} for position in (0, 64, 128, 192)), torn='{"position": 2')
    # a metric's position is what was served before it, a damaged sample's is its own
    lines(run.quarantine_path, *({"position": position} for position in (3, 127, 128, 129)))
    ids(run, 200)
    run.truncate_logs(128)
    assert [record["position"] for record in run.read_metrics()] == [0, 64, 128]
    assert run.metrics_path.read_bytes().endswith(b"}\n")  # so that the next line begins anew
    assert [record["position"] for record in read_json_lines(run.quarantine_path)] == [3, 127]
    assert run.ids_path.stat().st_size == 128 * IDS_BYTES
    assert struct.unpack("<3q", run.ids_path.read_bytes()[-IDS_BYTES:]) == (127, 127 * 7, 127 * 7)
    run.truncate_logs(0)
    assert list(read_json_lines(run.quarantine_path)) == []
    assert run.ids_path.stat().st_size == 0


def test_cut_back_makes_nothing_longer_and_no_file(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "a")
    run.truncate_logs(10)
    assert not run.metrics_path.exists()
    assert not run.ids_path.exists()
    ids(run, 5)
    with run.ids_path.open("ab") as file:
        file.write(b"torn")
    run.truncate_logs(10)
    assert run.ids_path.stat().st_size == 5 * IDS_BYTES


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(steps=st.integers(1, 12), batch=st.integers(1, 9), saved=st.integers(0, 12), torn=st.integers(0, 40))
def test_what_is_logged_again_after_a_cut_stands_once(
    tmp_path: Path, steps: int, batch: int, saved: int, torn: int
) -> None:
    """A run is killed after some steps and resumed from an earlier one: its logs are those of a run in one go."""
    saved = min(saved, steps)
    run = RunFolder(tmp_path)

    def log(first: int, last: int) -> None:
        with run.metrics_path.open("a") as metrics, run.ids_path.open("ab") as served:
            for step in range(first, last):
                metrics.write(json.dumps({"position": (step + 1) * batch, "step": step}) + "\n")
                served.write(b"".join(struct.pack("<3q", step * batch + n, 1, 2) for n in range(batch)))

    for path in (run.metrics_path, run.ids_path):
        path.unlink(missing_ok=True)
    log(0, steps)
    expected = run.metrics_path.read_bytes(), run.ids_path.read_bytes()
    for path in (run.metrics_path, run.ids_path):
        os.truncate(path, max(0, path.stat().st_size - torn))
    reached = min(len(list(run.read_metrics())), run.ids_path.stat().st_size // (IDS_BYTES * batch), saved)
    run.truncate_logs(reached * batch)
    log(reached, steps)
    assert (run.metrics_path.read_bytes(), run.ids_path.read_bytes()) == expected


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    write_atomically(path, "na\u00efve")
    assert path.read_text(encoding="utf-8") == "na\u00efve"
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half of it, then \udcff")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", "cannot replace a folder")
    assert path.read_text(encoding="utf-8") == "na\u00efve"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.json", "folder"]


def test_threads_may_write_one_file_at_once(tmp_path: Path) -> None:
    """Each content is whole, whoever wins; nobody takes away what another has written aside."""
    path, errors = tmp_path / "a.json", []

    def write(letter: str) -> None:
        try:
            for _ in range(30):
                write_atomically(path, letter * 10_000)
                text = path.read_text()
                assert text == text[0] * 10_000
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(tmp_path.iterdir()) == [path]


FULL = """
import resource, signal, sys
from pathlib import Path
from headway.core.files import write_atomically
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
write_atomically(Path(sys.argv[1]), "x" * 5000)
"""


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    done = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_provenance_says_what_a_run_was_made_of(tmp_path: Path) -> None:
    found = collect_provenance({"seed": "command line"}, tmp_path, fingerprint="abc")
    assert json.loads(json.dumps(found)) == found
    assert found["origins"] == {"seed": "command line"}
    assert (found["base"], found["fingerprint"], found["git"]) == (str(tmp_path), "abc", "")
    assert found["host"]["cores"] == len(os.sched_getaffinity(0))
    assert found["host"]["memory_bytes"] > 2**20
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(found["versions"]) == {"python", "headway", "torch", "numpy", "pillow", "safetensors"}


def test_provenance_names_the_commit_of_the_recipe(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        options = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", "-C", tmp_path, *options, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "recipe.yaml").write_text("seed: 0\n")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    commit = collect_provenance({}, tmp_path)["git"]
    assert len(commit) >= 7
    assert git("rev-parse", "HEAD").startswith(commit)
    (tmp_path / "recipe.yaml").write_text("seed: 1\n")
    assert collect_provenance({}, tmp_path)["git"] == f"{commit}-dirty"


def test_the_layout_is_what_the_module_says(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    paths = [run.recipe_path, run.metrics_path, run.quarantine_path, run.ids_path, run.weights_path, run.report_path]
    for path in (*paths, run.panels, run.checkpoints):
        assert path.parent == tmp_path
        assert path.name in (module.__doc__ or "")
