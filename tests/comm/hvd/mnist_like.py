"""A script as one writes it for Horovod: small digits, a sampler by rank, metrics averaged over ranks.

Only its import would differ: `import horovod.torch as hvd`.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import headway.comm.hvd as hvd


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(32 * 4, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc(self.drop(x.flatten(1))), dim=1)


def averaged(value, name):
    return hvd.allreduce(torch.tensor(float(value)), name=name).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)

    # What scikit-learn's load_digits reads, without its import of two seconds in each process.
    rows = np.loadtxt(Path(find_spec("sklearn").origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    images = torch.tensor(rows[:, :-1], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(rows[:, -1]).long()
    train_set, test_set = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=100, sampler=test_sampler)

    model = Net()
    factor = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * factor, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(args.epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        right = total = 0.0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                total += F.nll_loss(output, target, reduction="sum").item()
                right += (output.argmax(1) == target).sum().item()
        loss = averaged(total / len(test_sampler), "avg_loss")
        accuracy = averaged(right / len(test_sampler), "avg_accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}")

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    same = all(torch.equal(weights, row) for row in hvd.allgather(weights[None]))
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {'the same' if same else 'other'} weights")


if __name__ == "__main__":
    main()
