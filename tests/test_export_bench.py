"""bench.export: the list of networks, the deck's table, and verdicts and claims from given times."""

from __future__ import annotations

import argparse
import inspect
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench._accuracy.results import Results
from bench._export import deck_table, exactness, speed
from bench._export.deck_results import RESULTS, DeckResults, format_accuracy, format_markdown, format_speed
from bench._export.engines import EAGER, INT8, LAST, RUNTIME, VINO, Arms, open_torch, run_all
from bench._export.networks import NETWORKS, build_known, find_network, split_digits
from bench._export.speed import CIFAR, LARGE, SMALL, build_claims
from tests.conftest import ROOT

from headway import model
from headway.export.deck import TENSORRT, read_deck


def test_every_network_of_the_library_is_in_the_list() -> None:
    public = {name for name in dir(model) if name.islower()}
    makes = {
        name
        for name in public
        if inspect.isfunction(made := getattr(model, name))
        and next(iter(inspect.signature(made).parameters)) == "num_classes"
    }
    assert {one.build.__name__ for one in NETWORKS} == makes


def test_a_network_knows_digits_and_is_the_same_each_time() -> None:
    first, second = build_known("small_net"), build_known("small_net")
    _, pixels, labels = split_digits(find_network("small_net"))
    with torch.no_grad():
        outputs = [one(torch.from_numpy(pixels)) for one in (first, second)]
    assert torch.equal(*outputs)
    assert float((outputs[0].argmax(1).numpy() == labels).mean()) > 0.8
    assert torch.allclose(outputs[0].sum(1), torch.ones(len(pixels)))


def test_arms_begin_in_turn_and_batches_do_not_change_answers() -> None:
    _, pixels, _ = split_digits(find_network("small_net"))
    sessions = {name: open_torch(build_known("small_net", 64)) for name in "ab"}
    with Arms(sessions) as arms:
        found = arms.take_turns(pixels[:2], 3, 0.0)
    assert {name: len(times) for name, times in found.items()} == {"a": 3, "b": 3}
    with closing(open_torch(build_known("small_net", 64))) as other:
        np.testing.assert_allclose(run_all(other, pixels[:10], 3), run_all(other, pixels[:10], 10), atol=1e-6)


def test_the_deck_has_fourteen_networks_and_its_gains() -> None:
    rows = read_deck()
    assert len(rows) == 14
    gains = {row.network: (row.latency_gain, row.speed_gain) for row in rows}
    assert gains["ResNet-50 v1"] == (7.45, 15.9)
    # The gains of these are not the columns over each other.
    apart = {"SSD-VGG16", "SSD-MobileNet", "GNMT"}
    for row in rows:
        assert row.latency_gain == pytest.approx(row.without_ms / row.with_ms, rel=0.02)
        is_same = row.speed_gain == pytest.approx(row.with_images_s / row.without_images_s, rel=0.02)
        assert is_same == (row.network not in apart)
    known = {one.build.__name__ for one in NETWORKS}
    assert {name for _, name, *_ in TENSORRT if name} <= known


def write_results(folder: Path, without: float, large: float, **accuracy: Any) -> DeckResults:
    """Kept lines of two networks: CPU seconds without oneDNN at batch 1 and 16; those with it are 1 an image."""
    results = Results(folder / "results.jsonl")
    key = {"network": "resnet50", "machine": "AMD EPYC, 2 cores, AVX2, 1 threads, torch 2.13.0"}
    for batch, slow in ((16, large), (1, without)):
        arms = {"with": 1.0, "without": slow, "with, channels last": 0.5}
        # A round in which everything takes twice as long changes no ratio.
        seconds = {name: [batch * one, 2 * batch * one, batch * one] for name, one in arms.items()}
        results.add({**key, "table": "speed", "batch": batch, "seconds": seconds})
    results.add({**key, "table": "accuracy", "top1": [0.5, 0.5], "top5": [0.75, 0.75], "flips": 0, **accuracy})
    results.add({**key, "table": "speed", "machine": "another", "batch": 32, "seconds": {}})
    return DeckResults(results)


@pytest.mark.parametrize(
    ("without", "large", "verdict"),
    [
        (6.0, 12.9, "reproduced |"),
        (7.0, 2.0, "batch 1: reproduced; larger: undecided here |"),
        (1.3, 13.0, "batch 1: undecided here; larger: reproduced |"),
        (1.3, 1.4, "undecided here |"),
    ],
)
def test_a_gain_is_reproduced_if_most_of_it_is_here(tmp_path: Path, without: float, large: float, verdict: str) -> None:
    results = write_results(tmp_path, without, large)
    (line,) = [one for one in format_speed(results).splitlines() if one.startswith("| ResNet-50 v1 |")]
    cells = (
        f"7.45 | {without:.2f} [{without:.2f}, {without:.2f}] | 15.90 | {large:.2f} [{large:.2f}, {large:.2f}] at 16"
    )
    assert line.startswith(f"| ResNet-50 v1 | {cells} | {2 * without:.2f}, {2 * large:.2f} | {verdict}")
    (small, batch) = results.find_speed("resnet50")
    assert (small.compute_ms("without"), batch.compute_ms("with")) == (1e3 * without, 1e3)
    assert small.thread == "one thread of an AMD EPYC with AVX2"


def test_a_changed_accuracy_is_a_refutation(tmp_path: Path) -> None:
    table = format_accuracy(write_results(tmp_path, 1.0, 1.0, top1=[0.5, 0.25], flips=149))
    assert (
        "| ResNet-50 V1 | 0.50000000, 0.25000000 | -0.25000000 | 0.75000000, 0.75000000 | 0.00000000 | 149 | ref"
        in table
    )
    assert "| AlexNet | - | - | - | - | - | not measured yet |" in table


def test_the_page_has_the_kept_tables() -> None:
    """If it fails: `python -m bench.export --only deck` measures what is missing, and prints the tables of the page."""
    page, results = (ROOT / "docs/inference-table.md").read_text(encoding="utf-8"), DeckResults(Results(RESULTS))
    assert format_speed(results) in page
    assert format_accuracy(results) in page


def test_markdown_has_a_heading() -> None:
    assert format_markdown([("a", "b"), ("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |\n"


def test_claims_are_ratios_within_rounds_and_the_least_of_the_networks() -> None:
    def make(eager: float, runtime: float, int8: float) -> dict[str, list[float]]:
        # A round in which everything takes twice as long changes no ratio.
        times = {EAGER: eager, LAST: eager / 1.2, RUNTIME: runtime, VINO: runtime, INT8: int8}
        return {name: [one, 2 * one, one] for name, one in times.items()}

    found = {
        (CIFAR, 1): make(3.0, 1.0, 0.5),
        (CIFAR, 32): make(3.0, 1.5, 1.0),
        (SMALL, 32): make(6.0, 4.0, 1.0),
        (LARGE, 1): make(1.8, 1.0, 0.5),
    }
    claims = {claim.name: claim.value for claim in build_claims(found, 3)}
    assert claims == pytest.approx(
        {
            "ort_vs_eager_resnet18_bs1": 1.8,
            "ort_vs_eager_cifar_resnet_bs1": 3.0,
            "ort_vs_eager_bs32": 1.5,
            "int8_vs_eager_bs32": 3.0,
        }
    )
    assert "int8 units" in next(claim.how for claim in build_claims(found, 3) if claim.name.startswith("int8"))
    assert build_claims({(SMALL, 1): make(1, 1, 1)}, 3) == []


@pytest.mark.check
@pytest.mark.parametrize("name", ["small_net", "gru", "cifar_moe", "cifar_net", "cifar_resnet"])
def test_engines_change_no_answer(name: str, tmp_path: Path) -> None:
    outcomes = exactness.compare_network(find_network(name), tmp_path, images=128)
    assert [one.engine for one in outcomes] == ["ONNX Runtime", "OpenVINO f32"]
    assert all(one.is_exact and one.difference < 1e-3 and one.top1 > 0.3 for one in outcomes)


def test_a_changed_answer_is_seen() -> None:
    exact = exactness.Outcome("net", "engine", 0.9, 1.0, 0.0, 0.0, 0, 1e-7)
    assert exact.is_exact
    assert not exactness.Outcome("net", "engine", 0.9, 1.0, 0.0, 0.0, 1, 1e-7).is_exact
    assert not exactness.Outcome("net", "engine", 0.9, 1.0, -1e-8, 0.0, 0, 1e-7).is_exact


@pytest.mark.check
def test_the_parts_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = argparse.Namespace(quick=True)
    names = {claim.name for claim in speed.compare_speed(tmp_path / "speed", quick)}
    assert names == {"ort_vs_eager_cifar_resnet_bs1"}
    names = {claim.name for claim in deck_table.compare_deck(tmp_path / "deck", quick)}
    assert {"onednn_gain_mobilenet_bs1", "onednn_gain_dcgan_bs2", "onednn_accuracy_delta"} <= names
    shown = capsys.readouterr().out
    assert "| GNMT | 7.27 | - | 6.83 at 64 | - | - | not measured yet |" in shown
    assert "| MobileNet 0.25 |" in shown
