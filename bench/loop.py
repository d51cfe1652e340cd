"""The Trainer's loop against a hand-written one.

Both arms alternate every 50 steps in one process. Each has its own network with the same initial weights, and the same
batch, which lies on the device as uint8 as an input pipeline leaves it. The hand-written arm converts it and runs
forward, loss, backward and the fused optimizer's step, nothing else. Headway's arm is the Trainer as `headway train`
runs it: learning-rate schedule, Clock, metrics.jsonl and the progress bar of a terminal.

loop_ratio         steps/s of Headway over the hand-written loop, for a step of 3 to 10 ms
loop_overhead_us   time that Headway adds to a step of a 32-32-10 perceptron

With --procs N, each of N ranks, started as by `headway train --procs N`, has both arms. The hand-written one wraps its
network in DDP with its defaults, on Gloo over the loopback. Each rank has its own batch; rank 0 takes the time between
two barriers.

loop_ratio_procsN  steps/s of Headway over the hand-written loop with DDP, for a step of 3 to 10 ms
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from bench import _synthetic as synthetic
from bench._common import Claim, median, parser, report
from bench._family import run_bench
from headway.core.messages import show_messages
from headway.launch.hosts import parse_hosts
from headway.launch.launcher import launch
from headway.launch.ranks import Ranks
from headway.setup.train_setup import TrainSetup
from headway.training.display import Display
from headway.training.progress import ProgressBar
from headway.training.trainer import Trainer

STEPS = 50


def perceptron(num_classes: int) -> nn.Module:
    """32-32-10; its 32 inputs come as images of 4 x 8 gray pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, num_classes))


def convolutions(num_classes: int) -> nn.Module:
    """A step of 3 to 10 ms on two cores: three convolutions over 32 images of 16 x 16."""
    layers: list[nn.Module] = []
    for before, after in ((3, 24), (24, 48), (48, 48)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, num_classes))


def headway_arm(
    factory: str,
    size: tuple[int, int],
    channels: int,
    batch: int,
    folder: Path,
    display: Display,
    ranks: Ranks | None = None,
) -> Trainer:
    """The Trainer of a network of this file."""
    more = f"data.synthetic.channels={channels}"
    found = synthetic.setup(f"bench.loop:{factory}", size, batch, folder, more, ranks=ranks)
    return synthetic.trainer(found, folder, display, ranks)


def bare_arm(
    setup: TrainSetup, factory: Callable[[int], nn.Module], rank: int = 0, size: int = 1
) -> Callable[[int], None]:
    model = factory(10).to(memory_format=torch.channels_last)
    if size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)
    batch = next(iter(setup.batches(0, rank, size)))
    images, labels = batch.images, batch.labels
    mean = torch.tensor(setup.recipe.augment.mean)
    inverse_std = 1 / torch.tensor(setup.recipe.augment.std)

    def run(steps: int) -> None:
        for _ in range(steps):
            inputs = ((images.float() - mean) * inverse_std).permute(0, 3, 1, 2)
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def take_turns(
    bare: Callable[[int], None], trainer: Trainer, pairs: int, ready: Callable[[], object] = lambda: None
) -> list[list[float]]:
    """Seconds a step of (bare, Headway) in each pair; the first two pairs warm up and are left out.

    Args:
        ready: called before the clock starts, and before it stops.
    """
    times = []
    for pair in range(pairs + 2):
        arms = [bare, trainer.run]
        taken = [0.0, 0.0]
        for arm in (0, 1) if pair % 2 else (1, 0):
            ready()
            started = perf_counter()
            arms[arm](STEPS)
            ready()
            taken[arm] = (perf_counter() - started) / STEPS
        times.append(taken)
    return times[2:]


def compare(
    factory: Callable[[int], nn.Module], size: tuple[int, int], channels: int, batch: int, pairs: int, procs: int
) -> list[list[float]]:
    """Seconds a step of (bare, Headway) in each pair.

    Args:
        batch: of each process.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if procs > 1:
            asked = json.dumps([factory.__name__, size, channels, batch * procs, pairs, name])
            if status := launch(["-m", "bench._loop_rank", asked], parse_hosts(procs, None)):
                sys.exit(status)
            found: list[list[float]] = json.loads((folder / "times.json").read_text())
            return found
        bar = ProgressBar(Console(file=(folder / "terminal").open("w"), force_terminal=True))
        trainer = headway_arm(factory.__name__, size, channels, batch, folder, bar)
        times = take_turns(bare_arm(trainer.setup, factory), trainer, pairs)
        trainer.close()
        bar.stop()
        return times


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--procs", type=int, default=1, metavar="N", help="so many ranks, against DDP")
    options = asked.parse_args()
    show_messages()
    pairs, procs = 1 if options.quick else 100, options.procs
    rows = [("network", "batch", "bare ms", "headway ms", "ratio (95 %)", "added us (95 %)")]
    found = {}
    for factory, size, channels, batch in ((perceptron, (4, 8), 1, 32), (convolutions, (16, 16), 3, 32)):
        times = compare(factory, size, channels, batch, pairs, procs)
        bare, ours = median([b for b, _ in times]), median([h for _, h in times])
        ratio = median([b / h for b, h in times])
        added = median([(h - b) * 1e6 for b, h in times])
        found[factory.__name__] = (ratio, added)
        rows.append(
            (
                factory.__name__,
                str(batch),
                f"{bare[0] * 1e3:.3f}",
                f"{ours[0] * 1e3:.3f}",
                f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]",
                f"{added[0]:.1f} [{added[1]:.1f}, {added[2]:.1f}]",
            )
        )
    where = "one process" if procs == 1 else f"each of {procs} ranks"
    how = f"median of {pairs} pairs of {STEPS} steps, arms alternating in {where}"
    ratio, added = found["convolutions"][0][0], found["perceptron"][1][0]
    if procs == 1:
        claims = [
            Claim("loop_ratio", ratio, "", f"{how}; steps/s, Headway over hand-written"),
            Claim("loop_overhead_us", added, "us", f"{how}; 32-32-10 perceptron, batch 32"),
        ]
    else:
        claims = [Claim(f"loop_ratio_procs{procs}", ratio, "", f"{how}; steps/s, Headway over hand-written with DDP")]
    report(claims, options, rows)


if __name__ == "__main__":
    run_bench(main)
