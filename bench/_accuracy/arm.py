"""Runs an arm once in a process of its own: `python -m bench._accuracy.arm JSON` prints its result as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn import functional as F

from bench._accuracy import airbench, cifar, ours
from bench._accuracy.fastest import candidates, fastest
from bench._accuracy.record import RECORD
from bench._arms import ROOT
from headway.core.malloc import keep_freed_memory

METHODS = {"port": airbench.AIRBENCH, "record": RECORD}
# Ten seconds: the best of one second differs by a third on a shared machine.
PROBE_IMAGES, PROBE_STEPS = 64, 100
TYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float16}  # of images; bf16 is by autocast


class ArmEndedError(Exception):
    """An arm's process has ended without a result."""


def run(**asked: Any) -> dict[str, Any]:
    """Lets a process of its own do it.

    Raises:
        ArmEndedError: it failed; with its last words.
    """
    command = [sys.executable, "-m", "bench._accuracy.arm", json.dumps(asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ArmEndedError(f"{asked['arm']} ended with status {done.returncode}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def probe(steps: int = PROBE_STEPS) -> float:
    """Seconds that this machine takes now for a fixed piece of work, the best of a few: what else it does shows."""
    torch.manual_seed(0)
    images = torch.randn(PROBE_IMAGES, 64, 16, 16, device=device()).to(memory_format=torch.channels_last)
    weight = torch.randn(256, 64, 3, 3, device=device(), requires_grad=True)
    wait = torch.cuda.synchronize if images.device.type == "cuda" else lambda: None
    taken = []
    for _ in range(steps):
        wait()
        started = perf_counter()
        F.conv2d(images, weight, padding=1).square().mean().backward()
        wait()
        taken.append(perf_counter() - started)
    return min(taken)


def imported() -> list[str]:
    """The files of src/headway that this process has imported so far, and those that the native core is built of, by
    their places in the repository."""
    files = {Path(one.__file__).resolve() for one in list(sys.modules.values()) if getattr(one, "__file__", None)}
    files = {one for one in files if one.is_relative_to(ROOT / "src/headway")} | set(native_sources())
    return sorted(one.relative_to(ROOT).as_posix() for one in files)


def native_sources() -> list[Path]:
    """The files that the native core is built of."""
    return [one for one in (ROOT / "native").iterdir() if one.suffix in (".cpp", ".h", ".txt")]


def held(folder: Path, precision: str, samples: int | None = None) -> airbench.Images:
    pixels, labels = cifar.tensors(folder, samples)
    return airbench.Images(pixels, labels, device(), TYPES[precision])


def choose(asked: dict[str, Any]) -> dict[str, Any]:
    """The port's own best setting here."""
    train = Path(asked["packed"]) / "train"
    images = {kind: held(train, kind, 1000) for kind in {how.precision for how in candidates(device())}}
    sets = {how: images[how.precision] for how in candidates(device())}
    best, times = fastest(sets, asked["widths"], asked["batch"], asked["rounds"])
    return {"precision": best.precision, "compiled": best.compiled, "step_ms": times}


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    # For all arms, as Headway does it for its own: without it a step of the port takes 1.2 to 1.5 times as long.
    if device().type == "cpu":
        keep_freed_memory()
    if asked["arm"] == "choose":
        print(json.dumps(choose(asked)))
        return
    steps = asked.get("probe_steps", PROBE_STEPS)
    before, packed, seed = probe(steps), Path(asked["packed"]), asked["seed"]
    if (method := METHODS.get(asked["arm"])) is not None:
        how = airbench.How(asked["precision"], asked["compiled"])
        data, held_out = held(packed / "train", how.precision), held(packed / "eval", how.precision)
        found = airbench.train(method, data, held_out, how, seed=seed, epochs=asked["epochs"], widths=asked["widths"])
    else:
        with tempfile.TemporaryDirectory(prefix="headway-accuracy-") as folder:
            found = ours.train(packed, seed=seed, overrides=asked["overrides"], folder=Path(folder) / "run")
    print(json.dumps({**found, "probe_s": [before, probe(steps)], "imported": imported()}))


if __name__ == "__main__":
    main()
