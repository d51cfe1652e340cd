"""Trains a small network on Fashion-MNIST in several processes: a solution of the lab.

    torchrun --nproc-per-node 2 fashion_parallel.py [FOLDER]

The numbers mark the five changes to fashion_serial.py.
"""

import sys
from pathlib import Path

import torch
from lab import build_network, count_right, evaluate, open_sets, prepare

import headway
import headway.comm.hvd as hvd

EPOCHS = 8

hvd.init()  # 1: each process learns its rank, and how many there are
torch.manual_seed(0)
train, held_out = open_sets(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
model = build_network(train, layers=[(16, 1), (32, 2)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # 2: all begin with the weights of rank 0
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # 3: averages gradients

mine = {"rank": hvd.rank(), "world": hvd.size()}  # 4: a share of every batch
loader = headway.Loader(train, batch=64, seed=1, **mine)
held_out_loader = headway.Loader(held_out, batch=256, **mine)
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
    counts = hvd.allreduce(counts, op=hvd.Sum)  # 5: sums the counts of all, and one process prints
    train_accuracy, val_accuracy = (counts[:, 0] / counts[:, 1]).tolist()
    if hvd.rank() == 0:
        print(f"epoch {epoch} train_acc {train_accuracy:.4f} val_acc {val_accuracy:.4f}", flush=True)
hvd.shutdown()
