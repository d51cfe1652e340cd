"""Uploads to `headway serve-data` over the loopback, and commits of labels by eight clients.

The server is a process of its own. The clock of an upload begins with the first byte and ends with the answer to the
last one, when all bytes are hashed with SHA-256 and synced to disk; making a version of them is no part of it. So the
upload is of the IETF draft's form, and its last request is left out. Beside the rate stand CPU seconds of the server
for each GB, and how much more memory it has at its highest than before, mapped files left out.

Another upload is a tar file of images, and its clock ends when their version is there: parsed, checked, packed and
committed. Its images differ in the bytes behind their end alone, so that none is a duplicate.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import subprocess
import sys
import tarfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from bench._arms import ROOT
from bench._common import Claim, table
from headway.lifecycle import Client

GB = 1_000_000_000
SEND_BYTES = 1 << 20
WRITERS, CHANGES = 8, 1_000


def measure_uploads(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Uploads a file several times; returns `upload_mb_s`, `upload_cpu_s_gb` and `upload_memory_mb`."""
    size, rounds = (GB // 20, 2) if options.quick else (2 * GB, 5)
    block = np.random.default_rng(0).bytes(SEND_BYTES)
    rates, costs, peaks = list[float](), list[float](), list[float]()
    with serve(folder / "store") as (address, process):
        ask(address, "PUT", "/datasets/bench", b"{}", {"Content-Type": "application/json"})
        for _ in range(rounds):
            place = begin_upload(address, size)
            before, cpu_s = count_own_bytes(process), count_cpu_s(process)
            with watch_memory(process) as peak:
                began = time.perf_counter()
                send_blocks(address, place, block, size)
                seconds = time.perf_counter() - began
            rates.append(size / 1e6 / seconds)
            costs.append((count_cpu_s(process) - cpu_s) * GB / size)
            peaks.append((max(peak) - before) / 1e6)
            ask(address, "DELETE", place)
    rows = [("round", "MB/s", "CPU s a GB", "MB more")]
    rows += [
        (str(number), f"{rate:.0f}", f"{cost:.2f}", f"{more:.1f}")
        for number, (rate, cost, more) in enumerate(zip(rates, costs, peaks, strict=True), 1)
    ]
    table(rows)
    how = f"{size / GB:g} GB over the loopback, SHA-256 and fsync, {rounds} rounds"
    middle = sorted(rates)[len(rates) // 2]
    return [
        Claim("upload_mb_s", middle, "MB/s", f"median of {how}"),
        Claim(
            "upload_cpu_s_gb", sorted(costs)[len(costs) // 2], "s", f"CPU of the server for each GB, median of {how}"
        ),
        Claim(
            "upload_memory_mb", max(peaks), "MB", f"memory without mapped files above that before, the most of {how}"
        ),
    ]


def measure_additions(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Uploads a tar file of images and waits for their version; returns `addition_mb_s` and `addition_memory_mb`."""
    size = GB // 50 if options.quick else 2 * GB
    body = folder / "images.tar"
    images = write_images(body, size)
    with serve(folder / "added") as (address, process):
        ask(address, "PUT", "/datasets/bench", b"{}", {"Content-Type": "application/json"})
        client = Client("http://{}:{}".format(*address))
        before, cpu_s = count_own_bytes(process), count_cpu_s(process)
        with watch_memory(process) as peak:
            began = time.perf_counter()
            added = client.upload("bench", body)["added"]
            seconds = time.perf_counter() - began
        spent_s = count_cpu_s(process) - cpu_s
    assert added == images, (added, images)
    total, more = body.stat().st_size, (max(peak) - before) / 1e6
    body.unlink()
    rows = [("images", "MB", "seconds", "MB/s", "CPU s a GB", "MB more")]
    rate = total / 1e6 / seconds
    rows.append(
        (
            str(images),
            f"{total / 1e6:.0f}",
            f"{seconds:.1f}",
            f"{rate:.0f}",
            f"{spent_s * GB / total:.1f}",
            f"{more:.0f}",
        )
    )
    table(rows)
    how = f"a tar file of {images} images and {total / GB:.2f} GB, from the first byte to its version"
    return [
        Claim("addition_mb_s", rate, "MB/s", how),
        Claim("addition_memory_mb", more, "MB", f"memory without mapped files above that before, the most of {how}"),
    ]


def write_images(path: Path, size: int) -> int:
    """Writes a tar file of about so many bytes; returns the number of images."""
    draws = np.random.default_rng(0)
    picture = io.BytesIO()
    Image.fromarray(draws.integers(0, 255, (256, 256, 3), np.uint8)).save(picture, "JPEG", quality=90)
    data, count = picture.getvalue(), 0
    with tarfile.open(path, "w") as tar:
        while count * len(data) < size:
            # Bytes behind the end of a JPEG belong to nothing.
            whole = data + count.to_bytes(8)
            member = tarfile.TarInfo(f"{count:06d}.jpg")
            member.size = len(whole)
            tar.addfile(member, io.BytesIO(whole))
            count += 1
    return count


def measure_commits(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Eight clients set one label a request; returns `commits_s` and `commit_cpu_ms`, and what was lost or failed."""
    changes = 16 if options.quick else CHANGES
    images = 64
    with serve(folder / "store") as (address, process):
        ask(address, "PUT", "/datasets/bench", b"{}", {"Content-Type": "application/json"})
        post(address, draw_tar(images), {"Content-Type": "application/x-tar"})
        statuses = list[int]()

        def write(writer: int) -> None:
            with contextlib.closing(http.client.HTTPConnection(*address, timeout=600)) as connection:
                for number in range(writer, changes, WRITERS):
                    # Each request changes something: a label that no one before had.
                    row = {"op": "label", "name": f"{number % images}.jpg", "label": f"label {number}"}
                    headers = {"Content-Type": "application/json", "If-Match": "*"}
                    headers["Idempotency-Key"] = f'"{uuid.uuid4()}"'
                    connection.request("POST", "/datasets/bench", json.dumps([row]).encode(), headers)
                    answer = connection.getresponse()
                    answer.read()
                    statuses.append(answer.status)

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
        began, cpu_s = time.perf_counter(), count_cpu_s(process)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds, cpu_s = time.perf_counter() - began, count_cpu_s(process) - cpu_s
        kept = json.loads(ask(address, "GET", "/datasets/bench")[1])["number"] - 1
    lost, failed = changes - kept, sum(status >= 500 for status in statuses)
    table(
        [
            ("commits", "seconds", "commits/s", "CPU ms each", "lost", "5xx"),
            (
                str(changes),
                f"{seconds:.1f}",
                f"{changes / seconds:.1f}",
                f"{cpu_s * 1000 / changes:.1f}",
                str(lost),
                str(failed),
            ),
        ]
    )
    how = f"{changes} requests of {WRITERS} clients, one label each, {images} samples"
    return [
        Claim("commits_s", changes / seconds, "1/s", how),
        Claim("commit_cpu_ms", cpu_s * 1000 / changes, "ms", f"CPU of the server for each of {how}"),
        Claim("commits_lost", lost, "", how),
        Claim("commits_failed", failed, "", f"answers 5xx of {how}"),
    ]


@contextlib.contextmanager
def serve(store: Path, port: int = 0) -> Iterator[tuple[tuple[str, int], psutil.Process]]:
    """A server of a store, on a free port or a given one; yields its address and process."""
    arguments = [sys.executable, "-m", "headway", "serve-data", str(store), "--bind", f"127.0.0.1:{port}", "--json"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            host, _, port = url.removeprefix("http://").rpartition(":")
            yield (host, int(port)), psutil.Process(process.pid)
        finally:
            process.terminate()


def ask(
    address: tuple[str, int], method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[dict[str, str], bytes]:
    """One request; returns headers and body of the answer."""
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=600)) as connection:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status < 400, (method, path, answer.status, data)
        return {name.lower(): value for name, value in answer.getheaders()}, data


def post(address: tuple[str, int], body: bytes, headers: dict[str, str]) -> None:
    ask(address, "POST", "/datasets/bench", body, headers | {"Idempotency-Key": f'"{uuid.uuid4()}"'})


def begin_upload(address: tuple[str, int], size: int) -> str:
    """Begins an upload of so many bytes and one more, which is not sent: nothing is made of it."""
    headers = {"Content-Type": "application/x-tar", "Upload-Complete": "?0", "Upload-Length": str(size + 1)}
    return ask(address, "POST", "/datasets/bench", b"", headers)[0]["location"]


def send_blocks(address: tuple[str, int], place: str, block: bytes, size: int) -> None:
    """Sends the bytes of an upload in one request; its answer comes when they are on the disk."""
    headers = {
        "Content-Type": "application/partial-upload",
        "Upload-Offset": "0",
        "Upload-Complete": "?0",
        "Content-Length": str(size),
    }
    view = memoryview(block)
    blocks = (view[: min(SEND_BYTES, size - start)] for start in range(0, size, SEND_BYTES))
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=600)) as connection:
        connection.request("PATCH", place, blocks, headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 204, answer.status
        assert answer.getheader("Upload-Offset") == str(size)


def count_cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def count_own_bytes(process: psutil.Process) -> int:
    """Returns the resident memory of a process without mapped files, whose pages the system takes back at need."""
    found = process.memory_info()
    return int(found.rss - found.shared)


@contextlib.contextmanager
def watch_memory(process: psutil.Process) -> Iterator[list[int]]:
    """Collects the memory of a process every 20 ms."""
    seen, ended = [count_own_bytes(process)], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            seen.append(count_own_bytes(process))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def draw_tar(images: int) -> bytes:
    """A tar file of small photographs, each of another colour."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(images):
            picture = io.BytesIO()
            Image.new("RGB", (32, 32), (number * 3 % 256, number, 99)).save(picture, "JPEG")
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = picture.tell()
            picture.seek(0)
            tar.addfile(member, picture)
    return file.getvalue()
