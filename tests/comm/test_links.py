"""Links: the fit, what follows from it, and real measurements between real ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _ranks import Rank, run_ranks
from bench._hosts import Hosts, why_not

from headway.comm.comm_recipe import CommRecipe
from headway.comm.hardware import capture_nccl_log, list_gpu_links, list_nics, summarise_nccl_log
from headway.comm.links import (
    RAIL_COUNTS,
    SIZE_DIVISORS,
    LinkFit,
    MeasuredLinks,
    broadcast_links,
    choose_rails,
    fit_link,
    measure_links,
)
from headway.core.collectives import Link
from headway.core.text_format import align_table
from headway.core.world import World
from headway.launch import generations

SIZES = tuple((1 << 20) // part for part in SIZE_DIVISORS)
patient = settings(deadline=None)  # a busy machine is no failure
latencies, bandwidths = st.floats(1e-6, 1e-2), st.floats(1e6, 1e11)


def line(latency: float, bandwidth: float) -> list[float]:
    return [Link(latency, bandwidth).seconds(size) for size in SIZES]


@patient
@given(latencies, bandwidths)
def test_a_line_is_found_again(latency: float, bandwidth: float) -> None:
    found = fit_link(SIZES, line(latency, bandwidth))
    # Where the largest message is nearly all latency, its bytes are lost in it, and a bound holds.
    bound = 8 * SIZES[0] / Link(latency, bandwidth).seconds(SIZES[0])
    assert found.link.bandwidth_bytes_s == pytest.approx(min(bandwidth, bound), rel=1e-2)
    if bandwidth < bound:
        assert found.residual < 1e-6
        assert found.link.latency_s == pytest.approx(latency, rel=1e-3)
    assert found.sizes == SIZES


@patient
@given(latencies, bandwidths, st.integers(1, len(SIZES) - 1), st.floats(1, 1e3))
def test_one_size_that_was_late_does_not_move_the_line(latency: float, bandwidth: float, late: int, by: float) -> None:
    times = line(latency, bandwidth)
    if times[0] < 3 * latency:  # the largest message has to show the bandwidth
        return
    times[late] *= by
    found = fit_link(SIZES, times).link
    others = [place for place in range(len(SIZES)) if place != late]
    errors = sorted(abs(found.seconds(SIZES[place]) / times[place] - 1) for place in others)
    assert errors[len(errors) // 2] < 0.3


def test_sizes_that_were_late_do_not_hide_the_bandwidth() -> None:
    times = line(2e-4, 25e6)
    times[2], times[4] = 4 * times[2], 10 * times[4]
    found = fit_link(SIZES, times).link
    assert found.bandwidth_bytes_s == pytest.approx(25e6, rel=0.05)
    assert found.latency_s == pytest.approx(2e-4, rel=0.15)


@patient
@given(st.lists(st.floats(0, 10), min_size=len(SIZES), max_size=len(SIZES)))
def test_whatever_the_times_the_link_is_one(times: list[float]) -> None:
    found = fit_link(SIZES, times)
    assert 0 <= found.link.latency_s <= max(min(times), 1e-9) * (1 + 1e-9)
    assert 0 < found.link.bandwidth_bytes_s <= 8.01 * SIZES[0] / max(times[0], 1e-9)
    assert math.isfinite(found.residual)


def test_the_fit_is_of_relative_errors() -> None:
    """Absolute least squares would give up the small sizes, 4 orders of magnitude below, for the large ones."""
    times = line(1e-4, 1e8)
    times[0] *= 1.05
    found = fit_link(SIZES, times).link
    assert found.latency_s == pytest.approx(1e-4, rel=0.05)


def test_more_rails_have_to_be_faster_in_every_round() -> None:
    assert RAIL_COUNTS == (1, 2, 4)
    assert choose_rails([[1.0, 1.0], [0.5, 0.5], [0.25, 0.25]]) == 4
    assert choose_rails([[1.0, 1.0], [0.5, 0.5], [0.49, 0.49]]) == 2  # a connection more for 2 % is none too few
    assert choose_rails([[1.0, 1.0], [0.95, 0.95], [1.5, 1.5]]) == 1
    assert choose_rails([[1.0, 1.0, 1.0], [0.5, 0.5, 0.99], [2.0, 2.0, 2.0]]) == 1


def some(latency: float, bandwidth: float) -> LinkFit:
    return fit_link(SIZES, line(latency, bandwidth))


class Place:
    """What of a world a network depends on."""

    def __init__(self, *hosts: tuple[int, ...]) -> None:
        self.hosts = hosts


def network_of(links: MeasuredLinks, *hosts: tuple[int, ...]) -> Any:
    return links.build_network(Place(*hosts))  # type: ignore[arg-type]


def test_the_link_of_a_host_is_what_its_ranks_get_together() -> None:
    fast_nic = MeasuredLinks(some(1e-5, 5e9), some(5e-5, 1e9), some(6e-5, 0.8e9), 1e10, 1)
    found = network_of(fast_nic, (0, 1, 2, 3), (4, 5, 6, 7))
    assert (found.hosts, found.ranks_per_host, found.reduce_bytes_s) == (2, 4, 1e10)
    assert found.inside.bandwidth_bytes_s == pytest.approx(5e9, rel=1e-3)
    assert found.between.bandwidth_bytes_s == pytest.approx(4 * 0.8e9, rel=1e-3)
    assert found.between.latency_s == pytest.approx(5e-5, rel=1e-3)
    full = MeasuredLinks(some(1e-5, 5e9), some(5e-5, 1e9), some(6e-5, 0.25e9), 1e10, 1)
    assert network_of(full, (0, 1), (2, 3)).between.bandwidth_bytes_s == pytest.approx(1e9, rel=1e-3)


def test_the_links_of_one_generation_serve_the_next() -> None:
    """Also where a host or a rank has gone, so that what was measured is no more, or what is there was not."""
    links = MeasuredLinks(some(1e-5, 5e9), some(5e-5, 1e9), some(6e-5, 0.25e9), 1e10, 1)
    lost_a_rank = network_of(links, (0, 1), (2,))
    assert (lost_a_rank.hosts, lost_a_rank.ranks_per_host) == (2, 2)
    assert lost_a_rank.between.bandwidth_bytes_s == pytest.approx(1e9, rel=1e-3)
    lost_a_host = network_of(links, (0, 1))
    assert lost_a_host.hosts == 1
    only_inside = MeasuredLinks(some(1e-5, 5e9), None, None, 1e10, 1)
    assert network_of(only_inside, (0,), (1,)).between == only_inside.inside.link  # type: ignore[union-attr]
    only_between = MeasuredLinks(None, some(5e-5, 1e9), None, 1e10, 1)
    assert network_of(only_between, (0, 1), (2, 3)).inside == only_between.alone.link  # type: ignore[union-attr]
    assert network_of(MeasuredLinks(None, None, None, 1e10, 1), (0,)).ranks == 1


def test_links_travel_as_json() -> None:
    links = MeasuredLinks(some(1e-5, 5e9), some(5e-5, 1e9), None, 1e10, 2, {1: 0.5, 2: 0.25}, ("eth0 10000 Mbit/s",))
    assert MeasuredLinks.from_json(json.loads(json.dumps(links.to_json()))) == links
    nothing = MeasuredLinks(None, None, None, 1e10, 1)
    assert MeasuredLinks.from_json(json.loads(json.dumps(nothing.to_json()))) == nothing


def test_the_table_has_a_row_for_each_link() -> None:
    links = MeasuredLinks(some(1.5e-5, 5e9), some(5e-4, 25e6), None, 1e10, 1)
    lines = align_table(links.build_rows())
    assert lines[0].split("  ")[0] == "link"
    assert "15 us" in lines[1]
    assert "5,000 MB/s" in lines[1]
    assert "500 us" in lines[2]
    assert "25 MB/s" in lines[2]
    assert lines[3].startswith("sum of two arrays")
    assert len({len(line) for line in lines[:3]}) == 1


def test_a_line_that_does_not_fit_is_called_noise() -> None:
    times = [time * (1000 if place in (1, 2, 5) else 1) for place, time in enumerate(line(2e-4, 25e6))]
    found = fit_link(SIZES, times)
    assert found.residual > 0.5
    assert found.format_cells() == ("< 241 us", "> 25 MB/s", "nothing: noise")
    lines = align_table(MeasuredLinks(found, None, None, 1e10, 1).build_rows())
    assert lines[1].endswith("nothing: noise")


def test_links_whose_times_scatter_are_measured_again_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What scatters least counts."""
    good = MeasuredLinks(fit_link(SIZES, line(2e-4, 25e6)), None, None, 1e10, 1)
    bound = MeasuredLinks(None, fit_link(SIZES, [1e-3] * len(SIZES)), None, 1e10, 1)
    times = [time * (1000 if place in (1, 2, 5) else 1) for place, time in enumerate(line(2e-4, 25e6))]
    noise = MeasuredLinks(fit_link(SIZES, times), None, None, 1e10, 1)
    for measured, chosen in ([good], good), ([noise, good], good), ([bound, noise, bound], noise):
        left = iter(measured)
        monkeypatch.setattr(generations, "measure_world_links", lambda *_, left=left: next(left))
        assert generations.measure_reliable_links(cast(World, None), CommRecipe()) is chosen
        assert next(left, None) is None


def test_a_line_that_hardly_rises_gives_no_bandwidth() -> None:
    """Its slope is a bound then, no measurement."""
    found = fit_link(SIZES, [1e-3] * len(SIZES))
    assert found.residual < 0.1
    latency, bandwidth, fits = found.format_cells()
    assert (latency, bandwidth) == ("1,000 us", "> 1,049 MB/s") or latency == "976 us"
    assert fits.endswith("%")


@patient
@given(st.lists(st.floats(0, 10), min_size=len(SIZES), max_size=len(SIZES)))
def test_whatever_the_times_the_table_has_numbers_that_were_seen(times: list[float]) -> None:
    """Within the factor to which the fit may go beyond them."""
    found = fit_link(SIZES, times)
    latency, bandwidth, _ = found.format_cells()
    assert number(latency) <= max(min(times), 1e-9) * 1e6 + 1
    fastest = max(size / max(time, 1e-9) for size, time in zip(SIZES, times, strict=True))
    assert number(bandwidth) <= 8 * fastest / 1e6 + 1
    assert ("noise" in found.format_cells()[2]) == (found.residual > 0.5) == latency.startswith("<")


def number(cell: str) -> float:
    return float(cell.lstrip("<> ").split()[0].replace(",", ""))


def measured(rank: Rank) -> tuple[Any, ...]:
    links = measure_links(rank.world, budget_s=0.05)
    said = links.describe(rank.world)
    given = measure_links(rank.world, rails=3, budget_s=0.05).rails
    later = broadcast_links(rank.world, links if rank.rank == 0 else None)
    network = links.build_network(rank.world)
    rank.world.control.barrier()
    return links, said, given, later == links, network


@pytest.mark.thin(1)
@pytest.mark.parametrize("hosts", [(0, 0), (0, 1, 0, 1), (0, 1, 1)], ids=lambda hosts: "".join(map(str, hosts)))
def test_every_rank_learns_the_same_links(hosts: tuple[int, ...]) -> None:
    results = run_ranks(len(hosts), measured, hosts=hosts)
    assert all(result == results[0] for result in results)
    links, said, given, shared, network = results[0]
    several, fewest = len(set(hosts)) > 1, min(hosts.count(host) for host in hosts)
    assert (links.inside is None) == (len(hosts) == len(set(hosts)))
    assert (links.alone is None) == (not several)
    assert (links.together is None) == (not several or fewest == 1)
    for found in (links.inside, links.alone, links.together):
        if found is not None:
            assert len(found.sizes) == len(found.seconds) >= 6
            assert all(seconds > 0 for seconds in found.seconds)
            assert sorted(set(found.sizes), reverse=True) == list(found.sizes)
    assert links.rails in RAIL_COUNTS
    assert set(links.rails_s) <= set(RAIL_COUNTS)
    assert given == 3
    assert shared
    assert network.hosts == len(set(hosts))
    assert said[0].startswith(f"{len(set(hosts))} host")
    assert "gloo over lo" in said[0]
    assert any(line.startswith("sum of two arrays") for line in said)


def test_a_world_of_one_has_no_links() -> None:
    world = World.create_single(torch.device("cpu"))
    links = measure_links(world)
    assert (links.inside, links.alone, links.together, links.rails) == (None, None, None, 1)
    assert links.reduce_bytes_s > 0
    assert links.build_network(world).ranks == 1
    assert links.describe(world)[0] == "1 host with 1 rank, gloo over lo"
    assert broadcast_links(world, links) == links


CHILD = """
import json, torch
from headway.comm.links import measure_links
from headway.core.launcher_environment import read_launcher_environment
from headway.core.world import World
world = World.join(read_launcher_environment(), torch.device("cpu"))
for _ in range(6):  # all ranks have the same numbers; on a busy machine they may be far off
    links = measure_links(world)
    network = links.build_network(world)
    if 10e6 < network.between.bandwidth_bytes_s < 30e6:
        break
if world.is_lead:
    print(json.dumps([world.interface, network.between.bandwidth_bytes_s, links.rails]))
world.close()
"""


@pytest.mark.root
@pytest.mark.check
def test_a_link_of_200_mbit_is_measured_as_one() -> None:
    """25 MB/s, less 4 % of headers."""
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(2, 200e6) as hosts:
        ranks = []
        for rank in range(4):
            place = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29400"}
            environ = {**place, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            command = [sys.executable, "-c", CHILD]
            ranks.append(hosts.run(rank % 2, command, env=environ, stdout=subprocess.PIPE, text=True))
        said = [process.communicate(timeout=120)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0] * 4
    interface, bandwidth, rails = json.loads(said[0])
    assert interface == "eth0"
    assert rails == 1
    assert 10e6 < bandwidth < 30e6


def test_the_network_interface_in_use_is_named_and_infiniband_where_it_is_used(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (port / "link_layer").write_text("InfiniBand\n")
    assert list_nics("lo", infiniband=True, ports=tmp_path) == ["mlx5_0 port 1 InfiniBand 200 Gb/sec (4X HDR)"]
    assert list_nics("lo", infiniband=False, ports=tmp_path) == list_nics("no such", infiniband=False) == []
    beyond = next(name for name, state in psutil.net_if_stats().items() if "loopback" not in state.flags)
    assert list_nics(beyond, infiniband=False)[0].startswith(f"{beyond} ")
    (port / "link_layer").unlink()
    assert list_nics("lo", infiniband=True, ports=tmp_path) == []


NVML = """
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(number): return number
def nvmlDeviceGetName(handle): return "H200"
def nvmlDeviceGetNvLinkState(handle, link):
    if handle or link >= 4: raise NVMLError
    return 1
def nvmlDeviceGetNvLinkVersion(handle, link): return 7
def nvmlDeviceGetCurrPcieLinkGeneration(handle): return 5
def nvmlDeviceGetCurrPcieLinkWidth(handle): return 16
"""


def test_gpus_say_how_they_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for NVIDIA's library, with its names."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert list_gpu_links() == []
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pynvml.py").write_text(NVML)
    assert list_gpu_links() == ["GPU 0 H200, 4 NVLinks of version 7, PCIe 5 x16", "GPU 1 H200, no NVLink, PCIe 5 x16"]
    monkeypatch.delitem(sys.modules, "pynvml")
    (tmp_path / "pynvml.py").unlink()
    (tmp_path / "pynvml").mkdir()
    (tmp_path / "pynvml/__init__.py").write_text(
        NVML.replace("def nvmlInit(): pass", "def nvmlInit(): raise NVMLError")
    )
    assert list_gpu_links() == []
    monkeypatch.delitem(sys.modules, "pynvml")


def test_nccl_is_heard_unless_the_user_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    with capture_nccl_log() as said:
        assert os.environ["NCCL_DEBUG"] == "INFO"
        path = Path(os.environ["NCCL_DEBUG_FILE"])
        path.write_text("h:1:2 [0] NCCL INFO Using network IB\n")
        assert "Using network IB" in said()
    assert "NCCL_DEBUG" not in os.environ
    assert not path.exists()
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with capture_nccl_log() as said:
        assert os.environ["NCCL_DEBUG"] == "WARN"
        assert said() == ""


def test_what_nccl_chose_is_in_its_log() -> None:
    said = """
h:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
h:1:2 [0] NCCL INFO Using network IB
h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
h:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
h:1:2 [0] NCCL INFO Channel 00/0 : 1[1] -> 8[0] [send] via NET/IB/0/GDRDMA
h:1:2 [0] NCCL INFO 16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels
"""
    assert summarise_nccl_log(said).endswith("network IB, transports P2P/CUMEM/read, NET/IB/0/GDRDMA, 16 channels")
    assert summarise_nccl_log("").startswith("NCCL")
