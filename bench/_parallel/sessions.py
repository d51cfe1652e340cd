"""Ranks that have the arms of several modules: a quick run starts them once for all of its measurements."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch.distributed as dist

from bench._common import Claim
from bench._hosts import Hosts
from bench._network.arm import Arm
from bench._network.layout import Layout
from bench._network.ranks import Ranks, Turn

Part = tuple[str, Mapping[str, Any], Callable[["Session"], list[Claim]]]
"""A module of this package with arms, what its ranks are told, and the measurement."""


@final
class Session:
    """The arms of one module.

    Attributes:
        facts: what each rank said of itself.
    """

    def __init__(self, ranks: Ranks, module: str) -> None:
        self._ranks, self._module = ranks, module
        self.facts = [facts[module] for facts in ranks.facts]

    def turn(self, arm: str, steps: int = 1) -> Turn:
        """Lets an arm do so many steps."""
        return self._ranks.turn(f"{self._module} {arm}", steps)


def measure_parts(hosts: Hosts, parts: list[Part], *, together: bool) -> Iterator[Claim]:
    """Measures one part after another on two hosts.

    Args:
        together: the same ranks have the arms of all parts. Their start takes five seconds of processor time.
    """
    for some in [parts] if together else [[part] for part in parts]:
        asked = {"arms": __name__, "modules": {name: told for name, told, _ in some}}
        with Ranks(hosts, Layout(2, 1), asked) as ranks:
            for name, _, measure in some:
                yield from measure(Session(ranks, name))


def arms(asked: dict[str, Any], store: dist.Store) -> tuple[dict[str, Arm], dict[str, Any]]:
    """Makes the arms of `asked["modules"]`: `MODULE ARM`. The facts are those of each module."""
    found: dict[str, Arm] = {}
    facts: dict[str, Any] = {}
    for name, told in asked["modules"].items():
        module = importlib.import_module(f"bench._parallel.{name}")
        made, facts[name] = module.arms({**asked, **told}, dist.PrefixStore(name, store))
        found |= {f"{name} {arm}": one for arm, one in made.items()}
    return found, facts
