"""From the doctor to a plan, on this machine: profiles of one and of two processes, a plan for four on two hosts at 200
Mbit/s, and the run itself.

The network is a wide perceptron with 12.6 MB of gradients, so that their exchange is most of a step on such links. The
plan knows the rate of the links and the share of it that TCP leaves to messages. The time of a step, and the exchange
between processes of one host, come from the doctor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, final

import yaml

from bench._arms import ROOT
from bench._common import median
from bench._doctor.measure import rate_of, records_of
from bench._hosts import Hosts
from bench._network.layout import Layout
from bench._plan.links import started
from headway.core.workload import Workload
from headway.plan.workloads import find_workload

RATE_BITS_S = 200e6
TCP = 1448 / (1448 + 66)
"""Of a link's bytes that are a message's: frames of 1,448 bytes under Ethernet, IPv4, TCP and its time stamps."""
LEAST_SHARE = 0.7
"""Of a step, that the exchange has to be for the plan to count: processes take each other's cores otherwise."""
HOSTS, PER_HOST, BATCH = 2, 2, 64
HIDDEN = 1024
RUNS, SECONDS, STARTS_S = 3, 15.0, 180.0
RECIPE: dict[str, Any] = {
    "seed": 1, "device": "cpu", "batch": BATCH, "epochs": 10**4, "precision": "fp32", "log_every_steps": 2,
    "data": {"train": "synthetic", "synthetic": {"samples": 4096, "classes": 10, "size": [32, 32]}},
    "model": {"factory": "bench._doctor.user:Perceptron", "args": {"hidden": HIDDEN}},
    "optimizer": {"name": "sgd", "lr": 0.001}, "checkpoint": {"every_epochs": 1e9},
}  # fmt: skip
CLUSTER: dict[str, Any] = {
    "title": "two hosts of two processes", "devices": PER_HOST,
    "device": {"title": "a core", "tflops": {"fp32": 0.1}, "memory_gb": 8, "memory_gb_s": 30},
    "inside": {"gb_s": 1, "latency_us": 100},  # which the profile of two processes replaces
    # A message between namespaces takes some 100 us (headway bench-links), a ten-thousandth of such a step.
    "between": {"ports": 1, "gbit_s": RATE_BITS_S / 1e9, "latency_us": 100, "efficiency": TCP},
    "algorithms": ["ring", "tree", "leader", "two_dimensional"],
}  # fmt: skip


@final
@dataclass(frozen=True)
class Found:
    """Images/s of four processes. Attributes: planned; share: of a step, exposed exchange. measured: of each run."""

    planned: float
    share: float
    measured: list[float]

    @property
    def error(self) -> float:
        return self.planned / median(self.measured)[0] - 1


def found(folder: Path) -> Found:
    """Profiles, plans and runs."""
    recipe, cluster = folder / "local.yaml", folder / "cluster.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    cluster.write_text(yaml.safe_dump(CLUSTER), encoding="utf-8")
    workload, one, two = (str(folder / name) for name in ("workload.json", "one.json", "two.json"))
    headway("train", str(recipe), "--dry-run", "--out", workload, cwd=folder)
    headway("doctor", str(recipe), f"batch={BATCH // (HOSTS * PER_HOST)}", "--out", one, cwd=folder)
    headway("doctor", str(recipe), f"batch={BATCH // 2}", "--procs", "2", "--out", two, cwd=folder)
    said = headway(
        "plan", workload, "--cluster", str(cluster), "--profile", one, "--profile", two, "--batch", str(BATCH),
        "--nodes", str(HOSTS), "--json", cwd=folder,
    )  # fmt: skip
    answer = json.loads(said)["answers"][0]
    share = answer["step"]["exposed_s"] / answer["step_s"]
    return Found(answer["images_s"], share, [run(recipe, folder / f"run-{number}") for number in range(RUNS)])


def resnet50() -> Workload:
    """Of ResNet-50 on ImageNet, from the planner's catalog."""
    return find_workload("resnet50")


def headway(*arguments: str, cwd: Path) -> str:
    """What it says. Raises RuntimeError: it failed."""
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "headway", *arguments], cwd=cwd, env={**os.environ, **environ}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"headway {' '.join(arguments)}: {done.stderr[-500:]}")
    return done.stdout


def run(recipe: Path, folder: Path) -> float:
    """Images/s of four processes on two hosts."""
    with Hosts(HOSTS, RATE_BITS_S) as net:
        argv = [sys.executable, "-m", "headway", "train", str(recipe), "--run", str(folder)]
        processes = started(net, Layout(HOSTS, PER_HOST), argv)
        until, begun = monotonic() + STARTS_S, False
        while monotonic() < until and all(one.poll() is None for one in processes):
            if not begun and len(records_of(folder)) >= 2:
                until, begun = monotonic() + SECONDS, True
            sleep(0.2)
        for one in processes:
            one.terminate()
        for one in processes:
            with suppress(subprocess.TimeoutExpired):
                one.communicate(timeout=30.0)
    if (count := len(records_of(folder))) < 4:
        ended = [one.returncode for one in processes]
        raise RuntimeError(f"the run came to {count} logging steps; its processes ended with {ended}")
    return rate_of(folder)
