"""Each strategy of `parallel` by two processes that share one GPU over NCCL: does it train, and as one process does?

The networks draw no random numbers, so a strategy that computes what one process does ends with its loss, up to
rounding. The others (`local`, `async`) must have a lower loss at the end. It says nothing of speed: the exchange goes
through the loopback interface.

strategies_right   strategies that ended with one process's loss, or that may end with another one
strategies_wrong   all others: those that failed too. The exit status is 1 if there are some
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import torch

from bench._common import Claim, parser, report
from bench._family import run_bench

SAME = 0.05
"""Largest difference of the last losses, over what one process has learnt. Batch norm over half of the samples makes
0.013 of it; bf16, and GPU kernels that add in another order, make less."""
SAMPLES, BATCH, EPOCHS = 512, 32, 2
RECIPE = f"""
seed: 1
data: {{{{train: synthetic, synthetic: {{{{samples: {SAMPLES}, classes: 10, size: [{{side}}, {{side}}]}}}}}}}}
model: {{model}}
optimizer: {{{{name: sgd, lr: 0.01, momentum: 0.9}}}}
batch: {BATCH}
epochs: {EPOCHS}
precision: fp32
log_every_steps: 1
device: {{device}}
"""
NETWORKS = {
    "small": (32, "{factory: 'headway.model:small_net'}"),
    "alexnet": (99, "{factory: 'headway.model:alexnet', args: {fc_width: 512, dropout: 0.0}}"),
    "towers": (99, "{factory: 'headway.model:alexnet', args: {fc_width: 512, two_towers: true, dropout: 0.0}}"),
    "experts": (32, "{factory: 'headway.model:cifar_moe', args: {gate: switch, k: 1}}"),
}
"""Each with the side of its images and the recipe's `model`."""
BF16 = "precision=bf16"
LAYERS = "layers: ['^fc6$', '^fc7$']"


@final
@dataclass(frozen=True)
class Case:
    """A run of two processes. Attributes: same: it must end with the loss of one process."""

    network: str
    parallel: str
    same: bool = True
    more: tuple[str, ...] = ()


class Losses(NamedTuple):
    """Of the first and the last logged step."""

    first: float
    last: float


CASES = (
    Case("small", "{strategy: data}"),
    Case("small", "{strategy: data}", more=("comm.batch_norm=sync", "comm.wire=bf16")),
    Case("small", "{strategy: spatial, ranks: 2}"),
    Case("small", "{strategy: spatial, ranks: 2}", more=(BF16,)),
    Case("alexnet", "{strategy: spatial, ranks: 2}"),
    Case("alexnet", f"{{strategy: hybrid, {LAYERS}}}"),
    Case("alexnet", f"{{strategy: hybrid, {LAYERS}, scheme: turns}}", more=(BF16,)),
    Case("towers", "{strategy: towers}"),
    Case("experts", "{strategy: experts, ranks: 2}", more=("comm.batch_norm=sync",)),
    Case("experts", "{strategy: experts, ranks: 2}", more=("comm.batch_norm=sync", "precision=auto")),
    Case("small", "{strategy: sharded, what: optimizer}"),
    Case("small", "{strategy: sharded, what: optimizer}", more=(BF16, "half_weights=true")),
    Case("small", "{strategy: sharded, what: all}"),
    Case("small", "{strategy: sharded, what: all}", more=(BF16,)),
    Case("small", "{strategy: local, every_steps: 4}", same=False),
    Case("small", "{strategy: local, every_steps: 4, outer: {lr: 0.7, momentum: 0.9}}", same=False),
    Case("small", "{strategy: async, compensate: adaptive}", same=False),
)  # fmt: skip
DRY = (CASES[0],)


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        sys.exit("This needs a CUDA GPU, and PyTorch sees none here. --quick tries it on the CPU.")
    cases = DRY if options.quick else CASES
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        networks = sorted({case.network for case in cases})
        alone = [pool.submit(_train, Path(name), f"{one}-alone", one, device, "1") for one in networks]
        runs = [
            pool.submit(
                _train, Path(name), f"case-{number}", one.network, device, "2", f"parallel={one.parallel}", *one.more
            )
            for number, one in enumerate(cases)
        ]
        losses = {network: run.result() for network, run in zip(networks, alone, strict=True)}
        rows, right = [("network", "parallel", "first, last loss", "of one process", "")], 0
        for case, run in zip(cases, runs, strict=True):
            found, expected = run.result(), losses[case.network]
            is_right = _is_right(found, expected, same=case.same)
            right += is_right
            keys = " ".join((case.parallel, *case.more))
            rows.append((case.network, keys, _format(found), _format(expected), "right" if is_right else "wrong"))
    wrong = len(cases) - right
    how = f"of {len(cases)}, two processes on one {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}"
    report([Claim("strategies_right", right, "", how), Claim("strategies_wrong", wrong, "", how)], options, rows)
    sys.exit(1 if wrong else 0)


def _is_right(found: Losses | str, expected: Losses | str, *, same: bool) -> bool:
    if isinstance(found, str) or isinstance(expected, str):
        return False
    if same:
        return abs(found.last - expected.last) <= SAME * (expected.first - expected.last)
    return found.last < found.first


def _format(found: Losses | str) -> str:
    return found if isinstance(found, str) else f"{found.first:.4f}, {found.last:.4f}"


def _train(folder: Path, name: str, network: str, device: str, procs: str, *overrides: str) -> Losses | str:
    """Trains; returns the losses, or the end of what the run said."""
    side, model = NETWORKS[network]
    recipe = folder / f"{name}.yaml"
    recipe.write_text(RECIPE.format(side=side, model=model, device=device))
    argv = [sys.executable, "-m", "headway", "train", str(recipe), "--run", str(folder / name), "--procs", procs]
    path = [str(Path(__file__).parent / "one_gpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*argv, "--no-respawn", *overrides], capture_output=True, text=True, env=environ, timeout=200
        )
    except subprocess.TimeoutExpired:
        return "no end in 200 s"
    if done.returncode:
        print(f"{network} {' '.join(overrides)}\n{done.stderr[-2000:]}", flush=True)
        return done.stderr.strip().splitlines()[-1][:100] if done.stderr.strip() else f"exit status {done.returncode}"
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    losses = [float(one["loss"]) for one in records if "loss" in one]
    return Losses(losses[0], losses[-1])


if __name__ == "__main__":
    run_bench(main)
