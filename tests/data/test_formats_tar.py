from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data._foreign import LABELS, PICTURES, cache, looked_at, names_of, said, same, survives

from headway.core.errors import DataError, UsageError
from headway.data import opening
from headway.data.formats import tar

__all__ = ["cache"]

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def archive(path: Path, files: Sequence[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as out:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def samples(ending: str = "cls", text: str = "{}", folder: str = "") -> list[tuple[str, bytes]]:
    files = []
    for number, (image, label) in enumerate(zip(PICTURES, LABELS, strict=True)):
        kind = "png" if number == 2 else "jpg"
        files += [
            (f"{folder}{number:04d}.{kind}", image),
            (f"{folder}{number:04d}.{ending}", text.format(label).encode()),
        ]
    return files


# The archive


names = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=60).filter(
    lambda name: name not in (".", "..")
)
paths = st.lists(names, min_size=1, max_size=6).map("/".join)


@each_format
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(files=st.lists(st.tuples(paths, st.binary(max_size=1500)), max_size=6))
def test_members_are_where_tarfile_says(tmp_path: Path, format: int, files: list[tuple[str, bytes]]) -> None:
    if format == tarfile.USTAR_FORMAT:  # it has no place for longer ones
        files = [(name.encode("ascii", "ignore").decode()[:99].strip("/") or "x", data) for name, data in files]
    path = archive(tmp_path / "a.tar", files, format)
    with tarfile.open(path) as found:
        wanted = [(info.name, info.offset_data, info.size) for info in found if info.isreg()]
    data = path.read_bytes()
    assert [tuple(member) for member in tar.read_members(path)] == wanted
    assert [data[at : at + size] for _, at, size in tar.read_members(path)] == [content for _, content in files]


def test_ustar_names_in_two_halves(tmp_path: Path) -> None:
    name = "/".join(["folder" * 5] * 5) + "/" + "n" * 90
    path = archive(tmp_path / "a.tar", [(name, b"x")], tarfile.USTAR_FORMAT)
    assert [member.name for member in tar.read_members(path)] == [name]


@each_format
def test_what_is_no_file_is_passed_over(tmp_path: Path, format: int) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/file").write_bytes(b"content")
    (tmp_path / "in/link").symlink_to("file")
    os.link(tmp_path / "in/file", tmp_path / "in/same")
    os.mkfifo(tmp_path / "in/pipe")
    with tarfile.open(tmp_path / "a.tar", "w", format=format) as out:
        out.add(tmp_path / "in", "in")
    (member,) = tar.read_members(tmp_path / "a.tar")
    assert os.path.basename(member.name) in ("file", "same")
    assert (tmp_path / "a.tar").read_bytes()[member.offset :].startswith(b"content")


def test_a_member_larger_than_octal_can_say(tmp_path: Path) -> None:
    size = (8 << 30) + 5
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("big.bin")
        info.size = size
        head = info.tobuf(format)
        with (tmp_path / "a.tar").open("wb") as file:
            file.write(head)
            file.seek(len(head) + size + -size % 512)
            file.write(tarfile.TarInfo("next").tobuf() + bytes(1024))
        found = list(tar.read_members(tmp_path / "a.tar"))
        assert found == [("big.bin", len(head), size), ("next", len(head) + size + -size % 512 + 512, 0)]


def test_a_sparse_file_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.jpg")
    info.type = tarfile.GNUTYPE_SPARSE
    (tmp_path / "a.tar").write_bytes(info.tobuf() + bytes(1024))
    sentence = "byte 0: sparse files cannot be mapped. Make the archive without --sparse."
    assert said(tmp_path / "a.tar") == f"{tmp_path}/a.tar, {sentence}"
    info = tarfile.TarInfo("a.jpg")
    info.pax_headers = {"GNU.sparse.major": "1"}
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    assert "sparse files cannot be mapped" in said(tmp_path / "a.tar")


@each_format
def test_a_cut_archive_is_always_noticed(tmp_path: Path, format: int) -> None:
    path = archive(tmp_path / "a.tar", [*samples(), ("n" * 98, b"")], format)
    whole = path.read_bytes()
    end = max(at for at in range(0, len(whole), 512) if whole[at : at + 512] != bytes(512)) + 512
    for size in [*range(1, end, 500), end, end + 511]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.tar, byte \d+: the archive ends (inside|without an end mark)"):
            list(tar.read_members(path))


@pytest.mark.parametrize("at", [0, 99, 120, 130, 150, 156, 200, 260, 340, 400, 511])
def test_any_changed_byte_of_a_header_is_noticed(tmp_path: Path, at: int) -> None:
    path = archive(tmp_path / "a.tar", samples(), tarfile.USTAR_FORMAT)
    whole = bytearray(path.read_bytes())
    second = next(tar.read_members(path)).size + 1023 & ~511
    for start in (0, second):
        changed = whole.copy()
        changed[start + at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(DataError, match=rf"a\.tar, byte {start}: this is not a tar header"):
            list(tar.read_members(path))


def test_no_damage_makes_anything_but_a_sentence(tmp_path: Path) -> None:
    for format in FORMATS.values():
        files = [
            (name if number // 2 % 3 else f"{'f' * 120}/{name}", data) for number, (name, data) in enumerate(samples())
        ]
        if format == tarfile.USTAR_FORMAT:
            files = samples()
        path = archive(tmp_path / "a.tar", files, format)
        survives(path, edits=60, heads=[0, 124, 130, 135, 148, 156, 257, 345, 512, 513, 520])


# Samples


@each_format
def test_samples_are_read_as_they_were_written(tmp_path: Path, cache: Path, format: int) -> None:
    path = archive(tmp_path / "set.tar", samples(folder="a.b/c/"), format)
    data = same(opening.open(path), PICTURES)
    assert data.description.format == "tar"
    assert (data.classes, data.description.label_kind) == (("0", "1", "2"), "class")
    assert names_of(data) == [name for name, _ in samples(folder="a.b/c/")[::2]]
    assert data.width.tolist() == [8, 9, 8, 8, 9, 10, 8]
    assert data.description.channels == 3


def test_labels_by_name_json_and_text(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "set.tar"
    for number, (ending, text) in enumerate(
        [
            ("cls", "class {}"),
            ("txt", "class {}\n"),
            ("json", '"class {}"'),
            ("json", '{{"label": "class {}", "x": 1}}'),
        ]
    ):
        path = archive(tmp_path / f"{number}.tar", samples(ending, text))
        data = same(opening.open(path), PICTURES)
        assert data.classes == ("class 0", "class 1", "class 2")
    several = archive(tmp_path / "several.tar", samples("json", '{{"labels": ["b", "{}"]}}'))
    data = opening.open(several)
    assert (data.classes, data.description.label_kind) == (("0", "1", "2", "b"), "multi")
    assert data.label.tolist() == [[float(n == label) for n in range(3)] + [1.0] for label in LABELS]
    numbers = opening.open(archive(tmp_path / "numbers.tar", samples("json", '{{"value": {}.5}}')))
    assert (numbers.classes, numbers.description.label_kind) == ((), "value")
    assert numbers.label.tolist() == [label + 0.5 for label in LABELS]
    vectors = opening.open(archive(tmp_path / "vectors.tar", samples("json", "[{}, -1.5]")))
    assert (vectors.classes, vectors.description.label_kind) == (("0", "1"), "value")
    assert vectors.label.tolist() == [[label, -1.5] for label in LABELS]


def test_a_key_ends_at_the_first_dot_of_its_file(tmp_path: Path, cache: Path) -> None:
    files = [
        ("README", b"no sample"),
        ("__meta__/0.jpg", b"none either"),
        (".hidden.jpg", b"nor this"),
        ("./v1.0/one.JPG", PICTURES[0]),
        ("./v1.0/one.seg.png", b"belongs to the sample, and is not an image of it"),
        ("./v1.0/one.cls", b"1"),
        ("two.cls", b"0"),
        ("two.jpeg", PICTURES[1]),
        ("three.txt", b"no image"),
    ]
    data = same(opening.open(archive(tmp_path / "a.tar", files)), PICTURES[:2], [1, 0])
    assert names_of(data) == ["./v1.0/one.JPG", "two.jpeg"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "there is no image with a label in it. Samples are KEY.jpg with KEY.cls beside it."),
        ([("a.cls", b"1")], "there is no image with a label in it"),
        ([("a.jpg", b"x")], "sample 'a' has no label (it has: jpg). Put one beside it: a.cls, .json or .txt."),
        ([("a.jpg", b"x"), ("a.png", b"x"), ("a.cls", b"1")], "sample 'a' has several images (jpg, png)"),
        ([("a.jpg", b"x"), ("a.jpg", b"x")], "'a.jpg' occurs twice"),
        ([("a.jpg", b"x"), ("a.cls", b" ")], "a.cls: the label is empty"),
        ([("a.jpg", b"x"), ("a.cls", b"\xff")], "a.cls: the label is not UTF-8 text"),
        ([("a.jpg", b"x"), ("a.cls", b"1" * (2 << 20))], "a label of 2,097,152 bytes"),
        ([("a.jpg", b"x"), ("a.cls", b"3000000")], "label 3000000 of sample 0 is not a class"),
        ([("a.jpg", b"x"), ("a.json", b"{")], "the label is not valid JSON"),
        ([("a.jpg", b"x"), ("a.json", b"[" * 100_000)], "the label is not valid JSON"),
        ([("a.jpg", b"x"), ("a.json", b"{}")], "it has none of the keys label, labels, value"),
        ([("a.jpg", b"x"), ("a.json", b"null")], "the label is of type NoneType"),
        ([("a.jpg", b"x"), ("a.json", b"1e999")], "a label is not a finite number"),
        ([("a.jpg", b"x"), ("a.json", b"1" + b"0" * 400)], "the labels differ in kind"),
        ([("a.jpg", b"x"), ("a.json", b'[1, "x"]')], "the labels differ in kind"),
        ([("a.jpg", b"x"), ("a.cls", b"1"), ("b.jpg", b"x"), ("b.json", b"1")], "(found: int, str)"),
        ([("a.jpg", b"x"), ("a.json", b"[1]"), ("b.jpg", b"x"), ("b.json", b"[1, 2]")], "differ in kind or length"),
        ([("a.jpg", b"x"), ("a.cls", b"1")], "none of its 1 records is an image"),
    ],
)
def test_what_is_no_sample_is_refused(tmp_path: Path, cache: Path, files: list[tuple[str, bytes]], reason: str) -> None:
    assert reason in said(archive(tmp_path / "a.tar", files))


def test_a_damaged_image_among_good_ones_is_kept_for_the_decoder_to_refuse(tmp_path: Path, cache: Path) -> None:
    files = samples()
    files[4] = ("0002.png", b"no image")
    data = opening.open(archive(tmp_path / "a.tar", files))
    assert bytes(data.read([2])[0]) == b"no image"
    assert (data.width[2], data.height[2]) == (1, 1)


# Several shards


def shards(folder: Path) -> Path:
    folder.mkdir()
    files = samples()
    for number, (low, high) in enumerate([(0, 2), (2, 10), (10, 14)]):
        archive(folder / f"train-{number:03d}.tar", files[low:high])
    return folder


def test_shards_by_pattern_and_by_folder(tmp_path: Path, cache: Path) -> None:
    folder = shards(tmp_path / "data")
    numbered = [0, 1, 1, 1, 1, 2, 2]
    names = [f"train-{shard:03d}.tar/{name}" for shard, (name, _) in zip(numbered, samples()[::2], strict=True)]
    for uri in (
        "",
        "/train",
        "/train-{000..002}.tar",
        "/train-*.tar",
        "/train-0{00,01,02}.tar",
        "/tr{ain-00[01],ain-002}.tar",
    ):
        data = same(opening.open(f"{folder}{uri}"), PICTURES)
        assert data.shard.tolist() == numbered
        assert names_of(data) == names
    archive(folder / "val-0.tar", samples()[:2])
    assert said(folder, UsageError) == (
        f"{folder}: this holds several data sets: train, val. Name one: {folder}/train."
    )
    same(opening.open(f"{folder}/val"), PICTURES[:1], LABELS[:1])
    same(opening.open(f"{folder}/train"), PICTURES)
    assert said(folder / "test", UsageError) == (
        f"{folder}/test: there is no such file or folder, nor such a set in {folder} (it has: train, val). "
        "Name one that is there."
    )


def test_shards_that_are_missing_or_mixed(tmp_path: Path, cache: Path) -> None:
    folder = shards(tmp_path / "data")
    assert said(f"{folder}/train-{{000..004}}.tar") == (
        f"{folder}/train-003.tar: a shard is missing (2 of 5 are). Copy it again, or leave it out of the pattern."
    )
    assert "there is no such file or folder" in said(f"{folder}/none-*.tar", UsageError)
    assert "the pattern names more than 65,536 shards" in said(f"{folder}/train-{{0..999999999999}}.tar", UsageError)
    (folder / "train-003.rec").write_bytes(b"x")
    assert said(f"{folder}/train-*", UsageError) == (
        f"{folder}: shards are .rec or .tar, and the names end with '.rec', '.tar'. Name shards of one format."
    )


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz"])
def test_a_compressed_archive_is_unpacked_into_the_cache(tmp_path: Path, cache: Path, ending: str) -> None:
    plain = archive(tmp_path / "plain", samples())
    path = tmp_path / f"set{ending}"
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    same(opening.open(path), PICTURES)
    (unpacked,) = cache.rglob("set.tar")
    unpacked.unlink()
    same(opening.open(path), PICTURES)  # unpacked again
    plain = archive(tmp_path / "plain", samples()[:4])
    path.write_bytes(gzip.compress(plain.read_bytes()))
    same(opening.open(path), PICTURES[:2], LABELS[:2])
    assert len(list(cache.rglob("set.tar"))) == 1  # the older one is gone
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole[:40], whole[:300] + b"\0\0\0\0" + whole[304:], b"\x1f\x8b"):
        path.write_bytes(damaged)
        assert said(path) == f"{path}: the compressed file is damaged or cut. Copy it again."
        assert not looked_at(path)
    assert [file for file in cache.rglob("*") if file.is_file() and file.name.startswith(".set")] == []
