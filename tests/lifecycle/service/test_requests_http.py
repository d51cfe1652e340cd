"""`POST /datasets/{id}` and what can be read, status by status, at a real server."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.lifecycle.mining._hashes import draw_photograph
from tests.lifecycle.service._service import (
    Reply,
    Served,
    add_images,
    build_changes,
    build_form,
    build_tar,
    check_problem,
    create,
    draw,
    draw_tar,
    key,
    serving_data,
)

from headway.core.errors import DataError
from headway.lifecycle.service.memory_body import MEMORY_BYTES
from headway.lifecycle.service.problems import explain_failure
from headway.lifecycle.store.store import Store

TAR = {"Content-Type": "application/x-tar"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("requests") / "store"
    with serving_data(folder) as found:
        yield found
        status, err = found.stop()
        assert status == 0, err
        assert "Traceback" not in err


@pytest.fixture
def name(served: Served, request: pytest.FixtureRequest) -> str:
    """A data set of the test's own, with three images."""
    found = f"set-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]}"
    create(served, found, splits={"train": 1.0})
    add_images(served, found, draw_tar(0, 3))
    return found


def head(served: Served, name: str) -> str:
    reply = served.ask("GET", f"/datasets/{name}")
    assert reply.status == 200
    version: str = reply.json()["version"]
    assert reply.headers["etag"] == f'"{version}"'
    return version


def list_samples(served: Served, name: str, query: str = "") -> list[dict[str, Any]]:
    reply = served.ask("GET", f"/datasets/{name}/samples{query}")
    assert reply.status == 200, reply.body
    samples: list[dict[str, Any]] = reply.json()["samples"]
    return samples


def post(served: Served, name: str, *rows: dict[str, Any], **headers: str) -> Reply:
    body, usual = build_changes(*rows)
    named = {header.replace("_", "-"): value for header, value in headers.items()}
    return served.ask("POST", f"/datasets/{name}", body, usual | named)


def test_adding_makes_one_version_and_says_what_it_is(served: Served, name: str) -> None:
    before = head(served, name)
    body = draw_tar(0, 5)
    reply = served.ask("POST", f"/datasets/{name}", body, TAR | key())
    assert reply.status == 201
    tree = reply.json()
    assert (tree["added"], tree["duplicates"], tree["rejected"], tree["parent"]) == (2, 3, [], before)
    assert reply.headers["location"] == f"/datasets/{name}/versions/{tree['version']}"
    assert reply.headers["etag"] == f'"{tree["version"]}"'
    wanted = base64.b64encode(hashlib.sha256(reply.body).digest()).decode()
    assert reply.headers["repr-digest"] == f"sha-256=:{wanted}:"
    assert head(served, name) == tree["version"]
    # Nothing new: the same version, and 200.
    again = served.ask("POST", f"/datasets/{name}", body, TAR | key())
    assert again.status == 200
    assert again.json()["version"] == tree["version"]


def test_near_copies_are_named(served: Served, name: str) -> None:
    """A darker photograph is in the store too; the answer says of which one it is a copy."""
    files = {}
    for stem, factor in (("one", 1.0), ("two", 0.9)):
        file = io.BytesIO()
        draw_photograph(1, (80, 60)).point(lambda value, factor=factor: factor * value).save(file, "JPEG")
        files[f"{stem}.jpg"], files[f"{stem}.cls"] = file.getvalue(), b"cat"
    tree = served.ask("POST", f"/datasets/{name}", build_tar(files), TAR | key()).json()
    assert tree["added"] == 2
    assert tree["near_copies"] == [{"name": "two.jpg", "first": "one.jpg", "is_apart": False}]


def test_a_form_of_curl_adds_files_and_leaves_bad_ones_out(served: Served, name: str) -> None:
    body, content_type = build_form(("new/a.jpg", draw(50)), ("new/b.jpg", b"no image"), ("c.svg", b"<svg/>"))
    reply = served.ask("POST", f"/datasets/{name}", body, {"Content-Type": content_type} | key())
    assert reply.status == 201
    tree = reply.json()
    assert tree["added"] == 1
    assert {one["name"] for one in tree["rejected"]} == {"new/b.jpg", "c.svg"}
    assert any(one["name"] == "new/a.jpg" and one["label"] is None for one in list_samples(served, name))


def test_labels_need_the_version_that_they_are_based_on(served: Served, name: str) -> None:
    version, change = head(served, name), {"op": "label", "name": "cat/00001.jpg", "label": "dog"}
    check_problem(post(served, name, change), 428, "/problems/precondition-missing")
    stale = check_problem(post(served, name, change, If_Match='"abc"'), 412, "/problems/head-moved")
    assert stale["detail"]
    reply = post(served, name, change, If_Match=f'"{version}"')
    assert reply.status == 201
    assert reply.json()["relabelled"] == 1
    moved = post(served, name, change, If_Match=f'"{version}"')
    check_problem(moved, 412, "/problems/head-moved")
    assert moved.headers["etag"] == reply.headers["etag"]
    labels = {one["name"]: one["label"] for one in list_samples(served, name)}
    assert labels["cat/00001.jpg"] == "dog"
    weak = post(served, name, change, If_Match=f"W/{reply.headers['etag']}")
    check_problem(weak, 412, "/problems/head-moved")


def test_one_key_is_one_version(served: Served, name: str) -> None:
    body, usual = draw_tar(60, 2), TAR | key()
    replies = [served.ask("POST", f"/datasets/{name}", body, usual) for _ in range(3)]
    assert {reply.status for reply in replies} == {201}
    assert len({reply.body for reply in replies}) == 1
    versions = served.ask("GET", f"/datasets/{name}/versions").json()["versions"]
    assert [one["number"] for one in versions] == [2, 1, 0]
    other = served.ask("POST", f"/datasets/{name}", draw_tar(70, 2), usual)
    check_problem(other, 422, "/problems/key-reused")
    missing = served.ask("POST", f"/datasets/{name}", body, TAR)
    check_problem(missing, 400, "/problems/key-missing")
    for wrong in ("no-quotes", '""', '"' + "x" * 300 + '"'):
        reply = served.ask("POST", f"/datasets/{name}", body, TAR | {"Idempotency-Key": wrong})
        check_problem(reply, 400, "/problems/malformed")


def test_a_forgotten_key_does_not_hide_another_body(served: Served, name: str) -> None:
    headers = TAR | key()
    first = served.ask("POST", f"/datasets/{name}", draw_tar(60, 2), headers)
    with closing(sqlite3.connect(served.folder / "service/keys.db", isolation_level=None)) as database:
        # As after a day.
        database.execute("delete from keys")
    other = served.ask("POST", f"/datasets/{name}", draw_tar(70, 3), headers)
    assert (first.status, other.status) == (201, 201)
    assert other.json()["added"] == 3
    assert other.json()["version"] != first.json()["version"]


def test_labels_of_names_with_dots(served: Served, name: str) -> None:
    body = {"img.001.jpg": draw(91), "img.001.jpg.cls": b"cat", "img.002.jpg": draw(92), "img.002.jpg.cls": b"dog"}
    body |= {"old.jpg": draw(93), "old.cls": b"dog", "none.9.cls": b"cat"}
    rejected = add_images(served, name, build_tar(body))["rejected"]
    assert [(one["name"], one["reason"]) for one in rejected] == [("none.9.cls", "is the label of no image")]
    labels = {one["name"]: one["label"] for one in list_samples(served, name)}
    assert {sample: labels[sample] for sample in ("img.001.jpg", "img.002.jpg", "old.jpg")} == {
        "img.001.jpg": "cat",
        "img.002.jpg": "dog",
        "old.jpg": "dog",
    }
    two = build_tar({"a.jpg": draw(94), "a.cls": b"cat", "a.txt": b"dog"})
    check_problem(served.ask("POST", f"/datasets/{name}", two, TAR | key()), 422, "/problems/wrong-change")


def test_an_image_that_is_stored_in_parts_comes_back_whole(served: Served, name: str) -> None:
    """RecordIO splits a record at its own magic number, where that lies at a multiple of four."""
    data = draw(95)
    # A comment segment behind the start of the image: any bytes may stand there.
    magic = bytes.fromhex("0a23d7ce")
    split = next(
        data[:2] + b"\xff\xfe" + (18 + pad).to_bytes(2, "big") + b" " * pad + magic * 4 + data[2:]
        for pad in range(4)
        if (6 + pad) % 4 == 0
    )
    add_images(served, name, build_tar({"parts.jpg": split}))
    sample = next(one for one in list_samples(served, name) if one["name"] == "parts.jpg")
    assert sample["sha256"] == hashlib.sha256(split).hexdigest()
    assert served.ask("GET", sample["href"]).body == split
    assert served.ask("GET", sample["href"], headers={"Range": "bytes=4-20"}).body == split[4:21]
    assert served.ask("GET", f"/thumbs/{sample['sha256']}?s=64").status == 200


def test_a_refused_request_can_be_mended_with_its_key(served: Served, name: str) -> None:
    headers = {"Content-Type": "application/json"} | key()
    wrong, right = ([{"op": "remove", "name": f"cat/{n}.jpg"}] for n in ("nothing", "00002"))
    reply = served.ask("POST", f"/datasets/{name}", json.dumps(wrong).encode(), headers)
    check_problem(reply, 422, "/problems/wrong-change")
    reply = served.ask("POST", f"/datasets/{name}", json.dumps(right).encode(), headers)
    assert reply.status == 201
    assert reply.json()["removed"] == 1


@pytest.mark.parametrize("kind", ["x-tar", "json"])
def test_wrong_digests_store_nothing(served: Served, name: str, kind: str) -> None:
    body = draw_tar(80, 1) if kind == "x-tar" else json.dumps([{"op": "remove", "name": "cat/00001.jpg"}]).encode()
    before, usual = head(served, name), {"Content-Type": f"application/{kind}"}
    right = base64.b64encode(hashlib.sha256(body).digest()).decode()
    wrong = base64.b64encode(hashlib.sha256(body + b"!").digest()).decode()
    for header in ("Content-Digest", "Repr-Digest"):
        reply = served.ask("POST", f"/datasets/{name}", body, usual | key() | {header: f"sha-256=:{wrong}:"})
        check_problem(reply, 400, "/problems/wrong-digest")
    assert head(served, name) == before
    uploads = served.folder / "service/uploads"
    assert [one for one in uploads.iterdir() if not (one / "job").exists()] == []
    reply = served.ask("POST", f"/datasets/{name}", body, usual | key() | {"Repr-Digest": f"sha-256=:{right}:"})
    assert reply.status == 201


@pytest.mark.parametrize("blanks", [0, MEMORY_BYTES])
def test_a_list_in_memory_or_in_a_file_is_one_version(served: Served, name: str, blanks: int) -> None:
    body, headers = build_changes({"op": "remove", "name": "cat/00001.jpg"})
    first, again = (served.ask("POST", f"/datasets/{name}", body + b" " * blanks, headers) for _ in range(2))
    assert (first.status, first.json()["removed"]) == (201, 1)
    assert (again.status, again.body, again.headers["etag"]) == (201, first.body, first.headers["etag"])
    other = served.ask("POST", f"/datasets/{name}", body + b" " * (blanks + 1), headers)
    check_problem(other, 422, "/problems/key-reused")


def test_a_label_outside_the_classes_is_refused(served: Served) -> None:
    create(served, "classes", classes=["cat", "dog"])
    reply = served.ask("POST", "/datasets/classes", draw_tar(0, 2, "cow"), TAR | key())
    check_problem(reply, 422, "/problems/wrong-change")
    assert served.ask("GET", "/datasets/classes").json()["samples"] == 0


def test_a_new_data_set(served: Served) -> None:
    tree = create(served, "fresh", classes=["a", "b"], about={"license": "CC0"})
    assert served.ask("GET", "/datasets/fresh").json()["version"] == tree["version"]
    again = served.ask("PUT", "/datasets/fresh", b"{}", {"Content-Type": "application/json"})
    check_problem(again, 409, "/problems/exists")
    for body, status in (
        (b"[]", 400),
        (b'{"colour": 1}', 400),
        (b'{"splits": {"a": 7}}', 400),
        (b'{"mode": "x"}', 422),
    ):
        reply = served.ask("PUT", "/datasets/other", body, {"Content-Type": "application/json"})
        check_problem(reply, status, "")
    check_problem(
        served.ask("PUT", "/datasets/other", b"{}", {"Content-Type": "text/plain"}), 415, "/problems/wrong-type"
    )


def test_what_is_not_there_is_404(served: Served, name: str) -> None:
    digest = "0" * 64
    paths = [
        "/datasets/none",
        "/datasets/none/versions",
        f"/datasets/{name}/versions/v99",
        f"/datasets/{name}/versions/v0...v99",
        f"/datasets/{name}/samples?version=v99",
        f"/datasets/{name}/samples?class=none",
        f"/datasets/{name}/samples?split=none",
        f"/blobs/{digest}",
        f"/thumbs/{digest}",
        "/blobs/abc",
        f"/uploads/{'0' * 32}",
        "/jobs/0123456789abcdef",
        "/problems/none",
        "/nothing",
        "/datasets/..%2f..%2fetc/versions",
        "/datasets/a%00b",
        "/datasets/store:x",
    ]
    for path in paths:
        check_problem(served.ask("GET", path), 404, "/problems/not-found")
    check_problem(served.ask("POST", "/datasets/none", b"", TAR | key()), 404, "/problems/not-found")


def test_wrong_methods_and_parameters_are_named(served: Served, name: str) -> None:
    reply = served.ask("DELETE", f"/datasets/{name}")
    check_problem(reply, 405, "/problems/wrong-method")
    assert {"GET", "POST", "PUT"} <= set(reply.headers["allow"].split(", "))
    for query in ("count=0", "count=201", "count=x", "after=zz"):
        reply = served.ask("GET", f"/datasets/{name}/samples?{query}")
        assert check_problem(reply, 400, "/problems/malformed")["errors"][0]["pointer"].startswith("/query/")
    check_problem(served.ask("GET", f"/thumbs/{'0' * 64}?s=7"), 400, "/problems/malformed")


def test_samples_come_in_pages(served: Served, name: str) -> None:
    add_images(served, name, draw_tar(100, 4, "dog"))
    path, seen, after = f"/datasets/{name}/samples?count=3", list[str](), ""
    while True:
        page = served.ask("GET", f"{path}&after={after}").json()
        seen += [one["sha256"] for one in page["samples"]]
        after = page["next"]
        if after is None:
            break
    assert len(seen) == 7
    assert seen == sorted(set(seen))
    assert len(list_samples(served, name, "?class=dog")) == 4
    assert len(list_samples(served, name, "?class=")) == 0
    assert len(list_samples(served, name, "?split=train")) == 7
    assert len(list_samples(served, name, "?version=v1&class=cat")) == 3


def test_a_difference_names_what_differs(served: Served, name: str) -> None:
    post(served, name, {"op": "label", "name": "cat/00000.jpg", "label": "dog"}, If_Match="*")
    tree = served.ask("GET", f"/datasets/{name}/versions/v1...v2").json()
    assert tree["counts"]["relabelled"] == 1
    assert tree["changed"][0]["after"]["label"] == "dog"
    assert served.ask("GET", f"/datasets/{name}/versions/v1").json()["classes"] == {"cat": 3}


def test_bytes_of_a_sample_and_ranges_of_them(served: Served, name: str) -> None:
    sample = next(one for one in list_samples(served, name) if one["name"] == "cat/00001.jpg")
    data = draw(1)
    reply = served.ask("GET", sample["href"])
    assert (reply.status, reply.body) == (200, data)
    assert hashlib.sha256(data).hexdigest() == sample["sha256"]
    assert reply.headers["content-type"] == "image/jpeg"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "immutable" in reply.headers["cache-control"]
    for asked, part in (
        ("bytes=0-9", data[:10]),
        ("bytes=5-", data[5:]),
        ("bytes=-7", data[-7:]),
        ("bytes=0-99999", data),
    ):
        ranged = served.ask("GET", sample["href"], headers={"Range": asked})
        assert (ranged.status, ranged.body) == (206, part)
        assert ranged.headers["content-range"].endswith(f"/{len(data)}")
    whole = served.ask("GET", sample["href"], headers={"Range": "lines=1-2"})
    assert (whole.status, whole.body) == (200, data)
    for asked in (f"bytes={len(data)}-", "bytes=9-5", "bytes=-0"):
        check_problem(served.ask("GET", sample["href"], headers={"Range": asked}), 416, "/problems/bad-range")
    tag = reply.headers["etag"]
    for asked in (tag, f"W/{tag}", f'"other", W/{tag}', "*"):
        same = served.ask("GET", sample["href"], headers={"If-None-Match": asked})
        assert (same.status, same.body) == (304, b""), asked
    assert served.ask("GET", sample["href"], headers={"If-None-Match": '"other"'}).status == 200
    wanted = served.ask("GET", sample["href"], headers={"Want-Repr-Digest": "sha-512=3"}).headers["repr-digest"]
    assert wanted == f"sha-512=:{base64.b64encode(hashlib.sha512(data).digest()).decode()}:"
    none = served.ask("GET", sample["href"], headers={"Want-Repr-Digest": "sha-256=0"})
    assert "repr-digest" not in none.headers
    only_head = served.ask("HEAD", sample["href"])
    assert (only_head.status, only_head.body) == (200, b"")


def test_a_small_picture(served: Served, name: str) -> None:
    body = build_tar({"large.jpg": draw(7, side=400)})
    add_images(served, name, body)
    sample = next(one for one in list_samples(served, name) if one["name"] == "large.jpg")
    reply = served.ask("GET", f"/thumbs/{sample['sha256']}?s=64")
    assert reply.status == 200
    assert Image.open(io.BytesIO(reply.body)).size == (64, 64)
    assert reply.headers["content-type"] == "image/jpeg"


def test_the_wanted_digest_is_sent(served: Served) -> None:
    reply = served.ask("GET", "/datasets", headers={"Want-Repr-Digest": "sha-512=5"})
    wanted = base64.b64encode(hashlib.sha512(reply.body).digest()).decode()
    assert reply.headers["repr-digest"] == f"sha-512=:{wanted}:"
    assert "repr-digest" not in served.ask("GET", "/datasets", headers={"Want-Repr-Digest": "sha-256=0"}).headers
    problem = served.ask("GET", "/datasets/none")
    wanted = base64.b64encode(hashlib.sha256(problem.body).digest()).decode()
    assert problem.headers["repr-digest"] == f"sha-256=:{wanted}:"


def test_lists_come_in_pages(served: Served, name: str) -> None:
    post(served, name, {"op": "label", "name": "cat/00000.jpg", "label": "dog"}, If_Match="*")
    first = served.ask("GET", f"/datasets/{name}/versions?count=2").json()
    assert ([one["number"] for one in first["versions"]], first["next"]) == ([2, 1], 1)
    second = served.ask("GET", f"/datasets/{name}/versions?count=2&after=1").json()
    assert ([one["number"] for one in second["versions"]], second["next"]) == ([0], None)
    page = served.ask("GET", f"/datasets/{name}/versions/v0...v2?count=2").json()
    assert (len(page["added"]), page["counts"]["added"]) == (2, 3)
    rest = served.ask("GET", f"/datasets/{name}/versions/v0...v2?count=2&after={page['next']}").json()
    assert (len(rest["added"]), rest["next"]) == (1, None)
    for query in ("count=0", "count=201", "after=x"):
        check_problem(served.ask("GET", f"/datasets/{name}/versions?{query}"), 400, "/problems/malformed")


def test_a_message_is_kept_with_the_version(served: Served, name: str) -> None:
    body, usual = build_changes({"op": "remove", "name": "cat/00002.jpg"})
    reply = served.ask("POST", f"/datasets/{name}?message=too%20dark", body, usual)
    assert reply.status == 201
    assert served.ask("GET", f"/datasets/{name}").json()["message"] == "too dark"
    reply = served.ask("POST", f"/datasets/{name}?message=a%0Ab", body, usual)
    check_problem(reply, 400, "/problems/malformed")


def test_a_version_describes_itself_as_croissant(served: Served) -> None:
    about = {"description": "Cats.", "license": "https://x/cc0", "creator": "Anna", "url": "https://x"}
    create(served, "described", about=about)
    body = {"cat/0.jpg": draw(200), "cat/0.cls": b"cat", "new.jpg": draw(201)}
    version = add_images(served, "described", build_tar(body))["version"]
    asked = {"Accept": "application/ld+json"}
    replies = [served.ask("GET", f"/datasets/described{end}", headers=asked) for end in ("", "/versions/v1")]
    assert replies[0].body == replies[1].body
    assert replies[0].headers["content-type"] == "application/ld+json"
    tree = replies[0].json()
    assert (tree["name"], tree["license"], tree["version"]) == ("described", "https://x/cc0", "1.0.0")
    (file,) = tree["distribution"]
    table = served.ask("GET", file["contentUrl"])
    assert table.headers["content-type"].startswith("text/csv")
    assert hashlib.sha256(table.body).hexdigest() == file["sha256"]
    assert file["contentSize"] == f"{len(table.body)} B"
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(table.body.decode()))}
    assert {name: row["label"] for name, row in rows.items()} == {"cat/0.jpg": "cat", "new.jpg": ""}
    assert rows["cat/0.jpg"]["labelled_by"] == "local"
    assert rows["new.jpg"]["split"] == "unlabelled"
    assert rows["cat/0.jpg"]["sha256"] == hashlib.sha256(draw(200)).hexdigest()
    assert served.ask("GET", "/datasets/described").json()["version"] == version
    create(served, "undescribed")
    check_problem(served.ask("GET", "/datasets/undescribed", headers=asked), 409, "/problems/conflict")


@pytest.mark.check
def test_what_fails_on_the_server_is_a_problem(tmp_path: Path) -> None:
    store, versions = Store.make(tmp_path / "store"), tmp_path / "store/versions"
    for one, numbers in (("damaged", (0, 1)), ("gone", (2, 3))):
        store.create(one, splits={"planned": 1.0})
        (tmp_path / one).mkdir()
        for number in numbers:
            (tmp_path / one / f"{number}.jpg").write_bytes(draw(number))
        store.add(one, tmp_path / one, unlabelled=True)
    store.remove("gone", ["3.jpg"])
    shutil.rmtree(versions / store.resolve("gone@v1").version)
    next((versions / store.resolve("damaged").version).glob("*/columns.safetensors")).write_bytes(b"nothing")
    with serving_data(store.folder) as found:
        reply = found.ask("GET", "/datasets/damaged")
        check_problem(reply, 500, "/problems/internal")
        assert reply.headers["x-content-type-options"] == "nosniff"
        for path in ("versions/v1", "samples?version=v1", "versions/v0...v1"):
            check_problem(found.ask("GET", f"/datasets/gone/{path}"), 410, "/problems/gone")
        assert found.ask("GET", "/datasets/gone").status == 200


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (OSError(28, "No space left"), 507),
        (OSError(5, "I/O error"), 500),
        ("full", 507),
        ("locked", 503),
        (ValueError("x"), 500),
    ],
)
def test_a_failure_has_the_status_of_its_cause(cause: Exception | str, status: int) -> None:
    if isinstance(cause, str):
        error = sqlite3.OperationalError(cause)
        error.sqlite_errorcode = sqlite3.SQLITE_FULL if cause == "full" else sqlite3.SQLITE_BUSY_SNAPSHOT
        cause = error
    wrapped = DataError("the store cannot be used")
    wrapped.__cause__ = cause
    for failure in (cause, wrapped):
        problem = explain_failure(failure)
        assert problem.status == status
        assert (status == 503) == any(name == b"retry-after" for name, _ in problem.headers)


@pytest.mark.check
def test_many_files_go_on_as_a_job(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving_data(tmp_path_factory.mktemp("jobs") / "store", "--job-files", "5") as served:
        create(served, "cars")
        headers = TAR | key()
        reply = served.ask("POST", "/datasets/cars", draw_tar(0, 12), headers)
        assert reply.status == 202
        place = reply.headers["location"]
        while (tree := served.ask("GET", place).json())["state"] in ("queued", "running"):
            time.sleep(0.05)
        assert tree["state"] == "done", tree
        assert tree["result"]["added"] == 12
        assert tree["progress"] == {"done": 12, "total": 12}
        # The first answer again, and the job that is done.
        again = served.ask("POST", "/datasets/cars", draw_tar(0, 12), headers)
        assert (again.status, again.headers["location"]) == (202, place)
        assert [one["job"] for one in served.ask("GET", "/jobs").json()["jobs"]] == [place.rpartition("/")[2]]
        assert served.ask("DELETE", place).status == 202
        assert served.ask("GET", "/datasets/cars").json()["samples"] == 12
        bad = served.ask("POST", "/datasets/cars", build_tar({f"{n}.jpg": b"none" for n in range(9)}), TAR | key())
        place = bad.headers["location"]
        while (tree := served.ask("GET", place).json())["state"] in ("queued", "running"):
            time.sleep(0.05)
        assert tree["state"] == "done"
        assert len(tree["result"]["rejected"]) == 9
