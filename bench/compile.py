"""Eager against compiled, by network and batch: time, operators, and memory.

The arms are the values of the recipe's `compile`, called as the Trainer calls them: eager, torch.compile, and on a GPU
torch.compile that replays CUDA graphs. A step is forward, loss, backward and fused SGD; `forward` is the network alone,
without gradients, as in evaluation. Input lies on the device, channels last, fp32. Each network and batch is compiled
separately; the compile time is printed and not part of the times. Arms take turns, one call each, and each round starts
with another arm. Ratios are computed within a round.

NETWORK_bBATCH_step      time of the eager step over the compiled one; above 1, compiling is faster
NETWORK_bBATCH_forward   the same for the forward pass alone

Operators are counted by torch's profiler within one call: on a CPU those that compute and call no other, and the fused
loops of the compiler; on a GPU kernels. Peak memory is the largest amount that one call allocates on top of what was
allocated before; on a CPU from the profiler's record of each allocation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, final

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else a pool of processes stays, and takes the cores

import torch
import torch._inductor.config
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from bench._common import Claim, arguments, median, report, take_turns
from bench._family import run_bench
from headway.model import cifar_net, small_net
from headway.setup.compilation import compile_model

IDLE = frozenset(
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "detach", "detach_", "empty", "empty_like", "empty_strided", "expand", "flatten",
        "lift_fresh", "permute", "result_type", "reshape", "resize_", "select", "set_", "slice", "squeeze", "t",
        "transpose", "unsqueeze", "view", "_reshape_alias", "_unsafe_view", "resolve_conj", "resolve_neg", "item",
        "_local_scalar_dense", "is_nonzero",
    )
)  # fmt: skip
"""Operators that compute nothing: new views, and memory that is not filled."""


@final
@dataclass(frozen=True)
class Case:
    """A network, the images it is given, and the batches."""

    name: str
    make: Callable[[], torch.nn.Module]
    channels: int
    side: int


CASES = (
    Case("small_net", lambda: small_net(10, 1), 1, 8),
    Case("cifar_net", lambda: cifar_net(10), 3, 32),
)
BATCHES = (1, 8, 64, 256)


@final
@dataclass(frozen=True)
class Cost:
    """What one call needs."""

    operators: int
    peak_bytes: int


def calls(case: Case, batch: int, how: Any, device: torch.device, mode: str) -> Callable[[], object]:
    """A step, or a forward pass, of the network called one way; its weights and images are the same in each."""
    torch.manual_seed(0)
    model = case.make().to(device, memory_format=torch.channels_last)
    shape = (batch, case.channels, case.side, case.side)
    images = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    labels = torch.arange(batch, device=device) % 10
    forward = compile_model(model, how)
    if mode == "forward":
        model.eval()

        def inference() -> torch.Tensor:
            with torch.no_grad():
                return forward(images)

        return inference
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-4, momentum=0.9, fused=True)

    def step() -> None:
        F.cross_entropy(forward(images).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def cost(call: Callable[[], object], device: torch.device) -> Cost:
    """Operators and peak memory of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
        kernels = [one for one in found.events() if one.device_type == DeviceType.CUDA]
        return Cost(len([one for one in kernels if not one.name.startswith("Mem")]), peak)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    # Leaves among operators that compute: what an operator calls is counted in its place.
    events = [one for one in found.events() if _computes(one.name)]
    leaves = [one for one in events if not any(_computes(child.name) for child in one.cpu_children)]
    return Cost(len(leaves), _peak(found))


def _computes(name: str) -> bool:
    return (name.startswith("aten::") and name not in IDLE) or "cpp_fused" in name


def _peak(found: profile) -> int:
    now = most = 0
    records = [one for one in found.profiler.kineto_results.events() if one.name() == "[memory]"]
    for record in sorted(records, key=lambda one: one.start_ns()):
        now += record.nbytes()
        most = max(most, now)
    return most


def main() -> None:
    options = arguments(__doc__ or "")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    ways: dict[str, Any] = {"eager": False, "compiled": True}
    if device.type == "cuda":
        ways["graphs"] = "graphs"
    cases, batches = (CASES[:1], BATCHES[1:2]) if options.quick else (CASES, BATCHES)
    rounds, modes = (2, ("step",)) if options.quick else (41, ("step", "forward"))
    rows = [("network", "batch", "call", "arm", "ms a call (95 %)", "eager over it", "operators", "peak MB")]
    claims = []
    torch._inductor.config.cpp.enable_kernel_profile = True  # so that the profiler sees fused loops; 20 ns a loop
    for case in cases:
        for batch in batches:
            for mode in modes:
                torch._dynamo.reset()
                arms, costs = {}, {}
                for name, how in ways.items():
                    arms[name] = calls(case, batch, how, device, mode)
                    started = perf_counter()
                    for _ in range(4):  # the first compiles; CUDA graphs are recorded in the second and third
                        arms[name]()
                    print(f"{case.name}, batch {batch}, {mode}, {name}: first calls {perf_counter() - started:.1f} s")
                    costs[name] = cost(arms[name], device)
                taken = take_turns(arms, rounds, wait)
                for name, times in taken.items():
                    middle, low, high = (1e3 * value for value in median(times))
                    ratio = median([a / b for a, b in zip(taken["eager"], times, strict=True)])
                    found = costs[name]
                    shown = (case.name, str(batch), mode, name, f"{middle:.2f} [{low:.2f}, {high:.2f}]")
                    rows.append((*shown, f"{ratio[0]:.2f}", str(found.operators), f"{found.peak_bytes / 1e6:.1f}"))
                    if name == "eager":
                        continue
                    more = "" if name == "compiled" else f"_{name}"
                    where = (
                        torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
                    )
                    how_found = f"median of {rounds} rounds [{ratio[1]:.3f}, {ratio[2]:.3f}]; {where}"
                    claims.append(Claim(f"{case.name}_b{batch}_{mode}{more}", ratio[0], "", how_found))
    report(claims, options, rows)


if __name__ == "__main__":
    run_bench(main)
