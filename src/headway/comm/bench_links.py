"""The verb bench-links: measures the links of a world, and the bus bandwidth of every all-reduce algorithm."""

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

from headway.comm.algorithm_choice import AlgorithmChooser, run_trials
from headway.comm.comm_recipe import Algorithm
from headway.comm.communicator import Communicator
from headway.comm.links import measure_links, reduce_max
from headway.core.errors import CommunicationError, UsageError
from headway.core.launcher_environment import LOOPBACK, read_launcher_environment
from headway.core.rendezvous import new_secret
from headway.core.text_format import align_table
from headway.core.world import World

# 1 KiB to 64 MiB by factors of 4, and 128 MiB.
BENCH_SIZES_BYTES = (*(1 << 10 + 2 * step for step in range(9)), 128 << 20)

MAX_BENCH_ROUNDS, MIN_BENCH_ROUNDS = 20, 3

# The report calls a prediction wrong if the chosen algorithm takes this many times as long as the fastest.
MISPREDICTION_RATIO = 1.25

CHILD_POLL_S = 0.05


@final
@dataclass(frozen=True)
class AlgorithmTiming:
    """The measured time of one algorithm at one size.

    Attributes:
        bytes: size of the tensor.
        seconds: median over the rounds of the slowest rank's time.
        bus_bytes_s: bytes / seconds * 2 (N - 1) / N, as nccl-tests defines it: the load of each link if the work is
            spread evenly. Comparable with the link's bandwidth at any N.
        rounds: number of measured all-reduces.
        chosen: True if a training run would choose it for a bucket of this size, from the measured links.
    """

    bytes: int
    algorithm: Algorithm
    seconds: float
    bus_bytes_s: float
    rounds: int
    chosen: bool = False


@final
@dataclass(frozen=True)
class BenchLinksResult:
    """The result of bench-links.

    Attributes:
        report: lines about hosts, links and hardware.
        predicted: lines of the cost model's table.
        links: measured links (`MeasuredLinks.to_json`).
        rows: timings, by size and algorithm.
        left_out: sizes in bytes that the time budget did not allow.
    """

    report: list[str]
    predicted: list[str]
    links: dict[str, Any]
    rows: list[AlgorithmTiming]
    left_out: list[int]

    def to_text(self) -> str:
        """Formats the result as tables for the terminal."""
        names = list(dict.fromkeys(row.algorithm for row in self.rows))
        timings = {(row.bytes, row.algorithm): row for row in self.rows}
        table: list[tuple[str, ...]] = [("bytes", *(f"{name} {unit}" for name in names for unit in ("ms", "MB/s")))]
        for size in dict.fromkeys(row.bytes for row in self.rows):
            numbers = [
                _format_number(number)
                for name in names
                for number in (timings[size, name].seconds * 1e3, timings[size, name].bus_bytes_s / 1e6)
            ]
            table.append((f"{size:,}", *numbers))
        lines = [*self.report, "", *self.predicted, "", "All-reduce by algorithm: time and bus bandwidth"]
        lines += [*align_table(table), *self._describe_mispredictions()]
        if self.left_out:
            sizes = ", ".join(f"{size:,}" for size in self.left_out)
            lines.append(f"The time budget did not suffice for {sizes} bytes. Give more with --seconds.")
        return "\n".join(lines)

    def _describe_mispredictions(self) -> list[str]:
        """Describes the sizes at which another algorithm was clearly faster than the one that a run would choose."""
        mispredictions = []
        for chosen in (row for row in self.rows if row.chosen):
            best = min((row for row in self.rows if row.bytes == chosen.bytes), key=lambda row: row.seconds)
            if chosen.seconds > MISPREDICTION_RATIO * best.seconds:
                chosen_text, best_text = (
                    f"{row.algorithm} {_format_number(row.seconds * 1e3)} ms" for row in (chosen, best)
                )
                mispredictions.append(f"{chosen.bytes:,} bytes ({best_text}; a run would choose {chosen_text})")
        if not mispredictions:
            return []
        what = f"Measured otherwise than predicted: {', '.join(mispredictions)}."
        return [f"{what} Measure again when the machine is quiet, or set comm.algorithm."]

    @staticmethod
    def from_json(data: dict[str, Any]) -> BenchLinksResult:
        """Returns the result of a dict from `dataclasses.asdict`, also after a way through JSON."""
        return BenchLinksResult(**{**data, "rows": [AlgorithmTiming(**row) for row in data["rows"]]})


def run_bench_links(procs: int | None, seconds: float, interfaces: Sequence[str] = ()) -> BenchLinksResult | None:
    """Measures the world of the launcher that started this process, or of `procs` new processes on this host.

    Args:
        procs: number of processes to start; None if a launcher started this process.
        seconds: approximate time for the all-reduces of all sizes together.
        interfaces: network interfaces between hosts; empty: the one that leads to the host of rank 0.

    Returns:
        The result; None on ranks other than 0.

    Raises:
        UsageError: there is neither a launcher nor `procs`, or both, or a number is out of range.
        CommunicationError: a process failed.
    """
    if not 0 < seconds < math.inf:
        fix = "Set the time for all measurements together to a number of seconds above 0."
        raise UsageError(f"--seconds is {seconds:g}", fix=fix)
    launched = read_launcher_environment()
    if procs is not None:
        if launched is not None:
            fix = "Omit --procs, or run the command without a launcher."
            raise UsageError(f"this process was started by a launcher ({launched.launcher}) and cannot be one", fix=fix)
        if procs < 2:
            raise UsageError(f"--procs is {procs}", fix="Links connect processes: set 2 or more.")
        if interfaces:
            fix = "Omit --interface, or start the command on several hosts with a launcher."
            raise UsageError("--interface has no effect between processes of one host", fix=fix)
        return _run_processes(procs, seconds)
    if launched is None or launched.size == 1:
        fix = "Run headway bench-links --procs N, or torchrun ... -m headway bench-links."
        raise UsageError("a single process has no links to measure", fix=fix)
    device, local_rank = torch.device("cpu"), launched.local_rank
    # GPUs only if every process of this host gets its own.
    if local_rank is not None and (launched.local_size or local_rank + 1) <= torch.cuda.device_count():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    world = World.join(launched, device, interface=interfaces)
    try:
        return _measure_world(world, seconds)
    finally:
        world.close()


def _measure_world(world: World, seconds: float) -> BenchLinksResult | None:
    links = measure_links(world)
    network = links.build_network(world)
    communicator = Communicator(world, rails=links.rails, rates_bytes_s=links.rates_bytes_s)
    try:
        # All ranks take part in the trials, though only the lead needs their result.
        chooser = AlgorithmChooser(network, run_trials(communicator, network), 0, phased=False)
        rows, left_out = time_all_sizes(communicator, BENCH_SIZES_BYTES, seconds)
    finally:
        communicator.close()
    if not world.is_lead:
        return None
    rows = [replace(row, chosen=chooser(row.bytes) == row.algorithm) for row in rows]
    return BenchLinksResult(links.describe(world), align_table(chooser.build_rows()), links.to_json(), rows, left_out)


def time_all_sizes(
    communicator: Communicator, sizes: Sequence[int], seconds: float
) -> tuple[list[AlgorithmTiming], list[int]]:
    """Times fp32 all-reduces of several sizes by every algorithm that the world supports. Every rank calls it.

    Args:
        sizes: bytes, ascending.
        seconds: time budget for all sizes together.

    Returns:
        The timings, the same on all ranks; and the sizes that the budget did not allow.
    """
    world, names = communicator.world, communicator.algorithms
    rows: list[AlgorithmTiming] = []
    remaining_s = seconds
    for index, size in enumerate(sizes):
        buffer = torch.zeros(size // 4, device=world.device)
        start_s = perf_counter()
        # Not counted: the first all-reduce opens connections and touches the memory.
        first_round_s = sum(time_all_algorithms(communicator, buffer))
        # The first size is always measured, so that there is a result at all.
        if rows and MIN_BENCH_ROUNDS * first_round_s > remaining_s:
            return rows, list(sizes[index:])
        # Each of the remaining sizes gets the same share of the remaining time.
        size_budget_s = remaining_s / (len(sizes) - index)
        # Every rank computes the same number, from the slowest rank's times.
        rounds = min(max(int(size_budget_s / max(first_round_s, 1e-9)), MIN_BENCH_ROUNDS), MAX_BENCH_ROUNDS)
        times = [time_all_algorithms(communicator, buffer) for _ in range(rounds)]
        for name, median_s in zip(names, map(median, zip(*times, strict=True)), strict=True):
            bus_bytes_s = size / median_s * 2 * (world.size - 1) / world.size
            rows.append(AlgorithmTiming(size, name, median_s, bus_bytes_s, rounds))
        # The slowest rank's time on all ranks: they must agree on the next size, or they would wait for each other for
        # ever.
        remaining_s -= reduce_max(world, [perf_counter() - start_s])[0]
    return rows, []


def time_all_algorithms(communicator: Communicator, buffer: torch.Tensor) -> list[float]:
    """Times one all-reduce of `buffer`, in place, by each algorithm. Every rank calls it.

    Returns:
        seconds of the slowest rank by algorithm (`communicator.algorithms`), the same on all ranks.
    """
    world = communicator.world
    times = []
    for name in communicator.algorithms:
        start_s = perf_counter()
        communicator.all_reduce(buffer, algorithm=name, tag="bench").wait()
        if world.device.type == "cuda":
            # `wait` on CUDA only orders the streams: without this, the host would time the launch.
            torch.cuda.synchronize(world.device)
        times.append(perf_counter() - start_s)
    return reduce_max(world, times)


def _format_number(value: float) -> str:
    # Three digits, or an integer from 100 on.
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _run_processes(procs: int, seconds: float) -> BenchLinksResult:
    """Runs the same verb in every process, under the variables of torchrun, and reads rank 0's output."""
    shared_environ = {
        "WORLD_SIZE": str(procs),
        "LOCAL_WORLD_SIZE": str(procs),
        "MASTER_ADDR": LOOPBACK,
        # All are on one host: rank 0 serves the store at a free port, so this one only names the job.
        "MASTER_PORT": str(1 + secrets.randbelow((1 << 16) - 1)),
        "TORCHELASTIC_RUN_ID": new_secret(),
        # Without this, each process would start threads for all cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // procs)),
    }
    command = [sys.executable, "-m", "headway", "bench-links", "--seconds", str(seconds), "--json"]
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as output:
        try:
            for rank in range(procs):
                environ = {**os.environ, **shared_environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                # A file, not a pipe: nobody reads while the processes run, and a full pipe would stop rank 0.
                stdout = output if rank == 0 else subprocess.DEVNULL
                children.append(subprocess.Popen(command, env=environ, stdout=stdout))
            _wait_for_children(children)
        finally:
            for child in children:
                # After a failure the others still wait in a collective, and would never end by themselves.
                child.kill()
                child.wait()
        output.seek(0)
        return BenchLinksResult.from_json(json.loads(output.read()))


def _wait_for_children(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits until all have exited with status 0. The first that does not ends the bench: the others wait for it."""
    while True:
        statuses = [child.poll() for child in children]
        for rank, status in enumerate(statuses):
            if status:
                how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                raise CommunicationError(f"rank {rank} of {len(children)} {how}")
        if None not in statuses:
            return
        sleep(CHILD_POLL_S)
