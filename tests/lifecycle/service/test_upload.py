"""One upload: whatever is cut, refused, ended or restarted, its bytes are those that were sent."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.untrusted_json import JsonError
from headway.http.problems import ProblemError
from headway.lifecycle.service import upload as upload_module
from headway.lifecycle.service import uploads as uploads_module
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.digests import Expected
from headway.lifecycle.service.settings import ServiceSettings
from headway.lifecycle.service.upload import ClientLeftError, Upload
from headway.lifecycle.service.upload_plan import JobNote, UploadPlan
from headway.lifecycle.service.uploads import Uploads

MOST = 1 << 30


def plan(length: int | None = None, **more: object) -> UploadPlan:
    facts = {"id": "a" * 32, "principal": "anna", "target": "cars", "content_type": "application/x-tar"}
    return UploadPlan(**facts, created_s=1.0, length=length, **more)  # type: ignore[arg-type]


def make(folder: Path, about: UploadPlan) -> Upload:
    upload = Upload(folder, about)
    upload.make_folder()
    return upload


async def send(*chunks: bytes, cut: bool = False) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if cut:
        raise ClientLeftError


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


Step = tuple[str, list[bytes]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["whole", "cut", "digest", "wrong digest", "cut digest", "wrong offset", "restart", "kill"]),
        st.lists(st.binary(max_size=40), max_size=4),
    ),
    max_size=12,
)


@given(steps=STEPS)
def test_the_bytes_are_those_that_were_sent(steps: list[Step]) -> None:
    """A model: which requests leave their bytes, and which do not."""
    sent = b""
    with TemporaryDirectory() as temporary, threads() as pool:
        folder = Path(temporary) / "u"
        upload = make(folder, plan())

        async def run() -> None:
            nonlocal upload, sent
            for kind, chunks in steps:
                data = b"".join(chunks)
                if kind == "restart":
                    upload = Upload.load(folder)
                elif kind == "kill":
                    # Written, and neither counted nor checked: without a digest the bytes stay, with one they go.
                    with upload.path.open("ab") as file:
                        file.write(data)
                    (folder / "unchecked").write_text(str(len(sent)))
                    upload = Upload.load(folder)
                else:
                    value = hashlib.sha256(data if kind == "digest" else data + b"!").digest()
                    expected = Expected("sha256", value) if "digest" in kind else None
                    offset = len(sent) + (kind == "wrong offset")
                    work = upload.append(
                        send(*chunks, cut="cut" in kind), offset, most=MOST, expected=expected, pool=pool
                    )
                    if kind in ("whole", "digest"):
                        await work
                        sent += data
                    elif kind == "cut":
                        with pytest.raises(ClientLeftError):
                            await work
                        sent += data
                    else:
                        with pytest.raises((ProblemError, ClientLeftError)):
                            await work
                assert upload.offset == len(sent)
                assert upload.path.read_bytes() == sent

        asyncio.run(run())
        assert upload.compute_sha256() == hashlib.sha256(sent).hexdigest()


def test_a_newer_request_ends_one_that_hangs_and_keeps_its_bytes(tmp_path: Path) -> None:
    async def run() -> None:
        hanging = asyncio.Event()

        async def hang() -> AsyncIterator[bytes]:
            yield b"abc"
            hanging.set()
            await asyncio.Event().wait()

        first = asyncio.create_task(upload.append(hang(), 0, most=MOST, expected=None, pool=pool))
        await hanging.wait()
        await upload.end_append()
        assert upload.offset == 3
        with pytest.raises(ProblemError) as refused:
            await first
        assert refused.value.status == 409
        # Two at once: the last one goes on.
        await upload.append(send(b"def"), 3, most=MOST, expected=None, pool=pool)

    with threads() as pool:
        upload = make(tmp_path / "u", plan())
        asyncio.run(run())
    assert upload.path.read_bytes() == b"abcdef"


def test_a_server_that_stops_keeps_the_bytes_and_does_not_answer(tmp_path: Path) -> None:
    async def run() -> None:
        hanging = asyncio.Event()

        async def hang() -> AsyncIterator[bytes]:
            yield b"abc"
            hanging.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(upload.append(hang(), 0, most=MOST, expected=None, pool=pool))
        await hanging.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with threads() as pool:
        upload = make(tmp_path / "u", plan())
        asyncio.run(run())
    assert Upload.load(tmp_path / "u").offset == 3


@pytest.mark.parametrize(
    ("length", "most", "status", "kind"), [(4, 4, 400, "inconsistent-upload-length"), (None, 4, 413, "")]
)
def test_more_bytes_than_were_announced_are_refused(
    tmp_path: Path, length: int | None, most: int, status: int, kind: str
) -> None:
    with threads() as pool:
        upload = make(tmp_path / "u", plan(length))
        with pytest.raises(ProblemError) as refused:
            asyncio.run(upload.append(send(b"abc", b"def"), 0, most=most, expected=None, pool=pool))
    assert refused.value.status == status
    assert kind in refused.value.to_tree()["type"]
    assert upload.offset == 0
    assert upload.path.read_bytes() == b""


def test_the_length_cannot_change(tmp_path: Path) -> None:
    upload = make(tmp_path / "u", plan())
    upload.set_length(5)
    upload.set_length(5)
    assert Upload.load(tmp_path / "u").plan.length == 5
    with pytest.raises(ProblemError, match="length of 5"):
        upload.set_length(6)


def test_a_full_disk_keeps_what_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = make(tmp_path / "u", plan())
    real, calls = upload_module.os.pwrite, 0

    def fill(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:2], offset)

    monkeypatch.setattr(upload_module.os, "pwrite", fill)
    with threads() as pool, pytest.raises(ProblemError) as refused:
        asyncio.run(upload.append(send(b"abc"), 0, most=MOST, expected=None, pool=pool))
    assert refused.value.status == 507
    assert upload.offset == 2
    assert Upload.load(tmp_path / "u").offset == 2


def test_the_digest_of_the_whole_is_checked(tmp_path: Path) -> None:
    for algorithm in ("sha256", "sha512"):
        right = hashlib.new(algorithm, b"abc").hexdigest()
        upload = make(tmp_path / algorithm, plan(digest_algorithm=algorithm, digest=right))
        with threads() as pool:
            asyncio.run(upload.append(send(b"ab", b"c"), 0, most=MOST, expected=None, pool=pool))
            assert upload.compute_sha256() == hashlib.sha256(b"abc").hexdigest()
            asyncio.run(upload.append(send(b"d"), 3, most=MOST, expected=None, pool=pool))
        with pytest.raises(ProblemError) as refused:
            upload.compute_sha256()
        assert refused.value.status == 400


def test_an_answer_survives_a_restart_and_replaces_the_bytes(tmp_path: Path) -> None:
    upload = make(tmp_path / "u", plan(3))
    upload.path.write_bytes(b"abc")
    answer = Answer(201, {"version": "1"}, {"etag": '"1"'})
    upload.finish(answer)
    again = Upload.load(tmp_path / "u")
    assert again.answer == answer
    assert again.offset == 3
    assert again.is_complete
    assert not upload.path.exists()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"id": 5}', b'{"id": "a"}'])
def test_a_damaged_plan_is_refused(text: bytes) -> None:
    with pytest.raises(JsonError):
        UploadPlan.from_json(text)


def test_a_plan_is_what_was_written() -> None:
    one = plan(7, if_match=("a", "b"), key="k", digest_algorithm="sha256", digest="00")
    assert UploadPlan.from_json(one.to_json().encode()) == one


def test_uploads_are_found_again_and_limited(tmp_path: Path) -> None:
    settings = ServiceSettings(open_uploads=2, body_bytes=100)
    uploads = Uploads(tmp_path / "uploads", settings)
    facts = {"principal": "anna", "target": "cars", "content_type": "application/x-tar"}
    kept = [uploads.create(UploadPlan(**facts, length=5)) for _ in range(2)]
    with pytest.raises(ProblemError) as refused:
        uploads.create(UploadPlan(**facts, length=5))
    assert refused.value.status == 429
    with pytest.raises(ProblemError) as refused:
        uploads.create(UploadPlan(**facts, length=101))
    assert refused.value.status == 413
    # What a kill has left while an upload was made or removed.
    (tmp_path / "uploads" / ("b" * 32)).mkdir()
    again = Uploads(tmp_path / "uploads", settings)
    assert {one.plan.id for one in again} == {one.plan.id for one in kept}
    assert not (tmp_path / "uploads" / ("b" * 32)).exists()
    name = kept[0].plan.id
    assert again.find(name, "anna").plan == kept[0].plan
    for principal, wanted in (("bert", name), (None, "c" * 32)):
        with pytest.raises(ProblemError) as refused:
            again.find(wanted, principal)
        assert refused.value.status == 404
    old = Uploads(tmp_path / "uploads", ServiceSettings(upload_age_s=1e-9))
    for one in old.take_old():
        one.remove()
    assert list(old) == []
    assert list((tmp_path / "uploads").iterdir()) == []


def test_finished_uploads_are_kept_up_to_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads_module, "KEPT_UPLOADS", 2)
    uploads = Uploads(tmp_path / "uploads", ServiceSettings(open_uploads=1))
    made = list[Upload]()
    for _ in range(4):
        # A finished one is not counted: only one may be unfinished.
        made.append(uploads.create(UploadPlan(principal="anna", target="cars", content_type="", length=1)))
        made[-1].finish(Answer(201, {}))
    unfinished = uploads.create(UploadPlan(principal="anna", target="cars", content_type="", length=1))
    assert uploads.take_old() == made[:2]
    assert list(uploads) == [*made[2:], unfinished]


def test_an_upload_that_is_begun_again_with_its_key_is_the_same(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path / "uploads", ServiceSettings())
    facts = {"principal": "anna", "target": "cars", "content_type": "application/x-tar", "length": 5}
    first = uploads.create(UploadPlan(**facts, key="k"))  # type: ignore[arg-type]
    assert uploads.create(UploadPlan(**facts, key="k")) is first  # type: ignore[arg-type]
    others = [facts | {"length": 6, "key": "k"}, facts | {"key": "l"}, facts | {"key": "k", "principal": "bert"}, facts]
    for other in others:
        assert uploads.create(UploadPlan(**other)) is not first  # type: ignore[arg-type]
    # One that has bytes is asked for its offset, by its name.
    with threads() as pool:
        asyncio.run(first.append(send(b"abc"), 0, most=MOST, expected=None, pool=pool))
    assert uploads.create(UploadPlan(**facts, key="k")) is not first  # type: ignore[arg-type]


class Disk:
    """As `os.statvfs` returns it. Attributes: free: bytes beside those that stay free."""

    f_frsize = 1

    def __init__(self, free: int) -> None:
        self.f_bavail = free + upload_module.SPARE_BYTES


def test_announced_uploads_of_one_token_fit_on_the_disk_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = Uploads(tmp_path / "uploads", ServiceSettings())
    monkeypatch.setattr(uploads_module.os, "statvfs", lambda path: Disk(1000))
    uploads.create(UploadPlan(principal="anna", target="cars", content_type="", length=600))
    with pytest.raises(ProblemError) as refused:
        uploads.create(UploadPlan(principal="anna", target="cars", content_type="", length=600))
    assert refused.value.status == 507
    # Nobody keeps others out by announcements alone.
    uploads.create(UploadPlan(principal="bert", target="cars", content_type="", length=600))


def test_each_write_leaves_the_spare_bytes_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = make(tmp_path / "u", plan())
    with threads() as pool:
        asyncio.run(upload.append(send(b"abc"), 0, most=MOST, expected=None, pool=pool))
        monkeypatch.setattr(upload_module.os, "fstatvfs", lambda descriptor: Disk(2))
        with pytest.raises(ProblemError) as refused:
            asyncio.run(upload.append(send(b"def"), 3, most=MOST, expected=None, pool=pool))
    assert refused.value.status == 507
    assert upload.offset == 3


@pytest.mark.parametrize("function", ["open", "sync_folder"])
def test_a_request_that_cannot_begin_to_write_does_not_block_the_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    upload = make(tmp_path / "u", plan())
    expected = Expected("sha256", hashlib.sha256(b"abc").digest())
    with threads() as pool:
        with monkeypatch.context() as patch:
            patch.setattr(upload_module if function == "sync_folder" else upload_module.os, function, fail)
            with pytest.raises(OSError, match="Too many"):
                asyncio.run(upload.append(send(b"abc"), 0, most=MOST, expected=expected, pool=pool))
        assert not upload.is_busy
        asyncio.run(upload.append(send(b"abc"), 0, most=MOST, expected=expected, pool=pool))
    assert upload.offset == 3


def test_a_job_is_known_after_a_restart_with_its_answer(tmp_path: Path) -> None:
    upload = make(tmp_path / "u", plan(3, is_resumable=False))
    upload.path.write_bytes(b"abc")
    note = JobNote(id="0" * 16, fingerprint=hashlib.sha256(b"abc").hexdigest(), expected="f" * 64)
    upload.set_job(note)
    again = Upload.load(tmp_path / "u")
    assert (again.job, again.offset, again.is_complete) == (note, 3, True)
    again.finish(Answer(201, {"version": "1"}))
    last = Upload.load(tmp_path / "u")
    assert (last.job, last.answer) == (note, again.answer)


def test_a_disk_without_room_refuses_an_upload(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path / "uploads", ServiceSettings(body_bytes=1 << 60))
    with pytest.raises(ProblemError) as refused:
        uploads.create(UploadPlan(principal="anna", target="cars", content_type="", length=1 << 59))
    assert refused.value.status == 507
