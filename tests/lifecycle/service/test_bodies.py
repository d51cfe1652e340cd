"""Bodies: what a form, a tar file and JSON ask for, and what of them is refused before anything is stored."""

from __future__ import annotations

import io
import json
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lifecycle.service._service import build_tar

from headway.http.multipart import parse_multipart, split_multipart
from headway.http.problems import ProblemError
from headway.lifecycle.service import bodies
from headway.lifecycle.service.bodies import FileBytes, Proposal, parse_body
from headway.lifecycle.service.settings import ServiceSettings

USUAL = ServiceSettings()


def parse(folder: Path, body: bytes, content_type: str, **limits: Any) -> Proposal:
    (folder / "body").write_bytes(body)
    return parse_body(folder / "body", content_type, ServiceSettings(**limits))


def refuse(folder: Path, body: bytes, content_type: str, status: int, **limits: Any) -> dict[str, Any]:
    with pytest.raises(ProblemError) as refused:
        parse(folder, body, content_type, **limits)
    assert refused.value.status == status, refused.value.to_tree()
    return refused.value.to_tree()


def form(*parts: tuple[str, str, bytes]) -> bytes:
    """A form of (field, file name, bytes)."""
    pieces = list[bytes]()
    for field, name, data in parts:
        named = f'; filename="{name}"' if name else ""
        pieces.append(f'--x\r\nContent-Disposition: form-data; name="{field}"{named}\r\n\r\n'.encode() + data + b"\r\n")
    return b"".join(pieces) + b"--x--\r\n"


FORM = "multipart/form-data; boundary=x"
TAR = "application/x-tar"
JSON = "application/json"


@given(
    data=st.binary(max_size=60),
    needle=st.binary(min_size=1, max_size=4),
    start=st.integers(0, 70),
    window=st.integers(4, 9),
)
def test_a_file_is_searched_as_bytes_are(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, needle: bytes, start: int, window: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "searched"
    path.write_bytes(data)
    before, bodies._FIND_BYTES = bodies._FIND_BYTES, window
    try:
        with FileBytes(path) as found:
            assert found.find(needle, start) == data.find(needle, start)
            assert found.find(needle, start, 30) == data.find(needle, start, 30)
            assert found[start : start + 5] == data[start : start + 5]
            assert len(found) == len(data)
    finally:
        bodies._FIND_BYTES = before


@given(st.lists(st.binary(max_size=20), max_size=4))
def test_a_form_in_a_file_has_the_parts_of_one_in_memory(parts: list[bytes]) -> None:
    body = form(*(("image", f"{place}.jpg", data) for place, data in enumerate(parts))) if parts else b"--x--"
    if any(b"\r\n--x" in b"\r\n" + part for part in parts):
        return
    assert [one.data for one in parse_multipart(body, b"x", 9)] == parts
    assert [body[one.start : one.end] for one in split_multipart(body, b"x", 9)] == parts


def test_a_form_says_more_about_its_files(tmp_path: Path) -> None:
    changes = json.dumps(
        [
            {"op": "add", "name": "b.jpg", "label": "dog", "split": "eval", "by": "anna"},
            {"op": "label", "name": "old.jpg", "label": None},
        ]
    ).encode()
    body = form(("image", "a.jpg", b"AA"), ("changes", "", changes), ("image", "b.jpg", b"BBB"))
    rows = parse(tmp_path, body, FORM).rows
    assert [(row.op, row.name, row.label, row.split, row.by) for row in rows] == [
        ("add", "b.jpg", "dog", "eval", "anna"),
        ("label", "old.jpg", None, "", ""),
        ("add", "a.jpg", None, "", ""),
    ]
    assert [body[row.start : row.end] for row in rows if row.has_file] == [b"BBB", b"AA"]


@pytest.mark.parametrize("name", ["../a.jpg", "/etc/passwd", "a/../b.jpg", "a//b.jpg", "a\tb.jpg", "..", "a" * 2000])
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    refuse(tmp_path, form(("image", name, b"A")), FORM, 422)
    refuse(tmp_path, build_tar({name: b"A"}), TAR, 422)
    tree = refuse(tmp_path, json.dumps([{"op": "remove", "name": name}]).encode(), JSON, 422)
    assert tree["errors"][0]["pointer"] == "/0/name"


def test_equal_names_have_equal_bytes(tmp_path: Path) -> None:
    rows = parse(tmp_path, build_tar({"cafe\u0301.jpg": b"A"}), TAR).rows
    assert rows[0].name == "caf\u00e9.jpg"


def test_a_form_is_refused_if_its_files_and_changes_disagree(tmp_path: Path) -> None:
    missing = json.dumps([{"op": "add", "name": "b.jpg"}]).encode()
    tree = refuse(tmp_path, form(("changes", "", missing)), FORM, 422)
    assert tree["errors"][0]["pointer"] == "/changes/0/name"
    refuse(tmp_path, form(("image", "a.jpg", b"A"), ("image", "a.jpg", b"B")), FORM, 422)
    refuse(tmp_path, form(("image", "", b"A")), FORM, 400)
    refuse(tmp_path, form(("changes", "", b"[]"), ("changes", "", missing)), FORM, 422)
    refuse(tmp_path, form(("changes", "", missing), ("changes", "", missing)), FORM, 400)
    refuse(tmp_path, b"--y--", FORM, 400)
    refuse(tmp_path, b"--x--", "multipart/form-data", 400)
    refuse(tmp_path, form(*(("image", f"{n}.jpg", b"A") for n in range(5))), FORM, 413, files=3)


def test_a_tar_file_has_images_and_their_labels(tmp_path: Path) -> None:
    files = {
        "./a/1.jpg": b"one",
        "a/1.cls": b"cat\n",
        "a/2.png": b"two",
        "a/2.json": b'{"label": 7}',
        "a/3.jpg": b"three",
        "a/4.jpg": b"four",
        "a/4.json": b'{"caption": "none"}',
        "notes.pdf": b"left out",
    }
    body = build_tar(files)
    found = parse(tmp_path, body, TAR)
    assert [(row.name, row.label, body[row.start : row.end]) for row in found.rows] == [
        ("a/1.jpg", "cat", b"one"),
        ("a/2.png", "7", b"two"),
        ("a/3.jpg", None, b"three"),
        ("a/4.jpg", None, b"four"),
    ]
    assert found.files == 4
    assert found.rejected.listed == [("notes.pdf", "is neither an image nor a label")]


def special(kind: bytes, name: str = "a.jpg") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    return file.getvalue()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    tree = refuse(tmp_path, special(kind), TAR, 422)
    assert "a.jpg" in tree["detail"]


def test_folders_are_left_out(tmp_path: Path) -> None:
    assert parse(tmp_path, special(tarfile.DIRTYPE, "a"), TAR).rows == []


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    whole = build_tar({"a.jpg": bytes(5000)})
    sizes = bytearray(whole)
    sizes[124:136] = b"77777777777\0"
    for body in (b"", b"no archive" * 100, whole[:2000], bytes(sizes), whole[:512]):
        refuse(tmp_path, body, TAR, 422)
    refuse(tmp_path, build_tar({"a.jpg": b"A", "a.cls": b"\xff"}), TAR, 422)
    refuse(tmp_path, build_tar({"a.jpg": b"A", "a.json": b"[" * 100}), TAR, 422)
    refuse(tmp_path, build_tar({f"{n}.jpg": b"A" for n in range(5)}), TAR, 413, files=3)


@given(st.data())
def test_a_changed_archive_never_fails_otherwise(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    body = bytearray(build_tar({"a/1.jpg": b"one", "a/1.cls": b"cat", "x" * 150: b"long"}))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "changed"
    path.write_bytes(body)
    # Any other error fails the test.
    with suppress(ProblemError):
        parse_body(path, TAR, USUAL)


BAD_CHANGES: list[tuple[Any, str]] = [
    (5, ""),
    ({}, "/op"),
    ({"op": "drop", "name": "a"}, "/op"),
    ({"op": "add"}, ""),
    ({"op": "label", "name": "a"}, ""),
    ({"op": "move", "name": "a"}, ""),
    ({"op": "remove"}, ""),
    ({"op": "remove", "sha256": "A" * 64}, "/sha256"),
    ({"op": "remove", "name": "a", "colour": 1}, "/colour"),
    ({"op": "label", "name": "a", "label": 5}, "/label"),
    ({"op": "label", "name": "a", "label": "x" * 2000}, "/label"),
    ({"op": "label", "name": "a", "label": "a\u202eb"}, "/label"),
    ({"op": "remove", "name": "a", "by": "\ud800"}, "/by"),
]


@pytest.mark.parametrize(("change", "pointer"), BAD_CHANGES)
def test_a_wrong_change_is_named(tmp_path: Path, change: Any, pointer: str) -> None:
    good = {"op": "remove", "name": "b.jpg"}
    tree = refuse(tmp_path, json.dumps([good, change]).encode(), JSON, 422)
    assert {one["pointer"] for one in tree["errors"]} >= {f"/1{pointer}"}


def test_a_list_of_changes_cannot_add_a_file(tmp_path: Path) -> None:
    rows = [{"op": "remove", "name": "a.jpg"}, {"op": "add", "name": "b.jpg"}]
    tree = refuse(tmp_path, json.dumps(rows).encode(), JSON, 422)
    assert [one["pointer"] for one in tree["errors"]] == ["/1/sha256"]


def test_json_of_another_form_is_refused(tmp_path: Path) -> None:
    for body in (b"", b"{}", b"[", b"[" * 100 + b"]" * 100, b'[{"op": "add", "op": "add"}]', b"\xff", b"[NaN"):
        refuse(tmp_path, body, JSON, 400)
    refuse(tmp_path, b"[]" + b" " * 100, JSON, 413, json_bytes=50)
    many = json.dumps([{}] * 1000).encode()
    assert len(refuse(tmp_path, many, JSON, 422)["errors"]) == bodies.MAX_ERRORS


@pytest.mark.parametrize("content_type", ["", "text/plain", "image/svg+xml", "application/partial-upload", "x" * 200])
def test_another_type_is_refused(tmp_path: Path, content_type: str) -> None:
    refuse(tmp_path, b"", content_type, 415)
