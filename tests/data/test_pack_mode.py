from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests._support import headway, refused
from tests.data._packs import contents, folder, names_of, picture, sources

from headway.core.errors import DataError, UsageError, UserCodeError
from headway.data import native, opening
from headway.data.columns import FLAG_NOT_JPEG, FLAG_RAW
from headway.data.pack import pack
from headway.data.pack_mode import PackMode
from headway.data.reference import decode_image

needs_native = pytest.mark.skipif(not native.is_available(), reason="the native core is not built")
LYING = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"
"""EXIF that says to turn the image by 90 degrees."""


@pytest.fixture
def photos(data_root: Path, tmp_path: Path) -> Path:
    """Photographs of many sizes: RGB, gray, progressive, CMYK and PNG among them."""
    root = tmp_path / "photos/any"
    root.mkdir(parents=True)
    for number, path in enumerate(sorted((data_root / "imagenet-250").glob("*.JPEG"))[:12]):
        (root / f"{number}.jpg").write_bytes(path.read_bytes())
    with Image.open(root / "0.jpg") as image:
        image.save(root / "progressive.jpg", progressive=True)
        image.convert("CMYK").save(root / "cmyk.jpg")
        image.convert("L").save(root / "gray.jpg")
        image.resize((50, 40)).save(root / "small.png")
    return root.parent


def pixels(data: bytes, channels: int = 3) -> np.ndarray[Any, Any]:
    return np.asarray(decode_image(data, channels))


def opened(folder: Path) -> dict[str, Image.Image]:
    return {name: Image.open(io.BytesIO(data)) for name, data in contents(folder).items()}


def saved(image: Image.Image, **options: Any) -> Image.Image:
    """What a JPEG of the image shows."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return Image.open(buffer)


# The text of a mode


modes = st.one_of(
    st.sampled_from([PackMode(kind="keep"), PackMode(kind="seekable"), PackMode(kind="raw")]),
    st.builds(PackMode, kind=st.just("raw"), side=st.integers(1, 9999)),
    st.builds(
        PackMode,
        kind=st.just("encode"),
        side=st.none() | st.integers(1, 9999),
        quality=st.integers(1, 100),
        subsampling=st.sampled_from([None, "444", "422", "420"]),
    ),
)


@given(mode=modes)
def test_a_mode_is_read_as_it_is_written(mode: PackMode) -> None:
    assert PackMode.parse(str(mode)) == mode


def test_parts_of_a_mode_may_be_left_out() -> None:
    assert str(PackMode.parse("resize=256")) == "resize=256,quality=90"
    assert str(PackMode.parse("quality=75")) == "quality=75"
    assert PackMode.parse(" quality=90 , resize=256") == PackMode.parse("resize=256")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' is not a mode. Modes are keep, seekable, resize=N,quality=Q"),
        ("fast", "'fast' is not a mode"),
        ("keep,resize=5", "is not a mode"),
        ("resize=5,resize=6", "is not a mode"),
        ("raw,raw", "is not a mode"),
        ("resize=0", "'0' is not a number from 1 to 65,536"),
        ("resize=2.5", "'2.5' is not a number"),
        ("resize", "'' is not a number"),
        ("quality=101", "'101' is not a number from 1 to 100"),
        ("raw,quality=90", "raw pixels have no quality. Write raw, or raw,resize=N."),
        ("quality=90,subsampling=411", "'411' is not a subsampling. Choose one of 444, 422, 420."),
    ],
)
def test_a_bad_mode_gets_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        PackMode.parse(text)
    assert sentence in str(caught.value)


# What the modes do


@needs_native
def test_seekable_is_the_default_and_changes_no_pixel(photos: Path, tmp_path: Path) -> None:
    done = pack(photos, tmp_path / "dst")
    assert (done.format, done.mode, done.notes) == ("recordio", "seekable", ())
    before, after = sources(photos), contents(tmp_path / "dst")
    assert before.keys() == after.keys()
    for name, data in after.items():
        np.testing.assert_array_equal(pixels(data), pixels(before[name]), err_msg=name)
        if name == "any/small.png":
            assert data == before[name]
        else:
            assert native.read_jpeg_header(data).restart > 0
            assert not native.read_jpeg_header(data).progressive
    assert sum(map(len, after.values())) < 1.02 * sum(map(len, before.values()))
    again = pack(tmp_path / "dst", tmp_path / "again")
    assert contents(again.folders[0]) == after


@needs_native
def test_a_jpeg_that_cannot_be_seekable_is_kept_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path / "src", {"cat": 3})
    refused = {(root / f"cat/{number}.jpg").read_bytes() for number in (0, 1)}
    rewrite = native.make_seekable

    def seekable(data: bytes) -> native.SeekableJpeg:
        if data in refused:
            raise DataError("arithmetic coding")
        return rewrite(data)

    monkeypatch.setattr(native, "make_seekable", seekable)
    done = pack(root, tmp_path / "dst")
    assert refused < set(contents(tmp_path / "dst").values())
    (note,) = done.notes
    assert note.startswith("Stored as it was, not seekable: 2 images (such as cat/")
    assert note.endswith("): arithmetic coding.")


def test_without_the_native_core_images_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_available", lambda: False)
    root = folder(tmp_path / "src", {"cat": 3})
    done = pack(root, tmp_path / "dst")
    assert done.notes == ("JPEGs were not made seekable, which needs the native core.",)
    assert done.mode == opening.open(tmp_path / "dst").description.mode == "keep"
    assert contents(tmp_path / "dst") == sources(root)
    assert pack(root, tmp_path / "kept", mode="keep").notes == ()


def test_resized_images_are_at_most_so_large(photos: Path, tmp_path: Path) -> None:
    done = pack(photos, tmp_path / "dst", mode="resize=96,quality=80")
    packed = opening.open(done.folders[0])
    assert packed.description.mode == done.mode == "resize=96,quality=80"
    before = {name: Image.open(io.BytesIO(data)) for name, data in sources(photos).items()}
    for sample, (name, image) in enumerate(opened(done.folders[0]).items()):
        original = before[name]
        assert image.format == "JPEG"
        assert image.mode == ("L" if original.mode == "L" else "RGB")
        assert image.size == (packed.width[sample], packed.height[sample])
        if min(original.size) <= 96:
            assert image.size == original.size
            continue
        assert min(image.size) == 96
        assert abs(image.width / image.height - original.width / original.height) < 0.02 * image.width / image.height
        wanted = saved(original.convert(image.mode).resize(image.size, Image.Resampling.BICUBIC), quality=80)
        np.testing.assert_array_equal(np.asarray(image), np.asarray(wanted), err_msg=name)
        if native.is_available():
            assert native.read_jpeg_header(contents(done.folders[0])[name]).restart > 0


def test_quality_and_subsampling_are_those_of_pillow(photos: Path, tmp_path: Path) -> None:
    for text, options in (
        ("quality=60", {"quality": 60}),
        ("quality=90,subsampling=444", {"quality": 90, "subsampling": "4:4:4"}),
    ):
        done = pack(photos, tmp_path / text, mode=text)
        for name, image in opened(done.folders[0]).items():
            with Image.open(photos / name) as original:
                wanted = saved(original.convert("L" if original.mode == "L" else "RGB"), **options)
            np.testing.assert_array_equal(np.asarray(image), np.asarray(wanted), err_msg=name)


@pytest.mark.parametrize("side", [1, 2, 300])
def test_noise_can_be_encoded_in_every_quality(tmp_path: Path, side: int) -> None:
    """It is the largest there is; Pillow's optimize=True fails on it."""
    (tmp_path / "src/a").mkdir(parents=True)
    (tmp_path / "src/a/noise.png").write_bytes(picture(1, "PNG", (side, side)))
    for mode in ("quality=90,subsampling=444", "quality=100,subsampling=444", "quality=1"):
        pack(tmp_path / "src", tmp_path / mode, mode=mode)
        (image,) = opened(tmp_path / mode).values()
        assert image.size == (side, side)


def test_raw_holds_the_pixels_that_pillow_decodes(photos: Path, tmp_path: Path) -> None:
    done = pack(photos, tmp_path / "dst", mode="raw")
    packed = opening.open(done.folders[0])
    assert (packed.description.format, packed.description.mode, packed.description.channels) == ("raw", "raw", 3)
    assert (packed.flags == FLAG_RAW).all()
    for sample, name in enumerate(names_of(packed)):
        wanted = pixels((photos / name).read_bytes())
        assert wanted.shape == (packed.height[sample], packed.width[sample], 3)
        assert bytes(packed.read([sample])[0]) == wanted.tobytes()
    (shard,) = packed.description.shards
    flat = np.load(done.folders[0] / shard.name, mmap_mode="r")
    assert (flat.dtype, flat.shape) == (np.uint8, (packed.length.sum(),))


def test_raw_images_of_one_size_are_an_array(tmp_path: Path) -> None:
    root = folder(tmp_path / "src", {"cat": 5, "dog": 4})
    done = pack(root, tmp_path / "dst", format="raw", shard_bytes=1100)
    packed, place = opening.open(done.folders[0]), 0
    assert len(packed.description.shards) > 1
    for shard in packed.description.shards:
        array = np.load(done.folders[0] / shard.name, mmap_mode="r")
        labels = np.load((done.folders[0] / shard.name).with_suffix(".labels.npy"))
        assert array.shape[1:] == (8, 8, 3)
        for image, label in zip(array, labels, strict=True):
            np.testing.assert_array_equal(image, pixels((root / packed.name(place)).read_bytes()))
            assert label == packed.label[place]
            place += 1
    assert place == 9


def test_a_gray_set_is_raw_with_one_channel(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("eval", 2)):
        (tmp_path / "src" / part / "a").mkdir(parents=True)
        for number in range(count):
            (tmp_path / f"src/{part}/a/{number}.png").write_bytes(picture(number, "PNG", mode="L"))
    for folder_ in pack(tmp_path / "src", tmp_path / "gray", mode="raw").folders:
        assert opening.open(folder_).description.channels == 1
        assert np.load(folder_ / "shard-00000.npy").shape[1:] == (8, 8, 1)
    (tmp_path / "src/eval/a/colour.png").write_bytes(picture(9, "PNG"))  # both parts have to be alike
    for folder_ in pack(tmp_path / "src", tmp_path / "colour", mode="raw").folders:
        assert np.load(folder_ / "shard-00000.npy").shape[1:] == (8, 8, 3)


def test_raw_images_can_be_resized_too(photos: Path, tmp_path: Path) -> None:
    done = pack(photos, tmp_path / "dst", mode="raw,resize=32")
    packed = opening.open(done.folders[0])
    assert packed.description.mode == "raw,resize=32"
    assert (np.minimum(packed.width, packed.height) == 32).all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"format": "raw", "mode": "keep"}, "format raw does not hold images in mode keep. Choose --mode raw"),
        ({"format": "tar", "mode": "raw"}, "format tar does not hold images in mode raw. Choose --format raw"),
        ({"format": "zip"}, "'zip' is not a format that can be written."),
        ({"orient": True}, "mode seekable keeps the files unchanged, so they cannot be turned. Leave --orient out"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        pack(folder(tmp_path / "src", {"cat": 1}), tmp_path / "dst", **options)
    assert sentence in str(caught.value)


def test_the_mode_says_what_was_done_to_the_images(tmp_path: Path) -> None:
    root = folder(tmp_path / "src", {"cat": 2})
    pack(root, tmp_path / "small", mode="resize=4,quality=80")
    for mode in ("keep", "seekable"):
        pack(tmp_path / "small", tmp_path / mode, mode=mode)
        assert opening.open(tmp_path / mode).description.mode == "resize=4,quality=80"
    pack(tmp_path / "small", tmp_path / "raw", mode="raw")
    as_png = "The source's pixels are stored as PNG, which is lossless."
    for mode in (None, "keep", "seekable"):
        done = pack(tmp_path / "raw", tmp_path / "png", format="tar", mode=mode, overwrite=True)
        assert (done.mode, opening.open(tmp_path / "png").description.mode, done.notes) == ("keep", "keep", (as_png,))
        done = pack(tmp_path / "raw", tmp_path / "again", mode=mode, overwrite=True)
        note = f"Mode {mode} is for image files: the source's pixels are stored unchanged, in mode raw."
        assert (done.format, done.mode, done.notes) == ("raw", "raw", (note,) if mode else ())


# Orientation


def test_orientation_is_told_and_applied_where_asked_for(tmp_path: Path) -> None:
    (tmp_path / "src/a").mkdir(parents=True)
    upright, lying = picture(1, size=(6, 4)), picture(2, size=(6, 4), exif=LYING)
    (tmp_path / "src/a/upright.jpg").write_bytes(upright)
    (tmp_path / "src/a/lying.jpg").write_bytes(lying)
    done = pack(tmp_path / "src", tmp_path / "kept", mode="keep")
    assert done.notes == (
        "EXIF says to turn or mirror a/lying.jpg, which was not done, as in torchvision; --orient does that in "
        "modes that encode images anew, or with a transform.",
    )
    for options in ({"mode": "raw"}, {"transform": lambda image, label, name: image}):
        (note,) = pack(tmp_path / "src", tmp_path / "could", overwrite=True, **options).notes
        assert note.endswith("as in torchvision; --orient does that.")
    done = pack(tmp_path / "src", tmp_path / "turned", mode="raw", orient=True)
    packed = opening.open(done.folders[0])
    assert done.notes == ()
    for sample, name in enumerate(names_of(packed)):
        wanted = pixels(upright) if name == "a/upright.jpg" else np.rot90(pixels(lying), -1)
        assert bytes(packed.read([sample])[0]) == wanted.tobytes()
        assert (packed.height[sample], packed.width[sample]) == wanted.shape[:2]


# Transforms


TRANSFORM = """
from PIL import Image, ImageOps
import io

def mirrored(image, label, name):
    return ImageOps.mirror(image)

def without_cats(image, label, name):
    return None if name.startswith("cat/") and label == 0 and not name.endswith("/0.jpg") else image

def as_png(image, label, name):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()

def number(image, label, name):
    return 3

def broken(image, label, name):
    return bytes(9)

def failing(image, label, name):
    if name == "dog/1.jpg":
        raise KeyError("whiskers")
    return image

text = "no function"
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(TRANSFORM)
    monkeypatch.chdir(tmp_path)
    return folder(tmp_path / "src", {"cat": 3, "dog": 3})


def test_a_transform_is_applied_before_the_mode(user: Path, tmp_path: Path) -> None:
    done = pack(user, tmp_path / "raw", mode="raw", transform="mine.py:mirrored")
    packed = opening.open(done.folders[0])
    for sample, name in enumerate(names_of(packed)):
        assert bytes(packed.read([sample])[0]) == pixels((user / name).read_bytes())[:, ::-1].tobytes()
    done = pack(user, tmp_path / "png", mode="keep", transform="mine.py:as_png")
    for name, image in opened(done.folders[0]).items():
        assert image.format == "PNG"
        np.testing.assert_array_equal(np.asarray(image), pixels((user / name).read_bytes()))
    assert (opening.open(done.folders[0]).flags == FLAG_NOT_JPEG).all()
    done = pack(user, tmp_path / "jpeg", transform=lambda image, label, name: image.resize((5, 3)))
    assert {(image.format, image.size) for image in opened(done.folders[0]).values()} == {("JPEG", (5, 3))}


def test_a_transform_leaves_samples_out(user: Path, tmp_path: Path) -> None:
    done = pack(user, tmp_path / "dst", mode="keep", transform="mine.py:without_cats")
    assert (done.samples, done.skipped, done.notes) == (4, [], ("The transform left out 2 images.",))
    assert set(contents(tmp_path / "dst")) == {"cat/0.jpg", "dog/0.jpg", "dog/1.jpg", "dog/2.jpg"}
    assert done.left_out == 2
    said = headway("pack", user, tmp_path / "told", "--transform", "mine.py:without_cats").out
    assert "; the transform left out 2) into" in said
    fix = "Let it return what is to be stored: None leaves a sample out."
    with pytest.raises(DataError) as caught:
        pack(user, tmp_path / "none", transform=lambda image, label, name: None)
    assert str(caught.value) == f"{user}: the transform left out all 6 images. {fix}"
    with pytest.raises(DataError, match="the transform left out all 3 images of class 'dog'"):
        pack(user, tmp_path / "none", transform=lambda image, label, name: None if label else image)
    (user / "cat/bad.jpg").touch()
    with pytest.raises(DataError, match=r"no good image is left of class 'cat'\. Put good images into it"):
        pack(user, tmp_path / "none", transform=lambda image, label, name: image if label else None, skip_bad=True)


def test_a_failing_transform_is_the_users_own(user: Path, tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"dog/1\.jpg: the transform failed: KeyError: 'whiskers'") as caught:
        pack(user, tmp_path / "dst", transform="mine.py:failing", skip_bad=True)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(UserCodeError, match="it returned int, not an image, bytes or None"):
        pack(user, tmp_path / "dst", transform="mine.py:number")
    with pytest.raises(DataError, match="6 of 6 files are not readable images"):
        pack(user, tmp_path / "dst", transform="mine.py:broken")
    with pytest.raises(UsageError, match=r"--transform: 'mine\.py:text' is not a function"):
        pack(user, tmp_path / "dst", transform="mine.py:text")
    with pytest.raises(UsageError, match="has no 'mirored'"):
        pack(user, tmp_path / "dst", transform="mine.py:mirored")
    assert not (tmp_path / "dst").exists()


def test_a_transform_makes_another_pack(user: Path, tmp_path: Path) -> None:
    numbers = set()
    for step, transform in enumerate((None, "mine.py:mirrored", "mine.py:without_cats")):
        done = pack(user, tmp_path / str(step), mode="quality=90", transform=transform)
        numbers.add(opening.open(done.folders[0]).description.pack_id)
    assert len(numbers) == 3


# The command line


def test_the_options_of_the_command(user: Path, tmp_path: Path) -> None:
    options = ("--format", "tar", "--mode", "quality=80", "--transform", "mine.py:without_cats", "--orient")
    said = headway("pack", user, tmp_path / "dst", *options, "--json")
    result = said.json()
    assert (result["format"], result["mode"], result["samples"]) == ("tar", "quality=80", 4)
    assert "The transform left out 2 images." in said.err
    assert opening.open(tmp_path / "dst").description.format == "tar"
    said = headway("pack", user, tmp_path / "other", "--transform", "mine.py:failing", status=1)
    assert "Traceback (most recent call last):" in said.err
    assert 'raise KeyError("whiskers")' in said.err
    assert "headway: dog/1.jpg: the transform failed: KeyError: 'whiskers'." in said.err
    sentence = refused("pack", user, tmp_path / "other", "--mode", "raw,quality=3", status=2)
    assert "raw pixels have no quality" in sentence
