"""Two workers, one of which takes five times as long for a batch: synchronous, asynchronous, and bounded.

Each worker sleeps in its transform, so that its speed is that of the arm and not of the machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from headway.parallel.update_log import ROW_BYTES

FAST_S, SLOW_S, BATCH = 0.02, 0.1, 8
TRANSFORM = """
import os
import time

from torch import nn

SECONDS = {seconds}


def wait(images, labels, keys):
    time.sleep(SECONDS[int(os.environ.get("RANK", 0))])
    return images, labels


def net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))
"""
RECIPE = """
data: {{train: synthetic, synthetic: {{size: [8, 8], classes: 4, samples: 64}}}}
model: {{factory: slow.py:net}}
transform: slow.py:wait
optimizer: {{name: sgd, lr: 0.01}}
batch: {batch}
epochs: {epochs}
precision: fp32
log_every_steps: 100000
checkpoint: {{every_epochs: 100000}}
parallel: {parallel}
"""


def _prepare(folder: Path, name: str, parallel: str, batches: int, seconds: tuple[float, ...], merge: int) -> list[str]:
    (folder / "slow.py").write_text(TRANSFORM.format(seconds=seconds))
    recipe = folder / f"{name}.yaml"
    epochs = batches * BATCH / 64
    recipe.write_text(RECIPE.format(batch=BATCH * merge, epochs=epochs, parallel=parallel))
    return [
        *(sys.executable, "-m", "headway", "train", str(recipe), "--run", str(folder / name)),
        *("--procs", str(len(seconds)), "--no-respawn", "--json"),
    ]


def measure_rate(folder: Path, name: str, parallel: str, batches: int, merge: int = 1) -> float:
    """Trains so many batches of one worker; returns batches per second, without the start."""
    argv = _prepare(folder, name, parallel, batches, (FAST_S, SLOW_S), merge)
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return float(json.loads(done.stdout)["images_s"]) / BATCH


def measure_kill(folder: Path, name: str) -> float:
    """Kills one of three workers; returns the longest time without an update in the second after that."""
    argv = _prepare(folder, name, "{strategy: async}", 500, (FAST_S,) * 3, 1)
    path, log = folder / name / "updates.bin", folder / f"{name}.log"
    with (
        log.open("w") as said,
        subprocess.Popen(argv, stdout=said, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process,
    ):
        try:
            while not path.exists() or path.stat().st_size < 50 * ROW_BYTES:
                if process.poll() is not None:
                    raise RuntimeError(f"the run ended with status {process.returncode}: {log.read_text()[-2000:]}")
                time.sleep(0.001)
            children = psutil.Process(process.pid).children()
            (lost,) = (child for child in children if child.environ().get("RANK") == "2")
            lost.send_signal(signal.SIGKILL)
            begun = changed = time.perf_counter()
            longest, size = 0.0, path.stat().st_size
            while (now := time.perf_counter()) < begun + 1:
                if (new := path.stat().st_size) != size:
                    longest, changed, size = max(longest, now - changed), now, new
                time.sleep(0.0005)
            return max(longest, now - changed)
        finally:
            # Workers that outlive their launcher still write into the folder, which is removed next.
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(family[1:])
