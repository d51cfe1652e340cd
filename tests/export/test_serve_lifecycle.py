"""Servers over time: start, token, swap, shadow, stop."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench._export import load_client
from tests._support import refused
from tests.export._served import (
    NAMES,
    SIDE,
    WAIT_S,
    Reply,
    Served,
    build_manifest,
    encode,
    fill,
    send,
    serving,
    write_export,
)

from headway.core.errors import DataError, UsageError
from headway.export.exported import open_export
from headway.export.manifest import write_manifest
from headway.export.serve.token import read_token
from headway.export.targets import get_target
from headway.export.targets.target import Session

TOKEN = "0123456789abcdef"
TURNED = (1, 2, 0)
"""An order of channels with which each class looks at the channel of the next one."""


def replace(folder: Path, **options: Any) -> None:
    """Puts another export in the place of one, by renaming."""
    write_export(folder.with_name("next"), **options)
    swap_in(folder, folder.with_name("next"))


def swap_in(folder: Path, other: Path) -> None:
    folder.rename(folder.with_name("old"))
    other.rename(folder)
    shutil.rmtree(folder.with_name("old"))


def wait_for(holds: Callable[[], bool]) -> None:
    """Asks again and again; each question is a request, so that this waits without sleeping."""
    until = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until


def write_token(path: Path, text: str = TOKEN, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a token, and a shadow that sees other colours."""
    folder = tmp_path_factory.mktemp("trial")
    write_export(folder / "export")
    write_export(folder / "shadow", order=TURNED)
    options = ["--token-file", write_token(folder / "token"), "--shadow", folder / "shadow"]
    with serving(folder / "export", *options, Authorization=f"Bearer {TOKEN}") as served:
        yield served
        # Workers of xdist share the tests of a file, so that the one about swaps may have had another server.
        refused = served.read_metrics().get("headway_serve_swaps_total:refused", 0)
        status, err = served.stop()
        assert status == 0, err
        assert "Traceback" not in err
        assert "The shadow export answered" in err
        assert err.count("The new export was refused, and the old one goes on") == refused


def test_without_the_token_nothing_is_answered(trial: Served) -> None:
    paths = [("POST", "/predict"), ("POST", "/swap"), ("GET", "/metrics"), ("GET", "/nowhere")]
    for wrong in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN},
        {"Authorization": f"Bearer {TOKEN}x"},
    ):
        for method, path in paths:
            with contextlib.closing(trial.connect()) as connection:
                answer = send(connection, method, path, headers=wrong)
            answer.problem(401)
            assert answer.headers["www-authenticate"] == "Bearer"
    with contextlib.closing(trial.connect()) as connection:
        assert send(connection, "GET", "/healthz").status == 200
        assert send(connection, "GET", "/readyz").status == 200
    assert trial.predict(encode()).labels == ["red"]


def test_the_shadow_is_compared_and_changes_no_answer(trial: Served) -> None:
    def count() -> float:
        page = trial.read_metrics()
        return page.get("headway_serve_shadow_answers_total:different", 0)

    before = count()
    assert trial.predict(encode("green")).labels == ["green"]
    assert trial.predict(fill("blue").tobytes(), "application/octet-stream", X_Shape=f"1,{SIDE},{SIDE},3").labels == [
        "blue"
    ]
    # Those of requests before this test may come meanwhile.
    wait_for(lambda: count() >= before + 2)
    assert trial.read_metrics()["headway_serve_shadow_max_difference"] > 0.9


def test_a_swap_takes_over_and_a_bad_export_does_not(trial: Served) -> None:
    folder, first = trial.folder, trial.started["sha256"]
    kept = shutil.copytree(folder, folder.with_name("kept"))

    def refuse(reason: str) -> None:
        assert reason in trial.ask("POST", "/swap").problem(409)["what"]
        answer = trial.predict(encode("red"))
        assert answer.labels == ["red"]
        assert answer.headers["x-model-sha256"] == first

    assert trial.ask("POST", "/swap").json()["unchanged"] is True
    # A byte of the network, then the whole manifest, then the gate's word.
    with (folder / "model.onnx").open("r+b") as file:
        file.seek(40)
        file.write(b"\xff")
    manifest = json.loads((folder / "pipeline.json").read_text())
    refuse("model.onnx is damaged")
    (folder / "pipeline.json").unlink()
    refuse("not an export")
    write_manifest(folder, build_manifest(folder, NAMES, SIDE, rejected=True))
    refuse("refused the target onnx")
    # A graph that ONNX Runtime cannot load, with a manifest that is right.
    write_manifest(folder, build_manifest(folder, NAMES, SIDE))
    assert json.loads((folder / "pipeline.json").read_text())["files"] != manifest["files"]
    (folder / "model.onnx").write_bytes(b"no graph")
    write_manifest(folder, build_manifest(folder, NAMES, SIDE))
    refuse("cannot load this graph")
    swap_in(folder, kept)
    assert trial.ask("POST", "/swap").json()["unchanged"] is True

    replace(folder, order=TURNED, side=8)
    swapped = trial.ask("POST", "/swap").json()
    assert swapped["unchanged"] is False
    assert swapped["sha256"] != first
    answer = trial.predict(encode("red"))
    assert answer.labels == ["blue"]
    assert answer.headers["x-model-sha256"] == swapped["sha256"]
    # Pixels of the size before are refused by the new one, and not computed.
    old = trial.predict(fill("red").tobytes(), "application/octet-stream", X_Shape=f"1,{SIDE},{SIDE},3")
    assert "n,8,8,3" in old.problem(422)["what"]
    replace(folder)
    assert trial.ask("POST", "/swap").json() == {
        "version": trial.started["version"],
        "sha256": first,
        "unchanged": False,
    }
    assert trial.predict(encode("red")).labels == ["red"]
    counts = trial.read_metrics()
    assert [counts[f"headway_serve_swaps_total:{key}"] for key in ("done", "refused", "unchanged")] == [2, 4, 2]


def test_damaged_and_rejected_exports_are_not_served(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    write_manifest(folder, build_manifest(folder, NAMES, SIDE, rejected=True))
    assert "the gate has refused the target onnx" in refused("serve", folder, status=1)
    write_manifest(folder, build_manifest(folder, NAMES, SIDE))
    assert "there is no such export" in refused("serve", folder, "--shadow", tmp_path / "none", status=2)
    other = write_export(tmp_path / "other", names=("red", "blue", "green"))
    assert "its classes, or the names" in refused("serve", folder, "--shadow", other, status=2)
    assert "no target 'int8'" in refused("serve", folder, "--shadow", folder, "--shadow-target", "int8", status=2)
    assert "Add --shadow EXPORT2" in refused("serve", folder, "--shadow-target", "onnx", status=2)
    with (folder / "model.onnx").open("ab") as file:
        file.write(b"\0")
    assert "model.onnx is damaged" in refused("serve", folder, status=1)


def test_an_export_that_is_replaced_while_it_is_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_export(tmp_path / "export")
    usual = get_target("onnx")

    class Slow:
        def load(self, path: Path, threads: int | None) -> Session:
            replace(path, order=TURNED)
            return usual.load(path, threads)

        def __getattr__(self, name: str) -> Any:
            return getattr(usual, name)

    monkeypatch.setattr("headway.export.exported.get_target", lambda _: Slow())
    with pytest.raises(DataError, match="replaced while it was loaded"):
        open_export(folder, threads=1)
    monkeypatch.undo()
    open_export(folder, threads=1).close()


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        (TOKEN, 0o644, "other users may use the token"),
        (TOKEN, 0o620, "other users may use the token"),
        ("short", 0o600, "16 to 4,096 ASCII characters"),
        (TOKEN + "é", 0o600, "16 to 4,096 ASCII characters"),
        ("a\n" * 20, 0o600, "16 to 4,096 ASCII characters"),
        ("a" * 5000, 0o600, "16 to 4,096 ASCII characters"),
    ],
)
def test_bad_tokens_are_refused(tmp_path: Path, text: str, mode: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        read_token(write_token(tmp_path / "token", text, mode))


def test_a_token_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path("/dev/null")):
        with pytest.raises(UsageError, match="cannot be read"):
            read_token(path)


def test_sigterm_answers_what_was_sent_and_accepts_nothing_new(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export", work=40)
    data = encode("blue")
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
    answers = list[Reply]()

    def ask() -> None:
        answers.append(served.predict(data))

    with (
        serving(folder, "--batch", "1", "--queue", "64") as served,
        socket.create_connection(served.address, WAIT_S) as half,
    ):
        # Half of a request is on its way.
        half.sendall(head.encode() + data[:100])
        with contextlib.closing(served.connect()) as idle:
            assert send(idle, "POST", "/predict", data, {"Content-Type": "image/jpeg"}).labels == ["blue"]
            clients = [threading.Thread(target=ask) for _ in range(12)]
            for client in clients:
                client.start()
            wait_for(lambda: served.read_metrics()["headway_serve_queue_images"] >= 8 or len(answers) > 4)
            served.process.terminate()
            assert served.process.stderr is not None
            assert served.process.stderr.readline().startswith("Stopping")
            for client in clients:
                client.join()
            half.sendall(data[100:])
            answer = b"".join(iter(lambda: half.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in answer
            assert b'"blue"' in answer
            with pytest.raises(OSError, match=r"refused|reset"):
                socket.create_connection(served.address, WAIT_S).recv(1)
        assert [answer.labels for answer in answers] == [["blue"]] * 12
        _, err = served.process.communicate()
        assert served.process.returncode == 0, err
        assert "Traceback" not in err


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    with serving(folder) as served, socket.create_connection(served.address, WAIT_S) as half:
        half.sendall(b"POST /predict HTTP/1.1\r\nContent-Length: 9\r\n")
        served.ask("GET", "/readyz")
        served.process.send_signal(signal.SIGINT)
        assert served.process.stderr is not None
        assert served.process.stderr.readline().startswith("Stopping")
        # It waits for the rest of the request, and says on open connections that it is not ready any more.
        served.process.send_signal(signal.SIGINT)
        _, err = served.process.communicate()
        assert served.process.returncode == 1
        assert "1 request was not answered" in err


@pytest.mark.check
def test_no_request_is_lost_when_servers_stop_under_load(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    request = load_client.build_request("/predict", "image/jpeg", encode())
    sent = 0
    for number in range(6):
        with serving(folder) as served:
            timer = threading.Timer(0.1 * (number + 1), served.process.terminate)
            timer.start()
            found = load_client.run(served.address, [request], 16, float("inf"), 1e9)
            timer.join()
            assert found["lost"] == 0
            assert set(found["answers"]) == {200}
            sent += found["answers"][200]
            _, err = served.process.communicate()
            assert served.process.returncode == 0, err
    assert sent > 500


@pytest.mark.check
def test_a_swap_under_load_costs_no_request(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export")
    request = load_client.build_request("/predict", "image/jpeg", encode("red"))
    with serving(folder) as served:
        found = list[dict[str, Any]]()
        place = served.address
        client = threading.Thread(target=lambda: found.append(load_client.run(place, [request], 8, 3.0, 1e9)))
        client.start()
        for number in range(6):
            replace(folder, order=TURNED if number % 2 == 0 else (0, 1, 2))
            assert served.ask("POST", "/swap").json()["unchanged"] is False
        client.join()
    assert found[0]["lost"] == found[0]["unsent"] == 0
    assert set(found[0]["answers"]) == {200}
