"""Bad input ends with a clear sentence and status 2 or 1, and loses nothing."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests._support import (
    NET,
    damage,
    digits,
    files,
    finished,
    headway,
    packed_digits,
    records,
    refused,
    write_recipe,
)

from headway.checkpoint.checkpoints import Checkpoints
from headway.data import opening


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    packed_digits(folder, mode="seekable")
    write_recipe(folder / "recipe.yaml")
    return folder


def write_jpegs(folder: Path, per_class: int = 5, side: int = 32, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """Writes smooth colour images as JPEG files."""
    chance = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            small = Image.fromarray(chance.integers(0, 256, (4, 4, 3), np.uint8))
            small.resize((side, side), Image.Resampling.BICUBIC).save(folder / name / f"{number}.jpg", quality=90)
    return folder


def test_a_missing_or_empty_folder(tmp_path: Path, good: Path) -> None:
    for verb in (("init",), ("pack",)):
        more = (tmp_path / "dst",) if verb == ("pack",) else ()
        assert refused(*verb, tmp_path / "none", *more, status=2) == (
            f"{tmp_path}/none: there is no such file or folder. Name a folder of images, a CSV or JSONL file of paths "
            "and labels, or a packed folder."
        )
        assert refused(*verb, good / "dgits", *more, status=2) == (
            f"{good}/dgits: there is no such file or folder. Did you mean 'digits'?"
        )
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert "empty: the folder is empty" in refused(*verb, tmp_path / "empty", *more, status=2)
    assert "there is no such file or folder. Pack one: headway pack SRC DST." in refused(
        "train", good / "recipe.yaml", "data.train=none", status=2
    )
    assert "there is no image in any of its 1 sub-folders" in refused(
        "train", good / "recipe.yaml", f"data.eval={tmp_path}", status=1
    )
    assert "the folder does not exist. Pack one: headway" in refused("verify", tmp_path / "none", status=2)
    assert refused("verify", good / "digits.pack", status=2).endswith(f"Did you mean '{good}/digits.packed'?")
    for verb in ("report", "evaluate"):
        assert "there is no such run folder. Start a run with headway train RECIPE." in refused(
            verb, tmp_path / "none", status=2
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_a_sentence_from_a_real_process(tmp_path: Path) -> None:
    for arguments in (("pack", tmp_path / "none", tmp_path / "dst"), ("train", tmp_path / "none.yaml")):
        said = finished(*arguments)
        assert said.status == 2
        assert said.out == ""
        assert said.err.startswith("headway: ")
        assert said.err.count("\n") == 1


def test_a_class_without_an_image(tmp_path: Path) -> None:
    source = write_jpegs(tmp_path / "src")
    (source / "eel").mkdir()
    (source / "eel/readme.txt").write_text("no fish yet")
    for arguments in (("pack", source, tmp_path / "dst"), ("init", source, "--out", tmp_path / "r.yaml")):
        assert "class 'eel' has no image. Put images into the class folder, or remove it." in refused(
            *arguments, status=1
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]


def test_files_that_are_no_images(tmp_path: Path) -> None:
    source = write_jpegs(tmp_path / "src")
    (source / "cat/text.jpg").write_text("hello")
    (source / "dog/empty.jpg").write_bytes(b"")
    whole = (source / "dog/1.jpg").read_bytes()
    (source / "dog/1.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    before = files(source)
    sentence = refused("pack", source, tmp_path / "dst", status=1)
    assert "3 of 12 files are not readable images." in sentence
    for line in (
        "cat/text.jpg: its image format is not known",
        "dog/empty.jpg: it is empty",
        "dog/1.jpg: ",
    ):
        assert f"\n  {line}" in sentence
    assert "--skip-bad" in sentence
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]
    assert files(source) == before
    said = headway("pack", source, tmp_path / "dst", "--skip-bad")
    assert f"3 bad images were left out; they are listed in {tmp_path / 'dst/skipped.txt'}." in said.out
    assert sorted(line.split("\t")[0] for line in (tmp_path / "dst/skipped.txt").read_text().splitlines()) == [
        "cat/text.jpg",
        "dog/1.jpg",
        "dog/empty.jpg",
    ]
    assert len(opening.open(tmp_path / "dst")) == 9
    again = headway("pack", source, f"file://{tmp_path}/again", "--skip-bad")
    assert f"they are listed in {tmp_path / 'again/skipped.txt'}." in again.out
    headway("init", source, "--out", tmp_path / "r.yaml")  # looks at the good ones


def test_a_flipped_bit_that_still_decodes_is_packed(tmp_path: Path) -> None:
    """Damage that is older than the pack stays unnoticed; from the pack on, the checksum finds it."""
    source = write_jpegs(tmp_path / "src")
    path = source / "cat/0.jpg"
    whole = path.read_bytes()
    for place in range(len(whole) - 100, len(whole) - 10):
        flipped = bytearray(whole)
        flipped[place] ^= 4
        try:
            with Image.open(io.BytesIO(flipped)) as image:
                same = np.array_equal(np.asarray(image), np.asarray(Image.open(io.BytesIO(whole))))
        except OSError:
            continue
        if not same:
            break
    path.write_bytes(flipped)
    headway("pack", source, tmp_path / "dst")
    assert headway("verify", tmp_path / "dst").out.endswith(" samples) is intact.\n")


@pytest.fixture
def damaged_run(tmp_path: Path) -> Path:
    """A packed set with two damaged records and a recipe that uses it."""
    packed_digits(tmp_path, mode="seekable")
    write_recipe(tmp_path / "recipe.yaml", data={"max_bad_share": 0.05}, log_ids=True)
    damage(tmp_path / "digits.packed/train", 11, 99)
    return tmp_path


def test_a_flipped_byte_in_a_shard_is_named_by_verify(damaged_run: Path) -> None:
    packed = damaged_run / "digits.packed"
    said = headway("verify", packed, status=1)
    data = opening.open(packed / "train")
    lines = said.out.splitlines()
    assert lines[-1] == "2 damaged places: pack the data again."
    for line, sample in zip(lines, (11, 99), strict=False):
        assert line.startswith(f"sample {sample} ({data.name(sample)}), train/shard-00000.rec at byte ")
        assert line.endswith("the image's checksum does not match")
    found = headway("verify", packed, "--json", status=1).json()["damaged"]
    assert [(entry["index"], entry["name"]) for entry in found] == [(n, data.name(n)) for n in (11, 99)]


def test_train_substitutes_damaged_samples_and_lists_them(damaged_run: Path) -> None:
    run = damaged_run / "run"
    headway("train", damaged_run / "recipe.yaml", "--run", run)
    data = opening.open(damaged_run / "digits.packed/train")
    served = np.frombuffer((run / "ids.bin").read_bytes(), "<i8").reshape(-1, 3)
    entries = [json.loads(line) for line in (run / "quarantine.jsonl").read_text().splitlines()]
    assert sorted(entry["asked"] for entry in entries) == [11, 11, 99, 99]  # once an epoch
    for entry in entries:
        assert entry["reason"] == "checksum"
        assert entry["name"] == data.name(entry["asked"])
        assert served[entry["position"]].tolist() == [entry["position"], entry["asked"], entry["served"]]
        assert entry["served"] not in (11, 99)
    replaced = served[:, 1] != served[:, 2]
    assert sorted(served[replaced, 1].tolist()) == [11, 11, 99, 99]
    assert json.loads((run / "summary.json").read_text())["damaged_samples"] == 4
    packed = damaged_run / "digits.packed/train"
    evaluated = headway("evaluate", run, "--data", packed)
    assert f"{packed}: 2 of {len(data):,} samples are damaged and left out." in evaluated.err
    assert evaluated.out.endswith(f"over {len(data) - 2:,} images\n")
    assert headway("evaluate", run, "--data", packed, "--json").json()["damaged_samples"] == 2


def test_the_quarantine_is_cut_back_on_resume(damaged_run: Path) -> None:
    """Each damaged sample is listed once, at whatever step the run was stopped."""
    run, recipe = damaged_run / "run", damaged_run / "recipe.yaml"
    headway("train", recipe, "--run", run, "checkpoint={every_steps: 3, keep: 9}")
    expected = (run / "quarantine.jsonl").read_text()
    positions = [json.loads(line)["position"] for line in expected.splitlines()]
    for path in Checkpoints(run / "checkpoints").paths()[1:]:
        shutil.copytree(run, damaged_run / "again")
        again = damaged_run / "again"
        for later in Checkpoints(again / "checkpoints").paths():
            if later.name > path.name:
                shutil.rmtree(later)
        headway("train", "--resume", again)
        assert (again / "quarantine.jsonl").read_text() == expected, path.name
        assert json.loads((again / "summary.json").read_text())["damaged_samples"] == 4
        shutil.rmtree(again)
    assert len(positions) == 4


def test_a_damaged_sample_at_the_first_position_after_a_checkpoint_is_listed_once(tmp_path: Path) -> None:
    packed_digits(tmp_path, mode="seekable")
    recipe = write_recipe(tmp_path / "recipe.yaml", log_ids=True, checkpoint={"every_steps": 1, "keep": 9}, epochs=0.5)
    headway("train", recipe, "--run", tmp_path / "look")
    asked = int(np.frombuffer((tmp_path / "look/ids.bin").read_bytes(), "<i8").reshape(-1, 3)[30, 1])
    damage(tmp_path / "digits.packed/train", asked)
    run = tmp_path / "run"
    headway("train", recipe, "--run", run, "data.max_bad_share=1")
    expected = (run / "quarantine.jsonl").read_text()
    assert json.loads(expected)["position"] == 30
    for name in ("step-00000002", "step-00000003"):
        shutil.rmtree(run / "checkpoints" / name)
    headway("train", "--resume", run)
    assert (run / "quarantine.jsonl").read_text() == expected


def test_too_many_damaged_samples_stop_the_run(damaged_run: Path) -> None:
    run = damaged_run / "run"
    sentence = refused("train", damaged_run / "recipe.yaml", "--run", run, "data.max_bad_share=0.001", status=1)
    assert "of 180 samples are damaged, more than data.max_bad_share 0.001" in sentence
    assert "Run headway verify on the data" in sentence
    assert (run / "quarantine.jsonl").exists()
    sentence = refused(
        "train", damaged_run / "recipe.yaml", "--run", damaged_run / "stop", "data.on_bad=stop", status=1
    )
    assert "is damaged (checksum)" in sentence


def test_shards_of_different_packs_mixed(tmp_path: Path, good: Path) -> None:
    packed_digits(tmp_path, per_class=12, mode="seekable")
    shutil.copytree(good / "digits.packed", tmp_path / "mixed")
    shutil.copy(tmp_path / "digits.packed/train/shard-00000.rec", tmp_path / "mixed/train/shard-00000.rec")
    sentence = refused("train", good / "recipe.yaml", f"data.train={tmp_path / 'mixed/train'}", status=1)
    assert "mixed/train/shard-00000.rec: this shard belongs to another pack." in sentence
    assert (
        "the shard belongs to another pack; its 180 samples are lost"
        in headway("verify", tmp_path / "mixed", status=1).out
    )
    (tmp_path / "mixed/train/shard-00000.rec").unlink()
    assert "a shard is missing" in refused(
        "train", good / "recipe.yaml", f"data.train={tmp_path / 'mixed/train'}", status=1
    )


def test_eval_classes_unlike_train_classes(tmp_path: Path, good: Path) -> None:
    for part, classes in (("train", ("cat", "dog")), ("eval", ("cat", "eel"))):
        write_jpegs(tmp_path / "src" / part, classes=classes)
    sentence = refused("pack", tmp_path / "src", tmp_path / "dst", status=1)
    assert "the classes of eval and train differ (only in train: dog; only in eval: eel)." in sentence
    for part in ("train", "eval"):
        headway("pack", tmp_path / "src" / part, tmp_path / "apart" / part)
    more = [f"data.{part}={tmp_path / 'apart' / part}" for part in ("train", "eval")]
    sentence = refused("train", good / "recipe.yaml", *more, status=1)
    assert "its classes are unlike those of the training data: it has also 'eel' and lacks 'dog'." in sentence
    (tmp_path / "values.csv").write_text("path,value\n" + "".join(f"src/train/cat/{n}.jpg,{n}\n" for n in range(5)))
    headway("pack", tmp_path / "values.csv", tmp_path / "values")
    sentence = refused("train", good / "recipe.yaml", more[0], f"data.eval={tmp_path / 'values'}", status=1)
    assert "its labels (value) are of another kind than those of the training data (class)" in sentence
    headway("train", good / "recipe.yaml", "--run", tmp_path / "run", "epochs=0.2")
    sentence = refused("evaluate", tmp_path / "run", "--data", tmp_path / "apart/eval", status=1)
    assert "its classes are unlike those of the training data" in sentence


def test_a_single_class(tmp_path: Path, good: Path) -> None:
    """This happens if you pack a folder that lies one level too high."""
    headway("pack", write_jpegs(tmp_path / "src", classes=("cat",)), tmp_path / "dst")
    sentence = refused("train", good / "recipe.yaml", f"data={{train: {tmp_path / 'dst'}}}", status=1)
    assert "the data has one class only (cat): there is nothing to tell apart." in sentence


def test_places_that_exist(tmp_path: Path, good: Path) -> None:
    source = write_jpegs(tmp_path / "src")
    run = tmp_path / "run"
    headway("train", good / "recipe.yaml", "--run", run, "epochs=0.2")
    before = files(run)
    sentence = refused("train", good / "recipe.yaml", "--run", run, status=2)
    assert f"{run}: this run folder exists. Resume it: headway train --resume {run}." in sentence
    assert files(run) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    assert "this folder is not empty. Name another one with --run." in refused(
        "train", good / "recipe.yaml", "--run", tmp_path / "mine", status=2
    )
    assert "the destination exists and is not a packed data set" in refused(
        "pack", source, tmp_path / "mine", "--overwrite", status=2
    )
    assert "this is not a run folder" in refused("report", tmp_path / "mine", status=2)
    assert files(tmp_path / "mine") == {"thesis.txt": b"years of work"}
    assert "this is a file, not a folder" in refused(
        "train", good / "recipe.yaml", "--run", tmp_path / "mine/thesis.txt", status=2
    )
    headway("pack", source, tmp_path / "dst")
    packed = files(tmp_path / "dst")
    assert "this exists" in refused("pack", source, tmp_path / "dst", status=2)
    (source / "cat/0.jpg").write_text("hello")
    refused("pack", source, tmp_path / "dst", "--overwrite", status=1)
    assert files(tmp_path / "dst") == packed


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ("path,label\ncat/0.jpg,a\nnone.jpg,b\n", "line 3: there is no file 'none.jpg'"),
        ("file,label\ncat/0.jpg,a\n", "line 1: there is no column 'path'"),
        ("path,value\ncat/0.jpg,1\ncat/1.jpg,many\n", "line 3: the value is 'many', which is not a finite number"),
        ("path,label\ncat/0.jpg,a\ncat/0.jpg,b\n", "line 3: 'cat/0.jpg' was named before, in line 2"),
        ("path,label\n", "the file lists no images"),
    ],
)
def test_lists_that_cannot_be_used(tmp_path: Path, listing: str, expected: str) -> None:
    write_jpegs(tmp_path)
    (tmp_path / "list.csv").write_text(listing)
    assert expected in refused("pack", tmp_path / "list.csv", tmp_path / "dst", status=1)
    assert not (tmp_path / "dst").exists()


def make_room(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


def write_noise(folder: Path, count: int, side: int = 96) -> Path:
    """Writes images that do not compress: about 28 kB each at 96 x 96."""
    chance = np.random.default_rng(count)
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(chance.integers(0, 256, (side, side, 3), np.uint8)).save(folder / name / f"{number}.png")
    return folder


@pytest.mark.root
def test_a_full_disk_while_packing(small_disk: Path, tmp_path: Path) -> None:
    source, few = write_noise(tmp_path / "src", 40), write_noise(tmp_path / "few", 3)
    sentence = refused("pack", source, small_disk / "dst", status=1)
    assert "the disk is full: " in sentence
    assert "Free space there, or pack to another disk. What was written is removed." in sentence
    assert list(small_disk.iterdir()) == []
    headway("pack", few, small_disk / "dst")
    packed = files(small_disk / "dst")
    assert "the disk is full: " in refused("pack", source, small_disk / "dst", "--overwrite", status=1)
    assert files(small_disk / "dst") == packed
    assert [path.name for path in small_disk.iterdir()] == ["dst"]
    make_room(small_disk, "20m")
    headway("pack", source, small_disk / "dst", "--overwrite")
    assert headway("verify", small_disk / "dst").out == "Every record (80 samples) is intact.\n"
    assert len(opening.open(small_disk / "dst")) == 80


@pytest.mark.root
@pytest.mark.thin(1)
@pytest.mark.parametrize("what", ["checkpoint", "weights"])
def test_a_full_disk_while_checkpointing(small_disk: Path, tmp_path: Path, what: str) -> None:
    """Two checkpoints and the best weights fit on the disk; a third, or new weights beside the old ones, do not."""
    packed_digits(tmp_path, mode="seekable")
    changes = {"model": {"factory": "net.py:wide"}, "log_ids": True, "epochs": 3}
    changes |= {"checkpoint": {"every_steps": 4}, "evaluate": {"every_epochs": 1.5 if what == "checkpoint" else 1}}
    recipe = write_recipe(tmp_path / "recipe.yaml", **changes)
    headway("train", recipe, "--run", tmp_path / "whole")
    run = small_disk / "run"
    sentence = refused("train", recipe, "--run", run, status=1)
    if what == "checkpoint":
        assert f"{run / 'checkpoints'}: the disk is full, the checkpoint of step 12 could not be written." in sentence
    else:
        assert f"{run}: the disk is full." in sentence
    assert sentence.endswith(f"Nothing before it is lost: make room. Then go on: headway train --resume {run}.")
    kept = Checkpoints(run / "checkpoints")
    assert [path.name for path in kept.paths()] == ["step-00000008", "step-00000004"]
    newest = kept.newest()
    assert newest is not None
    assert newest.step == 8
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-00000004", "step-00000008"]
    assert "the disk is full" in refused("train", "--resume", run, status=1)
    make_room(small_disk, "8m")
    said = headway("train", "--resume", run)
    assert "Resumed at step 8 of 18 from step-00000008." in said.err
    for name in ("weights.safetensors", "ids.bin", "checkpoints/step-00000018/tensors-0.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert [r["step"] for r in records(run, "train")] == list(range(1, 19))


FILLS = """
import os
import time
from pathlib import Path

calls = [0]

def fill(images, labels, keys):
    calls[0] += 1
    if calls[0] == 8:
        # The thread that writes the first checkpoint may be behind.
        while not Path(os.environ["LATEST"]).exists():
            time.sleep(0.01)
        with open(os.environ["FILLER"], "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
    return images, labels
"""


@pytest.mark.root
def test_a_disk_that_others_fill_while_metrics_are_written(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_digits(tmp_path, mode="seekable")
    (tmp_path / "fills.py").write_text(FILLS)
    recipe = write_recipe(tmp_path / "recipe.yaml", log_ids=True, epochs=10, checkpoint={"every_steps": 5})
    headway("train", recipe, "--run", tmp_path / "whole", "checkpoint.keep=99")
    monkeypatch.setenv("FILLER", str(small_disk / "filler"))
    run = small_disk / "run"
    monkeypatch.setenv("LATEST", str(run / "checkpoints/latest"))
    sentence = refused("train", recipe, "--run", run, "transform=fills.py:fill", status=1)
    assert "the disk is full" in sentence
    newest = Checkpoints(run / "checkpoints").newest()
    assert newest is not None
    (small_disk / "filler").unlink()
    assert newest.step < 60
    headway("train", "--resume", run)
    assert (run / "weights.safetensors").read_bytes() == (tmp_path / "whole/weights.safetensors").read_bytes()
    assert (run / "ids.bin").read_bytes() == (tmp_path / "whole/ids.bin").read_bytes()
    assert [r["step"] for r in records(run, "train")] == list(range(1, 61))


def test_a_place_that_cannot_be_written(tmp_path: Path, good: Path) -> None:
    (tmp_path / "file").write_text("")
    sentence = refused("train", good / "recipe.yaml", "--run", tmp_path / "file/run", status=2)
    assert sentence.startswith(f"{tmp_path / 'file/run'}: this folder cannot be created or used (Not a directory).")
    said = headway("init", good / "digits", "--out", tmp_path / "none/r.yaml", status=2)
    assert "there is no such folder" in said.err


@pytest.mark.parametrize(
    "verb",
    [
        ("train", "R", "--dry-run"),
        ("predict", "none", "none.png"),
        ("report", "none", "--against", "none"),
        ("landscape", "none"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, good: Path, verb: tuple[str, ...]
) -> None:
    out = tmp_path / "none/out"
    asked = [good / "recipe.yaml" if one == "R" else one for one in verb]
    assert refused(*asked, "--out", out, status=2).startswith(f"{out}: nothing can be written there.")


def test_images_outside_reason_are_refused_by_name(tmp_path: Path, good: Path) -> None:
    """A PNG of a few kB that claims to be a wall of pixels."""
    bomb = tmp_path / "bomb.png"
    Image.new("1", (20_000, 20_000)).save(bomb)
    assert os.path.getsize(bomb) < 1_000_000
    source = write_jpegs(tmp_path / "src")
    shutil.copy(bomb, source / "cat/bomb.png")
    assert "cat/bomb.png: " in refused("pack", source, tmp_path / "dst", status=1)
    (tmp_path / "net.py").write_text(NET)
    headway("train", good / "recipe.yaml", "--run", tmp_path / "run", "epochs=0.2")
    assert f"{bomb}: this image cannot be opened (Image size" in refused("predict", tmp_path / "run", bomb, status=1)


def test_the_source_inside_the_destination(tmp_path: Path) -> None:
    source = digits(tmp_path / "src", per_class=2)
    for dst in (source, source / "packed", tmp_path):
        refused("pack", source, dst, status=2)
    assert len(list(source.rglob("*.png"))) == 20
