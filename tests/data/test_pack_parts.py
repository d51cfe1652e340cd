"""Packs that several machines write: the parts, joined, serve what a pack by one machine serves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests._support import headway, refused, write_recipe
from tests.data._packs import contents, folder, names_of, read_records
from tests.data.tiers._server import serving

from headway.core.errors import DataError, HeadwayError, UsageError
from headway.data import opening
from headway.data.loader import Loader
from headway.data.pack import PackResult, pack
from headway.data.pack_join import join_pack
from headway.data.pack_part import PART_FILE
from headway.data.pack_plan import PackPart
from headway.data.verify import verify


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("pets") / "src", {"cat": 20, "dog": 12, "eel": 8})


def pack_parts(src: Path, dst: Path, count: int, **options: Any) -> list[PackResult]:
    # Machines finish in any order.
    return [pack(src, dst, part=(index, count), **options) for index in range(count, 0, -1)]


def expect_same(joined: Path, whole: Path) -> None:
    """Everything but where the records lie is equal."""
    one, other = opening.open(joined), opening.open(whole)
    assert names_of(one) == names_of(other)
    for column in ("label", "length", "crc32c", "width", "height", "flags"):
        np.testing.assert_array_equal(getattr(one, column), getattr(other, column), err_msg=column)
    for fact in ("pack_id", "format", "mode", "label_kind", "classes", "class_counts", "channels", "common_size"):
        assert getattr(one.description, fact) == getattr(other.description, fact), fact
    assert one.description.sets == other.description.sets
    everything = np.arange(len(one))
    assert [bytes(data) for data in one.read(everything)] == [bytes(data) for data in other.read(everything)]
    one.close(), other.close()
    assert verify(joined).damages == []


# What a joined pack is


@given(length=st.integers(0, 500), count=st.integers(1, 40))
def test_the_parts_are_disjoint_and_make_up_the_whole(length: int, count: int) -> None:
    samples = list(range(length))
    parts = [samples[PackPart(index=index, count=count).take(length)] for index in range(1, count + 1)]
    assert [sample for part in parts for sample in part] == samples
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 3),
        ({"split": 0.2, "seed": 7, "mode": "keep", "shard_bytes": 1500}, 4),
        ({"format": "tar", "mode": "quality=80"}, 2),
        ({"format": "lmdb", "mode": "keep", "split": 0.25}, 2),
        ({"format": "raw"}, 2),
        ({"split": 0.1}, 12),
        ({}, 1),
    ],
)
def test_it_serves_what_a_pack_by_one_machine_serves(
    pets: Path, tmp_path: Path, options: dict[str, Any], count: int
) -> None:
    whole = pack(pets, tmp_path / "whole", **options)
    parts = pack_parts(pets, tmp_path / "dst", count, **options)
    assert not (tmp_path / "dst").exists()
    joined = join_pack(tmp_path / "dst")
    assert sum(part.samples for part in parts) == joined.samples == whole.samples
    assert [path.name for path in joined.folders] == [
        path.name if options.get("split") else "dst" for path in whole.folders
    ]
    for facts in ("format", "mode", "counts", "classes", "warnings", "skipped"):
        assert getattr(joined, facts) == getattr(whole, facts), facts
    for one, other in zip(joined.folders, whole.folders, strict=True):
        expect_same(one, other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "whole"]


def test_more_parts_than_images(tmp_path: Path) -> None:
    root = folder(tmp_path / "src", {"cat": 2, "dog": 1})
    whole = pack(root, tmp_path / "whole")
    pack_parts(root, tmp_path / "dst", 5)
    expect_same(join_pack(tmp_path / "dst").folders[0], whole.folders[0])


def test_records_are_numbered_through_all_parts(pets: Path, tmp_path: Path) -> None:
    pack_parts(pets, tmp_path / "dst", 3)
    joined = opening.open(join_pack(tmp_path / "dst").folders[0])
    records = [record for shard in joined.description.shards for record in read_records(joined.folder / shard.name)]
    assert [record.id for record in records] == list(range(40))
    joined.close()


def test_two_sets_and_numbers_as_labels(tmp_path: Path) -> None:
    for name, count in (("train", 5), ("val", 3)):
        folder(tmp_path / "src" / name, {"cat": count, "dog": count})
    whole = pack(tmp_path / "src", tmp_path / "whole")
    pack_parts(tmp_path / "src", tmp_path / "dst", 2)
    for one, other in zip(join_pack(tmp_path / "dst").folders, whole.folders, strict=True):
        expect_same(one, other)
    images = folder(tmp_path / "images", {"any": 6})
    rows = [f"any/{number}.jpg,{number / 2}" for number in range(6)]
    (images / "list.csv").write_text("\n".join(["path,value", *rows]))
    whole = pack(images / "list.csv", tmp_path / "numbers")
    pack_parts(images / "list.csv", tmp_path / "joined", 4)
    expect_same(join_pack(tmp_path / "joined").folders[0], whole.folders[0])


def test_bad_images_are_listed_as_by_one_machine(tmp_path: Path) -> None:
    root = folder(tmp_path / "src", {"cat": 12, "dog": 12})
    for bad in ("cat/3.jpg", "dog/1.jpg", "dog/7.jpg"):
        (root / bad).write_bytes(b"")
    options: dict[str, Any] = {"split": 0.25, "skip_bad": True}
    whole = pack(root, tmp_path / "whole", **options)
    parts = pack_parts(root, tmp_path / "dst", 4, **options)
    assert sum(len(part.skipped) for part in parts) == 3
    joined = join_pack(tmp_path / "dst")
    assert joined.skipped == whole.skipped
    assert joined.skipped_file == tmp_path / "dst/skipped.txt"
    assert joined.skipped_file.read_bytes() == (tmp_path / "whole/skipped.txt").read_bytes()
    for one, other in zip(joined.folders, whole.folders, strict=True):
        expect_same(one, other)
    with pytest.raises(DataError, match=r"not (a )?readable image"):
        pack_parts(root, tmp_path / "other", 4, split=0.25)


def test_a_class_that_lost_all_images_is_named_by_the_join(tmp_path: Path) -> None:
    root = folder(tmp_path / "src", {"cat": 6, "dog": 1})
    (root / "dog/0.jpg").write_bytes(b"")
    pack_parts(root, tmp_path / "dst", 3, skip_bad=True)
    with pytest.raises(DataError, match=r"no image is left of class 'dog'\. Put good images into it"):
        join_pack(tmp_path / "dst")


# What is refused


def refusal(dst: Path, **options: Any) -> str:
    with pytest.raises(HeadwayError) as caught:
        join_pack(dst, **options)
    return str(caught.value)


def pack_apart(src: Path, dst: Path, part: tuple[int, int], **options: Any) -> None:
    """Packs a part on another machine, which sees no other part, and copies it to the others."""
    pack(src, dst.parent / "elsewhere" / dst.name, part=part, **options)
    for packed in (dst.parent / "elsewhere" / f"{dst.name}.parts").iterdir():
        packed.rename(Path(f"{dst}.parts") / packed.name)


def test_parts_that_are_missing_or_there_twice(pets: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    assert refusal(dst) == (
        f"{dst}.parts: no finished parts are there. Pack them first, each on a machine of its own: "
        f"headway pack SRC {dst} --part 1/16, and so on."
    )
    for index in (2, 4):
        pack(pets, dst, part=(index, 5), seed=3)
    assert refusal(dst) == (
        f"{dst}.parts: of 5 parts, parts 1, 3, 5 are missing. Pack what is missing, with the same options: "
        f"headway pack {pets} {dst} --part 1/5 --seed 3."
    )
    for index in (1, 3):
        pack(pets, dst, part=(index, 5), seed=3)
    assert "of 5 parts, part 5 is missing. Pack what is missing, with" in refusal(dst)
    shutil.copytree(f"{dst}.parts/part-3-of-5", f"{dst}.parts/part-3-of-5.copy")
    assert refusal(dst) == (
        f"{dst}.parts: part 3/5 is there twice, as part-3-of-5 and part-3-of-5.copy. Remove one of them."
    )
    pack_apart(pets, dst, (1, 2), seed=3)
    assert "part-1-of-2 is one of 2, and part-1-of-5 is one of 5. Remove those that do not belong" in refusal(dst)
    with pytest.raises(UsageError, match=r"part-3-of-5: this part is packed already\. Pack another part, join them"):
        pack(pets, dst, part=(3, 5), seed=3)
    shutil.rmtree(f"{dst}.parts/part-1-of-2")
    pack(pets, dst, part=(3, 5), seed=3, overwrite=True)


DIFFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"seed": 1}, "--seed is not given in {0}, and 1 in {1}"),
    ({"mode": "keep"}, "--mode is not given in {0}, and keep in {1}"),
    ({"format": "tar"}, "--format is not given in {0}, and tar in {1}"),
    ({"split": 0.2}, "--split is not given in {0}, and 0.2 in {1}"),
    ({"mode": "quality=90", "orient": True}, "--mode is not given in {0}, and quality=90 in {1}"),
    ({"src": {"cat": 20, "dog": 12, "fox": 8}}, "their classes differ"),
    ({"src": {"cat": 20, "dog": 12, "eel": 9}}, "there are 40 images in {0}, and 41 in {1}"),
    ({"src": {"dog": 8, "cat": 20, "eel": 12}}, "the names, labels or sizes of their images differ"),
]


@pytest.mark.parametrize(("options", "difference"), DIFFERENCES)
def test_parts_of_different_packs(pets: Path, tmp_path: Path, options: dict[str, Any], difference: str) -> None:
    """The join names the first difference; a part that is packed beside another one is refused before."""
    dst = tmp_path / "dst"
    pack(pets, dst, part=(1, 2))
    options = dict(options)
    other = folder(tmp_path / "other", options.pop("src")) if "src" in options else pets
    with pytest.raises(UsageError) as caught:
        pack(other, dst, part=(2, 2), **options)
    if "not given" in difference:
        # Seen from the other side.
        what, _, value = difference.partition(" is not given in {0}, and ")
        here = f"{what} is {value.format('', 'this part')}, and not given in part-1-of-2"
    else:
        here = difference.replace("40", "41").replace("and 41", "and 40").format("this part", "part-1-of-2")
    assert str(caught.value) == (
        f"{dst}.parts: this part and part-1-of-2 would be of different packs: {here}. Give all parts the same images "
        f"and options: headway pack {pets} {dst} --part 2/2\nTo begin anew, remove the folder."
    )
    pack_apart(other, dst, (2, 2), **options)
    assert refusal(dst) == (
        f"{dst}.parts: part-1-of-2 and part-2-of-2 are of different packs: "
        f"{difference.format('part-1-of-2', 'part-2-of-2')}. Give all parts the same images and options, and pack one "
        f"of them again, for example: headway pack {pets} {dst} --part 2/2 --overwrite."
    )


def test_sets_of_parts_with_different_splits(pets: Path, tmp_path: Path) -> None:
    """The numbers of training images differ too, and the message names the option."""
    dst = tmp_path / "dst"
    pack(pets, dst, part=(1, 2), split=0.2)
    pack_apart(pets, dst, (2, 2), split=0.3)
    assert "--split is 0.2 in part-1-of-2, and 0.3 in part-2-of-2" in refusal(dst)
    with pytest.raises(UsageError, match="this part is one of 3, and part-1-of-2 is one of 2"):
        pack(pets, dst, part=(1, 3), split=0.2)


@pytest.mark.parametrize("part", [(0, 16), (17, 16), (1, 0), (-1, 4), (1, 100_000)])
def test_parts_that_do_not_exist(pets: Path, tmp_path: Path, part: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=f"there is no part {part[0]} of {part[1]}. Number the parts from 1"):
        pack(pets, tmp_path / "dst", part=part)
    assert not any(tmp_path.iterdir())


def test_a_destination_that_exists(pets: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    pack_parts(pets, dst, 2)
    pack(pets, dst, mode="keep")
    assert refusal(dst) == f"{dst}: this exists. Choose another destination, or replace it with --overwrite."
    with pytest.raises(UsageError, match="dst: this exists"):
        pack(pets, dst, part=(1, 3))
    assert join_pack(dst, overwrite=True).mode == "seekable"
    assert opening.open(dst).description.mode == "seekable"
    assert refusal(dst) == (
        f"{dst}: this is a whole pack, and no parts lie beside it: they are joined already. "
        f"Check it with headway verify {dst}."
    )


def test_damaged_parts(pets: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    pack_parts(pets, dst, 2)
    parts = Path(f"{dst}.parts")
    (parts / "notes.txt").touch()
    (parts / "part-1-of-2/shard-1-00000.rec").rename(tmp_path / "away")
    again = f"Copy this part here again, or pack it again: headway pack {pets} {dst} --part 1/2 --overwrite."
    shard = f"{parts}/part-1-of-2: shard-1-00000.rec of part 1 of 2"
    assert refusal(dst) == f"{shard}: a shard is missing. {again}"
    assert not dst.exists()
    (tmp_path / "away").rename(parts / "part-1-of-2/shard-1-00000.rec")
    whole = (parts / "part-1-of-2/shard-1-00000.rec").read_bytes()
    (parts / "part-1-of-2/shard-1-00000.rec").write_bytes(whole[:-100])
    assert refusal(dst).endswith(f"bytes and should have {len(whole)}. {again}")
    pack(pets, dst, part=(1, 2), overwrite=True)
    (parts / "part-2-of-2" / PART_FILE).rename(tmp_path / "away")
    assert f"{parts}/part-2-of-2: train/{PART_FILE} is missing in it, so it is no finished part" in refusal(dst)
    (parts / "part-2-of-2" / PART_FILE).write_bytes((tmp_path / "away").read_bytes().replace(b"planned", b"plained"))
    assert "the file of a part is damaged" in refusal(dst)
    (parts / "part-2-of-2" / PART_FILE).write_bytes(b"")
    assert "the columns file is damaged" in refusal(dst)
    (tmp_path / "away").rename(parts / "part-2-of-2" / PART_FILE)
    join_pack(dst)


# Parts that are not joined


@pytest.mark.parametrize("split", [0.0, 0.2])
def test_a_part_is_called_a_part_everywhere(pets: Path, tmp_path: Path, split: float) -> None:
    """Its shards alone would be a foreign data set, with classes 0, 1 and 2."""
    dst = tmp_path / "dst"
    pack_parts(pets, dst, 2, split=split)
    part = Path(f"{dst}.parts/part-1-of-2")
    set_folder = part / "train" if split else part
    known = f"this is part 1 of 2 of a pack that is not joined yet. Join the parts: headway pack --join {dst}."
    for path in (set_folder, part, set_folder / "shard-1-00000.rec", set_folder / "shard-*.rec"):
        with pytest.raises(UsageError) as caught:
            opening.open(path)
        assert str(caught.value) == f"{path}: {known}"
        with pytest.raises(UsageError, match="this is part 1 of 2 of a pack"):
            Loader(path, batch=2, seed=1)
        for verb in (["verify", path], ["init", path, "--out", tmp_path / "r.yaml"], ["pack", path, tmp_path / "no"]):
            assert refused(*verb, status=2).endswith(known)
    parts = Path(f"{dst}.parts")
    known = f"these are parts of a pack that are not joined yet. Join the parts: headway pack --join {dst}."
    for verb in (["verify", parts], ["init", parts, "--out", tmp_path / "r.yaml"], ["pack", parts, tmp_path / "no"]):
        assert refused(*verb, status=2) == f"{parts}: {known}"
    # What a killed join has moved.
    (parts / "joined").mkdir()
    (set_folder / "shard-1-00000.rec").rename(parts / "joined/shard-1-00000.rec")
    with pytest.raises(UsageError, match="these are parts of a pack that are not joined yet"):
        opening.open(parts / "joined")
    with pytest.raises(UsageError, match=r"no such file or folder\. Its parts are packed: headway pack --join"):
        opening.open(dst / "train")
    part.rename(tmp_path / "away")
    with pytest.raises(UsageError, match=r"Lay it beside the other parts in DST\.parts, and join them: headway pack"):
        opening.open(tmp_path / "away" / ("train" if split else ""))


def test_a_part_at_an_address_is_called_a_part(pets: Path, tmp_path: Path) -> None:
    pack(pets, tmp_path / "dst", part=(1, 2), split=0.2)
    with serving(tmp_path / "dst.parts") as server:
        for path in ("part-1-of-2", "part-1-of-2/train"):
            with pytest.raises(
                UsageError, match=r"part of a pack that is not joined yet\. Join the parts on a local disk"
            ):
                opening.open(f"{server.uri}/{path}")


def test_a_part_does_not_train(pets: Path, tmp_path: Path) -> None:
    pack_parts(pets, tmp_path / "dst", 2)
    recipe = write_recipe(tmp_path / "r.yaml", data={"train": "dst.parts/part-1-of-2", "eval": None})
    assert "this is part 1 of 2 of a pack that is not joined yet" in refused("train", recipe, status=2)
    assert "Its parts are packed: headway pack --join" in refused("train", recipe, "data.train=dst", status=2)


# Crashes

KILLED = """
import os, signal, sys

steps = int(sys.argv[1])
def count_and_die(function):
    def counting(*arguments, **options):
        global steps
        if steps == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        steps -= 1
        return function(*arguments, **options)
    return counting

for name in ("rename", "fsync", "rmdir"):
    setattr(os, name, count_and_die(getattr(os, name)))

import headway
exec(sys.argv[2])
print("done")
"""


def run_until_killed(step: int, code: str) -> bool:
    """Runs code that is killed at a step on the disk; returns False if it ended before."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(step), code], capture_output=True, text=True, check=False)
    if done.stdout == "done\n":
        return False
    assert done.returncode == -signal.SIGKILL, done.stderr
    return True


def list_packs(root: Path) -> list[Path]:
    return [path for path in root.rglob("columns.safetensors") if "joined" not in path.parts]


@pytest.mark.parametrize(
    ("split", "stride"),
    [
        pytest.param(0.2, 5, id="some"),
        pytest.param(0.0, 1, id="every", marks=pytest.mark.check),
        pytest.param(0.2, 1, id="every-of-two", marks=pytest.mark.check),
    ],
)
def test_a_killed_join_is_taken_up_again(pets: Path, tmp_path: Path, split: float, stride: int) -> None:
    """At every step: each move, each write, and each removal of what is left."""
    dst = tmp_path / "run/dst"
    whole = pack(pets, tmp_path / "whole", split=split)
    pack_parts(pets, tmp_path / "kept", 2, split=split)
    killed = 0
    for step in range(0, 200, stride):
        dst.parent.mkdir()
        shutil.copytree(tmp_path / "kept.parts", f"{dst}.parts")
        if not run_until_killed(step, f"headway.join_pack({str(dst)!r})"):
            break
        killed += 1
        # There is all of it or nothing.
        complete = [
            dst / path.name / "columns.safetensors" if split else dst / "columns.safetensors" for path in whole.folders
        ]
        assert sorted(list_packs(dst.parent)) in ([], sorted(complete))
        if Path(f"{dst}.parts").exists():
            join_pack(dst)
        for one, other in zip(whole.folders, whole.folders, strict=True):
            expect_same(dst / one.name if split else dst, other)
        assert [path.name for path in dst.parent.iterdir() if not path.name.startswith(".")] == ["dst"]
        shutil.rmtree(dst.parent)
    assert killed > 3


def test_a_killed_part_is_none(pets: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    pack(pets, dst, part=(2, 2))
    code = f"headway.pack({str(pets)!r}, {str(dst)!r}, part=(1, 2), overwrite=True)"
    killed = 0
    for step in range(0, 100, 3):
        if not run_until_killed(step, code):
            break
        killed += 1
        assert list_packs(tmp_path) == []
        if not Path(f"{dst}.parts/part-1-of-2").exists():
            assert "part 1 is missing" in refusal(dst)
    assert killed > 1
    assert len(contents(join_pack(dst).folders[0])) == 40


def test_an_interrupted_part_leaves_nothing(pets: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            pack(pets, tmp_path / "dst", part=(1, 2), progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert list((tmp_path / "dst.parts").iterdir()) == []
    # A part that was killed leaves a hidden folder, which is no part, and which the same part removes.
    leftover = tmp_path / "dst.parts/.part-1-of-2.packing-999999"
    leftover.mkdir()
    assert "no finished parts are there" in refusal(tmp_path / "dst")
    pack_parts(pets, tmp_path / "dst", 2)
    assert not leftover.exists()
    assert len(contents(join_pack(tmp_path / "dst").folders[0])) == 40


# The command line


def test_the_commands(pets: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    said = headway("pack", pets, dst, "--part", "1/2", "--split", "0.2")
    assert said.out.startswith("Packed 20 images (")
    assert f"{dst}.parts/part-1-of-2/train" in said.out
    assert f"Of 2 parts, part 2 is not in {dst}.parts yet. Once all are: headway pack --join {dst}\n" in said.out
    said = headway("pack", pets, dst, "--part", "2/2", "--split", "0.2", "--overwrite")
    assert said.out.endswith(f"\nAll parts are there. Join them: headway pack --join {dst}\n")
    said = headway("pack", pets, dst, "--part", "2/2", "--split", "0.2", "--overwrite", "--json")
    assert said.json()["samples"] == 20
    # Both orders of a source and a destination that the verb does not take, and the folder of the parts.
    for wrong in ((pets, dst), (dst, pets), (f"{dst}.parts", pets)):
        assert refused("pack", "--join", *wrong, status=2) == (
            "--join takes the folder to create, and no other option than --overwrite. "
            f"Write headway pack --join {dst}: the parts know the rest."
        )
    for wrong_folder in (f"{dst}.parts", f"{dst}.parts/part-1-of-2"):
        assert f"takes the folder to create. Write headway pack --join {dst}" in refused(
            "pack", "--join", wrong_folder, status=2
        )
    joined = headway("pack", "--join", dst).out
    assert joined.startswith("Joined 40 images (")
    assert "images/s" not in joined
    assert headway("verify", dst, "--json").json()["damaged"] == []
    for part, sentence in (("3", "'3' is not a part"), ("a/b", "'a/b' is not a part"), ("0/4", "no part 0 of 4")):
        assert sentence in refused("pack", pets, tmp_path / "no", "--part", part, status=2)
    assert "no finished parts are there" in refused("pack", "--join", tmp_path / "no", status=2)
    assert "Write headway pack --join DST" in refused("pack", pets, "--join", tmp_path / "no", status=2)
    lone = headway("pack", pets, tmp_path / "lone", "--part", "1/1")
    assert "All parts are there. Join them:" in lone.out
    assert "There is no evaluation set" in lone.err
    assert "headway pack SRC DST" in refused("pack", pets, status=2)
