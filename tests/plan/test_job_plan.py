"""`headway plan`: what is asked, what is said, and the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests._support import headway, packed_digits, refused, write_recipe
from tests.doctor._profile import profile
from tests.plan._workload import workload

from headway.core.errors import UsageError
from headway.core.profile import ThreadScaling
from headway.core.workload import Workload
from headway.plan.cluster import load_clusters
from headway.plan.device_memory import estimate_memory
from headway.plan.strategies import count_useful_nodes
from headway.plan.wording import format_hours, format_milliseconds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    workload().write(tmp_path / "photos.json")
    return tmp_path / "photos.json"


def test_a_plan_is_said_drawn_and_traced(path: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "plan.html", tmp_path / "trace.json"
    said = headway(
        "plan", path, "--cluster", "dgx-1", "--nodes", "1..16", "--epochs-at", "256:10,4096:40", "--page", page,
        "--per-device", "32", "--trace", trace, "--errors-at", "1e4:0.4,1e5:0.25,1e6:0.16",
        "--sizes-at", "1e4:1e6,1e6:1e7",
    )  # fmt: skip
    lines = said.out.splitlines()
    assert lines[0] == "photos on DGX-1, 8 V100, 4 x EDR"
    assert any(line.split()[:2] == ["16", "128"] for line in lines)
    assert "More than 4 nodes do not pay: 16 are 4 times as many" in said.out
    assert "depends most on: speed of a device" in said.out
    assert "The error falls as samples to the power of -0.1" in said.out
    html = page.read_text()
    for name in (
        "images",
        "hours",
        "efficiency",
        "step",
        "epochs",
        "steps",
        "moved",
        "choices",
        "growth",
        "answers",
        "input",
    ):
        assert f'id="{name}"' in html, name
    events = json.loads(trace.read_text())["traceEvents"]
    assert {one["pid"] for one in events} <= set(range(128))


def test_json_of_a_plan_is_whole(path: Path) -> None:
    found = headway("plan", path, "--cluster", "dgx-1", "--nodes", "1,8", "--batch", "2048", "--json").json()
    assert [one["nodes"] for one in found["answers"]] == [1, 8]
    assert [one["batch"] for one in found["answers"]] == [2048, 2048]
    assert found["pays_until"] == 8
    assert found["compute"]["basis"] == "data sheet"
    assert found["loading_from"] == "loading as published for such a node"
    alone = headway("plan", path, "--cluster", "box-8x-l40s", "--json").json()
    assert (alone["answers"][0]["input_images_s"], alone["loading_from"]) == (None, "")


def test_what_two_points_cannot_tell_is_null(path: Path) -> None:
    found = headway("plan", path, "--cluster", "dgx-1", "--errors-at", "1e5:0.3,1e6:0.2", "--json")
    assert "Infinity" not in found.out
    assert [one["high"] for one in found.json()["growth"]["sizes"]] == [None] * 4


def test_all_that_is_asked_of_a_plan_is_said(path: Path) -> None:
    said = headway(
        "plan", path, "--cluster", "dgx-1", "--nodes", "1..64", "--noise-scale", "2000", "--price", "20",
        "--per-device", "32", "--deadline", "0.5",
    ).out  # fmt: skip
    assert re.search(r"(1 node keeps|\d+ nodes keep|None of them keeps) the deadline of 30.0 min", said)
    assert re.search(r"The batch of [\d,]+ against a critical batch of 2,000: ", said)
    assert " cost " in said
    assert "Up to 0 nodes" not in said
    one = headway("plan", path, "--cluster", "dgx-1", "--nodes", "8", "--per-device", "32").out
    assert "pay" not in one
    assert "; loading as published for such a node" in one
    assert "loading and storage are unknown" in headway("plan", path, "--cluster", "box-8x-l40s").out


def test_the_recipes_batch_is_kept_and_what_grows_with_the_nodes_is_beside_it(path: Path, tmp_path: Path) -> None:
    found = headway("plan", path, "--cluster", "dgx-1", "--nodes", "1..64", "--json").json()
    # 32 samples are one for each device of four nodes.
    assert [(one["nodes"], one["batch"]) for one in found["answers"]] == [(1, 32), (2, 32), (4, 32)]
    assert [one["batch"] for one in found["grown"]] == [1024, 2048, 4096]
    assert "has a sample for each device of up to 4 nodes. Plan more with a larger one" in found["warnings"][-1]
    said = headway("plan", path, "--cluster", "dgx-1").out
    assert "With 128 samples on each device, the batch grows with the nodes:" in said
    assert "Plan more with a larger one" not in said
    assert "With 128 samples" not in headway("plan", path, "--cluster", "dgx-1", "--per-device", "64").out
    # The recipe's micro-batches stay small enough, and are fewer on more devices.
    step = workload().step.model_copy(update={"batch": 1024, "micro_batch": 32})
    workload().model_copy(update={"step": step}).write(tmp_path / "large.json")
    large = headway("plan", tmp_path / "large.json", "--cluster", "dgx-1", "--nodes", "1,4,16", "--json").json()
    assert [one["batch"] for one in large["answers"]] == [1024] * 3
    fixed = [one["step"]["fixed_s"] for one in large["answers"]]
    assert fixed[0] == pytest.approx(4 * fixed[1])
    assert fixed[1] == fixed[2]


def test_some_devices_of_a_node_are_planned_too(path: Path, tmp_path: Path) -> None:
    found = headway("plan", path, "--cluster", "dgx-1", "--nodes", "1,2", "--batch", "512", "--json").json()
    within = found["within_node"]
    assert [one["devices"] for one in within] == [1, 2, 4, 8]
    assert within[0]["scaling"] == 1
    assert within[-1]["images_s"] == pytest.approx(found["answers"][0]["images_s"])
    assert [one["scaling"] for one in within] == sorted((one["scaling"] for one in within), reverse=True)
    said = headway("plan", path, "--cluster", "dgx-1", "--nodes", "1,2", "--batch", "512").out
    assert "On one node all 8 devices pay." in said
    # Devices that hardly hear each other: the exchange of 84 MB takes longer than the samples of half a batch.
    slow = load_clusters()["dgx-1"].model_dump(mode="json") | {"inside": {"gb_s": 0.5, "latency_us": 5}}
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(slow))
    said = headway("plan", path, "--cluster", tmp_path / "slow.yaml", "--nodes", "1", "--batch", "64").out
    assert re.search(r"On one node (\d) devices do not pay, take (\d): \1 are [\d.]+ times as fast.", said)
    assert "On some of the devices" not in headway("plan", path, "--cluster", "dgx-1", "--nodes", "2").out
    alone = load_clusters()["dgx-1"].model_dump(mode="json") | {"devices": 1}
    (tmp_path / "alone.yaml").write_text(yaml.safe_dump(alone))
    assert "On some of the devices" not in headway("plan", path, "--cluster", tmp_path / "alone.yaml").out


def test_a_deadline_finds_counts_between_those_that_were_tried(path: Path) -> None:
    asked = ("plan", path, "--cluster", "dgx-1", "--per-device", "32", "--nodes", "1,64")
    hours = {
        one["nodes"]: one for one in headway(*asked[:-1], "1,2,3,4,5,6,7,8,12,16,24,32", "--json").json()["answers"]
    }
    deadline = str(hours[5]["hours"] * 1.001)
    found = headway(*asked, "--deadline", deadline, "--json").json()
    assert found["nodes_in_time"] == 5
    surely = found["nodes_surely_in_time"]
    assert surely is None or surely > 5
    said = headway(*asked, "--deadline", deadline).out
    assert "5 nodes keep the deadline of" in said
    assert "None of them keeps the deadline" in headway(*asked, "--deadline", "1e-6").out
    assert (
        "1 node keeps the deadline of 41.7 d, and so does the whole 90 % band."
        in headway(*asked, "--deadline", "1000").out
    )


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ("1x32:100", "by 1 run on 1 device; the fixed time is a usual one"),
        ("1x32:100,8x32:780", "by 2 runs on 1 and 8 devices; the fixed time is a usual one"),
        ("1x8:95,1x256:110", "by 2 runs on 1 device\n"),
    ],
)
def test_a_plan_says_which_runs_gave_the_step_and_what_they_do_not_tell(runs: str, said: str, path: Path) -> None:
    assert said in headway("plan", path, "--cluster", "dgx-1", "--runs", runs).out


def test_a_job_that_a_device_cannot_hold_is_said(path: Path) -> None:
    said = headway("plan", path, "--cluster", "dgx-1", "--nodes", "1,2", "--per-device", "100000").out
    assert "too much" in said
    before, _, after = said.partition("nodes  devices")
    assert "The samples of a device do not fit its memory at 1 to 2 nodes" in before
    assert "there is room with 79 micro-batches of 1,266 samples" in after


def test_rows_that_find_no_room_and_steps_larger_than_the_set_are_named(path: Path, tmp_path: Path) -> None:
    asked = ("plan", path, "--cluster", "dgx-1", "--nodes", "1..64", "--batch", "65536")
    found = headway(*asked, "--page", tmp_path / "plan.html", "--json").json()
    assert found["nodes_without_room"] == [1, 2, 4]
    unmeasured, precision, tight = found["warnings"]
    assert unmeasured.startswith("No device was measured: ")
    assert precision.startswith("The workload computes in fp32, and V100 SXM2 has 125 TFLOPS in mixed precision: ")
    assert "at 1 to 4 nodes. Plan more nodes" in tight
    assert "Plan more nodes" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    rows = headway(*asked).out.partition("nodes  devices")[2].splitlines()
    assert [row.endswith(", no room") for row in rows[1:8]] == [True] * 3 + [False] * 4
    tiny = workload().model_copy(update={"run": workload().run.model_copy(update={"samples": 1000})})
    tiny.write(tmp_path / "tiny.json")
    small = ("plan", tmp_path / "tiny.json", "--cluster", "dgx-1", "--per-device", "32")
    assert (
        "More than 2 nodes do not pay: a step would have more samples than the training set.\n" in headway(*small).out
    )
    found = headway(*small, "--json").json()
    assert found["warnings"][2].startswith("From 4 nodes on a step has 1,024 samples, more than the 1,000")
    mixed = workload().model_copy(update={"step": workload().step.model_copy(update={"precision": "bf16"})})
    mixed.write(tmp_path / "mixed.json")
    asked = ("plan", tmp_path / "mixed.json", "--cluster", "dgx-a100", "--nodes", "4", "--json")
    assert headway(*asked).json()["warnings"][1:] == []


def test_a_plan_without_a_measured_device_says_so_first_and_devices_that_wait_idle(path: Path, tmp_path: Path) -> None:
    text = headway("plan", path, "--cluster", "box-8x-l40s").out
    assert text.splitlines()[1].startswith("No device was measured: ")
    (tmp_path / "mine.yaml").write_text(
        "title: mine\ndevice: l40s\ndevices: 8\ninside: {gb_s: 24, latency_us: 6}\nnode: {images_s: 10}\n"
    )
    plan = headway("plan", path, "--cluster", tmp_path / "mine.yaml")
    (answer,) = headway("plan", path, "--cluster", tmp_path / "mine.yaml", "--json").json()["answers"]
    idle = 1 - answer["images_s"] * answer["step_s"] / answer["batch"]
    assert f"At 1 node loading limits: the devices idle {idle:.0%} of the time.\n" in plan.out
    assert idle > 0.5
    assert (
        "Write --nodes 1, or give the cluster a link"
        in headway("plan", path, "--cluster", "box-8x-l40s", "--nodes", "2", status=2).err
    )


def test_a_clusters_own_nodes_are_the_default(path: Path, tmp_path: Path) -> None:
    values = load_clusters()["dgx-1"].model_dump(mode="json") | {"nodes": 12}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    found = headway("plan", path, "--cluster", tmp_path / "mine.yaml", "--batch", "512", "--json").json()
    assert [one["nodes"] for one in found["answers"]] == [1, 2, 4, 8, 12]


def test_a_profile_brings_computing_and_loading(path: Path, tmp_path: Path) -> None:
    wanted = {"multiply_adds": workload().forward_multiply_adds}
    slow = ThreadScaling(threads=(1, 2), images_s=(200, 400), serial_s=1e-6, parallel_s=5e-3)
    on_gpu = wanted | {"machine": profile().machine | {"device": "Tesla V100-SXM2-16GB"}, "threads": slow}
    profile().model_copy(update=on_gpu).write(tmp_path / "one.json")
    asked = (
        "plan",
        path,
        "--cluster",
        "dgx-1",
        "--batch",
        "2048",
        "--nodes",
        "1,8",
        "--profile",
        tmp_path / "one.json",
    )
    found = headway(*asked, "--json").json()
    assert found["compute"]["basis"] == "profile"
    assert found["warnings"] == []
    replay = [one.model_copy(update={"predicted": 900.0}) if one.name == "replay" else one for one in profile().runs]
    profile().model_copy(update=on_gpu | {"runs": tuple(replay)}).mark_contradictions().write(tmp_path / "busy.json")
    warned = headway("plan", path, "--cluster", "dgx-1", "--profile", tmp_path / "busy.json", "--json").json()
    assert [one.partition(" by 4.8 times; ")[0] for one in warned["warnings"]] == [
        f"{tmp_path / 'busy.json'} was not confirmed. The short runs contradict each other"
    ]
    assert found["cluster"]["node"]["images_s"] > 0
    assert found["answers"][1]["limit"] == "loading"
    facts = {"exchange bytes/s": 1e9, "exchange latency seconds": 1e-3}
    profile().model_copy(update=wanted | {"ranks": 2, "facts": facts}).write(tmp_path / "two.json")
    both = headway(*asked, "--profile", tmp_path / "two.json", "--json").json()
    assert both["cluster"]["inside"]["gb_s"] == 1
    assert "one profile of a single process" in refused(*asked, "--profile", tmp_path / "one.json", status=2)


def test_a_recipe_is_planned_by_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packed_digits(tmp_path)
    write_recipe(tmp_path / "recipe.yaml")
    said = headway("plan", "recipe.yaml", "batch=64", "--cluster", "dgx-1", "--nodes", "1,2", "--json").json()
    assert [one["batch"] for one in said["answers"]] == [64, 64]
    assert [one["batch"] for one in said["grown"]] == [8 * 128, 16 * 128]


def test_a_facility_is_planned_from_the_same_verb(path: Path, tmp_path: Path) -> None:
    said = headway("plan", path, "--facility", "60", "--jobs", "30,28:200", "--page", tmp_path / "room.html")
    assert "2 x 216 ports" in said.out
    assert "28 nodes: 28 on pod 1" in said.out  # the other has fewer gradients, and is split
    found = headway("plan", "--facility", "12", "--jobs", "8,3,1", "--json").json()
    assert found["fabric"]["switches"] == {"36": 2}
    assert found["placement"]["exact"] is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan",), "a job and a cluster, or the nodes of a facility"),
        (("plan", "none.json", "--cluster", "dgx-1"), "cannot be read"),
        (("plan", "W", "--cluster", "dgx"), "no such cluster"),
        (("plan", "W", "--cluster", "dgx-1", "--nodes", "x"), "not a list of node counts"),
        (("plan", "W", "--cluster", "dgx-1", "--batch", "4"), "leaves 0.062 samples"),
        (("plan", "W", "--cluster", "dgx-1", "--per-device", "0"), "1,000,000,000 samples, not 0"),
        (("plan", "W", "--cluster", "dgx-1", "--per-device", "nan"), "1,000,000,000 samples, not nan"),
        (("plan", "W", "--cluster", "dgx-1", "--price", "-1"), "the price of a node is 0 to 1,000,000 an hour, not -1"),
        (("plan", "W", "--cluster", "dgx-1", "--deadline", "0"), "a deadline is a number of hours above 0"),
        (("plan", "W", "--cluster", "dgx-a100", "--spread"), "has no groups"),
        (("plan", "W", "--cluster", "dgx-1", "--profile", "none.json"), "cannot be read"),
        (("plan", "W", "--cluster", "dgx-1", "--rack-kw", "20"), "--rack-kw plans a room"),
        (("plan", "W", "--cluster", "dgx-1", "--jobs", "3"), "--jobs plans a room"),
        (("plan", "--facility", "36", "--nodes", "3"), "--nodes plans a job on a cluster"),
        (("plan", "--facility", "36", "--jobs", "30:nan"), "not 30 nodes and nan bytes"),
        (("plan", "W", "--cluster", "dgx-1", "--batch", "4", "--per-device", "4"), "per device or for all devices"),
        (("plan", "W", "--cluster", "dgx-1", "--runs", "8"), "is not a measured run"),
        (("plan", "W", "--cluster", "dgx-1", "--noise-scale", "0"), "above 0"),
        (("plan", "W", "--cluster", "dgx-1", "--sizes-at", "1:2"), "only with --errors-at"),
        (("plan", "W", "--cluster", "dgx-1", "--errors-at", "1:2"), "2 points or more"),
        (("plan", "W", "batch=3", "--cluster", "dgx-1"), "only a recipe has values to override"),
        (("plan", "--facility", "36", "--cluster", "dgx-1"), "--cluster plans a job on a cluster"),
        (("plan", "W", "--cluster", "dgx-1", "--epochs-at", "1e-300:1,1e300:1"), "is not a batch with its epochs"),
        (("plan", "W", "--cluster", "dgx-1", "--page", "nowhere/plan.html"), "nothing can be written there"),
        (("plan", "W", "--cluster", "dgx-1", "--trace", "nowhere/t.json"), "nothing can be written there"),
        (("plan", "--facility", "12", "--page", "nowhere/room.html"), "nothing can be written there"),
        (("plan", "--facility", "0"), "1 node or more"),
        (("plan", "--facility", "36", "--ports", "1"), "at least 2 ports"),
        (("plan", "--facility", "36", "--jobs", "37"), "need 37 nodes, and there are 36"),
        (("plan", "--facility", "36", "--leaf", "35"), "no switch of 35 ports"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: tuple[str, ...], said: str, path: Path) -> None:
    sentence = refused(*(path if one == "W" else one for one in arguments), status=2)
    assert said in " ".join(sentence.split())


def test_planning_loads_no_torch(path: Path) -> None:
    """It answers where torch is not installed."""
    program = (
        "import sys; sys.modules['torch'] = None; from headway.cli.main import main; sys.argv = ['headway', 'plan', "
        f"{str(path)!r}, '--cluster', 'dgx-1', '--json']; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "photos"


def test_memory_is_what_a_device_holds() -> None:
    held = estimate_memory(workload(), 32, 16e9, 1)
    weights = 4 * workload().parameters
    assert held.weights == 3 * weights  # with gradients, and one state of as much
    largest = max(layer.activation_bytes for layer in workload().layers)
    assert held.activations == 32 * (11 * 10**6 + 2 * largest)
    assert held.fits
    assert held.most_samples == int((0.9 * 16e9 - held.weights) // (11 * 10**6 + 2 * largest))
    assert estimate_memory(workload(), 32, 16e9, 8).weights == 4 * weights  # gradients on their way
    assert not estimate_memory(workload(), 32, 0.5e9, 1).fits
    assert estimate_memory(workload(), 1, 1e6, 1).most_samples == 0


STILL = ("masters", "gradients of masters", "buffers", "averaged weights", "layer watch")


@pytest.mark.thin(1)
@pytest.mark.parametrize(
    ("ranks", "options", "there"),
    [
        (1, [], ["layer watch"]),
        (2, ["observe.layer_rates=false", "observe.on_divergence=ignore"], []),
        (1, ["half_weights=true", "precision=bf16"], ["masters", "gradients of masters", "layer watch"]),
        (2, ["model.ema.half_life_steps=9", "model.factory=headway.model:small_net"], ["buffers", "averaged weights"]),
    ],
)
def test_memory_is_that_of_the_dry_run(tmp_path: Path, ranks: int, options: list[str], there: list[str]) -> None:
    """The memory of one rank. Its batch, and anything in host memory, is not part of the estimate."""
    packed_digits(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", model={"factory": "net.py:dropout"}, optimizer={"name": "nag"})
    out = tmp_path / "w.json"
    asked = ("train", recipe, "--dry-run", "--json", "--out", out, *(["--procs", "2"] if ranks > 1 else []))
    said = headway(*asked, *options)
    parts = {one["name"]: one["bytes"] for one in said.json()["memory"]}
    held = estimate_memory(Workload.read(out), 30 // ranks, 1e9, ranks)
    still = (*STILL, "weights", "gradients", "buckets", "optimizer state")
    assert held.weights == sum(parts.get(name, 0) for name in still)
    assert held.activations == parts["kept for backward"] + parts["activation gradients"]
    assert ("buckets" in parts) == (ranks > 1)
    assert set(there) <= parts.keys()


def test_nodes_are_useful_while_each_device_has_its_batch() -> None:
    """The slides' 64 to 128 nodes: 128 images a device, batches of 65,536 to 131,072."""
    assert count_useful_nodes(65_536, 128, 8) == 64
    assert count_useful_nodes(131_072, 128, 8) == 128


def test_epochs_that_fall_with_the_batch_are_doubted(path: Path) -> None:
    asked = ("plan", path, "--cluster", "dgx-1", "--nodes", "1", "--per-device", "8", "--epochs-at")
    said = headway(*asked, "10:5,20:4").out
    assert "  epochs    2 batches, fitted 11.2% off in the root mean square\n" in said
    assert "Epochs do not follow E = E_min (1 + B / B_crit): the fit is 11% off." in said
    assert "Epochs do not follow" not in headway(*asked, "10:5,20:6").out


def test_what_an_image_takes_can_be_said(path: Path, tmp_path: Path) -> None:
    far = load_clusters()["dgx-1"].model_dump(mode="json") | {"storage": {"shared_gb_s": 0.001}}
    (tmp_path / "far.yaml").write_text(yaml.safe_dump(far))
    asked = ("plan", path, "--cluster", tmp_path / "far.yaml", "--nodes", "1", "--json", "--image-kb")
    assert headway(*asked, "100").json()["answers"][0]["first_images_s"] == pytest.approx(10)
    blind = workload().model_copy(update={"input": workload().input.model_copy(update={"encoded_bytes": None})})
    blind.write(tmp_path / "blind.json")
    said = headway("plan", tmp_path / "blind.json", "--cluster", tmp_path / "far.yaml", "--nodes", "1").out
    assert "the bandwidth of the storage is ignored, since bytes per image are unknown (--image-kb)\n" in said
    assert "an encoded image has more than 0 and up to 1,000,000 kB, not -1000" in refused(*asked, "-1000", status=2)


def test_milliseconds_are_numbers_as_people_write_them() -> None:
    assert [format_milliseconds(one) for one in (0.0031, 0.0994, 1.02)] == ["3.1 ms", "99.4 ms", "1,020 ms"]


def test_times_are_said_in_the_unit_that_suits_them() -> None:
    assert [format_hours(hours) for hours in (100, 5, 0.5, 0.001, 0.00001)] == [
        "4.2 d",
        "5.0 h",
        "30.0 min",
        "3.6 s",
        "0.036 s",
    ]


def test_an_unknown_device_is_said() -> None:
    with pytest.raises(UsageError, match="no device"):
        load_clusters()["dgx-1"].model_copy(update={"device": "tpu"}).device_spec  # noqa: B018
