"""What holds of every pack, shown of mode keep; test_pack_mode.py has the other modes, test_pack_any.py the formats."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from PIL import Image, ImageFile
from tests.data._packs import contents, folder, names_of, picture, read_records, sources

from headway.core.errors import DataError, HeadwayError, UsageError
from headway.data import opening, pack_set
from headway.data import pack as packing
from headway.data.columns import FLAG_NOT_JPEG, FLAG_SPLIT
from headway.data.formats import recordio
from headway.data.verify import verify

pack = partial(packing.pack, mode="keep")


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("pets") / "src", {"cat": 100, "dog": 60, "eel": 40})


# What a pack holds


def test_every_image_is_stored_as_it_is(pets: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    done = pack(pets, tmp_path / "new/dst", shard_bytes=30_000, progress=lambda *call: calls.append(call))
    assert (done.folders, done.samples, done.skipped, done.notes) == ((tmp_path / "new/dst",), 200, [], ())
    assert (done.format, done.mode) == ("recordio", "keep")
    assert contents(done.folders[0]) == sources(pets)
    packed = opening.open(done.folders[0])
    for sample, data in enumerate(packed.read(np.arange(200))):
        assert packed.crc32c[sample] == crc32c(data)
        assert packed.classes[packed.label[sample]] == packed.name(sample).split("/")[0]
    about = packed.description
    assert (about.format, about.mode, about.label_kind, about.source) == ("recordio", "keep", "class", str(pets))
    assert (about.classes, about.class_counts) == (("cat", "dog", "eel"), (100, 60, 40))
    assert (about.channels, about.common_size) == (3, (8, 8))
    assert not packed.flags.any()
    assert [shard.name for shard in about.shards] == sorted(path.name for path in done.folders[0].glob("*.rec"))
    assert len(about.shards) > 3
    assert all(20_000 < shard.size <= 30_000 for shard in about.shards[:-1])
    assert done.bytes == sum(shard.size for shard in about.shards)
    assert calls[-1] == (200, 200)
    assert calls == sorted(calls)
    packed.close()


def test_other_readers_find_label_number_and_pack_in_the_records(pets: Path, tmp_path: Path) -> None:
    packed = opening.open(pack(pets, tmp_path / "dst", shard_bytes=30_000).folders[0])
    records = [record for shard in packed.description.shards for record in read_records(packed.folder / shard.name)]
    assert [record.id for record in records] == list(range(200))
    assert [record.label for record in records] == packed.label.tolist()
    assert {record.id2 for record in records} == {packed.description.pack_id}
    starts = [
        int(line.split("\t")[1])
        for shard in packed.description.shards
        for line in (packed.folder / shard.name).with_suffix(".idx").read_text().splitlines()
    ]
    assert starts == [recordio.compute_record_start(int(offset), 0) for offset in packed.offset]


def test_the_same_source_makes_the_same_files_on_any_number_of_threads(pets: Path, tmp_path: Path) -> None:
    for threads in (1, 2, 5):
        pack(pets, tmp_path / str(threads), threads=threads, split=0.2, seed=3)
    for other in ("2", "5"):
        assert sources(tmp_path / other) == sources(tmp_path / "1")


def test_another_seed_or_source_makes_another_pack(pets: Path, tmp_path: Path) -> None:
    first = opening.open(pack(pets, tmp_path / "a").folders[0])
    second = opening.open(pack(pets, tmp_path / "b", seed=1).folders[0])
    assert names_of(first) != names_of(second)
    assert first.description.pack_id != second.description.pack_id
    assert first.fingerprint != second.fingerprint


def test_a_stretch_of_a_pack_is_a_mixture_of_the_classes(pets: Path, tmp_path: Path) -> None:
    label = opening.open(pack(pets, tmp_path / "dst").folders[0]).label
    for begin in range(0, 200, 50):
        counts = np.bincount(label[begin : begin + 50], minlength=3)
        assert (np.abs(counts - [25, 15, 10]) < 13).all(), counts


def test_sizes_channels_and_formats(tmp_path: Path) -> None:
    files = {
        "a.jpg": picture(1, "PNG", (7, 5)),  # the ending lies
        "b.png": picture(2, "PNG", mode="P"),
        "c.webp": picture(3, "WEBP"),
        "d.tif": picture(4, "TIFF"),
        "e.gif": picture(5, "GIF"),
        "f.bmp": picture(6, "BMP"),
        "g.ppm": picture(7, "PPM"),
        "h.jpeg": picture(8, "JPEG", (9, 4), exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"),
        "i.jpg": picture(9, "JPEG", mode="CMYK"),
        "j.jpg": picture(10, "JPEG", mode="L"),
    }
    (tmp_path / "src/any").mkdir(parents=True)
    for name, data in files.items():
        (tmp_path / "src/any" / name).write_bytes(data)
    with Image.open(tmp_path / "src/any/h.jpeg") as image:
        assert image.getexif()[274] == 6  # it lies on its side, and is packed as it is stored
    packed = opening.open(pack(tmp_path / "src", tmp_path / "dst").folders[0])
    found = {
        packed.name(sample)[4:]: (int(packed.width[sample]), int(packed.height[sample]), int(packed.flags[sample]))
        for sample in range(len(packed))
    }
    assert found == {
        **dict.fromkeys(files, (8, 8, FLAG_NOT_JPEG)),
        "a.jpg": (7, 5, FLAG_NOT_JPEG),
        "h.jpeg": (9, 4, 0),
        "i.jpg": (8, 8, 0),
        "j.jpg": (8, 8, 0),
    }
    assert (packed.description.channels, packed.description.common_size) == (3, None)


def test_a_set_of_gray_images_has_one_channel(tmp_path: Path) -> None:
    (tmp_path / "src/any").mkdir(parents=True)
    (tmp_path / "src/any/a.jpg").write_bytes(picture(1, mode="L"))
    (tmp_path / "src/any/b.png").write_bytes(picture(2, "PNG", mode="1"))
    (tmp_path / "src/any/c.png").write_bytes(picture(3, "PNG", mode="LA"))
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(tmp_path / "src/any/d.png")
    assert opening.open(pack(tmp_path / "src", tmp_path / "dst").folders[0]).description.channels == 1


def test_an_image_that_holds_the_magic_number(tmp_path: Path) -> None:
    magic = recordio.MAGIC.to_bytes(4, "little")
    root = folder(tmp_path / "src", {"cat": 2})
    for number, tail in enumerate((b"", b"?")):
        data = picture(number + 10)
        (root / f"cat/magic-{number}.jpg").write_bytes(data + bytes(-len(data) % 4) + tail + magic + b"end")
    packed = opening.open(pack(root, tmp_path / "dst").folders[0])
    split = [packed.name(sample) for sample in np.flatnonzero(packed.flags & FLAG_SPLIT)]
    assert split == ["cat/magic-0.jpg"]  # the other one is not aligned
    assert contents(tmp_path / "dst") == sources(root)
    assert verify(tmp_path / "dst").damages == []


@pytest.mark.parametrize(
    ("columns", "kind", "classes", "counts", "labels"),
    [
        (["labels", "red;big", "big", "", "red"], "multi", ("big", "red"), (2, 2), [[1, 1], [1, 0], [0, 0], [0, 1]]),
        (["value", "1.5", "-2", "3", "4"], "value", (), (), [1.5, -2, 3, 4]),
        (["value_x,value_y", "1,2", "3,4", "5,6", "7,8"], "value", ("x", "y"), (), [[1, 2], [3, 4], [5, 6], [7, 8]]),
    ],
)
def test_labels_of_a_list(
    tmp_path: Path,
    columns: list[str],
    kind: str,
    classes: tuple[str, ...],
    counts: tuple[int, ...],
    labels: list[object],
) -> None:
    root = folder(tmp_path / "src", {"images": 4})
    lines = [f"path,{columns[0]}", *(f"src/images/{number}.jpg,{text}" for number, text in enumerate(columns[1:]))]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    done = pack(tmp_path / "list.csv", tmp_path / "dst")
    packed = opening.open(done.folders[0])
    order = [int(Path(name).stem) for name in names_of(packed)]
    np.testing.assert_array_equal(packed.label, np.array(labels, np.float32)[order])
    assert packed.label.dtype == np.float32
    assert (packed.description.label_kind, packed.classes) == (kind, classes)
    assert packed.description.class_counts == counts
    assert verify(done.folders[0]).damages == []
    assert set(contents(done.folders[0]).values()) == set(sources(root).values())


# Splits


@pytest.mark.parametrize(
    ("share", "wanted"), [(0.1, (10, 6, 4)), (0.004, (1, 1, 1)), (0.29, (29, 17, 12)), (0.98, (98, 59, 39))]
)
def test_a_split_takes_its_share_of_each_class(
    pets: Path, tmp_path: Path, share: float, wanted: tuple[int, ...]
) -> None:
    done = pack(pets, tmp_path / "dst", split=share)
    assert done.folders == (tmp_path / "dst/train", tmp_path / "dst/eval")
    train, evaluation = map(opening.open, done.folders)
    assert evaluation.description.class_counts == wanted
    assert train.description.class_counts == tuple(np.subtract((100, 60, 40), wanted))
    assert train.classes == evaluation.classes
    assert train.description.pack_id != evaluation.description.pack_id
    assert contents(done.folders[0]) | contents(done.folders[1]) == sources(pets)
    assert done.samples == len(train) + len(evaluation) == 200


def test_what_is_split_off_hangs_on_seed_and_names_alone(pets: Path, tmp_path: Path) -> None:
    chosen = []
    for number, (seed, threads) in enumerate([(0, 1), (0, 2), (1, 1)]):
        done = pack(pets, tmp_path / str(number), split=0.1, seed=seed, threads=threads)
        chosen.append(set(contents(done.folders[1])))
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(chosen[0] & chosen[2]) < 10


def test_a_class_of_one_image_stays_in_training(tmp_path: Path) -> None:
    root = folder(tmp_path / "src", {"cat": 1, "dog": 2})
    done = pack(root, tmp_path / "dst", split=0.1)
    assert [opening.open(part).description.class_counts for part in done.folders] == [(1, 1), (0, 1)]
    with pytest.raises(UsageError, match=r"a split of 0.75 would leave class 'cat', of 1 images, without a training"):
        pack(root, tmp_path / "other", split=0.75)
    with pytest.raises(UsageError, match="no class has two images"):
        pack(folder(tmp_path / "singles", {"cat": 1, "dog": 1}), tmp_path / "other", split=0.1)
    assert not (tmp_path / "other").exists()


def test_numbers_are_split_over_all(tmp_path: Path) -> None:
    folder(tmp_path / "src", {"images": 20})
    lines = ["path,value", *(f"src/images/{number}.jpg,{number}" for number in range(20))]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    train, evaluation = map(opening.open, pack(tmp_path / "list.csv", tmp_path / "dst", split=0.25).folders)
    assert (len(train), len(evaluation)) == (15, 5)
    assert sorted([*train.label, *evaluation.label]) == list(range(20))


def test_a_source_of_two_sets(tmp_path: Path) -> None:
    folder(tmp_path / "src/train", {"cat": 5, "dog": 4})
    folder(tmp_path / "src/val", {"cat": 3, "dog": 2})
    calls: list[tuple[int, int]] = []
    done = pack(tmp_path / "src", tmp_path / "dst", progress=lambda *call: calls.append(call))
    assert [contents(part) for part in done.folders] == [sources(tmp_path / f"src/{name}") for name in ("train", "val")]
    assert calls == [(9, 14), (14, 14)]
    with pytest.raises(UsageError, match="the source already has an evaluation set, val"):
        pack(tmp_path / "src", tmp_path / "other", split=0.1)
    folder(tmp_path / "src/val", {"eel": 1})
    folder(tmp_path / "src/train", {"fox": 1})
    sentence = r"the classes of eval and train differ \(only in train: fox; only in val: eel\)"
    with pytest.raises(DataError, match=sentence):
        pack(tmp_path / "src", tmp_path / "other")


# Bad files


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """Eight good images and six bad files."""
    root = folder(tmp_path / "src", {"cat": 4, "dog": 4})
    good = picture(99, size=(64, 64))
    (root / "cat/cut.jpg").write_bytes(good[: len(good) // 2])
    (root / "cat/empty.jpg").touch()
    (root / "cat/text.jpg").write_text("this is not an image")
    (root / "dog/gone.jpg").symlink_to(root / "nowhere")
    (root / "dog/program.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n")
    (root / "dog/cut.png").write_bytes(picture(98, "PNG", (64, 64))[:2000])
    return root


REASONS = {
    "cat/cut.jpg": "the file ends early",
    "cat/empty.jpg": "it is empty",
    "cat/text.jpg": "its image format is not known",
    "dog/gone.jpg": "it cannot be read (No such file or directory)",
    "dog/program.jpg": "its image format is not known",
    "dog/cut.png": "the file ends early",
}


def test_all_bad_files_are_named_and_nothing_is_packed(
    spoilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # as a user's program may have it
    with pytest.raises(DataError) as caught:
        pack(spoilt, tmp_path / "dst")
    assert caught.value.exit_status == 1
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        f"{spoilt}: 6 of 14 files are not readable images. Repair or remove them, or skip with --skip-bad:"
    )
    assert len(lines) == 7
    for name, reason in REASONS.items():
        assert any(line.startswith(f"  {name}: {reason}") for line in lines), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_bad_files_are_left_out_and_listed_where_the_user_says_so(spoilt: Path, tmp_path: Path) -> None:
    done = pack(spoilt, tmp_path / "dst", skip_bad=True)
    assert {name: reason.startswith(REASONS[name]) for name, reason in done.skipped} == dict.fromkeys(REASONS, True)
    assert (tmp_path / "dst/skipped.txt").read_text().splitlines() == [
        f"{name}\t{reason}" for name, reason in done.skipped
    ]
    assert done.samples == 8
    assert contents(tmp_path / "dst") == {name: data for name, data in sources(spoilt).items() if name not in REASONS}
    assert verify(tmp_path / "dst").damages == []
    (spoilt / "eel").mkdir()
    (spoilt / "eel/text.jpg").write_text("no image")
    with pytest.raises(DataError, match="no good image is left of class 'eel'"):
        pack(spoilt, tmp_path / "other", skip_bad=True)
    assert not (tmp_path / "other").exists()


def test_of_many_bad_files_some_are_shown(tmp_path: Path) -> None:
    (tmp_path / "src/train/cat").mkdir(parents=True)
    folder(tmp_path / "src/eval", {"cat": 3})
    for number in range(25):
        (tmp_path / f"src/train/cat/{number}.jpg").write_text("no image")
    with pytest.raises(DataError) as caught:
        pack(tmp_path / "src", tmp_path / "dst")
    lines = str(caught.value).splitlines()
    assert "25 of 28 files are" in lines[0]
    assert all(line.startswith("  train/cat/") for line in lines[1:21])
    assert lines[21:] == ["  and 5 more."]
    with pytest.raises(DataError, match="no good image is left"):
        pack(tmp_path / "src", tmp_path / "dst", skip_bad=True)


@pytest.mark.parametrize(
    ("side", "reason"), [(40, "its 40 x 40 pixels are more than the limit of 1,500"), (100, "exceeds")]
)
def test_images_of_too_many_pixels_are_refused(
    tmp_path: Path, side: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above its limit Pillow warns, above twice the limit it raises; both are refused, without a warning."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1500)
    root = folder(tmp_path / "src", {"cat": 1})
    (root / "cat/bomb.png").write_bytes(picture(1, "PNG", (side, side)))
    with pytest.raises(DataError, match=rf"cat/bomb\.png: .*{reason}"):
        pack(root, tmp_path / "dst")


# Places


def test_a_place_that_is_taken_is_left_alone(pets: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    dst.mkdir()
    assert pack(folder(tmp_path / "old", {"cat": 2}), dst).samples == 2  # an empty folder will do
    before = sources(dst)
    with pytest.raises(UsageError, match=r"dst: this exists. .* --overwrite"):
        pack(pets, dst)
    assert sources(dst) == before
    (tmp_path / "bad/cat").mkdir(parents=True)
    (tmp_path / "bad/cat/a.jpg").touch()
    with pytest.raises(DataError, match="1 of 1 file is not a readable image"):
        pack(tmp_path / "bad", dst, overwrite=True)
    assert sources(dst) == before
    assert pack(pets, dst, overwrite=True, split=0.1).samples == 200
    assert {path.name for path in dst.iterdir()} == {"train", "eval"}
    assert pack(pets, dst, overwrite=True).samples == 200
    assert contents(dst) == sources(pets)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "dst", "old"]


def test_nothing_but_a_pack_is_overwritten(pets: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter").write_text("1")
    (tmp_path / "file").write_text("2")
    for dst in ("thesis", "file"):
        with pytest.raises(UsageError, match="the destination exists and is not a packed data set"):
            pack(pets, tmp_path / dst, overwrite=True)
    with pytest.raises(HeadwayError, match="file/dst: the folder cannot be written"):
        pack(pets, tmp_path / "file/dst")
    assert sources(tmp_path) == {"thesis/chapter": b"1", "file": b"2"}


def test_a_pack_is_not_written_into_its_source_nor_over_it(tmp_path: Path) -> None:
    root = folder(tmp_path / "a/src", {"cat": 2})
    for dst in (root, root / "packed", root / "cat"):
        with pytest.raises(UsageError, match="the destination is inside the source"):
            pack(root, dst)
    with pytest.raises(UsageError, match="the source is inside"):
        pack(root, tmp_path / "a", overwrite=True)
    assert len(sources(root)) == 2


def test_a_link_is_packed_to_where_it_leads(pets: Path, tmp_path: Path) -> None:
    (tmp_path / "large/disk").mkdir(parents=True)
    (tmp_path / "dst").symlink_to(tmp_path / "large/disk")
    pack(pets, tmp_path / "dst")
    assert (tmp_path / "dst").is_symlink()
    assert len(opening.open(tmp_path / "large/disk")) == 200


def test_impossible_numbers_are_refused(pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in (-0.1, 1.0, float("nan")):
        with pytest.raises(UsageError, match="is not a share of the images"):
            pack(pets, tmp_path / "dst", split=split)
    with pytest.raises(UsageError, match="0 threads"):
        pack(pets, tmp_path / "dst", threads=0)
    with pytest.raises(UsageError, match="cannot have 0 bytes"):
        pack(pets, tmp_path / "dst", shard_bytes=0)
    few = folder(tmp_path / "few", {"cat": 9})
    assert len(opening.open(pack(few, tmp_path / "dst", shard_bytes=100).folders[0]).description.shards) == 9
    monkeypatch.setattr(pack_set, "MAX_SHARDS", 8)
    with pytest.raises(UsageError, match="shards of 100 bytes are too many"):
        pack(few, tmp_path / "other", shard_bytes=100)
    assert not (tmp_path / "other").exists()


# Real data


def test_a_real_set(data_root: Path, tmp_path: Path) -> None:
    """Images of ImageNet are large, and of many sizes."""
    files = sorted((data_root / "imagenet-250").glob("*.JPEG"))[:60]
    lines = ["path,label", *(f"{path},{'abc'[number % 3]}" for number, path in enumerate(files))]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    done = pack(tmp_path / "list.csv", tmp_path / "dst")
    assert contents(done.folders[0]) == {str(path): path.read_bytes() for path in files}
    packed = opening.open(done.folders[0])
    for sample in range(len(packed)):
        with Image.open(packed.name(sample)) as image:
            assert image.size == (packed.width[sample], packed.height[sample])
    assert packed.description.class_counts == (20, 20, 20)
    assert verify(done.folders[0]).damages == []
