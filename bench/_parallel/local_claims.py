"""The claims about local steps."""

from __future__ import annotations

import argparse

from bench._common import Claim, median, table
from bench._hosts import Hosts
from bench._network.layout import Layout
from bench._network.ranks import Ranks
from bench._parallel.delay import find_cifar
from bench._parallel.local import EVERY_STEPS
from bench._parallel.local_accuracy import EPOCHS, PER_CLASS, RANKS, compare_accuracy

# Mbit/s between the two hosts.
RATE = 20


def measure_local_steps(rounds: int) -> list[Claim]:
    """Counts the bytes, and times the exchange, of data parallel steps and of rounds of local steps."""
    shares, exchanges = [], []
    with Hosts(2, RATE * 1e6) as hosts, Ranks(hosts, Layout(2, 1), {"arms": "bench._parallel.local"}) as ranks:
        nbytes = ranks.facts[0]["bytes"]
        # The first turn opens connections.
        for number in range(-1, rounds):
            data, local = ranks.turn("data"), ranks.turn("local")
            alone = ranks.turn("alone", EVERY_STEPS)
            assert all(turn.answers[0] == turn.answers[1] for turn in (data, local)), "the ranks have other weights"
            if number < 0:
                continue
            shares.append(max(local.payload) / max(data.payload))
            exchange_s = local.seconds / EVERY_STEPS - alone.seconds
            exchanges.append((exchange_s, data.seconds - alone.seconds, max(data.payload)))
    bytes_ratio, *_ = median(shares)
    time_ratio, low, high = median([local_s / data_s for local_s, data_s, _ in exchanges])
    data_s, local_s = (median([one[index] for one in exchanges])[0] for index in (1, 0))
    sent = median([one[2] for one in exchanges])[0]
    table(
        [
            ("a step", "MB sent by a host", "ms of exchange"),
            ("data parallel", f"{sent / 1e6:.3f}", f"{data_s * 1e3:.0f}"),
            (f"local, every {EVERY_STEPS}", f"{sent * bytes_ratio / EVERY_STEPS / 1e6:.3f}", f"{local_s * 1e3:.0f}"),
        ]
    )
    how = f"2 hosts, {nbytes / 1e6:.1f} MB of weights, every_steps {EVERY_STEPS}"
    return [
        Claim("local_bytes", bytes_ratio, "", f"times {EVERY_STEPS}; counted on the wire, {how}"),
        Claim("local_exchange", time_ratio, "", f"[{low:.4f}, {high:.4f}], {rounds} rounds, {RATE} Mbit/s, {how}"),
    ]


def compare_local_accuracy(options: argparse.Namespace) -> list[Claim]:
    """Prints the accuracy of each way; returns what rounds of 32 steps gain over data parallel training."""
    if (source := find_cifar()) is None:
        return []
    seeds, per_class, epochs = (1, 40, 2) if options.quick else (3, PER_CLASS, EPOCHS)
    found = compare_accuracy(source, seeds, per_class, epochs)
    print(f"{RANKS} ranks: accuracy in %, {seeds} seeds, 95 % intervals, {epochs} epochs")
    table([("", "accuracy"), *((name, f"{mean:.1f} +- {half:.1f}") for name, (mean, half) in found.items())])
    return [
        Claim(
            claim,
            found[name][0] - found[beside][0],
            "points",
            f"{name}: {found[name][0]:.1f}; {beside}: {found[beside][0]:.1f}",
        )
        for claim, name, beside in (
            ("local_accuracy", "local, every 32", "data parallel"),
            ("post_local_accuracy", "post-local, every 32", "data parallel"),
            ("diloco_accuracy", "DiLoCo, every 32", "data parallel, momentum"),
        )
    ]
