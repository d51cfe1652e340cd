"""One rank: measures the link between two hosts; rank 0 prints latency in seconds and bandwidth in bytes/s."""

from __future__ import annotations

import json

import torch

from headway.comm.links import measure_links
from headway.core.launcher_environment import read_launcher_environment
from headway.core.world import World


def main() -> None:
    told = read_launcher_environment()
    if told is None:
        raise SystemExit("no launcher started this process")
    world = World.join(told, torch.device("cpu"))
    link = measure_links(world).build_network(world).between
    if world.is_lead:
        print(json.dumps((link.latency_s, link.bandwidth_bytes_s)), flush=True)
    world.close()


if __name__ == "__main__":
    main()
