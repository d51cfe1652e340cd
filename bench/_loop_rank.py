"""A rank of bench.loop --procs N: runs both arms in step with the other ranks; rank 0 records the times."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from bench import loop
from headway.comm.comm_recipe import CommRecipe
from headway.core.messages import show_messages
from headway.launch.ranks import Ranks
from headway.training.progress import build_display


def main() -> None:
    factory, size, channels, batch, pairs, folder = json.loads(sys.argv[1])
    show_messages()
    ranks = Ranks.from_environment(CommRecipe())
    assert ranks is not None
    rank, procs = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/ddp", rank=rank, world_size=procs)
    with ranks:
        trainer = loop.headway_arm(factory, size, channels, batch, Path(folder), build_display(ranks=ranks), ranks)
        trainer.recovery.meet()
        bare = loop.bare_arm(trainer.setup, getattr(loop, factory), rank, procs)
        times = loop.take_turns(bare, trainer, pairs, ready=dist.barrier)
        trainer.close()
        if rank == 0:
            (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
