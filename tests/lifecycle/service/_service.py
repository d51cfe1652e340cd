"""Stores with few images, servers as processes, and bodies of requests."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from tests._support import command
from tests.export._served import WAIT_S, Reply, Served, build_form

__all__ = ["WAIT_S", "Reply", "Served", "build_form"]


def draw(number: int, side: int = 24) -> bytes:
    """A JPEG that no other number has."""
    file = io.BytesIO()
    colour = (number * 7 % 256, number * 31 % 256, number // 256 * 17 % 256)
    image = Image.new("RGB", (side, side), colour)
    image.putpixel((number % side, number // side % side), (255 - colour[0], 255, 0))
    image.save(file, "JPEG", quality=90, comment=str(number).encode())
    return file.getvalue()


def build_tar(files: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def draw_tar(start: int, count: int, label: str | None = "cat") -> bytes:
    files = dict[str, bytes]()
    for number in range(start, start + count):
        files[f"{label}/{number:05d}.jpg"] = draw(number)
        if label is not None:
            files[f"{label}/{number:05d}.cls"] = label.encode()
    return build_tar(files)


def key() -> dict[str, str]:
    return {"Idempotency-Key": f'"{uuid.uuid4()}"'}


def build_changes(*rows: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """A body of JSON, and its headers with a new key."""
    return json.dumps(rows).encode(), {"Content-Type": "application/json"} | key()


def check_problem(reply: Reply, status: int, kind: str) -> dict[str, Any]:
    """The problem of an answer, which is one of RFC 9457 with this status and type."""
    assert reply.status == status, (reply.status, reply.body)
    assert reply.headers["content-type"] == "application/problem+json"
    tree: dict[str, Any] = reply.json()
    assert tree["status"] == status
    assert tree["type"].endswith(kind), tree
    assert tree["title"]
    assert tree["detail"]
    assert tree["instance"].startswith("urn:headway:request:")
    return tree


@contextlib.contextmanager
def serving_data(store: Path, *options: str, token: str | None = None, port: int = 0) -> Iterator[Served]:
    """A server of a store, killed at the end of the block if it still runs."""
    arguments = command("serve-data", store, "--bind", f"127.0.0.1:{port}", "--json", *options)
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        yield Served(process, store, json.loads(line), headers)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def add_images(served: Served, name: str, body: bytes) -> dict[str, Any]:
    """Adds a tar file; returns the answer."""
    reply = served.ask("POST", f"/datasets/{name}", body, {"Content-Type": "application/x-tar"} | key())
    assert reply.status == 201, reply.body
    tree: dict[str, Any] = reply.json()
    return tree


def create(served: Served, name: str, **facts: Any) -> dict[str, Any]:
    reply = served.ask("PUT", f"/datasets/{name}", json.dumps(facts).encode(), {"Content-Type": "application/json"})
    assert reply.status == 201, reply.body
    tree: dict[str, Any] = reply.json()
    return tree
