"""What bench.time_to_accuracy stands on: the port, results that a later call goes on from, verdicts."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bench import time_to_accuracy
from bench._accuracy import airbench, record
from bench._accuracy.airbench import AIRBENCH, How, Images
from bench._accuracy.arm import METHODS
from bench._accuracy.costs import method_cost, passes, recipe_cost
from bench._accuracy.ours import kinds_of_step
from bench._accuracy.ours import recipe as fast_recipe
from bench._accuracy.record import RECORD
from bench._accuracy.results import FOLDER, Results, digest, hashes, sources, this_machine

from headway.model import cifar_net
from headway.training.evaluate import build_views

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


RECORDS = {"activation": "silu", "batchnorm_momentum": record.KEPT_STATISTICS, "scaling": 1 / 16}


@pytest.mark.parametrize(("method", "options"), [(AIRBENCH, {}), (RECORD, RECORDS)])
def test_the_ports_are_networks_of_the_library(images: Images, method: airbench.Method, options: Any) -> None:
    """Two programs of one paper: the same parameters give the same numbers."""
    torch.manual_seed(0)
    ours = cifar_net(widths=(8, 16, 16), **options)
    for mode in (False, True):  # training moves the statistics
        arm = method.build(FP32, CPU, 10, (8, 16, 16), 60)
        values = list(arm.net.state_dict().values())
        assert [value.shape for value in values] == [value.shape for value in ours.state_dict().values()]
        ours.load_state_dict(dict(zip(ours.state_dict(), (value.clone() for value in values), strict=True)))
        arm.net.train(mode)
        ours.train(mode)
        torch.testing.assert_close(arm.logits(images.normal), ours(images.normal))


def test_six_views_are_those_of_the_library(images: Images) -> None:
    theirs, mine = airbench.views(images.normal), list(build_views(images.normal, flip=True, shift=1))
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


@pytest.mark.parametrize("method", [AIRBENCH, RECORD])
def test_warming_up_leaves_no_trace(images: Images, method: airbench.Method) -> None:
    torch.manual_seed(0)
    arm = method.build(FP32, CPU, 10, (8, 8, 8), 30)
    groups = [optimizer.state_dict()["param_groups"] for optimizer, _ in arm.optimizers]
    before = {name: value.clone() for name, value in arm.net.state_dict().items()}
    seen = set()
    arm.net.register_forward_hook(lambda net, given, _: seen.add((net.training, len(given[0]), given[0].stride())))
    held_out = [images.normal[:20], images.normal[:9]]
    arm.warm_up(images.normal[:30], images.labels[:30], held_out)
    evaluated = {(False, len(one), view.stride()) for one in held_out for _, view in airbench.views(one)}
    assert {one for one in seen if not one[0]} == evaluated, "every kind of view of batches of the evaluation"
    assert arm.net.training
    assert all(torch.equal(before[name], value) for name, value in arm.net.state_dict().items())
    assert not any(optimizer.state for optimizer, _ in arm.optimizers)
    assert [optimizer.state_dict()["param_groups"] for optimizer, _ in arm.optimizers] == groups
    assert arm.net[0].bias.requires_grad  # type: ignore[union-attr]


def test_the_port_costs_what_airbench_publishes_and_ours_less() -> None:
    """0.36e15 operations, of which whole batches and what has no gradient leave 0.335e15."""
    port = method_cost(AIRBENCH, airbench.WIDTHS, airbench.EPOCHS)
    assert 2 * port == pytest.approx(0.335e15, rel=0.01)
    # As docs/accuracy.md says.
    assert recipe_cost(fast_recipe(Path("packed")).recipe) / port == pytest.approx(0.848, abs=0.0005)


def test_the_costs_are_those_of_whole_epochs_as_the_loader_serves_them() -> None:
    more = ["epochs=8", "evaluate.every_epochs=8", "checkpoint.every_epochs=8", "model.freeze_after.0.after_epochs=3"]
    full = fast_recipe(Path("packed"), more).recipe
    sides = [24] * 4 + [28] * 3 + [32]
    by_epoch = [passes(airbench.WIDTHS, side, epoch < 3) for epoch, side in enumerate(sides)]
    assert recipe_cost(full) == pytest.approx(50_000 * sum(by_epoch))
    longer = fast_recipe(Path("packed"), [*more, "epochs=8.5", "model.freeze_after.0.after_epochs=3.25"]).recipe
    trained, frozen = (passes(airbench.WIDTHS, 24, is_trained) for is_trained in (True, False))
    more_by_epoch = [(trained - frozen) / 4, passes(airbench.WIDTHS, 32, False) / 2]
    assert recipe_cost(longer) == pytest.approx(50_000 * sum(by_epoch + more_by_epoch))
    fine = fast_recipe(Path("packed"), [*more, "data.progressive={start: 24, until_epoch: 4, step: 1}"]).recipe
    assert recipe_cost(fine) == pytest.approx(
        50_000 * sum(passes(airbench.WIDTHS, min(32, 24 + 2 * epoch), epoch < 3) for epoch in range(len(sides)))
    )


def test_warming_up_meets_every_kind_of_step_and_no_other() -> None:
    """An epoch of 97.7 steps: the one that begins in one epoch and ends in the next has the size of the first."""
    recipe, frozen = fast_recipe(Path("packed")).recipe, ("^whiten",)
    found = kinds_of_step(recipe, (32, 32), 1074, 50_000)
    assert found == [((24, 24), ()), *(((side, side), frozen) for side in (24, 28, 32))]
    more = ["data.progressive={start: 24, until_epoch: 4, step: 1}", "model.freeze_after.0.after_epochs=1.5"]
    fine = kinds_of_step(fast_recipe(Path("packed"), more).recipe, (32, 32), 1074, 50_000)
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


def test_kept_runs_of_another_recipe_or_port_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = time_to_accuracy.ours.RECIPE.read_text(encoding="utf-8")
    longer, commented = tmp_path / "longer.yaml", tmp_path / "commented.yaml"
    longer.write_text(recipe.replace("epochs: 11", "epochs: 12", 1))
    commented.write_text(f"# the same\n{recipe}")
    asked: dict[str, dict[str, Any]] = {"port": {}, "headway": {}, "record": {}}

    def now() -> list[str]:
        return [time_to_accuracy.settings_of(arm, asked) for arm in time_to_accuracy.ARMS]

    before = now()
    other = time_to_accuracy.ROOT / "bench/_common.py"
    for place, name, file, voided in (
        (time_to_accuracy, "ARM", other, [True, True, True]),
        (time_to_accuracy, "PORT", other, [True, True, True]),
        (time_to_accuracy, "RECORD", other, [False, False, True]),
        (time_to_accuracy, "OURS", other, [False, True, False]),
        (time_to_accuracy.ours, "RECIPE", longer, [False, True, False]),
        (time_to_accuracy.ours, "RECIPE", commented, [False, False, False]),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, file)
            assert [one != two for one, two in zip(now(), before, strict=True)] == voided
    asked["port"]["epochs"] = 1
    assert [one != two for one, two in zip(now(), before, strict=True)] == [True, False, False]


def test_our_kept_runs_count_until_a_file_changes_that_they_had_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, unused = "src/headway/used.py", "src/headway/unused.py"
    (tmp_path / "src/headway").mkdir(parents=True)
    for one in (used, unused):
        (tmp_path / one).write_text("before")
    monkeypatch.setattr(time_to_accuracy, "ROOT", tmp_path)
    monkeypatch.setattr(time_to_accuracy, "settings_of", lambda arm, asked: arm)
    results = Results(tmp_path / "results.jsonl")
    files = {used: hashes(tmp_path, [tmp_path / used])[used]}
    for arm, more in (("port", {}), ("headway", {"imported": [used], "code": time_to_accuracy.code_of([used])})):
        results.add({"arm": arm, "machine": this_machine(), "settings": arm, "seed": 1, **more})

    def counted() -> list[int]:
        return [len(time_to_accuracy.kept_runs(results, arm, {}, seed=1)) for arm in ("port", "headway")]

    assert counted() == [1, 1]
    (tmp_path / unused).write_text("after")
    assert counted() == [1, 1]
    assert not time_to_accuracy.changed(files, [used])
    (tmp_path / used).write_text("after")
    assert counted() == [1, 0]
    assert time_to_accuracy.changed(files, [used])
    (tmp_path / used).unlink()
    assert counted() == [1, 0]
    assert time_to_accuracy.changed(files, [used])


@pytest.mark.fresh
@pytest.mark.check
def test_an_arm_says_what_it_has_imported_of_the_library() -> None:
    code = "from bench._accuracy.arm import imported; print(*imported())"
    done = subprocess.run([sys.executable, "-c", code], cwd=time_to_accuracy.ROOT, capture_output=True, check=True)
    found = done.stdout.decode().split()
    assert {"src/headway/training/trainer.py", "src/headway/__init__.py", "native/winograd.cpp"} <= set(found)
    assert "src/headway/report/landscape.py" not in found
    assert not [one for one in found if not one.startswith(("src/headway/", "native/"))]


@pytest.mark.parametrize(
    ("asked", "compiled", "half", "said"),
    [
        (("fp16", True, "cuda"), "max-autotune", True, "fp16 weights, compiled, max-autotune"),
        (("bf16", True, "cuda"), "max-autotune", False, "bf16, compiled, max-autotune"),
        (("fp16", False, "cuda"), False, True, "fp16 weights, eager"),
        (("bf16", True, "cpu"), True, False, "bf16, compiled"),
        (("fp32", False, "cpu"), False, False, "fp32, eager"),
    ],
)
def test_ours_takes_the_ports_setting(asked: tuple[str, bool, str], compiled: Any, half: bool, said: str) -> None:
    recipe = fast_recipe(Path("packed"), time_to_accuracy.ours.taken_from(*asked)).recipe
    assert (recipe.precision, recipe.compile, recipe.half_weights) == (asked[0], compiled, half)
    assert time_to_accuracy.ours.how(recipe) == said


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


def test_the_ratio_to_the_record_asks_of_its_port_the_accuracy_with_views_alone() -> None:
    runs = [one for seed in (1, 2, 3) for one in pair(seed, 0.91, 0.91, views=0.02)]
    against = [one | ({"arm": "record"} if one["arm"] == "port" else {}) for one in runs]
    assert time_to_accuracy.verdict(against, views=True, against="record") == time_to_accuracy.Verdict([0.6] * 3, [])
    assert time_to_accuracy.verdict(against, views=True).reasons == ["0 pairs of at least 3"]
    low = [one | {"accuracy_tta": 0.90} for one in against]
    [said] = time_to_accuracy.verdict(low, views=True, against="record").reasons
    assert said == "the record's port reaches 90.00% with the views, not 91.0% +- 0.3%"


def test_the_steps_of_a_whole_training_are_those_of_the_kept_runs() -> None:
    """So that what `--in-turn` scales a short run to is what a whole run does."""
    results = Results(FOLDER / "time_to_accuracy.jsonl")
    asked: dict[str, dict[str, Any]] = {arm: {"epochs": method.epochs} for arm, method in METHODS.items()}
    asked["headway"] = {"overrides": []}
    for arm in time_to_accuracy.ARMS:
        newest = results.where(arm=arm)[-1]
        assert time_to_accuracy.count_steps(arm, asked[arm]) == newest["steps"], arm


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "three"])
def test_a_number_of_rounds_that_is_none_is_refused(text: str) -> None:
    assert time_to_accuracy.parse_rounds("3") == 3
    with pytest.raises(argparse.ArgumentTypeError, match="1 or more"):
        time_to_accuracy.parse_rounds(text)


def test_ratios_in_turn_are_of_the_same_round(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"port": [100.0, 200.0], "headway": [30.0, 100.0], "record": [60.0, 200.0]}
    time_to_accuracy.tell_in_turn(seconds, argparse.Namespace(quick=False, json=None))
    said = capsys.readouterr().out
    # Ratios of sums are 0.433 and 0.5.
    assert re.search(r"time_ratio_in_turn +0\.4 +\(mean of 2 rounds, .* Headway over the port\)", said)
    assert re.search(r"time_vs_record_in_turn +0\.5 +\(mean of 2 rounds, .* Headway over the record's port\)", said)


def test_matrices_padded_to_one_shape_are_orthogonalised_as_each_alone() -> None:
    torch.manual_seed(0)
    filters = [torch.randn(8, 3, 3, 3), torch.randn(16, 8, 3, 3), torch.randn(16, 1, 3, 3)]
    alone, padded = (record.orthogonalise(filters, None, as_one=as_one) for as_one in (False, True))
    for one, both, given in zip(alone, padded, filters, strict=True):
        torch.testing.assert_close(one, both)
        values = torch.linalg.svdvals(one.flatten(1))
        assert values.max() < 1.5
        assert values.median() > 0.6
        # The singular vectors stay: U f(S) V^T times the transpose of U S V^T is symmetric and positive.
        product = one.flatten(1) @ given.flatten(1).mT
        torch.testing.assert_close(product, product.mT, atol=1e-3, rtol=1e-3)
        assert torch.linalg.eigvalsh(product).min() > -1e-3


def test_filters_are_normalised_ever_less_often() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 3, 3, 3))
    muon, when = record.Muon([weight], 60, 0.0, "fp32"), []
    for step in range(1, 61):
        weight.grad = torch.randn_like(weight)
        with torch.no_grad():
            weight.mul_(2)
        muon.param_groups[0]["lr"] = 0.0
        muon.step()
        if weight.norm().item() == pytest.approx(8**0.5, rel=1e-5):
            when.append(step)
    apart = [after - before for before, after in pairwise(when)]
    assert when[0] == 2
    assert apart == sorted(apart)
    assert apart[-1] > 8


def test_jitter_adds_one_number_to_an_image_and_multiplies_it_by_another(images: Images) -> None:
    found, given = record.jitter(images.normal).flatten(1), images.normal.flatten(1)
    factors = found.std(1) / given.std(1)
    torch.testing.assert_close(found, (given + (found.mean(1) / factors - given.mean(1))[:, None]) * factors[:, None])
    shifts = found.mean(1) / factors - given.mean(1)
    for drawn, most in ((factors - 1, record.CONTRAST), (shifts, record.BRIGHTNESS)):
        assert 0.8 * most < drawn.abs().max() < 1.0001 * most


def test_the_least_sure_quarter_is_named_by_the_mean_of_six_views(images: Images) -> None:
    torch.manual_seed(0)
    arm = RECORD.build(FP32, CPU, 10, (8, 8, 8), 30)
    passes: list[int] = []
    arm.net.register_forward_hook(lambda net, given, _: passes.append(len(given[0])))
    found = record.accuracy_by_unsure(arm, images)
    assert passes == [60, *[15] * 6]
    arm.net.eval()
    with torch.no_grad():
        plain = arm.logits(images.normal)
        mean = torch.stack([arm.logits(view) for _, view in airbench.views(images.normal)]).mean(0)
    unsure = plain.softmax(1).amax(1).argsort()[:15]
    plain[unsure] = mean[unsure]
    assert found == pytest.approx((plain.argmax(1) == images.labels).double().mean().item())


def test_a_run_of_the_record_learns(images: Images) -> None:
    found = airbench.train(RECORD, images, images, FP32, seed=1, epochs=12, widths=(8, 8, 8))
    assert found["steps"] == 12
    assert found["accuracy"] > 0.25


def test_the_claim_is_the_mean_of_the_pairs() -> None:
    found = time_to_accuracy.claim("time_ratio", [0.5, 0.6, 1.0])
    assert found.value == pytest.approx(0.7)
    assert found.how.startswith("mean of 3 pairs, median 0.600, from 0.500 to 1.000")
