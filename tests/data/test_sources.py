from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.core.errors import DataError, HeadwayError, UsageError
from headway.data.formats.folder import list_image_folder
from headway.data.formats.listing import list_file
from headway.data.formats.pack_source import ImageFiles, PackSource
from headway.data.opening import open_source, open_split


def touch(root: Path, names: Iterable[str]) -> Path:
    """Empty files: a source is listed without a look into its images."""
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def paths_of(source: PackSource) -> tuple[str, ...]:
    assert isinstance(source.images, ImageFiles)
    return source.images.paths


def labelled(source: PackSource) -> dict[str, str]:
    return {name: source.classes[label] for name, label in zip(source.names, source.labels, strict=True)}


def listing(root: Path, text: str, name: str = "labels.csv", images: str = "abc") -> Path:
    """A list of a.jpg, b.jpg, ... which are there."""
    touch(root, [f"{image}.jpg" for image in images])
    (root / name).write_bytes(text.encode())
    return root / name


def json_lines(root: Path, *entries: object) -> Path:
    return listing(root, "".join(f"{json.dumps(entry)}\n" for entry in entries), "labels.jsonl")


# Folders


def test_classes_and_images_are_in_order_of_name(tmp_path: Path) -> None:
    names = [
        "dog/b.png",
        "dog/a.JPG",
        "cat/z.jpeg",
        "cat/old/x.webp",
        "cat/old/er/y.tiff",
        "Zebra/1.bmp",
        "Zebra/2.PPM",
    ]
    source = open_source(touch(tmp_path, names))
    assert source.classes == ("Zebra", "cat", "dog")
    assert source.names == tuple(sorted(names))
    assert paths_of(source) == tuple(str(tmp_path / name) for name in source.names)
    assert labelled(source) == {name: name.split("/")[0] for name in names}
    assert source.labels.dtype == np.int64
    assert (source.label_kind, source.root, source.notes) == ("class", str(tmp_path), ())


def test_hidden_files_and_files_that_are_no_images_are_left_out(tmp_path: Path) -> None:
    names = ["cat/a.jpg", "cat/.b.jpg", "cat/README.txt", ".git/x.jpg", "cat/.ipynb_checkpoints/a.jpg", "LICENSE"]
    source = list_image_folder(touch(tmp_path, [*names, "astray.jpg"]))
    assert source.names == ("cat/a.jpg",)
    assert source.notes == (
        "left out, with no image extension: 'cat/README.txt', 'LICENSE'",
        "left out, outside class folders: 'astray.jpg'",
    )


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere", ["x.jpg"])
    root = touch(tmp_path / "root", ["cat/a.jpg"])
    (root / "dog").symlink_to(tmp_path / "elsewhere")
    (root / "cat/up").symlink_to(root / "cat")
    (root / "cat/gone.jpg").symlink_to(tmp_path / "nowhere")  # the pack names it as a file that cannot be read
    assert list_image_folder(root).names == ("cat/a.jpg", "cat/gone.jpg", "dog/x.jpg")


def test_links_that_lead_nowhere_harm_no_other_file(tmp_path: Path) -> None:
    """One of an image is kept, to be named when it is read; any other is left out."""
    root = touch(tmp_path, ["cat/a.jpg", "dog/b.jpg"])
    (root / "gone").symlink_to(tmp_path / "nowhere")
    (root / "labels.txt").symlink_to("labels.txt")  # in a circle
    (root / "cat/circle.jpg").symlink_to("circle.jpg")
    (root / "dog/notes").symlink_to(tmp_path / "nowhere")
    source = open_source(root)
    assert source.names == ("cat/a.jpg", "cat/circle.jpg", "dog/b.jpg")
    assert source.notes == ("left out, with no image extension: 'dog/notes', 'gone', 'labels.txt'",)


def test_names_that_are_no_utf8_become_text(tmp_path: Path) -> None:
    folder = touch(tmp_path, ["caf\u00e9/a.jpg"]) / "caf\u00e9"
    with open(os.fsencode(folder) + b"/\xff.jpg", "wb"):
        pass
    source = list_image_folder(tmp_path)
    assert source.names == ("caf\u00e9/\\xff.jpg", "caf\u00e9/a.jpg")
    assert all(os.path.exists(path) for path in paths_of(source))
    "".join(source.names).encode()


def test_one_class_is_enough(tmp_path: Path) -> None:
    assert list_image_folder(touch(tmp_path, ["cat/a.jpg"])).classes == ("cat",)


@pytest.mark.parametrize(
    ("names", "kind", "sentence"),
    [
        ([], UsageError, "the folder is empty. Name a folder laid out as CLASS/NAME.jpg."),
        (["README.md"], UsageError, "there is no image in this folder, only 'README.md'."),
        (["a.jpg", "b.png", "x.txt"], UsageError, "2 images are in the folder itself, so their classes are unknown."),
        (["a.jpg", "list.csv"], UsageError, "list paths and labels in a file: headway pack {root}/list.csv DST"),
        (["cat/a.jpg", "dog/README"], DataError, "class 'dog' has no image. Put images into the class folder, or"),
        (["cat/a.jpg", "dog/x", "eel/x"], DataError, "'dog', 'eel' have no image."),
        (["cat/a.txt", "b.jpg"], DataError, "no image in any of its 1 sub-folders, and 1 files are beside them."),
    ],
)
def test_a_bad_folder_gets_a_sentence(
    tmp_path: Path, names: list[str], kind: type[HeadwayError], sentence: str
) -> None:
    with pytest.raises(kind) as caught:
        open_source(touch(tmp_path, names))
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert sentence.format(root=tmp_path) in str(caught.value)


def test_what_is_no_source_gets_a_sentence(tmp_path: Path) -> None:
    touch(tmp_path, ["a.jpg"])
    with pytest.raises(UsageError, match="nowhere: there is no such file or folder"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"a\.jpg: its format is not known\. For a single image, name the folder"):
        open_source(tmp_path / "a.jpg")
    with pytest.raises(UsageError, match="the folder does not exist"):
        list_image_folder(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="cannot be read"):
        list_file(tmp_path / "nowhere.csv")


# Folders of two sets


@pytest.mark.parametrize("name", ["eval", "val", "valid", "validation", "test", "Test"])
def test_a_folder_of_two_sets(tmp_path: Path, name: str) -> None:
    train, evaluation = open_split(touch(tmp_path, ["train/cat/a.jpg", f"{name}/cat/b.jpg", "README"]))
    assert evaluation is not None
    assert (train.names, evaluation.names) == (("cat/a.jpg",), ("cat/b.jpg",))
    assert train.notes == ()


def test_of_several_evaluation_sets_the_first_is_taken(tmp_path: Path) -> None:
    names = ["train/cat/a.jpg", "val/cat/b.jpg", "test/c.jpg", "more/d.jpg"]
    train, evaluation = open_split(touch(tmp_path, names))
    assert evaluation is not None
    assert evaluation.names == ("cat/b.jpg",)
    assert train.notes == ("not packed: more, test",)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for number, names in enumerate(
        (
            ["train/a.jpg", "test/b.jpg"],
            ["train/old/x.jpg", "plane/x.jpg"],
            ["train/a.jpg", "train/old/x.jpg", "test/new/x.jpg"],
        )
    ):
        root = touch(tmp_path / str(number), names)
        train, evaluation = open_split(root)
        assert evaluation is None
        assert "train" in train.classes


def test_a_training_set_without_an_evaluation_set_is_no_class(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"headway pack .*/one/train DST --split 0.1"):
        open_split(touch(tmp_path / "one", ["train/cat/a.jpg"]))
    with pytest.raises(UsageError, match="test has no class folders"):
        open_split(touch(tmp_path / "flat", ["train/cat/a.jpg", "test/a.jpg"]))
    assert open_split(listing(tmp_path, "path,label\na.jpg,cat\n"))[1] is None


# Lists


def test_a_csv_of_class_names(tmp_path: Path) -> None:
    text = '\ufeffpath, label,year\r\nb.jpg,dog,1\r\n\r\n"a.jpg","cat, big",2\r\nsub/../c.jpg, dog ,3\r\n'
    source = open_source(listing(tmp_path, text))
    assert source.names == ("b.jpg", "a.jpg", "sub/../c.jpg")
    assert paths_of(source) == tuple(str(tmp_path / f"{name}.jpg") for name in "bac")
    assert labelled(source) == {"b.jpg": "dog", "a.jpg": "cat, big", "sub/../c.jpg": "dog"}
    assert (source.label_kind, source.classes) == ("class", ("cat, big", "dog"))
    assert source.notes == ("columns not used: year",)
    assert source.root == str(tmp_path)


def test_json_lines_of_class_names(tmp_path: Path) -> None:
    entries = [{"path": "a.jpg", "label": "dog"}, {"label": 7, "path": str(tmp_path / "b.jpg")}]
    source = open_source(json_lines(tmp_path, *entries))
    assert source.names == ("a.jpg", str(tmp_path / "b.jpg"))
    assert source.classes == ("7", "dog")
    np.testing.assert_array_equal(source.labels, [1, 0])


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_several_labels(tmp_path: Path, kind: str) -> None:
    if kind == "csv":
        path = listing(tmp_path, "labels,path\nred; round,a.jpg\n,b.jpg\nround;,c.jpg\n")
    else:
        rows = {"a": ["red", "round"], "b": [], "c": ["round"]}
        path = json_lines(tmp_path, *({"path": f"{name}.jpg", "labels": row} for name, row in rows.items()))
    source = list_file(path)
    assert (source.label_kind, source.classes, source.labels.dtype) == ("multi", ("red", "round"), np.float32)
    np.testing.assert_array_equal(source.labels, [[1, 1], [0, 0], [0, 1]])


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_number(tmp_path: Path, kind: str) -> None:
    if kind == "csv":
        path = listing(tmp_path, "path,value\na.jpg,1e3\nb.jpg, -0.5\nc.jpg,7\n")
    else:
        rows = {"a": 1e3, "b": -0.5, "c": 7}
        path = json_lines(tmp_path, *({"path": f"{name}.jpg", "value": row} for name, row in rows.items()))
    source = list_file(path)
    assert (source.label_kind, source.classes, source.labels.dtype) == ("value", (), np.float32)
    np.testing.assert_array_equal(source.labels, [1000, -0.5, 7])


def test_several_numbers(tmp_path: Path) -> None:
    source = list_file(listing(tmp_path, "path,value_y,value_x\na.jpg,1,2\nb.jpg,3,4\nc.jpg,5,6\n"))
    assert (source.label_kind, source.classes, source.labels.dtype) == ("value", ("y", "x"), np.float32)
    np.testing.assert_array_equal(source.labels, [[1, 2], [3, 4], [5, 6]])
    source = list_file(json_lines(tmp_path, {"path": "a.jpg", "value": [1, 2.5]}, {"path": "b.jpg", "value": [3, 4]}))
    assert (source.label_kind, source.classes) == ("value", ("0", "1"))
    np.testing.assert_array_equal(source.labels, np.array([[1, 2.5], [3, 4]], np.float32))
    source = list_file(listing(tmp_path, "path,value_y\na.jpg,1\n"))
    assert source.labels.shape == (1, 1)


rows_of_text = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(str.strip), min_size=1, max_size=3
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(classes=rows_of_text)
def test_any_class_name_comes_through_json_lines(tmp_path: Path, classes: list[str]) -> None:
    entries = [{"path": f"{name}.jpg", "label": label} for name, label in zip("abc", classes, strict=False)]
    assert list(labelled(list_file(json_lines(tmp_path, *entries))).values()) == [name.strip() for name in classes]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", ": the file lists no images. The first line of a CSV names its columns"),
        ("path,label\n", ": the file lists no images."),
        ("a.jpg,cat\nb.jpg,dog\n", ", line 1: there is no column 'path' (found: 'a.jpg', 'cat'). The first line"),
        (
            "path;label\na.jpg;cat\n",
            ", line 1: there is no column 'path' (found: 'path;label'). Separate the columns with",
        ),
        ("path,class\na.jpg,cat\n", ", line 1: there is no column of labels (found: 'path', 'class')."),
        ("path,label,value\na.jpg,cat,3\n", ", line 1: 'label' and 'value' are both labels. Keep one kind"),
        ("path,value,value_x\na.jpg,1,3\n", ", line 1: 'value' and 'value_x' are both labels."),
        ("path,label,path\na.jpg,cat,a.jpg\n", ", line 1: column 'path' occurs twice."),
        ("path,label\na.jpg,cat\nb.jpg\n", ", line 3: the line has 1 fields and the header 2."),
        (
            "path,label\na.jpg,cat,big\n",
            ", line 2: the line has 3 fields and the header 2. Put a text that holds a comma",
        ),
        ('path,label\na.jpg,"cat\nb.jpg,dog\n', ", line 3: this is not valid CSV (unexpected end of data)"),
        ("path,label\na.jpg,cat\nb.jpg, \n", ", line 3: the label is ' ', which is not a class name."),
        ("path,labels\na.jpg,\nb.jpg,;\n", ": no image has a label."),
        ("path,value\na.jpg,1\nb.jpg,two\n", ", line 3: the value is 'two', which is not a finite number"),
        ("path,value\na.jpg,nan\n", ", line 2: the value is 'nan', which is not a finite number"),
        ("path,value\na.jpg,1e39\n", ", line 2: the value is '1e39', which is not a finite number (float32)"),
        ("path,value\na.jpg,1_0\n", ", line 2: the value is '1_0', which is not a finite number"),
        ("path,value_x,value_y\na.jpg,1,2\nb.jpg,3,\n", ", line 3: the value is '', which is not a finite number"),
        (
            "path,label\na.jpg,cat\nx.jpg,cat\ny.jpg,dog\n",
            ", line 3: there is no file 'x.jpg' (2 such paths in all). Paths",
        ),
        ("path,label\n,cat\n", ", line 2: the path is empty or not text"),
        ("path,label\na.jpg,cat\nb.jpg,cat\n./a.jpg,dog\n", ", line 4: './a.jpg' was named before, in line 2."),
        ("path,label\na.jpg,c\0t\n", ", line 2: this is not UTF-8 text. Save the file as UTF-8."),
    ],
)
def test_a_bad_csv_gets_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = listing(tmp_path, text)
    with pytest.raises(DataError) as caught:
        list_file(path)
    assert str(caught.value).startswith(f"{path}{sentence}")


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_another_encoding_gets_a_sentence(tmp_path: Path, encoding: str) -> None:
    path = listing(tmp_path, "")
    path.write_bytes("path,label\na.jpg,caf\u00e9\n".encode(encoding))
    with pytest.raises(DataError, match=r"labels\.csv, line \d: this is not UTF-8 text. Save the file as UTF-8"):
        list_file(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[{"path": "a.jpg", "label": "cat"}]\n', ", line 1: this is not a JSON object. Write one JSON object a line"),
        (
            '[\n{"path": "a.jpg", "label": "cat"}]\n',
            ", line 1: this is not a line of JSON: it is not JSON (Expecting value",
        ),
        ("{path: a.jpg}\n", ", line 1: this is not a line of JSON: it is not JSON (Expecting property name"),
        ("[" * 100_000, ", line 1: this is not a line of JSON: it is nested too deeply"),
        (
            '\n{"path": "a.jpg", "path": "b.jpg", "label": "cat"}',
            ", line 2: this is not a line of JSON: it has 'path' twice.",
        ),
        ('{"path": "a.jpg", "label": "cat"}\n{"path": "b.jpg"}', ", line 2: there is no column of labels"),
        (
            '{"path": "a.jpg", "label": "cat"}\n{"path": "b.jpg", "value": 3}',
            ", line 2: here 'value' is the label, in the lines above 'label'",
        ),
        ('{"path": 3, "label": "cat"}', ", line 1: the path is empty or not text"),
        ('{"path": "\\ud800", "label": "cat"}', ", line 1: this is not a line of JSON: 'utf-8' codec"),
        ('{"path": "a.jpg", "label": null}', ", line 1: the label is None, which is not a class name."),
        ('{"path": "a.jpg", "label": true}', ", line 1: the label is True, which is not a class name."),
        ('{"path": "a.jpg", "labels": "cat"}', ", line 1: labels are 'cat', which is not a list"),
        ('{"path": "a.jpg", "value": NaN}', ", line 1: the value is nan, which is not a finite number"),
        ('{"path": "a.jpg", "value": true}', ", line 1: the value is True, which is not a finite number"),
        ('{"path": "a.jpg", "value": 1' + "0" * 400 + "}", "which is not a finite number"),
        (
            '{"path": "a.jpg", "value": [1, 2]}\n{"path": "b.jpg", "value": [1]}',
            ", line 2: the value is [1], which is not a list of numbers as long as the first line's",
        ),
        ('{"path": "a.jpg", "value": []}', ", line 1: the value is [], which is not a list of numbers"),
    ],
)
def test_bad_json_lines_get_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = listing(tmp_path, text, "labels.jsonl")
    with pytest.raises(DataError) as caught:
        list_file(path)
    assert str(caught.value).startswith(f"{path}, line ")
    assert sentence in str(caught.value)
