"""What bench.ladder stands on: its rungs are recipes, its lowest one is the recipe's mathematics, its verdicts hold."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from bench._arms import Comparison
from bench._ladder import decks, photographs, rungs, steps, train, tuned, tutorial
from bench._ladder.contestants import BATCH
from bench._ladder.decks import LEAST_ROUNDS, SAID, Found, Ratio, Said, quotient, verdict
from bench._ladder.lenet import MOST_MULTIPLY_ADDS, lenet
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import headway
from headway.core.recipe import read_recipe
from headway.model.model_size import measure_model_size
from headway.setup.recipe import TrainRecipe
from headway.training.trainer import Trainer

CPU = torch.device("cpu")
COUNTER = """
import time
from bench._peers.serve import argument, serve
asked = argument()
def batches():
    while True:
        time.sleep(0.002)
        yield asked["images"]
serve(batches(), version="1", kernel="none", drain=1, facts=lambda: {"waiting": 0.5})
"""


@pytest.fixture
def loose(tmp_path: Path) -> Path:
    """Two classes of 40 JPEG files of 32 x 32."""
    random = np.random.default_rng(1)
    for label in ("cats", "dogs"):
        (tmp_path / "loose" / label).mkdir(parents=True)
        for number in range(40):
            pixels = random.integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "loose" / label / f"{number:02d}.jpg", quality=95)
    return tmp_path / "loose"


@pytest.fixture
def trainer(loose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    """Of the tutorial's loop as a recipe."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = train.endless(rungs.write_recipe(tmp_path / "recipe.yaml", rungs.LENET, loose), ())
    yield made
    made.close()
    made.setup.inputs.close()


def test_the_network_is_as_small_as_is_said() -> None:
    found = measure_model_size(lenet(), torch.zeros(2, 3, 32, 32))
    assert found.multiply_adds == 651_720
    assert found.multiply_adds <= MOST_MULTIPLY_ADDS
    assert lenet(7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_a_photograph_is_its_pixels_and_its_class(loose: Path) -> None:
    images = tutorial.Photographs(loose)
    assert len(images) == 80
    for place, label in ((0, 0), (39, 0), (40, 1), (79, 1)):
        values, found = images[place]
        name = ("cats", "dogs")[label]
        pixels = np.array(Image.open(loose / name / f"{place % 40:02d}.jpg"))
        assert found == label
        assert values.is_contiguous()
        torch.testing.assert_close((values * 127.5 + 127.5).permute(1, 2, 0), torch.from_numpy(pixels).float())


def test_the_loop_of_a_tutorial_and_its_recipe_are_the_same_mathematics(trainer: Trainer) -> None:
    """Given the same batches, they move the weights alike."""
    setup, twin = trainer.setup, lenet(2)
    begun = {name: value.clone() for name, value in setup.model.state_dict().items()}
    twin.load_state_dict(begun)
    stream = iter(setup.batches(0))
    given_both = [(batch.images.clone(), batch.labels.clone()) for batch in islice(stream, 3)]
    stream.close()  # type: ignore[attr-defined]
    floats = [((images.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5, labels) for images, labels in given_both]
    assert list(islice(tutorial.steps(floats, twin, CPU), 3)) == [BATCH] * 3
    trainer.run(3)
    moved = [
        torch.cat([(value - begun[name]).flatten() for name, value in network.state_dict().items()])
        for network in (twin, setup.model)
    ]
    assert moved[0].norm() > 0
    # of steps as small as these the rounding of weights is a thousandth; a momentum of 0.89 would be more than 0.01
    assert (moved[0] - moved[1]).norm() < 5e-3 * moved[0].norm()


def test_a_recipe_goes_on_without_end_and_counts_its_images(trainer: Trainer) -> None:
    found = list(islice(train.batches(trainer), 4))
    assert all(images > 0 and images % BATCH == 0 for images in found)
    assert trainer.position == sum(found) + train.WARM_STEPS * BATCH
    assert trainer.position > len(trainer.setup.train or ()), "it goes through the set again"
    assert not trainer.finished
    assert 0 <= train.waiting(trainer) < 1


CHANGES = {
    "workers": {"data.threads", "data.prefetch_batches"},
    "packed": {"data.train"},
    "resident": {"data.cache"},
    "channels-last": {"channels_last"},
    "bf16": {"precision"},
    "compile": {"compile"},
    "batch": {"batch"},
    "batch, compiled": {"batch"},
}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("precisions", [("fp32",), ("fp32", "bf16")])
def test_each_rung_is_a_recipe_with_one_change_more(
    device_type: str, precisions: tuple[str, ...], tmp_path: Path
) -> None:
    ladder = rungs.rungs(device_type, precisions, tmp_path / "packed")
    recipe = rungs.write_recipe(tmp_path / "recipe.yaml", rungs.CIFAR_NET, tmp_path / "loose")
    assert [rung.name for rung in ladder] == ["tutorial", *CHANGES]
    seen = {"tutorial": dict(read_recipe(recipe, (), TrainRecipe).list_leaves())}
    before = seen["tutorial"]
    for name, overrides in rungs.recipes(ladder):
        now = dict(read_recipe(recipe, overrides, TrainRecipe).list_leaves())
        above = next(rung.above for rung in ladder if rung.name == name)
        kept = seen.get(above, seen.get("channels-last", before)) if above else before
        assert {key for key in now if now[key] != kept.get(key)} == CHANGES[name]
        before = seen[name] = now
    changing = [name for name, _ in rungs.recipes(ladder)]
    assert changing == [name for name in CHANGES if name != "bf16" or "bf16" in precisions]
    assert before["batch"] == rungs.LARGE
    assert before["precision"] == precisions[-1]


def counter(images: int) -> list[str]:
    return [sys.executable, "-c", COUNTER, json.dumps({"images": images})]


def test_a_rung_without_an_arm_is_a_row_and_nothing_is_compared_with_it(tmp_path: Path) -> None:
    ladder = rungs.rungs("cpu", ("fp32",), tmp_path)
    with Comparison(tmp_path) as arms:
        for place, rung in enumerate(ladder):
            if rung.name not in ("bf16", "packed"):
                arms.add(rung.name, counter(10**place))
        arms.run(3, 0.01)
        rows = {row[0]: row for row in rungs.rows(arms, ladder)[1:]}
        claims = rungs.claims(arms, ladder, rungs.LENET, "how")
        ratios = {name: arms.ratio(name, "tutorial") for name in arms.arms}
        compiled = arms.ratio("compile", "channels-last")
    assert list(rows) == [rung.name for rung in ladder]
    assert rows["packed"][2:] == rows["bf16"][2:] == ("-",) * 5
    assert "fp32 is kept" in rows["bf16"][1]
    assert rows["tutorial"][4:6] == ("-", "-")
    assert rows["compile"][4:] == (rungs.times(compiled), rungs.times(ratios["compile"]), "50.0%")
    assert rows["workers"][4] == rows["workers"][5], "the tutorial is the one before"
    last = ratios["batch, compiled"]
    assert last is not None
    assert [(claim.name, claim.value) for claim in claims] == [("ladder_total", last[0])]
    assert "(batch, compiled)" in claims[0].how
    assert rungs.claims(arms, ladder[:3], rungs.LENET, "how") == [], "its last rung was not there"


def test_what_compilation_makes_slower_ends_uncompiled(tmp_path: Path) -> None:
    ladder = rungs.rungs("cpu", ("fp32", "bf16"), tmp_path)
    rates = {"tutorial": 100, "bf16": 900, "compile": 300, "batch": 1600, "batch, compiled": 700}
    with Comparison(tmp_path) as arms:
        for name, images in rates.items():
            arms.add(name, counter(images))
        arms.run(3, 0.01)
        (claim,) = rungs.claims(arms, ladder, rungs.LENET, "how")
        rows = {row[0]: row for row in rungs.rows(arms, ladder)[1:]}
        assert claim.value == arms.ratio("batch", "tutorial")[0]  # type: ignore[index]
        assert rows["batch"][4] == rungs.times(arms.ratio("batch", "bf16")), "over the rung that it stands on"
        assert rows["batch, compiled"][4] == rungs.times(arms.ratio("batch, compiled", "compile"))


@pytest.mark.check
def test_the_lowest_rungs_train_in_processes_of_their_own(loose: Path, tmp_path: Path) -> None:
    headway.pack(loose, tmp_path / "packed", threads=1)
    ladder = rungs.rungs("cpu", ("fp32",), tmp_path / "packed")[:3]
    recipe = rungs.write_recipe(tmp_path / "recipe.yaml", rungs.LENET, loose)
    with Comparison(tmp_path) as arms:
        rungs.start(arms, ladder, rungs.LENET, recipe, loose)
        arms.run(1, 0.05)
        assert list(arms.arms) == ["tutorial", "workers", "packed"]
        assert all(turn.images_s > 0 for arm in arms.arms.values() for turn in arm.turns)
        (claim,) = rungs.claims(arms, ladder, rungs.LENET, "how")
    assert claim.value > 0


RATIOS = st.tuples(*[st.floats(0.01, 100)] * 3).map(sorted).map(lambda three: (three[1], three[0], three[2]))
RANGES = st.tuples(st.floats(0.01, 100), st.one_of(st.just(math.inf), st.floats(0.01, 100))).map(sorted)


@given(RATIOS, RANGES)
def test_a_verdict_is_of_the_whole_interval(ratio: Ratio, claimed: list[float]) -> None:
    said = Said("name", "deck", "text", "ratio", *claimed)
    inside = [claimed[0] <= end <= claimed[1] for end in ratio[1:]]
    found = verdict(said, Found(ratio, "how", LEAST_ROUNDS))
    if all(inside):
        assert found == "reproduced"
    elif any(inside) or ratio[1] < claimed[0] <= claimed[1] < ratio[2]:
        assert found == "not told apart"
    else:
        assert found == "refuted here"
    assert verdict(said, Found(None, "why")) == "not measured"
    assert verdict(said, Found(ratio, "how", LEAST_ROUNDS - 1)) == "too few rounds"
    with pytest.raises(ValueError, match="1 round or more"):
        Found(ratio, "its rounds were forgotten")


@given(RATIOS, RATIOS)
def test_a_quotient_holds_every_pair(one: Ratio, other: Ratio) -> None:
    middle, low, high = quotient(one, other)
    pairs = [a / b for a in one for b in other]
    assert low == pytest.approx(min(pairs))
    assert high == pytest.approx(max(pairs))
    assert low <= middle <= high


def test_what_was_measured_stands_beside_what_was_said() -> None:
    found = {
        "binary_gain": Found((3.0, 2.9, 3.1), "how", 7),
        "workers_minus_3": Found(None, "-1 workers"),
        "prefetch_gain": Found((1.5, 1.4, 1.6), "how", 7),
    }
    rows = decks.rows(found)[1:]
    assert [row[3:] for row in rows] == [
        ("1.5 [1.4, 1.6]", "reproduced"),
        ("-1 workers", "not measured"),
        ("3 [2.9, 3.1]", "refuted here"),
    ]
    assert [(claim.name, claim.value) for claim in decks.claims(found)] == [("prefetch_gain", 1.5), ("binary_gain", 3)]
    names = [said.name for said in SAID]
    assert len(set(names)) == len(names)
    assert all(said.low <= said.high for said in SAID)


def test_which_networks_and_batches_gain_most() -> None:
    gains: dict[tuple[str, int], Ratio] = {
        ("LeNet", 8): (2.0, 1.9, 2.1),
        ("LeNet", 64): (1.5, 1.4, 1.6),
        ("LeNet", 1024): (1.0, 0.9, 1.1),
        ("cifar_net", 8): (1.6, 1.5, 1.7),
        ("cifar_net", 1024): (1.2, 1.1, 1.3),
    }
    found = steps.compiled(gains, "how", 7)
    assert found["compile_small_batch"].ratio == pytest.approx((2, 1.9 / 1.1, 2.1 / 0.9))
    assert found["compile_small_network"].ratio == pytest.approx((1.25, 1.9 / 1.7, 2.1 / 1.5))
    assert steps.compiled({("LeNet", 8): gains["LeNet", 8]}, "how", 7) == {}
    assert set(steps.compiled({key: gains[key] for key in gains if key[1] == 8}, "how", 7)) == {"compile_small_network"}


def test_steps_take_turns_and_what_fails_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        "one": steps.Case(4),
        "two": steps.Case(8),
        "bad": steps.Case(8, ("device=cpu", "precision=fp16")),
    }
    sizes = steps.Sizes((rungs.LENET,), (), (), 3, 0.01)
    found = steps.rates(rungs.LENET, cases, tmp_path, sizes)
    said = capsys.readouterr().out
    assert "LeNet, bad: left out (RecipeError" in said
    assert list(found) == ["one", "two"]
    assert all(len(taken) == 3 and min(taken) > 0 for taken in found.values())
    ratio = steps.over(found, "two", "one")
    assert ratio is not None
    assert ratio[1] <= ratio[0] <= ratio[2]
    assert steps.over(found, "bad", "one") is None


def test_cifar_is_linked_whole_or_copied_in_part(
    loose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cifar").mkdir()
    loose.rename(tmp_path / "cifar/train")
    monkeypatch.setenv("HEADWAY_CIFAR10", str(tmp_path / "cifar"))
    whole, part = photographs.cifar(tmp_path / "whole", None), photographs.cifar(tmp_path / "part", 3)
    assert whole is not None
    assert part is not None
    assert len(headway.open(whole)) == 80
    assert len(headway.open(part)) == 6
    assert not list((tmp_path / "cifar").glob(".*")), "nothing is written beside the data"
    monkeypatch.setenv("HEADWAY_CIFAR10", str(tmp_path / "nothing"))
    assert photographs.cifar(tmp_path / "none", None) is None
    assert "set HEADWAY_CIFAR10" in capsys.readouterr().out


def test_no_photograph_is_enlarged(tmp_path: Path) -> None:
    for number, size in enumerate([(60, 50), (50, 90), (49, 200), (50, 50)]):
        (tmp_path / "all" / str(number)).mkdir(parents=True)
        Image.effect_mandelbrot(size, (-2, -1.5, 1, 1.5), 50).save(tmp_path / "all" / str(number) / "one.JPEG", "JPEG")
    assert photographs.squares(tmp_path / "all", tmp_path / "squares", (20, 50)) == 3
    for side in (20, 50):
        made = sorted((tmp_path / "squares" / str(side)).rglob("*.jpg"))
        assert [path.parent.name for path in made] == ["0", "1", "3"]
        for path in made:
            with Image.open(path) as image:
                assert image.size == (side, side)
    assert photographs.squares(tmp_path / "all", tmp_path / "larger", (20, 51)) == 0


def test_what_differs_between_two_recipes_is_said(tmp_path: Path) -> None:
    one = rungs.write_recipe(tmp_path / "one.yaml", rungs.LENET, tmp_path / "loose")
    other = tmp_path / "other.yaml"
    other.write_text(one.read_text().replace("channels_last: false", "channels_last: true").replace("threads: 1", ""))
    assert tuned.changes(one, one) == []
    assert tuned.changes(one, other) == [("channels_last", "false", "true"), ("data.threads", "1", "unset")]


def test_tune_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(tuned.TuneError, match=r"it ended with status \d: .*\w"):
        tuned.tuned(tmp_path / "nothing.yaml", tmp_path / "out.yaml", "")
