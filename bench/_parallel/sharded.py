"""Counts the bytes of weights, gradients and optimizer state that live on ranks which own the optimizer's state, and
makes steps of them for a count on the wire."""

from __future__ import annotations

import gc
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bench._network.arm import Arm
from bench._parallel.forks import run_ranks
from headway import model
from headway.comm.communicator import Communicator
from headway.comm.reducer import BucketPlan, Reducer
from headway.core.world import Membership, World
from headway.optim import build_optimizer
from headway.optim.optimizer_recipe import read_optimizer
from headway.parallel.owners import Owners, find_largest_shares

SIDES = {"resnet50": 32, "alexnet": 67, "resnet18": 32}
"""Sides of the images: small ones, as memory for images is not counted."""
SAMPLES, CLASSES, STEPS = 2, 1000, 2


@dataclass(frozen=True)
class LiveBytes:
    """Bytes of a rank, at the moment of a step in which it has most.

    Attributes:
        weights: bytes of the weights alone, n.
        largest_share: share of the weights that the rank with the most of them owns.
        most: bytes of weights, gradients, gradients on their way, and optimizer state, counted together.
        state: bytes of the optimizer state.
    """

    weights: int
    largest_share: float
    most: int
    state: int

    @property
    def ratio(self) -> float:
        """`most` over 2 n + 2 n x the largest share."""
        return self.most / (2 * self.weights * (1 + self.largest_share))


@final
class Step:
    """A training step of a rank, with Adam.

    Args:
        is_sharded: ranks own the optimizer's state; else each has all of it.
    """

    def __init__(self, world: World, name: str, *, is_sharded: bool) -> None:
        torch.manual_seed(0)
        build = getattr(model, name)
        self.network: nn.Module = build(CLASSES).to(memory_format=torch.channels_last)
        self.optimizer = build_optimizer(read_optimizer(name="adam", lr=1e-3), self.network)
        named = list(self.network.named_parameters())
        communicator = Communicator(world)
        self._owners = None
        if is_sharded:
            self._owners = Owners(named, world.rank, world.size)
            self._owners.connect(communicator, BucketPlan().bucket_bytes)
        build_bucket = None if self._owners is None else self._owners.build_bucket
        self._reducer = Reducer(named, communicator, build_bucket=build_bucket)
        side, mine = SIDES[name], torch.Generator().manual_seed(world.rank)
        self._images = torch.randn(SAMPLES, 3, side, side, generator=mine).to(memory_format=torch.channels_last)
        self._labels = torch.randint(CLASSES, (SAMPLES,), generator=mine)

    def step(self) -> None:
        self._reducer.prepare_for_backward()
        F.cross_entropy(self.network(self._images), self._labels).backward()
        self._reducer.finish()
        self.optimizer.step()
        if self._owners is not None:
            self._owners.share_weights()
        self.optimizer.zero_grad()

    def found(self) -> list[float]:
        return [float(sum(one.detach().double().sum() for one in self.network.parameters()))]


@final
class MemoryCounter(TorchDispatchMode):
    """Counts all tensors that Python objects hold, each memory once, before and after operations on many tensors.

    In a step these are copies of gradients into buckets. Activations are held by autograd, and are not among them.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._parameters = list(network.parameters())
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "foreach" not in func.__name__:
            return func(*args, **(kwargs or {}))
        self.count()
        result = func(*args, **(kwargs or {}))
        self.count()
        return result

    def count(self, *_: object) -> None:
        """Counts what is there now."""
        # A gradient becomes a Python object when it is asked for.
        held: list[Tensor] = [*self._parameters, *(one.grad for one in self._parameters if one.grad is not None)]
        held += [one for one in gc.get_objects() if isinstance(one, Tensor)]
        self.most = max(self.most, count_bytes(held))


def count_bytes(tensors: list[Tensor]) -> int:
    """Counts the bytes of tensors, each memory once."""
    storages = (one.untyped_storage() for one in tensors if one.device.type == "cpu")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure_memory(name: str, ranks: int) -> list[LiveBytes]:
    """Counts the bytes of each rank in a step of a network with Adam."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_run_rank, (ranks, folder, name), ranks)
        return [LiveBytes(**json.loads((Path(folder) / str(rank)).read_text())) for rank in range(ranks)]


def _run_rank(rank: int, ranks: int, folder: str, name: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    membership = Membership(rank, ranks, identities=["host"] * ranks)
    world = World.create(store, membership, torch.device("cpu"), master="127.0.0.1", secret=b"bench", interface="lo")
    # What imports have made is not looked at again and again.
    gc.freeze()
    step = Step(world, name, is_sharded=True)
    # Adam makes its state in the first step, and the order of the buckets is known after it.
    for _ in range(STEPS):
        step.step()
    parameters = list(step.network.parameters())
    gc.collect()
    counter = MemoryCounter(step.network)
    # After a gradient has come, and the bucket that it filled has begun its way.
    hooks = [one.register_post_accumulate_grad_hook(counter.count) for one in parameters]
    hooks += [
        step.optimizer.register_step_pre_hook(counter.count),
        step.optimizer.register_step_post_hook(counter.count),
    ]
    with counter:
        step.step()
    state = count_bytes([one for values in step.optimizer.state.values() for one in values.values()])
    largest, _ = find_largest_shares(dict(step.network.named_parameters()), ranks, {})
    found = LiveBytes(count_bytes(parameters), largest, counter.most, state)
    (Path(folder) / str(rank)).write_text(json.dumps(vars(found)), encoding="ascii")
    world.control.barrier()
    world.close()


def arms(asked: dict[str, Any], store: dist.Store) -> tuple[dict[str, Arm], dict[str, Any]]:
    """`sharded` and `data`: a step of `asked["network"]`."""
    membership = Membership(asked["rank"], asked["size"], identities=[f"host-{one}" for one in range(asked["size"])])
    device = torch.device("cpu")
    world = World.create(store, membership, device, master=asked["address"], secret=b"bench", interface="eth0")
    built = {name: Step(world, asked["network"], is_sharded=name == "sharded") for name in ("sharded", "data")}
    return dict(built), {"parameters": sum(one.numel() for one in built["data"].network.parameters())}
