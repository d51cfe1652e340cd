"""`headway serve` against a plain server and LitServe, in processes of their own that take turns.

Requests per CPU second count all threads and children of the server's process, and nothing of the client. Every server
gets the same JPEG files and computes the same weights, in float32 on one thread.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import psutil
from PIL import Image

from bench._arms import PEERS_PYTHON, ROOT
from bench._common import Claim, median, table
from bench._export.load_client import build_request

CLIENTS = (1, 8, 32)
FILES, SIDE, MEAN, DEVIATION = 64, 32, 128.0, 64.0
BATCH = 32
START_S = 120.0


@final
class Client:
    """The process that sends requests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench._export.load_client"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, place: tuple[str, int], file: Path, clients: int, **limits: float) -> dict[str, Any]:
        """Sends the requests in a file; see `load_client.run`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"place": place, "file": str(file), "clients": clients, **limits}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


@final
@dataclass
class Contestant:
    """A server in a process of its own.

    Attributes:
        turns: requests per CPU second, and the median latency in seconds, by number of clients.
    """

    name: str
    process: subprocess.Popen[str]
    place: tuple[str, int]
    requests: Path
    version: str
    turns: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def take_turn(self, client: Client, clients: int, seconds: float) -> None:
        """Answers for so long, and notes what it cost."""
        self._signal(signal.SIGCONT)
        before = self._count_cpu_s()
        found = client.run(self.place, self.requests, clients, seconds=seconds)
        used = self._count_cpu_s() - before
        self._signal(signal.SIGSTOP)
        answered = found["answers"].get("200", 0)
        if not answered or set(found["answers"]) != {"200"} or found["lost"]:
            raise RuntimeError(f"{self.name}: {found['answers']}, {found['lost']} lost")
        latency = statistics.median(found["latencies"])
        # The system counts in hundredths of a second.
        self.turns.setdefault(clients, []).append((answered / max(used, 0.01), latency))

    def close(self) -> None:
        """Ends the process, and those that it has started."""
        for number in (signal.SIGCONT, signal.SIGKILL):
            self._signal(number)
        self.process.communicate()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _count_cpu_s(self) -> float:
        process = psutil.Process(self.process.pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return sum(time.user + time.system for time in times)


def compare_servers(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Measures all claims about `headway serve`."""
    export, facts = write_export(folder)
    jpegs = write_jpegs()
    raw, encoded = folder / "raw.json", folder / "base64.json"
    store_requests(raw, [build_request("/predict", "image/jpeg", data) for data in jpegs])
    bodies = [json.dumps({"image": base64.b64encode(data).decode()}).encode() for data in jpegs]
    store_requests(encoded, [build_request("/predict", "application/json", body) for body in bodies])
    rounds, seconds = (2, 0.5) if options.quick else (9, 3.0)
    claims = list[Claim]()
    with contextlib.closing(Client()) as client:
        with contextlib.ExitStack() as stack:
            arms = list(start_all(stack, export, facts, raw, encoded))
            for number in range(rounds + 1):
                for clients in CLIENTS:
                    for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
                        arm.take_turn(client, clients, seconds)
            for arm in arms:
                # The first round starts threads and fills caches.
                arm.turns = {clients: turns[1:] for clients, turns in arm.turns.items()}
            claims += judge_speed(arms, time_bare_call(export, jpegs))
        claims += [
            count_lost(client, export, raw, 500 if options.quick else 10_000),
            *count_swap_errors(client, folder, export, raw, 3 if options.quick else 30),
            *count_late(client, export, jpegs, folder / "hasty.json", 1.0 if options.quick else 10.0),
        ]
    return claims


def write_jpegs() -> list[bytes]:
    """JPEG files of the network's size; soft clouds, as photographs have."""
    found = []
    for number in range(FILES):
        clouds = np.random.default_rng(number).integers(0, 256, (6, 6, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(clouds).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found


def store_requests(path: Path, requests: Sequence[bytes]) -> None:
    """Writes requests for the client."""
    path.write_text(json.dumps([one.decode("latin-1") for one in requests]))


def write_export(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Exports a `cifar_resnet`; returns the folder, and what peers need to compute the same."""
    from safetensors.torch import save_file

    from bench._export.networks import build_known
    from headway.export.manifest import Manifest, TargetEntry, hash_file, write_manifest
    from headway.export.targets.onnx import MODEL
    from headway.export.targets.onnx_graph import write_model

    pipeline = build_known("cifar_resnet")
    export = folder / "export"
    export.mkdir()
    write_model(pipeline, export / MODEL)
    names = tuple(map(str, range(10)))
    manifest = Manifest(
        task="class",
        activation="softmax",
        names=names,
        outputs=len(names),
        threshold=None,
        size=(SIDE, SIDE),
        channels=3,
        crop_share=1.0,
        scaled=False,
        decoder="native",
        files={MODEL: hash_file(export / MODEL)},
        targets={"onnx": TargetEntry(file=MODEL, precision="fp32")},
        run={"folder": "cifar_resnet"},
        data={},
        versions={},
        processor={},
    )
    write_manifest(export, manifest)
    weights = folder / "weights.safetensors"
    network = pipeline.members[0].network
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, weights)
    facts = {
        "names": names,
        "side": SIDE,
        "mean": MEAN,
        "deviation": DEVIATION,
        "weights": str(weights),
        "model": str(export / MODEL),
        "source": str(ROOT / "src"),
        "batch": 1,
    }
    return export, facts


def start_headway(export: Path, requests: Path, *options: str) -> Contestant:
    """Starts `headway serve`, and waits until it is ready."""
    command = [sys.executable, "-m", "headway", "serve", export, "--bind", "127.0.0.1:0", "--threads", "1", "--json"]
    process = _start([*map(str, command), "--batch", str(BATCH), *options])
    started = _read_line(process)
    host, _, port = started["url"].removeprefix("http://").rpartition(":")
    return Contestant("headway serve", process, (host, int(port)), requests, started["version"])


def start_all(
    stack: contextlib.ExitStack, export: Path, facts: dict[str, Any], raw: Path, encoded: Path
) -> Iterator[Contestant]:
    """Starts each contestant that is here, stopped until its turn."""

    def keep(arm: Contestant) -> Contestant:
        stack.callback(arm.close)
        os.killpg(arm.process.pid, signal.SIGSTOP)
        return arm

    yield keep(start_headway(export, raw))
    for name, module, requests, change in (
        ("plain", "serving_plain", raw, {}),
        ("LitServe, batch 1", "serving_litserve", encoded, {"batch": 1}),
        (f"LitServe, batch {BATCH}", "serving_litserve", encoded, {"batch": BATCH}),
    ):
        asked = {**facts, **change, "port": _find_port()}
        try:
            process = _start([str(PEERS_PYTHON), "-m", f"bench._peers.{module}", json.dumps(asked)])
            started = _read_line(process)
            place = ("127.0.0.1", int(started["port"]))
            _wait_until_open(process, place, requests)
        except (OSError, RuntimeError) as reason:
            print(f"{name}: not here ({reason}); `make peers` installs it")
            continue
        yield keep(Contestant(name, process, place, requests, started["version"]))


def judge_speed(arms: Sequence[Contestant], bare_s: float) -> list[Claim]:
    """Prints the table, and returns the claims about CPU seconds and latency."""
    rows: list[tuple[str, ...]] = [("server", "clients", "requests per CPU s (95 %)", "p50 ms", "version")]
    for arm in arms:
        for clients, turns in arm.turns.items():
            middle, low, high = median([rate for rate, _ in turns])
            latency = median([seconds for _, seconds in turns])[0] * 1000
            cells = (arm.name, str(clients), f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]", f"{latency:.2f}", arm.version)
            rows.append(cells)
    table(rows)
    by_name = {arm.name: arm for arm in arms}
    mine, claims = by_name["headway serve"], list[Claim]()
    if plain := by_name.get("plain"):
        for clients in (1, 32):
            middle, low, high = compare(mine, plain, clients)
            how = f"requests per CPU second over FastAPI + Pillow + eager PyTorch [{low:.2f}, {high:.2f}]"
            claims.append(Claim(f"serve_vs_plain_{clients}", middle, "x", how))
    others = [arm for arm in arms if arm.name.startswith("LitServe")]
    for clients in CLIENTS if others else ():
        # The cheaper of its settings at this load.
        best = min(others, key=lambda other: compare(other, mine, clients)[0] * -1)
        middle, low, high = compare(best, mine, clients)
        how = f"CPU seconds per request over those of {best.name} [{low:.2f}, {high:.2f}]"
        claims.append(Claim(f"serve_cpu_vs_litserve_{clients}", middle, "x", how))
    if others:
        worst = max(claim.value for claim in claims if claim.name.startswith("serve_cpu_vs_litserve_"))
        claims.append(Claim("serve_cpu_vs_litserve", worst, "x", "the worst of 1, 8 and 32 clients"))
    latency_ms = median([seconds for _, seconds in mine.turns[1]])[0] * 1000
    bare_ms = bare_s * 1000
    how = f"p50 {latency_ms:.2f} ms at one client over 1.3 of the bare call ({bare_ms:.2f} ms) + 0.5 ms"
    return [*claims, Claim("serve_p50_1", latency_ms / (1.3 * bare_ms + 0.5), "x", how)]


def compare(one: Contestant, other: Contestant, clients: int) -> tuple[float, float, float]:
    """(median, low, high) of requests per CPU second of one over those of another in the same round."""
    pairs = zip(one.turns[clients], other.turns[clients], strict=True)
    return median([mine / theirs for (mine, _), (theirs, _) in pairs])


def time_bare_call(export: Path, jpegs: Sequence[bytes]) -> float:
    """Median seconds of decoding and computing one image in this process, on one thread."""
    from headway.export.exported import open_export

    with open_export(export, threads=1) as exported:
        taken = []
        for number in range(400):
            began = time.perf_counter()
            exported.run(exported.read([jpegs[number % len(jpegs)]])[1])
            taken.append(time.perf_counter() - began)
    return statistics.median(taken[50:])


def count_lost(client: Client, export: Path, requests: Path, most: int) -> Claim:
    """Counts requests without an answer, over servers that get SIGTERM while clients keep them busy."""
    sent, lost, servers, failed = 0, 0, 0, 0
    while sent < most:
        servers += 1
        arm = start_headway(export, requests)
        # Within the first second of load.
        timer = threading.Timer(random.uniform(0.05, 1.0), arm.process.terminate)
        timer.start()
        found = client.run(arm.place, requests, 64, most=most)
        timer.join()
        failed += arm.process.wait() != 0
        arm.close()
        sent += sum(found["answers"].values()) + found["lost"]
        lost += found["lost"] + sum(count for status, count in found["answers"].items() if status != "200")
    how = f"of {sent:,} requests of 64 connections to {servers} servers that got SIGTERM; {failed} of them left with 1"
    return Claim("serve_lost", lost + failed, "requests", how)


def count_swap_errors(client: Client, folder: Path, export: Path, requests: Path, swaps: int) -> Iterator[Claim]:
    """Counts errors while exports are swapped under load, and bad ones are offered."""
    import shutil
    import urllib.error
    import urllib.request

    served, errors, done, refused = folder / "served", 0, 0, 0
    shutil.copytree(export, served)
    arm = start_headway(served, requests)
    over = threading.Event()

    def swap() -> None:
        nonlocal done, refused
        url = f"http://{arm.place[0]}:{arm.place[1]}/swap"
        for number in range(swaps):
            aside = folder / f"next-{number}"
            shutil.copytree(export, aside)
            tree = json.loads((aside / "pipeline.json").read_text())
            tree["versions"] = {"swap": str(number)}
            _sign(aside, tree, damage=number % 3 == 2)
            served.rename(folder / f"old-{number}")
            aside.rename(served)
            try:
                with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=START_S):
                    done += 1
            except urllib.error.HTTPError as error:
                refused += error.code == 409
                error.close()
        over.set()

    worker = threading.Thread(target=swap)
    worker.start()
    answered = 0
    while not over.is_set():
        found = client.run(arm.place, requests, 8, seconds=0.5)
        answered += sum(found["answers"].values())
        errors += found["lost"] + found["unsent"] + sum(n for s, n in found["answers"].items() if s != "200")
    worker.join()
    arm.close()
    how = f"of {answered:,} requests of 8 connections during {done} swaps and {refused} refused exports"
    yield Claim("serve_swap_errors", errors + (done + refused != swaps), "requests", how)


def count_late(client: Client, export: Path, jpegs: Sequence[bytes], file: Path, seconds: float) -> Iterator[Claim]:
    """Overloads a server whose clients set deadlines: counts late answers, and requests without one."""
    deadline_ms = 200
    hasty = [build_request("/predict", "image/jpeg", data, [f"X-Deadline-Ms: {deadline_ms}"]) for data in jpegs]
    store_requests(file, hasty)
    arm = start_headway(export, file)
    found = client.run(arm.place, file, 512, seconds=seconds)
    arm.close()
    answers = found["answers"]
    sent = sum(answers.values()) + found["lost"]
    unknown = sum(count for status, count in answers.items() if status not in ("200", "503", "504"))
    says = ", ".join(f"{answers.get(status, 0):,} x {status}" for status in ("200", "503", "504"))
    how = f"of {sent:,} requests of 512 connections with {deadline_ms} ms: {says}"
    yield Claim("serve_overload_lost", found["lost"] + unknown, "requests", how)
    # The server counts from the headers on, the client also what waits in its socket before.
    taken = sorted(found["latencies"])
    last = taken[min(len(taken) - 1, math.floor(0.99 * len(taken)))] * 1000 if taken else math.inf
    how = f"p99 of the answers 200 by the client's clock ({last:.0f} ms) over the deadline"
    yield Claim("serve_overload_p99", last / deadline_ms, "x", how)


def _sign(folder: Path, tree: dict[str, Any], *, damage: bool) -> None:
    """Writes a changed manifest, with its digest, or without for a damaged one."""
    from headway.export.manifest import MANIFEST, compute_digest

    tree["sha256"] = "0" * 64 if damage else compute_digest(tree)
    (folder / MANIFEST).write_text(json.dumps(tree))


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    with tempfile.TemporaryFile("w+") as said:
        return subprocess.Popen(
            list(command),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        )


def _read_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"it ended with status {process.wait()}")
    found: dict[str, Any] = json.loads(line)
    return found


def _find_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_until_open(process: subprocess.Popen[str], place: tuple[str, int], requests: Path) -> None:
    """Waits until a server answers; LitServe says nothing when it is ready."""
    from bench._export.load_client import run

    request = json.loads(requests.read_text())[0].encode("latin-1")
    until = time.monotonic() + START_S
    while True:
        found = run(place, [request], 1, math.inf, 1)
        if found["answers"].get(200):
            return
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError("it does not answer")
        time.sleep(0.1)
