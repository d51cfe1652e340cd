"""Requests and jobs in this process: what a server that is killed, cancelled or raced makes of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lifecycle.service._service import WAIT_S, build_form, build_tar, draw, draw_tar

from headway.http.problems import ProblemError
from headway.lifecycle.service import requests as requests_module
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.blobs import BlobIndex
from headway.lifecycle.service.datasets import Datasets
from headway.lifecycle.service.jobs import Job, Jobs
from headway.lifecycle.service.keys import Keys
from headway.lifecycle.service.pixels import PixelBudget
from headway.lifecycle.service.requests import Requests
from headway.lifecycle.service.settings import ServiceSettings
from headway.lifecycle.service.tokens import LOCAL
from headway.lifecycle.service.upload import Upload
from headway.lifecycle.service.upload_plan import UploadPlan
from headway.lifecycle.service.uploads import Uploads
from headway.lifecycle.store.rows import Rows
from headway.lifecycle.store.store import Store

TAR = "application/x-tar"


class Server:
    """All of a server but its sockets."""

    def __init__(self, store: Store, **limits: Any) -> None:
        self.settings = ServiceSettings(**limits)
        place = store.folder / "service"
        self.store, self.datasets = store, Datasets(store, place)
        self.uploads, self.jobs = Uploads(place / "uploads", self.settings), Jobs(self.settings)
        self.keys = Keys(place / "keys.db", self.settings.key_age_s)
        self.pool = ThreadPoolExecutor(2)
        self.requests = Requests(
            self.datasets,
            self.uploads,
            self.keys,
            self.jobs,
            self.settings,
            work_folder=place / "work",
            pool=self.pool,
            disk=self.pool,
            commits=self.pool,
        )

    def begin(self, body: bytes, content_type: str = TAR, key: str = "k", **facts: Any) -> Upload:
        """A body that is complete, as that of a POST."""
        plan = UploadPlan(
            principal=LOCAL.name,
            target="cars",
            content_type=content_type,
            length=len(body),
            key=key,
            is_resumable=False,
            **facts,
        )
        upload = self.uploads.create(plan)

        async def send() -> Any:
            yield body

        asyncio.run(upload.append(send(), 0, most=len(body), expected=None, pool=self.pool))
        return upload

    def ask(self, *arguments: Any, **facts: Any) -> Answer:
        return asyncio.run(self.requests.run(self.begin(*arguments, **facts), LOCAL, None))

    def wait(self, job: str) -> Job:
        found = self.jobs.find(job, None)
        until = time.monotonic() + WAIT_S
        while not found.is_ended and time.monotonic() < until:
            time.sleep(0.01)
        return found

    def close(self) -> None:
        self.jobs.close()
        self.pool.shutdown()
        self.keys.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store.make(tmp_path / "store")
    found.create("cars", splits={"train": 1.0})
    return found


@pytest.fixture
def serve(store: Store) -> Iterator[Callable[..., Server]]:
    made = list[Server]()

    def start(**limits: Any) -> Server:
        made.append(Server(store, **limits))
        return made[-1]

    yield start
    for server in made:
        server.close()


def block(server: Server) -> threading.Event:
    """Keeps the only thread of jobs at work until the event is set."""
    event = threading.Event()

    def wait(job: Job) -> Answer:
        event.wait(WAIT_S)
        return Answer(200, {})

    server.jobs.submit(Job("0" * 16, LOCAL.name, "cars", 0), wait)
    return event


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_job_changes_only_the_version_that_it_is_based_on(
    serve: Callable[..., Server], store: Store, is_restarted: bool
) -> None:
    server = serve(job_files=2, jobs=1)
    server.ask(draw_tar(0, 1), key="first")
    head = store.resolve("cars").version
    event = block(server)
    answer = server.ask(draw_tar(10, 3), if_match=(head,))
    assert answer.status == 202
    store.label("cars", {"cat/00000.jpg": "dog"})
    if is_restarted:
        # Stopped before its turn, it goes on at the next start, for the same version.
        server.jobs.is_closing = True
        server.jobs.find(answer.body["job"], None).cancel()
    event.set()
    assert server.wait(answer.body["job"]).state == ("cancelled" if is_restarted else "failed")
    if is_restarted:
        server.close()
        server = serve(job_files=2, jobs=1)
        server.requests.resume_jobs(lambda name: LOCAL)
    job = server.wait(answer.body["job"])
    assert job.state == "failed"
    assert job.problem is not None
    assert (job.problem["status"], job.problem["type"]) == (412, "/problems/head-moved")
    assert [one.number for one in store.log("cars")] == [2, 1, 0]
    # It has failed for good, and is known after another restart.
    server.close()
    again = serve()
    again.requests.resume_jobs(lambda name: LOCAL)
    assert again.jobs.find(answer.body["job"], None).problem == job.problem


def test_a_disk_that_is_full_after_the_commit_makes_no_failure_of_it(
    serve: Callable[..., Server], store: Store
) -> None:
    server = serve()
    database = server.keys._database
    # Room for a key, and none for an answer of several pages.
    (pages,) = database.execute("pragma page_count").fetchone()
    database.execute(f"pragma max_page_count = {pages}")
    body = build_tar({"a.jpg": draw(1), **{f"{number}.svg": b"no image" for number in range(200)}})
    answers = [server.ask(body) for _ in range(2)]
    assert [one.status for one in answers] == [201, 201]
    assert answers[0].body["version"] == answers[1].body["version"] == store.resolve("cars").version
    assert [one.number for one in store.log("cars")] == [1, 0]


def test_a_request_does_not_wait_for_a_job_that_packs(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its images are as many pixels as may be decoded at once."""
    server = serve(job_files=2, jobs=1, image_pixels=24 * 24)
    commit, begun, is_over = Datasets.commit, threading.Event(), threading.Event()

    def wait(*arguments: Any, **more: Any) -> Answer:
        if more["progress"] is not None:
            begun.set()
            is_over.wait(WAIT_S)
        return commit(*arguments, **more)

    monkeypatch.setattr(Datasets, "commit", wait)
    job = server.ask(draw_tar(0, 3)).body["job"]
    assert begun.wait(WAIT_S)
    assert server.ask(draw_tar(10, 1), key="other").status == 201
    assert server.jobs.find(job, None).state == "running"
    is_over.set()
    assert server.wait(job).state == "done"


def test_a_job_is_cancelled_while_it_packs(
    serve: Callable[..., Server], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(job_files=2, jobs=1)
    apply = Store.apply

    def cancel_first(self: Store, *arguments: Any, progress: Any, **options: Any) -> Any:
        # All files are read: what comes now is the pack.
        for job in server.jobs:
            job.cancel()
        return apply(self, *arguments, progress=progress, **options)

    monkeypatch.setattr(Store, "apply", cancel_first)
    answer = server.ask(draw_tar(0, 3))
    assert server.wait(answer.body["job"]).state == "cancelled"
    assert [one.number for one in store.log("cars")] == [0]
    assert list(server.uploads) == []
    # The same request may be sent again.
    monkeypatch.undo()
    again = server.ask(draw_tar(0, 3))
    assert server.wait(again.body["job"]).state == "done"
    assert list((store.folder / "staging").iterdir()) == []


def test_a_killed_server_knows_its_jobs_again(serve: Callable[..., Server], store: Store) -> None:
    server = serve(job_files=2, jobs=1)
    done = server.ask(draw_tar(0, 3), key="done")
    assert server.wait(done.body["job"]).state == "done"
    event = block(server)
    waiting = server.ask(draw_tar(10, 3), key="waiting")
    # As a kill: nothing of this server is closed, and its key is not there yet.
    server.keys.forget(LOCAL.name, "cars", "waiting")
    after = serve(job_files=2, jobs=1)
    after.requests.resume_jobs(lambda name: LOCAL)
    result = after.jobs.find(done.body["job"], None)
    assert result.answer is not None
    assert result.answer.body["added"] == 3
    # The same request again is answered with the job that goes on, and begins no second one.
    again = after.ask(draw_tar(10, 3), key="waiting")
    assert again.body["job"] == waiting.body["job"]
    found = after.wait(waiting.body["job"])
    assert (found.state, found.done, found.total) == ("done", 3, 3)
    assert [one.number for one in store.log("cars")] == [2, 1, 0]
    server.jobs.is_closing = True
    for job in server.jobs:
        job.cancel()
    event.set()


def test_the_first_answer_comes_again_without_its_key(serve: Callable[..., Server]) -> None:
    """Also what was left out: the store remembers it with the version."""
    server = serve()
    server.ask(build_tar({"a.jpg": draw(1)}), key="first")
    body = build_tar({"a2.jpg": draw(1), "b.jpg": draw(2), "c.jpg": b"no image", "d.pdf": b"none"})
    first = server.ask(body)
    assert (first.body["added"], first.body["duplicates"], first.body["rejected_count"]) == (1, 1, 2)
    server.keys.forget(LOCAL.name, "cars", "k")
    assert server.ask(body) == first


def test_a_long_list_of_files_that_are_left_out_is_counted(serve: Callable[..., Server]) -> None:
    server = serve()
    body = build_tar({f"{number}.pdf": b"" for number in range(1100)})
    answer = server.ask(body)
    assert (len(answer.body["rejected"]), answer.body["rejected_count"]) == (1000, 1100)


def test_a_name_may_be_longer_than_that_of_a_file(serve: Callable[..., Server], store: Store) -> None:
    name = "a." + "é" * 200
    body, content_type = build_form((name, draw(1)))
    assert serve().ask(body, content_type).status == 201
    assert [one.name for one in store.list_samples("cars")] == [name]


def test_a_message_says_what_a_version_is_about(serve: Callable[..., Server], store: Store) -> None:
    serve().ask(draw_tar(0, 1), message="monday")
    assert store.log("cars")[0].message == "monday"


def test_images_that_do_not_fit_on_the_disk_are_refused(
    serve: Callable[..., Server], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    upload = server.begin(draw_tar(0, 1))

    class Disk:
        f_bavail, f_frsize = requests_module.SPARE_BYTES, 1

    monkeypatch.setattr(requests_module.os, "statvfs", lambda path: Disk())
    with pytest.raises(ProblemError) as refused:
        asyncio.run(server.requests.run(upload, LOCAL, None))
    assert refused.value.status == 507
    monkeypatch.undo()
    assert asyncio.run(server.requests.run(upload, LOCAL, None)).status == 201


def test_bytes_of_removed_samples_are_found_and_unknown_ones_cost_nothing(store: Store, tmp_path: Path) -> None:
    images = {f"{number}.jpg": draw(number) for number in range(4)}
    for name, data in images.items():
        (tmp_path / name).write_bytes(data)
    store.create("more")
    store.add("cars", tmp_path, unlabelled=True)
    ids = {one.name: one.sample for one in store.list_samples("cars")}
    store.remove("cars", ["0.jpg"])
    store.remove("cars", ["1.jpg"])
    reads = list[str]()

    def read(version: str) -> Rows:
        reads.append(version)
        return store.rows.read(version)

    index = BlobIndex(store, tmp_path / "removed.db", read)
    for name, sample in ids.items():
        blob = index.find(sample)
        assert blob.objects.read(blob.shard, blob.offset, blob.length) == images[name]
    reads.clear()
    for number in range(3):
        with pytest.raises(ProblemError) as refused:
            index.find(f"{number:064x}")
        assert refused.value.status == 404
    heads = {head.version for head in store.list_datasets().values()}
    assert set(reads) == heads
    assert len(reads) == 3 * len(heads)
    # A new removal is noted, also if the version before was collected as garbage meanwhile.
    store.remove("cars", ["2.jpg"])
    assert index.find(ids["2.jpg"]).length == len(images["2.jpg"])
    # What is deleted is made anew.
    assert BlobIndex(store, tmp_path / "again.db", store.rows.read).find(ids["0.jpg"]).length == len(images["0.jpg"])


def test_pages_of_a_difference_are_the_whole(store: Store, tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.jpg").write_bytes(draw(number))
    store.add("cars", tmp_path, unlabelled=True)
    store.label("cars", {"0.jpg": "cat", "1.jpg": "cat"})
    store.remove("cars", ["2.jpg", "3.jpg"])
    datasets = Datasets(store, tmp_path / "service")
    for pair in (("v1", "v3"), ("v3", "v1"), ("v0", "v3"), ("v3", "v3")):
        whole = store.diff(f"cars@{pair[0]}", f"cars@{pair[1]}").to_json()
        for count in (1, 2, 100):
            found: dict[str, Any] = {"added": [], "removed": [], "changed": []}
            after = ""
            while True:
                page = datasets.compare("cars", *pair, after=after, count=count)
                for kind in found:
                    found[kind] += page[kind]
                after = page["next"] or ""
                if not after:
                    break
            assert found | {"counts": page["counts"]} == whole
    numbers, below = list[int](), None
    while True:
        listed = datasets.list_versions("cars", below, 2)
        numbers += [one["number"] for one in listed["versions"]]
        below = listed["next"]
        if below is None:
            break
    assert numbers == [3, 2, 1, 0]


def test_labels_do_not_wait_for_pixels() -> None:
    budget = PixelBudget(1)
    with budget.hold(1), budget.hold(0):
        pass


def test_processes_and_other_jobs_do_not_keep_each_other_out() -> None:
    jobs, is_over = Jobs(ServiceSettings(jobs=1, queued_jobs=1)), threading.Event()

    def work(job: Job) -> Answer:
        is_over.wait()
        job.expect_wanted()
        return Answer(200, {})

    trainings = [Job(f"{number}", "anna", "x", 1, "run") for number in range(2)]
    for job in trainings:
        jobs.submit(job, work, is_process=True)
        while trainings[0].state == "queued":
            time.sleep(0.001)
    jobs.expect_room()
    with pytest.raises(ProblemError, match="1 jobs wait already"):
        jobs.expect_room(is_process=True)
    # Nobody waits for this one any more.
    trainings[1].cancel()
    jobs.expect_room(is_process=True)
    is_over.set()
    jobs.close()


def test_pixels_of_all_requests_are_limited() -> None:
    budget, most, now = PixelBudget(100), 0, 0
    lock = threading.Lock()

    def decode(pixels: int) -> None:
        nonlocal most, now
        with budget.hold(pixels):
            with lock:
                now += min(pixels, 100)
                most = max(most, now)
            time.sleep(0.001)
            with lock:
                now -= min(pixels, 100)

    sizes = np.random.default_rng(0).integers(1, 130, 40).tolist()
    threads = [threading.Thread(target=decode, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 100
    assert now == 0
