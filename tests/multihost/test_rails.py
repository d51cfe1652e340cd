"""Hosts with two network interfaces: both carry their share of each sum, and what is wrong with one is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench._hosts import Hosts
from bench._network.layout import Layout
from bench._network.ranks import Ranks
from tests._support import packed_digits, write_recipe

pytestmark = [pytest.mark.root, pytest.mark.check]

NUMBERS = 500_000
ASKED: dict[str, Any] = {"arms": "tests.multihost._rails", "numbers": NUMBERS}
PAIR = Layout(2, 1)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.mark.parametrize("layout", [PAIR, Layout(3, 2, "round_robin")], ids=lambda layout: layout.name)
def test_sums_over_two_interfaces_have_the_bits_of_one_and_half_the_bytes_on_each(layout: Layout) -> None:
    with Hosts(layout.hosts, [200e6, 200e6]) as hosts, Ranks(hosts, layout, ASKED) as ranks:
        arms = ("ring", "tree", "leader", "two_dimensional")
        for arm in (f"{algorithm} {wire}" for algorithm in arms for wire in ("fp32", "fp16")):
            one = ranks.turn(f"one {arm}")
            before = [hosts.payload_out(1, rail) for rail in (0, 1)]
            two = ranks.turn(f"two {arm}")
            first, second = (hosts.payload_out(1, rail) - start for rail, start in zip((0, 1), before, strict=True))
            assert one.answers == two.answers
            assert first + second == pytest.approx(one.payload[1], rel=0.02)
            # The measured rates differ a little.
            assert 0.35 < first / (first + second) < 0.65


def test_messages_are_divided_by_the_measured_rates_and_a_lost_interface_is_named() -> None:
    with Hosts(2, [200e6, 50e6]) as hosts, Ranks(hosts, PAIR, ASKED) as ranks:
        facts = ranks.facts[0]
        assert "gloo over eth0 (" in facts["two"]["said"][0]
        assert " and eth1 (" in facts["two"]["said"][0]
        before = [hosts.payload_out(1, rail) for rail in (0, 1)]
        ranks.turn("two ring fp32")
        first, second = (hosts.payload_out(1, rail) - start for rail, start in zip((0, 1), before, strict=True))
        assert 0.7 < first / (first + second) < 0.9
        hosts.cut(1, 1)
        assert ranks.turn("failure").answers == [[1.0]] * 2


def test_a_run_names_its_interfaces_in_the_recipe(tmp_path: Path) -> None:
    packed_digits(tmp_path)
    weights, second = [], []
    with Hosts(2, [200e6, 200e6]) as hosts:
        for interface in ("eth0", ["eth0", "eth1"]):
            comm = {"interface": interface, "algorithm": "ring", "bucket_mb": 1}
            recipe = write_recipe(tmp_path / "recipe.yaml", model={"factory": "net.py:wide"}, comm=comm)
            run, before = tmp_path / f"run{len(weights)}", hosts.payload_out(1, 1)
            command = [sys.executable, "-m", "headway", "train", recipe, "--run", run]
            ranks = []
            for rank in (0, 1):
                place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "2940"}
                environ = {**place, "HEADWAY_SECRET": "of a test, and long", "OMP_NUM_THREADS": "1"}
                ranks.append(hosts.run(rank, command, environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            said = [process.communicate()[0].decode() for process in ranks]
            assert [process.returncode for process in ranks] == [0, 0], said
            weights.append((run / "weights.safetensors").read_bytes())
            second.append(hosts.payload_out(1, 1) - before)
    assert "gloo over eth0 (" in said[0]
    assert weights[0] == weights[1]
    # Half of each of 12 steps' gradients of 180 kB.
    assert second[0] < 1000
    assert second[1] > 12 * 180e3 * 0.35


def test_a_host_that_lacks_an_interface_is_named_on_all_hosts() -> None:
    with Hosts(2, [None, None]) as hosts:
        ip("-n", hosts.namespace(1), "link", "del", "eth1")
        with Ranks(hosts, PAIR, ASKED) as ranks:
            refused = {facts["refused"] for facts in ranks.facts}
    (message,) = refused
    assert "UsageError: there is no network interface eth1 with an address on the host of rank 1" in message
    assert "It has eth0, lo. Name interfaces that all hosts have." in message


def test_interfaces_of_one_subnet_are_refused() -> None:
    with Hosts(2, [None, None]) as hosts:
        for host in (0, 1):
            ip("-n", hosts.namespace(host), "addr", "flush", "dev", "eth1")
            ip("-n", hosts.namespace(host), "addr", "add", f"10.77.0.{11 + host}/24", "dev", "eth1")
        with Ranks(hosts, PAIR, ASKED) as ranks:
            refused = {facts["refused"] for facts in ranks.facts}
    (message,) = refused
    assert "10.77.0.12) leave by eth0, not by eth1. Give each interface a subnet of its own" in message


def test_an_interface_whose_cable_is_out_is_named_at_the_start() -> None:
    with Hosts(2, [None, None]) as hosts:
        hosts.cut(1, 1)
        with Ranks(hosts, PAIR, {**ASKED, "connect_s": 3}) as ranks:
            assert all("interface eth1: a collective failed" in facts["refused"] for facts in ranks.facts)
