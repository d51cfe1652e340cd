"""Ranks that have rows of all weights, gradients and optimizer state: bytes between steps, and bytes on the wire."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from bench._common import Claim, table
from bench._network.arm import Arm
from bench._parallel.forks import run_ranks
from bench._parallel.sessions import Session
from bench._parallel.sharded import CLASSES, SAMPLES, SIDES, count_bytes
from headway import model
from headway.comm.communicator import Communicator
from headway.comm.reducer import Reducer
from headway.core.row_shards import count_sent_bytes
from headway.core.world import Membership, World
from headway.model.activation_checkpointing import list_blocks
from headway.optim import build_optimizer
from headway.optim.optimizer_recipe import read_optimizer
from headway.parallel.full_shards import FullShards


@final
class Step:
    """A training step of a rank, with Adam."""

    def __init__(self, world: World, name: str) -> None:
        torch.manual_seed(0)
        self.network: nn.Module = getattr(model, name)(CLASSES)
        self.optimizer = build_optimizer(read_optimizer(name="adam", lr=1e-3), self.network)
        whole = dict(self.network.named_parameters())
        self.parameters = sum(one.numel() for one in whole.values())
        self._shards = FullShards(self.network, list_blocks(self.network), world.rank, world.size)
        self._shards.take_parameters(self.optimizer, whole)
        self._shards.connect(world)
        self._communicator = Communicator(world)
        self._reducer = Reducer([], self._communicator)
        side, mine = SIDES[name], torch.Generator().manual_seed(world.rank)
        self._images = torch.randn(SAMPLES, 3, side, side, generator=mine)
        self._labels = torch.randint(CLASSES, (SAMPLES,), generator=mine)

    def step(self) -> None:
        self.update()
        self.optimizer.zero_grad()

    def update(self) -> None:
        """Makes a step, and leaves the gradients."""
        self._shards.prepare_for_backward()
        self._reducer.prepare_for_backward()
        F.cross_entropy(self.network(self._images), self._labels).backward()
        self._shards.take_gradients(self._communicator)
        self._shards.complete_step(self._reducer.finish())
        self.optimizer.step()

    def found(self) -> list[float]:
        return [float(self._shards.sum_over_ranks(self._sum()))]

    def _sum(self) -> Tensor:
        return torch.stack([one.detach().double().sum() for _, one in self._shards.named_parameters()]).sum()


def arms(asked: dict[str, Any], store: dist.Store) -> tuple[dict[str, Arm], dict[str, Any]]:
    """`all`: a step of `asked["network"]`."""
    step = Step(_join(store, asked["rank"], asked["size"], asked["address"], "eth0", spread=True), asked["network"])
    return {"all": step}, {"parameters": step.parameters}


def measure_full_shards_memory(network: str, ranks: int) -> Claim:
    """Counts the bytes that live on each rank between the backward pass and the next step, all tensors together."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_run_rank, (ranks, folder, network), ranks)
        found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]
    formula = 4 * 4 * found[0]["parameters"] / ranks
    table(
        [("rank", "weights, gradients and state, MB", "all tensors, MB", "4 n/N, MB"),
         *((str(rank), f"{one['held'] / 1e6:.1f}", f"{one['live'] / 1e6:.1f}", f"{formula / 1e6:.1f}")
           for rank, one in enumerate(found))]
    )  # fmt: skip
    worst = max(one["held"] for one in found)
    how = f"{worst:,} bytes of {formula:,.0f}, {network}, {ranks} ranks, fp32, Adam; all tensors that live:"
    how += f" {max(one['live'] for one in found):,}"
    return Claim("sharded_all_memory", worst / formula, "", how)


def measure_full_shards_bytes(ranks: Session, network: str) -> Claim:
    """Counts the bytes of a step of two hosts."""
    turn = ranks.turn("all")
    formula = count_sent_bytes(4 * ranks.facts[0]["parameters"], 2)
    assert turn.answers[0] == turn.answers[1], "the ranks have different weights after a step"
    sent = max(turn.payload)
    how = f"{network}, 2 ranks, fp32: {sent:,.0f} bytes of {formula:,.0f}"
    return Claim("sharded_all_bytes", sent / formula, "", how)


def _join(store: Any, rank: int, ranks: int, master: str, interface: str, *, spread: bool) -> World:
    membership = Membership(rank, ranks, identities=[f"host-{one if spread else 0}" for one in range(ranks)])
    device = torch.device("cpu")
    return World.create(store, membership, device, master=master, secret=b"bench", interface=interface)


def _run_rank(rank: int, ranks: int, folder: str, network: str) -> None:
    torch.set_num_threads(1)
    world = _join(dist.FileStore(f"{folder}/store", ranks), rank, ranks, "127.0.0.1", "lo", spread=False)
    # What imports have made is not looked at.
    gc.freeze()
    step = Step(world, network)
    step.update()
    gc.collect()
    stepped = [one for group in step.optimizer.param_groups for one in group["params"]]
    held: list[Tensor] = [*stepped, *(one.grad for one in stepped if one.grad is not None)]
    held += [one for values in step.optimizer.state.values() for one in values.values()]
    live = held + [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    found = {"parameters": step.parameters, "held": count_bytes(held), "live": count_bytes(live)}
    (Path(folder) / str(rank)).write_text(json.dumps(found), encoding="ascii")
    world.control.barrier()
    world.close()
