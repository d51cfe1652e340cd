"""Kills and cuts: an upload goes on where it was, a request runs once, and nothing half done can be seen."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tests._support import free_port
from tests.lifecycle.service._cutting import Proxy
from tests.lifecycle.service._service import Served, build_changes, check_problem, create, draw_tar, key, serving_data

from headway.lifecycle import Client
from headway.lifecycle.store.store import Store


class Restarter:
    """A server on one port that is killed after so many received bytes, and started again."""

    def __init__(self, store: Path, *options: str) -> None:
        self._store, self._options, self.port = store, options, free_port()
        self._running: Any = None
        self.served = self.start()

    def start(self) -> Served:
        self._running = serving_data(self._store, *self._options, port=self.port)
        self.served = self._running.__enter__()
        return self.served

    def kill(self) -> None:
        self.served.process.kill()
        self._running.__exit__(None, None, None)


def wait_for_bytes(store: Path, count: int, ended: threading.Event) -> None:
    """Until the newest upload holds so many bytes, or its client has ended."""
    while not ended.is_set():
        files = [path for path in (store / "service/uploads").glob("*/data") if path.exists()]
        try:
            if any(path.stat().st_size >= count for path in files):
                return
        except FileNotFoundError:
            continue


def survive(store: Path, body: Path, kills: int, seed: int) -> tuple[dict[str, Any], int]:
    """Uploads a file while its server is killed so often; returns the answer and the bytes that were sent."""
    moments = random.Random(seed)
    server, ended, answers = Restarter(store), threading.Event(), list[dict[str, Any]]()
    create(server.served, "cars")
    sent = 0

    def note(done: int, total: int) -> None:
        nonlocal sent
        sent += 1

    def upload() -> None:
        try:
            client = Client(f"http://127.0.0.1:{server.port}", patience_s=120)
            answers.append(client.upload("cars", body, progress=note))
        finally:
            ended.set()

    thread = threading.Thread(target=upload)
    thread.start()
    try:
        size = body.stat().st_size
        for count in sorted(moments.sample(range(1, size), kills)):
            wait_for_bytes(store, count, ended)
            server.kill()
            server.start()
        thread.join()
        versions = server.served.ask("GET", "/datasets/cars/versions").json()["versions"]
        assert [one["number"] for one in versions] == [1, 0], versions
    finally:
        ended.set()
        server.kill()
        thread.join()
    assert len(answers) == 1
    return answers[0], sent


def build_body(folder: Path, images: int = 60) -> Path:
    path = folder / "body.tar"
    # Filled up, so that it is sent in many parts: the archive ends before.
    path.write_bytes(draw_tar(0, images) + bytes(12 << 20))
    return path


@pytest.mark.check
def test_an_upload_survives_a_killed_server(tmp_path: Path) -> None:
    answer, _ = survive(tmp_path / "store", build_body(tmp_path), 1, 0)
    assert answer["added"] == 60
    assert Store(tmp_path / "store").verify() == []


@pytest.mark.check
def test_many_kills_give_the_same_version(tmp_path: Path) -> None:
    """`python -m bench.lifecycle --only kills` has fifty."""
    body, expected = build_body(tmp_path), ""
    for seed in range(2):
        store = tmp_path / f"store-{seed}"
        answer, _ = survive(store, body, 5, seed)
        expected = expected or answer["version"]
        assert answer["version"] == expected
        assert Store(store).verify() == []


@pytest.mark.check
def test_fifty_cut_connections_give_the_same_version(tmp_path: Path) -> None:
    body = build_body(tmp_path)
    data = body.read_bytes()
    with serving_data(tmp_path / "store") as served:
        create(served, "cars")
        moments = random.Random(1)
        cuts = [moments.randrange(1, len(data) // 60) for _ in range(50)]
        with Proxy(served.address, cuts) as proxy:
            client = Client(f"http://127.0.0.1:{proxy.port}", patience_s=120)
            answer = client.upload("cars", body)
        assert answer["added"] == 60
        assert proxy.cuts_left == 0
        # What was on its way at a cut is sent a second time, and nothing else; the rest are heads of requests.
        assert proxy.passed_bytes <= sum(cuts) + len(data) + 50_000
        assert served.ask("GET", "/datasets/cars").json()["samples"] == 60


MOMENTS = {
    "work": lambda store: any((store / "service/work").glob("*/*")),
    "version": lambda store: len(list((store / "versions").iterdir())) > 1,
}
"""What can be seen of a request that is complete, in the order in which it appears."""


@pytest.mark.check
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_that_is_killed_after_the_last_byte_runs_the_request_once(tmp_path: Path, moment: str) -> None:
    store, body, usual = tmp_path / "store", draw_tar(0, 200), {"Content-Type": "application/x-tar"} | key()
    with serving_data(store) as served:
        create(served, "cars")
        empty = served.ask("GET", "/datasets/cars").json()["version"]
        ended = threading.Event()

        def post() -> None:
            try:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    served.ask("POST", "/datasets/cars", body, usual)
            finally:
                ended.set()

        thread = threading.Thread(target=post)
        thread.start()
        while not ended.is_set():
            # Files come and go while they are listed.
            with contextlib.suppress(FileNotFoundError):
                if MOMENTS[moment](store):
                    break
        served.process.kill()
        thread.join()
    assert Store(store).verify() == []
    assert Store(store).resolve("cars").number in (0, 1)
    with serving_data(store) as served:
        again = served.ask("POST", "/datasets/cars", body, usual)
        assert again.status == 201
        assert (again.json()["added"], again.json()["parent"]) == (200, empty)
        assert [one["number"] for one in served.ask("GET", "/datasets/cars/versions").json()["versions"]] == [1, 0]
        assert list((store / "service/work").iterdir()) == []


@pytest.mark.check
def test_a_lost_answer_is_given_again(tmp_path: Path) -> None:
    """The version is made, and the server is killed before the answer is kept or sent: the request runs once."""
    body = draw_tar(0, 3)
    headers = {"Content-Type": "application/x-tar"} | key()
    with serving_data(tmp_path / "store") as served:
        create(served, "cars")
        first = served.ask("POST", "/datasets/cars", body, headers)
        assert first.status == 201
        facts, usual = b'{"classes": ["cat"]}', {"Content-Type": "application/json"} | key()
        made = served.ask("PUT", "/datasets/boats", facts, usual)
        assert served.ask("POST", "/datasets/boats", draw_tar(0, 2), headers | key()).status == 201
        served.process.kill()
    # As if the kill had come before the answer was kept.
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(tmp_path / "store/service/keys.db")) as database, database:
        database.execute("update keys set answer = null")
    with serving_data(tmp_path / "store") as served:
        again = served.ask("POST", "/datasets/cars", body, headers)
        assert again.status == 201
        assert again.json()["version"] == first.json()["version"]
        assert again.json()["added"] == 3
        assert len(served.ask("GET", "/datasets/cars/versions").json()["versions"]) == 2
        # A new data set too, whatever it has become meanwhile; another body or another key is another request.
        repeated = served.ask("PUT", "/datasets/boats", facts, usual)
        assert (repeated.status, repeated.body) == (made.status, made.body) == (201, made.body)
        for other, sent in ((b"{}", usual), (facts, usual | key())):
            check_problem(served.ask("PUT", "/datasets/boats", other, sent), 409, "/problems/exists")


@pytest.mark.check
def test_a_job_goes_on_after_a_kill(tmp_path: Path) -> None:
    with serving_data(tmp_path / "store", "--job-files", "5") as served:
        create(served, "cars")
        reply = served.ask("POST", "/datasets/cars", draw_tar(0, 300), {"Content-Type": "application/x-tar"} | key())
        assert reply.status == 202
        served.process.kill()
    with serving_data(tmp_path / "store", "--job-files", "5") as served:
        client = Client(served.started["url"])
        if client.describe("cars")["samples"] != 300:
            result = client.wait(reply.json()["job"], poll_s=0.05)
            assert result["added"] == 300
        assert [one["number"] for one in client.list_versions("cars")] == [1, 0]


@pytest.mark.check
def test_eight_writers_lose_nothing(tmp_path: Path) -> None:
    """Each sets labels of its own samples; with If-Match * nobody waits for another, and no answer is a 5xx."""
    with serving_data(tmp_path / "store") as served:
        create(served, "cars", splits={"train": 1.0})
        served.ask("POST", "/datasets/cars", draw_tar(0, 80), {"Content-Type": "application/x-tar"} | key())
        failures = list[Any]()

        def write(writer: int) -> None:
            for number in range(writer, 80, 8):
                change = {"op": "label", "name": f"cat/{number:05d}.jpg", "label": f"by-{writer}"}
                body, usual = build_changes(change)
                reply = served.ask("POST", "/datasets/cars", body, usual | {"If-Match": "*"})
                # Another writer came first: the same change again, as a new request.
                while reply.status == 412:
                    body, usual = build_changes(change)
                    reply = served.ask("POST", "/datasets/cars", body, usual | {"If-Match": "*"})
                if reply.status != 201:
                    failures.append((reply.status, reply.body))

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        tree = served.ask("GET", "/datasets/cars").json()
        assert tree["classes"] == {f"by-{writer}": 10 for writer in range(8)}
        assert tree["number"] == 81
