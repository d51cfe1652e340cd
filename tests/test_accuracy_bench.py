"""What the accuracy benches stand on: the port, results that a later call goes on from, sweeps, tables, verdicts."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bench import time_to_accuracy
from bench._accuracy import airbench, batch_arms, batch_curve, batch_table
from bench._accuracy.airbench import Arm, How, Images
from bench._accuracy.batch_arms import CELLS, SEEDS, TUNING_SEED, Cell, at_edge, sweep
from bench._accuracy.batch_worker import train
from bench._accuracy.costs import airbench_cost, passes, recipe_cost
from bench._accuracy.ours import kinds_of_step
from bench._accuracy.ours import recipe as fast_recipe
from bench._accuracy.results import Results, digest, made_by, sources
from bench._accuracy.workers import WorkerEndedError, work
from bench._common import Claim
from tests._support import NET, packed_digits

from headway.core.recipe import load
from headway.model import cifar_net
from headway.train.evaluate import views
from headway.train.recipe import TrainRecipe

FP32 = How("fp32", False)
CPU = torch.device("cpu")


def photographs(count: int) -> torch.Tensor:
    """Bytes [n, 32, 32, 3] whose neighbours are alike."""
    noise = torch.rand(count, 3, 36, 36, generator=torch.Generator().manual_seed(0))
    return (F.avg_pool2d(noise, 5, stride=1) * 255).byte().permute(0, 2, 3, 1).contiguous()


@pytest.fixture(scope="module")
def images() -> Images:
    return Images(photographs(60), torch.arange(60) % 10, CPU, torch.float32)


def test_whitened_patches_are_white(images: Images) -> None:
    """An eigenvalue v gives the variance v / (v + 5e-4), and nothing is correlated."""
    layer = airbench.network((8, 8, 8))[0]
    assert isinstance(layer, torch.nn.Conv2d)
    airbench.whiten(layer, images.normal)
    out = layer(images.normal).detach().transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(out[12:], -out[:12])
    patches = F.unfold(images.normal.double(), 2).transpose(0, 1).flatten(1)
    values = torch.linalg.eigvalsh(patches @ patches.T / patches.shape[1]).flip(0)
    moment = out[:12] @ out[:12].T / out.shape[1]
    torch.testing.assert_close(moment, torch.diag(values / (values + 5e-4)), atol=2e-3, rtol=1e-3)


def test_the_port_is_the_network_of_the_library(images: Images) -> None:
    """Two programs of one paper: the same parameters give the same numbers."""
    torch.manual_seed(0)
    port, ours = airbench.network((8, 16, 16)), cifar_net(widths=(8, 16, 16))
    values = list(port.state_dict().values())
    assert [value.shape for value in values] == [value.shape for value in ours.state_dict().values()]
    ours.load_state_dict(dict(zip(ours.state_dict(), values, strict=True)))
    for mode in (False, True):  # training moves the statistics
        arm = Arm(FP32, CPU, 10, (8, 16, 16), 60)
        arm.net.load_state_dict(port.state_dict())
        arm.net.train(mode)
        ours.train(mode)
        torch.testing.assert_close(arm.logits(images.normal), ours(images.normal))


def test_six_views_are_those_of_the_library(images: Images) -> None:
    theirs, mine = airbench.views(images.normal), list(views(images.normal, flip=True, shift=1))
    assert sum(weight for weight, _ in theirs) == 1

    def by_weight(found: list[tuple[float, torch.Tensor]]) -> list[tuple[float, float, float]]:
        return sorted((weight, view[0, 0, 0, 0].item(), view[1, 2, 31, 0].item()) for weight, view in found)

    assert torch.allclose(torch.tensor(by_weight(theirs)), torch.tensor(by_weight(mine)))


def test_every_second_epoch_mirrors_what_the_other_did_not(images: Images) -> None:
    torch.manual_seed(3)
    images.prepare()
    side = slice(airbench.TRANSLATE, -airbench.TRANSLATE)
    assert images._padded is not None
    first = images._padded[:, :, side, side]
    as_is = (first == images.normal).flatten(1).all(1)
    mirrored = (first == images.normal.flip(3)).flatten(1).all(1)
    assert (as_is ^ mirrored).all()
    assert 10 < int(as_is.sum()) < 50


def test_windows_are_moved_by_up_to_two_pixels_both_ways(images: Images) -> None:
    torch.manual_seed(0)
    padded = F.pad(images.normal, (2,) * 4, "reflect")
    found = set()
    for one, whole in zip(airbench.moved(padded, 32), padded, strict=True):
        places = [
            (down, right)
            for down in range(5)
            for right in range(5)
            if torch.equal(whole[:, down : down + 32, right : right + 32], one)
        ]
        assert places
        found.update(places)
    assert len(found) > 15


def test_an_epoch_serves_whole_batches_and_no_image_twice(images: Images) -> None:
    images.prepare()
    batches = list(images.epoch(1, 25))
    assert [len(labels) for _, labels in batches] == [25, 25]


def test_slow_weights_hold_back_and_end_as_the_network(images: Images) -> None:
    """A decay of 0 is nothing; of 1 takes the network back to the slow weights."""
    net = airbench.network((8, 8, 8))
    slow = airbench.SlowWeights(net)
    begun = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        net[-1].weight.add_(1)  # type: ignore[operator]
    slow.update(0.75)
    torch.testing.assert_close(net.state_dict()["7.weight"], begun["7.weight"] + 0.25)
    with torch.no_grad():
        net[-1].weight.add_(5)  # type: ignore[operator]
    slow.update(1.0)
    torch.testing.assert_close(net.state_dict()["7.weight"], begun["7.weight"] + 0.25)
    slow.update(0.0)
    torch.testing.assert_close(net.state_dict()["7.weight"], begun["7.weight"] + 0.25)


def test_the_rate_is_a_triangle() -> None:
    values = [airbench.factor(step, 475) for step in range(476)]
    assert (values[0], max(values), values[109]) == (0.2, 1.0, 1.0)
    assert values[475] == pytest.approx(0.07)


def test_warming_up_leaves_no_trace(images: Images) -> None:
    torch.manual_seed(0)
    arm = Arm(FP32, CPU, 10, (8, 8, 8), 30)
    before = {name: value.clone() for name, value in arm.net.state_dict().items()}
    seen = set()
    arm.net.register_forward_hook(lambda net, given, _: seen.add((net.training, len(given[0]), given[0].stride())))
    arm.warm_up(images.normal[:30], images.labels[:30], images.normal[:20])
    evaluated = {(False, 20, view.stride()) for _, view in airbench.views(images.normal[:20])}
    assert {one for one in seen if not one[0]} == evaluated, "every kind of view of a batch of the evaluation"
    assert arm.net.training
    assert all(torch.equal(before[name], value) for name, value in arm.net.state_dict().items())
    assert not arm.optimizer.state
    assert arm.net[0].bias.requires_grad  # type: ignore[union-attr]


def test_the_port_costs_what_airbench_publishes_and_ours_two_thirds() -> None:
    """0.36e15 operations, of which whole batches and what has no gradient leave 0.335e15."""
    port = airbench_cost(airbench.WIDTHS, airbench.EPOCHS)
    assert 2 * port == pytest.approx(0.335e15, rel=0.01)
    assert recipe_cost(fast_recipe(Path("packed")).recipe) / port < 0.7


def test_the_costs_are_those_of_whole_epochs_as_the_loader_serves_them() -> None:
    full = fast_recipe(Path("packed")).recipe
    sides = [24] * 3 + [28] * 2 + [32] * 3
    by_epoch = [passes(airbench.WIDTHS, side, epoch < 3) for epoch, side in enumerate(sides)]
    assert recipe_cost(full) == pytest.approx(50_000 * sum(by_epoch))
    fine = fast_recipe(Path("packed"), ["data.progressive={start: 24, until_epoch: 4, step: 1}"]).recipe
    assert recipe_cost(fine) == pytest.approx(
        50_000 * sum(passes(airbench.WIDTHS, min(32, 24 + 2 * epoch), epoch < 3) for epoch in range(8))
    )


def test_warming_up_meets_every_kind_of_step_and_no_other() -> None:
    """An epoch of 48.8 steps: the one that begins in epoch 2 and ends in epoch 3 is small, and nothing is frozen."""
    recipe, frozen = fast_recipe(Path("packed")).recipe, ("^whiten",)
    assert kinds_of_step(recipe, (32, 32), 390, 50_000) == [((24, 24), ()), ((28, 28), frozen), ((32, 32), frozen)]
    more = ["data.progressive={start: 24, until_epoch: 4, step: 1}", "model.freeze_after.0.after_epochs=1.5"]
    fine = kinds_of_step(fast_recipe(Path("packed"), more).recipe, (32, 32), 390, 50_000)
    assert [(side, when == frozen) for (side, _), when in fine] == [
        (24, False), (26, False), (26, True), (28, True), (30, True), (32, True)
    ]  # fmt: skip


def test_the_fast_recipe_is_read() -> None:
    recipe = fast_recipe(Path("packed"), ["seed=3"]).recipe
    assert (recipe.seed, recipe.data.train, recipe.evaluate.shift) == (3, "packed/train", 1)


def test_kept_runs_are_found_again_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    results = Results(tmp_path / "new/results.jsonl")
    assert results.all() == []
    results.add({"arm": "a", "seed": 1, "accuracy": 0.5})
    with results.path.open("a") as file:
        file.write('{"arm": "b", "se')
    results.add({"arm": "b", "seed": 1})
    assert [one["arm"] for one in results.all()] == ["a", "b"]
    assert results.where(arm="a", seed=1) == [{"arm": "a", "seed": 1, "accuracy": 0.5}]
    assert results.where(arm="a", seed=2) == []


def test_two_writers_tear_no_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"

    def write(name: int) -> None:
        for number in range(20):
            Results(path).add({"name": name, "number": number, "text": "x" * 3000})

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Results(path).all()) == 80


def test_settings_are_told_apart_by_a_digest() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


def test_code_is_told_apart_by_its_contents_and_places(tmp_path: Path) -> None:
    (tmp_path / "a/__pycache__").mkdir(parents=True)
    (tmp_path / "a/one.py").write_text("1")
    found = [sources(tmp_path)]
    (tmp_path / "a/__pycache__/one.pyc").write_text("made")
    assert sources(tmp_path) == found[0]
    (tmp_path / "a/one.py").write_text("2")
    found.append(sources(tmp_path))
    (tmp_path / "a/one.py").rename(tmp_path / "a/two.py")
    found.append(sources(tmp_path))
    assert len(set(found)) == 3


def test_kept_runs_of_other_code_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time_to_accuracy.settings_of({})
    assert time_to_accuracy.settings_of({"port": {"epochs": 1}}) != before
    for name in ("PORT", "OURS"):
        with monkeypatch.context() as patched:
            patched.setattr(time_to_accuracy, name, time_to_accuracy.ROOT / "bench/_common.py")
            assert time_to_accuracy.settings_of({}) != before


def test_commits_stand_beside_a_table_and_mixed_ones_are_named() -> None:
    assert made_by([]) == "no runs yet"
    assert made_by(["a", "a"]) == "commit: a (2 runs)"
    assert made_by(["a", "b-dirty", "a"]) == "mixed: runs of 2 commits, a (2 runs), b-dirty (1 runs)"
    key = batch_arms.Job(CELLS[0], 0.1, TUNING_SEED).key()
    tables = batch_table.Tables([{**key, "accuracy": 0.5, "commit": "abc"}])
    assert tables.made_by() == "commit: abc (1 runs)"
    assert [row[-1] for row in tables.rows()][:2] == ["commit", "abc"]


def pair(
    seed: int, port: float, ours: float, *, ratio: float = 0.6, probe: float = 1.0, views: float = 0.011
) -> list[dict[str, Any]]:
    both = []
    for arm, accuracy, seconds, speed in (("port", port, 100.0, 1.0), ("headway", ours, 100 * ratio, probe)):
        one = {"arm": arm, "seed": seed, "seconds": seconds, "tta_seconds": 0.0, "probe_s": [speed, speed]}
        both.append(one | {"accuracy": accuracy - views, "accuracy_tta": accuracy})
    return both


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([pair(1, 0.910, 0.912), pair(2, 0.909, 0.909), pair(3, 0.911, 0.910)], []),
        ([pair(1, 0.91, 0.92), pair(2, 0.91, 0.92)], ["2 pairs of at least 3"]),
        (
            [pair(1, 0.91, 0.91), pair(2, 0.91, 0.91), pair(3, 0.91, 0.91, probe=1.2)],
            ["2 pairs of at least 3, and 1 on a machine whose speed changed"],
        ),
        (
            [pair(seed, 0.90, 0.92) for seed in (1, 2, 3)],
            [
                "the port reaches 90.00% with the views, not 91.0% +- 0.3%",
                "the port reaches 88.90% without views, not 89.9% +- 0.3%",
            ],
        ),
        (
            [pair(seed, 0.91, 0.92, views=0.016) for seed in (1, 2, 3)],
            ["the port reaches 89.40% without views, not 89.9% +- 0.3%"],
        ),
        ([pair(seed, 0.91, 0.908) for seed in (1, 2, 3)], ["ours is 0.20 points less accurate, and 0.00 are allowed"]),
        ([], ["0 pairs of at least 3"]),
    ],
)
def test_a_ratio_is_void_unless_both_are_as_accurate_as_they_should(runs: list[list[Any]], said: list[str]) -> None:
    kept = [one for both in runs for one in both]
    for with_views in (True, False):
        found = time_to_accuracy.verdict(kept, views=with_views)
        if with_views:
            assert found.reasons == said
        assert (found.reasons == []) == (said == []), "of both ratios, whichever accuracy is wrong"
    assert all(ratio == pytest.approx(0.6) for ratio in found.ratios)


def test_the_claim_is_the_mean_of_the_pairs() -> None:
    found = time_to_accuracy.claim("time_ratio", [0.5, 0.6, 1.0])
    assert found.value == pytest.approx(0.7)
    assert found.how.startswith("mean of 3 pairs, median 0.600, from 0.500 to 1.000")


def test_a_sweep_is_extended_until_its_best_is_inside() -> None:
    def accuracy(lr: float) -> float:
        return 1 - abs(lr - 1.6) / 10

    grid, kept = [0.1, 0.2, 0.4, 0.8], dict[float, float]()
    while (asked := sweep(kept, grid))[0]:
        kept |= {lr: accuracy(lr) for lr in asked[0]}
    assert asked[1] == 1.6
    assert sorted(kept) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
    kept = {}
    while (asked := sweep(kept, grid))[0]:
        kept |= {lr: -lr for lr in asked[0]}
    assert asked[1] == pytest.approx(0.1 / 16), "and no further than four times"
    assert at_edge(kept)
    assert not at_edge({0.1: 0.5, 0.2: 0.6, 0.4: 0.5})
    assert sweep(dict.fromkeys(grid, -math.inf), grid) == ([], None), "where nothing reaches the target"


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


def test_a_table_is_made_of_kept_runs_alone() -> None:
    arms = dict.fromkeys(batch_arms.NAMES, 0.70) | {"sgd": 0.75, "ghost": 0.745, "linear": 0.70}
    kept = records(arms)
    per_cell = len(SEEDS) + batch_arms.GRID
    assert len(kept) == per_cell * len(CELLS) + len(SEEDS) * (2 + 3), "longer ones until they are equal"
    tables = batch_table.Tables(kept)
    claims, lacking = tables.claims()
    assert lacking == []
    values = {claim.name: claim.value for claim in claims}
    assert values["gap_2048"] == pytest.approx(0.5 + 0.1792)
    assert values["recovered_8192"] == pytest.approx(0.045 / 0.057936)
    assert (values["epochs_to_equal_2048"], values["epochs_to_equal_8192"]) == (24, 36)
    text = "\n".join(" ".join(row) for row in [*tables.rows(), *tables.decks(), *tables.sweeps()])
    assert "missing" not in text
    assert "not yet" not in text
    assert batch_table.Tables([{**one, "settings": "other"} for one in kept]).tuned(CELLS[0]) == {}


def test_claims_of_a_learning_rate_at_the_edge_are_void() -> None:
    tables = batch_table.Tables(records(dict.fromkeys(batch_arms.NAMES, 0.7) | {"sgd": 0.75}, sloping="linear"))
    claims, lacking = tables.claims()
    assert [claim.name for claim in claims][:1] == ["gap_2048"]
    edge = "the best learning rate lies at the edge of its sweep: + linear scaling, warm-up at 8192"
    assert f"recovered_8192: void, {edge}" in lacking
    assert sum("(at the edge)" in row[2] for row in tables.rows()) == 2
    claims, lacking = batch_table.Tables(records(dict.fromkeys(batch_arms.NAMES, 0.7), sloping="ghost")).claims()
    assert claims == []
    assert all("+ ghost batches of 128 at " in one for one in lacking)


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
    recipe = load(path, (), TrainRecipe).recipe
    names = {"lars": "lars", "no_decay": "lars", "ghost": "lars", "nag": "nag", "lbsgd": "lbsgd"}
    assert recipe.optimizer.name == names.get(cell.arm, "sgd")
    assert recipe.optimizer.no_decay == (cell.arm in ("no_decay", "ghost", "linear_no_decay"))
    assert recipe.batch * (recipe.optimizer.batch_scale if cell.arm == "lbsgd" else 1) == cell.batch
    assert recipe.epochs == batch_arms.EPOCHS
    norm = recipe.model.batch_norm
    assert norm is not None
    assert (norm.recompute_batches or 0) * recipe.batch == batch_arms.STATISTICS


def test_steps_to_a_target_lie_between_two_evaluations() -> None:
    assert batch_curve.steps_to([(10, 0.2), (20, 0.5), (30, 0.7), (40, 0.5)]) == 25
    assert batch_curve.steps_to([(10, 0.2)]) is None


def test_three_regimes() -> None:
    steps = [1000, 500, 260, 160, 110, 101, 98]
    names = ["perfect", "perfect", "perfect", "diminishing", "diminishing", "none", "none"]
    assert batch_curve.regimes(steps) == names
    assert batch_curve.regimes([8, 4, 2]) == ["perfect"] * 3
    assert batch_curve.regimes([8, 8, 8]) == ["perfect", "none", "none"]
    assert batch_curve.regimes([8]) == ["perfect"]


def reaching(batch: int, steps: float, best: int = 1) -> list[dict[str, Any]]:
    """Kept runs of a batch, whose first grid has the best learning rate at this place."""
    kept = []
    for lr in batch_curve.first_grid(batch):
        for seed in (TUNING_SEED, *SEEDS):
            taken = int(steps * (1 + abs(lr / batch_curve.first_grid(batch)[best] - 1)))
            key = batch_curve.Job(batch, lr, seed).key()
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
