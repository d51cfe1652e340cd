"""What bench.network stands on: ranks that take turns, and a bench that says where it cannot run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from bench import network
from bench._hosts import Hosts
from bench._network.layout import Layout
from bench._network.probe import expected, noise, shapes
from bench._network.ranks import RankError, Ranks


def test_ranks_are_numbered_host_by_host_or_in_turn() -> None:
    block, turns = Layout(2, 3), Layout(2, 3, "round_robin")
    assert [block.host(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [turns.host(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    for layout in (block, turns):
        places = {(layout.host(rank), layout.local_rank(rank)) for rank in range(layout.size)}
        assert places == {(host, local) for host in range(2) for local in range(3)}


def test_the_probe_has_the_parameters_of_a_resnet_18() -> None:
    from headway.model.resnet import resnet18

    assert sorted(shapes(64)) == sorted(tuple(p.shape) for p in resnet18().parameters())
    total = sum(parts[0].double() + parts[1].double() for parts in zip(noise(2, 0)[-1:], noise(2, 1)[-1:], strict=True))
    assert (expected(2, 2)[-1] == total).all()


@pytest.mark.root
@pytest.mark.check
def test_a_rank_that_ends_says_why() -> None:
    with Hosts(1) as hosts, pytest.raises(RankError, match=r"No module named 'tests\.multihost\.nowhere'"):
        Ranks(hosts, Layout(1, 1), {"arms": "tests.multihost.nowhere"}).__enter__()


def test_without_root_the_bench_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["bench.network", "--json", str(tmp_path / "found.json")])
    network.main()
    assert "network namespaces need root" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["claims"] == []
