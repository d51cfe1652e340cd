"""Towers in a plan: modules that run side by side, one on each device of a place; see `parallel.towers`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import final

from headway.core.workload import Workload, WorkloadLayer

# The default of `parallel.match`.
TOWER = re.compile(r"^towers\.(\d+)")


@final
@dataclass(frozen=True)
class TowerLayers:
    """The towers of a network. Numbers of values are per sample."""

    # Towers, and thus devices of a place.
    count: int
    # Names of the layers of all towers, and of those of the towers that another device has.
    names: frozenset[str]
    elsewhere: frozenset[str]
    # Values of a tower that the others get before each layer that sees all towers. Their gradients come back, except
    # behind the towers, where every device computes all of them.
    inside: tuple[int, ...]
    behind: int

    def list_exchanged_values(self) -> list[int]:
        """Lists the values that a device sends to each other one: forward, then backward."""
        return [*self.inside, self.behind, *self.inside]


def find_towers(workload: Workload) -> TowerLayers | None:
    """Finds the towers of a network by the names of its layers. Returns None if there are not at least two alike."""
    numbered: dict[int, list[WorkloadLayer]] = {}
    for layer in workload.layers:
        if found := TOWER.match(layer.name):
            numbered.setdefault(int(found[1]), []).append(layer)
    count = len(numbered)
    shapes = {tuple(one.output_shape for one in layers) for layers in numbered.values()}
    if count < 2 or sorted(numbered) != list(range(count)) or len(shapes) != 1:
        return None
    own = numbered[0]
    # The maps of a tower and not of all: a layer with as many channels as all towers have together sees all of them.
    inside, before = list[int](), own[0].output_shape
    for layer in own[1:]:
        given, made = layer.input_shape, before
        if given and made and given[0] == count * made[0] and given[1:] == made[1:]:
            inside.append(math.prod(made))
        before = layer.output_shape
    elsewhere = {one.name for number, layers in numbered.items() if number for one in layers}
    names = elsewhere | {one.name for one in own}
    after = workload.layers[workload.layers.index(own[-1]) + 1 :]
    # Poolings and activations pass each tower's maps.
    mixing = (one for one in after if one.name not in names and one.forward_multiply_adds and one.input_shape)
    first = next(mixing, None)
    behind = 0 if first is None or first.input_shape is None else math.prod(first.input_shape) // count
    return TowerLayers(count, frozenset(names), frozenset(elsewhere), tuple(inside), behind)


def compute_tower_share(workload: Workload, towers: TowerLayers) -> float:
    """Computes the share of a step's multiply-adds that is in towers."""
    total = inside = 0
    for layer in workload.layers:
        work = layer.forward_multiply_adds + layer.backward_multiply_adds
        total += work
        inside += work if layer.name in towers.names else 0
    return inside / total if total else 0.0
