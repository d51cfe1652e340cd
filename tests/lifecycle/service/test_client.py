"""The client: what it asks for, and what it says if it cannot."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests._support import free_port
from tests.lifecycle.service._labelling import add_pool, build_picks, name_image, propose
from tests.lifecycle.service._service import Served, draw, draw_tar, serving_data

from headway.core.errors import HeadwayError, UsageError
from headway.lifecycle import Client, ServiceError


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_data(tmp_path_factory.mktemp("client") / "store", "--job-files", "20") as found:
        yield found


@pytest.fixture
def client(served: Served) -> Client:
    return Client(served.started["url"], patience_s=30)


def test_a_data_set_from_files_to_labels(client: Client, tmp_path: Path) -> None:
    files = dict[str, Path]()
    for number in range(6):
        files[f"new/{number}.jpg"] = tmp_path / f"{number}.jpg"
        files[f"new/{number}.jpg"].write_bytes(draw(number))
    client.create("walk", splits={"train": 1.0}, about={"license": "CC0"})
    # One key of WebDataset for both, and two labels.
    dotted = {"new/7.1.jpg": draw(7), "new/7.2.jpg": draw(8)}
    for name, data in dotted.items():
        files[name] = tmp_path / name.rpartition("/")[2]
        files[name].write_bytes(data)
    client.create("dots")
    client.add("dots", files, {"new/7.1.jpg": "cat", "new/7.2.jpg": "dog"})
    assert [one["name"] for one in client.list_samples("dots", label="dog")] == ["new/7.2.jpg"]
    for name in dotted:
        del files[name]
    answer = client.add("walk", files, {"new/0.jpg": "cat", "new/1.jpg": "dog"})
    assert answer["added"] == 6
    assert client.describe("walk")["classes"] == {"cat": 1, "dog": 1}
    assert [one["name"] for one in client.list_samples("walk", label="cat")] == ["new/0.jpg"]
    assert len(list(client.list_samples("walk", label=""))) == 4
    version = client.describe("walk")["version"]
    changes = [{"op": "label", "name": f"new/{number}.jpg", "label": "cat"} for number in range(1, 6)]
    client.change("walk", changes, if_match=version)
    with pytest.raises(ServiceError, match="newest version") as refused:
        client.change("walk", changes, if_match=version)
    assert refused.value.status == 412
    assert client.diff("walk", "v1", "v2")["counts"]["relabelled"] == 5
    assert [one["number"] for one in client.list_versions("walk")] == [2, 1, 0]
    sample = next(client.list_samples("walk", "v1", split="train"))
    assert client.read_blob(sample["sha256"]) in {draw(number) for number in range(6)}
    assert "walk" in [one["dataset"] for one in client.list_datasets()]


def test_a_data_set_whose_answer_is_lost_is_created_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    read, lost = http.client.HTTPConnection.getresponse, list[int]()

    def lose(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        answer = read(connection)
        if not lost:
            lost.append(answer.status)
            raise ConnectionResetError
        return answer

    monkeypatch.setattr(http.client.HTTPConnection, "getresponse", lose)
    made = client.create("lost", classes=["cat"])
    assert lost == [201]
    assert made["version"] == client.describe("lost")["version"]
    with pytest.raises(ServiceError, match="already"):
        client.create("lost", classes=["cat"])


def test_linked_files_are_added_as_what_they_lead_to(client: Client, tmp_path: Path) -> None:
    client.create("links", splits={"train": 1.0})
    (tmp_path / "real.jpg").write_bytes(draw(40))
    (tmp_path / "other.jpg").write_bytes(draw(41))
    (tmp_path / "link.jpg").symlink_to(tmp_path / "real.jpg")
    (tmp_path / "hard.jpg").hardlink_to(tmp_path / "other.jpg")
    files = {name: tmp_path / name for name in ("link.jpg", "other.jpg", "hard.jpg")}
    answer = client.add("links", files, message="linked", if_match=client.describe("links")["version"])
    assert (answer["added"], answer["duplicates"], answer["rejected"]) == (2, 1, [])
    assert client.list_versions("links")[0]["message"] == "linked"
    with pytest.raises(ServiceError) as refused:
        client.add("links", files, if_match="f" * 64)
    assert refused.value.status == 412


def test_a_job_that_fails_is_an_error(client: Client, tmp_path: Path) -> None:
    client.create("failing", classes=["cat"])
    path = tmp_path / "many.tar"
    path.write_bytes(draw_tar(0, 30, "dog"))
    with pytest.raises(ServiceError, match="dog") as refused:
        client.upload("failing", path)
    assert refused.value.status == 422


def test_an_upload_reports_its_progress_and_waits_for_its_job(client: Client, tmp_path: Path) -> None:
    client.create("jobs")
    path, seen = tmp_path / "many.tar", list[tuple[int, int]]()
    path.write_bytes(draw_tar(0, 30))
    answer = client.upload("jobs", path, progress=lambda done, total: seen.append((done, total)))
    assert answer["added"] == 30
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


def test_files_and_changes_are_one_version(client: Client, tmp_path: Path) -> None:
    """With facts that a tar file has no place for, and names that a form has to quote."""
    client.create("mixed", splits={"train": 0.5, "eval": 0.5})
    names = ['a "quoted" name.jpg', "ü/0.jpg", "plain.jpg"]
    files = dict[str, Path]()
    for number, name in enumerate(names):
        files[name] = tmp_path / f"{number}.jpg"
        files[name].write_bytes(draw(60 + number))
    facts = {"label": "cat", "split": "eval", "by": "ben", "annotations": {"boxes": [1]}}
    changes = [{"op": "add", "name": name, **facts} for name in names[:2]]
    answer = client.change("mixed", changes, files, message="all at once")
    assert (answer["number"], answer["added"]) == (1, 3)
    found = {one["name"]: one for one in client.list_samples("mixed")}
    assert {name: (one["label"], one["split"]) for name, one in found.items()} == {
        **dict.fromkeys(names[:2], ("cat", "eval")),
        "plain.jpg": (None, "unlabelled"),
    }
    assert found["ü/0.jpg"]["annotations"] == {"boxes": [1]}
    client.change("mixed", [{"op": "label", "name": "plain.jpg", "label": "dog"}], if_match="*")
    with pytest.raises(UsageError, match="No such file"):
        client.change("mixed", [], {"x.jpg": tmp_path / "none.jpg"})


def test_a_queue_is_labelled_as_the_page_of_the_docs_shows(
    client: Client, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    add_pool(served, "cars", range(70, 76))
    made = client.add_queue("cars", build_picks([72, 70, 74], name="first"))
    assert client.add_queue("cars", build_picks([72, 70, 74], name="first"))["queue"] == made["queue"]
    # Somebody else has one of the samples, and gives it back.
    lease = client.lease("cars", made["queue"], by="ben", count=1)
    assert [one["name"] for one in lease["samples"]] == [name_image(72)]
    other = client.lease("cars", made["queue"], by="carla", count=9)
    assert [one["name"] for one in other["samples"]] == [name_image(70), name_image(74)]
    for leased in (lease, other):
        client.end_lease("cars", leased["grid"])
    page = (Path(__file__).parents[3] / "docs/data-service.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(from headway[^`]*?def label_queue.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names = dict[str, Any]()
    exec(block, names)
    names["label_queue"](served.started["url"])
    assert capsys.readouterr().out.startswith("3 labels in version ")
    (queue,) = client.list_queues("cars")
    assert (queue["name"], queue["size"], queue["marked"]) == ("first", 3, 3)
    samples = list(client.list_queue_samples("cars", made["queue"]))
    assert [(one["name"], one["label"]) for one in samples] == [(name_image(n), propose(n)) for n in (72, 70, 74)]
    with pytest.raises(ServiceError, match="no run 'none'"):
        client.start_mining("cars", ["none"])


@pytest.mark.check
def test_a_body_of_json_can_be_uploaded(client: Client, tmp_path: Path) -> None:
    client.create("by-json")
    path = tmp_path / "changes.json"
    path.write_text(json.dumps([{"op": "remove", "name": "none.jpg"}]))
    with pytest.raises(ServiceError) as refused:
        client.upload("by-json", path, "application/json")
    assert refused.value.status == 422


def test_what_cannot_be_done_is_said(client: Client, tmp_path: Path) -> None:
    for url in ("127.0.0.1:8080", "ftp://x", "http://", "http://.x", "http://two words:80", f"http://{'a' * 64}"):
        with pytest.raises(UsageError, match="no address"):
            Client(url)
    for url in ("http://anna:hunter2@127.0.0.1:x", "http://127.0.0.1:80?token=hunter2", "http://127.0.0.1#hunter2"):
        with pytest.raises(UsageError, match="is sent") as wrong:
            Client(url)
        assert "hunter2" not in str(wrong.value)
    with pytest.raises(UsageError, match="No such file"):
        client.upload("walk", tmp_path / "none.tar")
    with pytest.raises(UsageError, match="No such file"):
        client.add("walk", {"a.jpg": tmp_path / "none.jpg"})
    (tmp_path / "a.jpg").write_bytes(draw(90))
    for name in ('a.jpg"\r\nContent-Type: text/html', "\udcff.jpg"):
        with pytest.raises(UsageError, match="cannot be the name"):
            client.change("walk", [], {name: tmp_path / "a.jpg"})
    with pytest.raises(ServiceError) as refused:
        client.describe("no-such-set")
    assert refused.value.status == 404
    with pytest.raises(HeadwayError, match=r"cannot be reached .* Check the address"):
        Client(f"http://127.0.0.1:{free_port()}", patience_s=0.2).list_datasets()


@contextlib.contextmanager
def answering(status: int, **headers: str) -> Iterator[tuple[str, list[str]]]:
    """A server that answers everything so, without a body; yields its address and the methods that were asked."""
    asked = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline()
            if self.raw_requestline and self.parse_request():
                asked.append(self.command)
                self.rfile.read(int(self.headers.get("Content-Length", "0")))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()
            self.close_connection = True

        def log_message(self, format: str, *values: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_server_that_sends_elsewhere_gets_nothing_done_and_nobody_the_token(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(draw(91))
    with answering(200) as (elsewhere, reached):
        for status in (301, 307, 201):
            with answering(status, Location=f"{elsewhere}/uploads/1") as (url, asked):
                client = Client(url, "the-secret-token", patience_s=0.2)
                for ask in (
                    client.list_datasets,
                    lambda client=client: client.change("cars", [{"op": "remove", "name": "a.jpg"}]),
                    lambda client=client: client.change("cars", [], {"a.jpg": tmp_path / "a.jpg"}),
                ):
                    with pytest.raises(HeadwayError) as refused:
                        ask()
                    assert "the-secret-token" not in str(refused.value)
                # Neither a second time, nor a part of an upload.
                assert asked == ["GET", "POST", "POST"]
        assert reached == []


def test_a_pause_that_the_server_asks_for_is_kept() -> None:
    """In seconds or as a date; also beyond the client's patience, and then it tries once more."""
    for build in (lambda: "1", lambda: formatdate(time.time() + 2, usegmt=True)):
        pause, began = build(), time.time()
        with answering(503, **{"Retry-After": pause}) as (url, asked):
            client = Client(url, patience_s=0.2)
            with pytest.raises(ServiceError):
                client.list_datasets()
        until = began + 1 if pause == "1" else parsedate_to_datetime(pause).timestamp()
        assert time.time() >= until
        # More often if the date has passed before the first answer.
        assert (asked if pause == "1" else asked[:2]) == ["GET", "GET"]


def test_a_token_without_encryption_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "headway")
    for url in ("https://data.example", "http://127.0.0.1:80", "http://[::1]", "http://localhost"):
        Client(url, "the-secret-token")
    Client("http://data.example")
    assert not caplog.records
    Client("http://data.example:8080", "the-secret-token")
    (record,) = caplog.records
    assert "goes to data.example without encryption" in record.getMessage()
    assert "the-secret-token" not in record.getMessage()
