"""`headway loop` as real processes: killed anywhere, stopped by signals, and fed with labels over HTTP."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tests._support import finished, headway, running
from tests.lifecycle.loop._loops import (
    find_stage,
    find_truth,
    judge_by_hand,
    list_waiting,
    make_loop,
    read_journal,
)
from tests.lifecycle.service._service import serving_data

from headway.export.manifest import open_manifest
from headway.lifecycle.loop.verification import PROCESS
from headway.lifecycle.service.client import Client
from headway.lifecycle.store.store import Store

# Enough steps that a kill meets checkpoints; dropout, so that a wrong place in the random numbers would be seen.
RECIPE: dict[str, Any] = {
    "model": {"factory": "net.py:dropout"},
    "epochs": 3,
    "batch": 10,
    "checkpoint": {"every_epochs": 1},
}


def label(folder: Path, loop: Path) -> None:
    """Labels what the loop waits for, if it waits; twice changes nothing."""
    labels = {pick["sha256"]: find_truth(pick["name"]) for pick in list_waiting(loop)}
    Store(folder / "store").label("digits", labels, by="ben")


def collect(loop: Path) -> list[Any]:
    """What must not depend on kills: versions, picks, weights, gates."""
    names = ("begin", "mine", "label", "train", "gate")
    found: list[Any] = []
    for stage in read_journal(loop):
        facts = stage["facts"]
        keys = ("version", "picks", "weights_sha256", "accuracy", "labelled", "won", "lost", "gain_in_all")
        found.append((stage["round"], stage["name"], [facts.get(key) for key in keys]))
        assert stage["name"] in names
    return found


@pytest.mark.check
# At least seven processes that load torch, most of which train.
@pytest.mark.timeout(900)
def test_a_loop_that_is_killed_anywhere_gives_the_same(tmp_path: Path) -> None:
    """Killed (kill -9) at places that differ from process to process, from its first stage to its last."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        make_loop(folder, recipe=RECIPE, rounds=1)
    settings, out = whole / "loop.yaml", whole / "loop"
    headway("loop", settings, "--out", out, "--once")
    label(whole, out)
    assert headway("loop", settings, "--out", out, "--once", "--json").json()["state"] == "finished"

    loop, generator, kills, state = cut / "loop", random.Random(3), 0, ""
    while state != "finished":
        with running("loop", cut / "loop.yaml", "--out", loop, "--once", "--json") as process:
            # So many new files after the start, of whatever kind: a record, a checkpoint, a pick, weights.
            patience, seen = generator.randrange(1, 40), count_files(loop)
            while process.poll() is None and count_files(loop) - seen < patience:
                time.sleep(0.002)
            if process.poll() is None and kills < 5:
                process.kill()
                kills += 1
            out_text, errors = process.communicate()
        if process.returncode == 0:
            state = json.loads(out_text)["state"]
            if state == "waiting":
                label(cut, loop)
        else:
            assert process.returncode == -signal.SIGKILL, errors
    assert kills >= 3
    assert collect(loop) == collect(out)


def count_files(folder: Path) -> int:
    # Folders may vanish while they are counted.
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder))


@pytest.mark.check
@pytest.mark.timeout(900)
def test_a_signal_stops_a_loop_which_then_goes_on(tmp_path: Path) -> None:
    """SIGTERM while it waits: it says how to go on. Two processes do not run one loop."""
    settings, out = make_loop(tmp_path, members=1, rounds=1), tmp_path / "loop"
    with running("loop", settings, "--out", out) as process:
        while not any(stage["name"] == "mine" for stage in read_journal(out)):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        second = finished("loop", settings, "--out", out, "--once")
        assert second.status == 2
        assert "another process" in second.err
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert process.returncode == 1
    assert f"headway loop {settings}" in errors
    label(tmp_path, out)
    assert headway("loop", settings, "--out", out, "--json").json()["state"] == "finished"


@pytest.mark.check
@pytest.mark.timeout(900)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=lambda end: end.name)
def test_a_verification_that_was_killed_runs_again(tmp_path: Path, end: signal.Signals) -> None:
    """The program of the loop that was killed does not go on beside the new one."""
    settings, out, calls = make_loop(tmp_path, members=1, rounds=1), tmp_path / "loop", tmp_path / "calls.txt"
    headway("loop", settings, "--out", out, "--once")
    judge_by_hand(out, (3.0, 2.0))
    script = 'echo $$ ${1##*/} >> calls.txt; while [ ! -e "go${1##*/}" ]; do sleep 0.05; done; '
    command = ["sh", "-c", script + 'echo "{\\"crashes\\": $(cat "$0/score.txt")}"']
    verify = {"command": command, "metric": "crashes", "better": "lower"}
    settings.write_text(yaml.safe_dump(yaml.safe_load(settings.read_text()) | {"export": {}, "verify": verify}))
    (tmp_path / "go0").touch()
    with running("loop", settings, "--out", out) as process:
        # The program may begin before the loop has noted which process it is.
        noted = out / "rounds/1/verify" / PROCESS
        while not noted.exists() or calls.read_text().count("\n") < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(end)
        process.communicate()
    first = int(calls.read_text().split()[2])
    # SIGTERM ends the program with the loop.
    assert psutil.pid_exists(first) == (end == signal.SIGKILL)
    assert read_journal(out)[-1]["name"] == "verify"
    assert read_journal(out)[-1]["round"] == 0
    # Frozen, so that it does not end by itself.
    if end == signal.SIGKILL:
        os.kill(first, signal.SIGSTOP)
    (tmp_path / "go1").touch()
    assert headway("loop", settings, "--out", out, "--json").json()["accepted"] == 1
    assert not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE
    assert [line.split()[1] for line in calls.read_text().splitlines()] == ["0", "1", "1"]


@pytest.mark.check
@pytest.mark.timeout(900)
def test_labels_by_post_and_an_export(tmp_path: Path) -> None:
    """The loop waits, a client labels over HTTP, and the loop goes on by itself to a network that passed all gates."""
    count = 'echo "{\\"files\\": $(find "$0" -name pipeline.json | wc -l)}"'
    verify = {"command": ["sh", "-c", count], "metric": "files"}
    settings = make_loop(tmp_path, members=1, rounds=1, export={"to": ["onnx"]}, verify=verify)
    out = tmp_path / "loop"
    with serving_data(tmp_path / "store") as served, running("loop", settings, "--out", out, "--json") as process:
        client = Client(served.started["url"])
        while not any(stage["name"] == "mine" for stage in read_journal(out)):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        picks = list_waiting(out)
        # In two requests: half of the labels is not enough. One is that of the label page.
        changes = [
            {"op": "label", "sha256": pick["sha256"], "label": find_truth(pick["name"]), "by": "carla"}
            for pick in picks[::2]
        ]
        client.change("digits", changes, if_match=client.describe("digits")["version"])
        (queue,) = client.list_queues("digits")
        rest = [one for one in client.list_queue_samples("digits", queue["queue"]) if one["label"] is None]
        labels: dict[str, str | None] = {one["sha256"]: find_truth(one["name"]) for one in rest}
        assert len(labels) == 10
        assert client.answer("digits", queue["queue"], labels, by="carla")["labelled"] == 10
        text, errors = process.communicate()
        shutil.copytree(out / "rounds/0/members/1", tmp_path / "store/runs/first")
        mined = client.wait(client.start_mining("digits", ["first"], strategy="margin", count=5, seed=1))
        assert (mined["size"], mined["about"]["strategy"]) == (5, "margin")
        samples = list(client.list_queue_samples("digits", mined["queue"]))
        assert [one["label"] for one in samples] == [None] * 5
    assert process.returncode == 0, errors
    assert json.loads(text)["accepted"] == 1
    assert find_stage(out, 1, "export")["passed"]
    # Round 0 is exported too, since its number is what that of round 1 is compared with.
    assert [find_stage(out, number, "verify")["value"] for number in (0, 1)] == [1, 1]
    assert open_manifest(out / "rounds/1/export").run["folder"] == str(out / "rounds/1/members/1")
    said = headway("lineage", out / "rounds/1/members/1/weights.safetensors").out
    assert "20 by carla" in said
