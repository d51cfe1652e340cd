"""torch's optimizers without its compiler: they step as torch's do, and no run imports the compiler unasked."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.optim import eager_optimizer

CASES = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
}
RECIPE = """
data: {train: synthetic, synthetic: {size: [8, 8], classes: 4, samples: 64}}
model: {factory: headway.model:resnet18, ema: {half_life_steps: 3}}
optimizer: {name: sgd, lr: 0.01, clip_norm: 1}
batch: 32
epochs: 1
"""
RUN = """
import sys
from pathlib import Path

from headway.training.runs import train

train(Path("recipe.yaml"), [], Path("run"))
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def train(kind: type[torch.optim.Optimizer], options: dict[str, Any], steps: int, saved: Any = None) -> Any:
    """Returns the weights after so many steps, and the optimizer's state."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    optimizer = kind(network.parameters(), lr=0.002, fused=True, **options)
    if saved is not None:
        network.load_state_dict(saved[0])
        # A loaded state shares its tensors.
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    for step in range(steps):
        optimizer.zero_grad()
        network(torch.arange(10.0).view(2, 5) + step).square().sum().backward()
        optimizer.step()
    return network.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("name", CASES)
def test_steps_and_states_are_those_of_torch(name: str) -> None:
    ours, theirs = getattr(eager_optimizer, name), getattr(torch.optim, name)
    begun = train(theirs, CASES[name], 2)
    for saved in (None, begun):
        found, expected = (train(kind, CASES[name], 3, saved) for kind in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.check
def test_a_run_that_compiles_nothing_does_not_import_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
