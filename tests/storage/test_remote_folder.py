"""Reading by ranges over a real connection, whatever the network and the server do."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.tiers._server import Asked, Fault, Server, serving, wait_until

from headway.core.errors import DataError, UsageError
from headway.storage.remote_folder import RemoteFolder
from headway.storage.transport import StoppedError

SIZE = 100_000
DATA = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "a file.bin").write_bytes(DATA)
    with serving(tmp_path) as running:
        yield running


@pytest.fixture
def remote(server: Server) -> Iterator[RemoteFolder]:
    opened = RemoteFolder(server.uri, timeout_s=60, attempts=4, pause_s=0.01)
    yield opened
    opened.close()


@pytest.fixture
def in_memory() -> Iterator[RemoteFolder]:
    files = MemoryFileSystem()
    files.pipe_file("/tests-remote/a file.bin", DATA)
    yield RemoteFolder("memory://tests-remote/", attempts=3, pause_s=0.01)
    files.rm("/tests-remote", recursive=True)


def read(remote: RemoteFolder, start: int = 0, length: int = SIZE, name: str = "a file.bin") -> bytes:
    return remote.read(name, start, length).tobytes()


ranges = st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE)).map(
    lambda pair: (pair[0], min(pair[1], SIZE - pair[0]))
)
in_one_server = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@in_one_server
@given(span=ranges)
def test_any_range_brings_its_bytes(remote: RemoteFolder, in_memory: RemoteFolder, span: tuple[int, int]) -> None:
    start, length = span
    for source in (remote, in_memory):
        assert read(source, start, length) == DATA[start : start + length]


def test_a_file_address_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    assert read(RemoteFolder(f"file://{tmp_path}"), 5, 100, "x") == DATA[5:105]


def test_connections_are_kept(server: Server, remote: RemoteFolder) -> None:
    for start in range(0, 1000, 10):
        assert read(remote, start, 10) == DATA[start : start + 10]
    assert server.connections == 1


# Faults


@in_one_server
@given(cuts=st.lists(st.integers(1, 20_000), max_size=6))
def test_a_cut_answer_is_taken_up_again_at_the_byte_where_it_was_cut(
    server: Server, remote: RemoteFolder, cuts: list[int]
) -> None:
    left = list(cuts)
    server.asked.clear()
    server.fault = lambda asked: left.pop(0) if left and asked.end - asked.start > 1 else None
    assert read(remote) == DATA
    asked = [request for request in server.asked if request.end - request.start > 1]
    starts = np.minimum(np.cumsum([0, *cuts]), SIZE)
    assert [request.start for request in asked] == starts[starts < SIZE].tolist()
    assert all(request.end == SIZE for request in asked)


@pytest.mark.parametrize("fault", ["drop", "stall", "503", "500", "429", "408", 0])
def test_what_passes_is_tried_again(server: Server, remote: RemoteFolder, fault: Fault) -> None:
    if fault == "stall":
        remote._transport._timeout_s = 1  # type: ignore[attr-defined]
    faults = [fault, None, fault, fault]
    server.fault = lambda asked: faults.pop(0) if faults else None
    assert read(remote) == DATA


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("drop", "the connection was cut"),
        ("stall", "no answer came in time"),
        ("503", "the server answered 503 Service Unavailable"),
        (0, "the connection was cut"),
    ],
)
def test_what_does_not_pass_is_a_sentence_after_so_many_attempts(
    server: Server, remote: RemoteFolder, fault: Fault, words: str
) -> None:
    if fault == "stall":
        remote._transport._timeout_s = 1  # type: ignore[attr-defined]
    read(remote, 0, 1)
    server.asked.clear()
    if fault == "stall":
        server.fault = lambda asked: "stall" if asked.start == SIZE - 1 else None
        with pytest.raises(DataError, match=words) as raised:
            read(remote, SIZE - 1, 1)
    else:
        server.fault = lambda asked: fault
        with pytest.raises(DataError, match=words) as raised:
            read(remote)
    assert f"{server.uri}/a file.bin" in str(raised.value)
    assert "4 attempts" in str(raised.value)
    assert len(server.asked) in (4, 5)  # a kept connection that turns out to be closed is no attempt


def test_attempts_that_bring_bytes_do_not_count(server: Server, remote: RemoteFolder) -> None:
    server.fault = lambda asked: 5000 if asked.end - asked.start > 1 else None
    assert read(remote) == DATA
    assert len(server.asked) >= SIZE // 5000


@pytest.mark.parametrize("fault", ["403", "401", "400"])
def test_a_refusal_is_not_tried_again(server: Server, remote: RemoteFolder, fault: str) -> None:
    server.fault = lambda asked: fault
    with pytest.raises(DataError, match=f"the server answered {fault}"):
        read(remote)
    assert len(server.asked) == 1


def test_a_missing_file_is_a_sentence(remote: RemoteFolder, in_memory: RemoteFolder) -> None:
    for source in (remote, in_memory):
        with pytest.raises(FileNotFoundError):
            source.read_version("nothing")
        with pytest.raises(DataError, match=r"nothing: there is no such file"):
            read(source, name="nothing")


def test_a_server_without_ranges_is_refused(server: Server, remote: RemoteFolder) -> None:
    server.fault = lambda asked: "whole"
    with pytest.raises(UsageError, match="does not answer range requests"):
        read(remote)


def test_a_redirection_is_followed_and_an_endless_one_is_not(server: Server, remote: RemoteFolder) -> None:
    (server.folder / "b").write_bytes(DATA)
    server.fault = lambda asked: "to /b?signed=1" if asked.name != "b" else None
    assert read(remote) == DATA
    server.fault = lambda asked: "to /b"
    with pytest.raises(DataError, match="redirects in a circle"):
        read(remote)


def test_a_name_and_password_go_to_their_own_address_alone(server: Server) -> None:
    remote = RemoteFolder(server.uri.replace("//", "//me:p%40ss@"))
    server.tag = lambda path: "same"
    assert read(remote, 3, 5) == DATA[3:8]
    assert server.rights == {"Basic bWU6cEBzcw=="}
    (server.folder / "b").write_bytes(DATA)
    server.rights.clear()
    server.fault = lambda asked: f"to {server.uri}/b" if asked.name != "b" else None
    assert read(remote, 3, 5) == DATA[3:8]
    assert server.rights == {"Basic bWU6cEBzcw==", None}
    server.fault = lambda asked: "403"
    with pytest.raises(DataError) as raised:
        read(remote)
    assert f"{server.uri}/a%20file.bin: the server answered 403" in str(raised.value)
    remote.close()


def test_an_address_that_nobody_answers_is_a_sentence(server: Server) -> None:
    remote = RemoteFolder("http://127.0.0.1:9", attempts=2, pause_s=0.01)
    with pytest.raises(DataError, match=r"cannot be read: Connection refused \(2 attempts\)"):
        read(remote)
    remote.close()


# Change


def change_bytes(path: Path) -> None:
    path.write_bytes(DATA[::-1])


def change_size(path: Path) -> None:
    path.write_bytes(DATA + b"more")


@pytest.mark.parametrize("change", [change_bytes, change_size])
def test_a_file_that_changes_is_a_sentence(server: Server, remote: RemoteFolder, change) -> None:  # type: ignore[no-untyped-def]
    read(remote, 0, 100)
    time.sleep(0.05)
    change(server.folder / "a file.bin")
    with pytest.raises(DataError, match="the file changed while it was in use"):
        read(remote, 100, 100)


def test_a_file_that_changes_between_a_cut_and_the_next_attempt_is_a_sentence(
    server: Server, remote: RemoteFolder
) -> None:
    def fault(asked: Asked) -> Fault:
        if asked.end - asked.start > 1 and asked.start == 0:
            return 1000
        if asked.start == 1000:
            time.sleep(0.05)
            change_bytes(server.folder / "a file.bin")
        return None

    server.fault = fault
    with pytest.raises(DataError, match="the file changed while it was in use"):
        read(remote)


def test_a_file_that_becomes_shorter_is_a_sentence(
    server: Server, remote: RemoteFolder, in_memory: RemoteFolder
) -> None:
    read(remote, 0, 10)
    (server.folder / "a file.bin").write_bytes(DATA[:500])
    with pytest.raises(DataError, match=r"ends before byte 1,000 \(it has 500 bytes\)|the file changed"):
        read(remote, 1000, 10)
    read(in_memory, 0, 10)
    MemoryFileSystem().pipe_file("/tests-remote/a file.bin", DATA[:500])
    with pytest.raises(DataError, match="the file changed while it was in use"):
        read(in_memory, 1000, 10)


def test_a_file_of_another_size_than_the_columns_say_is_a_sentence(server: Server, in_memory: RemoteFolder) -> None:
    for uri in (server.uri, in_memory.uri):
        remote = RemoteFolder(uri, sizes={"a file.bin": SIZE + 1})
        with pytest.raises(DataError, match="the file has 100,000 bytes and should have 100,001"):
            read(remote, 0, 10)
        remote.close()


# Threads


def test_many_threads_read_at_once(server: Server) -> None:
    remote = RemoteFolder(server.uri, attempts=50, pause_s=0.001)
    counts: Counter[int] = Counter()
    faults = iter([1, None, "503", 7, "drop", None, 1000] * 100)
    server.fault = lambda asked: next(faults)
    wrong = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(10):
            start = int(rng.integers(0, SIZE - 3000))
            if read(remote, start, 3000) != DATA[start : start + 3000]:
                wrong.append(start)
            counts[seed] += 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    remote.close()
    assert not wrong
    assert set(counts.values()) == {10}
    assert len(counts) == 6


@pytest.mark.parametrize("fault", ["stall", "503"])
def test_stop_ends_what_another_thread_waits_for(server: Server, fault: str) -> None:
    remote = RemoteFolder(server.uri, timeout_s=60, attempts=1000, pause_s=30)
    read(remote, 0, 1)
    server.asked.clear()
    server.fault = lambda asked: fault
    ended = []

    def work() -> None:
        try:
            read(remote)
        except StoppedError:
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: bool(server.asked))
    remote.stop()
    thread.join(60)
    assert ended == [True]
    with pytest.raises(StoppedError):
        read(remote)
    remote.close()


# File systems of fsspec


class Unsteady(MemoryFileSystem):
    """Fails in the ways of object stores: a short answer, an error of its own, no answer."""

    protocol = "unsteady"
    store: dict[str, object] = {}
    pseudo_dirs = [""]
    failures: list[object] = []
    calls: list[tuple[int, int]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("unsteady://", "memory://")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
        self.calls.append((start or 0, end or 0))
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, Exception):
            raise failure
        data: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        return data[:failure] if isinstance(failure, int) else data


@pytest.fixture
def unsteady() -> Iterator[RemoteFolder]:
    fsspec.register_implementation("unsteady", Unsteady, clobber=True)
    Unsteady().pipe_file("/x/a file.bin", DATA)
    Unsteady.calls.clear()
    yield RemoteFolder("unsteady://x", attempts=4, pause_s=0.01)
    Unsteady.store.clear()
    Unsteady.failures.clear()


def test_short_answers_and_errors_of_a_file_system_are_mended(unsteady: RemoteFolder) -> None:
    Unsteady.failures[:] = [10, OSError("reset"), RuntimeError("odd"), 0, 500, TimeoutError()]
    assert read(unsteady) == DATA
    assert [start for start, _ in Unsteady.calls] == [0, 10, 10, 10, 10, 510, 510]


def test_a_file_system_that_keeps_failing_is_a_sentence(unsteady: RemoteFolder) -> None:
    Unsteady.failures[:] = [OSError("the bucket is on fire")] * 10
    with pytest.raises(DataError, match=r"the bucket is on fire \(4 attempts\)"):
        read(unsteady)
    Unsteady.failures[:] = [PermissionError("no")]
    with pytest.raises(DataError, match="may not be read"):
        read(unsteady)


def test_large_ranges_are_asked_for_in_pieces(unsteady: RemoteFolder) -> None:
    large = os.urandom(9 << 20)
    Unsteady().pipe_file("/x/large", large)
    assert read(unsteady, 3, len(large) - 3, "large") == large[3:]
    assert max(end - start for start, end in Unsteady.calls) == 4 << 20


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://bucket/x", r"pip install s3fs"),
        ("gs://bucket/x", r"pip install gcsfs"),
        ("odd://x", "odd://"),
    ],
)
def test_what_nothing_installed_reads_is_wrong_usage(uri: str, words: str) -> None:
    scheme = uri.partition("://")[0]
    if scheme != "odd":
        try:
            fsspec.get_filesystem_class(scheme)
        except ImportError:
            pass
        else:
            pytest.skip(f"{scheme} can be read here")
    with pytest.raises(UsageError, match=words):
        RemoteFolder(uri)
