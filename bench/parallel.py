"""Training by several processes: images that they share, asynchronous training, local steps, the planner's menu.

spatial_right           operations of 16 whose outputs and gradients on two ranks are those of one process
dtensor_right           the same of PyTorch's DTensor
distconv_right          the same of LBANN's DistConv, where a copy of github.com/LBANN/DistConv is on PYTHONPATH
spatial_saved_bytes_2   bytes that the backward pass of ResNet-50 needs on the worst of 2 ranks, over one process's
spatial_saved_bytes_4   the same with 4 ranks; both are counted
spatial_overlap         time of a 3 x 3 convolution of images that two hosts share, over that of the exchange followed
                        by the convolution. Halos of 459 kB, links of 200 Mbit/s, and images of a height at which the
                        convolution takes as long as the exchange. Needs root.
async_slow_worker       batches per second of two workers, one of which takes five times as long, over those of
                        synchronous training; no limit of staleness
async_bounded_worker    the same with `ahead: 4`
async_kill_gap          longest time without an update in the second after one of three workers was killed
async_dc_4, async_dc_8  accuracy that DC-ASGD-a (strength 8) gains over ASGD, with 4 and 8 simulated workers
towers_bytes            bytes that a host with one tower of AlexNet sends in a step, over those of the formula: its
                        images, and for each sample 191,488 bytes of channels and their gradients. Needs root.
experts_cv              coefficient of variation of the experts' importance and load in `cifar_moe`, the larger one of
                        the least even layer, with the losses that keep them even
experts_cv_without      the smaller of both without these losses, over the same one with them
experts_gain            accuracy that experts gain over a network without, at equal multiply-adds
experts_bytes           bytes that a host sends in a step of a layer whose experts two hosts share, over those of the
                        formula. Needs root.
sharded_memory          bytes of weights, gradients and Adam's state on the worst of 4 ranks that own the state of
                        ResNet-50's weights, at the moment at which it has most, over 2 n + 2 n/4; all tensors that live
                        are counted. The table has AlexNet too, over 2 n + 2 n x the share of its largest tensor.
sharded_bytes           bytes that a host of two sends in a step of ResNet-50 so, over those of an all-reduce. Needs
                        root.
hybrid_exchange_alexnet seconds of a step of AlexNet in which two hosts only wait for the exchange, with its fully
                        connected layers divided over both, over those of data parallel training. They are a step less
                        the same step without the exchange, 16 images a host, fp32, 200 Mbit/s. Needs root.
hybrid_bytes            bytes that a host sends in such a step with divided layers, over those of the formula
local_bytes             bytes that a host sends in a step of local training, times the steps of a round (16), over
                        those of a data parallel step. Needs root.
local_exchange          seconds of exchange in a step, over those of a data parallel step; two hosts at 20 Mbit/s,
                        4.2 MB of weights, 16 steps a round. Needs root.
local_accuracy, post_local_accuracy, diloco_accuracy
                        accuracy on CIFAR-10 at 16 pixels of four simulated ranks that average every 32 steps, minus
                        that of data parallel training, which for DiLoCo steps with the outer momentum; the table has
                        rounds of 8 steps too
exchange_gain           time of an all-to-all of two hosts by Gloo's own collective, over that of ours; 8 MB each way,
                        200 Mbit/s. Needs root.
rails_2                 time of an all-reduce of 16 MB over one network interface, over that over two: two hosts with
                        two interfaces of 200 Mbit/s each. The table has 64 MB too, and a second interface of half the
                        rate. Every sum has the same bits over one interface as over two. Needs root.
plan_strategies_error   |planned - measured| / measured seconds of a step, of the strategies that `headway plan` names:
                        the median. Two hosts with a process of one thread each; planned from the step of one process
                        alone and the measured link. Only settings count that nothing was fitted to. Needs root.
plan_strategies_worst   the largest of them
sharded_all_memory      bytes of weights, gradients and Adam's state on the worst of 4 ranks that have rows of all of
                        ResNet-50, between the backward pass and the next step, over 4 n/4
sharded_all_bytes       bytes that a host of two sends in a step of it, over those of the formula: 1.5 n. Needs root.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

import torch

from bench._common import Claim, arguments, median, report, table
from bench._family import run_bench
from bench._hosts import Hosts, why_not
from bench._network.layout import Layout
from bench._network.ranks import Ranks
from bench._parallel.asynchronous import compare_delays, measure_speed
from bench._parallel.balance import compare_experts
from bench._parallel.exchange import PIECE_BYTES
from bench._parallel.experts import EXPERTS, TOKENS, WIDTH
from bench._parallel.full_shards import measure_full_shards_bytes, measure_full_shards_memory
from bench._parallel.hybrid import SAMPLES as HYBRID_SAMPLES
from bench._parallel.local_claims import compare_local_accuracy, measure_local_steps
from bench._parallel.menu import measure_menu
from bench._parallel.operations import HEIGHTS as HEIGHTS_TRIED
from bench._parallel.operations import compare_operations
from bench._parallel.overlap import HALO_BYTES, HEIGHTS
from bench._parallel.rails import INTERFACES, SIZES
from bench._parallel.saved import SIZE, measure_shares
from bench._parallel.sessions import Part, Session, measure_parts
from bench._parallel.sharded import measure_memory
from bench._parallel.towers import IMAGES_BYTES, VALUES_BYTES
from headway.core.collectives import Link, Network
from headway.core.layer_division import DenseLayer, choose_division, count_divided_bytes
from headway.parallel.experts import count_exchange_bytes

# A factory of headway.model, whose weights ranks divide. A quick run has a smaller one.
NETWORK, QUICK_NETWORK = "resnet50", "resnet18"
# Ranks that own the optimizer's state, and ranks that have rows of all.
OWNERS = FULL_SHARDS = 4
# Mbit/s of the two interfaces of each host.
RAIL_RATES = ((200, 200), (200, 100))


def compare_peers() -> list[Claim]:
    found = compare_operations()
    heights = " and ".join(map(str, HEIGHTS_TRIED))
    rows = ((name, *(", ".join(dict.fromkeys(found[way][name])) for way in found)) for name in found["ours"])
    table([(f"operation, maps of {heights} rows", *found), *rows])
    how = f"of {len(found['ours'])} operations, maps of {heights} rows, torch {torch.__version__}"
    return [
        Claim(claim, sum(set(verdicts) == {"right"} for verdicts in found[way].values()), "", how)
        for claim, way in (("spatial_right", "ours"), ("dtensor_right", "DTensor"), ("distconv_right", "DistConv"))
        if way in found
    ]


def measure_saved(options: argparse.Namespace) -> list[Claim]:
    claims = []
    for ranks in (2,) if options.quick else (2, 4):
        shares = measure_shares(ranks)
        how = f"ResNet-50 at {SIZE} pixels; ranks: {', '.join(f'{share:.3f}' for share in shares)}"
        claims.append(Claim(f"spatial_saved_bytes_{ranks}", max(shares), "", how))
    return claims


def measure_sharded_memory(options: argparse.Namespace) -> Claim:
    """Counts the live bytes of ranks that own the optimizer's state."""
    names, owners = ((QUICK_NETWORK,), 2) if options.quick else ((NETWORK, "alexnet"), OWNERS)
    found = {name: measure_memory(name, owners) for name in names}
    rows: list[tuple[str, ...]] = [("network", "n in MB", "largest share", "most, MB", "state, MB", "over the formula")]
    for name, ranks in found.items():
        for one in ranks:
            numbers = (f"{one.weights / 1e6:.1f}", f"{one.largest_share:.3f}", f"{one.most / 1e6:.1f}")
            rows.append((name, *numbers, f"{one.state / 1e6:.1f}", f"{one.ratio:.3f}"))
    table(rows)
    worst = max(found[names[0]], key=lambda one: one.most)
    formula = 2 * worst.weights * (1 + 1 / owners)
    how = f"{worst.most:,} bytes of {formula:,.0f}: n = {worst.weights:,}, {owners} ranks, fp32, Adam"
    if "alexnet" in found:
        how += f"; AlexNet {max(one.ratio for one in found['alexnet']):.3f}"
    return Claim("sharded_memory", worst.most / formula, "", how)


def measure_sharded_bytes(ranks: Session, network: str) -> Claim:
    """Counts the bytes of a step whose ranks own the optimizer's state, beside an all-reduce of the gradients."""
    # The first turn opens connections.
    turns = {name: [ranks.turn(name) for _ in range(2)][1] for name in ("data", "sharded")}
    parameters = ranks.facts[0]["parameters"]
    for turn in turns.values():
        assert turn.answers[0] == turn.answers[1], "the ranks have different weights after a step"
    sent = {name: max(turn.payload) for name, turn in turns.items()}
    rows = [(name, f"{nbytes / 1e6:.2f}") for name, nbytes in sent.items()]
    table([("sent in a step by a rank of two", "MB"), ("all-reduce: formula", f"{parameters * 4 / 1e6:.2f}"), *rows])
    how = f"{network}, 2 ranks, fp32: {sent['sharded']:,.0f} bytes; with an all-reduce {sent['data']:,.0f}"
    return Claim("sharded_bytes", sent["sharded"] / (parameters * 4), "", how)


def measure_overlap(ranks: Session, rounds: int, heights: Sequence[int], tries: int) -> Claim:
    """Finds the height at which convolution and exchange take equally long, and lets both ways take turns there.

    Args:
        heights: rows of a rank.
        tries: turns of each height.
    """

    def time_arm(name: str, rows: int, turns: int) -> list[float]:
        return [ranks.turn(f"{name} {rows}", 5).seconds for _ in range(turns)]

    probes = {
        rows: (median(time_arm("exchange", rows, tries))[0], median(time_arm("compute", rows, tries))[0])
        for rows in heights
    }
    rows = min(probes, key=lambda one: abs(probes[one][1] / probes[one][0] - 1))
    taken: dict[str, list[float]] = {name: [] for name in ("exchange", "compute", "in turn", "beside")}
    names = list(taken)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken[name] += time_arm(name, rows, 1)
    ratios = [one / other for one, other in zip(taken["beside"], taken["in turn"], strict=True)]
    middle, low, high = median(ratios)
    table([("", "ms"), *((name, f"{median(times)[0] * 1e3:.1f}") for name, times in taken.items())])
    exchange, compute = median(taken["exchange"])[0], median(taken["compute"])[0]
    how = (
        f"[{low:.3f}, {high:.3f}], {rounds} rounds; {rows} rows a rank, halos of {HALO_BYTES:,} bytes, the convolution"
        f" takes {compute / exchange:.2f} of the exchange"
    )
    return Claim("spatial_overlap", middle, "", how)


def measure_exchange(ranks: Session, rounds: int, nbytes: int) -> Claim:
    """Lets an exchange of ours and one of Gloo's take turns."""
    taken: dict[str, list[float]] = {"ours": [], "gloo": []}
    # The first round opens connections.
    for number in range(-1, rounds):
        for name in list(taken) if number % 2 else [*reversed(taken)]:
            turn = ranks.turn(name, 3)
            assert all(answer == 1 for answers in turn.answers for answer in answers), "other pieces have come"
            taken[name] += [turn.seconds] * (number >= 0)
    gain, low, high = median([gloo / ours for gloo, ours in zip(taken["gloo"], taken["ours"], strict=True)])
    times = ", ".join(f"{name} {median(of_name)[0] * 1e3:.0f} ms" for name, of_name in taken.items())
    how = f"[{low:.2f}, {high:.2f}], {rounds} rounds of 3; {times} for {nbytes / 1e6:.0f} MB each way"
    return Claim("exchange_gain", gain, "", how)


def measure_towers(ranks: Session, samples: int) -> Claim:
    """Counts the bytes of a step of two towers, beside the gradients of a data parallel step."""
    # The first turn opens connections.
    turn = [ranks.turn("towers") for _ in range(2)][1]
    parameters = ranks.facts[0]["parameters"]
    assert turn.answers[0] == turn.answers[1], "the ranks of a place compute different losses"
    sent, wanted = max(turn.payload), samples * (VALUES_BYTES + IMAGES_BYTES)
    table(
        [
            ("sent in a step by a rank of two", "MB"),
            ("images, labels, positions: formula", f"{samples * IMAGES_BYTES / 1e6:.3f}"),
            ("channels and their gradients: formula", f"{samples * VALUES_BYTES / 1e6:.3f}"),
            ("together: formula", f"{wanted / 1e6:.3f}"),
            ("together: counted on the wire", f"{sent / 1e6:.3f}"),
            ("gradients of data parallel training: formula", f"{parameters * 4 / 1e6:.1f}"),
        ]
    )
    how = f"{samples} images of 227 pixels, fp32, {sent:,.0f} bytes of {wanted:,.0f}"
    return Claim("towers_bytes", sent / wanted, "", how)


def measure_experts(ranks: Session) -> Claim:
    """Counts the bytes of a step of a layer whose experts two hosts share."""
    # The first turn opens connections.
    turn = [ranks.turn("experts") for _ in range(2)][1]
    counts = torch.tensor(turn.answers).view(2, EXPERTS).to(torch.int64)
    wanted = count_exchange_bytes(counts, WIDTH, 4)
    ratios = [sent / bytes_ for sent, bytes_ in zip(turn.payload, wanted, strict=True)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    how = f"{turn.payload[0]:,.0f} bytes of {wanted[0]:,}; {TOKENS:,} tokens a host, two experts each"
    return Claim("experts_bytes", worst, "", how)


def measure_hybrid(ranks: Session, rounds: int, samples: int) -> list[Claim]:
    """Lets data parallel steps of AlexNet, steps with divided layers, and both without their exchange take turns."""
    names = ["data", "data alone", "hybrid", "hybrid alone"]
    taken: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, float] = {}
    facts = ranks.facts[0]
    for number in range(-1, rounds):
        first = number % len(names)
        turns = {name: ranks.turn(name) for name in names[first:] + names[:first]}
        losses = [turns[name].answers for name in ("data", "hybrid")]
        assert all(abs(one - other) < 1e-4 * one for (one,), (other,) in zip(*losses, strict=True))
        # The first round opens connections, and orders the buckets.
        if number >= 0:
            taken = {name: [*taken[name], turn.seconds] for name, turn in turns.items()}
            sent = {name: max(turn.payload) for name, turn in turns.items()}
    exposed = {
        name: [with_it - alone for with_it, alone in zip(taken[name], taken[f"{name} alone"], strict=True)]
        for name in ("data", "hybrid")
    }
    middle, low, high = median([one / other for one, other in zip(exposed["hybrid"], exposed["data"], strict=True)])

    links, layers = facts["network"], [DenseLayer(**one) for one in facts["layers"]]
    network = Network(**{**links, **{name: Link(**links[name]) for name in ("inside", "between")}})
    total, batch = facts["gradient_bytes"], 2 * samples
    # Two of the three matrix products of a layer are the backward pass.
    backward_s = median(taken["data alone"])[0] * 2 / 3
    chosen = choose_division(layers, total, batch, network, backward_s)
    values = sum(count_divided_bytes(one, batch, network.ranks, scheme="all") for one in layers)
    # Two ranks send an array once.
    formula = {"data": total, "hybrid": total - sum(one.gradient_bytes for one in layers) + values}
    predicted = {"data": chosen.data_s, "hybrid": chosen.divided_s}

    def show(times: list[float]) -> str:
        mid, least, most = median(times)
        return f"{mid:.2f} [{least:.2f}, {most:.2f}]"

    table(
        [
            ("", "step, s", "without exchange, s", "exposed, s", "predicted, s", "MB sent", "MB by formula"),
            *(
                (name, *map(show, (taken[name], taken[f"{name} alone"], exposed[name])), f"{predicted[name]:.2f}",
                 f"{sent[name] / 1e6:.2f}", f"{formula[name] / 1e6:.2f}")
                for name in ("data", "hybrid")
            ),
        ]
    )  # fmt: skip
    print(f"layers: auto would divide {', '.join(chosen.layers) or 'none'}.\n")
    how = f"[{low:.3f}, {high:.3f}], {rounds} rounds; a step less the same step without its exchange"
    bytes_how = f"{sent['hybrid']:,.0f} of {formula['hybrid']:,.0f}"
    return [
        Claim("hybrid_exchange_alexnet", middle, "", how),
        Claim("hybrid_bytes", sent["hybrid"] / formula["hybrid"], "", bytes_how),
    ]


def measure_rails(rounds: int, sizes: Sequence[int], rates: Sequence[tuple[int, int]]) -> Claim:
    """Lets one interface and two take turns, for equal interfaces and for unequal ones."""
    rows: list[tuple[str, ...]] = [("Mbit/s", "MB", "ms over one (95 %)", "ms over two (95 %)", "times as fast (95 %)")]
    claims = []
    for rates_mbit_s in rates:
        with Hosts(2, [rate * 1e6 for rate in rates_mbit_s]) as hosts:
            asked = {"arms": "bench._parallel.rails", "sizes": sizes}
            with Ranks(hosts, Layout(2, 1), asked) as ranks:
                print("\n".join(ranks.facts[0]["said"]))
                for size in sizes:
                    taken = [_time_rails(ranks, size, number) for number in range(-1, rounds)][1:]
                    one, two = (median([turn[name] for turn in taken]) for name in INTERFACES)
                    faster = median([turn["one"] / turn["two"] for turn in taken])
                    times = (f"{mid * 1e3:.0f} [{low * 1e3:.0f}, {high * 1e3:.0f}]" for mid, low, high in (one, two))
                    ratio = f"{faster[0]:.2f} [{faster[1]:.2f}, {faster[2]:.2f}]"
                    rows.append((" and ".join(map(str, rates_mbit_s)), f"{size / 1e6:.0f}", *times, ratio))
                    how = f"[{faster[1]:.2f}, {faster[2]:.2f}], {rounds} rounds, {size / 1e6:.0f} MB"
                    claims.append(Claim("rails_2", faster[0], "", how))
    table(rows)
    return claims[0]


def _time_rails(ranks: Ranks, size: int, number: int) -> dict[str, float]:
    """Times a sum over one interface and over two, in an order that changes with the number of the round."""
    names = list(INTERFACES) if number % 2 else [*reversed(INTERFACES)]
    turns = {name: ranks.turn(f"{name} {size}") for name in names}
    bits = {tuple(answer) for turn in turns.values() for answer in turn.answers}
    assert len(bits) == 1, "two interfaces give other bits than one"
    return {name: turn.seconds for name, turn in turns.items()}


def list_parts(network: str, *, quick: bool) -> list[Part]:
    """Returns what two hosts measure, fewer and smaller things in a quick run."""
    rounds, hybrid_rounds, tries = (1, 1, 1) if quick else (15, 7, 5)
    heights, nbytes = (HEIGHTS[:2], PIECE_BYTES // 8) if quick else (HEIGHTS, PIECE_BYTES)
    towers, samples, width = (2, 2, 128) if quick else (16, HYBRID_SAMPLES, 4096)
    return [
        ("overlap", {"heights": heights}, lambda ranks: [measure_overlap(ranks, rounds, heights, tries)]),
        ("exchange", {"nbytes": nbytes}, lambda ranks: [measure_exchange(ranks, rounds, nbytes)]),
        ("towers", {"samples": towers, "fc_width": width}, lambda ranks: [measure_towers(ranks, towers)]),
        ("experts", {}, lambda ranks: [measure_experts(ranks)]),
        ("sharded", {"network": network}, lambda ranks: [measure_sharded_bytes(ranks, network)]),
        (
            "hybrid",
            {"samples": samples, "fc_width": width},
            lambda ranks: measure_hybrid(ranks, hybrid_rounds, samples),
        ),
        ("full_shards", {"network": network}, lambda ranks: [measure_full_shards_bytes(ranks, network)]),
    ]


def main() -> None:
    options = arguments(__doc__ or "")
    network = QUICK_NETWORK if options.quick else NETWORK
    claims = compare_peers() + measure_saved(options) + [measure_sharded_memory(options)]
    claims += measure_speed(options) + compare_delays(options)
    claims += compare_local_accuracy(options)
    claims += compare_experts(options)
    if reason := why_not():
        print(f"There can be no hosts here: {reason}.")
    else:
        # So that the hosts are removed then too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with Hosts(2) as hosts:
            claims += measure_parts(hosts, list_parts(network, quick=options.quick), together=options.quick)
        claims += measure_local_steps(1 if options.quick else 5)
        claims.append(measure_rails(*((1, (2_000_000,), RAIL_RATES[:1]) if options.quick else (15, SIZES, RAIL_RATES))))
        claims += measure_menu(options)
    claims.append(measure_full_shards_memory(network, 2 if options.quick else FULL_SHARDS))
    report(claims, options)


if __name__ == "__main__":
    run_bench(main)
