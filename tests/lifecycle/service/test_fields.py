"""Headers: structured fields, entity tags, digests. What is malformed is refused with 400 and a sentence."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.http.problems import ProblemError
from headway.lifecycle.service import structured_fields as fields
from headway.lifecycle.service.digests import choose_answer_digest, format_digest, read_checksum, read_digest
from headway.lifecycle.service.problems import KINDS, refuse

RIGHT = f"sha-256=:{base64.b64encode(hashlib.sha256(b'a').digest()).decode()}:"


@given(st.integers(0, 10**15 - 1))
def test_a_number_is_read_back(number: int) -> None:
    assert fields.parse_integer("N", str(number)) == number


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1))
def test_a_string_is_read_back(text: str) -> None:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    assert fields.parse_string("S", f'"{quoted}"') == text


@given(st.binary(max_size=70))
def test_bytes_are_read_back(data: bytes) -> None:
    assert fields.parse_bytes("D", f"a=::, {fields.format_bytes('x', data)}") == {"a": b"", "x": data}


@pytest.mark.parametrize("text", ["", "-1", "1.0", "1e3", "\uff10", "1" * 16, "0x10"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ProblemError, match="N: ") as refused:
        fields.parse_integer("N", text)
    assert refused.value.status == 400


@pytest.mark.parametrize("text", ["", '""', "abc", '"a', 'a"', '"a"b"', '"\x07"', '"ä"', '"a\\b"'])
def test_what_is_no_string_is_refused(text: str) -> None:
    with pytest.raises(ProblemError):
        fields.parse_string("S", text)


@pytest.mark.parametrize("text", ["", "1", "true", "?2", "? 1"])
def test_what_is_no_truth_value_is_refused(text: str) -> None:
    with pytest.raises(ProblemError):
        fields.parse_boolean("B", text)


def test_a_missing_header_is_none() -> None:
    assert fields.parse_integer("N", None) is None
    assert fields.parse_boolean("B", None) is None
    assert fields.parse_string("S", None) is None
    assert fields.parse_tags("T", None) is None
    assert fields.parse_bytes("D", None) == {}


def test_weak_tags_match_nothing() -> None:
    assert fields.parse_tags("If-Match", '"a", W/"b", "c"') == ("a", "c")
    assert fields.parse_tags("If-Match", " * ") == ("*",)
    for text in ("", "a", '"a', '"a" "b"'):
        with pytest.raises(ProblemError):
            fields.parse_tags("If-Match", text)


def test_a_digest_is_checked() -> None:
    expected = read_digest("Repr-Digest", f"md5=:AAAA:, {RIGHT}")
    assert expected is not None
    expected.check(hashlib.sha256(b"a").digest())
    with pytest.raises(ProblemError) as refused:
        expected.check(hashlib.sha256(b"b").digest())
    assert refused.value.status == 400
    assert read_digest("Repr-Digest", "md5=:AAAA:") is None
    for text in ("sha-256=abc", "sha-256=:AAAA:", "sha-256=:A:", ""):
        with pytest.raises(ProblemError):
            read_digest("Repr-Digest", text)


def test_the_checksum_of_tus_is_checked() -> None:
    right = base64.b64encode(hashlib.sha1(b"a").digest()).decode()
    expected = read_checksum(f"sha1 {right}")
    assert expected is not None
    with pytest.raises(ProblemError) as refused:
        expected.check(hashlib.sha1(b"b").digest())
    assert refused.value.status == 460
    assert b'"status": 460' in refused.value.to_json()
    for text in ("sha1", "md5 AAAA", "sha1 AAAA", "sha1 ä"):
        with pytest.raises(ProblemError):
            read_checksum(text)


def test_the_client_chooses_the_digest_of_an_answer() -> None:
    assert choose_answer_digest({}) == "sha-256"
    assert choose_answer_digest({"want-repr-digest": "sha-512=3, sha-256=1"}) == "sha-512"
    assert choose_answer_digest({"want-repr-digest": "sha-256=0"}) is None
    assert choose_answer_digest({"want-repr-digest": "md5=10"}) is None
    with pytest.raises(ProblemError):
        choose_answer_digest({"want-repr-digest": "sha-256=11"})
    assert format_digest("sha-256", b"a") == RIGHT


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_problem_can_be_sent(kind: str) -> None:
    tree = refuse(kind, "it is so", "Mend it.", errors=[("/0", "It is wrong.")]).to_tree()
    assert tree["detail"] == "it is so. Mend it."
    assert tree["status"] == KINDS[kind].status
    assert tree["errors"] == [{"pointer": "/0", "detail": "It is wrong."}]
    assert KINDS[kind].text or KINDS[kind].type


@pytest.mark.parametrize(
    ("text", "is_known"),
    [
        (None, False),
        ('"a"', True),
        ('W/"a"', True),
        ('"b", W/"a" , "c"', True),
        ("*", True),
        ('"b"', False),
        ('"aa"', False),
        ("a", False),
        ("", False),
    ],
)
def test_a_tag_is_found_in_if_none_match(text: str | None, is_known: bool) -> None:
    assert fields.matches_tag(text, "a") is is_known


@pytest.mark.parametrize(
    ("accept", "is_preferred"),
    [
        (None, False),
        ("*/*", False),
        ("application/json", False),
        ("application/ld+json", True),
        ("application/ld+json, application/json", False),
        ("application/ld+json, application/json;q=0.5", True),
        ("application/*;q=0.5, Application/LD+JSON", True),
        ("text/html, application/ld+json;q=0.1, */*;q=0.2", False),
        ("application/ld+json;profile=x;q=0.9, */*;q=0.8", True),
        ("q=1;;,", False),
    ],
)
def test_the_narrowest_range_of_accept_counts(accept: str | None, is_preferred: bool) -> None:
    assert fields.prefers(accept, "application/ld+json", "application/json") is is_preferred
