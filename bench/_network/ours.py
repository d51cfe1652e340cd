"""Headway's side: one World beside DDP's group, links measured once, and a Reducer for every arm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final

import torch
from torch import nn
from torch.distributed import Store

from headway.comm.algorithm_choice import AlgorithmChooser, run_trials
from headway.comm.comm_recipe import Algorithm, Wire
from headway.comm.communicator import Communicator
from headway.comm.links import measure_links
from headway.comm.reducer import BucketPlan, Reducer
from headway.core.world import Membership, World

WIRES: tuple[Wire, ...] = ("fp32", "fp16")

SECRET = b"of the hosts of a bench"
"""These hosts are network namespaces that nobody else reaches."""


@final
class Ours:
    """What the arms of a rank share.

    Attributes:
        said: what a run would print at its start.
        reducers: by the name of the arm.
    """

    def __init__(self, asked: Mapping[str, Any], store: Store) -> None:
        world = World.create(
            store, Membership(asked["rank"], asked["size"]), torch.device("cpu"), master=asked["address"], secret=SECRET
        )
        links = measure_links(world)
        self._network = links.build_network(world)
        self._communicator = Communicator(world, rails=links.rails, rates_bytes_s=links.rates_bytes_s)
        self._trials = {wire: run_trials(self._communicator, self._network, wire=wire) for wire in WIRES}
        self.said = links.describe(world)
        self.reducers: dict[str, Reducer] = {}
        self._choosers: dict[str, AlgorithmChooser] = {}

    def reducer(self, name: str, model: nn.Module, algorithm: Algorithm | Literal["auto"], wire: Wire) -> Reducer:
        """As `headway train` makes it, for sums."""
        total = sum(parameter.numel() * 4 for parameter in model.parameters())
        chooser = AlgorithmChooser(self._network, self._trials[wire], total, algorithm=algorithm, wire=wire)
        self._choosers[name] = chooser
        self.reducers[name] = Reducer(
            model.named_parameters(),
            self._communicator,
            plan=BucketPlan(choose_algorithm=chooser, bucket_bytes=chooser.bucket_bytes, wire=wire),
            buffers=[buffer for buffer in model.buffers() if buffer.is_floating_point()],
        )
        return self.reducers[name]

    def sums(self, name: str) -> list[tuple[str, int, Wire]]:
        """(algorithm, bytes, wire) of each bucket of an arm, once its first step has ordered them."""
        reducer, choose = self.reducers[name], self._choosers[name]
        last = reducer.buckets[-1]
        return [
            (choose(bucket.nbytes), bucket.nbytes, "fp32" if bucket is last else reducer.wire)
            for bucket in reducer.buckets
        ]

    def lines(self) -> list[str]:
        """What a run would print at its start: links, and how gradients travel in the arms that choose."""
        chosen = {name: [one.nbytes for one in self.reducers[name].buckets] for name in ("auto fp32", "auto fp16")}
        return [*self.said, *(f"{name}: {self._choosers[name].describe(sizes)}" for name, sizes in chosen.items())]
