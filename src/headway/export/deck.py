"""The decks' inference tables, and what an inference table of Headway says of their rows, each with a verdict.

- E03: latency at batch 1 and images/s at batch 128 of 14 networks without and with MKL-DNN, which is today's oneDNN, on
  72 virtual CPUs of a c5.18xlarge, MXNet 1.3.
- E04: top-1 and top-5 of 17 networks without and with MKL-DNN, on ImageNet; every difference is 0.00000000.
- E05: gains of TensorRT on an NVIDIA GPU.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headway.export.table_engines import EAGER, NO_ONEDNN
from headway.export.table_record import DeckVerdict, InferenceTable, Row

DECK = Path(__file__).with_name("deck.csv")
FACTORIES = "headway.model:"
"""Module of the networks that both the decks and Headway have. The other names in `deck.csv` and below are those of
networks that `bench.export` has for these tables alone."""
SIDE = 224
"""Side of the decks' images."""
HELD = 0.8
"""A gain is reproduced if it is at least this share of the deck's."""
OTHER_BASELINE = "without oneDNN, PyTorch still multiplies by MKL; the deck's MXNet had no MKL at all"

ACCURACY = (
    ("AlexNet", "alexnet"),
    ("DenseNet-121", "densenet121"),
    ("DenseNet-161", "densenet161"),
    ("DenseNet-169", "densenet169"),
    ("DenseNet-201", "densenet201"),
    ("Inception V3", "inception_v3"),
    ("MobileNet 0.25", "mobilenet_0.25"),
    ("MobileNet 0.5", "mobilenet_0.5"),
    ("MobileNet 0.75", "mobilenet_0.75"),
    ("MobileNet 1.0", "mobilenet_1.0"),
    ("MobileNetV2 1.0", "mobilenet_v2_1.0"),
    ("MobileNetV2 0.75", "mobilenet_v2_0.75"),
    ("MobileNetV2 0.5", "mobilenet_v2_0.5"),
    ("MobileNetV2 0.25", "mobilenet_v2_0.25"),
    ("ResNet-18 V1", "resnet18"),
    ("ResNet-34 V1", "resnet34"),
    ("ResNet-50 V1", "resnet50"),
)
"""The networks of E04."""

TENSORRT = (
    ("AlexNet", "alexnet", "Titan V", 1.4),
    ("cifar_resnet20_v2", "cifar_resnet", "Titan V", 1.21),
    ("cifar_resnext29_16x64d", "", "Titan V", 1.26),
    ("ResNet-18", "resnet18", "Titan V", 1.8),
    ("ResNet-18", "resnet18", "Jetson TX1", 1.54),
    ("ResNet-50", "resnet50", "Titan V", 1.76),
    ("ResNet-101", "resnet101", "Titan V", 1.99),
)
"""The networks of E05, the GPU and the gain."""


@dataclass(frozen=True)
class DeckRow:
    """A row of E03: what the deck measured without and with MKL-DNN.

    Attributes:
        network: as the deck calls it.
        name: of the network in `headway.model` or `bench.export`.
        latency_gain, speed_gain: as the deck prints them. Those of SSD and GNMT are not its images/s over each other.
        batch: of its images/s.
    """

    network: str
    name: str
    without_ms: float
    with_ms: float
    without_images_s: float
    with_images_s: float
    latency_gain: float
    speed_gain: float
    batch: float


def read_deck() -> list[DeckRow]:
    """Reads E03."""
    with open(DECK, encoding="utf-8", newline="") as file:
        rows = [(one.pop("table"), one.pop("network"), one.pop("name"), one) for one in csv.DictReader(file)]
    return [DeckRow(network, name, **{k: float(v) for k, v in more.items()}) for _, network, name, more in rows]


def judge_gain(deck: float, here: float, most: float | None = None) -> str:
    """Returns the verdict about a gain by oneDNN.

    A smaller gain than the deck's refutes nothing, as the two compare with different baselines; a loss does.

    Args:
        most: upper end of the interval of `here`, if there is one.
    """
    if here >= HELD * deck:
        return "reproduced"
    if most is not None and most < 1:
        return "refuted here: oneDNN costs time"
    return f"undecided here: {OTHER_BASELINE}"


def judge_accuracy(deltas: Sequence[float], samples: str) -> str:
    """Returns the verdict about changes of top-1 and top-5 by oneDNN, on samples that have a name."""
    return "refuted here" if any(deltas) else f"reproduced, on {samples}"


def compare_with_deck(factory: str, table: InferenceTable) -> tuple[DeckVerdict, ...]:
    """Returns a verdict about each row of the decks that is about the network of a table; none for other networks.

    Args:
        factory: `model.factory` of the run.
    """
    name = factory.removeprefix(FACTORIES)
    if name == factory:
        return ()
    found = [verdict for row in read_deck() if row.name == name for verdict in _compare_speed(row, table)]
    found += [_compare_accuracy(label, table) for label, network in ACCURACY if network == name]
    for label, network, device, gain in TENSORRT:
        if network == name:
            missing = "not measurable here: TensorRT needs an NVIDIA GPU"
            found.append(
                DeckVerdict(row=f"{label}, TensorRT on {device}", deck=f"{gain:g}x", here="-", verdict=missing)
            )
    return tuple(found)


def _find_rows(table: InferenceTable) -> tuple[Row, Row] | str:
    """Returns the rows without and with oneDNN, or why there are not both."""
    rows = {row.name: row for row in table.rows}
    if NO_ONEDNN not in rows or EAGER not in rows:
        return f"not measured: {table.missing.get(NO_ONEDNN, f'the table has no row {NO_ONEDNN}')}"
    return rows[NO_ONEDNN], rows[EAGER]


def _compare_speed(deck: DeckRow, table: InferenceTable) -> Iterator[DeckVerdict]:
    """Yields the verdicts about latency and throughput, with all cores."""
    gains = deck.latency_gain, deck.speed_gain
    shown = (
        ("ms at batch 1", f"{deck.without_ms:g} → {deck.with_ms:g} ({gains[0]:g}x)"),
        (f"images/s at batch {deck.batch:g}", f"{deck.without_images_s:g} → {deck.with_images_s:g} ({gains[1]:g}x)"),
    )
    rows = _find_rows(table)
    here = [None, None] if isinstance(rows, str) else [_measure_latency(*rows, table), _measure_speed(*rows, table)]
    for (title, text), gain, found in zip(shown, gains, here, strict=True):
        about = partial(DeckVerdict, row=f"{deck.network}, {title}", deck=text)
        if found is None:
            yield about(here="-", verdict=rows if isinstance(rows, str) else "not measured")
        else:
            yield about(here=f"{found[0]} ({found[1]:.2f}x)", verdict=_judge_gain(gain, found[1], table))


def _measure_latency(without: Row, own: Row, table: InferenceTable) -> tuple[str, float] | None:
    """Returns the latencies at batch 1 without and with oneDNN as text, and the gain."""
    before, after = (row.find_cell(table.threads[-1], 1) for row in (without, own))
    if before is None or after is None:
        return None
    return f"{before.p50_ms:.3g} → {after.p50_ms:.3g}", before.p50_ms / after.p50_ms


def _measure_speed(without: Row, own: Row, table: InferenceTable) -> tuple[str, float] | None:
    """Returns images/s without and with oneDNN at the largest batch that both have, as text, and the gain."""
    for batch in reversed(table.batches[1:]):
        before, after = (row.find_cell(table.threads[-1], batch) for row in (without, own))
        if before is not None and after is not None:
            gain = after.images_s / before.images_s
            return f"{before.images_s:,.0f} → {after.images_s:,.0f} at {batch}", gain
    return None


def _judge_gain(deck: float, here: float, table: InferenceTable) -> str:
    if table.image[:2] != (SIDE, SIDE):
        return f"not comparable: the deck's images have {SIDE} x {SIDE} pixels"
    return judge_gain(deck, here)


def _compare_accuracy(label: str, table: InferenceTable) -> DeckVerdict:
    """Returns the verdict about top-1 and top-5 without and with oneDNN."""
    rows = _find_rows(table)
    about = partial(DeckVerdict, row=f"{label}, change of top-1, top-5", deck="0.00000000, 0.00000000")
    if isinstance(rows, str):
        return about(here="-", verdict=rows)
    pairs = [(row.top1, row.top5) for row in rows]
    # No top-5 for five classes or fewer.
    deltas = [own - without for without, own in zip(*pairs, strict=True) if without is not None and own is not None]
    if not deltas:
        return about(here="-", verdict="not measured: there is no evaluation set with classes")
    here = ", ".join(f"{delta + 0.0:.8f}" for delta in deltas)
    return about(here=here, verdict=judge_accuracy(deltas, f"{table.samples:,} samples"))
