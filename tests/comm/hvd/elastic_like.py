"""An elastic script as one writes it for Horovod. One worker kills or stops itself in the middle, the first time.

Arguments: a folder for logs, which worker, the name of the signal, and how many batches there are.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import headway.comm.hvd as hvd

folder, victim, number, batches = Path(sys.argv[1]), sys.argv[2], signal.Signals[sys.argv[3]], int(sys.argv[4])
me = os.environ["HEADWAY_MEMBER"]
hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
x = torch.randn(60, 4, dtype=torch.float64)
y = x.sum(1, keepdim=True)
model = nn.Linear(4, 1, dtype=torch.float64)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
)


def log(*words):
    with (folder / f"{me}.log").open("a") as file:
        print(*words, hvd.rank(), hvd.size(), file=file)


@hvd.elastic.run
def train(state):
    log("begin", state.batch)
    while state.batch < batches or (folder / "wait").exists():
        if me == victim and state.batch == 8:
            os.kill(os.getpid(), number)
        share = 60 // hvd.size()
        mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
        optimizer.zero_grad()
        ((model(x[mine]) - y[mine]) ** 2).mean().backward()
        optimizer.step()
        state.batch += 1
        if state.batch % 5 == 0:
            state.commit()
        else:
            state.check_host_updates()
        if hvd.size() == 3 and me != victim and state.batch > 12:
            (folder / "wait").unlink(missing_ok=True)


state = hvd.elastic.TorchState(model, optimizer, batch=0)
state.register_reset_callbacks([lambda: log("reset")])
train(state)
torch.save(model.state_dict(), folder / f"{me}.pt")
log("end", state.batch)
