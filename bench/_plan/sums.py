"""One rank: sums fp32 over all ranks, of every size by every algorithm in turn; rank 0 prints the medians."""

from __future__ import annotations

import json
import sys
from itertools import product
from statistics import median

import torch

from headway.comm.bench_links import time_all_algorithms
from headway.comm.communicator import Communicator
from headway.core.launcher_environment import read_launcher_environment
from headway.core.world import World

SIZES = tuple(1 << power for power in range(12, 24))
"""Bytes: from 4 KiB, every power of two to 8 MiB."""


def main() -> None:
    told = read_launcher_environment()
    if told is None:
        raise SystemExit("no launcher started this process")
    world = World.join(told, torch.device("cpu"))
    communicator = Communicator(world)
    buffers = [torch.zeros(size // 4) for size in SIZES]
    rounds = [
        [seconds for buffer in buffers for seconds in time_all_algorithms(communicator, buffer)]
        for _ in range(1 + int(sys.argv[1]))
    ]
    if world.is_lead:  # in the first round connections open and memory is touched
        medians = [median(times) for times in zip(*rounds[1:], strict=True)]
        asked = product(SIZES, communicator.algorithms)
        print(json.dumps([(name, size, took) for (size, name), took in zip(asked, medians, strict=True)]), flush=True)
    communicator.close()
    world.close()


if __name__ == "__main__":
    main()
