"""Counts what the backward pass of ResNet-50 needs, on ranks that share images and in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench._parallel.forks import run_ranks
from headway.core.world import Membership, World
from headway.model import resnet50
from headway.parallel.maps import cut
from headway.parallel.place import Place
from headway.parallel.strips import run_in_strips

SIZE = 224


def count_saved_bytes(network: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes of all tensors that are kept for the backward pass, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # Held, so that no later storage gets its address.
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run()
    del out
    return sum(storage.nbytes() for storage in saved.values())


def measure_shares(ranks: int) -> list[float]:
    """Each rank's bytes over those of one process."""
    with tempfile.TemporaryDirectory() as name:
        run_ranks(_run_rank, (ranks, name), ranks)
        return [float((Path(name) / str(rank)).read_text(encoding="ascii")) for rank in range(ranks)]


def _run_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    membership = Membership(rank, ranks, identities=["host"] * ranks)
    world = World.create(store, membership, torch.device("cpu"), master="127.0.0.1", secret=b"bench", interface="lo")
    network, images = resnet50(), torch.zeros(1, 3, SIZE, SIZE)
    whole = count_saved_bytes(network, lambda: network(images))
    split = cut(images, Place.create(world, (ranks, 1)))
    share = count_saved_bytes(network, lambda: run_in_strips(network, split)) / whole
    (Path(folder) / str(rank)).write_text(str(share), encoding="ascii")
    world.control.barrier()
    world.close()
