"""Clients that mean harm: refused with the right status, nothing of theirs runs or is lost, and others are served."""

from __future__ import annotations

import contextlib
import html.parser
import io
import json
import re
import socket
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests._support import headway, refused
from tests.lifecycle.service._service import (
    WAIT_S,
    Served,
    add_images,
    build_changes,
    build_form,
    build_tar,
    check_problem,
    draw,
    draw_tar,
    key,
    serving_data,
)

TAR = {"Content-Type": "application/x-tar"}
MIB = 1 << 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "store"


@pytest.fixture(scope="module")
def tokens(store: Path) -> dict[str, str]:
    """Tokens by scope, made by the verb."""
    headway("dataset", "create", "cars", "--store", store)
    return {
        scope: headway("data-token", store, "--add", f"the-{scope}", "--scopes", scope).out.strip()
        for scope in ("read", "label", "write", "admin")
    }


@pytest.fixture(scope="module")
def served(store: Path, tokens: dict[str, str]) -> Iterator[Served]:
    with serving_data(store, "--read-timeout", "1", "--body-mb", "4", token=tokens["admin"]) as found:
        add_images(found, "cars", draw_tar(0, 3))
        yield found
        status, err = found.stop()
        assert status == 0, err
        assert "Traceback" not in err


def read_all(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            data += piece
    return data


def test_a_request_without_a_token_or_scope_is_refused(served: Served, tokens: dict[str, str]) -> None:
    change, usual = build_changes({"op": "remove", "name": "cat/00000.jpg"})
    asks: list[tuple[str, str, Any, dict[str, str]]] = [
        ("GET", "/datasets", None, {}),
        ("GET", "/datasets/cars/samples", None, {}),
        ("GET", f"/blobs/{'0' * 64}", None, {}),
        ("POST", "/datasets/cars", change, usual),
        ("PUT", "/datasets/other", b"", {}),
        ("GET", "/jobs", None, {}),
        ("HEAD", f"/uploads/{'0' * 32}", None, {}),
    ]
    for method, path, body, headers in asks:
        for wrong in (None, "Bearer wrong", f"Basic {tokens['admin']}"):
            reply = served.ask(method, path, body, headers | {"Authorization": wrong or ""})
            assert reply.status == 401, (method, path)
            assert reply.headers["www-authenticate"].startswith("Bearer")
    allowed = {
        "read": [200, 200, 404, 403, 403, 200, 403],
        "label": [403, 403, 403, 403, 403, 403, 404],
        "write": [403, 403, 403, 201, 403, 200, 404],
    }
    for scope, statuses in allowed.items():
        found = [served.ask(*ask[:3], ask[3] | {"Authorization": f"Bearer {tokens[scope]}"}).status for ask in asks]
        assert found == statuses, scope


@pytest.mark.check
def test_wrong_tokens_are_counted(store: Path, tokens: dict[str, str]) -> None:
    # A data set of its own: the count is of an address, and other tests have it too.
    other = store.parent / "counted"
    headway("dataset", "create", "cars", "--store", other)
    headway("data-token", other, "--add", "anna")
    with serving_data(other) as served:
        seen = [served.ask("GET", "/datasets", headers={"Authorization": "Bearer wrong"}) for _ in range(61)]
        assert [reply.status for reply in seen] == [401] * 60 + [429]
        assert int(seen[-1].headers["retry-after"]) > 0


def test_a_removed_token_is_refused_at_once(served: Served, store: Path) -> None:
    token = json.loads(headway("data-token", store, "--add", "guest", "--json").out)["token"]
    headers = {"Authorization": f"Bearer {token}"}
    assert served.ask("GET", "/datasets", headers=headers).status == 200
    assert "guest" in headway("data-token", store).out
    headway("data-token", store, "--remove", "guest")
    assert served.ask("GET", "/datasets", headers=headers).status == 401


def test_what_the_verbs_refuse(store: Path, tokens: dict[str, str], tmp_path: Path) -> None:
    assert "read, label, write, admin" in refused("data-token", store, "--add", "x", "--scopes", ",", status=2)
    assert "cannot be combined" in refused("data-token", store, "--add", "x", "--remove", "y", status=2)
    headway("dataset", "create", "cars", "--store", tmp_path / "open")
    sentence = refused("serve-data", tmp_path / "open", "--bind", "0.0.0.0:0", status=2)
    assert "headway data-token" in sentence
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    assert "not a store" in refused("serve-data", tmp_path / "full", status=2)


def test_without_its_extra_the_verb_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.lifecycle.service.server.PACKAGES", ("no_such_package",))
    assert "pip install 'headway[data-service]'" in refused("serve-data", tmp_path / "store", status=2)


def test_a_second_server_of_a_store_is_refused(served: Served, store: Path) -> None:
    assert "another server" in refused("serve-data", store, "--bind", "127.0.0.1:0", status=2)


@pytest.mark.check
def test_a_page_of_another_site_is_refused(tmp_path: Path) -> None:
    with serving_data(tmp_path / "store") as open_server:
        host = "{}:{}".format(*open_server.address)
        assert open_server.ask("GET", "/datasets", headers={"Origin": f"http://{host}"}).status == 200
        for headers in (
            {"Host": "evil.example"},
            {"Host": "evil.example:80"},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
        ):
            check_problem(open_server.ask("GET", "/datasets", headers=headers), 403, "/problems/wrong-origin")


def test_ten_gigabytes_are_refused_before_they_come(served: Served) -> None:
    head = (
        "POST /datasets/cars HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-tar\r\nContent-Length: 10737418240\r\n"
    )
    head += f'Idempotency-Key: "ten"\r\nAuthorization: {served.headers["Authorization"]}\r\n\r\n'
    with socket.create_connection(served.address, WAIT_S) as client:
        client.sendall(head.encode())
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 "), answer
    assert b"upload-limit: max-size=4194304" in answer


@pytest.mark.check
def test_an_endless_body_is_cut_off(served: Served) -> None:
    before = int(psutil.Process(served.process.pid).memory_info().rss)
    head = (
        "POST /datasets/cars HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-tar\r\nTransfer-Encoding: chunked\r\n"
    )
    head += f'Idempotency-Key: "endless"\r\nAuthorization: {served.headers["Authorization"]}\r\n\r\n'
    with socket.create_connection(served.address, WAIT_S) as client, contextlib.suppress(ConnectionError):
        client.sendall(head.encode())
        for _ in range(200):
            client.sendall(b"100000\r\n" + bytes(MIB) + b"\r\n")
        read_all(client)
    assert int(psutil.Process(served.process.pid).memory_info().rss) - before < 64 * MIB
    assert list((served.folder / "service/uploads").iterdir()) == []


def test_slow_senders_are_cut_off_and_others_served(served: Served) -> None:
    head = "POST /datasets/cars HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-tar\r\n"
    head += f'Idempotency-Key: "slow"\r\nAuthorization: {served.headers["Authorization"]}\r\n'
    starts = ["POST /dat", head, f"{head}Content-Length: 100\r\n\r\nabc"]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(served.address, WAIT_S)) for _ in starts]
        for client, start in zip(clients, starts, strict=True):
            client.sendall(start.encode())
        assert served.ask("GET", "/datasets").status == 200
        for client in clients:
            answer = read_all(client)
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"content-type: application/problem+json" in head
            assert json.loads(body)["status"] == 408


def png_bomb() -> bytes:
    """A small file that says that it has 100,000 x 100,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def test_a_bomb_is_left_out_before_it_is_decoded(served: Served) -> None:
    body = build_tar({"bomb.png": png_bomb(), "fine.jpg": draw(500)})
    reply = served.ask("POST", "/datasets/cars", body, TAR | key())
    assert reply.status == 201
    assert reply.json()["rejected"][0]["name"] == "bomb.png"
    assert "pixels" in reply.json()["rejected"][0]["reason"]
    zipped = served.ask("POST", "/datasets/cars", b"PK\x03\x04", {"Content-Type": "application/zip"} | key())
    check_problem(zipped, 415, "/problems/wrong-type")
    check_problem(
        served.ask("POST", "/datasets/cars", zlib.compress(body), TAR | key()), 422, "/problems/hostile-archive"
    )


def hostile_archives() -> Iterator[bytes]:
    for kind, name, link in (
        (tarfile.SYMTYPE, "a.jpg", "/etc/passwd"),
        (tarfile.LNKTYPE, "a.jpg", "../../x"),
        (tarfile.REGTYPE, "../../x.jpg", ""),
        (tarfile.REGTYPE, "/etc/x.jpg", ""),
        (tarfile.CHRTYPE, "a.jpg", ""),
    ):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            tar.addfile(member)
        yield file.getvalue()


def test_hostile_archives_change_nothing(served: Served) -> None:
    before = served.ask("GET", "/datasets/cars").headers["etag"]
    outside = {path for path in served.folder.parent.iterdir() if path.is_dir()}
    for body in hostile_archives():
        reply = served.ask("POST", "/datasets/cars", body, TAR | key())
        assert reply.status == 422, reply.body
        check_problem(reply, 422, "")
    for name in ("../x.jpg", "/etc/x.jpg"):
        body, content_type = build_form((name, draw(1)))
        check_problem(served.ask("POST", "/datasets/cars", body, {"Content-Type": content_type} | key()), 422, "")
    assert served.ask("GET", "/datasets/cars").headers["etag"] == before
    assert {path for path in served.folder.parent.iterdir() if path.is_dir()} == outside
    assert list((served.folder / "service/work").iterdir()) == []


class Scripts(html.parser.HTMLParser):
    """Collects what a browser would run or load."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "action", "data") and re.match("(?i)https?:|//|javascript:", value or ""):
                self.found.append(f"{tag} {value}")
            if name.startswith("on"):
                self.found.append(f"{tag} {name}")


def test_no_string_of_a_client_becomes_code(served: Served, store: Path) -> None:
    """SQL and HTML in each string: stored and answered as text, or refused; the tables are still there."""
    nasty = "'; drop table keys; --<script>alert(1)</script>&x"
    body = build_tar({f"{'x' * 3}/{nasty.replace('/', '-')}.jpg": draw(600), f"{'x' * 3}/a.jpg": draw(601)})
    assert served.ask("POST", "/datasets/cars", body, TAR | {"Idempotency-Key": f'"{nasty}"'}).status == 201
    rows = [{"op": "label", "name": "xxx/a.jpg", "label": nasty, "by": nasty}]
    usual = {"Content-Type": "application/json", "Idempotency-Key": f'"{nasty}2"', "If-Match": "*"}
    reply = served.ask("POST", "/datasets/cars", json.dumps(rows).encode(), usual)
    assert reply.status == 201, reply.body
    found = served.ask("GET", "/datasets/cars/samples?class=" + "".join(f"%{byte:02x}" for byte in nasty.encode()))
    assert [one["label"] for one in found.json()["samples"]] == [nasty]
    for path in (f"/datasets/{'%3Cscript%3E'}", "/%3Cscript%3Ealert(1)%3C/script%3E", "/problems/%3Cscript%3E"):
        refusal = served.ask("GET", path)
        assert refusal.headers["content-type"] == "application/problem+json"
        assert refusal.headers["x-content-type-options"] == "nosniff"
    check_problem(served.ask("POST", "/datasets/cars", b"[]", usual | {"If-Match": nasty}), 400, "/problems/malformed")
    for path in ("/", "/problems/malformed"):
        page = served.ask("GET", path)
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        scripts = Scripts()
        scripts.feed(page.body.decode())
        assert scripts.found == []
    assert served.ask("GET", "/datasets", headers={"Authorization": ""}).status == 401
    log = [json.loads(line) for line in (store / "service/audit.jsonl").read_text().splitlines()]
    assert any(row["status"] == 201 and row["by"] == "the-admin" and row["etag"] for row in log)
    assert any(row["status"] == 401 and row["by"] is None for row in log)


@pytest.mark.check
def test_a_flood_of_open_connections_disturbs_nobody(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(served.address, WAIT_S))
        assert served.ask("GET", "/datasets").status == 200
