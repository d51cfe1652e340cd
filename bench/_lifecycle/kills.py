"""Uploads whose server is killed (kill -9) and whose connections are cut, and what they cost.

Ten kills of each of five uploads: eight at random places of the bytes, and two at random moments after the last one,
while the version is made. Fifty cuts of another upload. Each upload goes on by the client's own doing, and makes a
version: the same one as an undisturbed upload, or it counts as lost. Bytes that were sent more than once stand beside
it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import threading
from pathlib import Path
from typing import Any

import psutil

from bench._common import Claim, table
from bench._lifecycle.uploads import SEND_BYTES, ask, begin_upload, draw_tar, serve
from headway.lifecycle import Client

IMAGES, PADDING = 64, 64 << 20
UPLOADS, KILLS, CUTS = 5, 10, 50
LATE_KILLS, LATE_S = 2, 0.5
"""Kills after the last byte, and the longest time between that and the kill: a commit takes about as long."""


def measure_kills(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Kills and cuts; returns `upload_kills_lost`, `upload_cuts_lost` and `upload_resent_share`."""
    uploads, kills, cuts = (1, 1, 2) if options.quick else (UPLOADS, KILLS, CUTS)
    body = folder / "body.tar"
    # The archive ends before the padding, which makes it long enough to be cut in many places.
    body.write_bytes(draw_tar(IMAGES) + bytes(PADDING))
    size = body.stat().st_size
    with serve(folder / "whole") as (address, _):
        ask(address, "PUT", "/datasets/bench", b"{}", {"Content-Type": "application/json"})
        expected = Client("http://{}:{}".format(*address)).upload("bench", body)["version"]
    lost, resent = 0, list[float]()
    for number in range(uploads):
        version, sent = upload_while_killed(folder / f"killed-{number}", body, kills, number)
        lost += version != expected
        resent.append(sent / size - 1)
    cut_lost = upload_while_cut(folder / "cut", body, cuts) != expected
    rows = [("uploads", "kills", "lost", "cuts", "lost", "sent again, share")]
    table([*rows, (str(uploads), str(uploads * kills), str(lost), str(cuts), str(int(cut_lost)), f"{max(resent):.4f}")])
    how = f"uploads of {size / 1e6:.0f} MB"
    return [
        Claim("upload_kills_lost", lost, "", f"{how}, of {uploads} with {kills} kills of the server each"),
        Claim("upload_cuts_lost", int(cut_lost), "", f"{how}, of one with {cuts} cut connections"),
        Claim("upload_resent_share", max(resent), "", f"{how}: bytes sent again after {kills} kills, the most of all"),
    ]


def upload_while_killed(store: Path, body: Path, kills: int, seed: int) -> tuple[str, int]:
    """Uploads a file while its server is killed so often; returns the version and the bytes that were sent."""
    size, sent, versions, ended = body.stat().st_size, [0], list[str](), threading.Event()
    draws, late = random.Random(seed), min(LATE_KILLS, kills - 1)
    places = [*sorted(draws.sample(range(1, size - SEND_BYTES), kills - late)), *[size] * late]
    reached = threading.Condition()

    def note(done: int, total: int) -> None:
        with reached:
            sent[0] += SEND_BYTES
            reached.notify()

    def upload(port: int) -> None:
        try:
            client = Client(f"http://127.0.0.1:{port}", patience_s=300)
            versions.append(client.upload("bench", body, progress=note)["version"])
        finally:
            ended.set()

    with contextlib.ExitStack() as stack:
        address, process = stack.enter_context(serve(store))
        ask(address, "PUT", "/datasets/bench", b"{}", {"Content-Type": "application/json"})
        thread = threading.Thread(target=upload, args=(address[1],))
        thread.start()
        for place in places:
            with reached:
                # Bytes that were sent, and not those that the server has: some are on their way at the kill.
                reached.wait_for(lambda place=place: sent[0] >= place or ended.is_set(), timeout=300)
            if place == size:
                # Sent, and not answered: the server reads, makes the version, or has just made it.
                ended.wait(draws.uniform(0, LATE_S))
            kill(process)
            process = stack.enter_context(serve(store, address[1]))[1]
        thread.join()
        numbers = count_versions(address)
    return (versions[0] if versions and numbers == 2 else ""), sent[0]


def upload_while_cut(store: Path, body: Path, cuts: int) -> str:
    """Sends parts of a file on connections that are closed in the middle of a request; returns the version."""
    data, draws = body.read_bytes(), random.Random(0)
    with serve(store) as (address, _):
        ask(address, "PUT", "/datasets/bench", b"{}", {"Content-Type": "application/json"})
        place = begin_upload(address, len(data) - 1)
        for _ in range(cuts):
            offset = int(ask(address, "HEAD", place)[0]["upload-offset"])
            lines = [
                f"PATCH {place} HTTP/1.1",
                "Host: localhost",
                "Content-Type: application/partial-upload",
                f"Upload-Offset: {offset}",
                "Upload-Complete: ?1",
                f"Content-Length: {len(data) - offset}",
            ]
            part = data[offset : offset + draws.randrange(1, len(data) // cuts)]
            with socket.create_connection(address) as client, contextlib.suppress(ConnectionError):
                client.sendall("\r\n".join([*lines, "", ""]).encode() + part)
        # The rest of it as the client does it.
        with body.open("rb") as file:
            reply = Client("http://{}:{}".format(*address))._send_rest(place, file, len(data), None)
        version: str = reply.json()["version"]
        return version if count_versions(address) == 2 else ""


def kill(process: psutil.Process) -> None:
    process.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait()


def count_versions(address: tuple[str, int]) -> int:
    tree: dict[str, Any] = json.loads(ask(address, "GET", "/datasets/bench/versions")[1])
    return len(tree["versions"])
