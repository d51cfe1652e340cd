"""bench._sweep.recurrent: its table and claims, from kept runs, and that its settings are those of the sweep file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench._accuracy.results import FOLDER, Results
from bench._arms import ROOT
from bench._sweep import recurrent
from bench._sweep.recurrent import ARMS, CELLS, EPOCHS, NETWORKS, SEEDS, TRUST, TUNING_SEED, Cell, Job, Table


def score(job: Job) -> float:
    """An accuracy that the arm, the batch, the place of the rate and the seed decide: the third rate is the best."""
    points = {"lars": 50.0, TRUST: 90.0}.get(job.cell.arm, 95.0) if job.cell.network == "recurrent" else 97.0
    rates = ARMS[job.cell.arm][1]
    off = abs(rates.index(job.lr) - (5 if job.cell.arm == "sgd" else 2))
    return (points - 0.01 * job.cell.batch - 3 * off + job.seed) / 100


def run_all() -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    while missing := Table(out).list_missing():
        out += [{**job.build_key(), "accuracy": score(job), "commit": "abc"} for job in missing]
    return out


def test_the_claims_follow_from_the_kept_runs_alone() -> None:
    kept = run_all()
    assert len(kept) == sum(len(ARMS[cell.arm][1]) + len(SEEDS) for cell in CELLS)
    table = Table(kept)
    assert table.find_best_rate(Cell("conv", 600, "lars")) == 3.0
    assert table.list_accuracies(Cell("recurrent", 32, "adam")) == pytest.approx([95.68, 96.68, 97.68])
    claims = {claim.name: claim for claim in table.build_claims()}
    assert {name: claim.value for name, claim in claims.items()} == pytest.approx(
        {
            **{f"recurrent_lars_gap_{batch}": 45 for batch in EPOCHS},
            **{f"conv_lars_gap_{batch}": 0 for batch in EPOCHS},
            **{f"recurrent_trust_gap_{batch}": 5 for batch in EPOCHS},
            "recurrent_batch_gap": 5.68,
            "conv_batch_gap": 5.68,
        }
    )
    assert not any("edge" in claim.how for claim in claims.values())
    rows = [row for row in table.build_rows()[1:] if "missing" not in " ".join(row)]
    assert [", the edge" in row[2] for row in rows] == [True] * len(rows) == [True] * 4, "of SGD"
    assert table.describe_commits() == f"commit: abc ({len(kept)} runs)"


def test_what_is_missing_makes_no_claim_and_other_settings_do_not_count() -> None:
    kept = run_all()
    without = [one for one in kept if (one["network"], one["arm"], one["seed"]) != ("conv", "lars", SEEDS[-1])]
    names = {claim.name for claim in Table(without).build_claims()}
    assert names == {claim.name for claim in Table(kept).build_claims()} - {
        f"conv_lars_gap_{batch}" for batch in EPOCHS
    }
    other = Table([{**one, "settings": "other"} for one in kept])
    assert other.build_claims() == []
    assert len(other.list_missing()) == sum(len(ARMS[cell.arm][1]) for cell in CELLS), "the seeds come after the rates"


def test_a_later_call_does_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, results, trees = run_all(), Results(tmp_path / "kept.jsonl"), []
    for one in kept[:-1]:
        results.add(one)

    def run(tree: dict[str, Any]) -> dict[str, Any]:
        trees.append(tree)
        return {"accuracy": kept[-1]["accuracy"]}

    monkeypatch.setattr(recurrent, "pack_digits", lambda folder: folder / "packed")
    options = argparse.Namespace(quick=False, minutes=0)
    recurrent.compare_optimizers(tmp_path, options, results, run)
    assert trees == [], "no time"
    options.minutes = None
    claims = recurrent.compare_optimizers(tmp_path, options, results, run)
    assert claims == Table(kept).build_claims()
    (tree,) = trees
    assert tree["data"]["train"] == f"{tmp_path}/packed/train"
    assert tree["optimizer"]["lr"] == kept[-1]["lr"]
    assert (tree["batch"], tree["seed"], tree["epochs"]) == (kept[-1]["batch"], SEEDS[-1], EPOCHS[kept[-1]["batch"]])


def test_the_sweep_file_has_the_same_settings() -> None:
    space = yaml.safe_load((ROOT / "recipes/digits-optimizers.space.yaml").read_text(encoding="utf-8"))
    parameters = space["parameters"]
    assert (space["method"], list(parameters)) == ("grid", ["optimizer", "batch", "epochs"])
    wanted = [{**given, "lr": lr} for given, rates in ARMS.values() for lr in rates]
    assert sorted(parameters["optimizer"]["choice"], key=repr) == sorted(
        ({key: one[key] for key in ("name", "trust", "lr") if key in one} for one in wanted), key=repr
    )
    assert parameters["batch"]["choice"] == list(EPOCHS)
    small, large = EPOCHS
    assert {recurrent.read_recipe_tree(network)["batch"] for network in NETWORKS} == {small}
    assert {recurrent.read_recipe_tree(network)["epochs"] for network in NETWORKS} == {EPOCHS[small]}
    assert parameters["epochs"] == {"choice": [EPOCHS[large]], "when": {"batch": large}}


@pytest.mark.check
def test_a_run_of_each_network_is_a_recipe_that_trains(tmp_path: Path) -> None:
    packed = str(recurrent.pack_digits(tmp_path))
    for cell in (Cell("recurrent", 32, TRUST), Cell("conv", 600, "adam")):
        tree = Job(cell, 0.01, TUNING_SEED).build_recipe(packed)
        found = recurrent.train(tree | {"epochs": 3 * cell.batch / 1438})
        assert found["steps"] == 3
        assert not found["diverged"]


def test_the_lab_shows_the_kept_runs() -> None:
    """If it fails, the settings have changed: run the bench again, and write its table into the lab."""
    table, lab = Table(Results(FOLDER / "recurrent.jsonl").all()), (ROOT / "docs/labs/recurrent.md").read_text("utf-8")
    assert table.list_missing() == []
    shown = lab.replace("**", "").replace(", the lowest", ", the edge")
    for _network, _batch, *cells in table.build_rows()[1:]:
        assert f"| {' | '.join(cells)} |" in shown
    claims = (ROOT / "docs/claims.md").read_text("utf-8")
    for claim in table.build_claims():
        half = claim.how.partition("+- ")[2].partition(";")[0]
        assert f"`{claim.name}`" in claims
        assert f"{claim.value:.1f} +- {half}" in claims, claim.name
