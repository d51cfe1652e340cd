"""Forms: what a client wrote is read unchanged, and everything else is refused with a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.export._served import build_form

from headway.http.multipart import MAX_NAME, Part, parse_boundary, parse_multipart
from headway.http.problems import ProblemError

NAMES = st.text(st.characters(codec="utf-8", exclude_characters='"\\\r\n'), min_size=1, max_size=30)


@given(
    st.lists(st.tuples(NAMES, st.binary(max_size=200)), max_size=6), st.sampled_from(["b", "----WebKit'()+_,./:=?x"])
)
def test_parts_are_read_as_they_were_written(files: list[tuple[str, bytes]], boundary: str) -> None:
    if any(f"--{boundary}".encode() in b"\r\n" + data for _, data in files):
        return
    body, content_type = build_form(*files, boundary=boundary)
    found = parse_boundary(content_type)
    if not files:
        assert parse_multipart(body, found, 9) == []
        return
    parts = parse_multipart(body, found, 9)
    assert [part.data for part in parts] == [data for _, data in files]
    for part, (name, _) in zip(parts, files, strict=True):
        assert part.name == "".join(c if c.isprintable() else "?" for c in name)
        assert part.media_type == "image/jpeg"


@given(
    st.binary(max_size=300), st.sampled_from([b"", b"--b", b"--b\r\n", b"--b\r\n\r\n", b"--b\r\nA: b\r\n\r\nx\r\n--b"])
)
def test_any_bytes_are_parsed_or_refused(data: bytes, start: bytes) -> None:
    statuses, parts = list[int](), list[Part]()
    try:
        parts = parse_multipart(start + data, b"b", 3)
    except ProblemError as problem:
        statuses.append(problem.status)
    assert set(statuses) <= {400, 413, 415}
    assert len(parts) <= 3
    assert sum(len(part.data) for part in parts) <= len(data) + len(start)


@given(st.integers(0, 400))
def test_a_form_that_is_cut_off_is_refused(cut: int) -> None:
    body, _ = build_form(("a.jpg", b"x" * 50), ("b.jpg", b"y" * 50))
    end = len(body) - len(b"--\r\n")
    if cut < end:
        with pytest.raises(ProblemError):
            parse_multipart(body[:cut], b"frontier", 9)


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary="a',
        f"boundary={'a' * 71}",
    ],
)
def test_a_boundary_that_is_none_is_refused(content_type: str) -> None:
    with pytest.raises(ProblemError) as refused:
        parse_boundary(content_type)
    assert refused.value.status == 400


def test_a_name_is_cut_and_has_no_control_characters() -> None:
    body, content_type = build_form(("\x1b[2Ja" + "b" * 999, b"x"))
    (part,) = parse_multipart(body, parse_boundary(content_type), 1)
    assert part.name.startswith("?[2Jab")
    assert len(part.name) == MAX_NAME
