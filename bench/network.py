"""Gradients over a slow network: the Reducer against plain DDP, on hosts of 200 Mbit/s (network namespaces: root).

Every way to reduce is an arm in each of the ranks' processes, which live to the end. In every round each arm makes one
step. A step starts at the same instant on all ranks, and its time is that of the last one. DDP has torch's defaults:
Gloo, buckets of 25 MiB, ranks in numerical order.

First the gradients of a ResNet-18 of half width (12.2 MB) without its computation, for each layout of ranks on hosts:

2x2_block_fp32, ...      median over the rounds of time(auto) / time(DDP)
auto_worst_regret        median time of auto / that of the best fixed algorithm, the worst row
bytes_worst_error        bytes sent by a host against the formula, the worst arm. Counted at its port, less the headers
                         of Ethernet, IPv4 and TCP (66 bytes a frame). The formula has each bucket in its wire format;
                         the last bucket is always fp32

Then ResNet-18 (11.2 million parameters) trained on images of 32 x 32, 256 per rank, on 2 x 2 hosts:

train_2x2_fp32, _fp16    median over the rounds of images/s(auto) / images/s(DDP); the table has the exposed
                         communication: the time of a step less that of the same step without reduction
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from bench._common import Claim, arguments, median, report, table
from bench._family import run_bench
from bench._hosts import Hosts, why_not
from bench._network.layout import Layout
from bench._network.ranks import Ranks, Turn
from headway.core.collectives import Link, Network, count_bytes_out_of_host

ALGORITHMS = ("ring", "tree", "leader", "two_dimensional")
RATIO = {"fp32": 1.0, "fp16": 0.5}
LAYOUTS = (Layout(2, 2), Layout(2, 2, "round_robin"), Layout(2, 4))
CLAIMED = ("2x2_block_fp32", "2x2_block_fp16", "2x2_roundrobin_fp32", "2x2_roundrobin_fp16", "2x4_block_fp32")


@final
@dataclass(frozen=True)
class Pace:
    """How often the arms take turns.

    Attributes:
        warm: rounds that are left out.
    """

    rounds: int
    warm: int


# DDP rebuilds its buckets after its first step.
PACE, QUICK_PACE = Pace(15, warm=2), Pace(2, warm=0)
# Factories of headway.model that are trained.
NETWORK, QUICK_NETWORK = "resnet18", "small_net"


@final
@dataclass
class Measured:
    """What the arms did, round by round."""

    layout: Layout
    facts: dict[str, Any]
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def seconds(self, arm: str) -> list[float]:
        return [turn.seconds for turn in self.turns[arm]]

    def over(self, arm: str, other: str) -> tuple[float, float, float]:
        """(median, low, high) of the time of an arm over another's in the same round."""
        return median([a / b for a, b in zip(self.seconds(arm), self.seconds(other), strict=True)])

    def payload(self, arm: str) -> float:
        """Bytes out of a host for a step: of the host that sends most, the median over the rounds."""
        return median([max(turn.payload) for turn in self.turns[arm]])[0]


def measure(hosts: Hosts, layout: Layout, asked: dict[str, Any], pace: Pace, steps: int = 1) -> Measured:
    """Lets the arms take turns; each round begins with another one."""
    with Ranks(hosts, layout, asked) as ranks:
        found = Measured(layout, ranks.facts[0])
        arms: list[str] = found.facts["arms"]
        for number in range(-pace.warm, pace.rounds):
            first = number % len(arms)
            for arm in arms[first:] + arms[:first]:
                turn = ranks.turn(arm, steps)
                if number >= 0:
                    found.turns.setdefault(arm, []).append(turn)
    return found


def formula(found: Measured, arm: str) -> float:
    """Bytes out of a host for a step of an arm of the probe."""
    layout, link = found.layout, Link(1e-4, 25e6)
    network = Network(layout.hosts, layout.per_host, link, link, 1e10)
    if arm == "ddp":
        return count_bytes_out_of_host("ring", found.facts["bytes"], network, order=layout.order)
    sums = found.facts["sums"][arm]
    return sum(
        count_bytes_out_of_host(algorithm, size, network, wire_ratio=RATIO[wire]) for algorithm, size, wire in sums
    )


def probe_rows(found: Measured) -> list[tuple[str, ...]]:
    heading = ("layout", "arm", "ms a step (95 %)", "over DDP (95 %)", "MB out of a host", "formula", "off by", "error")
    rows = [heading]
    for arm, turns in found.turns.items():
        middle, low, high = median(found.seconds(arm))
        ratio = found.over(arm, "ddp")
        sent, wanted = found.payload(arm), formula(found, arm)
        rows.append(
            (
                found.layout.name,
                arm,
                f"{middle * 1e3:.0f} [{low * 1e3:.0f}, {high * 1e3:.0f}]",
                f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]",
                f"{sent / 1e6:.3f}",
                f"{wanted / 1e6:.3f}",
                f"{sent / wanted - 1:+.2%}",
                f"{max(max(answer) for turn in turns for answer in turn.answers):.1e}",
            )
        )
    return rows


def probes(hosts: Hosts, layouts: Sequence[Layout], width: int, pace: Pace) -> list[Claim]:
    claims, regrets, errors = [], [], []
    for layout in layouts:
        found = measure(hosts, layout, {"arms": "bench._network.probe", "width": width}, pace)
        for line in found.facts["said"]:
            print(line)
        table(probe_rows(found))
        errors += [abs(found.payload(arm) / formula(found, arm) - 1) for arm in found.turns]
        for wire in RATIO:
            middle, low, high = found.over(f"auto {wire}", "ddp")
            best = min(median(found.seconds(f"{algorithm} {wire}"))[0] for algorithm in ALGORITHMS)
            regrets.append(median(found.seconds(f"auto {wire}"))[0] / best)
            name = f"{layout.name}_{wire}"
            if name in CLAIMED:
                how = f"time over DDP's, median of {pace.rounds} interleaved rounds [{low:.3f}, {high:.3f}]"
                claims.append(Claim(name, middle, "", how))
    how = f"of {len(regrets)} rows"
    claims.append(Claim("auto_worst_regret", max(regrets), "", f"auto over the best fixed algorithm, worst {how}"))
    how = f"of {len(errors)} arms; without headers"
    claims.append(Claim("bytes_worst_error", max(errors), "", f"bytes out of a host against the formula, worst {how}"))
    return claims


def training(hosts: Hosts, network: str, batch: int, pace: Pace, steps: int) -> list[Claim]:
    layout = LAYOUTS[0]
    asked = {"arms": "bench._network.training", "network": network, "batch": batch}
    found = measure(hosts, layout, asked, pace, steps)
    rows = [(f"{network}, 2x2_block", "images/s (95 %)", "over DDP (95 %)", "exposed ms (95 %)", "MB out of a host")]
    claims = []
    for arm in found.turns:
        speed = median([layout.size * batch / seconds for seconds in found.seconds(arm)])
        faster = median([b / a for a, b in zip(found.seconds(arm), found.seconds("ddp"), strict=True)])
        pairs = zip(found.seconds(arm), found.seconds("alone"), strict=True)
        exposed = median([(a - b) * 1e3 for a, b in pairs])
        rows.append(
            (
                arm,
                f"{speed[0]:.0f} [{speed[1]:.0f}, {speed[2]:.0f}]",
                f"{faster[0]:.3f} [{faster[1]:.3f}, {faster[2]:.3f}]",
                f"{exposed[0]:.0f} [{exposed[1]:.0f}, {exposed[2]:.0f}]",
                f"{found.payload(arm) / 1e6:.1f}",
            )
        )
        if arm.startswith("auto"):
            interval = f"[{faster[1]:.3f}, {faster[2]:.3f}]"
            how = f"images/s over DDP's, median of {pace.rounds} rounds of {steps} steps {interval}"
            claims.append(Claim(f"train_2x2_{arm.rpartition(' ')[2]}", faster[0], "", how))
    for line in found.facts["said"]:
        print(line)
    table(rows)
    share = median(found.seconds("alone"))[0] / median(found.seconds("ddp"))[0]
    print(
        f"Computation is {share:.0%} of DDP's step: {layout.size} ranks, {batch} images each, on this machine's cores."
    )
    for arm in ("auto fp32", "auto fp16"):
        ours, theirs = losses(found, arm), losses(found, "ddp")
        worst = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
        print(f"{arm}: the loss ends at {ours[-1]:.4f}, DDP's at {theirs[-1]:.4f}; at most {worst:.1e} apart.")
    print()
    return claims


def losses(found: Measured, arm: str) -> list[float]:
    """Of each step, the mean over the ranks."""
    return [sum(step) / len(step) for turn in found.turns[arm] for step in zip(*turn.answers, strict=True)]


def main() -> None:
    options = arguments(__doc__ or "")
    if reason := why_not():
        print(f"There can be no hosts here: {reason}.")
        report([], options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are removed then too
    sys.stdout.reconfigure(line_buffering=True)  # it takes minutes
    # 256 images a step, as this network is often trained. With 256 a rank computation was 91 % of DDP's step on two
    # slow cores, which no exchange can shorten: 1.14 was the most to be had, 1.08 and 1.06 (fp16) were measured.
    pace, width, network, batch = (QUICK_PACE, 4, QUICK_NETWORK, 8) if options.quick else (PACE, 32, NETWORK, 64)
    with Hosts(2) as hosts:
        print(f"Links of 200 Mbit/s, TCP's congestion control is {hosts.congestion}.\n")
        claims = probes(hosts, LAYOUTS[:1] if options.quick else LAYOUTS, width, pace)
        claims += training(hosts, network, batch, pace, 1 if options.quick else 2)
    report(claims, options)


if __name__ == "__main__":
    run_bench(main)
