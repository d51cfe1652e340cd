"""Arms of two hosts that train AlexNet: data parallel, and with its fully connected layers divided; and each of them
without its exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from bench._network.arm import Arm
from headway import model
from headway.comm.algorithm_choice import AlgorithmChooser, run_trials
from headway.comm.communicator import Communicator
from headway.comm.links import measure_links
from headway.comm.reducer import BucketPlan, Reducer
from headway.core.layer_division import DenseLayer
from headway.core.world import Membership, World
from headway.parallel.divided_linear import DividedLayers, divide_linear_layers

# Samples of a rank.
SAMPLES = 16
SIDE, CLASSES = 227, 1000
LAYERS = (r"^fc\d$",)


@final
class Step:
    """A forward and a backward pass of a rank's images, and the sums of the gradients if there is a reducer."""

    def __init__(
        self, network: nn.Module, rank: int, samples: int, divided: DividedLayers | None, reducer: Reducer | None
    ) -> None:
        self._network, self._rank, self._samples = network, rank, samples
        self._divided, self._reducer = divided, reducer
        mine = torch.Generator().manual_seed(rank)
        self._images = torch.randn(samples, 3, SIDE, SIDE, generator=mine).to(memory_format=torch.channels_last)
        self._labels = torch.randint(CLASSES, (samples,), generator=mine)
        self._loss = torch.zeros(())

    def step(self) -> None:
        self._network.zero_grad(set_to_none=True)
        # The same dropout in all arms: it is drawn for the outputs of a rank's own samples.
        torch.manual_seed(self._rank)
        if self._divided is not None:
            self._divided.set_batch(self._divided.ranks * self._samples)
        if self._reducer is not None:
            self._reducer.prepare_for_backward()
        self._loss = F.cross_entropy(self._network(self._images), self._labels)
        self._loss.backward()
        if self._reducer is not None:
            self._reducer.finish(self._loss.detach())

    def found(self) -> list[float]:
        return [float(self._loss)]


@final
class Nowhere:
    """Stands for the other ranks where nothing is exchanged: what comes from them is what happens to be there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def check_rank(self, *_: object) -> None:
        """It has the rank that it was made with."""

    def create_group(self, *_: object, **__: object) -> Nowhere:
        return self

    def all_to_all(self, out: Tensor, into: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> Nowhere:
        # Finite numbers of the size of real ones: others may compute at another speed.
        out.copy_(into.repeat(-(-len(out) // max(1, len(into))))[: len(out)])
        return self

    def wait(self, *_: object) -> None:
        """It is there already."""


def arms(asked: dict[str, Any], store: dist.Store) -> tuple[dict[str, Arm], dict[str, Any]]:
    """`data`, `hybrid`, and `data alone`, `hybrid alone` without the exchange; what a prediction needs to know."""
    rank, ranks, samples, width = (asked[name] for name in ("rank", "size", "samples", "fc_width"))
    device = torch.device("cpu")
    membership = Membership(rank, ranks, identities=[f"host-{one}" for one in range(ranks)])
    world = World.create(store, membership, device, master=asked["address"], secret=b"bench", interface="eth0")
    links = measure_links(world)
    network, communicator = (
        links.build_network(world),
        Communicator(world, rails=links.rails, rates_bytes_s=links.rates_bytes_s),
    )
    trials = run_trials(communicator, network)

    def build(*, divides: bool, exchanges: bool) -> Step:
        torch.manual_seed(0)
        net = model.alexnet(CLASSES, fc_width=width).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        divided, unsummed = None, frozenset[str]()
        if divides:
            divided = divide_linear_layers(net, LAYERS, rank, ranks, "all")
            divided.connect(world if exchanges else Nowhere(rank, ranks))  # type: ignore[arg-type]
            unsummed = divided.unsummed
        if not exchanges:
            return Step(net, rank, samples, divided, None)
        shared = [(name, one) for name, one in net.named_parameters() if name not in unsummed]
        chooser = AlgorithmChooser(network, trials, sum(one.numel() * 4 for _, one in shared))
        reducer = Reducer(shared, communicator, plan=BucketPlan(chooser, chooser.bucket_bytes))
        return Step(net, rank, samples, divided, reducer)

    found: dict[str, Arm] = {
        "data": build(divides=False, exchanges=True),
        "hybrid": build(divides=True, exchanges=True),
        "data alone": build(divides=False, exchanges=False),
        "hybrid alone": build(divides=True, exchanges=False),
    }
    whole = model.alexnet(CLASSES, fc_width=width)
    dense = [
        DenseLayer(name, one.in_features, one.out_features, count_bytes(one))
        for name, one in whole.named_modules()
        if isinstance(one, nn.Linear)
    ]
    return found, {
        "network": asdict(network),
        "layers": [asdict(one) for one in dense],
        "gradient_bytes": count_bytes(whole),
    }


def count_bytes(module: nn.Module) -> int:
    """Counts the bytes of a module's gradients."""
    return sum(parameter.numel() * 4 for parameter in module.parameters())
