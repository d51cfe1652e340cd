"""bench-links: alone, under torchrun, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _ranks import Rank, run_ranks
from tests._support import refused, workers_of

from headway.comm.bench_links import (
    BENCH_SIZES_BYTES,
    AlgorithmTiming,
    BenchLinksResult,
    run_bench_links,
    time_all_sizes,
)
from headway.comm.communicator import Communicator
from headway.core.errors import UsageError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def swept(rank: Rank) -> tuple[Any, ...]:
    communicator = Communicator(rank.world)
    whole = time_all_sizes(communicator, (1 << 10, 1 << 12), 60.0)
    cut = time_all_sizes(communicator, (1 << 10, 1 << 12, 1 << 14), 1e-9)
    names = communicator.algorithms
    communicator.close()
    return names, whole, cut


@pytest.mark.thin(1)
@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1)], ids=lambda hosts: "".join(map(str, hosts)))
def test_every_algorithm_is_timed_at_every_size(hosts: tuple[int, ...]) -> None:
    results = run_ranks(len(hosts), swept, hosts=hosts)
    assert all(result == results[0] for result in results)
    names, (rows, left_out), (few, late) = results[0]
    assert left_out == []
    assert [(row.bytes, row.algorithm) for row in rows] == [
        (size, name) for size in (1 << 10, 1 << 12) for name in names
    ]
    for row in rows:
        assert row.rounds >= 3
        assert row.bus_bytes_s == pytest.approx(row.bytes / row.seconds * 2 * (len(hosts) - 1) / len(hosts))
    assert [row.bytes for row in few] == [1 << 10] * len(names)  # one size there always is
    assert late == [1 << 12, 1 << 14]


def test_the_sizes_are_1_kib_to_128_mib() -> None:
    assert (BENCH_SIZES_BYTES[0], BENCH_SIZES_BYTES[-1]) == (1 << 10, 128 << 20)
    assert sorted(set(BENCH_SIZES_BYTES)) == list(BENCH_SIZES_BYTES)


def test_a_result_is_a_table_and_travels_as_json() -> None:
    rows = [AlgorithmTiming(size, name, size * 1e-9, 1e9, 3) for size in (1024, 4096) for name in ("ring", "tree")]
    result = BenchLinksResult(["2 hosts"], ["predicted ms  ring"], {"rails": 1}, rows, [16384])
    assert BenchLinksResult.from_json(json.loads(json.dumps(asdict(result)))) == result
    lines = result.to_text().splitlines()
    assert lines[:3] == ["2 hosts", "", "predicted ms  ring"]
    assert lines[-1] == "The time budget did not suffice for 16,384 bytes. Give more with --seconds."
    (heading,) = (line for line in lines if line.startswith("bytes"))
    assert heading.split("  ")[0] == "bytes"
    assert lines[-2].split() == ["4,096", "0.0041", "1,000", "0.0041", "1,000"]


def test_what_was_measured_otherwise_than_predicted_is_told() -> None:
    def said(chosen: float) -> str:
        rows = [AlgorithmTiming(1024, "ring", 1e-3, 1e6, 3), AlgorithmTiming(1024, "tree", chosen, 1e6, 3, chosen=True)]
        return BenchLinksResult([], [], {}, rows, []).to_text()

    assert "predicted: 1,024 bytes (ring 1 ms; a run would choose tree 2 ms). Measure again" in said(2e-3)
    assert "otherwise" not in said(1.2e-3)
    assert "otherwise" not in said(0.5e-3)


def test_without_company_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="a single process has no links"):
        run_bench_links(None, 1)
    for procs in (1, 0, -1):
        with pytest.raises(UsageError, match=rf"--procs is {procs}\. Links connect processes: set 2 or more"):
            run_bench_links(procs, 1)
    with pytest.raises(UsageError, match=r"--interface has no effect between processes of one host"):
        run_bench_links(2, 1, ["lo"])
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=rf"--seconds is {seconds:g}\. Set the time for all"):
            run_bench_links(2, seconds)
    for name, value in zip(VARIABLES, ("0", "2", "0", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"this process was started by a launcher \(torchrun\) and cannot be one"):
        run_bench_links(2, 1)


def clean() -> dict[str, str]:
    """The environment without a launcher's variables."""
    return {**{name: value for name, value in os.environ.items() if name not in VARIABLES}, "OMP_NUM_THREADS": "1"}


@pytest.mark.check
def test_the_verb_starts_its_processes_and_prints_one_line_of_json() -> None:
    command = [sys.executable, "-m", "headway", "bench-links", "--procs", "2", "--seconds", "0.5", "--json"]
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row["algorithm"] for row in found["rows"]} == {"ring", "tree", "leader", "two_dimensional"}
    assert found["report"][0].startswith("1 host with 2 ranks, gloo over lo")
    assert found["links"]["inside"]["sizes"]
    assert found["rows"][0]["bytes"] == 1024
    for size in {row["bytes"] for row in found["rows"]}:
        assert sum(row["chosen"] for row in found["rows"] if row["bytes"] == size) == 1


def test_the_verb_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    fix = "Run headway bench-links --procs N, or torchrun ... -m headway bench-links."
    assert refused("bench-links", status=2) == f"a single process has no links to measure. {fix}"


@pytest.mark.check
def test_a_process_that_dies_ends_the_others() -> None:
    command = [sys.executable, "-m", "headway", "bench-links", "--procs", "3"]
    with subprocess.Popen(command, env=clean(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            while len(children := workers_of(running.pid)) < 3:
                time.sleep(0.01)
            children[1].kill()
            _, said = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 1
    assert "headway: rank" in said.splitlines()[-1]
    assert "of 3 was ended by SIGKILL" in said or "of 3 ended with status" in said  # another one may end first
    assert not any(child.is_running() for child in children)


@pytest.mark.check
def test_torchrun_starts_it_too() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["-m", "headway", "bench-links", "--seconds", "1"]
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 host with 3 ranks") == 1  # rank 0 alone speaks
    assert "inside a host" in done.stdout
