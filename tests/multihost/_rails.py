"""Arms of hosts with two network interfaces: the sum of a buffer over the first, and over both."""

from __future__ import annotations

from typing import Any, final

import torch
from torch.distributed import PrefixStore, Store

from headway.comm.comm_recipe import Algorithm, Wire
from headway.comm.communicator import Communicator
from headway.comm.links import measure_links
from headway.core.errors import CommunicationError, HeadwayError
from headway.core.world import Membership, World

SECRET = b"of the hosts of a test"
TIMEOUT_S = 2.0


@final
class Sum:
    """Sums random numbers; `found` is a checksum of the bits."""

    def __init__(self, communicator: Communicator, algorithm: Algorithm, wire: Wire, numbers: int) -> None:
        self._communicator, self._algorithm, self._wire, self._numbers = communicator, algorithm, wire, numbers
        self._sum = torch.empty(0)

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self._communicator.world.rank)
        self._sum = torch.randn(self._numbers, generator=generator)
        self._communicator.all_reduce(self._sum, algorithm=self._algorithm, wire=self._wire).wait()

    def found(self) -> list[float]:
        return [float(self._sum.view(torch.int32).sum(dtype=torch.int64) % (1 << 50))]


@final
class Failure:
    """A sum that fails; it prints the message."""

    def __init__(self, work: Sum) -> None:
        self._work, self._has_failed = work, False

    def step(self) -> None:
        try:
            self._work.step()
        except CommunicationError as error:
            self._has_failed = "interface eth1" in str(error) and "Timed out" in str(error)

    def found(self) -> list[float]:
        return [float(self._has_failed)]


def arms(asked: dict[str, Any], store: Store) -> tuple[dict[str, Any], dict[str, Any]]:
    """`one ALGORITHM WIRE` and `two ALGORITHM WIRE`; a rank that is refused only says why."""
    found: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for name, interfaces in (("one", ["eth0"]), ("two", ["eth0", "eth1"])):
        try:
            world = World.create(
                PrefixStore(name, store),
                Membership(asked["rank"], asked["size"]),
                torch.device("cpu"),
                master=asked["address"],
                secret=SECRET,
                interface=interfaces,
                timeout_s=TIMEOUT_S,
                connect_s=asked.get("connect_s", 60),
            )
            links = measure_links(world, budget_s=0.4)
        except HeadwayError as error:
            return {}, {"refused": f"{type(error).__name__}: {error}"}
        facts[name] = {"said": links.describe(world), "bandwidth": links.build_network(world).between.bandwidth_bytes_s}
        communicator = Communicator(world, rails=links.rails, rates_bytes_s=links.rates_bytes_s)
        wires: tuple[Wire, ...] = ("fp32", "fp16")
        for algorithm in communicator.algorithms:
            for wire in wires:
                found[f"{name} {algorithm} {wire}"] = Sum(communicator, algorithm, wire, asked["numbers"])
    return {**found, "failure": Failure(found["two ring fp32"])}, facts
