"""The trend figures of the deck on multi-GPU training beside the catalog's devices: docs/decks.md says what they give.

The table is computed here; a change of the catalog makes this test print the rows that the page has to have.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from headway import model
from headway.model.model_size import measure_model_size
from headway.plan.catalogs import read_catalog
from headway.plan.cluster import Device, load_clusters
from headway.plan.growth import CPU_FLOPS, PF_S_DAY

PAGE = Path(__file__).parents[2] / "docs/decks.md"
# Peta-operations per second in November 2009 and when the deck was written; AlphaGo Zero's compute over AlexNet's.
PF_S_2009, PF_S_TODAY, GROWTH = 2.0, 5.0, 300_000
# Krizhevsky et al. 2012, section 5: "roughly 90 cycles through the training set of 1.2 million images".
EPOCHS, IMAGES = 90, 1.2e6
# A training step costs three forward passes of two operations for each multiply-add.
OPERATIONS = 3 * 2
YEAR_S = 365.25 * 86_400
SHOWN = ("k80", "p40", "p100", "v100", "a100", "h100", "b200")
NODES = ("dgx-1", "dgx-a100", "dgx-h100")


def list_devices() -> dict[str, Device]:
    return {name: Device.model_validate(entry) for name, entry in read_catalog("devices").items()}


def get_peak(device: Device) -> float:
    """The fastest peak at which a network trains, in 10^12 operations per second."""
    return device.tflops.mixed or device.tflops.fp32


def count_alexnet() -> float:
    """Operations of AlexNet's training."""
    with torch.device("meta"):
        size = measure_model_size(model.alexnet(), torch.empty(1, 3, 227, 227))
    return OPERATIONS * size.multiply_adds * EPOCHS * IMAGES


def describe_devices(pf_s: float) -> str:
    devices = list_devices()
    counts = (f"{math.ceil(1e3 * pf_s / get_peak(devices[name])):,} {devices[name].title}" for name in SHOWN)
    return ", ".join(counts)


def describe_nodes(pf_s_days: float) -> str:
    clusters = load_clusters()
    texts = []
    for name in NODES:
        cluster = clusters[name]
        days = pf_s_days * 1e3 / (cluster.devices * get_peak(cluster.device_spec))
        texts.append(f"{days:,.0f} days on one {cluster.title.partition(',')[0]}")
    return ", ".join(texts)


def build_table() -> list[str]:
    alexnet = count_alexnet() / PF_S_DAY
    largest = GROWTH * alexnet
    cpu_years = 1000 * PF_S_DAY / CPU_FLOPS / YEAR_S
    dense = {name: one.devices * get_peak(one.device_spec) / 1e3 for name, one in load_clusters().items()}
    fp32 = list_devices()["h100"].tflops.fp32
    rows = [
        (
            f"{PF_S_2009:g} PF/s in November 2009",
            describe_devices(PF_S_2009),
            f"{math.ceil(1e3 * PF_S_2009 / get_peak(list_devices()['h100']))} H100 give it in 16 bits; in fp32 it takes"
            f" {math.ceil(1e3 * PF_S_2009 / fp32)}, and the deck names no precision",
        ),
        (
            f"{PF_S_TODAY:g} PF/s today",
            ", ".join(f"one {load_clusters()[name].title.partition(',')[0]} {dense[name]:.3g} PF/s" for name in NODES),
            f"{PF_S_TODAY / dense['dgx-a100']:.3g} times a DGX A100 with dense matrices; one DGX H100 gives"
            f" {dense['dgx-h100'] / PF_S_TODAY:.3g} times as much",
        ),
        (
            f"{GROWTH:,}x from AlexNet to AlphaGo Zero",
            f"our AlexNet, {EPOCHS} epochs of {IMAGES:,.0f} images: {alexnet:.2g} PF/s-days; {GROWTH:,} times that:"
            f" {largest:,.0f}, {describe_nodes(largest)}",
            f"fits the next row: {largest / 1000:.2g} times its 1,000 PF/s-days. AlphaGo Zero itself was not run",
        ),
        (
            "1,000 PF/s-days = O(100 years) on a dual-CPU server",
            f"{cpu_years:,.0f} years at {CPU_FLOPS / 1e12:.2g} TFLOP/s; {describe_nodes(1000)}",
            "holds" if 100 <= cpu_years < 1000 else f"does not hold: {cpu_years:,.0f} years",
        ),
    ]
    return ["| " + " | ".join(row) + " |" for row in rows]


def test_the_page_has_what_the_catalog_gives() -> None:
    table = build_table()
    missing = [row for row in table if row not in PAGE.read_text().splitlines()]
    assert not missing, "docs/decks.md lacks these rows:\n" + "\n".join(missing)


def test_ours_is_worked_out_by_hand() -> None:
    # 0.724 billion multiply-adds x 2 x 3 x 90 x 1.2 million = 4.7e17 operations, of 8.64e19 in a PF/s-day.
    assert count_alexnet() == pytest.approx(0.7244e9 * 2 * 3 * 90 * 1.2e6, rel=1e-3)
    assert count_alexnet() / PF_S_DAY == pytest.approx(0.00543, rel=1e-2)
    # 2 PF/s are 16 V100 at 125 TFLOP/s, and 7 A100 at 312.
    assert "16 V100 SXM2, 7 A100" in describe_devices(2.0)
