"""Parts of the label page without a server: agreement, bodies, the choice of samples, leases, and a kill in between."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lifecycle.service._labelling import CLASSES, build_picks, name_image
from tests.lifecycle.service._service import draw

from headway.core.untrusted_json import JsonError
from headway.http.problems import ProblemError
from headway.lifecycle.service.datasets import Datasets
from headway.lifecycle.service.jobs import Job
from headway.lifecycle.service.labelling import labelling as module
from headway.lifecycle.service.labelling.agreement import compare_people, compute_kappa
from headway.lifecycle.service.labelling.labelling import Labelling
from headway.lifecycle.service.labelling.mining_job import plan_mining, run_mining
from headway.lifecycle.service.labelling.parsing import GivenLabels, parse_labels, parse_queue, parse_wish
from headway.lifecycle.service.labelling.records import EVERYTHING, GivenLabel, Mark, Role, Wish
from headway.lifecycle.service.labelling.selection import is_double
from headway.lifecycle.service.processes import Command
from headway.lifecycle.service.tokens import LOCAL
from headway.lifecycle.store.records import Change
from headway.lifecycle.store.rows import Names
from headway.lifecycle.store.store import Store

PAIRS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1, max_size=60)
GRIDS = tuple(f"{number:032x}" for number in range(9))


def test_kappa_of_a_known_table() -> None:
    """Agreement 0.7, 0.5 of it by chance."""
    table = [("y", "y")] * 20 + [("y", "n")] * 5 + [("n", "y")] * 10 + [("n", "n")] * 15
    assert compute_kappa(table) == pytest.approx(0.4)


@given(PAIRS)
def test_kappa_is_symmetrical_and_one_for_equal_people(pairs: list[tuple[str, str]]) -> None:
    found = compute_kappa(pairs)
    swapped = compute_kappa([(second, first) for first, second in pairs])
    assert found == pytest.approx(swapped) if found is not None else swapped is None
    assert found is None or found <= 1
    equal = compute_kappa([(first, first) for first, _ in pairs])
    assert equal is None if len({first for first, _ in pairs}) == 1 else equal == pytest.approx(1)


def test_kappa_of_labels_by_chance_is_near_zero() -> None:
    draws = np.random.default_rng(0).integers(0, 4, (20_000, 2)).tolist()
    found = compute_kappa([(str(first), str(second)) for first, second in draws])
    assert found is not None
    assert abs(found) < 0.02


def test_who_is_not_sure_is_left_out_of_the_agreement() -> None:
    def mark(by: str, label: str | None, role: Role = "first") -> Mark:
        return Mark(b"", by, label, role, 1.0, 0.0, "")

    groups = [[mark("a", "cat"), mark("b", "cat", "second")], [mark("b", None), mark("a", "dog")], [mark("c", "cat")]]
    # Who looks again has seen the other label.
    groups.append([mark("a", "cat"), mark("b", "cat", "again")])
    (found,) = compare_people(groups)
    assert (found.first, found.second, found.samples, found.equal) == ("a", "b", 1, 1)
    assert compute_kappa([]) is None


BAD_QUEUES: list[Any] = [
    {},
    {"picks": {}},
    {"picks": []},
    {"picks": [1]},
    {"picks": [{}]},
    {"picks": [{"name": 3}]},
    {"picks": [{"name": "a", "proposed": ["x"]}]},
    {"picks": [{"sha256": "A" * 64}]},
    {"picks": [{"name": "a", "probability": "much"}]},
    {"picks": [{"name": "a", "copies": -1}]},
    {"picks": [{"name": "\ud800"}]},
    {"picks": [{"name": "a"}], "name": "two\nlines"},
    {"listed": [{"name": "a", "suggested": 1}]},
]


@pytest.mark.parametrize("tree", BAD_QUEUES)
def test_a_queue_that_is_none_is_refused(tree: Any) -> None:
    with pytest.raises(JsonError):
        parse_queue(tree)


def test_results_of_mining_and_of_label_errors_become_queues() -> None:
    mined = parse_queue(build_picks(range(4)))
    assert (mined.kind, mined.name, mined.about["runs"]) == ("mine", "margin", ["runs/first"])
    # The copies that are out because of an image of the pool.
    assert [row["copies"] for row in mined.rows] == [0, 2, 0, 0]
    row = {"sample": 0, "name": "a", "label": "cat", "suggested": "dog", "probability": 0.9, "suspect": "yes"}
    doubts = parse_queue({"set": "x", "images": 9, "listed": [row], "estimated_noise": 0.1})
    assert (doubts.kind, doubts.rows[0]["proposed"], doubts.rows[0]["arm"]) == ("label-errors", "dog", "suspect")
    assert doubts.about["estimated_noise"] == 0.1


@pytest.mark.parametrize(
    "tree",
    [
        {"count": 1000},
        {"queue": "x"},
        {"queue": None},
        {"differs": 1},
        {"again": -1},
        {"by": " anna"},
        {"by": "a" * 100},
        {"class": 3},
        {"slice": "x" * 201},
    ],
)
def test_a_wish_that_is_none_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(JsonError):
        parse_wish(tree)


def test_labels_that_are_none_are_refused() -> None:
    row = {"sha256": "0" * 64, "label": "cat", "seconds": 1}
    assert parse_labels({"labels": [row]}).labels == [GivenLabel(bytes(32), "cat", 1.0)]
    assert parse_labels({"labels": [row | {"accepted": True}]}).labels == [GivenLabel(bytes(32), "cat", 1.0, True)]
    for rows in (
        [],
        [row, row],
        [row | {"accepted": 1}],
        [row | {"label": " "}],
        [row | {"seconds": -1}],
        [row | {"sha256": "x"}],
        [{}],
    ):
        with pytest.raises(JsonError):
            parse_labels({"labels": rows})


@pytest.fixture
def labelling(tmp_path: Path) -> Iterator[Labelling]:
    """A store with 60 images without labels; `pool`."""
    store = Store.make(tmp_path / "store")
    store.create("pool", splits={"train": 1.0})
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:05d}.jpg").write_bytes(draw(number))
    store.add("pool", folder, prefix="pool/", unlabelled=True)
    service = store.folder / "service"
    service.mkdir()
    found = Labelling(service, Datasets(store, service))
    yield found
    found.close()


def take(labelling: Labelling, grid: str, by: str, **wish: Any) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = labelling.lease_grid("pool", grid, Wish(**wish), by, LOCAL)["samples"]
    return samples


def give(labelling: Labelling, labels: dict[str, str | None], by: str, request: str, *, again: bool = False) -> Any:
    rows = [GivenLabel(bytes.fromhex(sample), label, 1.5) for sample, label in labels.items()]
    return labelling.set_labels("pool", GivenLabels("", EVERYTHING, by, again, rows), LOCAL, request)


def test_nobody_gets_what_somebody_else_has(labelling: Labelling, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = take(labelling, GRIDS[0], "anna"), take(labelling, GRIDS[1], "ben")
    third = take(labelling, GRIDS[2], "anna")
    ids = [[one["sha256"] for one in grid] for grid in (first, second, third)]
    assert [len(grid) for grid in ids] == [24, 24, 12]
    assert len({*ids[0], *ids[1], *ids[2]}) == 60
    # The same grid again is the same samples, and a renewal takes no others.
    assert take(labelling, GRIDS[0], "anna") == first
    assert take(labelling, GRIDS[3], "ben", count=0) == []
    # What is given back, or whose time is over, others get.
    labelling.end_grid("pool", GRIDS[2])
    assert [one["sha256"] for one in take(labelling, GRIDS[3], "ben")] == ids[2]
    monkeypatch.setattr(module, "LEASE_S", -1.0)
    take(labelling, GRIDS[0], "anna", count=0)
    assert [one["sha256"] for one in take(labelling, GRIDS[4], "ben")] == ids[0]
    # A grid that has lost its samples is told so.
    assert take(labelling, GRIDS[0], "anna", count=0) == []


def test_a_kill_between_version_and_marks_loses_and_doubles_nothing(
    labelling: Labelling, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [one["sha256"] for one in take(labelling, GRIDS[0], "anna")]
    labels: dict[str, str | None] = dict.fromkeys(samples, "cat")

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(labelling.database), "set_marks", die)
        with pytest.raises(KeyboardInterrupt):
            give(labelling, labels, "anna", "request-1")
    assert labelling.read_marks("pool", EVERYTHING) == {}
    answer = give(labelling, labels, "anna", "request-1")
    assert (answer.status, answer.body["relabelled"]) == (201, 24)
    assert len(labelling.read_marks("pool", EVERYTHING)) == 24
    assert [one.number for one in labelling.datasets.list_history("pool")] == [2, 1, 0]


def test_the_first_label_stands_and_a_second_one_counts_for_the_agreement(labelling: Labelling) -> None:
    _, rows = labelling.datasets.read_rows("pool")
    doubles = [key.hex() for key in (bytes(one) for one in rows.sample_id) if is_double(key)]
    assert doubles, "none of the images is one that two people get"
    everything = {bytes(one).hex(): "cat" for one in rows.sample_id}
    give(labelling, dict(everything), "anna", "r1")
    # Anna gets nothing any more, and Ben the ones that two people get, as if they had no label.
    assert take(labelling, GRIDS[0], "anna", split="unlabelled") == []
    seen = take(labelling, GRIDS[1], "ben", split="unlabelled")
    assert sorted(one["sha256"] for one in seen) == sorted(doubles)
    assert {(one["label"], one["split"]) for one in seen} == {(None, "unlabelled")}
    answer = give(labelling, dict.fromkeys(doubles, "dog"), "ben", "r2")
    assert (answer.status, answer.body["second"], answer.body["labelled"]) == (200, len(doubles), 0)
    _, rows = labelling.datasets.read_rows("pool")
    assert rows.classes == ("cat",)
    assert take(labelling, GRIDS[2], "carl", split="unlabelled") == []
    # Whoever settles it changes the label.
    answer = give(labelling, {doubles[0]: "dog"}, "ben", "r3", again=True)
    assert (answer.status, answer.body["labelled"]) == (201, 1)


def test_a_label_after_somebody_was_not_sure_is_the_first_one(labelling: Labelling) -> None:
    """The sample has no label yet, so what the second person says is not for the agreement alone."""
    _, rows = labelling.datasets.read_rows("pool")
    sample = next(key.hex() for key in (bytes(one) for one in rows.sample_id) if is_double(key))
    give(labelling, {sample: None}, "anna", "r1")
    assert sample in {one["sha256"] for one in take(labelling, GRIDS[0], "ben", count=60)}
    answer = give(labelling, {sample: "cat"}, "ben", "r2")
    assert (answer.status, answer.body["second"], answer.body["labelled"]) == (201, 0, 1)
    # From now on it has one, and others are second.
    assert give(labelling, {sample: "dog"}, "carl", "r3").body["second"] == 1
    _, rows = labelling.datasets.read_rows("pool")
    assert [rows.get_sample(row).label for row in range(len(rows)) if rows.get_sample(row).sample == sample] == ["cat"]


def test_a_proposal_that_was_accepted_replaces_no_label(labelling: Labelling) -> None:
    """Somebody has labelled two images by another way since the grid was shown."""
    samples = [one["sha256"] for one in take(labelling, GRIDS[0], "anna", count=3)]
    changes = [Change(operation="label", sample=sample, label="dog") for sample in samples[:2]]
    labelling.datasets._store.apply("pool", changes)
    # The first one was accepted unseen, the second one by a key.
    rows = [GivenLabel(bytes.fromhex(sample), "cat", 1.5, place != 1) for place, sample in enumerate(samples)]
    answer = labelling.set_labels("pool", GivenLabels(GRIDS[0], EVERYTHING, "anna", False, rows), LOCAL, "r1")
    assert (answer.body["labelled"], answer.body["kept"]) == (2, 1)
    found = {one.sample: one.label for one in Store(labelling.datasets.folder).list_samples("pool")}
    assert [found[sample] for sample in samples] == ["dog", "cat", "cat"]
    # It comes again, so that somebody sees its label.
    again = {one["sha256"]: one["label"] for one in take(labelling, GRIDS[1], "anna", count=60)}
    assert samples[1] not in again
    assert again[samples[0]] == "dog"
    # Who does not see the first person's label says what another one is worth, also by Enter.
    rows = [GivenLabel(bytes.fromhex(samples[1]), "dog", 1.5, True)]
    answer = labelling.set_labels("pool", GivenLabels("", EVERYTHING, "ben", False, rows), LOCAL, "r2")
    assert (answer.body["kept"], answer.body["second"]) == (0, 1)


def test_looking_again_ends(labelling: Labelling) -> None:
    """Each sample comes once more, and not for ever."""
    _, rows = labelling.datasets.read_rows("pool")
    give(labelling, {bytes(one).hex(): "cat" for one in rows.sample_id}, "anna", "r1")
    now = labelling.lease_grid("pool", GRIDS[8], Wish(count=0), "anna", LOCAL)["now_s"]
    seen = list[str]()
    for number in range(4):
        samples = [one["sha256"] for one in take(labelling, GRIDS[number], "anna", again=now)]
        seen += samples
        if samples:
            give(labelling, dict.fromkeys(samples, "cat"), "anna", f"again-{number}", again=True)
    assert len(seen) == len(set(seen)) == 60
    assert take(labelling, GRIDS[5], "anna", again=now) == []


def test_filters_choose_what_they_say(labelling: Labelling) -> None:
    tree = build_picks(range(40))
    queue = labelling.add_queue("pool", parse_queue(tree), LOCAL).body["queue"]
    names = {hashlib.sha256(draw(number)).hexdigest(): number for number in range(60)}

    def show(**wish: Any) -> list[int]:
        samples = take(labelling, GRIDS[0], "anna", queue=queue, **wish)
        labelling.end_grid("pool", GRIDS[0])
        return [names[one["sha256"]] for one in samples]

    # In the order of the queue, whatever their IDs.
    assert show(count=40) == list(range(40))
    assert show(label=CLASSES[3]) == [3, 13, 23, 33]
    assert show(has_copies=True) == [1]
    assert show(split="train") == show(differs=True) == show(label="none") == show(slice="night/*") == []
    assert show(slice="pool/0000?.jpg", label=CLASSES[3]) == [3]
    assert show(slice="pool/*", count=40) == show(slice="*/000[0-3]*", count=40) == list(range(40))
    sample = next(one for one, number in names.items() if number == 13)
    labelling.datasets._store.apply("pool", [Change(operation="label", sample=sample, label=CLASSES[4])])
    assert show(differs=True) == show(split="train") == [13]
    assert show(label=CLASSES[4]) == [4, 13, 14, 24, 34]


def test_folders_are_slices(labelling: Labelling, tmp_path: Path) -> None:
    store = Store(labelling.datasets.folder)
    deep = "/".join("dddddddd")
    names = ("a/x/1.jpg", "a/y/1.jpg", "a/y/2.jpg", "b*/1.jpg", "1.jpg", f"{deep}/too/deep/1.jpg", f"{'l' * 199}/1.jpg")
    files = sorted((tmp_path / "images").iterdir())
    store.create("tree", splits={"train": 1.0})
    store.apply(
        "tree", [Change(operation="add", name=name, file=file) for name, file in zip(names, files, strict=False)]
    )
    listed = {one["slice"]: one["samples"] for one in labelling.list_slices("tree")["slices"]}
    levels = {f"{deep[: 2 * depth + 1]}/*": 1 for depth in range(8)}
    assert listed == {"a/*": 3, "a/x/*": 1, "a/y/*": 2, "b[*]/*": 1} | levels
    _, rows = labelling.datasets.read_rows("tree")
    # Each pattern finds as many as are listed, whatever characters a folder has.
    assert {pattern: int(rows.names.match(pattern).sum()) for pattern in listed} == listed


@given(st.lists(st.text("ab/é", max_size=6), max_size=8), st.text("ab/é*?[]!", max_size=6))
def test_names_match_as_fnmatch_has_it(names: list[str], pattern: str) -> None:
    assert Names.build(names).match(pattern).tolist() == [fnmatchcase(name, pattern) for name in names]


def test_a_queue_of_other_images_is_refused(labelling: Labelling) -> None:
    with pytest.raises(ProblemError, match="does not have"):
        labelling.add_queue("pool", parse_queue(build_picks([0, 99])), LOCAL)
    with pytest.raises(ProblemError, match="twice"):
        labelling.add_queue("pool", parse_queue(build_picks([0, 0])), LOCAL)
    # The same content is the same queue.
    first, again = (labelling.add_queue("pool", parse_queue(build_picks([0, 1])), LOCAL) for _ in range(2))
    assert (first.status, again.status) == (201, 200)
    assert json.dumps(first.body["queue"]) == json.dumps(again.body["queue"])


def test_mined_samples_become_training_images(labelling: Labelling, tmp_path: Path) -> None:
    """Where the hash of their names says, half of these would be evaluation images that a network chose."""
    store = Store(labelling.datasets.folder)
    store.create("halves", splits={"train": 0.5, "eval": 0.5})
    store.add("halves", tmp_path / "images", prefix="pool/", unlabelled=True)
    queue = labelling.add_queue("halves", parse_queue(build_picks(range(40), pool="store:halves")), LOCAL).body["queue"]
    ids = {one.name: one.sample for one in store.list_samples("halves")}
    labels = [GivenLabel(bytes.fromhex(sample), "cat", 1.0) for sample in ids.values()]
    labelling.set_labels("halves", GivenLabels("", queue, "anna", False, labels), LOCAL, "r1")
    split = {one.name: one.split for one in store.list_samples("halves")}
    by_hash = Store(labelling.datasets.folder).read_rows("halves").schema
    for place, name in enumerate(name_image(number) for number in range(60)):
        is_mined = place < 40 and place % 5 != 0
        assert split[name] == ("train" if is_mined else by_hash.splits[by_hash.choose_splits([name])[0]])
    assert "eval" in split.values()


class OneRun:
    """Processes of a store with one run, which mines without training anything."""

    def __init__(self, picks: dict[str, Any]) -> None:
        self._picks = picks
        self.commands = list[Command]()

    def list_runs(self) -> list[str]:
        return ["first"]

    def run(self, command: Command, job: Job) -> Any:
        self.commands.append(command)
        command.folder.mkdir(parents=True)
        (command.folder / "mine.json").write_text(json.dumps(self._picks))


def test_a_job_mines_what_has_no_label_and_makes_a_queue(labelling: Labelling) -> None:
    head = labelling.datasets.find_head("pool")
    processes: Any = OneRun(build_picks(range(4), pool=f"store:pool@{head}/unlabelled"))
    folder = labelling.folder / "mined/1"
    command = plan_mining(labelling, processes, "pool", {"runs": ["first"], "count": 4, "seed": 1}, folder)
    assert command.arguments[:2] == ("mine", f"store:pool@{head}/unlabelled")
    assert str(labelling.datasets.folder / "runs/first") in command.arguments
    job = Job("0" * 16, "local", "pool", 1)
    answer = run_mining(labelling, processes, "pool", command, LOCAL, job)
    assert (answer.status, answer.body["size"], answer.body["version"]) == (201, 4, head)
    assert not folder.exists()
    for tree in ({"runs": ["second"]}, {"runs": ["../first"]}):
        with pytest.raises(ProblemError, match="no run"):
            plan_mining(labelling, processes, "pool", tree, folder)
    for tree in (
        {"runs": []},
        {"runs": [1]},
        {"runs": ["first"], "strategy": "--out"},
        {"runs": ["first"], "out": "x"},
    ):
        with pytest.raises(ProblemError, match="body"):
            plan_mining(labelling, processes, "pool", tree, folder)
