"""bench.export, the part of the server: claims from measured turns."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import cast

import pytest
from bench._export.load_client import build_request, run
from bench._export.serving import CLIENTS, Contestant, judge_speed
from tests.export._served import encode, serving, write_export


def build(name: str, rates: dict[int, list[float]], latency: float = 0.001) -> Contestant:
    turns = {clients: [(rate, latency) for rate in found] for clients, found in rates.items()}
    process = cast("subprocess.Popen[str]", None)
    return Contestant(name, process, ("127.0.0.1", 1), Path("none"), "1", turns)


def test_claims_compare_turns_of_the_same_round(capsys: pytest.CaptureFixture[str]) -> None:
    # A machine that is twice as fast in every second round changes no ratio.
    def rates(rate: float) -> dict[int, list[float]]:
        return {clients: [rate, 2 * rate, rate, 2 * rate] for clients in CLIENTS}

    arms = [
        build("headway serve", rates(400), latency=0.0018),
        build("plain", rates(100)),
        build("LitServe, batch 1", {1: [200, 400] * 2, 8: [100, 200] * 2, 32: [100, 200] * 2}),
        build("LitServe, batch 32", {1: [100, 200] * 2, 8: [160, 320] * 2, 32: [120, 240] * 2}),
    ]
    claims = {claim.name: claim.value for claim in judge_speed(arms, 0.001)}
    assert claims["serve_vs_plain_1"] == claims["serve_vs_plain_32"] == 4
    # Against the cheaper of its settings at each load.
    assert claims["serve_cpu_vs_litserve_1"] == pytest.approx(0.5)
    assert claims["serve_cpu_vs_litserve_8"] == pytest.approx(0.4)
    assert claims["serve_cpu_vs_litserve_32"] == pytest.approx(0.3)
    assert claims["serve_cpu_vs_litserve"] == pytest.approx(0.5)
    assert claims["serve_p50_1"] == pytest.approx(1)
    assert "LitServe, batch 32" in capsys.readouterr().out


def test_without_peers_there_are_no_claims_about_them(capsys: pytest.CaptureFixture[str]) -> None:
    (claim,) = judge_speed([build("headway serve", {clients: [1.0] for clients in CLIENTS})], 0.001)
    assert claim.name == "serve_p50_1"


def test_the_client_counts_what_it_gets(tmp_path: Path) -> None:
    with serving(write_export(tmp_path / "export"), "--body-mb", "1") as served:
        good = build_request("/predict", "image/jpeg", encode())
        bad = build_request("/predict", "image/jpeg", b"no image")
        found = run(served.address, [good, bad, good], 4, float("inf"), 30)
        assert found["answers"] == {200: 20, 422: 10}
        assert found["lost"] == found["unsent"] == 0
        assert len(found["latencies"]) == 20
        assert served.stop()[0] == 0
        found = run(served.address, [good], 3, float("inf"), 30)
        assert found["unsent"] == 3
        assert found["answers"] == {}
