"""A benchmark as one writes it for Horovod: a fixed batch of noise, a wrapped optimizer before the broadcasts.

Only its import would differ: `import horovod.torch as hvd`.
"""

import argparse
import timeit

import numpy as np
import torch
import torch.nn.functional as F

import headway.comm.hvd as hvd
from headway.model import resnet

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--model", default="resnet18")
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--num-warmup-batches", type=int, default=1)
parser.add_argument("--num-batches-per-iter", type=int, default=1)
parser.add_argument("--num-iters", type=int, default=2)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
model = getattr(resnet, args.model)()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

data = torch.randn(args.batch_size, 3, 64, 64)
target = torch.randint(1000, (args.batch_size,))


def step():
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()


def log(text):
    if hvd.rank() == 0:
        print(text)


log(f"{args.model}, {args.batch_size} images a batch, {hvd.size()} processes")
timeit.timeit(step, number=args.num_warmup_batches)
rates = []
for number in range(args.num_iters):
    seconds = timeit.timeit(step, number=args.num_batches_per_iter)
    rates.append(args.batch_size * args.num_batches_per_iter / seconds)
    log(f"iteration {number}: {rates[-1]:.1f} images/s a process")
log(f"total: {hvd.size() * np.mean(rates):.1f} +- {hvd.size() * 1.96 * np.std(rates):.1f} images/s")
