"""What bench.large_batch stands on: sweeps, tables and a curve made of kept runs, workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench._accuracy import batch_arms, batch_curve, batch_error, batch_noise, batch_table, batch_wide
from bench._accuracy.batch_arms import CELLS, SEEDS, TUNING_SEED, Cell
from bench._accuracy.batch_worker import train
from bench._accuracy.results import made_by
from bench._accuracy.workers import WorkerEndedError, work
from bench._common import Claim
from tests._support import NET, packed_digits

from headway.core.recipe import read_recipe
from headway.setup.recipe import TrainRecipe


def test_commits_stand_beside_a_table_and_mixed_ones_are_named() -> None:
    assert made_by([]) == "no runs yet"
    assert made_by(["a", "a"]) == "commit: a (2 runs)"
    assert made_by(["a", "b-dirty", "a"]) == "mixed: runs of 2 commits, a (2 runs), b-dirty (1 runs)"
    key = batch_arms.Job(CELLS[0], 0.1, TUNING_SEED).key()
    tables = batch_table.Tables([{**key, "accuracy": 0.5, "commit": "abc"}])
    assert tables.made_by() == "commit: abc (1 runs)"
    assert [row[-1] for row in tables.rows()][:2] == ["commit", "abc"]


def records(accuracy: dict[str, float], sloping: str = "") -> list[dict[str, Any]]:
    """What a results file holds once all is done, where accuracy depends on the arm, the batch and the rate alone; of
    the sloping arm the lowest rate is always the best."""
    out: list[dict[str, Any]] = []
    while missing := batch_table.Tables(out).missing():
        for job in missing:
            found = accuracy[job.cell.arm] - (job.cell.batch - 256) * 1e-6 + 0.008 * (job.cell.longer - 1)
            best = 0 if job.cell.arm == sloping else batch_arms.first_grid(job.cell)[1]
            found -= 1e-3 * abs(job.lr - best) / batch_arms.first_grid(job.cell)[1] + 1e-4 * job.seed
            out.append({**job.key(), "accuracy": found})
    return out


def test_the_wide_network_is_swept_around_the_best_rates_of_the_small_one() -> None:
    assert batch_wide.WideTable([]).missing() == [], "which are not known yet"
    kept = records(dict.fromkeys(batch_arms.NAMES, 0.70))
    while missing := batch_wide.WideTable(kept).missing():
        for job in missing:
            best = 2 * batch_arms.first_grid(job.cell)[1]
            found = 0.8 - 1e-5 * job.cell.batch - 1e-3 * abs(job.lr - best) / best
            kept.append({**batch_wide.key(job), "accuracy": found})
    # Half, once and twice the small one's best, and one more as twice is the best.
    assert sum(one["bench"] == "wide" for one in kept) == len(batch_wide.CELLS) * (3 + 1 + 1)
    claims, lacking = batch_wide.WideTable(kept).claims()
    assert lacking == []
    assert {claim.name: claim.value for claim in claims} == {
        "gap_2048_wide": pytest.approx(1.792),
        "gap_2048_same_wide": pytest.approx(1.792),
        "gap_8192_wide": pytest.approx(7.936),
    }
    assert batch_table.Tables(kept).mean(batch_arms.CELLS[0]) == batch_table.Tables(kept[:-20]).mean(
        batch_arms.CELLS[0]
    ), "and the small network's table leaves its runs out"


def test_a_table_is_made_of_kept_runs_alone() -> None:
    arms = dict.fromkeys(batch_arms.NAMES, 0.70) | {"sgd": 0.75, "ghost": 0.745, "linear": 0.70}
    kept = records(arms)
    per_cell = len(SEEDS) + batch_arms.GRID
    assert len(kept) == per_cell * len(CELLS) + len(SEEDS) * (2 + 3), "longer ones until they are equal"
    tables = batch_table.Tables(kept)
    claims, lacking = tables.claims()
    assert lacking == []
    values = {claim.name: claim.value for claim in claims}
    assert values["gap_2048_lars"] == pytest.approx(0.5 + 0.1792)
    assert values["gap_2048"] == values["gap_2048_same"] == pytest.approx(0.1792), "the best one is SGD here"
    assert values["gap_2048_alike"] == pytest.approx(0.1792), "the others have another schedule"
    assert values["accuracy_8192"] == pytest.approx(0.75 - 2e-4 - 0.007936)
    assert values["recovered_8192"] == pytest.approx(0.045 / 0.057936)
    assert (values["epochs_to_equal_2048"], values["epochs_to_equal_8192"]) == (24, 36)
    text = "\n".join(" ".join(row) for row in [*tables.rows(), *tables.decks(), *tables.sweeps()])
    assert "missing" not in text
    assert "not yet" not in text
    assert batch_table.Tables([{**one, "settings": "other"} for one in kept]).tuned(CELLS[0]) == {}


def test_claims_of_a_learning_rate_at_the_edge_are_void() -> None:
    tables = batch_table.Tables(records(dict.fromkeys(batch_arms.NAMES, 0.7) | {"sgd": 0.75}, sloping="linear"))
    claims, lacking = tables.claims()
    best = ["gap_2048", "gap_2048_alike", "gap_2048_same", "accuracy_8192"]
    assert [claim.name for claim in claims][:5] == [*best, "gap_2048_lars"]
    edge = "the best learning rate lies at the edge of its sweep: + linear scaling, warm-up at 8192"
    assert f"recovered_8192: void, {edge}" in lacking
    assert sum("(at the edge)" in row[2] for row in tables.rows()) == 2
    claims, lacking = batch_table.Tables(records(dict.fromkeys(batch_arms.NAMES, 0.7), sloping="ghost")).claims()
    assert [claim.name for claim in claims] == best
    assert all("+ ghost batches of 128 at " in one for one in lacking)


def test_the_best_arm_is_known_once_all_are() -> None:
    kept = records(dict.fromkeys(batch_arms.NAMES, 0.7) | {"muon": 0.8, "lars": 0.79})
    values = {claim.name: claim.value for claim in batch_table.Tables(kept).claims()[0]}
    assert values["gap_2048"] == pytest.approx(-10 + 0.1792)
    assert values["gap_2048_same"] == pytest.approx(0.1792)
    _, lacking = batch_table.Tables(one for one in kept if one["arm"] != "soap").claims()
    assert [f"{name}: runs are missing" in lacking for name in ("gap_2048", "gap_2048_same", "accuracy_8192")] == [
        True
    ] * 3
    kept = records(dict.fromkeys(batch_arms.NAMES, 0.7) | {"lars": 0.8})
    _, lacking = batch_table.Tables(kept).claims()
    assert "gap_2048_same: the best arm, + LARS, has no runs at 256" in lacking


def test_a_later_call_does_what_is_missing_and_no_more() -> None:
    kept = records(dict.fromkeys(batch_arms.NAMES, 0.7))
    lost = [one for one in kept if (one["arm"], one["batch"], one["seed"]) != ("lars", 2048, 2)]
    missing = batch_table.Tables(lost).missing()
    assert [(job.cell, job.seed) for job in missing] == [(Cell(2048, "lars"), 2)]
    (known,) = [one for one in kept if one not in lost]
    assert missing[0].key().items() <= known.items()
    empty = batch_table.Tables([])
    assert {job.seed for job in empty.missing()} == {TUNING_SEED}
    assert "missing" in " ".join(empty.rows()[1])
    assert empty.claims()[0] == []


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.arm}-{cell.batch}")
def test_every_arm_is_a_recipe(cell: Cell, tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(batch_arms.recipe(cell, 0.5, 1, "packed")))
    recipe = read_recipe(path, (), TrainRecipe).recipe
    names = {"lars": "lars", "no_decay": "lars", "ghost": "lars", "nag": "nag", "lbsgd": "lbsgd"}
    names |= {arm: arm for arm in batch_arms.MATRIX_ARMS} | {"muon_free": "muon"}
    assert recipe.optimizer.name == names.get(cell.arm, "sgd")
    own = (*batch_arms.MATRIX_ARMS, *batch_arms.ALIKE_ARMS)
    assert recipe.optimizer.no_decay == (cell.arm in ("no_decay", "ghost", "linear_no_decay", *own))
    assert recipe.batch * (recipe.optimizer.batch_scale if cell.arm == "lbsgd" else 1) == cell.batch
    assert recipe.epochs == batch_arms.EPOCHS
    norm = recipe.model.batch_norm
    assert norm is not None
    assert (norm.recompute_batches or 0) * recipe.batch == batch_arms.STATISTICS


def reaching(batch: int, steps: float, best: int = 1, optimizer: str = "sgd") -> list[dict[str, Any]]:
    """Kept runs of a batch, whose first grid has the best learning rate at this place."""
    kept = []
    grid = batch_curve.first_grid(batch, optimizer)
    for lr in grid:
        for seed in (TUNING_SEED, *SEEDS):
            taken = int(steps * (1 + abs(lr / grid[best] - 1)))
            key = batch_curve.Job(batch, lr, seed, optimizer).key()
            kept.append({**key, "diverged": False, "evaluations": [[taken, 0.6]]})
    return kept


def test_a_curve_is_drawn_as_far_as_it_is_known() -> None:
    curve = batch_curve.Curve([one for batch in batch_curve.BATCHES[:4] for one in reaching(batch, 64_000 / batch)])
    assert curve.perfect_to() == "runs are missing", "the next batch may scale as well"
    assert [(batch, regime) for batch, _, regime in curve.points()] == [
        (batch, "perfect") for batch in (64, 128, 256, 512)
    ]
    assert {job.batch for job in curve.missing()} == set(batch_curve.BATCHES[4:])
    drawn = curve.panels()[0].data["series"]
    assert [one["x"] for one in drawn] == [[64, 128, 256, 512]] * 2
    assert curve.rows()[5][4] == "missing"


def test_perfect_scaling_is_claimed_once_its_end_is_known() -> None:
    small = [one for batch in batch_curve.BATCHES[:3] for one in reaching(batch, 64_000 / batch)]
    ended = batch_curve.Curve([*small, *reaching(512, 200)]).perfect_to()
    assert isinstance(ended, Claim)
    assert ended.value == 256
    # A batch whose first grid does not come to the target: no more of it is tried, and it scales no further.
    never = [{**one, "evaluations": [[9, 0.1]]} for batch in batch_curve.BATCHES[3:] for one in reaching(batch, 1)]
    curve = batch_curve.Curve([*small, *never])
    assert curve.missing() == []
    assert curve.rows()[5][4] == "not reached"
    last = curve.perfect_to()
    assert isinstance(last, Claim)
    assert last.value == 256
    assert "no batch that reaches the target is beyond it" in last.how


def test_a_curve_whose_learning_rate_lies_at_the_edge_claims_nothing() -> None:
    kept = [one for batch in batch_curve.BATCHES[:3] for one in reaching(batch, 64_000 / batch)]
    for place in range(batch_curve.GRID + 4):  # of 512 the lowest is the best, however far the sweep goes
        lr = batch_curve.first_grid(512)[-1] / 2**place
        for seed in (TUNING_SEED, *SEEDS):
            key = batch_curve.Job(512, lr, seed).key()
            kept.append({**key, "diverged": False, "evaluations": [[200 - place, 0.6]]})
    found = batch_curve.Curve(kept)
    assert found.perfect_to() == "void, the best learning rate lies at the edge of its sweep: batch 512"
    assert "(at the edge)" in found.rows()[4][1]


def test_the_fastest_optimizer_at_a_large_batch_is_claimed_once_all_are_known() -> None:
    steps = {"sgd": 188, "lars": 170, "muon": 110, "soap": 120}
    kept = [one for name, taken in steps.items() for one in reaching(2048, taken, optimizer=name)]
    curves = [batch_curve.Curve(kept, name) for name in steps]
    found = batch_curve.claim_epochs(curves)
    assert isinstance(found, Claim)
    assert (found.name, found.value) == ("epochs_to_60_2048", pytest.approx(110 * 2048 / 50_000, rel=0.01))
    assert "SGD 7.7, LARS 7.0, Muon 4.5, SOAP 4.9" in found.how
    assert batch_curve.claim_epochs(curves[:3]) == "epochs_to_60_2048: needs the curves of SGD, LARS, Muon, SOAP"
    small = [one for batch in batch_curve.BATCHES[:3] for one in reaching(batch, 6400 / batch, optimizer="muon")]
    ended = batch_curve.Curve([*small, *reaching(512, 20, optimizer="muon")], "muon").perfect_to()
    assert isinstance(ended, Claim)
    assert (ended.name, ended.value) == ("perfect_scaling_to_muon", 256)
    assert batch_curve.Curve(small).points() == [], "runs of another optimizer are no runs of SGD"


def test_how_many_times_the_steps_sgd_needs_is_claimed_once_both_curves_are_there() -> None:
    batches = (batch_curve.FARTHEST // 2, batch_curve.FARTHEST)
    sgd = [one for batch in batches for one in reaching(batch, 1_638_400 / batch)]
    muon = [one for batch in batches for one in reaching(batch, 655_360 / batch, optimizer="muon")]
    curves = [batch_curve.Curve([*sgd, *muon], name) for name in ("sgd", "muon")]
    (found,) = batch_curve.claim_fewer_steps(curves)
    assert isinstance(found, Claim)
    assert (found.name, found.value) == ("sgd_steps_over_muon_8192", 2.5)
    assert found.how == "by batch: 4096 2.50, 8192 2.50"
    # The last rate of the sweep at the farthest batch is missing, and may be a better one.
    part = [one for one in muon if one["lr"] != muon[-1]["lr"]]
    (lacks,) = batch_curve.claim_fewer_steps([curves[0], batch_curve.Curve(part, "muon")])
    assert lacks == "sgd_steps_over_muon_8192: runs are missing, or do not reach the target; by batch: 4096 2.50"
    assert batch_curve.claim_fewer_steps(curves[1:]) == [], "there is nothing to compare with"


def test_the_error_is_that_of_one_rate_scaled_with_the_batch() -> None:
    trees = [
        batch_arms.recipe(job.cell, job.lr, job.seed, "packed") for job in batch_error.ErrorCurve([]).list_missing()
    ]
    assert len(trees) == len(batch_error.BATCHES) * len(SEEDS)
    assert {tree["optimizer"]["lr"] / tree["batch"] for tree in trees} == {batch_error.BASE_LR / 256}
    assert {tree["schedule"].get("warmup_start") for tree in trees if tree["batch"] <= 256} == {None}
    largest = trees[len(batch_error.BATCHES) - 1]
    assert (largest["batch"], largest["seed"], largest["schedule"]["warmup_start"]) == (16_384, SEEDS[0], 1 / 64)
    # Runs of the table count, those of another rate or a longer training do not.
    kept = [{**batch_error.build_job(256, seed).key(), "accuracy": 0.7 + 0.01 * seed} for seed in SEEDS]
    kept += [{**kept[0], "lr": 0.1, "accuracy": 0.1}, {**kept[0], "longer": 2.0, "accuracy": 0.1}]
    curve = batch_error.ErrorCurve(kept)
    assert curve.list_errors(256) == pytest.approx([29, 28, 27])
    assert [row[2] for row in curve.list_rows()[1:4]] == ["missing", "missing", "28.0 +- 1.0"]
    assert {job.cell.batch for job in curve.list_missing()} == set(batch_error.BATCHES) - {256}


@pytest.mark.parametrize("optimizer", batch_curve.NAMES)
def test_every_curve_is_of_a_recipe(optimizer: str, tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(batch_curve.recipe(batch_curve.Job(2048, 0.5, 1, optimizer), "packed")))
    assert read_recipe(path, (), TrainRecipe).recipe.optimizer.name == optimizer


def digits(folder: Path, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(NET)
    packed = packed_digits(folder)
    return {
        "data": {"train": f"{packed}/train", "eval": f"{packed}/eval", "threads": 1},
        "model": {"factory": f"{folder}/net.py:linear"},
        "optimizer": {"name": "sgd", "lr": 0.02},
        "batch": 30,
        "epochs": 2,
        "precision": "fp32",
        **changes,
    }


def test_a_run_of_the_table_says_how_it_ended(tmp_path: Path) -> None:
    found = train(digits(tmp_path))
    assert (found["steps"], found["diverged"]) == (12, False)
    assert found["accuracy"] == found["evaluations"][-1][1]
    assert [step for step, _ in found["evaluations"]] == [6, 12]
    wild = train(digits(tmp_path / "wild", optimizer={"name": "sgd", "lr": 1e38}))
    assert (wild["diverged"], wild["accuracy"]) == (True, 0.1)


@pytest.mark.check
def test_workers_do_all_jobs_and_give_up_with_a_run_that_fails(tmp_path: Path) -> None:
    tree, left = digits(tmp_path, epochs=1), [1, 2, 3]
    ended = dict[int, dict[str, Any]]()

    def done(job: int, found: dict[str, Any]) -> None:
        left.remove(job)
        ended[job] = found

    assert work(lambda: list(left), lambda job: {**tree, "seed": job}, done, workers=2, minutes=None)
    assert sorted(ended) == [1, 2, 3]
    assert len({json.dumps(found["evaluations"]) for found in ended.values()}) > 1
    left.append(4)
    assert not work(lambda: list(left), lambda job: tree, done, workers=1, minutes=0)
    with pytest.raises(WorkerEndedError, match="a run ended with status 1: what it said stands above"):
        work(lambda: list(left), lambda job: {"batch": 1}, done, workers=1, minutes=None)


@pytest.mark.parametrize("critical", [30.0, 1000.0, 50_000.0])
def test_the_critical_batch_of_a_curve_is_found(critical: float) -> None:
    steps = {64 * 2**power: 120 * (1 + critical / (64 * 2**power)) for power in range(9)}
    found, least = batch_noise.fit_critical_batch(steps)
    assert found == pytest.approx(critical, rel=0.01)
    assert least == pytest.approx(120, rel=0.01)
