"""Trains a small network on Fashion-MNIST in one process: the start of the lab.

    python fashion_serial.py [FOLDER]

FOLDER holds the four IDX files, as they are or compressed. Without it, the images are scikit-learn's digits.
"""

import sys
from pathlib import Path

import torch
from lab import build_network, count_right, evaluate, open_sets, prepare

import headway

EPOCHS = 8

torch.manual_seed(0)
train, held_out = open_sets(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
model = build_network(train, layers=[(16, 1), (32, 2)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

loader = headway.Loader(train, batch=64, seed=1)
held_out_loader = headway.Loader(held_out, batch=256)
for epoch in range(1, EPOCHS + 1):
    trained = torch.zeros(2, dtype=torch.int64)
    for images, labels in loader:
        outputs = model(prepare(images))
        loss = torch.nn.functional.cross_entropy(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trained += count_right(outputs, labels)
    counts = torch.stack([trained, evaluate(model, held_out_loader)])
    train_accuracy, val_accuracy = (counts[:, 0] / counts[:, 1]).tolist()
    print(f"epoch {epoch} train_acc {train_accuracy:.4f} val_acc {val_accuracy:.4f}", flush=True)
