"""Resumable uploads: a client of the IETF draft and one of tus, written from their texts, at a real server."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
import time
from collections.abc import Iterator

import pytest
from tests.lifecycle.service._service import (
    WAIT_S,
    Reply,
    Served,
    check_problem,
    create,
    draw_tar,
    key,
    serving_data,
)

PARTIAL = "application/partial-upload"
TUS = {"Tus-Resumable": "1.0.0"}
TUS_TYPE = {"Content-Type": "application/offset+octet-stream"}
BODY = draw_tar(0, 4)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_data(tmp_path_factory.mktemp("uploads") / "store", "--body-mb", "1") as found:
        create(found, "cars")
        yield found
        status, err = found.stop()
        assert status == 0, err
        assert "Traceback" not in err


def begin(served: Served, body: bytes = b"", **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    usual = {"Content-Type": "application/x-tar", "Upload-Complete": "?0"}
    return served.ask("POST", "/datasets/cars", body, usual | named)


def patch(served: Served, place: str, offset: int, body: bytes, complete: str = "?0", **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    usual = {"Content-Type": PARTIAL, "Upload-Offset": str(offset), "Upload-Complete": complete}
    return served.ask("PATCH", place, body, usual | named)


def encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def digest(data: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


def cut(served: Served, method: str, path: str, headers: dict[str, str], body: bytes, length: int) -> None:
    """Sends the beginning of a request's body, and closes the connection."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection(served.address, WAIT_S) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + body)


def test_an_upload_in_parts_answers_as_the_post_would_have(served: Served) -> None:
    first = begin(served, BODY[:100], Upload_Length=str(len(BODY)), Repr_Digest=digest(BODY))
    assert first.status == 201
    assert first.headers["upload-complete"] == "?0"
    assert first.headers["upload-offset"] == "100"
    assert "max-size=1048576" in first.headers["upload-limit"]
    place = first.headers["location"]
    # Cut: what came is kept.
    cut(
        served,
        "PATCH",
        place,
        {"Content-Type": PARTIAL, "Upload-Offset": "100", "Upload-Complete": "?0"},
        BODY[100:700],
        5000,
    )
    while (head := served.ask("HEAD", place)).headers["upload-offset"] != "700":
        time.sleep(0.02)
    assert head.status == 204
    assert head.headers["upload-complete"] == "?0"
    assert head.headers["upload-length"] == str(len(BODY))
    assert head.headers["cache-control"] == "no-store"
    wrong = patch(served, place, 100, BODY[100:])
    tree = check_problem(wrong, 409, "#mismatching-upload-offset")
    assert (wrong.headers["upload-offset"], tree["expected-offset"], tree["provided-offset"]) == ("700", 700, 100)
    middle = patch(served, place, 700, BODY[700:1000], Content_Digest=digest(BODY[700:1000]))
    assert (middle.status, middle.headers["upload-offset"], middle.headers["upload-complete"]) == (204, "1000", "?0")
    last = patch(served, place, 1000, BODY[1000:], "?1")
    assert last.status in (200, 201), last.body
    assert last.headers["upload-complete"] == "?1"
    assert last.json()["added"] + last.json()["duplicates"] == 4
    assert "location" in last.headers or last.status == 200
    head = served.ask("HEAD", place)
    assert (head.headers["upload-complete"], head.headers["upload-offset"]) == ("?1", str(len(BODY)))
    # A client that has not got the answer asks for it.
    assert served.ask("GET", place).json()["answer"]["body"] == last.json()
    check_problem(patch(served, place, len(BODY), b"", "?1"), 400, "#completed-upload")
    assert served.ask("DELETE", place).status == 204
    check_problem(served.ask("GET", place), 404, "/problems/not-found")


def test_lengths_that_contradict_are_refused(served: Served) -> None:
    place = begin(served, Upload_Length="1000").headers["location"]
    check_problem(patch(served, place, 0, b"x" * 500, "?1"), 400, "#inconsistent-upload-length")
    check_problem(patch(served, place, 0, b"x", Upload_Length="7"), 400, "#inconsistent-upload-length")
    check_problem(patch(served, place, 0, b"x" * 1001), 400, "#inconsistent-upload-length")
    assert served.ask("HEAD", place).headers["upload-offset"] == "0"
    check_problem(begin(served, Upload_Length="1048577"), 413, "/problems/too-large")
    check_problem(begin(served, Upload_Length="10737418240"), 413, "/problems/too-large")
    unknown = begin(served).headers["location"]
    assert "upload-length" not in served.ask("HEAD", unknown).headers
    served.ask("DELETE", place)
    served.ask("DELETE", unknown)


def test_malformed_requests_are_refused(served: Served) -> None:
    place = begin(served, Upload_Length="10").headers["location"]
    reply = served.ask(
        "PATCH", place, b"x", {"Content-Type": "text/plain", "Upload-Offset": "0", "Upload-Complete": "?0"}
    )
    check_problem(reply, 415, "/problems/wrong-type")
    assert PARTIAL in reply.headers["accept-patch"]
    for headers in ({}, {"Upload-Offset": "x", "Upload-Complete": "?0"}, {"Upload-Offset": "0"}):
        check_problem(served.ask("PATCH", place, b"x", {"Content-Type": PARTIAL} | headers), 400, "/problems/malformed")
    check_problem(patch(served, place, 0, b"x", "yes"), 400, "/problems/malformed")
    check_problem(patch(served, place, 0, b"x", Content_Digest=digest(b"y")), 400, "/problems/wrong-digest")
    check_problem(begin(served, Content_Type="text/plain"), 415, "/problems/wrong-type")
    check_problem(begin(served, Upload_Complete="0"), 400, "/problems/malformed")
    assert served.ask("HEAD", place).headers["upload-offset"] == "0"
    assert served.ask("DELETE", place).status == 204


def test_a_wrong_digest_of_the_whole_leaves_nothing(served: Served) -> None:
    place = begin(served, BODY[:10], Upload_Length=str(len(BODY)), Repr_Digest=digest(b"other")).headers["location"]
    check_problem(patch(served, place, 10, BODY[10:], "?1"), 400, "/problems/wrong-digest")
    check_problem(served.ask("GET", place), 404, "/problems/not-found")


def test_an_upload_that_is_refused_at_its_end_can_be_asked_again(served: Served) -> None:
    place = begin(served, Upload_Length=str(len(BODY)), If_Match='"stale"').headers["location"]
    check_problem(patch(served, place, 0, BODY, "?1"), 412, "/problems/head-moved")
    assert served.ask("HEAD", place).headers["upload-complete"] == "?0"
    again = patch(served, place, len(BODY), b"", "?1", If_Match="*")
    assert again.status in (200, 201)


def test_two_uploads_with_one_key_are_one_request(served: Served) -> None:
    body, usual = draw_tar(20, 2), key()
    answers = list[Reply]()
    for _ in range(2):
        place = begin(served, Upload_Length=str(len(body)), Idempotency_Key=usual["Idempotency-Key"]).headers[
            "location"
        ]
        answers.append(patch(served, place, 0, body, "?1"))
    assert answers[0].status == 201
    assert answers[0].body == answers[1].body


def test_a_hanging_request_is_ended_by_a_newer_one(served: Served) -> None:
    place = begin(served, Upload_Length=str(len(BODY))).headers["location"]
    head = f"PATCH {place} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {PARTIAL}\r\n"
    head += "Upload-Offset: 0\r\nUpload-Complete: ?1\r\n"
    with socket.create_connection(served.address, WAIT_S) as client:
        client.sendall(f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:300])
        # The server may not have read them yet: each HEAD ends the request that is there, and says what came.
        while served.ask("HEAD", place).headers["upload-offset"] == "0":
            time.sleep(0.02)
        answer = client.recv(4096)
        assert answer.startswith(b"HTTP/1.1 409 "), answer
    offset = int(served.ask("HEAD", place).headers["upload-offset"])
    assert patch(served, place, offset, BODY[offset:], "?1").status in (200, 201)


def test_tus_uploads_with_other_names(served: Served) -> None:
    body = draw_tar(30, 3)
    meta = {"Upload-Metadata": f"filename {encode('a.tar')},filetype {encode('application/x-tar')}"}
    first = served.ask("POST", "/datasets/cars", b"", TUS | meta | {"Upload-Length": str(len(body))})
    assert first.status == 201
    assert first.headers["tus-resumable"] == "1.0.0"
    place = first.headers["location"]
    sha1 = base64.b64encode(hashlib.sha1(body[:500]).digest()).decode()
    wrong = served.ask(
        "PATCH", place, body[:400], TUS | TUS_TYPE | {"Upload-Offset": "0", "Upload-Checksum": f"sha1 {sha1}"}
    )
    check_problem(wrong, 460, "/problems/checksum")
    assert wrong.headers["tus-resumable"] == "1.0.0"
    part = served.ask(
        "PATCH", place, body[:500], TUS | TUS_TYPE | {"Upload-Offset": "0", "Upload-Checksum": f"sha1 {sha1}"}
    )
    assert (part.status, part.headers["upload-offset"]) == (204, "500")
    head = served.ask("HEAD", place, headers=TUS)
    assert (head.status, head.headers["upload-offset"], head.headers["upload-length"]) == (200, "500", str(len(body)))
    assert head.headers["cache-control"] == "no-store"
    stale = served.ask("PATCH", place, body, TUS | TUS_TYPE | {"Upload-Offset": "0"})
    check_problem(stale, 409, "#mismatching-upload-offset")
    last = served.ask("PATCH", place, body[500:], TUS | TUS_TYPE | {"Upload-Offset": "500"})
    assert (last.status, last.headers["upload-offset"]) == (204, str(len(body)))
    version = last.headers["etag"]
    assert served.ask("GET", "/datasets/cars").headers["etag"] == version
    # The two protocols are faces of one state.
    assert served.ask("GET", place).json()["answer"]["status"] == 201
    assert served.ask("DELETE", place, headers=TUS).status == 204


def test_tus_of_another_version_or_without_a_length_is_refused(served: Served) -> None:
    reply = served.ask("POST", "/datasets/cars", b"", {"Tus-Resumable": "0.2.2", "Upload-Length": "5"})
    check_problem(reply, 412, "/problems/tus-version")
    assert reply.headers["tus-version"] == "1.0.0"
    meta = {"Upload-Metadata": f"filename {encode('a.tar')}"}
    check_problem(served.ask("POST", "/datasets/cars", b"", TUS | meta), 400, "/problems/malformed")
    many = served.ask("POST", "/datasets/cars", b"", TUS | meta | {"Upload-Length": "99999999"})
    check_problem(many, 413, "/problems/too-large")
    for wrong, status in (("filetype", 415), ("filetype ###", 400), (f"filetype {encode('text/html')}", 415)):
        reply = served.ask("POST", "/datasets/cars", b"", TUS | {"Upload-Metadata": wrong, "Upload-Length": "5"})
        check_problem(reply, status, "")
    options = served.ask("OPTIONS", "/datasets/cars")
    assert options.status == 204
    assert options.headers["tus-version"] == "1.0.0"
    assert {"creation", "checksum", "termination"} <= set(options.headers["tus-extension"].split(","))
    assert options.headers["tus-max-size"] == "1048576"
    assert "sha1" in options.headers["tus-checksum-algorithm"].split(",")


def test_tus_brings_the_bytes_with_its_creation(served: Served) -> None:
    body = draw_tar(40, 1)
    meta = {"Upload-Metadata": f"filename {encode('a.tar')}", "Upload-Length": str(len(body))}
    reply = served.ask("POST", "/datasets/cars", body, TUS | TUS_TYPE | meta)
    assert (reply.status, reply.headers["upload-offset"]) == (201, str(len(body)))
    assert served.ask("GET", reply.headers["location"]).json()["answer"]["body"]["added"] == 1


@pytest.mark.check
def test_too_many_unfinished_uploads_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving_data(tmp_path_factory.mktemp("many") / "store") as served:
        create(served, "cars")
        places = list[str]()
        while (reply := begin(served, Upload_Length="5")).status == 201:
            places.append(reply.headers["location"])
        check_problem(reply, 429, "/problems/too-many")
        assert int(reply.headers["retry-after"]) > 0
        served.ask("DELETE", places[0])
        assert begin(served, Upload_Length="5").status == 201


def test_a_post_that_is_cut_leaves_nothing(served: Served) -> None:
    before, uploads = served.ask("GET", "/datasets/cars").headers["etag"], served.folder / "service/uploads"
    there, log = set(uploads.iterdir()), served.folder / "service/audit.jsonl"
    # Status 499: the client has left.
    left = log.read_text().count('"status": 499')
    cut(served, "POST", "/datasets/cars", {"Content-Type": "application/x-tar"} | key(), BODY[:100], len(BODY))
    with contextlib.suppress(ConnectionError):
        cut(
            served,
            "POST",
            "/datasets/cars",
            {"Content-Type": "application/x-tar", "Upload-Complete": "?0"},
            BODY[:9],
            99,
        )
    # The server has seen both, once it has noted them.
    until = time.monotonic() + WAIT_S
    while log.read_text().count('"status": 499') < left + 2:
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.02)
    assert set(uploads.iterdir()) == there
    assert served.ask("GET", "/datasets/cars").headers["etag"] == before
