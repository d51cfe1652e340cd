"""Own network, optimizer, schedule, loss, metrics and callback, by import paths in one recipe; then extended."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests._support import headway, packed_digits

PARTS = """
import torch
from torch import nn

def build(num_classes, width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, num_classes))

class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.add_(average.sign(), alpha=-group["lr"])

def fall(epochs, low):
    return lambda epoch: 1 - (1 - low) * epoch / epochs

def focal(outputs, labels, gamma=1.0):
    losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
    return (1 - (-losses).exp()) ** gamma * losses

def confidence(outputs, labels):
    return outputs.softmax(1).amax(1)

class Best:
    def __init__(self):
        self.best = 0.0
    def on_evaluate(self, run):
        self.best = max(self.best, run.metrics["accuracy"])
        run.log(best_so_far=self.best)
    def state_dict(self):
        return {"best": self.best}
    def load_state_dict(self, state):
        self.best = state["best"]
"""

RECIPE = """
data: {train: digits.packed/train, eval: digits.packed/eval}
model: {factory: "parts.py:build", args: {width: 32}}
optimizer: {factory: "parts.py:Signs", lr: 0.003, args: {beta: 0.8}}
schedule: {factory: "parts.py:fall", args: {low: 0.1}}
task: {loss: "parts.py:focal", loss_args: {gamma: 0.5}, metrics: [top3, "parts.py:confidence", f1]}
callbacks: ["parts.py:Best"]
batch: 30
epochs: 4
precision: fp32
log_every_steps: 2
"""


def test_own_parts_extended_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packed_digits(tmp_path)
    Path("parts.py").write_text(PARTS)
    Path("mine.yaml").write_text(RECIPE)
    summary = headway("train", "mine.yaml", "--run", "runs/mine", "--json").json()
    assert summary["accuracy"] > 0.6
    assert summary["accuracy"] < summary["top3"] <= 1
    assert 0 < summary["f1"] <= 1
    assert 0 < summary["confidence"] <= 1
    logged = [line for line in Path("runs/mine/metrics.jsonl").read_text().splitlines() if "best_so_far" in line]
    assert len(logged) == 4

    # Extended: the callback counts on, and the run says how the schedule jumps.
    extended = headway("train", "--resume", "runs/mine", "epochs=6", "--json")
    assert extended.json()["epochs"] == 6
    assert "learning rate" in extended.err
    logged = [line for line in Path("runs/mine/metrics.jsonl").read_text().splitlines() if "best_so_far" in line]
    assert len(logged) == 6
    # A key that would make it another run is refused by name.
    assert "batch" in headway("train", "--resume", "runs/mine", "batch=10", status=2).err
