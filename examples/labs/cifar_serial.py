"""Trains a network on CIFAR-10 in one process: the start of the exercise.

    python cifar_serial.py FOLDER [SAMPLES]

FOLDER holds a pack of CIFAR-10, or CIFAR-10 in any form that Headway reads. SAMPLES: images that the run trains on.
"""

import sys
from pathlib import Path

import torch
from lab import build_network, count_right, evaluate, open_sets, prepare

import headway

if len(sys.argv) < 2:
    raise SystemExit(__doc__)
SAMPLES = int(sys.argv[2]) if len(sys.argv) > 2 else 30_000
ROUNDS = 4  # evaluations
BATCH, PEAK_RATE, WARMUP = 64, 0.05, 0.2


def find_rate(done: float) -> float:
    """Returns the learning rate: a straight line up to its peak in the warm-up, then one down to 0."""
    return PEAK_RATE * min(done / WARMUP, (1 - done) / (1 - WARMUP))


torch.manual_seed(0)
train, held_out = open_sets(Path(sys.argv[1]))
model = build_network(train, layers=[(16, 2), (32, 2), (64, 2)])
optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)

loader = headway.Loader(train, batch=BATCH, seed=1, stop=SAMPLES // ROUNDS, flip=True)
held_out_loader = headway.Loader(held_out, batch=500)
seen = 0  # images of all steps so far
for number in range(1, ROUNDS + 1):
    trained = torch.zeros(2, dtype=torch.int64)
    for images, labels in loader:
        optimizer.param_groups[0]["lr"] = find_rate(seen / SAMPLES)
        outputs = model(prepare(images))
        loss = torch.nn.functional.cross_entropy(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += BATCH
        trained += count_right(outputs, labels)
    counts = torch.stack([trained, evaluate(model, held_out_loader)])
    train_accuracy, val_accuracy = (counts[:, 0] / counts[:, 1]).tolist()
    print(f"round {number} train_acc {train_accuracy:.4f} val_acc {val_accuracy:.4f}", flush=True)
