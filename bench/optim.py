"""One step of each optimizer on ResNet-50's 161 tensors, beside torch's fused ones.

Weights, gradients and state lie in memory as training leaves them: channels last, float32. All optimizers take turns in
one process, one step each, and every round starts with another one. Ratios are computed within a round. Two rounds
before the clock starts create the state. The optimizers share weights and gradients: 205 MB, too much for a cache to
hold between two turns.

lars_vs_fused_sgd      time of LARS over torch.optim.SGD(momentum, weight_decay, fused=True)
lamb_vs_fused_adamw    time of LAMB over torch.optim.AdamW(fused=True)

muon_vs_limit          time of Muon over the float32 matrix products of the five rounds that Jordan makes, alone
muon_fp32_vs_limit     the same of Muon(ns_precision="fp32")
muon_sharded_2, _4     time of the step of the rank with most products, of 2 and 4 that own the optimizer's state, over
                       that of Muon on one rank; the exchange is left out
muon_vs_fused_sgd      time of Muon over torch.optim.SGD(momentum, weight_decay, fused=True)
soap_vs_muon           mean time of a step of SOAP over Muon's, with new bases in every tenth step

SOAP's first step, an eigenvalue decomposition, is left out: there is one in a run. Of its other steps those with new
bases and those without are measured apart, and weighed 1 to 9.

Counted in passes over memory SGD makes 5 and LARS 7 (its norms read weights and gradients once more), AdamW 7 and LAMB
10. On a GPU the clock waits for the device before it starts and before it stops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench._common import Claim, arguments, median, report, take_turns
from bench._family import run_bench
from headway import optim
from headway.model import resnet50
from headway.optim import native
from headway.optim.footprint import count_multiply_adds
from headway.parallel.owners import choose_owners, find_largest_shares

PEERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch SGD, fused": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, weight_decay=5e-5, fused=True),
    "torch SGD, foreach": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, weight_decay=5e-5, foreach=True),
    "torch AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-4, weight_decay=0.01, fused=True),
    "torch AdamW, foreach": lambda p: torch.optim.AdamW(p, 1e-4, weight_decay=0.01, foreach=True),
}
OURS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LARS": lambda p: optim.LARS(p, 1e-3, weight_decay=5e-5),
    "LARS, outside, clip": lambda p: optim.LARS(p, 1e-3, weight_decay=5e-5, lr_in_momentum=False, clip=True),
    "LARS, fused=False": lambda p: optim.LARS(p, 1e-3, weight_decay=5e-5, fused=False),
    "LAMB": lambda p: optim.LAMB(p, 1e-4, weight_decay=0.01),
    "LAMB, fused=False": lambda p: optim.LAMB(p, 1e-4, weight_decay=0.01, fused=False),
    "NovoGrad": lambda p: optim.NovoGrad(p, 1e-4, weight_decay=0.01),
    "Signum": lambda p: optim.Signum(p, 1e-5),
    "FTML": lambda p: optim.FTML(p, 1e-4),
    "RMSpropSGD": lambda p: optim.RMSpropSGD(p, 1e-3, rmsprop=0.01, steps_per_epoch=100),
    "LBSGD": lambda p: optim.LBSGD(p, 1e-3, steps_per_epoch=100, warmup="lars"),
}
SLOW: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Muon": lambda p: optim.Muon(p, 1e-3),
    "Muon, fp32": lambda p: optim.Muon(p, 1e-3, ns_precision="fp32"),
}
"""Products of matrices, not passes over memory: in a quarter of the rounds, at least two, and in a quick run with the
largest filters left out. SOAP is timed by the same rule, and SGD once more beside them."""
SLOW_PEER = "torch SGD, fused, in these rounds"
OWNERS = {ranks: f"Muon, busiest of {ranks} ranks" for ranks in (2, 4)}
SOAP_OLD, SOAP_NEW, SOAP = "SOAP, same bases", "SOAP, new bases", "SOAP, mean of 10 steps"
NEW_BASES_EVERY = 10
LIMIT = "products of 5 rounds, fp32"
JORDAN_ROUNDS = 5
QUICK_NUMEL = 1 << 17


def parameters(device: torch.device) -> list[torch.nn.Parameter]:
    """Those of ResNet-50, with gradients."""
    torch.manual_seed(0)
    model = resnet50(num_classes=1000).to(device, memory_format=torch.channels_last)
    out = list(model.parameters())
    assert len(out) == 161
    for parameter in out:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    return out


def multiply_only(params: list[torch.nn.Parameter]) -> Callable[[], None]:
    """Returns a call that makes the float32 products of Jordan's five rounds for all filters, and nothing else.

    Each round of X [n, m], n <= m, has three: X X^T, its square, and the product of their sum with X. Filters of one
    shape are one batch, and results lie in memory that is there already.
    """
    counts: dict[tuple[int, int], int] = {}
    for filters in (param for param in params if param.ndim > 2):
        rows, columns = sorted((len(filters), filters[0].numel()))
        counts[rows, columns] = counts.get((rows, columns), 0) + 1
    batches = []
    for (rows, columns), count in counts.items():
        x = torch.randn(count, rows, columns, device=params[0].device) / (rows * columns) ** 0.5
        batches.append((x, x.new_empty(count, rows, rows), x.new_empty(count, rows, rows), torch.empty_like(x)))

    def multiply() -> None:
        for x, gram, square, result in batches:
            for _ in range(JORDAN_ROUNDS):
                torch.bmm(x, x.mT, out=gram)
                torch.bmm(gram, gram, out=square)
                torch.bmm(square, x, out=result)

    return multiply


def count_operations(params: list[torch.nn.Parameter]) -> float:
    """Returns the floating-point operations of these products."""
    sizes = [sorted((len(one), one[0].numel())) for one in params if one.ndim > 2]
    return sum(JORDAN_ROUNDS * (4 * rows**2 * columns + 2 * rows**3) for rows, columns in sizes)


def build_owner_arms(params: list[torch.nn.Parameter]) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Returns the step of the rank with most products, by arm, and the shares that were counted, in words."""
    named = {f"{number:03}": one for number, one in enumerate(params)}
    counts = count_multiply_adds(optim.Muon(params, 1e-3), named.items())
    arms: dict[str, Callable[[], object]] = {}
    said = {}
    for ranks, arm in OWNERS.items():
        owners = choose_owners(named, ranks, counts)
        busiest = max(range(ranks), key=lambda rank: sum(counts.get(name, 0) for name in named if owners[name] == rank))
        arms[arm] = SLOW["Muon"]([one for name, one in named.items() if owners[name] == busiest]).step
        weights, products = find_largest_shares(named, ranks, counts)
        said[arm] = f"counted: {products:.3f} of the products, and {weights:.3f} of the weights at most"
    return arms, said


def build_soap_arms(params: list[torch.nn.Parameter]) -> dict[str, Callable[[], object]]:
    """Returns steps of one SOAP that keep its bases, and steps that change them."""
    optimizer = optim.SOAP(params, 1e-4)

    def step(precondition_every: int) -> None:
        for group in optimizer.param_groups:
            group["precondition_every"] = precondition_every
        optimizer.step()

    # The first step has the eigenvalue decompositions.
    step(sys.maxsize)
    return {SOAP_OLD: partial(step, sys.maxsize), SOAP_NEW: partial(step, 1)}


def main() -> None:
    options = arguments(__doc__ or "")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if device.type == "cpu" and not native.is_available():
        print("The native core is not here: LARS and the others are measured in torch's operations.")
    shared = parameters(device)
    arms = {name: make(shared).step for name, make in (PEERS | OURS).items()}
    rounds, warm = (2, 1) if options.quick else (41, 2)
    taken = take_turns(arms, rounds, wait, warm=warm)
    arms.clear()
    multiplied = [one for one in shared if not options.quick or one.numel() < QUICK_NUMEL]
    slow: dict[str, Callable[[], object]] = {name: make(multiplied).step for name, make in SLOW.items()}
    slow[SLOW_PEER] = PEERS["torch SGD, fused"](multiplied).step
    slow[LIMIT] = multiply_only(multiplied)
    owner_arms, counted = build_owner_arms(multiplied)
    slow |= owner_arms | build_soap_arms(multiplied)
    slow_rounds = max(2, rounds // 4)
    with torch.no_grad():
        taken |= take_turns(slow, slow_rounds, wait, warm=1)
    taken[SOAP] = [
        ((NEW_BASES_EVERY - 1) * old + new) / NEW_BASES_EVERY
        for old, new in zip(taken[SOAP_OLD], taken[SOAP_NEW], strict=True)
    ]
    rate = count_operations(multiplied) / median(taken[LIMIT])[0]
    print(f"{LIMIT}: {count_operations(multiplied):.3g} operations, {rate / 1e9:.0f} GFLOP/s")

    def ratio(one: str, other: str) -> tuple[float, float, float]:
        return median([a / b for a, b in zip(taken[one], taken[other], strict=True)])

    rows = [("optimizer", "ms a step (95 %)", "over fused SGD", "over fused AdamW")]
    for name, times in taken.items():
        middle, low, high = (1e3 * value for value in median(times))
        over = ["", ""]
        if name not in slow and name != SOAP:
            over = [f"{ratio(name, peer)[0]:.2f}" for peer in ("torch SGD, fused", "torch AdamW, fused")]
        rows.append((name, f"{middle:.2f} [{low:.2f}, {high:.2f}]", *over))
    claims = []
    for claim, one, other in (
        ("lars_vs_fused_sgd", "LARS", "torch SGD, fused"),
        ("lamb_vs_fused_adamw", "LAMB", "torch AdamW, fused"),
        ("muon_vs_limit", "Muon", LIMIT),
        ("muon_fp32_vs_limit", "Muon, fp32", LIMIT),
        *((f"muon_sharded_{ranks}", arm, "Muon") for ranks, arm in OWNERS.items()),
        ("muon_vs_fused_sgd", "Muon", SLOW_PEER),
        ("soap_vs_muon", SOAP, "Muon"),
    ):
        middle, low, high = ratio(one, other)
        where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
        how = "; ".join(
            [f"median of {len(taken[one])} rounds [{low:.3f}, {high:.3f}]", where, *filter(None, [counted.get(one)])]
        )
        claims.append(Claim(claim, middle, "", how))
    report(claims, options, rows)


if __name__ == "__main__":
    run_bench(main)
