"""`headway lineage`: weights are followed back to runs, data sets and parents; what does not fit any more is said."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests._support import digits, headway, packed_digits, refused, write_recipe

from headway.core.errors import UsageError
from headway.core.run_folder import RunFolder, collect_provenance
from headway.data import opening
from headway.export.manifest import Manifest, TargetEntry, write_manifest
from headway.lifecycle.interchange.lineage import Lineage, describe_lineage, trace_lineage
from headway.lifecycle.interchange.open_lineage import list_events
from headway.lifecycle.store.store import Store
from headway.training.fork import fork_run


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_run(folder: Path, *, weights: str = "", recipe: dict[str, Any] | None = None, **about: Any) -> RunFolder:
    """A run folder with the files of a finished run, but for what a lineage does not read."""
    run = RunFolder.create(folder)
    run.write_json("provenance", collect_provenance({}, folder.parent, **about))
    run.weights_path.write_text(weights or folder.name)
    run.recipe_path.write_text(yaml.safe_dump({"name": "digits", **(recipe or {})}))
    if "parents" not in about:
        run.write_json("summary", {"finished": True, "step": 10})
    return run


def make_ensemble(folder: Path, *members: RunFolder) -> RunFolder:
    run = RunFolder.create(folder)
    run.write_json("provenance", collect_provenance({}, folder.parent))
    entries = [{"run": str(one.folder), "sha256": sha256(one.weights_path)} for one in members]
    run.write_json("ensemble", {"format": 1, "rule": "mean of probabilities", "members": entries})
    return run


def make_export(folder: Path, *members: RunFolder) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_text("graph")
    entries = [{"folder": str(one.folder), "sha256": sha256(one.weights_path)} for one in members]
    manifest = Manifest(
        task="class",
        activation="softmax",
        names=("a",),
        outputs=1,
        threshold=None,
        size=(8, 8),
        channels=1,
        crop_share=1.0,
        scaled=False,
        decoder="pillow",
        files={"model.onnx": sha256(folder / "model.onnx")},
        targets={"onnx": TargetEntry(file="model.onnx", precision="fp32")},
        run={"folder": str(members[0].folder), "members": entries},
        data={},
        versions={"headway": "0.1.0"},
        processor={},
    )
    write_manifest(folder, manifest)
    return folder


def kinds(lineage: Lineage) -> list[tuple[str, str]]:
    return [(origin.kind, Path(origin.path).name) for origin in lineage.origins]


def test_a_run_names_its_data_and_what_became_of_them(tmp_path: Path) -> None:
    packed = packed_digits(tmp_path, per_class=2, split=0.5)
    data = opening.open(packed / "train")
    fingerprint = data.fingerprint
    data.close()
    recipe = {"data": {"train": "digits.packed/train", "eval": "digits.packed/eval"}}
    run = make_run(tmp_path / "run", recipe=recipe, fingerprint=fingerprint, samples=10)
    said = headway("lineage", run.weights_path)
    for line in (
        f"{run.folder} (run)",
        f"weights   sha256 {sha256(run.weights_path)}",
        f"train     {packed / 'train'}, 10 samples, fingerprint {fingerprint}, unchanged, packed from ",
        f"eval      {packed / 'eval'}",
    ):
        assert line in said.out
    (origin,) = headway("lineage", run.folder, "--json").json()["origins"]
    assert (origin["kind"], origin["name"], origin["state"]) == ("run", "digits", "finished")
    assert [one["state"] for one in origin["data"]] == ["unchanged", "unknown"]
    # Packed again with other images: no longer what it was trained on.
    shutil.rmtree(packed)
    shutil.rmtree(tmp_path / "digits")
    packed_digits(tmp_path, per_class=3, split=0.5)
    assert trace_lineage(run.folder).origins[0].data[0].state == "changed"
    shutil.rmtree(packed)
    assert trace_lineage(run.folder).origins[0].data[0].state == "missing"


def test_passwords_in_addresses_are_not_shown(tmp_path: Path) -> None:
    recipe = {"data": {"train": "https://ann:secret@example.com/pack?token=secret"}}
    run = make_run(tmp_path / "run", recipe=recipe, fingerprint="a" * 64, samples=3)
    lineage = trace_lineage(run.folder)
    assert "example.com/pack" in describe_lineage(lineage)
    assert "secret" not in describe_lineage(lineage) + json.dumps([lineage.to_json(), list_events(lineage)])


def test_parents_are_followed_to_the_end(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first")
    weights = "first/weights.safetensors"
    second = make_run(tmp_path / "second", recipe={"model": {"weights": weights}})
    forked = make_run(tmp_path / "forked", forked={"run": str(first.folder), "step": 5})
    parents = [{"run": str(one.folder), "sha256": sha256(one.weights_path)} for one in (second, forked)]
    # The recipe of an average is that of its first parent; it did not start from those weights.
    soup = make_run(tmp_path / "soup", recipe={"model": {"weights": weights}}, parents=parents)
    both = make_ensemble(tmp_path / "both", soup, first)
    export = make_export(tmp_path / "export", soup, first)
    lineage = trace_lineage(export / "model.onnx")
    assert kinds(lineage) == [
        ("export", "export"),
        ("weights", "soup"),
        ("run", "first"),
        ("run", "second"),
        ("run", "forked"),
    ]
    hows = {Path(origin.path).name: [parent.how for parent in origin.parents] for origin in lineage.origins}
    assert hows == {
        "export": ["exported", "exported"],
        "soup": ["averaged", "averaged"],
        "first": [],
        "second": ["starting weights (model.weights)"],
        "forked": ["forked at step 5"],
    }
    assert not any(parent.warning for origin in lineage.origins for parent in origin.parents)
    said = describe_lineage(lineage)
    assert said.count("see above") == 2
    assert f"  exported: {soup.folder} (weights of other runs)" in said
    assert kinds(trace_lineage(both.folder))[:2] == [("ensemble", "both"), ("weights", "soup")]


def test_changed_moved_and_missing_parents_are_told_apart(tmp_path: Path) -> None:
    changed, moved, gone = (make_run(tmp_path / "runs" / name) for name in ("changed", "moved", "gone"))
    both = make_ensemble(tmp_path / "both", changed, moved, gone)
    changed.weights_path.write_text("others")
    moved.folder.rename(tmp_path / "runs/elsewhere")
    shutil.rmtree(gone.folder)
    lineage = trace_lineage(both.folder, tmp_path / "runs")
    assert [parent.warning.split(" ")[:3] for parent in lineage.origins[0].parents] == [
        ["its", "weights", "have"],
        ["it", "was", str(moved.folder)],
        ["it", "is", "not"],
    ]
    assert kinds(lineage)[1:] == [("run", "changed"), ("run", "elsewhere"), ("missing", "gone")]
    said = describe_lineage(lineage)
    assert "Note: its weights have changed since" in said
    assert f"member: {gone.folder} (not there)" in said


def test_weights_alone_are_found_by_their_sha256(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/sweep/trials/7", weights="these")
    copy = Path(shutil.copy(run.weights_path, tmp_path / "model.safetensors"))
    assert trace_lineage(copy, tmp_path / "runs").origins[0].path == str(run.folder)
    copy.write_text("those")
    said = refused("lineage", copy, "--runs", tmp_path / "runs", status=2)
    assert "no run here has these weights" in said
    assert "--runs" in said


def test_a_cycle_and_a_long_chain_end(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", forked={"run": str(tmp_path / "two"), "step": 1})
    make_run(tmp_path / "two", forked={"run": str(one.folder), "step": 1})
    assert kinds(trace_lineage(one.folder)) == [("run", "one"), ("run", "two")]
    assert "see above" in describe_lineage(trace_lineage(one.folder))


def test_a_damaged_parent_is_named_and_a_damaged_target_refused(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    child = make_run(tmp_path / "child", forked={"run": str(parent.folder), "step": 1})
    (parent.folder / "provenance.json").write_text("{")
    assert kinds(trace_lineage(child.folder))[1][0] == "missing"
    assert "provenance.json is damaged" in describe_lineage(trace_lineage(child.folder))
    assert "provenance.json is damaged" in refused("lineage", parent.folder, status=1)
    assert "not a run folder" in refused("lineage", tmp_path, status=2)
    assert "no such file" in refused("lineage", tmp_path / "none", status=2)
    assert "--events" in refused("lineage", child.folder, "--namespace", "x", status=2)


@given(
    st.dictionaries(
        st.sampled_from(
            ["parents", "forked", "command", "versions", "git", "base", "started", "fingerprint", "samples"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["run", "step"]), inner),
            max_leaves=4,
        ),
    )
)
def test_no_provenance_breaks_it(about: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run")
        run.write_json("provenance", about)
        run.recipe_path.write_text("data: [1]\nmodel: 3\n")
        lineage = trace_lineage(run.folder, Path(folder))
        assert describe_lineage(lineage)
        for event in list_events(lineage):
            check_event(event)


REQUIRED = ("eventTime", "producer", "schemaURL", "run", "job")
"""Of a RunEvent, by the JSON schema of OpenLineage 2-0-2."""
OF_FACETS = {
    "version": ("datasetVersion",),
    "jobType": ("processingType", "integration"),
    "sourceCodeLocation": ("type", "url"),
    "processing_engine": ("version",),
    "ownership": ("owners",),
    "inputStatistics": (),
    "outputStatistics": (),
}


def check_event(event: dict[str, Any]) -> None:
    """Holds an event against the schema: required entries, kinds, and formats of times, addresses and UUIDs."""
    assert all(event[name] for name in REQUIRED)
    assert event["eventType"] in ("START", "COMPLETE", "ABORT")
    assert datetime.fromisoformat(event["eventTime"]).tzinfo is not None
    assert event["schemaURL"] == "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
    assert str(UUID(event["run"]["runId"])) == event["run"]["runId"]
    for named in (event["job"], *event["inputs"], *event["outputs"]):
        assert isinstance(named["namespace"], str)
        assert isinstance(named["name"], str)
        facets = {**named.get("facets", {}), **named.get("inputFacets", {}), **named.get("outputFacets", {})}
        for name, facet in facets.items():
            assert ":" in facet["_producer"]
            assert facet["_schemaURL"].startswith("https://openlineage.io/spec/facets/")
            assert all(facet[entry] for entry in OF_FACETS[name])
    for facet in event["run"]["facets"].values():
        assert facet["_schemaURL"].startswith("https://openlineage.io/spec/facets/")


def test_events_of_a_whole_family_fit_together(tmp_path: Path) -> None:
    address = "s3://bucket/packs/digits"
    first = make_run(tmp_path / "first", recipe={"data": {"train": address}}, fingerprint="a" * 64, samples=7)
    parents = [{"run": str(first.folder), "step": 4}]
    soup = make_run(tmp_path / "soup", parents=parents)
    make_export(tmp_path / "export", soup)
    events = tmp_path / "events.jsonl"
    headway("lineage", tmp_path / "export", "--events", events, "--namespace", "team")
    found = [json.loads(line) for line in events.read_text().splitlines()]
    for event in found:
        check_event(event)
        assert event["job"]["namespace"] == "team"
    assert [found.index(event) for event in sorted(found, key=lambda event: event["eventTime"])] == [*range(len(found))]
    by_run: dict[str, list[dict[str, Any]]] = {}
    for event in found:
        by_run.setdefault(event["run"]["runId"], []).append(event)
    assert len(by_run) == 3
    assert all([event["eventType"] for event in one] == ["START", "COMPLETE"] for one in by_run.values())
    ends = {one[1]["job"]["facets"]["jobType"]["jobType"]: one[1] for one in by_run.values()}
    (data,) = ends["TRAINING"]["inputs"]
    assert (data["namespace"], data["name"]) == ("s3://bucket", "packs/digits")
    assert data["facets"]["version"]["datasetVersion"] == "a" * 64
    assert data["inputFacets"]["inputStatistics"]["rowCount"] == 7
    # What one run gives, the next one takes: by name and by version.
    (given_weights,) = ends["TRAINING"]["outputs"]
    assert given_weights["facets"]["version"]["datasetVersion"] == sha256(first.weights_path)
    for giver, taker in (("TRAINING", "AVERAGE"), ("AVERAGE", "EXPORT")):
        (output,), (taken,) = ends[giver]["outputs"], ends[taker]["inputs"][-1:]
        assert (output["namespace"], output["name"], output["facets"]) == (
            taken["namespace"],
            taken["name"],
            taken["facets"],
        )
    assert {Path(one["name"]).name for one in ends["EXPORT"]["outputs"]} == {"pipeline.json", "model.onnx"}


def test_a_run_that_is_not_at_its_end_has_a_start_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run.folder / "summary.json").unlink()
    (event,) = list_events(trace_lineage(run.folder))
    assert event["eventType"] == "START"
    identity = event["run"]["runId"]
    run.write_json("summary", {"finished": False, "step": 3})
    # Resumed and moved, it is the same run.
    run.note_resume(3, 1)
    (tmp_path / "elsewhere").mkdir()
    moved = run.folder.rename(tmp_path / "elsewhere/other-name")
    events = list_events(trace_lineage(moved))
    assert [one["eventType"] for one in events] == ["START", "ABORT"]
    assert {one["run"]["runId"] for one in events} == {identity}
    # Another run of the same second, such as the next trial of a sweep.
    other = make_run(tmp_path / "next", recipe={"seed": 2})
    assert {one["run"]["runId"] for one in list_events(trace_lineage(other.folder))} != {identity}


@pytest.mark.check
def test_real_runs_ensembles_soups_forks_and_exports_are_traced(tmp_path: Path) -> None:
    """Of the real commands: whatever they write into provenance.json is understood."""
    packed_digits(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml")
    for seed in ("1", "2"):
        headway("train", recipe, f"seed={seed}", "--run", tmp_path / "runs" / seed)
    first = tmp_path / "runs/1"
    weights = f"model.weights={first / 'weights.safetensors'}"
    headway("train", recipe, weights, "seed=3", "--run", tmp_path / "runs/3")
    runs = [tmp_path / "runs/2", tmp_path / "runs/3"]
    headway("ensemble", *runs, "--out", tmp_path / "both")
    headway("ensemble", *runs, "--soup", "uniform", "--out", tmp_path / "soup")
    headway("ensemble", first, "--snapshots", "--out", tmp_path / "snapshots")
    headway("export", tmp_path / "both", "--out", tmp_path / "export")
    step = int(sorted(first.glob("checkpoints/step-*"))[0].name.removeprefix("step-"))
    fork = fork_run(first, step, tmp_path / "runs/fork", {}, "a test")
    assert kinds(trace_lineage(tmp_path / "export")) == [
        ("export", "export"),
        ("run", "2"),
        ("run", "3"),
        ("run", "1"),
    ]
    assert kinds(trace_lineage(tmp_path / "both"))[0] == ("ensemble", "both")
    assert kinds(trace_lineage(tmp_path / "soup")) == [("weights", "soup"), ("run", "2"), ("run", "3"), ("run", "1")]
    assert kinds(trace_lineage(fork.folder)) == [("run", "fork"), ("run", "1")]
    (origin, *members) = trace_lineage(tmp_path / "snapshots").origins
    assert all(parent.how == "member" and not parent.warning for parent in origin.parents)
    assert {member.kind for member in members} == {"weights", "run"}
    for target in ("export", "soup", "snapshots"):
        for event in list_events(trace_lineage(tmp_path / target)):
            check_event(event)
    data = trace_lineage(first).origins[0].data
    assert [one.state for one in data] == ["unchanged", "unknown"]
    with pytest.raises(UsageError, match="not a run folder"):
        trace_lineage(tmp_path / "runs")


def test_a_version_of_a_store_names_who_set_its_labels(tmp_path: Path) -> None:
    """Train from it, change it afterwards: the lineage still tells of the version that was trained on."""
    store = Store.make(tmp_path / "store")
    store.create("digits", splits={"train": 1.0})
    images = digits(tmp_path / "digits", per_class=1)
    added = store.add("digits", images, by="ann", message="first ones")
    names = [sample.name for sample in store.list_samples("digits")]
    labelled = store.label("digits", {names[0]: "9", names[1]: "9"}, by="eve", message="second thoughts").version
    data = opening.open(f"store:{store.folder}//digits@{labelled.version}/train")
    fingerprint = data.fingerprint
    data.close()
    address = f"store:{store.folder}//digits@{labelled.version}/train"
    recipe = {"data": {"train": address}}
    run = make_run(tmp_path / "run", recipe=recipe, fingerprint=fingerprint, samples=10)
    store.remove("digits", names[:3], by="someone else")
    (found,) = trace_lineage(run.folder).origins[0].data
    assert (found.version, found.state, found.fingerprint) == (labelled.version, "unchanged", fingerprint)
    # Whoever set a label to what it was already has set nothing.
    counts = {credit.by: credit.labels for credit in found.labels}
    assert sum(counts.values()) == 10
    assert counts["ann"] == 10 - counts["eve"]
    assert 1 <= counts["eve"] <= 2
    said = headway("lineage", run.weights_path).out
    assert f"digits@{labelled.version}/train, 10 samples, v2 by eve: second thoughts, fingerprint {fingerprint}" in said
    assert f"labels    {counts['ann']} by ann, {counts['eve']} by eve" in said
    event = list_events(trace_lineage(run.folder))[-1]
    check_event(event)
    (taken,) = event["inputs"]
    assert (taken["namespace"], taken["name"]) == (f"store:{store.folder}", "digits/train")
    assert taken["facets"]["version"]["datasetVersion"] == labelled.version
    assert {owner["name"] for owner in taken["facets"]["ownership"]["owners"]} == {"ann", "eve"}
    assert added.version.version != labelled.version
    # Without the store, the recipe still says which version it was.
    shutil.rmtree(store.folder)
    (found,) = trace_lineage(run.folder).origins[0].data
    assert (found.version, found.state, found.labels) == (labelled.version, "missing", ())
