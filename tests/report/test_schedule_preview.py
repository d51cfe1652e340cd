"""`headway schedule`: what it draws is what a run does, without the network and without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._support import command, finished, headway, packed_digits, records, refused, write_recipe
from torch import Tensor
from torch.optim import Optimizer

from headway.optim import LBSGD, RMSpropSGD
from headway.report import schedule_preview_page
from headway.report.schedule_preview import SchedulePreview, build_preview

GOYAL = {
    "optimizer": {"name": "nag", "lr": {"base": 0.1, "per": 256}},
    "schedule": {"name": "multi_step", "milestones_epochs": [30, 60, 80], "warmup_epochs": 5, "warmup_start": "base"},
    "batch": 8192,
    "epochs": 90,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preview")
    packed_digits(folder)
    write_recipe(
        folder / "recipe.yaml",
        schedule={"name": "cosine", "warmup_epochs": 0.5},
        batch_growth={"milestones_epochs": [1], "factor": 2},
        epochs=3,
    )
    return folder


@pytest.fixture
def goyal(tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "goyal.yaml", **GOYAL)


def test_it_draws_what_the_run_then_does(folder: Path, tmp_path: Path) -> None:
    said = finished("schedule", folder / "recipe.yaml", "--json")
    assert said.status == 0, said.err
    found = said.json()
    assert (found["samples"], found["steps"], found["epochs"]) == (180, 12, 3)
    assert [(turn["step"], turn["batch"], turn["what"]) for turn in found["turns"]] == [
        (0, 30, "start"),
        (3, 30, "end of the warm-up, peak"),
        (6, 60, "batch grows to 60"),
        (11, 60, "last step"),
    ]
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run")
    trained = records(tmp_path / "run", "train")
    assert len(trained) == len(found["curve"]["epoch"]) == found["steps"]
    for place, record in enumerate(trained):
        assert found["curve"]["lr"][place] == pytest.approx(record["lr"], abs=1e-12)
        assert found["curve"]["batch"][place] == record["batch"]
        assert found["curve"]["epoch"][place] * 180 == pytest.approx(record["position"] - record["batch"])


def test_numbers_at_every_turn(goyal: Path) -> None:
    said = headway("schedule", goyal, "--samples", "1281167")
    rows = [re.split(r"\s{2,}", line.strip()) for line in said.out.splitlines()[-6:]]
    assert rows == [
        ["0", "0.00", "0.1", "0.9", "8,192", "start"],
        ["782", "5.00", "3.2", "0.9", "8,192", "end of the warm-up, peak"],
        ["4,692", "30.00", "0.32", "0.9", "8,192", "falls to x 0.1"],
        ["9,384", "60.00", "0.032", "0.9", "8,192", "falls to x 0.01"],
        ["12,512", "80.00", "0.0032", "0.9", "8,192", "falls to x 0.001"],
        ["14,074", "89.99", "0.0032", "0.9", "8,192", "last step"],
    ]
    assert said.out.startswith("run: 14,075 steps, 90 epochs of 1,281,167 samples\n\nlearning rate\n       3.2 ")
    assert said.err == (
        "A batch of 8,192 is taken by nag, which treats all layers alike: above 4,096 that often loses accuracy. "
        "Set optimizer.name to soap, lars or lamb.\n"
    )


def test_falls_after_250_steps(tmp_path: Path) -> None:
    """FactorScheduler(step=250, factor=0.5) with 256 of 50,000 samples a step: every 250 * 256 / 50,000 epochs."""
    steps = {"batch": 256, "epochs": 1000 * 256 / 50_000, "optimizer": {"lr": 1.0}}
    path = write_recipe(tmp_path / "r.yaml", schedule={"name": "step", "every_epochs": 1.28, "gamma": 0.5}, **steps)
    found = headway("schedule", path, "--samples", "50000", "--json").json()
    assert [(turn["step"], turn["lr"]) for turn in found["turns"]] == [
        (0, 1), (250, 0.5), (500, 0.25), (750, 0.125), (999, 0.125),
    ]  # fmt: skip


@settings(deadline=None, max_examples=30)
@given(
    columns=st.integers(1, 200),
    epochs=st.floats(0.001, 5),
    batch=st.integers(1, 500),
    growth=st.none() | st.just({"milestones_epochs": [0.0005], "factor": 3}),
    shape=st.sampled_from(
        ["{name: constant}", "{name: triangular}", "{name: step, every_epochs: 0.0009}", "{name: polynomial, power: 2}"]
    ),
)
def test_any_run_can_be_drawn(
    folder: Path, columns: int, epochs: float, batch: int, growth: dict[str, Any] | None, shape: str
) -> None:
    found = build_preview(
        folder / "recipe.yaml",
        (
            f"epochs={epochs}",
            f"batch={batch}",
            f"batch_growth={'null' if growth is None else growth}",
            f"schedule={shape}",
        ),
        samples=1000,
    )
    for blocks in (True, False):
        text = schedule_preview_page.format_preview(found, columns, blocks=blocks)
        assert text.isascii() or blocks
        widest = max(map(len, text.split("\n\n")[1].splitlines()))
        assert widest <= max(columns, schedule_preview_page.MARGIN + 22)
    turns, curve = found.list_turns(), found.sample_curve()
    assert (turns[0].step, turns[-1].step) == (0, found.steps - 1) or found.steps == 1
    assert curve[-1].step == found.steps - 1
    highest = max(point.lr for point in curve)
    assert max(turn.lr for turn in turns) == pytest.approx(highest, rel=0.2 if "triangular" in shape else 1e-9)


@pytest.mark.check
def test_a_terminal_without_blocks_gets_plain_letters(goyal: Path) -> None:
    out = {}
    for encoding in ("ascii", "utf-8"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "80"}
        arguments = command("schedule", goyal, "--samples", "1281167")
        done = subprocess.run(arguments, capture_output=True, check=True, env=environment)
        out[encoding] = done.stdout.decode(encoding)
        assert max(map(len, out[encoding].splitlines())) <= 80
    assert "\u2588" in out["utf-8"]
    assert "###" in out["ascii"]


def test_a_schedule_needs_no_torch(goyal: Path, tmp_path: Path) -> None:
    arguments = ["schedule", str(goyal), "--samples", "1000", "--page", str(tmp_path / "page.html"), "--json"]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "headway", *arguments], capture_output=True, text=True, check=True
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "headway.report.schedule_preview" in modules
    assert "torch" not in modules


def test_the_page_has_the_curves_and_where_each_number_came_from(goyal: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    said = headway("schedule", goyal, "--samples", "1281167", "--page", page, "--json")
    assert said.json()["page"] == str(page)
    assert f"Wrote {page}." in said.err
    html = page.read_text()
    for text in ("Learning rate, logarithmic", "Momentum", "Batch", "auto: 0.1 x 8,192 / 256", "14,075"):
        assert text in html
    assert "by its powers of ten" not in schedule_preview_page.render_preview(shown(goyal, "schedule={name: cosine}"))


def shown(path: Path, *overrides: str) -> SchedulePreview:
    return build_preview(path, overrides, samples=50_000)


def test_the_momentum_is_that_of_the_optimizer(goyal: Path) -> None:
    assert shown(goyal).momentum == 0.9
    assert (
        shown(goyal, "optimizer={name: adamw, lr: 0.001, betas: [0.8, 0.99]}", "schedule={name: cosine}").momentum
        == 0.8
    )


def followed(make: Callable[[Tensor], Optimizer], found: SchedulePreview) -> list[float]:
    """What a weight loses in each step, with a gradient of 1, as the trainer sets the rates."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer, out = make(weight), []
    for step in range(found.steps):
        for group in optimizer.param_groups:
            group["lr"] = found.lr * found.schedule(found.plan.find_position(step))
        before = weight.item()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        out.append(before - weight.item())
    return out


@pytest.mark.parametrize("warmup", ["linear", "power2", "sqrt"])
@pytest.mark.parametrize("scale", [4, 7])
def test_lbsgd_is_drawn_as_it_steps(goyal: Path, warmup: str, scale: int) -> None:
    recipe = f"{{name: lbsgd, lr: 0.1, momentum: 0, batch_scale: {scale}, warmup: {warmup}, warmup_epochs: 1.5}}"
    more = (f"optimizer={recipe}", "schedule={name: cosine}", "batch=100", "epochs=3.7")
    found = build_preview(goyal, more, samples=1000)
    options: dict[str, Any] = {"batch_scale": scale, "warmup": warmup, "warmup_epochs": 1.5, "steps_per_epoch": 10}
    lost = followed(lambda weight: LBSGD([weight], 1.0, momentum=0, **options), found)
    assert found.steps == len(lost) == 37
    full = found.steps // scale * scale
    for step, way in enumerate(lost):
        drawn = found.compute_point(step)
        assert drawn.batch == 100 * scale
        if (step + 1) % scale:
            assert way == 0
        else:
            assert drawn.lr == found.compute_point(step - scale + 1).lr == pytest.approx(way, rel=1e-9)
        assert (drawn.lr == 0) == (step >= full)
    said = {turn.step: turn.what for turn in found.list_turns()}
    assert "end of LBSGD's warm-up" in said[14]
    assert "macro-batch not full: no update" in said[full]
    assert max(turn.lr for turn in found.list_turns()) == pytest.approx(max(point.lr for point in found.sample_curve()))
    assert found.to_json()["curve"]["batch"][0] == 100 * scale
    assert f"37 steps, {scale} of them a macro-batch" in schedule_preview_page.format_preview(found, 80)


def test_rmsprop_sgd_is_drawn_as_it_steps(goyal: Path, tmp_path: Path) -> None:
    recipe = "{name: rmsprop_sgd, lr: 0.5, lr_rmsprop: 0.01, momentum: 0, smoothing: 0, center_epochs: 1.2}"
    more = (f"optimizer={recipe}", "optimizer.period_epochs=1.5", "schedule={name: cosine}", "batch=100", "epochs=4")
    found = build_preview(goyal, more, samples=1000)
    options: dict[str, Any] = {"center_epochs": 1.2, "period_epochs": 1.5, "steps_per_epoch": 10, "eps": 1e-12}
    lost = followed(
        lambda weight: RMSpropSGD([weight], 1.0, rmsprop=0.01 / 0.5, momentum=0, smoothing=0, **options), found
    )
    for step, way in enumerate(lost):  # a gradient of 1 over its root of 1
        drawn = found.compute_point(step)
        assert drawn.lr_rmsprop is not None
        assert drawn.lr + drawn.lr_rmsprop == pytest.approx(way, rel=1e-9)
    assert [(turn.step, turn.lr_rmsprop == 0) for turn in found.list_turns() if "SGD" in turn.what] == [
        (12, False),
        (20, True),
    ]
    text = schedule_preview_page.format_preview(found, 80)
    assert "learning rate of RMSprop" in text
    assert " + 0 of RMSprop  " in text
    assert "Learning rate of RMSprop" in schedule_preview_page.render_preview(found)
    assert len(found.to_json()["curve"]["lr_rmsprop"]) == len(found.to_json()["curve"]["lr"])
    plain = build_preview(goyal, (), samples=50_000)
    assert "lr_rmsprop" not in plain.to_json()["curve"]
    assert "RMSprop" not in schedule_preview_page.render_preview(plain)


def test_a_macro_batch_that_is_never_full_is_refused(goyal: Path) -> None:
    wrong = ("optimizer={name: lbsgd, lr: 1, batch_scale: 64, warmup_epochs: 0}", "schedule={name: cosine}")
    said = refused("schedule", goyal, *wrong, "epochs=1", "--samples", "131072", status=2)
    assert "weights move once in 64 steps, and the run has 16, so nothing would be trained" in said


def test_a_run_of_few_large_steps_and_one_of_another_length_are_warned_of(goyal: Path) -> None:
    def said(*overrides: str, samples: int = 720) -> str:
        return " ".join(build_preview(goyal, ("schedule={name: constant}", *overrides), samples).warnings)

    few = said("batch=8192", "epochs=20")
    assert "The run has 2 steps of 8,192 samples, 11.4 epochs each, and ends after 22.76 epochs in place of 20" in few
    assert "So few steps hardly train: set batch to less, or train for longer." in few
    assert "warmup_epochs: 5}" in few
    assert "warmup_epochs: 0.75}" in said("batch=8192", "epochs=3")
    assert said("batch=720", "epochs=9") == ""  # small steps, if few
    far = said("batch=500", "epochs=1")
    assert "The run has 1 step of 500 samples, 0.694 epochs each, and ends after 0.6944 epochs in place of 1" in far
    assert "hardly train" not in far
    assert "The run has" not in said("batch=8192", "epochs=90", samples=50_000)


def test_a_set_that_is_not_there_needs_its_size(goyal: Path, folder: Path, tmp_path: Path) -> None:
    sentence = "there is no packed data set here, so its size is unknown. Give the number of images: --samples 50000"
    assert sentence in refused("schedule", goyal, status=2)
    assert sentence in refused("schedule", goyal, "data.train=s3://bucket/train", status=2)
    assert refused("schedule", tmp_path / "none.yaml", status=2).startswith(str(tmp_path / "none.yaml"))
    assert "there is no key 'epoch'" in refused("schedule", goyal, "epoch=3", status=2)
    assert headway("schedule", goyal, "--samples", "0", status=2).out == ""
    synthetic = headway("schedule", folder / "recipe.yaml", "data={train: synthetic}", "--json").json()
    assert synthetic["samples"] == 50_000


def test_the_page_has_words_for_what_is_unset_and_an_axis_from_zero(goyal: Path) -> None:
    made = {one.name: one for one in schedule_preview_page._build_panels(shown(goyal, "schedule=constant"))}
    low, high = made["lr"].data["y_range"]
    assert (low, high) == (0.0, pytest.approx(1.1 * made["lr"].data["series"][0]["y"][0]))
    cells = {key: value for key, value, _ in made["recipe"].data["rows"]}
    assert cells["batch_growth"] == "unset"
    assert cells["optimizer.no_decay"] in ("true", "false")
    assert not {"None", "True", "False"} & set(cells.values())
    moving = {one.name: one for one in schedule_preview_page._build_panels(shown(goyal))}
    assert moving["lr"].data["y_range"] is None


def test_a_warm_up_from_the_base_of_a_larger_batch_is_told(goyal: Path) -> None:
    """It would begin at the rate at which it ends."""
    said = "The warm-up of 5 epochs begins at the rate at which it ends, so that nothing rises: take a larger batch"
    assert any(said in one for one in shown(goyal, "batch=128").warnings)
    assert not any("warm-up of" in one for one in shown(goyal).warnings)
