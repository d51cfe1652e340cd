"""bench-links: the links of a world, and the bus bandwidth of every algorithm from 1 KiB to 128 MiB."""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, sleep
from typing import Any, final

import torch

from headway.comm.choice import Chooser, try_out
from headway.comm.communicator import Algorithm, Communicator
from headway.comm.links import measure, slowest, table
from headway.core.errors import CommunicationError, UsageError
from headway.core.launcher_environment import LOOPBACK, read_launcher_environment
from headway.core.rendezvous import new_secret
from headway.core.world import World

SIZES = (*(1 << 10 + 2 * step for step in range(9)), 128 << 20)

MOST_ROUNDS, FEWEST_ROUNDS = 20, 3

CLEARLY = 1.25
"""Times as long as the fastest, from which on it is said."""

POLL_S = 0.05


@final
@dataclass(frozen=True)
class Row:
    """One algorithm at one size.

    Attributes:
        seconds: median over the rounds of the slowest rank's time.
        bus_bytes_s: bytes / seconds * 2 (N - 1) / N: what a link has to carry for it if the work is spread evenly, so
            that it can be held against the link's bandwidth whatever N is (the definition of nccl-tests).
        chosen: a run would take it for a bucket of that size, by what the links predict.
    """

    bytes: int
    algorithm: Algorithm
    seconds: float
    bus_bytes_s: float
    rounds: int
    chosen: bool = False


@final
@dataclass(frozen=True)
class Result:
    """What bench-links found.

    Attributes:
        report: lines about hosts, links and hardware. predicted: lines of a table of the cost model.
        links: as measured (`Links.to_json`).
        left_out: sizes for which the time did not suffice.
    """

    report: list[str]
    predicted: list[str]
    links: dict[str, Any]
    rows: list[Row]
    left_out: list[int]

    def text(self) -> str:
        """Tables for the screen."""
        names = list(dict.fromkeys(row.algorithm for row in self.rows))
        by = {(row.bytes, row.algorithm): row for row in self.rows}
        out: list[tuple[str, ...]] = [("bytes", *(f"{name} {unit}" for name in names for unit in ("ms", "MB/s")))]
        for size in dict.fromkeys(row.bytes for row in self.rows):
            cells = [by[size, name] for name in names]
            numbers = [(_number(row.seconds * 1e3), _number(row.bus_bytes_s / 1e6)) for row in cells]
            out.append((f"{size:,}", *(number for pair in numbers for number in pair)))
        lines = [*self.report, "", *self.predicted, "", "Sums by algorithm: time, and bus bandwidth", *table(out)]
        lines += self._otherwise()
        if self.left_out:
            sizes = ", ".join(f"{size:,}" for size in self.left_out)
            lines.append(f"The time did not suffice for {sizes} bytes: --seconds gives more.")
        return "\n".join(lines)

    def _otherwise(self) -> list[str]:
        """Sizes at which another algorithm than the one that a run would take was clearly faster."""
        found = []
        for chosen in (row for row in self.rows if row.chosen):
            best = min((row for row in self.rows if row.bytes == chosen.bytes), key=lambda row: row.seconds)
            if chosen.seconds > CLEARLY * best.seconds:
                taken, least = (f"{row.algorithm} {_number(row.seconds * 1e3)} ms" for row in (chosen, best))
                found.append(f"{chosen.bytes:,} bytes ({least}; a run would take {taken})")
        if not found:
            return []
        what = f"Measured otherwise than predicted: {', '.join(found)}."
        return [f"{what} Measure again when the machine is quiet, or set comm.algorithm."]

    @staticmethod
    def of_json(data: dict[str, Any]) -> Result:
        """What `dataclasses.asdict` gave, also after a way through JSON."""
        return Result(**{**data, "rows": [Row(**row) for row in data["rows"]]})


def bench(procs: int | None, seconds: float) -> Result | None:
    """Measures the world of the launcher that started this process, or of so many new processes on this host.

    Args:
        procs: None where a launcher started this process.
        seconds: about how long the sums of all sizes may take together.

    Returns:
        The result; None on ranks other than 0.

    Raises:
        UsageError: neither a launcher nor `procs`, or both. CommunicationError: a process failed.
    """
    if not 0 < seconds < math.inf:
        fix = "It is about how long the sums may take: a number of seconds above 0."
        raise UsageError(f"--seconds is {seconds:g}", fix=fix)
    told = read_launcher_environment()
    if procs is not None:
        if told is not None:
            fix = "Leave --procs out, or run it without a launcher."
            raise UsageError(f"this process was started by a launcher ({told.launcher}) and cannot be one", fix=fix)
        if procs < 2:
            raise UsageError(f"--procs is {procs}", fix="Links are between processes: name 2 or more.")
        return _start(procs, seconds)
    if told is None or told.size == 1:
        fix = "headway bench-links --procs N, or torchrun ... -m headway bench-links."
        raise UsageError("a single process has no links to measure", fix=fix)
    gpus = torch.cuda.device_count()
    device = torch.device("cpu")
    if told.local_rank is not None and (told.local_size or told.local_rank + 1) <= gpus:
        device = torch.device("cuda", told.local_rank)
        torch.cuda.set_device(device)
    world = World.join(told, device)
    try:
        return _measured(world, seconds)
    finally:
        world.close()


def _measured(world: World, seconds: float) -> Result | None:
    links = measure(world)
    network = links.network(world)
    communicator = Communicator(world, rails=links.rails)
    try:
        chooser = Chooser(network, try_out(communicator, network), 0, phased=False)
        rows, left_out = sweep(communicator, SIZES, seconds)
    finally:
        communicator.close()
    if not world.is_lead:
        return None
    rows = [replace(row, chosen=chooser(row.bytes) == row.algorithm) for row in rows]
    return Result(links.lines(world), table(chooser.rows()), links.to_json(), rows, left_out)


def sweep(communicator: Communicator, sizes: Sequence[int], seconds: float) -> tuple[list[Row], list[int]]:
    """Times sums of fp32 by every algorithm the world can do, one after another in turn. Every rank calls it.

    Args:
        sizes: bytes, growing. seconds: for all of them; sizes that do not fit any more are left out.

    Returns:
        The rows, the same on all ranks; and the sizes left out.
    """
    world, names = communicator.world, communicator.algorithms
    rows: list[Row] = []
    left = seconds
    for place, size in enumerate(sizes):
        buffer = torch.zeros(size // 4, device=world.device)
        began = perf_counter()
        first = sums_of(communicator, buffer)  # connections open, memory is touched
        if rows and FEWEST_ROUNDS * sum(first) > left:
            return rows, list(sizes[place:])
        share = left / (len(sizes) - place)
        rounds = min(max(int(share / max(sum(first), 1e-9)), FEWEST_ROUNDS), MOST_ROUNDS)
        times = [sums_of(communicator, buffer) for _ in range(rounds)]
        for name, taken in zip(names, map(median, zip(*times, strict=True)), strict=True):
            bus = size / taken * 2 * (world.size - 1) / world.size
            rows.append(Row(size, name, taken, bus, rounds))
        left -= slowest(world, [perf_counter() - began])[0]
    return rows, []


def sums_of(communicator: Communicator, buffer: torch.Tensor) -> list[float]:
    """Seconds of one sum by each algorithm, of the slowest rank. Every rank calls it."""
    world = communicator.world
    mine = []
    for name in communicator.algorithms:
        began = perf_counter()
        communicator.all_reduce(buffer, algorithm=name, tag="bench").wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        mine.append(perf_counter() - began)
    return slowest(world, mine)


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _start(procs: int, seconds: float) -> Result:
    """Runs the verb in so many processes, and hands on what rank 0 says."""
    shared = {
        "WORLD_SIZE": str(procs),
        "LOCAL_WORLD_SIZE": str(procs),
        "MASTER_ADDR": LOOPBACK,
        # They are on one host: rank 0 serves the store at a free port, and these name the job alone.
        "MASTER_PORT": str(1 + secrets.randbelow((1 << 16) - 1)),
        "TORCHELASTIC_RUN_ID": new_secret(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // procs)),
    }
    command = [sys.executable, "-m", "headway", "bench-links", "--seconds", str(seconds), "--json"]
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as said:
        try:
            for rank in range(procs):
                environ = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                out = said if rank == 0 else subprocess.DEVNULL
                children.append(subprocess.Popen(command, env=environ, stdout=out))
            _wait(children)
        finally:
            for child in children:
                child.kill()
                child.wait()
        said.seek(0)
        return Result.of_json(json.loads(said.read()))


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended well, or one has not; what it said is on the screen."""
    while True:
        statuses = [child.poll() for child in children]
        for rank, status in enumerate(statuses):
            if status:
                how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                raise CommunicationError(f"rank {rank} of {len(children)} {how}")
        if None not in statuses:
            return
        sleep(POLL_S)
