"""Sentences and tables of a plan: its batch, its units, its page, and what it refuses to mix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tests._support import headway, refused
from tests.doctor._profile import profile
from tests.plan._workload import workload

from headway.page.panel import Panel
from headway.plan.job_plan import JobPlan
from headway.plan.job_plan_page import build_panels
from headway.plan.job_plan_text import format_plan
from headway.plan.request import PlanRequest, plan_job
from headway.plan.workloads import find_workload


def plan_network(name: str, **asked: object) -> JobPlan:
    values = {"cluster": "dgx-1", "nodes": "1,2"} | asked
    return plan_job(find_workload(name, ("precision=fp16",)), PlanRequest(**values))  # type: ignore[arg-type]


def find_panels(plan: JobPlan) -> dict[str, Panel]:
    return {one.name: one for one in build_panels(plan)}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "64 samples on each device, so that it grows with the nodes; --batch keeps it the same"),
        ({"accumulate": 2}, "128 samples on each device in 2 micro-batches, so that it grows"),
        ({"batch": 4096}, "4,096 samples on any number of nodes\n"),
    ],
)
def test_a_plan_says_whether_the_batch_grows(asked: dict[str, object], said: str) -> None:
    assert f"\n  batch     {said}" in format_plan(plan_network("resnet50", **asked))


def test_a_batch_larger_than_the_set_is_named_in_every_table() -> None:
    """1,000 samples: 8 devices with 128 each take more, and so would the steps of two batches at once."""
    run = workload().run.model_copy(update={"samples": 1000})
    tiny = workload().model_copy(update={"run": run})
    plan = plan_job(tiny, PlanRequest(cluster="dgx-1", nodes="1,2", batch=600))
    assert [one.batch for one in plan.grown] == [1024, 2048]
    table = format_plan(plan).partition("With 128 samples on each device")[2].partition("On some of")[0]
    assert table.count(", more than the set") == 2
    assert format_plan(plan).count(", more than the set") == 2
    assert not [one for one in plan.strategies if "times the batch" in one.note]
    large = plan_job(tiny, PlanRequest(cluster="dgx-1", nodes="1,2", batch=1200))
    said = format_plan(large)
    assert "\nA step has 1,200 samples, more than the 1,000 of the training set. Plan a smaller batch" in said
    # Two node counts, two of the growing batch, and four numbers of devices.
    assert said.count(", more than the set") == 8


def test_samples_are_named_by_what_they_are() -> None:
    plan = plan_network("bert-large")
    said = format_plan(plan)
    assert "images" not in said
    assert said.count("  sequences/s  ") == 3
    panels = find_panels(plan)
    assert (panels["images"].title, panels["images"].data["y_label"]) == ("Sequences/s", "sequences/s")
    assert "sequences/s" in panels["choices"].data["columns"]
    assert "images" not in "".join(one.to_json() for name, one in panels.items() if name != "images")
    assert "  images/s  " in format_plan(plan_network("resnet50"))


def test_runs_that_no_device_explains_are_named_by_what_they_train() -> None:
    with pytest.raises(Exception, match="gave 40 sequences/s, and the others imply"):
        plan_network("bert-large", runs="1x8:40,1x8:4")


def test_the_page_has_every_table_of_the_text() -> None:
    plan = plan_network("resnet50", batch=4096)
    panels, said = find_panels(plan), format_plan(plan)
    for name in ("answers", "per_device", "within_node", "published"):
        data = panels[name].data
        lines = [line.split() for line in said.splitlines()]
        for row in [data["columns"], *data["rows"]]:
            assert " ".join(row).split() in lines, (name, row)
    assert panels["within_node"].note == "On one node all 8 devices pay."
    alone = find_panels(plan_network("vgg16", nodes="2"))
    assert not {"per_device", "within_node", "published"} & set(alone)


@pytest.mark.parametrize(
    ("nodes", "batch", "unit", "each"), [("64", 4096, "minutes", 60), ("1,2", 64, "hours", 1), ("1", 16, "hours", 1)]
)
def test_the_axis_of_time_has_the_unit_that_suits_it(nodes: str, batch: int, unit: str, each: float) -> None:
    plan = plan_network("resnet50", nodes=nodes, batch=batch)
    data = find_panels(plan)["hours"].data
    assert data["y_label"] == unit
    assert data["series"][0]["y"] == pytest.approx([one.hours * each for one in plan.predictions])
    assert data["bands"][0]["low"] == pytest.approx([one.low_hours * each for one in plan.predictions])


def test_a_cpus_profile_is_refused_for_other_devices_and_taken_for_a_cpu(tmp_path: Path) -> None:
    known = workload()
    known.write(tmp_path / "photos.json")
    cpu = profile().model_copy(update={"multiply_adds": known.forward_multiply_adds})
    assert cpu.machine["device"] == "cpu"
    cpu.write(tmp_path / "cpu.json")
    asked = ("plan", tmp_path / "photos.json", "--profile", tmp_path / "cpu.json", "--cluster")
    said = refused(*asked, "dgx-1", status=2)
    assert "--profile: this profile is of a CPU, and DGX-1, 8 V100, 4 x EDR has V100 SXM2. Make the profile on" in said
    device = {"title": "my CPU", "tflops": {"fp32": 1}, "memory_gb": 64, "memory_gb_s": 50}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"title": "mine", "device": device, "devices": 1}))
    taken = headway(*asked, tmp_path / "mine.yaml").out
    assert re.search(r"by the doctor's profile of \w+ on cpu", taken)
