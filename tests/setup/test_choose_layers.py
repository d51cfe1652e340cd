"""`parallel.layers: auto`: what it knows of a network's layers, what it records, and what it refuses."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tests._support import write_recipe
from torch import Tensor, nn

from headway.core.collectives import Link, Network
from headway.core.errors import UsageError
from headway.core.layer_division import DenseLayer, choose_division
from headway.core.recipe import LoadedRecipe, read_recipe
from headway.setup.choose_layers import describe_measurement, measure_layers, record_division
from headway.setup.recipe import TrainRecipe

MEASURED = "100 us and 25 MB/s between hosts, forward and backward pass 1.2 s"
FC = DenseLayer("head.fc1", 256, 4096, 4 * 257 * 4096)


class Several(nn.Module):
    """Layers of every kind: of samples, of tokens, of rows that are no samples, frozen, shared, small, unused."""

    def __init__(self) -> None:
        super().__init__()
        self.samples, self.tokens, self.rows = nn.Linear(6, 8), nn.Linear(3, 4, bias=False), nn.Linear(2, 5)
        self.frozen, self.small, self.unused = nn.Linear(8, 6), nn.Linear(8, 2), nn.Linear(8, 9)
        self.frozen.requires_grad_(False)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.samples(x.flatten(1))
        sums = self.tokens(x.view(len(x), 2, 3)).sum() + self.rows(x.reshape(-1, 2)).sum()
        out: Tensor = self.small(self.second(self.first(hidden))) + self.frozen(hidden).sum() + sums
        return out


def load(tmp_path: Path, **parallel: object) -> LoadedRecipe[TrainRecipe]:
    recipe = write_recipe(tmp_path / "recipe.yaml", parallel={"strategy": "hybrid", **parallel})
    return read_recipe(recipe, (), TrainRecipe)


def network(bytes_s: float) -> Network:
    return Network(2, 1, Link(0, 1e12), Link(1e-4, bytes_s), 10e9)


def test_layers_are_measured_by_the_sample() -> None:
    model = Several()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = measure_layers(model, torch.randn(1, 1, 2, 3), nullcontext, 3)
    assert found == [DenseLayer("samples", 6, 8, 4 * (6 * 8 + 8)), DenseLayer("tokens", 6, 8, 4 * 3 * 4)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_pays_is_recorded_by_name(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert loaded.recipe.parallel.layers == "auto"  # type: ignore[union-attr]
    found = record_division(loaded, choose_division([FC], 5_000_000, 32, network(25e6), 0.01), MEASURED)
    assert found.recipe.parallel.layers == (r"^head\.fc1$",)  # type: ignore[union-attr]
    assert found.origins["parallel.layers"].startswith(f"auto: by the measured links ({MEASURED}), a step ")
    (tmp_path / "again.yaml").write_text(found.to_yaml())
    assert read_recipe(tmp_path / "again.yaml", (), TrainRecipe).recipe.parallel == found.recipe.parallel


def test_it_says_what_was_measured() -> None:
    assert describe_measurement(network(25e6), 1.2) == MEASURED
    one_host = Network(1, 2, Link(5e-5, 1e9), Link(0, 1), 10e9)
    said = "50 us and 1,000 MB/s between processes, forward and backward pass 300 ms"
    assert describe_measurement(one_host, 0.3) == said


def test_what_does_not_pay_is_refused_with_both_numbers(tmp_path: Path) -> None:
    division = choose_division([FC], 5_000_000, 32, network(10e9), 1.0)
    data, divided = (f"{seconds * 1e3:,.3g} ms" for seconds in (division.data_s, division.divided_s))
    with pytest.raises(UsageError, match=rf"waits {data} for its exchange, and .*\(head.fc1\) {divided}"):
        record_division(load(tmp_path), division, MEASURED)


def test_a_network_without_such_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no fully connected layer that can be divided"):
        record_division(load(tmp_path), choose_division([], 5_000_000, 32, network(25e6), 0.0), MEASURED)
