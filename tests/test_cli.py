"""The command line: its verbs, their output and their exit status."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from tests._support import command, digits, finished, headway, packed_digits, records, running, write_recipe

VERBS = (
    *("init", "pack", "verify", "train", "evaluate", "predict", "report", "landscape", "assess", "schedule"),
    *("doctor", "tune", "plan", "bench-links", "replay", "sweep", "curve", "ensemble", "export", "serve"),
    *("dataset", "annotations", "croissant", "lineage"),
    *("mine", "loop", "index", "runs"),
    *("serve-data", "data-token"),
)
INNER_VERBS = {
    "dataset": ("create", "add", "label", "remove", "log", "show", "diff", "merge", "tag", "gc", "verify"),
    "annotations": ("convert", "export", "show"),
}


def list_commands(help_text: str) -> list[str]:
    """The verbs that a help lists."""
    return re.findall(r"^  ([a-z][a-z-]+) ", help_text.partition("Commands")[2], re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml")
    return folder


def test_the_version_is_the_packages() -> None:
    assert headway("--version").out == f"headway {version('headway')}\n"


def test_help_lists_every_verb() -> None:
    said = headway("--help")
    assert sorted(list_commands(said.out)) == sorted(VERBS)
    for verb in VERBS:
        assert re.search(rf"^\s+{verb}\s+\w", said.out, re.MULTILINE), verb
        one = headway(verb, "--help")
        assert one.out.startswith(f"Usage: headway {verb} ")
        inner_verbs = INNER_VERBS.get(verb, ())
        assert inner_verbs or "--json" in one.out
        assert sorted(inner_verbs) == sorted(list_commands(one.out))
        for inner in inner_verbs:
            assert "--json" in headway(verb, inner, "--help").out
    assert "headway" in headway(status=None).out + headway(status=None).err


@pytest.mark.parametrize("verb", ["sweep", "plan"])
def test_help_groups_the_options_by_what_they_are_for(verb: str) -> None:
    said = headway(verb, "--help").out
    headings = re.findall(r"^([A-Z].*):$", said, re.MULTILINE)
    assert headings[0] == "Arguments"
    assert headings[-1] == "Options"
    assert len(headings) > 3
    options = re.findall(r"^  (--[a-z-]+)", said, re.MULTILINE)
    assert len(options) == len(set(options)) > 15


def test_the_shell_completes_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`headway --install-completion` writes a script that asks this of the command."""
    assert "--install-completion" in headway("--help").out
    monkeypatch.setenv("_HEADWAY_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "headway tr")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert headway().out.split() == ["train"]


@pytest.mark.parametrize(
    "arguments", [("fly",), ("pack",), ("train", "--repeat", "0"), ("pack", "a", "b", "--splt", "1")]
)
def test_wrong_usage_leaves_with_2(arguments: tuple[str, ...]) -> None:
    said = headway(*arguments, status=2)
    assert said.out == ""
    assert "Traceback" not in said.err


def test_the_whole_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs seven verbs, one after the other, each with --json."""
    monkeypatch.chdir(tmp_path)
    digits(tmp_path / "images", per_class=20)
    made = headway("init", "images", "--json").json()
    assert (made["recipe"], made["packed"], made["samples"]) == ("images.yaml", "images.packed", 200)
    packed = headway("pack", "images", "images.packed", "--split", "0.2", "--json").json()
    assert [Path(path).name for path in packed["folders"]] == ["train", "eval"]
    assert (packed["samples"], packed["skipped"]) == (200, [])
    assert headway("verify", "images.packed", "--json").json() == {
        "damaged": [],
        "samples": {"train": 160, "eval": 40},
    }
    quick = ("batch=32", "epochs=25", "optimizer.lr=0.05", "model.args={width: 8}")
    trained = headway("train", "images.yaml", *quick, "--json").json()
    assert (trained["run"], trained["finished"]) == ("runs/images", True)
    assert trained["accuracy"] > 0.6
    found = headway("evaluate", "runs/images", "--json").json()
    assert found["accuracy"] == trained["best"]["accuracy"]
    said = headway("predict", "runs/images", "images", "--json")
    right = [row["label"] == Path(row["path"]).parent.name for row in map(json.loads, said.out.splitlines())]
    assert len(right) == 200
    assert sum(right) > 120
    assert headway("report", "runs/images", "--json").json() == {"report": "runs/images/report.html"}


def test_sentences_without_json(folder: Path, tmp_path: Path) -> None:
    said = headway("pack", folder / "digits", tmp_path / "dst")
    packed = rf"Packed 240 images \([\d.]+ kB, format recordio, mode \w+\) into {tmp_path}/dst at [\d,]+ images/s\.\n"
    assert re.fullmatch(packed, said.out)
    assert headway("verify", tmp_path / "dst").out == "Every record (240 samples) is intact.\n"
    said = headway("pack", folder / "digits", tmp_path / "split", "--split", "0.2")
    assert said.out.endswith(" images/s: train 190, eval 50 images, 10 classes.\n")
    assert headway("verify", tmp_path / "split").out == "Every record of 2 sets (190 + 50 samples) is intact.\n"
    said = headway("train", folder / "recipe.yaml", "--run", tmp_path / "run")
    pattern = r"Trained \S+/run:  loss \d\.\d{4}  accuracy 0\.\d{4}  \d+\.\d s  [\d,]+ images/s\n"
    kept = r"Best: (the last epoch|epoch 1 of 2), loss \d\.\d{4}, accuracy (0\.\d{4}); its weights are kept\. "
    found = re.fullmatch(rf"{pattern}{kept}Next: headway report {tmp_path}/run\n", said.out)
    assert found, said.out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    best = summary["best"]
    which = "the last epoch" if best["step"] == summary["step"] else "epoch 1 of 2"
    assert found.groups() == (which, f"{best['accuracy']:.4f}")
    lines = [line for line in said.err.splitlines() if line.startswith("evaluate")]
    assert [re.split(r"\s{2,}", line)[1] for line in lines] == ["epoch 1.00", "epoch 2.00"]


def test_debug_shows_the_traceback_of_any_error(tmp_path: Path) -> None:
    for arguments in (("--debug", "report", tmp_path / "none"), ("report", tmp_path / "none", "--debug")):
        said = headway(*arguments, status=2)
        assert "Traceback (most recent call last):" in said.err
        assert "UsageError" in said.err
        assert said.err.rstrip().splitlines()[-1].startswith("headway: ")


@pytest.mark.fresh
def test_the_installed_command_and_the_module_are_one(folder: Path, tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "headway"
    out = [
        subprocess.run([*start, "verify", "none"], capture_output=True, text=True, check=False, cwd=tmp_path)
        for start in ([script], [sys.executable, "-m", "headway"])
    ]
    assert [done.returncode for done in out] == [2, 2]
    assert out[0].stderr == out[1].stderr != ""


@pytest.mark.check
@pytest.mark.fresh
def test_a_terminal_gets_a_bar_and_a_file_gets_lines(folder: Path, tmp_path: Path) -> None:
    """A bar has epoch, step, images/s, time to go, loss, waiting share and accuracy, drawn in place."""
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", "LINES": "40"}
    rarely = ("evaluate.every_epochs=20", "checkpoint.every_epochs=40")
    arguments = command("train", folder / "recipe.yaml", "--run", tmp_path / "run", "epochs=40", *rarely)
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=side, env=environment, text=True)
    os.close(side)
    screen = b""
    try:
        while part := os.read(main, 65536):
            screen += part
    except OSError:  # the other side was closed
        pass
    os.close(main)
    out, _ = process.communicate()
    assert process.returncode == 0, screen.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode())
    for pattern in (
        r"epoch 40\.00/40 ",
        r"step 240/240",
        r"[\d,]+ images/s",
        r"[\d.]+s to go",
        r"loss \d\.\d{4}",
        r"waiting \d+\.\d%",
        r"\d\.\d of 3 batches ready",
        r"accuracy \d\.\d{4}",
    ):
        assert re.search(pattern, text), pattern
    assert "\x1b[?25h" in screen.decode(), "the cursor is not shown again"
    assert out.startswith("Trained ")


@pytest.mark.check
@pytest.mark.fresh
def test_ctrl_c_twice_ends_at_once(folder: Path, tmp_path: Path) -> None:
    """A run can be ended even if a step never returns."""
    (folder / "slow.py").write_text(
        "import time\ndef wait(images, labels, keys):\n    print('waiting', flush=True)\n    time.sleep(600)\n"
    )
    arguments = ("train", folder / "recipe.yaml", "--run", tmp_path / "run", "transform=slow.py:wait")
    with running(*arguments) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.endswith("Stopped.\n")
    assert "Traceback" not in err


@pytest.mark.check
def test_output_that_nobody_reads_any_more(folder: Path, tmp_path: Path) -> None:
    """`headway predict ... | head -1` ends quietly."""
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "epochs=0.2")
    many = [str(path) for path in (folder / "digits").rglob("*.png")] * 8
    listing = " ".join([*command("predict", tmp_path / "run"), *many])
    script = tmp_path / "pipe.sh"
    script.write_text(f"set -o pipefail\n{listing} | head -1\n")
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert done.stdout == "path,label,probability\n"
    assert "Traceback" not in done.stderr


def test_metrics_are_written_as_they_come(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record is in the file when its step is over, so that a run can be watched."""
    (folder / "watch.py").write_text(
        "import json, os\n"
        "SEEN = []\n"
        "def watch(images, labels, keys):\n"
        "    with open(os.environ['METRICS']) as file:\n"
        "        SEEN.append([json.loads(line) for line in file])\n"
        "    return images, labels\n"
    )
    monkeypatch.setenv("METRICS", str(tmp_path / "run/metrics.jsonl"))
    rarely = ("checkpoint.every_epochs=9", "evaluate.every_epochs=9", "log_every_steps=2")
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "transform=watch.py:watch", *rarely)
    (seen,) = [
        module.SEEN for name, module in sys.modules.items() if name.endswith("_watch") and hasattr(module, "SEEN")
    ]
    assert [len(found) for found in seen] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert seen[-1] == records(tmp_path / "run")[:5]
    names = {"kind", "step", "position", "epoch", "loss", "accuracy", "lr", "batch"}
    names |= {"images_s", "wait_share", "seconds"}
    assert seen[-1][0].keys() == names


@pytest.mark.fresh
def test_a_verb_says_nothing_else_from_a_real_process(folder: Path) -> None:
    said = finished("verify", folder / "digits.packed")
    assert (said.status, said.out, said.err) == (0, "Every record of 2 sets (180 + 60 samples) is intact.\n", "")
