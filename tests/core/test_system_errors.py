"""Errors of the system are sentences, and names in them cannot move the cursor."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from tests._support import command, headway, refused

from headway.core.errors import DataError
from headway.core.printable import escape_controls
from headway.core.system_errors import FIXES, explain_system_error

ESCAPES = "\x1b]0;owned\x07\x1b[2J\r"


@pytest.mark.parametrize("number", [*FIXES, errno.ENOSPC, errno.EDQUOT, errno.ELOOP])
def test_an_error_of_a_file_names_it_and_its_mending(number: int) -> None:
    said = str(explain_system_error(OSError(number, os.strerror(number), "/some/file")))
    assert "/some/file" in said
    assert "[Errno" not in said
    assert said.endswith(FIXES.get(number, "."))
    bare = str(explain_system_error(OSError(number, os.strerror(number))))
    assert "[Errno" not in bare
    assert bare.endswith(".")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 9 PiB for an array"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("std::bad_alloc"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_too_little_memory_is_a_sentence(error: BaseException) -> None:
    said = str(explain_system_error(error))
    assert said.startswith("there is not enough memory")
    assert "ulimit -v" in said


def test_a_fault_of_the_program_is_none() -> None:
    for error in (RuntimeError("shape mismatch"), ImportError("No module named x"), KeyError("a")):
        assert explain_system_error(error) is None


def test_control_characters_are_shown() -> None:
    assert escape_controls(ESCAPES) == "\\x1b]0;owned\\x07\\x1b[2J\\x0d"
    assert escape_controls("a\tb\nc ü 漢 👩‍👩‍👧") == "a\tb\nc ü 漢 👩‍👩‍👧"
    assert escape_controls("a\tb\nc", lines=False) == "a\\x09b\\x0ac"
    assert escape_controls("\x9b\x7f‮\u2028") == "\\x9b\\x7f\\u202e\\u2028"
    assert escape_controls(os.fsdecode(b"a\xff")) == "a\\xff"
    assert str(DataError("bad", where="a\x1b[2J\nheadway: all is well")) == "a\\x1b[2J\\x0aheadway: all is well: bad."


def test_names_move_no_cursor_on_the_command_line(tmp_path: Path) -> None:
    name = tmp_path / f"{ESCAPES}.yaml"
    sentence = refused("train", name, status=2)
    assert "\\x1b]0;owned\\x07" in sentence
    assert not set(sentence) & set("\x1b\x07\r")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'"{ESCAPES.encode("unicode_escape").decode()}": 1\n')
    assert not set(refused("train", recipe, status=2)) & set("\x1b\x07\r")
    assert not set(headway("verify", name, status=None).err) & set("\x1b\x07\r")


def test_a_progress_bar_takes_no_name_for_a_format() -> None:
    from rich.console import Console

    from headway.core.sample_progress import SampleProgress

    bar = SampleProgress("Scanning train-{000..146}.tar [/x] \x1b[2J", "images")._start_bar()
    console = Console(width=200)
    with console.capture() as shown:
        console.print(bar.get_renderable())
    bar.stop()
    assert "Scanning train-{000..146}.tar [/x] \\x1b[2J" in shown.get()


@pytest.mark.root
def test_a_read_only_file_system_is_a_sentence(small_disk: Path, tmp_path: Path) -> None:
    from tests._support import packed_digits, write_recipe

    packed_digits(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", epochs=1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    asked = {
        "a run folder": ("train", recipe, "--run", small_disk / "run"),
        "a pack": ("pack", tmp_path / "digits", small_disk / "pack"),
        "a recipe": ("init", tmp_path / "digits", "--out", small_disk / "new.yaml"),
        "a page": ("schedule", recipe, "--page", small_disk / "page.html"),
        "a workload": ("train", recipe, "--dry-run", "--out", small_disk / "w.json"),
    }
    for what, arguments in asked.items():
        said = headway(*arguments, status=None)
        assert said.status in (1, 2), what
        assert "Traceback" not in said.err, what
        assert "[Errno" not in said.err, (what, said.err)
        assert str(small_disk) in said.err, (what, said.err)


@pytest.mark.check
@pytest.mark.parametrize(("megabytes", "override"), [(1050, "seed=1"), (1200, "data.size=2000"), (2400, "seed=1")])
def test_a_low_limit_of_memory_is_a_sentence(tmp_path: Path, megabytes: int, override: str) -> None:
    from tests._support import packed_digits, write_recipe

    packed_digits(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", epochs=1, batch=60)
    limited = ["bash", "-c", f'ulimit -v {megabytes * 1024}; exec "$@"', "bash"]
    done = subprocess.run(
        [*limited, *command("train", recipe, override, "--run", tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stderr + done.stdout
    assert done.returncode in (0, 1), said
    assert "Traceback" not in said, said
    assert done.returncode == 0 or "there is not enough memory" in said or "threads cannot be had" in said, said
    assert done.returncode == 1 or override == "seed=1"


def test_a_limit_below_what_pytorch_takes_is_refused_before_it_is_loaded() -> None:
    for kilobytes in (150_000, 600_000):
        limited = ["bash", "-c", f'ulimit -v {kilobytes}; exec "$@"', "bash", *command("train", "recipe.yaml")]
        done = subprocess.run(limited, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert "PyTorch needs 1,048,576 kB of address space. Allow more: ulimit -v unlimited." in done.stderr
