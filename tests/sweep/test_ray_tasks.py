"""Workers from a Ray cluster, where Ray is installed."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.conftest import absent
from tests.sweep._machines import Machines, expect_no_double_writes, prepare

from headway.core.errors import UsageError
from headway.sweep.ray_tasks import join_from_ray

PROGRAM = """
import sys
import ray
from headway.sweep.ray_tasks import join_from_ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
assert join_from_ray(sys.argv[1]) == 1
"""


def test_without_ray_or_a_cluster_the_way_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pip install headway\[ray\]" if find_spec("ray") is None else "ray.init"):
        join_from_ray(tmp_path)


@pytest.mark.check
def test_a_ray_cluster_trains_a_sweep(tmp_path: Path) -> None:
    if find_spec("ray") is None:
        absent("Ray is not installed", may_be=True)
    prepare(tmp_path)
    with Machines(tmp_path) as machines:
        options = ("--slots", "0", "--max-trials", "1", "--seeds", "0")
        coordinator = machines.sweep("rayed", *options)
        workers = machines.run([sys.executable, "-c", PROGRAM, str(tmp_path / "rayed")])
        machines.finish(coordinator)
        machines.finish(workers)
    assert json.loads((tmp_path / "rayed/result.json").read_text())["trials"] == 1
    expect_no_double_writes(tmp_path / "rayed")
