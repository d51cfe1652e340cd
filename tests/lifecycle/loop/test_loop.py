"""`headway loop` in one process: rounds, labels that come through the store, and all that it refuses."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import NoReturn, cast

import numpy as np
import pytest
import yaml
from tests._support import digits_arrays, headway, refused, write_recipe
from tests.lifecycle.loop._loops import (
    find_stage,
    find_truth,
    judge_by_hand,
    list_waiting,
    make_loop,
    read_journal,
    set_labels,
)

from headway.export.targets import target
from headway.lifecycle.loop import run_loop
from headway.lifecycle.loop.labels import count_labels, read_picks
from headway.lifecycle.loop.loop_folder import LoopFolder
from headway.lifecycle.loop.offer import offer_picks, read_marks
from headway.lifecycle.mining.mine import NothingToMineError
from headway.lifecycle.service.labelling.database import FILE, LabelDatabase
from headway.lifecycle.service.labelling.records import Mark, Role
from headway.lifecycle.service.server import FOLDER
from headway.lifecycle.store.store import Store


def change(path: Path, **values: object) -> None:
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values, sort_keys=False))


def test_two_rounds_with_labels_from_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a recipe and a data set to a network that names its labels; --once leaves where labels are missing."""
    settings, out = make_loop(tmp_path, recipe={"epochs": 1}), tmp_path / "loop"
    store = Store(tmp_path / "store")
    run = ("loop", settings, "--out", out, "--once", "--json")
    first = headway(*run).json()
    assert (first["state"], first["missing"], first["accepted"]) == ("waiting", 20, 0)
    drawn, held_out = set[str](), {one.sample for one in store.list_samples("digits@v3/eval")}
    # Nothing is done twice while labels are missing.
    journal = read_journal(out)
    assert headway(*run).json()["missing"] == 20
    assert read_journal(out) == journal
    for number in (1, 2):
        picks = list_waiting(out)
        arms = [pick["arm"] for pick in picks]
        assert arms == ["random"] * 4 + ["margin"] * 16
        path = set_labels(out)
        headway("dataset", "label", "digits", "--list", path, "--store", tmp_path / "store", "--by", "ben")
        said = headway(*run).json()
        assert said["state"] == ("waiting" if number == 1 else "finished")
        label = find_stage(out, number, "label")
        assert label["labelled"] == 20
        version = f"digits@{label['version']}"
        # The names of new labels send a fifth of them to eval; mined images do not go there.
        splits = {one.sample: one.split for one in store.list_samples(version)}
        # `headway dataset gc --keep` leaves versions with a tag.
        tag = f"digits-round-{number}-{label['version'][:12]}"
        assert store.resolve(f"digits@{tag}").version == label["version"]
        assert {splits[pick["sha256"]] for pick in picks if pick["arm"] != "random"} == {"train"}
        drawn |= {pick["sha256"] for pick in picks if pick["arm"] == "random"}
        assert held_out <= {one for one, split in splits.items() if split == "eval"} <= held_out | drawn
        wrong = sum(pick["proposed"] != find_truth(pick["name"]) for pick in picks)
        assert sum(arm["wrong"] for arm in label["review"]["arms"]) == wrong
        recipe = yaml.safe_load((out / f"rounds/{number}/members/2/recipe.yaml").read_text())
        assert recipe["data"]["train"] == f"store:{tmp_path}/store//digits@{label['version']}/train"
        assert recipe["data"]["eval"].endswith(f"@{store.resolve('digits@v3').version}/eval")
        train = find_stage(out, number, "train")
        assert train["images"] == sum(split == "train" for split in splits.values())
        assert 32 + 20 * number <= train["images"] <= 40 + 20 * number
        assert train["eval_images"] == 100
    assert store.count_setters("digits") == {"anna": 140, "ben": 40}
    seeds = [yaml.safe_load((out / f"rounds/2/members/{k}/recipe.yaml").read_text())["seed"] for k in (1, 2)]
    assert seeds[1] == seeds[0] + 1
    gate = find_stage(out, 2, "gate")
    accuracies = [find_stage(out, number, "train")["accuracy"] for number in (0, 1, 2)]
    assert gate["against"] == 1
    assert gate["drop"] == pytest.approx(100 * (accuracies[1][0] - accuracies[2][0]))
    assert gate["gain_in_all"]["mean"] == pytest.approx(np.mean(accuracies[2]) - np.mean(accuracies[0]), abs=1e-5)
    # Its own count agrees with `headway evaluate`.
    monkeypatch.chdir(tmp_path)
    assert headway("evaluate", out / "rounds/2/members/1", "--json").json()["accuracy"] == pytest.approx(
        accuracies[2][0], abs=1e-6
    )
    page = (out / "loop.html").read_text()
    for words in ("Accuracy by labelled images", "What each arm gave", "Cost", "random"):
        assert words in page
    text = headway("loop", settings, "--out", out).out
    assert "It waits" not in text
    assert f"Network: {out}/rounds/2/members/1" in text
    said = headway("lineage", out / "rounds/2/members/1/weights.safetensors").out
    assert find_stage(out, 2, "label")["version"] in said
    assert "40 by ben" in said


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loop that waits for the labels of its first round; a test must leave it as it was."""
    folder = tmp_path_factory.mktemp("waiting")
    headway("loop", make_loop(folder, members=1), "--out", folder / "loop", "--once")
    return folder


def test_settings_that_made_the_networks_stay(waiting: Path) -> None:
    settings, before = waiting / "loop.yaml", (waiting / "loop.yaml").read_text()
    run = ("loop", settings, "--out", waiting / "loop", "--once")
    for values, word in (({"members": 2}, "members"), ({"mine": {"count": 21}}, "mine")):
        change(settings, **values)
        assert f"another {word}" in refused(*run, status=2)
        settings.write_text(before)
    change(settings, rounds=7, gate={"drop": 1})
    assert headway(*run, "--json").json()["state"] == "waiting"
    settings.write_text(before)
    recipe = (waiting / "recipe.yaml").read_text()
    (waiting / "recipe.yaml").write_text(recipe + "seed: 5\n")
    assert "the recipe has changed" in refused(*run, status=2)
    (waiting / "recipe.yaml").write_text(recipe)
    with LoopFolder(waiting / "loop").lock():
        assert "loop: another process runs this loop. Wait for it" in refused(*run, status=2)


def test_a_recipe_that_was_refused_may_be_mended(tmp_path: Path) -> None:
    settings = make_loop(tmp_path, members=1, recipe={"model": {"factory": "net.py:liner"}})
    run = ("loop", settings, "--out", tmp_path / "loop", "--once")
    assert "liner" in refused(*run, status=2)
    assert [stage["name"] for stage in read_journal(tmp_path / "loop")] == ["begin"]
    write_recipe(tmp_path / "recipe.yaml")
    assert headway(*run, "--json").json()["state"] == "waiting"
    assert [stage["name"] for stage in read_journal(tmp_path / "loop")] == ["begin", "train", "mine"]


def test_the_first_version_has_a_tag(waiting: Path) -> None:
    """All rounds are compared on its evaluation split, so `headway dataset gc --keep` must leave it."""
    version = find_stage(waiting / "loop", 0, "begin")["version"]
    assert Store(waiting / "store").resolve(f"digits@digits-round-0-{version[:12]}").version == version


def test_a_pool_of_near_copies_ends_the_loop(waiting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay in the pool for ever, so it is never empty."""
    shutil.copytree(waiting, tmp_path / "copy")
    settings, out = tmp_path / "copy/loop.yaml", tmp_path / "copy/loop"
    # As it was before it mined.
    tree = json.loads((out / "journal.json").read_text())
    tree["stages"] = [stage for stage in tree["stages"] if stage["name"] != "mine"]
    (out / "journal.json").write_text(json.dumps(tree))
    shutil.rmtree(out / "rounds/1")

    def refuse(*_: object) -> NoReturn:
        raise NothingToMineError("every image of the pool is a copy of a known one")

    monkeypatch.setattr(run_loop, "mine", refuse)
    for _ in range(2):
        said = headway("loop", settings, "--out", out, "--json").json()
        assert (said["state"], said["accepted"]) == ("finished", 0)
    assert find_stage(out, 1, "mine") == {"picks": 0, "pool": 120}


def test_a_damaged_journal_is_named(waiting: Path) -> None:
    path = waiting / "loop/journal.json"
    before = path.read_bytes()
    for damage in (before[:-40], before.replace(b'"begin"', b'"beginning"'), b"[]"):
        path.write_bytes(damage)
        assert "the journal is damaged" in refused("loop", waiting / "loop.yaml", "--out", waiting / "loop", status=1)
    path.write_bytes(before)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data": "digits.packed"}, "is not in a store"),
        ({"data": "store:digits@v3"}, "newest version"),
        ({"members": 0}, "members"),
        ({"mine": {"random_share": 0}}, "random_share"),
        ({"mine": {"strategy": "magic"}}, "strategy"),
        ({"lables": {}}, "labels"),
        ({"name": "../x"}, "name"),
        ({"verify": {"command": ["true"], "metric": "score"}, "export": None}, "verify judges the export"),
        ({"verify": {"command": [], "metric": "score"}}, "verify.command"),
        ({"export": {"to": ["onnx", "onx"]}}, "there is no target 'onx'. Did you mean 'onnx'?"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_wrong_setting_is_named(values: dict[str, object], words: str, tmp_path: Path) -> None:
    tree: dict[str, object] = {"data": "store:digits", "recipe": "recipe.yaml"}
    (tmp_path / "loop.yaml").write_text(yaml.safe_dump(tree | values))
    assert words in refused("loop", tmp_path / "loop.yaml", "--out", tmp_path / "loop", status=2)
    assert not (tmp_path / "loop").exists()


def test_labels_are_counted_by_the_bytes_of_a_sample(waiting: Path) -> None:
    """An image that is renamed or moved is still the same pick; one that is removed is not waited for."""
    store, picks = Store(waiting / "store"), read_picks(waiting / "loop/rounds/1/picks.json")
    store.create("copy", start="digits")

    def count() -> tuple[int, int, int]:
        found = count_labels(store.read_rows("copy"), picks)
        return found.labelled, found.removed, found.missing

    assert count() == (0, 0, 20)
    store.label("copy", {picks[0].sha256: "3", picks[1].name: "4"})
    store.remove("copy", [picks[2].name])
    assert count() == (2, 1, 17)
    found = count_labels(store.read_rows("copy"), picks)
    assert found.labels[:3] == ("3", "4", None)
    assert found.is_enough(0.15)
    assert not found.is_enough(0.2)


def test_nobody_waits_for_images_that_people_are_not_sure_of(waiting: Path) -> None:
    """The picks are a queue of the label page; what people say there counts, second opinions apart."""
    store, mined = Store(waiting / "store"), waiting / "loop/rounds/1/mined"
    picks = read_picks(waiting / "loop/rounds/1/picks.json")
    store.create("other", start="digits")
    version = store.resolve("other").version
    queue = offer_picks(store, "other", version, mined, "first")
    assert offer_picks(store, "other", version, mined, "again") == queue
    assert find_stage(waiting / "loop", 1, "mine")["queue"] != queue
    assert read_marks(store, "other", queue) == (frozenset(), 0)
    samples = [bytes.fromhex(pick.sha256) for pick in picks]
    with closing(LabelDatabase(store.folder / FOLDER / FILE)) as database:
        (listed,) = database.list_queues("other")
        assert (listed.queue, listed.name, listed.size, listed.version) == (queue, "first", 20, version)
        assert [pick.sample for pick in database.read_picks(queue)] == samples
        for number, (sample, label, role) in enumerate(
            [(samples[0], None, "first"), (samples[1], "3", "first"), (samples[1], None, "second")]
        ):
            mark = Mark(sample, f"person {number}", label, cast(Role, role), 1.5, float(number), version)
            database.set_marks("other", queue, "grid", [mark])
    marks = read_marks(store, "other", queue)
    assert marks == (frozenset({picks[0].sha256}), 4.5)
    found = count_labels(store.read_rows("other"), picks, marks.unsure)
    assert (found.labelled, found.unsure, found.missing) == (0, 1, 19)
    store.label("other", {picks[0].sha256: "1"})
    found = count_labels(store.read_rows("other"), picks, marks.unsure)
    assert (found.labelled, found.unsure, found.missing) == (1, 0, 19)


@pytest.mark.check
def test_no_other_class_may_come(tmp_path: Path) -> None:
    """Networks of other classes cannot be compared with those before. Once the labels are corrected, it goes on."""
    settings, out = make_loop(tmp_path, members=1, rounds=1, mine={"count": 2}), tmp_path / "loop"
    store = Store(tmp_path / "store")
    # Without a fixed list of classes.
    rows = {one.name: one.label for one in store.list_samples("digits")}
    assert set(rows.values()) == {None, *map(str, range(10))}
    store.create("free")
    labels = digits_arrays()[1]
    for part in ("labelled", "eval"):
        store.add("free", tmp_path / part, split="train" if part == "labelled" else "eval")
    store.add("free", tmp_path / "pool", unlabelled=True)
    assert len(set(labels[:40].tolist())) == 10
    change(settings, data=f"store:{tmp_path}/store//free")
    headway("loop", settings, "--out", out, "--once")
    picks = list_waiting(out)
    store.label("free", {pick["sha256"]: "a new one" for pick in picks})
    said = refused("loop", settings, "--out", out, status=2)
    assert "'a new one'" in said
    assert all(repr(pick["name"]) in said for pick in picks)
    assert [stage["name"] for stage in read_journal(out)] == ["begin", "train", "mine"]
    store.label("free", {pick["sha256"]: find_truth(pick["name"]) for pick in picks})
    assert headway("loop", settings, "--out", out, "--once", "--json").json()["state"] == "finished"


def test_what_is_missing_is_said_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_loop(tmp_path)
    store = Store(tmp_path / "store")
    store.create("empty")
    store.add("empty", tmp_path / "labelled")
    change(settings, data=f"store:{tmp_path}/store//empty")
    said = refused("loop", settings, "--out", tmp_path / "loop", status=2)
    assert "no images to choose from" in said
    assert f"headway dataset add empty IMAGES --unlabelled --store {tmp_path / 'store'}" in said
    store.create("blind")
    store.add("blind", tmp_path / "labelled", split="train")
    change(settings, data=f"store:{tmp_path}/store//blind")
    assert "IMAGES --split eval --store" in refused("loop", settings, "--out", tmp_path / "loop", status=2)
    assert json.dumps(read_journal(tmp_path / "loop")) == "[]"
    verify = {"command": ["no-such-program"], "metric": "score"}
    change(settings, data=f"store:{tmp_path}/store//digits", export={"to": ["onnx"]}, verify=verify)
    said = refused("loop", settings, "--out", tmp_path / "loop", status=2)
    assert "verify.command: there is no program 'no-such-program' that can be run. Name one on the PATH" in said
    change(settings, verify=None)
    monkeypatch.setattr(target, "find_spec", lambda name: None if name == "onnxscript" else object())
    said = refused("loop", settings, "--out", tmp_path / "loop", status=2)
    assert "export.to" in said
    assert "the target onnx needs onnxscript" in said
    assert json.dumps(read_journal(tmp_path / "loop")) == "[]"


# Notes whose export it has judged.
SIMULATE = 'echo "${1##*/}" >> calls.txt; echo "{\\"score\\": $(cat "$0/score.txt"), \\"other\\": 1}"'
VERIFY = {"command": ["sh", "-c", SIMULATE], "metric": "score"}


def test_a_program_of_the_users_decides_too(waiting: Path, tmp_path: Path) -> None:
    """Its number of the new network is compared with that of the accepted one, and each is measured once."""
    folder = tmp_path / "copy"
    shutil.copytree(waiting, folder)
    settings, out = folder / "loop.yaml", folder / "loop"
    judge_by_hand(out, (0.8, 0.7))
    change(settings, export={"to": ["onnx"]}, rounds=1, verify=VERIFY | {"drop": 0.05})
    run = ("loop", settings, "--out", out, "--json")

    def read_calls() -> list[str]:
        return (folder / "calls.txt").read_text().split()

    # A program that fails is no verdict, and nothing is noted.
    (out / "rounds/1/export/score.txt").rename(out / "score.txt")
    assert "it is not JSON" in refused(*run, status=1)
    assert [stage["name"] for stage in read_journal(out)][-2:] == ["export", "verify"]
    (out / "score.txt").rename(out / "rounds/1/export/score.txt")
    said = headway(*run).json()
    assert (said["state"], said["accepted"]) == ("finished", 0)
    assert find_stage(out, 0, "verify") | {"program": ""} == {
        "program": "", "metric": "score", "better": "higher", "value": 0.8, "against": None, "before": None,
        "allowed": 0.05, "passed": True,
    }  # fmt: skip
    found = find_stage(out, 1, "verify")
    assert (found["value"], found["before"], found["against"], found["passed"]) == (0.7, 0.8, 0, False)
    # Of round 0, whose number was journalled before the program failed, once.
    assert read_calls() == ["0", "1", "1"]
    # What is decided stays, also with another limit.
    change(settings, verify=VERIFY | {"drop": 0.2})
    assert headway(*run).json()["accepted"] == 0
    assert read_calls() == ["0", "1", "1"]
    text = headway(*run[:-1]).out
    assert "Verification of round 1: refused: score 0.7, that of round 0 0.8; higher is better." in text
    assert "verification refused" in text
    page = (out / "loop.html").read_text()
    for words in ("Verification by round", "score, higher is better", "verification refused"):
        assert words in page
    # Another program measures something else, so the accepted network is measured anew.
    tree = json.loads((out / "journal.json").read_text())
    tree["stages"].pop()
    (out / "journal.json").write_text(json.dumps(tree))
    change(settings, verify=VERIFY | {"drop": 0.1, "command": ["sh", "-c", SIMULATE + " # again"]})
    assert headway(*run).json()["accepted"] == 1
    assert read_calls() == ["0", "1", "1", "0", "1"]


def test_a_first_export_that_its_gate_refused_is_not_compared_with(waiting: Path, tmp_path: Path) -> None:
    """Otherwise no round could ever be accepted."""
    folder = tmp_path / "copy"
    shutil.copytree(waiting, folder)
    settings, out = folder / "loop.yaml", folder / "loop"
    judge_by_hand(out, (0.8, 0.7), first_passed=False)
    change(settings, export={"to": ["onnx"]}, rounds=1, verify=VERIFY)
    assert headway("loop", settings, "--out", out, "--json").json()["accepted"] == 1
    assert (folder / "calls.txt").read_text().split() == ["1"]
    assert find_stage(out, 1, "verify")["before"] is None
    # A finished loop asks for its program no more.
    change(settings, verify=VERIFY | {"command": ["no-such-program"]})
    assert headway("loop", settings, "--out", out, "--json").json()["accepted"] == 1
