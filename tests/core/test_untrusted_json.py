"""JSON, YAML and files from outside: a sentence each, whatever they are."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from headway.core import row_file
from headway.core.errors import HeadwayError, RecipeError
from headway.core.files import TEXT_BYTES, expect_inside, is_plain_name, open_regular, read_regular, read_text
from headway.core.profile import Profile
from headway.core.recipe_yaml import MOST_VALUES, parse_recipe
from headway.core.recipe_yaml import parse_override as yaml_value
from headway.core.run_folder import RunFolder, read_json_lines
from headway.core.untrusted_json import JsonError, is_number, is_whole_number, parse_object, parse_value
from headway.core.workload import Workload
from headway.page.panel import Panel

DEEP = '{"a":' * 100_000


@pytest.mark.parametrize("value", [1 << 31, None, True, [1, 2], {"a": 1}])
def test_what_is_no_text_is_not_made_one(value: object) -> None:
    """`bytes` of a whole number is so many zeros: a pack's description of 2147483648 once took 2 GB."""
    with pytest.raises(JsonError, match=r"it is .*, not a text"):
        parse_object(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DEEP, "nested too deeply"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 40 + "1" + "}" * 40, "more than 32 levels deep"),
        ('{"a": 1, "a": 2}', "it has 'a' twice"),
        ('{"b": {"a": 1, "a": 2}}', "it has 'a' twice"),
        ("[1]", "it holds a list, not an object"),
        ("null", "it holds null"),
        ("", "it is not JSON"),
        ("9" * 5000, "it is not JSON"),
        (b"\xff\xfe{\x00}\x00", "it is not UTF-8 text"),
    ],
)
def test_json_that_is_no_object_of_ours(text: str | bytes, said: str) -> None:
    with pytest.raises(JsonError, match=said):
        parse_object(text)


def test_json_that_is_one() -> None:
    assert parse_object('{"a": {"b": [1, 2.5, null, true, NaN]}}').keys() == {"a"}
    assert parse_value('{"a":' * 32 + "1" + "}" * 32)
    assert parse_value("3") == 3


def test_true_is_no_number() -> None:
    assert is_whole_number(1)
    assert not any(map(is_whole_number, (True, 1.0, -1, 1 << 63, "1", None)))
    assert all(map(is_number, (1, 0.5)))
    assert not any(map(is_number, (True, float("nan"), "1", None)))


def test_only_regular_files_are_opened_and_nothing_blocks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in ((tmp_path / "pipe", "a named pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "directory")):
        for opened in (open_regular, read_regular, read_text):
            with pytest.raises(OSError, match=said):
                opened(path)
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(tmp_path / "file") == "abc"
    assert read_regular("/proc/self/stat")  # says that it has no bytes
    with pytest.raises(OSError, match="more than the 3 that are read"):
        read_regular(tmp_path / "file", 3)
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 43)
    with pytest.raises(OSError, match="more than memory is free for"):
        read_regular(tmp_path / "sparse")
    with pytest.raises(OSError, match=f"more than the {TEXT_BYTES:,} that are read"):
        read_text(tmp_path / "sparse")


def test_plain_names_and_links_out_of_a_folder(tmp_path: Path) -> None:
    assert all(map(is_plain_name, ("a", "ü b", "tensors-0.safetensors")))
    bad = ("", ".", "..", "a/b", "/a", "a\0", "\x1b[2J", "a\nb", "\ud800", "‮txt", "x" * 256, 7, None)
    assert not any(map(is_plain_name, bad))
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "mine").touch()
    (inner / "same").symlink_to("mine")
    (inner / "away").symlink_to(tmp_path / "other")
    expect_inside(inner, "mine")
    expect_inside(inner, "same")
    with pytest.raises(OSError, match="leads out of its folder"):
        expect_inside(inner, "away")


def test_what_reads_json_says_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(DEEP)
    for kind in (Profile, Workload):
        with pytest.raises(HeadwayError, match="nested too deeply"):
            kind.read(path)
    with pytest.raises(HeadwayError, match="nested too deeply"):
        Panel.from_json(DEEP)
    (tmp_path / "summary.json").write_text(DEEP)
    with pytest.raises(HeadwayError, match=r"summary\.json is damaged: it is nested too deeply"):
        RunFolder(tmp_path).read_summary()
    path.write_text('{"position": 1}\n' + DEEP + "\n")
    assert list(read_json_lines(path)) == [{"position": 1}]
    path.write_text('{"position": 1}\n[3]\n')
    assert list(read_json_lines(path)) == [{"position": 1}]
    path.write_text(DEEP + "\n")
    assert row_file.read_rows(path) is None
    path.unlink()
    os.mkfifo(path)
    assert row_file.read_rows(path) is None
    with pytest.raises(HeadwayError, match="a named pipe"):
        Profile.read(path)


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: 1, l: 2}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("text", [BOMB, MERGES], ids=["lists", "merges"])
def test_aliases_of_aliases_are_counted_before_they_are_written_out(text: str) -> None:
    begun = time.process_time()
    with pytest.raises(RecipeError, match=f"recipe.yaml: its aliases stand for more than {MOST_VALUES:,} values"):
        parse_recipe(text, "recipe.yaml")
    assert time.process_time() - begun < 5  # written out they would take minutes, and gigabytes


def test_yaml_of_any_size_and_shape_is_a_sentence() -> None:
    with pytest.raises(RecipeError, match="it has more than"):
        parse_recipe("a: [" + "1," * MOST_VALUES + "1]", "recipe.yaml")
    with pytest.raises(RecipeError, match="characters"):
        parse_recipe("a: " + "x" * (1 << 20), "recipe.yaml")
    with pytest.raises(RecipeError, match="holds itself, or is nested too deeply"):
        parse_recipe("a: &a [*a]", "recipe.yaml")
    with pytest.raises(RecipeError, match="is not YAML"):
        yaml_value("&a [*a]", "key")
    with pytest.raises(RecipeError, match="aliases"):
        yaml_value("{" + BOMB.replace("\n", ", ") + "}", "key")
    assert parse_recipe("a: &a {b: 1}\nc: *a\nd: {<<: *a, e: 2}", "")[0] == {
        "a": {"b": 1},
        "c": {"b": 1},
        "d": {"b": 1, "e": 2},
    }


def test_metrics_with_a_pipe_in_their_place_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="a named pipe"):
        list(RunFolder(tmp_path).read_metrics())
    (tmp_path / "provenance.json").write_text(json.dumps([1]))
    with pytest.raises(HeadwayError, match=r"provenance\.json is damaged: it holds a list"):
        RunFolder(tmp_path).read_json("provenance")


def test_what_a_run_was_made_of_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text('{"samples": true, "base": "/"}')
    assert RunFolder(tmp_path).read_provenance(base=str)["base"] == "/"
    for name in ("samples", "origins"):
        with pytest.raises(HeadwayError, match=rf"provenance\.json has (a truth value|null) as {name}"):
            RunFolder(tmp_path).read_provenance(**{name: int})
