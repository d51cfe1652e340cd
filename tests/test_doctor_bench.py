"""What bench.doctor stands on: cases drawn by a seed, what surrounds them, rates of runs, a table made of records."""

from __future__ import annotations

import itertools
import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from bench._doctor import around, data, user
from bench._doctor.around import Place
from bench._doctor.cases import Case, drawn, draws
from bench._doctor.data import NotHereError, Sets
from bench._doctor.injectors import INJECTORS
from bench._doctor.server import BURST_S, Bucket
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import headway
from headway.core.recipe import read_recipe
from headway.core.user_code import import_user_object
from headway.data.pack import pack
from headway.model.model_size import measure_model_size
from headway.setup.recipe import TrainRecipe
from headway.setup.task import Classification, TargetSpec

FIRST = list(itertools.islice(draws(1), 60))


def colours(folder: Path, per_class: int = 40) -> Path:
    """Random images of CIFAR's size in two classes, packed as pixels: folder/packed/train and eval."""
    random = np.random.default_rng(1)
    for name, number in itertools.product(("cat", "dog"), range(per_class)):
        path = folder / "images" / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (32, 32, 3), np.uint8)).save(path)
    pack(folder / "images", folder / "packed", mode="raw", split=0.25, threads=1)
    return folder / "packed"


# Cases.


def test_the_same_seed_draws_the_same_cases_and_another_one_others() -> None:
    assert [one.to_json() for one in itertools.islice(draws(1), 60)] == [one.to_json() for one in FIRST]
    assert [one.to_json() for one in itertools.islice(draws(2), 60)] != [one.to_json() for one in FIRST]
    assert [one.number for one in FIRST] == list(range(60))
    assert len({one.settings() for one in FIRST}) > 50


def test_two_of_three_cases_are_single_and_every_injector_is_among_the_first() -> None:
    assert [len(one.injected) for one in FIRST[:6]] == [1, 1, 2, 1, 1, 2]
    turn = [one.injected[0].name for one in FIRST if len(one.injected) == 1][: len(INJECTORS) + 1]
    assert len(set(turn)) == len(INJECTORS) + 1


def test_a_pair_changes_different_things() -> None:
    random = Random(1)
    named = {one.draw(random, one.families[0]).name: one for one in INJECTORS}
    pairs = [one for one in FIRST if len(one.injected) == 2]
    assert len({one.text for one in pairs}) > 10
    for case in pairs:
        first, second = (named[one.name] for one in case.injected)
        assert not first.slots & second.slots
        assert case.family in first.families
        assert case.family in second.families
        assert not {*case.injected[0].truth} & {*case.injected[1].truth}


@pytest.mark.thin(12)
@pytest.mark.parametrize("case", FIRST, ids=lambda case: f"{case.number}-{case.text}")
def test_every_case_is_a_recipe_and_so_is_what_is_left_of_it(case: Case, tmp_path: Path) -> None:
    jobs = [case.job(), *case.without().values()]
    for job in jobs:
        job.write(tmp_path / "recipe.yaml", "packed/train", "packed/eval")
        recipe = read_recipe(tmp_path / "recipe.yaml", (), TrainRecipe).recipe
        assert recipe.data.train == "packed/train"
        assert (recipe.data.eval is not None) == job.held_out
        for path in (recipe.model.factory, recipe.transform, recipe.task.factory):
            if path not in (None, "auto"):
                assert callable(import_user_object(path, base=tmp_path, what="test"))
    if len(os.sched_getaffinity(0)) > 1:  # on one core, one thread is all there is
        assert all(job != jobs[0] for job in jobs[1:])
    assert all(one.truth for one in case.injected)


def test_the_other_injectors_stay_where_one_is_left_out() -> None:
    both = drawn(1, 0, Random(1), [one for one in INJECTORS if one.name in ("remote", "transform")])
    left = both.job("transform")
    assert left.limits == both.job().limits
    assert left.limits.remote_bits_s is not None
    assert "transform" in both.job().recipe
    assert "transform" not in left.recipe
    assert both.job("remote").limits.remote_bits_s is None


# What a user would have written.


@pytest.mark.parametrize("side", [8, 32, 224])
def test_the_networks_take_images_of_any_size(side: int) -> None:
    images = torch.rand(2, 3, side, side)
    networks: list[torch.nn.Module] = [user.Lenet(7), user.Perceptron(7), user.Chain(7, layers=3)]
    networks.append(user.Blocks(7, channels=5))
    for model in networks:
        assert model(images).shape == (2, 7)
    assert measure_model_size(networks[0], images).multiply_adds == 651_468


def test_a_chain_is_as_long_as_it_is_asked_to_be() -> None:
    model = user.Chain(2, layers=11)
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == 12


def test_transforms_do_as_much_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels, keys = torch.rand(3, 3, 8, 8), torch.arange(3), np.zeros(3, np.uint64)
    monkeypatch.delenv(user.ROUNDS, raising=False)
    assert torch.equal(user.smooth(images, labels, keys)[0], images)
    monkeypatch.setenv(user.ROUNDS, "2")
    once = torch.nn.functional.avg_pool2d(images, 3, 1, 1)
    twice = user.smooth(images, labels, keys)[0]
    assert torch.equal(twice, torch.nn.functional.avg_pool2d(once, 3, 1, 1))
    monkeypatch.setenv(user.SLOW_RANK, "1")
    monkeypatch.setenv("RANK", "0")
    assert torch.equal(user.smooth_on_one(images, labels, keys)[0], images)
    monkeypatch.setenv("RANK", "1")
    assert torch.equal(user.smooth_on_one(images, labels, keys)[0], twice)
    monkeypatch.setenv(user.READS, "5")
    assert counted(lambda: user.read(images, labels, keys)) == 15


def test_a_loss_in_python_is_the_same_loss() -> None:
    target = TargetSpec(kind="class", classes=("a", "b"), numbers=1)
    task, plainly = user.Reading(target, reads=4), Classification(target)
    outputs, labels = torch.randn(5, 2, requires_grad=True), torch.tensor([0, 1, 1, 0, 1])
    assert torch.equal(task.loss(outputs, labels), plainly.loss(outputs, labels))
    assert torch.equal(task.metrics(outputs, labels)["accuracy"], plainly.metrics(outputs, labels)["accuracy"])
    assert (task.outputs, task.primary, task.higher_is_better) == (2, "accuracy", True)
    assert len(task.predict(outputs.detach())) == 5
    assert counted(lambda: task.loss(outputs, labels)) == 20


def counted(call: Any) -> int:
    """How often a call asks for a value of a tensor."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
    return sum(one.count for one in profile.key_averages() if one.key == "aten::item")


# What surrounds a job.


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20), st.floats(1e3, 1e9))
def test_a_bucket_lets_through_its_rate(counts: list[int], bytes_s: float) -> None:
    bucket = Bucket(bytes_s)
    due = [bucket.due(each, 100.0) for each in counts]
    assert due == sorted(due)
    assert due[-1] == pytest.approx(100.0 - BURST_S + sum(counts) / bytes_s)
    later = due[-1] + 50.0
    assert bucket.due(counts[0], later) == pytest.approx(later - BURST_S + counts[0] / bytes_s), "a pause saves little"


def test_the_web_server_gives_ranges_and_nothing_beside_its_folder(tmp_path: Path) -> None:
    content = bytes(range(256)) * 300
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a file").write_bytes(content)
    (tmp_path / "secret").write_text("secret")
    with around.served(tmp_path / "folder", 1e8) as address:
        assert fetched(f"{address}/a%20file") == (200, content)
        assert fetched(f"{address}/a%20file", "bytes=5-70000") == (206, content[5:70001])
        assert fetched(f"{address}/a%20file", "bytes=76799-99999") == (206, content[-1:])
        assert fetched(f"{address}/a%20file", "bytes=76800-")[0] == 416
        assert fetched(f"{address}/nothing")[0] == 404
        assert fetched(f"{address}/../secret")[0] == 404
        assert fetched(f"{address}/%2e%2e/secret")[0] == 404


def fetched(address: str, asked: str | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(address, headers={"Range": asked} if asked else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_a_pack_behind_the_web_server_is_the_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    folder = colours(tmp_path, 8) / "train"
    here = headway.open(folder)
    with around.served(folder, 1e8) as address:
        there = headway.open(address)
        ids = list(range(len(here)))
        assert [bytes(one) for one in there.read(ids)] == [bytes(one) for one in here.read(ids)]
        there.close()
    here.close()


@pytest.mark.root
def test_a_control_group_holds_what_runs_in_it_and_is_removed(tmp_path: Path) -> None:
    try:
        with around.group(0.5, 12e6, tmp_path) as folders:
            code = "from headway.core.cpu_count import count_usable_cores\n"
            code += "print(count_usable_cores(), open('/proc/self/cgroup').read())"
            place = Place(tmp_path, "", prefix=["sh", "-c", around.ENTER, "sh", *map(str, folders), "--"])
            done = subprocess.run(place.command("-c", code), capture_output=True, text=True, check=True)
            assert done.stdout.startswith("1 ")
            assert all(folder.name in done.stdout for folder in folders)
            files = [folder / name for folder in folders for name in ("io.max", "blkio.throttle.read_bps_device")]
            assert "12000000" in "".join(path.read_text() for path in files if path.exists())
    except NotHereError as error:
        pytest.skip(str(error))
    assert not any(folder.exists() for folder in folders)


def test_where_no_group_can_be_made_the_reason_is_said(tmp_path: Path) -> None:
    reason = r"^no control group can be made here \(.*: No such file or directory\)$"
    with pytest.raises(NotHereError, match=reason), around.group(0.5, None, tmp_path, tmp_path / "none"):
        pass


def test_a_group_of_version_2_has_both_limits_in_one_folder(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    groups.mkdir()
    with around.group(0.25, None, tmp_path, groups) as (folder,):
        assert (groups / "cgroup.subtree_control").read_text() == "+cpu"
        assert (folder / "cpu.max").read_text() == "25000 100000"


def test_the_disk_of_a_partition_is_the_whole_disk(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    with pytest.raises(NotHereError, match="lies on no disk"):
        around.disk_of(tmp_path, blocks)
    (tmp_path / "sda/sda1").mkdir(parents=True)
    (tmp_path / "sda/dev").write_text("8:0\n")
    (blocks / name).symlink_to(tmp_path / "sda/sda1")
    assert around.disk_of(tmp_path, blocks) == name
    (tmp_path / "sda/sda1/partition").write_text("1\n")
    assert around.disk_of(tmp_path, blocks) == "8:0"


@pytest.mark.root
def test_what_processes_on_a_slow_network_tell_each_other_is_limited() -> None:
    try:
        with around.linked(150e6) as prefix:
            done = subprocess.run([*prefix, "tc", "qdisc", "show", "dev", "lo"], capture_output=True, text=True)
            assert "tbf" in done.stdout
            assert "150Mbit" in done.stdout
    except NotHereError as error:
        pytest.skip(str(error))


def test_the_sets_are_made_of_photographs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source/imagenet-250"
    source.mkdir(parents=True)
    for number in range(3):
        image = Image.effect_mandelbrot((60 + number, 50), (-2, -1.5, 1, 1.5), 50)
        image.convert("RGB").save(source / f"n{number}_1.JPEG")
    monkeypatch.setenv("HEADWAY_TEST_DATA", str(tmp_path / "source"))
    sets = Sets(folder=tmp_path / "sets")
    shapes = {"photos x 1": (62, 50), "photos x 2": (124, 100), "photos raw": (224, 224), "pixels 40": (40, 40)}
    for name, largest in shapes.items():
        found = headway.open(sets.train(name))
        assert (len(found), len(found.classes)) == (3, 3)
        assert (int(found.width.max()), int(found.height.max())) == largest
        found.close()
        assert sets.held_out(name) is None
    for name in ("photos x 1, many", "photos raw, many", "photos loose, many"):
        many = headway.open(sets.train(name))
        assert len(many) == 3 * data.COPIES["many"]
        many.close()
    made = sets.train("photos x 1").stat().st_mtime_ns
    assert Sets(folder=tmp_path / "sets").train("photos x 1").stat().st_mtime_ns == made
    assert not list((tmp_path / "sets").glob(".making-*"))


def test_without_photographs_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_TEST_DATA", str(tmp_path))
    with pytest.raises(NotHereError, match="HEADWAY_TEST_DATA"):
        Sets(folder=tmp_path / "sets").train("photos x 1")


def test_files_are_in_memory_after_loading_and_not_after_evicting(tmp_path: Path) -> None:
    path = tmp_path / "folder/file"
    path.parent.mkdir()
    path.write_bytes(bytes(1 << 20))
    data.load(path.parent)
    assert in_memory(path)
    data.evict(path.parent)
    if os.major(path.stat().st_dev) == 0 and in_memory(path):
        pytest.skip("this file system lies on no disk")
    assert not in_memory(path)
    data.load(path.parent)
    assert in_memory(path)


def in_memory(path: Path) -> bool:
    """Whether the first bytes of a file can be read without waiting for a disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(handle, [bytearray(16)], 0, os.RWF_NOWAIT) == 16
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot tell
        return True
    finally:
        os.close(handle)
