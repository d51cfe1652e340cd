"""Xavier initialisation: its bounds, and a recipe that asks for it."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from tests._support import headway, packed_digits, refused
from torch import nn

from headway.core.errors import UsageError
from headway.model import init_xavier

ROOT = Path(__file__).resolve().parents[2]


def test_a_magnitude_of_three_is_torchs() -> None:
    layer = nn.Conv2d(3, 8, 5)
    ours, theirs = layer, copy.deepcopy(layer)
    torch.manual_seed(1)
    init_xavier(ours)
    torch.manual_seed(1)
    nn.init.xavier_uniform_(theirs.weight)
    torch.testing.assert_close(ours.weight, theirs.weight)
    assert not ours.bias.any()


def test_weights_fill_the_bound_and_norms_begin_as_the_identity() -> None:
    network = nn.Sequential(nn.Linear(400, 600), nn.BatchNorm1d(600), nn.Linear(600, 10))
    with torch.no_grad():
        network[1].weight.fill_(7)
    init_xavier(network, magnitude=2.3)
    bound = math.sqrt(2.3 / 500)
    assert 0.99 * bound < network[0].weight.max() <= bound
    assert network[0].weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert (network[1].weight == 1).all()
    assert not network[2].bias.any()
    with pytest.raises(UsageError, match="a magnitude of 0"):
        init_xavier(network, magnitude=0)


def test_the_recipe_with_sixteen_bit_weights_trains(tmp_path: Path) -> None:
    packed, path = packed_digits(tmp_path), ROOT / "recipes/cifar10-multi-precision.yaml"
    data = (f"data.train={packed}/train", f"data.eval={packed}/eval", "precision=bf16", "device=cpu")
    headway("train", path, *data, "epochs=0.7", "batch=60", "--run", tmp_path / "run")
    assert (tmp_path / "run/weights.safetensors").is_file()
    said = refused("train", path, *data, "model.init=null", "--run", tmp_path / "other", status=2)
    assert "init_args are those of init" in said
