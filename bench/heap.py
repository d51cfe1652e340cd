"""Keeping or returning freed memory: the same training on a CPU, in processes that differ in HEADWAY_HEAP only.

The small residual network of bench.large_batch trains on random images that lie in memory, through the Trainer, on one
thread. The arms take turns, each time in a new process, which warms up first.

heap_gain_N     images/s with freed memory kept over images/s with it returned, for batches of N
heap_memory_N   peak memory of the process, as the same ratio
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from bench._arms import ROOT
from bench._common import Claim, median, parser, report
from bench._family import run_bench

SIZES = ((256, 40), (2048, 8), (8192, 4))
"""(batch, timed steps)."""
ARMS = {"given back": "system", "kept": ""}
ROUNDS = 7


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--arm", nargs=2, type=int, metavar=("BATCH", "STEPS"), help="one measurement, of this process")
    options = asked.parse_args()
    if options.arm:
        print(json.dumps(arm(*options.arm)))
        return
    sizes, rounds = (SIZES[:1], 2) if options.quick else (SIZES, ROUNDS)
    rows: list[tuple[str, ...]] = [("batch", "freed memory", "ms a step", "page faults a step", "most memory, MB")]
    claims = []
    for batch, steps in sizes:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
        for number in range(rounds):
            for name in ARMS if number % 2 else reversed(ARMS):
                found[name].append(measured(batch, steps, ARMS[name]))
        for name, runs in found.items():
            middle, low, high = median([run["seconds"] * 1e3 for run in runs])
            faults, most = (median([run[key] for run in runs])[0] for key in ("faults", "memory"))
            rows.append((str(batch), name, f"{middle:.1f} [{low:.1f}, {high:.1f}]", f"{faults:,.0f}", f"{most:,.0f}"))
        pairs = list(zip(found["given back"], found["kept"], strict=True))
        how = f"median of {rounds} rounds of a process each, {steps} steps, one thread"
        for key, name, ratio in (
            ("gain", "images/s, kept over given back", [a["seconds"] / b["seconds"] for a, b in pairs]),
            ("memory", "most memory, kept over given back", [b["memory"] / a["memory"] for a, b in pairs]),
        ):
            middle, low, high = median(ratio)
            claims.append(Claim(f"heap_{key}_{batch}", middle, "", f"{how}; [{low:.3f}, {high:.3f}]; {name}"))
    report(claims, options, rows)


def measured(batch: int, steps: int, heap: str) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HEADWAY_HEAP": heap}
    command = [sys.executable, "-m", "bench.heap", "--arm", str(batch), str(steps)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def arm(batch: int, steps: int) -> dict[str, Any]:
    """Seconds and page faults of a step, and the process's most memory in MB."""
    from bench import _synthetic as synthetic
    from headway.training.progress import SilentDisplay

    with tempfile.TemporaryDirectory() as name:
        factory, folder = "bench._accuracy.narrow:narrow", Path(name)
        setup = synthetic.setup(factory, (32, 32), batch, folder)
        trainer = synthetic.trainer(setup, folder, SilentDisplay())
        trainer.run(steps=3)
        before, begun = resource.getrusage(resource.RUSAGE_SELF), perf_counter()
        trainer.run(steps=steps)
        seconds, after = perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
        trainer.close()
    faults = (after.ru_minflt - before.ru_minflt) / steps
    return {"seconds": seconds / steps, "faults": faults, "memory": after.ru_maxrss / 1e3}


if __name__ == "__main__":
    run_bench(main)
