"""The planner's menu beside runs of it: two hosts with a process of one thread each.

Measured beforehand: the step of one process alone, while the other core does the same, and latency and bandwidth of the
link. From these the planner predicts every strategy; then `headway train` trains each by the recipe key that the menu
names.

Some networks and rates were looked at while planner and strategies were built. Those alone count of which nobody had
seen anything.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any, final

import yaml

from bench._common import Claim, median, table
from bench._doctor.measure import records_of
from bench._hosts import Hosts
from bench._network.layout import Layout
from bench._plan.links import BURST_BYTES, started
from bench._plan.local import headway
from headway.core.collectives import Algorithm, Link
from headway.core.workload import Workload
from headway.plan.cluster import Cluster, Device, IntraNodeLink, PeakTflops
from headway.plan.job import ComputeEstimate, build_job
from headway.plan.step import ComputeTime
from headway.plan.strategies import Strategy, compare_strategies

RANKS = 2
# Faster ones take so much of the processor for their packets that it is missing for computing.
SETTINGS = (("plain", 80e6), ("alexnet", 140e6))
"""Networks and rates of the link, in bits/s, that count: nobody had seen anything of them."""
LOOKED_AT = (("plain", 200e6), ("alexnet", 80e6), ("alexnet", 200e6))
"""The same that planner and strategies were built with. With the first it was found that Gloo's exchanges use one
direction of a link at a time, with the last that gradients of a large tensor do."""
NETWORKS: dict[str, dict[str, Any]] = {
    # 2.3 million weights in convolutions, 5 million in fully connected layers.
    "alexnet": {
        "data": {"train": "synthetic", "synthetic": {"samples": 8192, "classes": 10, "size": [99, 99]}},
        "model": {"factory": "headway.model:alexnet", "args": {"fc_width": 512}},
        "batch": 32,
    },
    # Batch norm behind each convolution, and one large layer of 8.4 million weights.
    "plain": {
        "data": {"train": "synthetic", "synthetic": {"samples": 8192, "classes": 10, "size": [64, 64]}},
        "model": {"factory": "bench._parallel.menu_network:PlainNetwork"},
        "batch": 32,
    },
}  # fmt: skip
COMMON: dict[str, Any] = {
    "seed": 1, "device": "cpu", "epochs": 10**4, "precision": "fp32", "log_every_steps": 1,
    "optimizer": {"name": "sgd", "lr": 0.001}, "checkpoint": {"every_epochs": 1e9},
}  # fmt: skip
STARTS_S, WARM_ROWS, LOCAL_ROUNDS = 180.0, 2, 4
STEPS, QUICK_STEPS = 12, 1
QUICK_BATCH = 8
STRATEGIES = ("data", "spatial", "hybrid", "local", "sharded")
"""Those of the menu that are compared: `async` is a bound, and micro-batches and rarer exchange are plain data
parallelism."""
QUICK_STRATEGIES = ("hybrid",)


@final
@dataclass(frozen=True)
class Compared:
    """A strategy of a setting. Attributes: counts: nobody has looked at this setting before. alone_s: seconds of a
    step of one process alone."""

    network: str
    rate_bits_s: float
    strategy: Strategy
    counts: bool
    alone_s: float
    planned_s: float
    measured_s: tuple[float, float, float]

    @property
    def error(self) -> float:
        """|planned - measured| / measured seconds of a step."""
        return abs(self.planned_s / self.measured_s[0] - 1)


def measure_menu(options: argparse.Namespace) -> list[Claim]:
    """Plans and trains every strategy of the settings that count. A quick run has one strategy of one that does not."""
    found = list[Compared]()
    settings = LOOKED_AT[:1] if options.quick else SETTINGS
    strategies, steps = (QUICK_STRATEGIES, QUICK_STEPS) if options.quick else (STRATEGIES, STEPS)
    with tempfile.TemporaryDirectory(prefix="headway-bench-menu-") as name:
        for network, rate_bits_s in settings:
            more = {"batch": QUICK_BATCH} if options.quick else {}
            values = COMMON | NETWORKS[network] | more
            found += _compare_setting(Path(name), network, values, rate_bits_s, not options.quick, steps, strategies)
    table([HEADING, *map(_format_row, found)])
    scored = [one.error for one in found]
    how = f"of {len(scored)} settings that nothing was fitted to, {RANKS} processes of one thread"
    if options.quick:
        how = f"of {len(scored)} settings that were looked at before"
    middle, worst = median(scored)[0], max(scored)
    return [Claim("plan_strategies_error", middle, "", how), Claim("plan_strategies_worst", worst, "", how)]


HEADING = ("network", "Mbit/s", "parallel", "alone, s", "planned, s", "measured, s (95 %)", "off", "counts")


def _format_row(one: Compared) -> tuple[str, ...]:
    middle, low, high = one.measured_s
    return (
        one.network, f"{one.rate_bits_s / 1e6:.0f}", one.strategy.recipe.removeprefix("parallel: "),
        f"{one.alone_s:.3f}", f"{one.planned_s:.3f}", f"{middle:.3f} [{low:.3f}, {high:.3f}]",
        f"{one.planned_s / middle - 1:+.1%}", "yes" if one.counts else "",
    )  # fmt: skip


def _compare_setting(
    folder: Path,
    name: str,
    values: dict[str, Any],
    rate_bits_s: float,
    counts: bool,
    steps: int,
    strategies: Sequence[str],
) -> list[Compared]:
    """Compares the strategies of one setting.

    Args:
        values: the recipe.
    """
    recipe = folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    batch = values["batch"]
    out = folder / f"{name}.json"
    headway("train", str(recipe), "--dry-run", "--out", str(out), cwd=folder)
    workload = Workload.read(out)
    with Hosts(RANKS, rate_bits_s, burst_bytes=BURST_BYTES) as net:
        alone_s = _measure_alone(net, recipe, folder, batch // RANKS, steps)
        link = _measure_link(net)
        print(
            f"{name}, {rate_bits_s / 1e6:.0f} Mbit/s: a step of {batch // RANKS} samples takes {alone_s * 1e3:.0f} ms"
        )
        print(f"  link: {link.latency_s * 1e6:.0f} us, {link.bandwidth_bytes_s / 1e6:.1f} MB/s", flush=True)
        found = []
        for number, one in enumerate(_plan(workload, batch, alone_s, link, strategies)):
            run = folder / f"{name}-{rate_bits_s:.0f}-{number}"
            argv = _train(recipe, run, batch, one.recipe.removeprefix("parallel: "))
            # A round logs once.
            rows = min(steps, LOCAL_ROUNDS) if "local" in one.recipe else steps
            times = _time_steps(started(net, Layout(RANKS, 1), argv), [run], rows)
            found.append(Compared(name, rate_bits_s, one, counts, alone_s, batch / one.images_s, median(times)))
    return found


def _plan(workload: Workload, batch: int, alone_s: float, link: Link, strategies: Sequence[str]) -> list[Strategy]:
    """Predicts the menu from the measured step and link alone."""
    device = Device(title="a core", tflops=PeakTflops(fp32=0.1), memory_gb=8, memory_gb_s=30)
    inside = IntraNodeLink(gb_s=link.bandwidth_bytes_s / 1e9, latency_us=link.latency_s * 1e6)
    algorithms: tuple[Algorithm, ...] = ("ring", "tree", "leader", "two_dimensional")
    cluster = Cluster(title="two hosts", device=device, devices=RANKS, inside=inside, algorithms=algorithms)
    each = batch / RANKS
    estimate = ComputeEstimate(ComputeTime(0.0, alone_s / each), "profile", "a run of one process")
    job = replace(build_job(workload, estimate, 1.0, batch=batch), evaluations=0, checkpoints=0)
    found = compare_strategies(workload, job, cluster, 1)
    return [one for one in found if any(f"strategy: {name}" in one.recipe for name in strategies)]


def _train(recipe: Path, run: Path, batch: int, parallel: str) -> list[str]:
    argv = [sys.executable, "-m", "headway", "train", str(recipe), "--run", str(run), f"batch={batch}"]
    # A host is a core here.
    across = parallel.replace("spatial", "spatial, across_hosts: true")
    return [*argv, f"parallel={across}"]


def _measure_alone(net: Hosts, recipe: Path, folder: Path, batch: int, steps: int) -> float:
    """Seconds of a step of a process that trains alone, while the other host does the same."""
    runs = [folder / f"{recipe.stem}-{net.rates_bits_s[0]:.0f}-alone-{host}" for host in range(RANKS)]
    processes = [
        net.run(
            host, _train(recipe, run, batch, "{strategy: data}"), {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        )
        for host, run in enumerate(runs)
    ]  # fmt: skip
    return median(_time_steps(processes, runs, steps))[0]


def _time_steps(processes: Sequence[subprocess.Popen[str]], runs: Sequence[Path], rows: int) -> list[float]:
    """Waits until runs have logged so many times more than they need to warm up, ends them, and returns seconds a step
    between two rows of their logs."""
    until = monotonic() + STARTS_S + 60.0 * rows
    while monotonic() < until and all(one.poll() is None for one in processes):
        if all(len(records_of(run)) > WARM_ROWS + rows for run in runs):
            break
        sleep(0.2)
    for one in processes:
        one.terminate()
    for one in processes:
        with suppress(subprocess.TimeoutExpired):
            one.communicate(timeout=30.0)
        one.kill()
    times = list[float]()
    for run in runs:
        records = records_of(run)[WARM_ROWS:]
        if len(records) <= rows:
            raise RuntimeError(
                f"{run.name} logged {len(records)} steps; status {[one.returncode for one in processes]}"
            )
        times += [
            (later["seconds"] - first["seconds"]) / (later["step"] - first["step"])
            for first, later in pairwise(records[: rows + 1])
        ]
    return times


def _measure_link(net: Hosts) -> Link:
    processes = started(net, Layout(RANKS, 1), [sys.executable, "-m", "bench._parallel.menu_link"])
    out = processes[0].communicate(timeout=60.0)[0]
    for one in processes:
        one.wait(20.0)
    return Link(*json.loads(out))
