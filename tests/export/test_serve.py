"""`headway serve` as a process: its answers are those of `headway predict`, and every wrong request gets a sentence."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests._support import headway, refused
from tests.export._images import draw_colour, write_files
from tests.export._served import (
    NAMES,
    SIDE,
    WAIT_S,
    Served,
    build_chunk,
    build_form,
    disguise,
    encode,
    fill,
    receive,
    send,
    serving,
    write_export,
)

from headway.export.exported import open_export


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("serve") / "export")


@pytest.fixture(scope="module")
def served(export: Path) -> Iterator[Served]:
    with serving(export, "--batch", "4", "--queue", "8", "--body-mb", "1", "--megapixels", "1") as found:
        yield found
        status, err = found.stop()
        assert status == 0, err
        assert "Traceback" not in err


def test_one_image_one_answer(served: Served) -> None:
    for name in NAMES:
        for form in ("JPEG", "PNG", "WebP"):
            answer = served.predict(encode(name, form), f"image/{form.lower()}")
            assert answer.labels == [name]
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-model-sha256"] == served.started["sha256"]
            assert answer.headers["x-model-version"] == served.started["version"]


def test_answers_are_those_of_predict(served: Served, export: Path, tmp_path: Path) -> None:
    kinds = (".jpg", ".png", ".webp")
    write_files(tmp_path / "files", 40, (SIDE, SIDE), draw_colour)
    files = sorted(path for path in (tmp_path / "files").iterdir() if path.suffix in kinds)
    rows = [json.loads(line) for line in headway("predict", export, *files, "--json").out.splitlines()]
    assert [row["path"] for row in rows] == [str(path) for path in files]
    found = list[dict[str, Any]]()
    for low in range(0, len(files), 8):
        body, content_type = build_form(*[(str(path), path.read_bytes()) for path in files[low : low + 8]])
        found += served.predict(body, content_type).json()["predictions"]
    assert found == rows
    # One at a time, on one connection.
    with contextlib.closing(served.connect()) as connection:
        for path, row in zip(files[:6], rows, strict=False):
            answer = send(connection, "POST", "/predict", path.read_bytes(), {"Content-Type": "image/jpeg"})
            assert answer.json()["predictions"] == [{**row, "path": "image 0"}]


def test_pixels(served: Served, export: Path) -> None:
    pixels = fill("red", "green", "blue", "red", "green", "blue")
    answer = served.predict(pixels.tobytes(), "application/octet-stream", X_Shape="6,16,16,3")
    with open_export(export, threads=1) as exported:
        probabilities = exported.run(pixels).max(axis=1)
    assert answer.labels == list(NAMES) * 2
    for row, probability in zip(answer.json()["predictions"], probabilities, strict=True):
        assert row["probability"] == pytest.approx(probability, abs=1e-6)
    wrong = served.predict(fill("red", side=8).tobytes(), "application/octet-stream", X_Shape="1,8,8,3").problem(422)
    assert "n,16,16,3" in wrong["what"]


def test_a_bad_image_is_named_and_spoils_its_request_only(served: Served) -> None:
    whole = encode("green", size=(64, 64), quality=95)
    for bad in (
        b"no image",
        whole[:200],
        whole[: len(whole) // 2],
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"RIFF0000WEBPVP8 ",
    ):
        problem = served.predict(bad).problem(422)
        assert problem["images"] == [{"path": "image 0", "what": problem["images"][0]["what"]}]
    served.predict(b"").problem(422)
    body, content_type = build_form(("a.jpg", whole), ("b.jpg", b"no"), ("../../c.jpg", whole[:300]))
    problem = served.predict(body, content_type).problem(422)
    assert [image["path"] for image in problem["images"]] == ["b.jpg", "../../c.jpg"]
    assert "2 of 3" in problem["what"]
    assert served.predict(whole).labels == ["green"]
    assert served.read_metrics()["headway_serve_decode_failures_total"] >= 8


def test_wrong_requests_get_a_sentence(served: Served) -> None:
    for wrong in ("text/html", "application/json", "image/svg+xml", "image/gif", "image/tiff"):
        accepted = served.predict(encode(), wrong).headers["accept-post"].split(", ")
        assert [name for name in accepted if name.startswith("image/")] == ["image/jpeg", "image/png", "image/webp"]
        served.predict(encode(), wrong).problem(415)
    served.ask("POST", "/predict").problem(415)
    for path, method, allowed in (
        ("/predict", "GET", "POST"),
        ("/metrics", "POST", "GET, HEAD"),
        ("/swap", "PUT", "POST"),
    ):
        answer = served.ask(method, path)
        answer.problem(405)
        assert answer.headers["allow"] == allowed
    for path in ("/", "/predict/", "/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/healthz/../predict"):
        served.ask("GET", path).problem(404)
    for wrong in ("soon", "0", "-5", "1e3", "9" * 20):
        served.predict(encode(), X_Deadline_Ms=wrong).problem(400)
    served.predict(encode(), "multipart/form-data").problem(400)
    assert served.predict(encode("blue"), X_Deadline_Ms="60000.5").labels == ["blue"]


def test_a_body_that_is_too_long_is_refused_before_it_is_sent(served: Served) -> None:
    head = "POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: {}\r\n{}\r\n"
    with socket.create_connection(served.address, WAIT_S) as client:
        client.sendall(head.format(1 << 21, "").encode())
        answer = receive(client)
        assert answer.startswith(b"HTTP/1.1 413 "), answer
        # What follows is dropped, and the connection goes on.
        for _ in range(32):
            client.sendall(bytes(1 << 16))
        good = encode()
        client.sendall(head.format(len(good), "").encode() + good)
        assert receive(client).startswith(b"HTTP/1.1 200 ")
    with socket.create_connection(served.address, WAIT_S) as client:
        client.sendall(head.format(1 << 40, "Expect: 100-continue\r\n").encode())
        answer = receive(client)
        assert answer.startswith(b"HTTP/1.1 413 "), answer
        assert b"connection: close" in answer
        assert b"100 Continue" not in answer


def test_a_body_of_unknown_length_is_refused_when_it_is_too_long(served: Served) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(served.address, WAIT_S) as client:
        client.sendall(head)
        for _ in range(40):
            client.sendall(b"8000\r\n" + bytes(0x8000) + b"\r\n")
        client.sendall(b"0\r\n\r\n")
        answer = receive(client)
        assert answer.startswith(b"HTTP/1.1 413 ")
        # Where such a body ends is not looked for.
        assert b"connection: close" in answer
        assert client.recv(1) == b""
    with socket.create_connection(served.address, WAIT_S) as client:
        data = encode("blue")
        client.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        assert b'"blue"' in receive(client)
    assert served.read_metrics()["headway_serve_body_bytes"] == 0


def test_an_image_that_is_huge_when_decoded_is_refused(served: Served) -> None:
    # 2 million pixels in 6 kB, and a header that claims 10^10 of them.
    small = encode("red", "PNG", size=(2000, 1000))
    claimed = small[:8] + build_chunk(b"IHDR", (100_000).to_bytes(4) * 2 + small[24:29]) + small[33:]
    jpeg = encode("red", size=(2000, 1000))
    for data in (small, *disguise(small), jpeg, encode("red", "WebP", size=(2000, 1000))):
        problem = served.predict(data).problem(422)
        assert "more than the 1,000,000 that are decoded" in problem["what"]
    assert "more pixels than can be decoded" in served.predict(claimed).problem(422)["what"]
    # Three of them, each of which is small enough.
    body, content_type = build_form(*[("a.png", encode("red", "PNG", size=(1000, 700)))] * 3)
    problem = served.predict(body, content_type).problem(413)
    assert "2,100,000 pixels together, more than the 2,000,000 of one request" in problem["what"]


def test_a_jpeg_of_many_scans_is_refused(served: Served) -> None:
    for size, most in (((40, 30), 500), ((1000, 1000), 50)):
        image, marker = encode("blue", size=size, progressive=True), b"\xff\xda"
        image += marker * (most - image.count(marker))
        assert served.predict(image).labels == ["blue"]
        assert "scans, too many for" in served.predict(image + marker).problem(422)["what"]


def test_numbers_for_prometheus(served: Served) -> None:
    before = served.read_metrics()
    served.predict(encode())
    # One with a damaged header, and one that is found to be damaged when it is decoded.
    served.predict(b"no image").problem(422)
    image = encode("green", size=(640, 480))
    served.predict(image[: len(image) // 2]).problem(422)
    after = served.read_metrics()

    def grown(name: str) -> float:
        return after[f"headway_serve_{name}"] - before.get(f"headway_serve_{name}", 0)

    assert grown("requests_total:200") == 1
    assert grown("requests_total:422") == 2
    assert grown("request_seconds_count") == 1
    assert grown("batch_images_sum") == 1
    assert grown("decode_failures_total") == 2
    assert after["headway_serve_batch_images_bucket:+Inf"] == after["headway_serve_batch_images_count"]
    assert after["headway_serve_queue_images"] == 0
    assert after["headway_serve_connections"] == 1


def test_health(served: Served) -> None:
    for path in ("/healthz", "/readyz"):
        assert served.ask("GET", path).json() == {"status": "ok"}
        assert served.ask("HEAD", path).status == 200


def test_wrong_exports_and_options_are_refused(export: Path, tmp_path: Path) -> None:
    assert "is not an export" in refused("serve", tmp_path, status=2)
    assert "there is no such export" in refused("serve", tmp_path / "nowhere", status=2)
    assert "cannot hold a batch" in refused("serve", export, "--queue", "2", "--batch", "4", status=2)
    for option in ("--megapixels", "--read-timeout", "--drain", "--deadline-ms"):
        assert f"{option}: 0 is not above 0. Give more than 0." in refused("serve", export, option, "0", status=2)
    for wrong in ("127.0.0.1:99999", "127.0.0.1:http", ":80", ""):
        assert "is no address" in refused("serve", export, "--bind", wrong, status=2)
    for open_address in ("0.0.0.0:0", "[::]:0", "example.com:0"):
        assert "--token-file" in refused("serve", export, "--bind", open_address, status=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "cannot be used" in refused("serve", export, "--bind", address, status=2)


def test_a_missing_package_is_named(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.export.serve.server.PACKAGES", ("no_such_package",))
    assert "pip install 'headway[serve]'" in refused("serve", export, status=2)
